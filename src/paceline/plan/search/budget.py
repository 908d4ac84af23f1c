"""Budget: how many of which devices train so many tokens, how fast and at what price.

How it works: for each offer (a cluster whose prices are known) and each number of nodes, the best
layout is searched (`plan.search.search`), failures and checkpoints take their share of the time
(`plan.scale`), and the run's days and dollars follow. The fastest run within the money and the
cheapest within the days are the two answers. Prices are given, never built in.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.plan.points import Setting
from paceline.plan.prediction import Prediction
from paceline.plan.scale import bill, checkpoint_bytes, resilience
from paceline.plan.search.search import search
from paceline.plan.search.space import SearchConstraints

_DAY_S = 86400.0
_NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
# The best of a few predictions: a question about many clusters asks for figures, not for tables.
_LAYOUTS = 5


@dataclass(frozen=True)
class TrainingRun:
    """A whole run on so many devices."""

    cluster: Cluster
    best: Prediction
    goodput: float
    """Part of the time that goes into steps that are kept; 1 where reliability is not known."""
    days: float
    usd: float

    @property
    def num_devices(self) -> int:
        """Of the cluster."""
        return self.cluster.num_devices

    @property
    def text(self) -> str:
        """In one line."""
        device = self.cluster.device
        return f"{self.num_devices} x {device.name}: {self.days:.3g} days, {self.usd:,.0f} USD"


@dataclass(frozen=True)
class Purchase:
    """What money and time buy."""

    runs: tuple[TrainingRun, ...]
    """All that were looked at and fit the devices, the fastest first."""
    fastest: TrainingRun | None
    """Within the money."""
    cheapest: TrainingRun | None
    """Within the days."""
    text: str


def plan_purchase(
    setting: Setting,
    offers: Sequence[Cluster],
    num_tokens: float,
    usd: float | None = None,
    days: float | None = None,
    constraints: SearchConstraints | None = None,
    num_nodes: Sequence[int] = _NODES,
) -> Purchase:
    """How many of which devices to rent.

    Args:
        setting: what is trained; its cluster is replaced by the offers.
        offers: clusters with prices.usd_per_device_hour; their num_nodes is the most there are.
        num_tokens: of the whole run.
        usd: the most it may cost; None: any.
        days: the most it may take; None: any.
        constraints: what is fixed, freed and bounded.
        num_nodes: numbers of nodes to look at.

    Raises:
        InputError: an offer without a price, or no tokens.
    """
    if not num_tokens > 0:
        raise InputError(f"{num_tokens} tokens were given; give the number of tokens to train on.")
    runs = [
        run
        for offer in offers
        for run in _runs(setting, offer, num_tokens, constraints or SearchConstraints(), num_nodes)
    ]
    runs.sort(key=lambda run: (run.days, run.usd))
    affordable = [run for run in runs if usd is None or run.usd <= usd]
    timely = [run for run in runs if days is None or run.days <= days]
    fastest = affordable[0] if affordable else None
    cheapest = min(timely, key=lambda run: (run.usd, run.days)) if timely else None
    return Purchase(tuple(runs), fastest, cheapest, _text(runs, fastest, cheapest, usd, days))


def _runs(
    setting: Setting,
    offer: Cluster,
    num_tokens: float,
    constraints: SearchConstraints,
    num_nodes: Sequence[int],
) -> Iterator[TrainingRun]:
    if offer.prices.usd_per_device_hour is None:
        raise InputError(
            f"the price of {offer.device.name} is not known: give prices.usd_per_device_hour."
        )
    for nodes in num_nodes:
        if nodes > offer.num_nodes:
            return
        cluster = offer.replace(num_nodes=nodes)
        try:
            found = search(replace(setting, cluster=cluster), constraints, num=_LAYOUTS)
        except InputError:
            continue  # so many devices can't share the batch
        if found.ranked:
            yield _run(setting, cluster, found.ranked[0], num_tokens)


def _run(setting: Setting, cluster: Cluster, best: Prediction, num_tokens: float) -> TrainingRun:
    devices = cluster.num_devices
    lasting = resilience(cluster, devices, checkpoint_bytes(setting.model.num_params))
    kept = 1.0 if lasting is None else float(lasting.goodput)
    num_steps = num_tokens / (setting.global_batch * setting.seq_len)
    usd = bill(cluster, devices, best.step_s, num_steps, kept).usd
    assert usd is not None
    return TrainingRun(cluster, best, kept, best.step_s * num_steps / kept / _DAY_S, float(usd))


def _text(
    runs: Sequence[TrainingRun],
    fastest: TrainingRun | None,
    cheapest: TrainingRun | None,
    usd: float | None,
    days: float | None,
) -> str:
    if not runs:
        return "the model fits none of the offers: offer more nodes, or devices with more memory."
    both = [
        run
        for run in runs
        if (usd is None or run.usd <= usd) and (days is None or run.days <= days)
    ]
    limits = [f"{usd:,.0f} USD"] if usd is not None else []
    limits += [f"{days:g} days"] if days is not None else []
    within = " and ".join(limits) or "any price and time"
    if not both:
        parts = [f"no run stays within {within}"]
        parts += [f"the fastest for the money is {fastest.text}"] if fastest else []
        parts += [f"the cheapest in time is {cheapest.text}"] if cheapest else []
        return "; ".join(parts) + "."
    cheap = min(both, key=lambda run: (run.usd, run.days))
    return f"within {within}: the fastest is {both[0].text}; the cheapest is {cheap.text}."
