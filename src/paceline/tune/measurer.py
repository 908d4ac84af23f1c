"""Measurer: runs a trial round of candidates and says what came of each.

Whatever a candidate does (run out of memory, die, hang) is a result of that candidate, if it does
so with the first one alone as well; the others run again without it. What doesn't fit together runs
in trial rounds of its own.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from paceline.bench.rank_pool import RankProgress, SilentError
from paceline.config.errors import InputError, RunError
from paceline.config.job import Job, to_toml
from paceline.observe.run import Run, json_lines
from paceline.plan.answer.answer import prediction_json
from paceline.tune.candidates import prediction_of
from paceline.tune.race import gap
from paceline.tune.team import Team
from paceline.tune.trial import Candidate, Outcome
from paceline.tune.trial_round import RoundRequest, RoundResult, run_trial_round

# Ranks are silent for no longer than this, and so many predicted steps: the slowest thing between
# two news is setting a Job up (compiling it, where the Job says so, takes minutes).
_SILENCE_S, _SILENT_STEPS, _COMPILING_S = 60.0, 60, 600.0
# Of a device's memory, for Jobs that are alive together: what is predicted is each one's peak, and
# only one is at its peak at a time.
_SHARE_TOGETHER = 0.9
_PAIR = 2
_NO_MEMORY = re.compile(
    r"OutOfMemoryError|can't allocate memory|MemoryError|Cannot allocate memory"
)


@dataclass(frozen=True)
class Result:
    """What came of a candidate in a trial round."""

    outcome: Outcome
    steps_s: tuple[float, ...] = ()
    versus: tuple[float, float] | None = None
    """Logarithm of its step over that of the first candidate of its trial round, and half of the 90
    % interval; None: they did not run together."""
    note: str = ""

    @property
    def step_s(self) -> float | None:
        """Median."""
        return median(self.steps_s) if self.steps_s else None


RoundResults = Mapping[int, Result]
"""By the number of the candidate."""
Progress = Callable[[int, str], None]
"""Called with the number of a candidate and what happens to it: "set up", "turn", "died"."""


class Measurer(Protocol):
    """What can tell how long steps of Jobs take."""

    def measure(
        self, candidates: Sequence[Candidate], folder: Path | None, progress: Progress
    ) -> RoundResults:
        """Let candidates take turns.

        Args:
            candidates: the first one is what the others are held against.
            folder: where the fastest is kept as a Run with a trace; None: it isn't profiled.
            progress: hears how far it is.
        """
        ...

    def alone(self, job: Job) -> float:
        """Seconds of a step of a Job for one device, on one device.

        Raises:
            RunError: it can't run there.
        """
        ...


@dataclass
class RealMeasurer:
    """On the ranks of a team."""

    team: Team
    limit_bytes: float
    """What Jobs may use of a device's memory together."""
    failures: Path | None = None
    """A file for the tracebacks of whatever fails."""

    def measure(
        self, candidates: Sequence[Candidate], folder: Path | None, progress: Progress
    ) -> RoundResults:
        """See `Measurer.measure`."""
        results: dict[int, Result] = {}
        all_groups = list(groups([one.peak_bytes for one in candidates], self.limit_bytes))
        if len(all_groups) > 1:
            folder = None  # there is no fastest of all: they didn't run together
        for group in all_groups:
            for at, result in self._together(candidates, group, folder, progress).items():
                results.setdefault(at, result)  # the first one may be in several
        return results

    def alone(self, job: Job) -> float:
        """See `Measurer.alone`."""
        ran: RoundResult = self.team.run(
            partial(run_trial_round, RoundRequest((job,))), _ignore, 10 * _SILENCE_S, alone=True
        )
        return median(step for turn in ran.steps_s[0] for step in turn)

    def _together(
        self,
        candidates: Sequence[Candidate],
        group: Sequence[int],
        folder: Path | None,
        progress: Progress,
    ) -> dict[int, Result]:
        """Run a trial round; whoever ends it runs once more with the first one alone, for it may
        have suffered from the company of the others, and these go on without it."""
        left, again = list(group), []
        results: dict[int, Result] = {}
        while left:
            watch = _Watch(left, progress)
            request = RoundRequest(
                tuple(candidates[at].job for at in left), folder and folder / "trace"
            )
            silence_s = _silence_s([candidates[at] for at in left])
            try:
                ran: RoundResult = self.team.run(
                    partial(run_trial_round, request), watch.hear, silence_s
                )
            except (RunError, InputError) as error:
                self._note(candidates[watch.about], error)
                left.remove(watch.about)
                if len(group) > _PAIR:
                    again.append(watch.about)
                else:
                    results[watch.about] = _failure(error)
                    progress(watch.about, results[watch.about].outcome)
                continue
            if folder is not None:
                keep_run(folder, candidates[left[ran.fastest]].job, ran)
            results |= dict(zip(left, _results(ran, left[0] == 0), strict=True))
            break
        for at in again:
            pair = self._together(candidates, sorted({group[0], at}), None, progress)
            results[at] = pair[at]
        return results

    def _note(self, candidate: Candidate, error: Exception) -> None:
        """Keep all that a rank said, for people."""
        if self.failures is None:
            return
        changes = candidate.job.layout.summary
        with self.failures.open("a") as file:
            print(f"--- {candidate.why} ({changes}) ---\n{error}\n", file=file)


@dataclass
class _Watch:
    """Which candidate a trial round is about, as rank 0 tells."""

    numbers: Sequence[int]
    progress: Progress
    about: int = field(init=False)

    def __post_init__(self) -> None:
        self.about = self.numbers[0]

    def hear(self, news: RankProgress) -> None:
        """Of a trial round."""
        self.about = self.numbers[news.done]
        self.progress(self.about, news.what)


def _silence_s(candidates: Sequence[Candidate]) -> float:
    compiles = any(one.job.layout.compile for one in candidates)
    steps_s = max(one.predicted_s for one in candidates) * _SILENT_STEPS
    return _SILENCE_S + steps_s + (_COMPILING_S if compiles else 0)


def groups(peaks_bytes: Sequence[float], limit_bytes: float) -> Iterator[list[int]]:
    """Which candidates run together: as many as fit, each time with the first one if it fits."""
    first, *others = peaks_bytes
    limit = _SHARE_TOGETHER * limit_bytes
    group, used = [0], first
    for at, peak in enumerate(others, start=1):
        if used + peak > limit and len(group) > 1:
            yield group
            group, used = [0], first
        if used + peak > limit:
            yield [at]
        else:
            group.append(at)
            used += peak
    yield group


def _results(ran: RoundResult, has_first: bool) -> list[Result]:
    rounds = ran.rounds
    most = max(len(times) for times in rounds.values())
    return [_result(ran, at, most, has_first) for at in rounds]


def _result(ran: RoundResult, at: int, most: int, has_first: bool) -> Result:
    rounds = ran.rounds
    found = gap(rounds[at], rounds[0])
    half = found.half if math.isfinite(found.half) else abs(found.mean)
    return Result(
        "measured" if len(rounds[at]) == most else "slower",
        tuple(step for turn in ran.steps_s[at] for step in turn),
        (found.mean, half if at else 0.0) if has_first else None,
    )


def _failure(error: Exception) -> Result:
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, SilentError):
        return Result("hung", note=lines[0])
    lacking = [line for line in lines if _NO_MEMORY.search(line)]
    if lacking:
        return Result("out of memory", note=lacking[-1].strip())
    return Result("died", note=lines[-1].strip())


def keep_run(folder: Path, job: Job, ran: RoundResult) -> None:
    """Keep what a trial left as a Run, so that `paceline explain` reads it."""
    run = Run(folder)
    run.write("job.toml", to_toml(job))
    expected = prediction_of(job)
    layouts = [] if expected is None else [prediction_json(expected, job.model.unit)]
    run.write_json("plan.json", {"reasons": {}, "notes": [], "layouts": layouts})
    run.write_json("facts.json", ran.facts)
    run.write("metrics.jsonl", json_lines(_lines(job, ran)))


def _lines(job: Job, ran: RoundResult) -> Iterator[dict[str, Any]]:
    """A line for each timed step of the fastest, then its profiled ones."""
    unit, train = job.model.unit, job.train
    units = train.global_batch * job.model.units_per_sample(train.seq_len)
    steps = [step for turn in ran.steps_s[ran.fastest] for step in turn]
    rows = [(step_s, False, {"unattributed": step_s}) for step_s in steps]
    rows += [(sum(terms.values()), True, dict(terms)) for terms in ran.terms.values()]
    for number, (step_s, is_profiled, terms) in enumerate(rows, start=1):
        yield {
            "step": number,
            unit: number * units,
            "step_time_s": step_s,
            "profiled": is_profiled,
            f"{unit}_per_s": units / step_s,
            "terms": terms,
        }


def _ignore(_news: RankProgress) -> None:
    """Nobody watches."""
