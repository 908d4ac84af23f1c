"""NCCL's settings, recommended from a table of what was measured with them; nothing is set here.

How it works: each trial is one collective at one size with some environment variables, in processes
of its own, since NCCL reads them once. Which trials count, and how much, says what a step sends. A
setting is recommended if the step's collectives take clearly less time with it than with NCCL's own
choice; otherwise the advice is to set nothing, which stays right when the machine changes.

What it is not: a tuner inside NCCL (its plugins choose per call), nor a model: what was not
measured is not recommended.

Variables and values: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html. LL128 is
not among the candidates: that page warns of wrong data where the platform doesn't support it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Settings = tuple[tuple[str, str], ...]
"""Environment variables; none: NCCL's own choice."""

CANDIDATES: tuple[Settings, ...] = (
    (),
    (("NCCL_ALGO", "Ring"),),
    (("NCCL_ALGO", "Tree"),),
    (("NCCL_PROTO", "Simple"),),
    (("NCCL_PROTO", "LL"),),
    (("NCCL_BUFFSIZE", "8388608"),),
    (("NCCL_BUFFSIZE", "16777216"),),
    (("NCCL_NTHREADS", "256"),),
)
"""What is worth a trial; buffers are 4 MiB, threads up to 640 of a block by default."""

_LEAST_GAIN = 0.03
"""Part of the time that a setting must save. Assumed: runs differ by as much."""


@dataclass(frozen=True)
class NcclTrial:
    """One collective with some settings."""

    settings: Settings
    op: str
    num_bytes: int
    """Of the whole buffer."""
    seconds: float
    """Median."""
    spread: float = 0.0
    """Half the distance from the 10th to the 90th percentile, over the median."""


@dataclass(frozen=True)
class NcclAdvice:
    """What to set, and why."""

    settings: Settings
    reason: str


def recommend(trials: Iterable[NcclTrial], calls: Mapping[tuple[str, int], float]) -> NcclAdvice:
    """The settings that a step's collectives are fastest with.

    Args:
        trials: of several settings, NCCL's own choice among them.
        calls: what a step sends: (op, bytes) -> how often.

    Raises:
        ValueError: NCCL's own choice was not measured for all of it.
    """
    tables: dict[Settings, dict[tuple[str, int], NcclTrial]] = {}
    for trial in trials:
        tables.setdefault(trial.settings, {})[trial.op, trial.num_bytes] = trial
    whole = {key: table for key, table in tables.items() if calls.keys() <= table.keys()}
    if () not in whole:
        raise ValueError("NCCL's own choice was not measured for all that a step sends.")
    seconds = {
        key: sum(number * table[call].seconds for call, number in calls.items())
        for key, table in whole.items()
    }
    best = min(seconds, key=seconds.__getitem__)
    gain = 1 - seconds[best] / seconds[()]
    doubt = max(_LEAST_GAIN, *(whole[key][call].spread for key in ((), best) for call in calls))
    ours = f"{_told(best)}: {seconds[best] * 1e3:.3g} ms of collectives a step"
    if gain < doubt:
        return NcclAdvice((), f"nothing measured is clearly better than NCCL's own choice ({ours})")
    return NcclAdvice(best, f"{ours} instead of {seconds[()] * 1e3:.3g} ({-gain:.0%})")


def _told(settings: Settings) -> str:
    return " ".join(f"{name}={value}" for name, value in settings) or "NCCL's own choice"
