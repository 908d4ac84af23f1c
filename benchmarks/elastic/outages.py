"""From stamps of finished steps to what a fault cost: pure functions, the same for everybody.

A step is *new* when no rank has finished it before. At most one step can be finished after a rank
is killed without the others doing anything about it: the one that was under way. So an outage ends
with the later of the first two new steps, whichever had the longer wait before it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple


class Stamp(NamedTuple):
    """A step that a rank has finished."""

    time_s: float
    """By CLOCK_MONOTONIC."""
    step: int
    num_samples: int
    """In the step, over all ranks."""
    rank: int
    node: int
    pid: int


@dataclass(frozen=True)
class Outage:
    """What a fault cost."""

    next_new_step_s: float | None
    """From the fault to the first new step that needed an answer to it; None: there was none."""
    next_step_s: float | None
    """The same, where steps that are computed again count as well."""
    whole_again_s: float | None
    """From the fault to the first new step that as many processes finished as before it."""
    recomputed: int
    """Steps that were finished twice."""
    left_out: int
    """Samples that no step was made of, between the fault and the end of these stamps."""


def read_stamps(folder: Path) -> list[Stamp]:
    """All ranks' stamps in order of time; a line that is being written is left out."""
    stamps = []
    for file in folder.glob("*.stamps"):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                time_s, *numbers = line.split()
                stamps.append(Stamp(float(time_s), *map(int, numbers)))
    return sorted(stamps)


def new_steps(stamps: Iterable[Stamp]) -> list[Stamp]:
    """The first stamp of each step that is beyond all before it."""
    found: list[Stamp] = []
    for stamp in stamps:
        if not found or stamp.step > found[-1].step:
            found.append(stamp)
    return found


def outage_of(stamps: Sequence[Stamp], fault_s: float) -> Outage:
    """What the fault at `fault_s` cost; stamps end before the next fault.

    Raises:
        ValueError: no step was finished before it.
    """
    before = [stamp for stamp in stamps if stamp.time_s <= fault_s]
    after = [stamp for stamp in stamps if stamp.time_s > fault_s]
    if not before:
        raise ValueError("no step was finished before the fault")
    reached = max(stamp.step for stamp in before)
    marks = [stamp for stamp in new_steps(after) if stamp.step > reached]
    num_before = len({stamp.pid for stamp in before if stamp.step == reached - 1})
    full = max(stamp.num_samples for stamp in before)
    return Outage(
        next_new_step_s=_end_of_wait([mark.time_s for mark in marks], before[-1].time_s, fault_s),
        next_step_s=_end_of_wait(
            [stamp.time_s for stamp in _firsts(after)], before[-1].time_s, fault_s
        ),
        whole_again_s=_whole_again(after, fault_s, reached, num_before),
        recomputed=_recomputed(stamps, fault_s),
        left_out=sum(full - mark.num_samples for mark in marks),
    )


def done_by_all(stamps: Iterable[Stamp], num_nodes: int, least: int) -> int | None:
    """The first step from `least` on that processes of so many nodes have finished."""
    done: dict[int, set[int]] = defaultdict(set)
    for stamp in stamps:
        done[stamp.step].add(stamp.node)
        if stamp.step >= least and len(done[stamp.step]) == num_nodes:
            return stamp.step
    return None


def step_times(stamps: Sequence[Stamp], after: int) -> list[float]:
    """Seconds between new steps, from the end of step `after` on."""
    ends = [stamp.time_s for stamp in new_steps(stamps) if stamp.step >= after]
    return [end - begin for begin, end in pairwise(ends)]


def median_step_s(stamps: Sequence[Stamp], after: int) -> float:
    """Of the steps from the end of step `after` on."""
    return median(step_times(stamps, after))


def _firsts(stamps: Iterable[Stamp]) -> list[Stamp]:
    """The first stamp of each step and of each time it is done again by the same rank."""
    seen: dict[tuple[int, int], int] = defaultdict(int)  # (step, rank) -> how often
    most: dict[int, int] = defaultdict(int)
    found = []
    for stamp in stamps:
        seen[stamp.step, stamp.rank] += 1
        if seen[stamp.step, stamp.rank] > most[stamp.step]:
            most[stamp.step] = seen[stamp.step, stamp.rank]
            found.append(stamp)
    return found


def _end_of_wait(ends: Sequence[float], last: float, fault_s: float) -> float | None:
    """Of the first two ends, the one that was waited for longer, after the fault."""
    if not ends:
        return None
    if len(ends) == 1 or ends[0] - last >= ends[1] - ends[0]:
        return ends[0] - fault_s
    return ends[1] - fault_s


def _whole_again(
    after: Sequence[Stamp], fault_s: float, reached: int, num_before: int
) -> float | None:
    """Not the step that was under way: one of those after it, done by as many processes."""
    done: dict[int, set[int]] = defaultdict(set)
    for stamp in after:
        done[stamp.step].add(stamp.pid)
        if stamp.step > reached + 1 and len(done[stamp.step]) >= num_before:
            return stamp.time_s - fault_s
    return None


def _recomputed(stamps: Sequence[Stamp], fault_s: float) -> int:
    """Steps that some rank finished after the fault though it had finished them before."""
    times: dict[tuple[int, int], int] = defaultdict(int)
    again = set()
    for stamp in stamps:
        times[stamp.step, stamp.rank] += 1
        if times[stamp.step, stamp.rank] > 1 and stamp.time_s > fault_s:
            again.add(stamp.step)
    return len(again)
