"""Show: a search on a terminal while it runs, and its trials as a table."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from paceline.render.figures import duration_text
from paceline.render.table import Table
from paceline.search.answer import Found, figure_text, newest_loss
from paceline.search.halving import Trial
from paceline.search.space import point_text

_MOST_ROWS = 20


class Display:
    """What a person sees: a table that is drawn anew, or a line a result where nothing can be."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._told: set[tuple[int, int]] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the search runs."""
        if not self._console.is_terminal:
            yield
            return
        with self._live:
            yield

    def show(self, found: Found, trains: Trial | None) -> None:
        """What is known, and what comes next."""
        if self._console.is_terminal:
            self._live.update(Group(table(found, _MOST_ROWS), _status(found, trains)), refresh=True)
            return
        for trial in found.known.trials:
            place = (trial.number, len(trial.results))
            if trial.results and place not in self._told:
                self._told.add(place)
                self._console.print(_line(found, trial))


def _status(found: Found, trains: Trial | None) -> Text:
    spent, within = duration_text(found.spent_s), duration_text(found.search.within_s)
    now = "looking for a point"
    if trains is not None:
        steps = found.halving.steps[len(trains.results)]
        now = f"training trial {trains.number} to step {steps:,}"
    return Text(f"{found.counts_text}; {spent} of {within} of device time: {now}", "dim")


def _line(found: Found, trial: Trial) -> str:
    steps = found.halving.steps[len(trial.results) - 1]
    ended = trial.results[-1]
    said = f"failed: {ended.reason}" if trial.failed else f"loss {ended.loss:.4g}"
    return f"trial {trial.number} at step {steps:,}: {said} ({point_text(trial.point)})"


def table(found: Found, most: int | None = None) -> Table:
    """The trials, the best first: by how far they came, then by loss; the answer in bold."""

    def place(trial: Trial) -> tuple[int, float]:
        loss = newest_loss(trial)
        return -len(trial.results) * (not trial.failed), float("inf") if loss is None else loss

    trials = sorted(found.known.trials, key=place)[:most]
    strong = trials.index(found.chosen) if found.chosen in trials else None
    heads = ("#", *found.search.objectives, "steps", "", "settings")
    words = (0, len(heads) - 2, len(heads) - 1)
    return Table(heads, [row(found, trial) for trial in trials], words=words, strong=strong)


def row(found: Found, trial: Trial) -> tuple[str, ...]:
    """Cells of a trial."""
    objectives = found.search.objectives
    steps = found.halving.steps[len(trial.results) - 1] if trial.results else 0
    if trial.failed:
        word = f"failed: {trial.results[-1].reason.splitlines()[0][:80]}"
    elif found.chosen is not None and found.chosen.number == trial.number:
        word = "answer"
    else:
        word = "front" if trial in found.front else ""
    figures = (figure_text(trial, name) for name in objectives)
    return (str(trial.number), *figures, f"{steps:,}", word, point_text(trial.point))
