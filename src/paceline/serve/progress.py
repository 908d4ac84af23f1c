"""Progress of an evaluation, on the terminal of whoever waits for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_NOTES = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def evaluating(number: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error while so many texts are looked at, where that is a terminal; gives
    what is called after each."""
    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    is_shown = _NOTES.is_terminal
    with Progress(*columns, console=_NOTES, transient=True, disable=not is_shown) as bar:
        task = bar.add_task("evaluating", total=number)
        yield lambda: bar.advance(task)
