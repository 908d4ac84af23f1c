"""Race: Jobs take turns in rounds, and those that are clearly slower drop out.

Rounds pair what is compared: in each one every Job has its turn, so that what a busy machine does
to a round it does to all. Of each Job and round there is the logarithm of its step over that of the
leader. A Job leaves when the lower end of the 90 % interval of its mean (Student's t over rounds)
lies above zero. Before the third round only what takes twice as long leaves. The first Job is what
the others are held against afterwards, so it stays for three rounds in any case.

Pure: the ranks ask rank 0, which asks here, and all do what it says.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

Rounds = Mapping[int, Sequence[float]]
"""Seconds of a step in each round, by the number of the Job: those that left have fewer."""

MOST_ROUNDS = 8
_LEAST_ROUNDS = 3
_HOPELESS = math.log(2)
# Rounds may agree by chance: no mean of n rounds is known better than this over the root of n.
_LEAST_SPREAD = 0.01
# A difference that nobody would change a Job for.
_NO_DIFFERENCE = 0.01
# One-sided 95 % points of Student's t by degrees of freedom.
_T = {1: 6.31, 2: 2.92, 3: 2.35, 4: 2.13, 5: 2.02, 6: 1.94, 7: 1.89, 8: 1.86}


def turn_seconds(steps_s: Sequence[float]) -> float:
    """The seconds that a turn stands for: the lower quartile of its steps.

    Whatever else runs on a machine only makes steps longer, and now and then.
    """
    return sorted(steps_s)[(len(steps_s) - 1) // 4]


@dataclass(frozen=True)
class Gap:
    """How much longer a Job's step is than another's, as a logarithm."""

    mean: float
    half: float
    """Half of the 90 % interval; infinite after one round."""

    @property
    def is_slower(self) -> bool:
        """Whether it is, beyond doubt."""
        return self.mean - self.half > 0


def gap(seconds: Sequence[float], others: Sequence[float]) -> Gap:
    """By the rounds that both took part in."""
    logs = [math.log(one / other) for one, other in zip(seconds, others, strict=False)]
    if len(logs) < 2:
        return Gap(mean(logs), math.inf)
    spread = max(stdev(logs), _LEAST_SPREAD)
    return Gap(mean(logs), _T.get(len(logs) - 1, 1.8) * spread / math.sqrt(len(logs)))


def leader(rounds: Rounds) -> int:
    """The Job with the least mean logarithm, of those that are still in the race."""
    most = max(len(times) for times in rounds.values())
    full = [job for job, times in rounds.items() if len(times) == most]
    return min(full, key=lambda job: mean(math.log(s) for s in rounds[job]))


def remaining_jobs(rounds: Rounds) -> list[int]:
    """The Jobs that have a turn in the next round; none where the race is over."""
    first = leader(rounds)
    taken = len(rounds[first])
    full = [job for job, times in rounds.items() if len(times) == taken]
    gaps = {job: gap(rounds[job], rounds[first]) for job in full}
    needed = 0 if taken < _LEAST_ROUNDS else first
    live = [job for job in full if job in (first, needed) or not _drops(gaps[job], taken)]
    decided = all(_is_settled(gaps[job]) for job in live if job != first)
    is_over = taken >= MOST_ROUNDS or (taken >= _LEAST_ROUNDS and decided)
    return [] if is_over else live


def _drops(gap: Gap, taken: int) -> bool:
    if taken < _LEAST_ROUNDS:
        return gap.mean > _HOPELESS
    return gap.is_slower


def _is_settled(gap: Gap) -> bool:
    """Whether further rounds could not matter: both are as fast."""
    return gap.mean + gap.half < _NO_DIFFERENCE
