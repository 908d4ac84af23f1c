"""Choose: the size of a job on a site, of those that were planned. Pure; `launch.sizes` plans them.

The fastest ends first, waiting counted; the cheapest costs least. What is not known of a size (how
long it waits, what it costs) is None and never guessed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config.errors import InputError
from paceline.render.figures import amount_text, duration_text
from paceline.render.table import Table

_DAY_S = 86400.0


@dataclass(frozen=True)
class Size:
    """A number of nodes of one kind, and what the job takes on them."""

    node_type: str
    num_nodes: int
    num_devices: int
    """Over all nodes."""
    layout: str = ""
    wait_s: float | None = None
    """Until it starts, as the scheduler estimates it."""
    run_s: float | None = None
    """From the start to the end, failures and restarts included where their rate is known."""
    usd: float | None = None
    refused: str = ""
    """Why it can't run, one sentence; "": it can."""

    @property
    def end_s(self) -> float | None:
        """From now to the end; a wait that nobody knows counts as none."""
        return None if self.run_s is None else self.run_s + (self.wait_s or 0.0)

    @property
    def text(self) -> str:
        """As the command line names it."""
        kind = f" of {self.node_type}" if self.node_type else ""
        return f"--nodes {self.num_nodes}{kind}"


@dataclass(frozen=True)
class Aim:
    """What is wanted."""

    is_cheapest: bool = False
    """Rather than the fastest."""
    usd: float | None = None
    """The most it may cost."""
    days: float | None = None
    """The most until its end."""
    most_s: float | None = None
    """After which the site ends a job."""
    steps: int = 0
    """Of the job; 0: unknown."""


def choose(sizes: Sequence[Size], aim: Aim) -> Size:
    """The best of some sizes.

    Args:
        sizes: at least one, the smallest first.

    Raises:
        InputError: none can run, ends in time or is affordable; says what would help.
    """
    possible = [size for size in sizes if not size.refused]
    if not possible:
        raise InputError(sizes[-1].refused)
    timed = [size for size in possible if size.run_s is not None]
    if not timed:
        if aim.usd is not None or aim.days is not None or aim.is_cheapest:
            raise InputError(
                "what this job takes can't be predicted, so no size can be chosen by time or "
                "price: give --nodes alone."
            )
        return possible[0]
    in_time = [size for size in timed if aim.most_s is None or _run_s(size) <= aim.most_s]
    if not in_time:
        raise InputError(_too_long(timed, aim))
    if (aim.usd is not None or aim.is_cheapest) and any(size.usd is None for size in in_time):
        raise InputError(
            "what a device costs is not known for every size: write usd_per_device_hour into the "
            "site's node_types."
        )
    within = [size for size in in_time if _is_within(size, aim)]
    if not within:
        raise InputError(_too_dear(in_time, aim))
    return min(within, key=_by_price if aim.is_cheapest else _by_end)


def table(sizes: Sequence[Size], chosen: Size) -> Table:
    """All sizes, the chosen one in bold."""
    rows = [
        (
            size.node_type or "-",
            f"{size.num_nodes:,}",
            f"{size.num_devices:,}",
            _duration(size.wait_s),
            _duration(size.run_s),
            _duration(size.end_s),
            amount_text(size.usd),
            "refused" if size.refused else size.layout,
        )
        for size in sizes
    ]
    heads = ("node type", "nodes", "devices", "waits", "runs", "ends in", "USD", "layout")
    return Table(heads, rows, words=(0, 7), ruled=True, strong=sizes.index(chosen))


def _duration(seconds: float | None) -> str:
    return "unknown" if seconds is None else duration_text(seconds)


def _run_s(size: Size) -> float:
    assert size.run_s is not None
    return size.run_s


def _end_s(size: Size) -> float:
    assert size.end_s is not None
    return size.end_s


def _usd(size: Size) -> float:
    return float("inf") if size.usd is None else size.usd


def _by_end(size: Size) -> tuple[float, float]:
    return _end_s(size), _usd(size)


def _by_price(size: Size) -> tuple[float, float]:
    return _usd(size), _end_s(size)


def _is_within(size: Size, aim: Aim) -> bool:
    is_affordable = aim.usd is None or _usd(size) <= aim.usd
    return is_affordable and (aim.days is None or _end_s(size) <= aim.days * _DAY_S)


def _too_long(timed: Sequence[Size], aim: Aim) -> str:
    fastest = min(timed, key=_run_s)
    assert aim.most_s is not None
    limit, takes = duration_text(aim.most_s), duration_text(_run_s(fastest))
    fit = int(aim.steps * aim.most_s / _run_s(fastest))
    shorter = f"train at most {fit:,} steps at once (--set train.steps={fit})" if fit else ""
    more = "allow more nodes, or a longer max_hours in the site's file"
    return (
        f"the job takes {takes} with {fastest.text}, and the site ends jobs after {limit}: "
        f"{shorter + ', ' if shorter else ''}{more}."
    )


def _too_dear(in_time: Sequence[Size], aim: Aim) -> str:
    limits = [f"{aim.usd:,.0f} USD"] if aim.usd is not None else []
    limits += [f"{aim.days:g} days"] if aim.days is not None else []
    fastest, cheapest = min(in_time, key=_by_end), min(in_time, key=_by_price)
    return (
        f"no size stays within {' and '.join(limits)}: the fastest, {fastest.text}, ends in "
        f"{duration_text(_end_s(fastest))}{_price_text(fastest)}, and the cheapest, "
        f"{cheapest.text}, in {duration_text(_end_s(cheapest))}{_price_text(cheapest)}; raise the "
        "budget, or shorten the job."
    )


def _price_text(size: Size) -> str:
    return "" if size.usd is None else f" for {size.usd:,.0f} USD"
