"""Loop: try, explain, keep what helped, until it is enough or nothing promises more.

A heat tries the best so far and a few candidates that promise most (`tune.propose`); its fastest is
profiled, and what `explain` finds there joins the candidates of the next heat.

It ends at the goal; when no candidate promises a gain worth a trial, nor one more heat of those
that promise less found any; when two heats in a row gained nothing, or nothing ran in three; with
the last trial or the last minute allowed. Every result is in the book before the next heat begins,
so that what was interrupted goes on from there.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.explain.finding import Finding
from paceline.observe.summary import bytes_text
from paceline.tune.goal import Figures, Goal, reference_of
from paceline.tune.measurer import Heat, Measurer, Result
from paceline.tune.propose import LEAST_GAIN, Proposer
from paceline.tune.settings import differences
from paceline.tune.trial import Candidate, Decision, Known, Reference, Trial

_IN_A_HEAT = 3
"""Candidates beside the best."""
_WORTH_A_LOOK = 0.002
"""What has to be promised for one more heat, where nothing promises `LEAST_GAIN`: predictions of
Jobs that differ little are not that exact."""
_FRUITLESS_HEATS = 2
_FAILED_HEATS = 3

Explain = Callable[[Path], Sequence[Finding]]
"""Of the Run in a folder."""


class Watcher(Protocol):
    """Who is told what happens."""

    def heat_begins(self, number: int, candidates: Sequence[Candidate]) -> None:
        """A heat begins; the first candidate is the best so far."""
        ...

    def progress(self, candidate: int, what: str) -> None:
        """Something happens to a candidate of the heat: "set up", "turn", "died", ..."""
        ...

    def heat_ended(self, known: Known) -> None:
        """What came of it is in the book."""
        ...


class Book(Protocol):
    """Where results are kept."""

    @property
    def known(self) -> Known:
        """All there is."""
        ...

    def add(self, *entries: Trial | Decision | Reference) -> None:
        """Keep these, before anything else happens."""
        ...

    def run_folder(self, heat: int) -> Path | None:
        """Where the fastest of a heat is kept as a Run; None: nowhere."""
        ...

    def newest_run(self) -> Path | None:
        """Of the latest heat that left one."""
        ...


@dataclass(frozen=True)
class Limits:
    """When to stop."""

    goal: Goal | None = None
    seconds: float = math.inf
    trials: int | None = None


@dataclass
class Loop:
    """Tunes a Job."""

    proposer: Proposer
    limits: Limits
    measurer: Measurer
    book: Book
    watcher: Watcher
    explain: Explain
    clock: Callable[[], float] = time.monotonic
    _slowest_heat_s: float = field(default=0.0, init=False)
    _looked_beside: int | None = field(default=None, init=False)
    """The best trial when lesser promises were tried."""

    def run(self) -> Decision:
        """Tune until there is nothing more to do."""
        began = self.clock()
        if self.book.known.reference is None:
            self.book.add(reference_of(self.book.known.given, self.measurer))
        while (reason := self._enough(self.clock() - began)) is None:
            self.proposer.findings = self._findings()
            candidates = self._next()
            if not candidates:
                reason = f"nothing else promises {LEAST_GAIN:.0%} or more"
                break
            self._heat(candidates)
        return self._end(reason)

    def _enough(self, elapsed_s: float) -> str | None:
        """Why to stop, None where there is no reason."""
        known, limits = self.book.known, self.limits
        best, goal = known.best, limits.goal
        if best is not None and goal is not None and Figures.of(known, best).reaches(goal):
            return f"{goal.text} is reached"
        if limits.trials is not None and len(known.trials) >= limits.trials:
            return f"{limits.trials} trials were made"
        if known.trials and elapsed_s + self._slowest_heat_s > limits.seconds:
            return "another heat would take longer than the time that is left"
        if best is None and known.num_heats >= _FAILED_HEATS:
            return f"nothing ran in {_FAILED_HEATS} heats"
        if _num_fruitless(known) >= _FRUITLESS_HEATS:
            return f"{_FRUITLESS_HEATS} heats in a row gained nothing"
        return None

    def _next(self) -> list[Candidate]:
        """The best so far and what to try beside it; nothing where nothing promises enough."""
        known, proposer = self.book.known, self.proposer
        num = _IN_A_HEAT
        if self.limits.trials is not None:
            num = min(num, self.limits.trials - max(1, len(known.trials)))
        chosen = proposer.next(known, num)
        if not known.trials:
            return [proposer.first(), *chosen]
        best = known.best
        if best is not None and not chosen and best.number != self._looked_beside:
            self._looked_beside = best.number
            chosen = proposer.next(known, num, _WORTH_A_LOOK)
        first = [] if best is None else [proposer.again(known, best)]
        return [*first, *chosen] if chosen else []

    def _heat(self, candidates: Sequence[Candidate]) -> None:
        known, began = self.book.known, self.clock()
        number = known.num_heats
        self.watcher.heat_begins(number, candidates)
        folder = self.book.run_folder(number)
        results = self.measurer.measure(candidates, folder, self.watcher.progress)
        self.book.add(*new_trials(known, candidates, results))
        self.book.add(decision(known, self.book.known))
        self._slowest_heat_s = max(self._slowest_heat_s, self.clock() - began)
        self.watcher.heat_ended(self.book.known)

    def _findings(self) -> Sequence[Finding]:
        folder = self.book.newest_run()
        return () if folder is None else self.explain(folder)

    def _end(self, reason: str) -> Decision:
        known = self.book.known
        best = known.best
        last = Decision(known.num_heats - 1, -1 if best is None else best.number, reason, ends=True)
        if not known.decisions or known.decisions[-1] != last:
            self.book.add(last)
        return last


def new_trials(known: Known, candidates: Sequence[Candidate], results: Heat) -> Iterator[Trial]:
    """What came of a heat's candidates; the first one may have been tried before."""
    first = known.best
    base = 0.0 if first is None or first.relative is None else first.relative
    base_s = _base_s(known, results)
    number = len(known.trials)
    for at, candidate in enumerate(candidates):
        if at == 0 and first is not None:
            continue
        yield _trial(known, number, candidate, results[at], base, base_s)
        number += 1


def _base_s(known: Known, results: Heat) -> float:
    """Seconds that candidates are held against which had no turns with the first one."""
    if known.first is not None and known.first.step_s is not None:
        return known.first.step_s
    ran = (result.step_s for result in results.values())
    return next((step_s for step_s in ran if step_s is not None), 1.0)


def _trial(
    known: Known, number: int, candidate: Candidate, result: Result, base: float, base_s: float
) -> Trial:
    relative = None
    if result.versus is not None:
        relative = base + result.versus[0]
    elif result.step_s is not None:
        relative = math.log(result.step_s / base_s)
    return Trial(
        number=number,
        heat=known.num_heats,
        changes=differences(known.given, candidate.job),
        why=candidate.why,
        predicted_s=candidate.predicted_s,
        expected_s=candidate.expected_s or candidate.predicted_s,
        peak_bytes=candidate.peak_bytes,
        heaviest=candidate.heaviest,
        outcome=result.outcome,
        steps_s=result.steps_s,
        step_s=result.step_s,
        relative=relative,
        uncertainty=result.versus[1] if result.versus else 0.0,
        note=_note(candidate, result),
    )


def _note(candidate: Candidate, result: Result) -> str:
    if result.outcome != "out of memory":
        return result.note
    needed = bytes_text(candidate.peak_bytes)
    return f"{needed} were predicted, most of it {candidate.heaviest}; {result.note}"


def decision(before: Known, after: Known) -> Decision:
    """What a heat changed."""
    was, best, heat = before.best, after.best, after.num_heats - 1
    if best is None:
        return Decision(heat, -1, "nothing has run so far")
    if was is None:
        return Decision(heat, best.number, f"trial {best.number} is the fastest so far")
    if best.number == was.number:
        return Decision(heat, best.number, f"trial {best.number} stays the fastest")
    gain = _gain(was, best)
    if gain >= 0 and abs((best.relative or 0.0) - (was.relative or 0.0)) <= best.uncertainty:
        told = f"trial {best.number} is the fastest, within the noise of trial {was.number}"
        return Decision(heat, best.number, told)
    by = f"{gain:.1%} less" if gain >= 0 else f"{-gain:.1%} more, with exact sums,"
    return Decision(heat, best.number, f"trial {best.number} takes {by} than trial {was.number}")


def _gain(was: Trial, best: Trial) -> float:
    return 1 - math.exp((best.relative or 0.0) - (was.relative or 0.0))


def _num_fruitless(known: Known) -> int:
    """Heats in a row, up to the last one, that gained nothing worth a trial."""
    heats = [one for one in known.decisions if not one.ends]
    bests = [known.trials[one.best] if one.best >= 0 else None for one in heats]
    count = 0
    for earlier, later in zip(reversed(bests[:-1]), reversed(bests[1:]), strict=True):
        if earlier is None or later is None or _gain(earlier, later) >= LEAST_GAIN:
            break
        count += 1
    return count
