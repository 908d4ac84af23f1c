"""The page of a platform's arithmetic: rent or buy."""

from examples.markdown import MADE, table

from paceline.config.hardware import Cluster
from paceline.config.prices import Prices
from paceline.plan.scale import checkpoint_bytes, storage_usd_per_month

BOUGHT_USD, UPKEEP_USD = 2.5e6, (150e3, 200e3, 50e3)
RUNS, HOURS = 100, 48.0


def page() -> str:
    """The page of the platform arithmetic."""
    prices = Prices.parse({"usd_per_gb_month": 0.02})
    eight = {"device": "H100-SXM", "devices_per_node": 8, "num_nodes": 8}
    cluster = Cluster.parse({**eight, "prices": prices})
    own = sum(UPKEEP_USD)
    cases = [
        ("64 GPUs for all 48 h of each run", 64 * RUNS * HOURS),
        ("the same, in use 60 % of that time", 64 * RUNS * HOURS * 0.6),
        ("64 GPUs in use 60 % of the year", 64 * 8760 * 0.6),
        ("8 GPUs a run", 8 * RUNS * HOURS),
    ]
    needed = (BOUGHT_USD / 1.5 + own) / (98 / 8)
    state = 420e9
    kept = storage_usd_per_month(cluster, state, 30)
    full = float(checkpoint_bytes(70e9))
    assert kept is not None
    power_usd = 64 * 0.7 * RUNS * HOURS * 0.10
    return f"""# Rent or buy: the arithmetic of a platform page

A page that is often quoted compares 8 H100 on demand at 98 USD an hour with 64 H100 bought for 2.5
M USD. Owning costs 150 K a year of depreciation and power, 200 K of an engineer and 50 K of
maintenance. At 60 % utilisation, for 100 runs of 48 h a year, the page finds break-even at 18
months.

{MADE}
## Is it 18 months?

Break-even = purchase / (rent a year - cost of owning a year) x 12. Rent: 98 / 8 = 12.25 USD per
GPU-hour. Owning: 150 + 200 + 50 = {own / 1e3:.0f} K USD a year.

{
        table(
            (
                "what is rented instead",
                "GPU-hours a year",
                "rent, USD a year",
                "break-even, months",
            ),
            (_even(name, hours, own) for name, hours in cases),
        )
    }
18 months come out of none of the readings; it would take {needed:,.0f} GPU-hours a year, for
2.5 M / 1.5 years + 0.4 M = {
        (BOUGHT_USD / 1.5 + own)
        / 1e6:.2f} M USD of rent. The nearest is the second, rounded up. What
matters more than the rounding:

- Depreciation is the purchase once more: counting 2.5 M and a part of the 150 K for it counts it
  twice. Over 4 years 2.5 M are 625 K a year, not 150 K. Without any depreciation, power is
  64 x 0.7 kW x {RUNS * HOURS:,.0f} h x 0.10 USD = {
        power_usd / 1e3:.1f} K USD for the devices alone, and
  the second case breaks even after {
        _months(64 * RUNS * HOURS * 0.6 * 98 / 8, 250e3 + power_usd):.1f} months.
- The rent is a list price. At 4 USD per GPU-hour the first case breaks even after
  {_months(4 * 64 * RUNS * HOURS, own):.0f} months, at 2.50 after
  {_months(2.5 * 64 * RUNS * HOURS, own):.0f}: longer than the devices
  are worth having.
- Failures and idle hours are paid for too: device-hours are work / goodput, in either case.

## Storage

"30 checkpoints of a 70 B model, 12.6 TB": 420 GB each, 6 bytes a parameter: 30 x 420 GB x 0.02 USD
per GB-month = {float(kept):.0f} USD a month. A checkpoint that training can go on from exactly has
12 bytes a parameter (fp32 weights and two moments), {full / 1e9:.0f} GB: 30 of them are
{30 * full / 1e12:.1f} TB and {30 * full / 1e9 * 0.02:.0f} USD a month.
"""


def _months(rent_usd: float, own_usd: float) -> float:
    """After which buying is cheaper than renting the same hours, of what each costs a year."""
    return BOUGHT_USD / (rent_usd - own_usd) * 12


def _even(name: str, hours: float, own: float) -> tuple[str, ...]:
    rent = hours * 98 / 8
    return name, f"{hours:,.0f}", f"{rent:,.0f}", f"{_months(rent, own):.1f}"
