"""Show: trials on a terminal while they run, and as a table; nothing is worked out here."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from paceline.render.figures import time_text
from paceline.render.table import Table
from paceline.tune.settings import change_texts
from paceline.tune.trial import FAILURES, Candidate, Trial, TuningState

COLUMNS = ("#", "what", "expected", "measured", "vs given", "outcome")


class Display:
    """Tells a person at the terminal what happens; see `loop.Watcher`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("")
        self._round_number = 0
        self._candidates: Sequence[Candidate] = ()
        self._shown = 0

    @contextmanager
    def running(self, known: TuningState) -> Iterator[None]:
        """While the loop runs; what an earlier start found is shown first."""
        if known.trials:
            self._console.print(f"going on after {len(known.trials)} trials")
            self._rows(known)
        with self._progress:
            self._say("one device with its share of the work")
            yield

    def round_begins(self, number: int, candidates: Sequence[Candidate]) -> None:
        """See `Watcher.round_begins`."""
        self._round_number, self._candidates = number, candidates
        self._say(f"trial round {number + 1}: {len(candidates)} Jobs")

    def progress(self, candidate: int, what: str) -> None:
        """See `Watcher.progress`."""
        name = self._candidates[candidate].why
        place = f"{candidate + 1} of {len(self._candidates)}"
        self._say(f"trial round {self._round_number + 1}: {what}, {place} ({name})")
        if what in FAILURES:
            self._console.print(f"    {name}: {what}")

    def round_ended(self, known: TuningState) -> None:
        """See `Watcher.round_ended`."""
        self._rows(known)
        text = Text(f"    {known.decisions[-1].text}", "dim")
        self._console.print(text)
        self._say("what to try next")

    def _say(self, what: str) -> None:
        self._progress.update(self._task, description=what)

    def _rows(self, known: TuningState) -> None:
        for trial in known.trials[self._shown :]:
            number, what, expected, measured, versus, outcome = row(known, trial)
            figures = f"{measured or outcome}, expected {expected}"
            gained = f", {versus} vs given" if versus else ""
            self._console.print(f"{number:>3} {figures}{gained}: {what}")
        self._shown = len(known.trials)


def row(known: TuningState, trial: Trial) -> tuple[str, ...]:
    """Cells of COLUMNS."""
    return (
        str(trial.number),
        what_text(trial),
        time_text(trial.expected_s),
        "" if trial.step_s is None else time_text(known.seconds(trial)),
        versus_text(trial),
        outcome_text(known, trial),
    )


def what_text(trial: Trial) -> str:
    """What was changed."""
    texts = change_texts(trial.changes)
    short = [text.removeprefix("layout.").removeprefix("comm.") for text in texts]
    return ", ".join(short) or "as given"


def versus_text(trial: Trial) -> str:
    """The step against that of the first Job that ran, with half of its 90 % interval."""
    if trial.relative is None:
        return ""
    if trial.relative == 0.0:
        return "100%"
    share = 100 * math.exp(trial.relative)
    half = f"{100 * trial.uncertainty:.0f}" if math.isfinite(trial.uncertainty) else "?"
    return f"{share:.0f}% ±{half}"


def outcome_text(known: TuningState, trial: Trial) -> str:
    """What came of it, and whether it is the best."""
    if known.best is not None and known.best.number == trial.number:
        is_sure = known.is_gain_clear or trial.relative == 0.0
        return "best" if is_sure else "fastest, within the noise"
    if trial.outcome == "out of memory":
        return f"out of memory: {trial.heaviest}" if trial.heaviest else trial.outcome
    return {"measured": "", "slower": "dropped early"}.get(trial.outcome, trial.outcome)


def table(known: TuningState) -> Table:
    """All trials."""
    rows = [row(known, trial) for trial in known.trials]
    numbers = [trial.number for trial in known.trials]
    best = None if known.best is None else numbers.index(known.best.number)
    return Table(COLUMNS, rows, words=(1, 5), strong=best)
