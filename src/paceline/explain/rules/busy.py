"""Busy: how long each rank was at work in each step, for the rules that compare ranks.

The Run's lines say it of every step (`comm.busy_clock`); where they don't, as in traces of others,
the profiled steps do. And how long ranks were ready and had no core, for those about what
exchanging takes of them.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.explain.subject import Subject
from paceline.observe.rank_spread import mean_figure, spread_of

Array = npt.NDArray[Any]

FAIR_QUEUE = 0.06
"""Where ranks take all cores, their own threads that send and receive keep them waiting for so much
of a step (measured, 4 to 8 % on two cores)."""
_NOTHING_BETWEEN = 0.02
_ENOUGH_STEPS = 8


def ranks_of(subject: Subject) -> tuple[int, ...]:
    """The ranks whose time at work is known."""
    told = _told_busy_s(subject)
    if told is not None:
        return tuple(range(told.shape[1]))
    return subject.measured.ranks if subject.account is not None else ()


def busy_s(subject: Subject) -> Array:
    """(steps, ranks), of every steady step where the Run says so, else of the profiled ones."""
    told = _told_busy_s(subject)
    return subject.measured.busy_s * subject.pace if told is None else told


def queued_s(subject: Subject, under_way_s: float) -> float:
    """What ranks are without a core in a step, at most while exchanges are under way: where ranks
    compute on all cores, the threads that exchange have it. 0 where that isn't known."""
    waits = spread_of(mean_figure(subject.steady, "core_wait_s"))
    if waits is None or subject.account is None or not subject.cores_are_taken:
        return 0.0
    return min((waits.least + waits.most) / 2, under_way_s)


def _told_busy_s(subject: Subject) -> Array | None:
    """(steps, ranks), by the Run's lines; None where they don't say it of enough steps.

    Steps with something before them (an evaluation, slow writing) are left out: lines count it as
    work, of one rank or of all.
    """
    told = [
        (line.get("ranks") or {}).get("busy_s")
        for line in subject.steady
        if (line.get("between_s") or 0.0) < _NOTHING_BETWEEN * subject.step_s
    ]
    lists = [each for each in told if isinstance(each, list)]
    lists = [each for each in lists if len(each) == len(lists[-1])]
    return np.array(lists) if len(lists) >= _ENOUGH_STEPS else None
