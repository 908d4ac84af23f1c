"""Loop: try, explain, keep what helped, until it is enough or nothing promises more.

A trial round tries the best so far and a few candidates that promise most (`tune.propose`); its
fastest is profiled, and what `explain` finds there joins the candidates of the next trial round.

It ends at the goal, and with the last trial or the last minute allowed. It ends when no candidate
promises a gain worth a trial, nor one more trial round of those that promise less found any. And it
ends when two trial rounds in a row gained nothing, or nothing ran in three. Every result is in the
journal before the next trial round begins, so that what was interrupted goes on from there.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.explain.finding import Finding
from paceline.render.figures import bytes_text
from paceline.tune.goal import Figures, Goal, reference_of
from paceline.tune.measurer import Measurer, Result, RoundResults
from paceline.tune.propose import LEAST_GAIN, Proposer
from paceline.tune.settings import differences
from paceline.tune.trial import Candidate, Decision, Reference, Trial, TuningState

_CANDIDATES_PER_ROUND = 3
"""Candidates beside the best."""
_WORTH_A_LOOK = 0.002
"""What has to be promised for one more trial round, where nothing promises `LEAST_GAIN`:
predictions of Jobs that differ little are not that exact."""
_FRUITLESS_ROUNDS = 2
_FAILED_ROUNDS = 3

Explain = Callable[[Path], Sequence[Finding]]
"""Of the Run in a folder."""


class Watcher(Protocol):
    """Who is told what happens."""

    def round_begins(self, number: int, candidates: Sequence[Candidate]) -> None:
        """A trial round begins; the first candidate is the best so far."""
        ...

    def progress(self, candidate: int, what: str) -> None:
        """Something happens to a candidate of the trial round: "set up", "turn", "died", ..."""
        ...

    def round_ended(self, known: TuningState) -> None:
        """What came of it is in the journal."""
        ...


class Journal(Protocol):
    """Where results are kept."""

    @property
    def known(self) -> TuningState:
        """All there is."""
        ...

    def add(self, *entries: Trial | Decision | Reference) -> None:
        """Keep these, before anything else happens."""
        ...

    def run_folder(self, number: int) -> Path | None:
        """Where the fastest of a trial round is kept as a Run; None: nowhere."""
        ...

    def newest_run(self) -> Path | None:
        """Of the latest trial round that left one."""
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
    journal: Journal
    watcher: Watcher
    explain: Explain
    clock: Callable[[], float] = time.monotonic
    _slowest_round_s: float = field(default=0.0, init=False)
    _looked_beside: int | None = field(default=None, init=False)
    """The best trial when lesser promises were tried."""

    def run(self) -> Decision:
        """Tune until there is nothing more to do."""
        began = self.clock()
        if self.journal.known.reference is None:
            reference = reference_of(self.journal.known.given, self.measurer)
            self.journal.add(*(() if reference is None else (reference,)))
        while (reason := self._enough(self.clock() - began)) is None:
            self.proposer.findings = self._findings()
            candidates = self._next()
            if not candidates:
                reason = f"nothing else promises {LEAST_GAIN:.0%} or more"
                break
            self._run_round(candidates)
        return self.end(reason)

    def end(self, reason: str) -> Decision:
        """Keep why it ended."""
        known = self.journal.known
        best = known.best
        last = Decision(
            known.num_rounds - 1, -1 if best is None else best.number, reason, ends=True
        )
        if not known.decisions or known.decisions[-1] != last:
            self.journal.add(last)
        return last

    def _enough(self, elapsed_s: float) -> str | None:
        """Why to stop, None where there is no reason."""
        known, limits = self.journal.known, self.limits
        best, goal = known.best, limits.goal
        if best is not None and goal is not None and Figures.of(known, best).reaches(goal):
            return f"{goal.text} is reached"
        if limits.trials is not None and len(known.trials) >= limits.trials:
            return f"{limits.trials} trials were made"
        if known.trials and elapsed_s + self._slowest_round_s > limits.seconds:
            return "another trial round would take longer than the time that is left"
        if best is None and known.num_rounds >= _FAILED_ROUNDS:
            return f"nothing ran in {_FAILED_ROUNDS} trial rounds"
        if _num_fruitless(known) >= _FRUITLESS_ROUNDS:
            return f"{_FRUITLESS_ROUNDS} trial rounds in a row gained nothing"
        return None

    def _next(self) -> list[Candidate]:
        """The best so far and what to try beside it; nothing where nothing promises enough."""
        known, proposer = self.journal.known, self.proposer
        num = _CANDIDATES_PER_ROUND
        if self.limits.trials is not None:
            num = min(num, self.limits.trials - max(1, len(known.trials)))
        chosen = proposer.next(known, num)
        if not known.trials:
            return [proposer.first(known), *chosen]
        best = known.best
        if best is not None and not chosen and best.number != self._looked_beside:
            self._looked_beside = best.number
            chosen = proposer.next(known, num, _WORTH_A_LOOK)
        first = [] if best is None else [proposer.again(known, best)]
        return [*first, *chosen] if chosen else []

    def _run_round(self, candidates: Sequence[Candidate]) -> None:
        known, began = self.journal.known, self.clock()
        number = known.num_rounds
        self.watcher.round_begins(number, candidates)
        folder = self.journal.run_folder(number)
        results = self.measurer.measure(candidates, folder, self.watcher.progress)
        self.journal.add(*new_trials(known, candidates, results))
        self.journal.add(decision(known, self.journal.known))
        self._slowest_round_s = max(self._slowest_round_s, self.clock() - began)
        self.watcher.round_ended(self.journal.known)

    def _findings(self) -> Sequence[Finding]:
        folder = self.journal.newest_run()
        return () if folder is None else self.explain(folder)


def new_trials(
    known: TuningState, candidates: Sequence[Candidate], results: RoundResults
) -> Iterator[Trial]:
    """What came of a trial round's candidates; the first one may have been tried before."""
    first = known.best
    base = 0.0 if first is None or first.relative is None else first.relative
    base_s = _base_s(known, results)
    number = len(known.trials)
    for at, candidate in enumerate(candidates):
        if at == 0 and first is not None:
            continue
        yield _trial(known, number, candidate, results[at], base, base_s)
        number += 1


def _base_s(known: TuningState, results: RoundResults) -> float:
    """Seconds that candidates are held against which had no turns with the first one."""
    if known.first is not None and known.first.step_s is not None:
        return known.first.step_s
    ran = (result.step_s for result in results.values())
    return next((step_s for step_s in ran if step_s is not None), 1.0)


def _trial(
    known: TuningState,
    number: int,
    candidate: Candidate,
    result: Result,
    base: float,
    base_s: float,
) -> Trial:
    relative = None
    if result.versus is not None:
        relative = base + result.versus[0]
    elif result.step_s is not None:
        relative = math.log(result.step_s / base_s)
    return Trial(
        number=number,
        heat=known.num_rounds,
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
    if not candidate.heaviest:
        return result.note
    needed = bytes_text(candidate.peak_bytes)
    return f"{needed} were predicted, most of it {candidate.heaviest}; {result.note}"


def decision(before: TuningState, after: TuningState) -> Decision:
    """What a trial round changed."""
    was, best, number = before.best, after.best, after.num_rounds - 1
    if best is None:
        return Decision(number, -1, "nothing has run so far")
    if was is None:
        return Decision(number, best.number, f"trial {best.number} is the fastest so far")
    if best.number == was.number:
        return Decision(number, best.number, f"trial {best.number} stays the fastest")
    gain = _gain(was, best)
    if gain >= 0 and abs((best.relative or 0.0) - (was.relative or 0.0)) <= best.uncertainty:
        told = f"trial {best.number} is the fastest, within the noise of trial {was.number}"
        return Decision(number, best.number, told)
    by = f"{gain:.1%} less" if gain >= 0 else f"{-gain:.1%} more, with exact sums,"
    return Decision(number, best.number, f"trial {best.number} takes {by} than trial {was.number}")


def _gain(was: Trial, best: Trial) -> float:
    return 1 - math.exp((best.relative or 0.0) - (was.relative or 0.0))


def _num_fruitless(known: TuningState) -> int:
    """Trial rounds in a row, up to the last one, that gained nothing worth a trial."""
    rounds = [one for one in known.decisions if not one.ends]
    bests = [known.trials[one.best] if one.best >= 0 else None for one in rounds]
    count = 0
    for earlier, later in zip(reversed(bests[:-1]), reversed(bests[1:]), strict=True):
        if earlier is None or later is None or _gain(earlier, later) >= LEAST_GAIN:
            break
        count += 1
    return count
