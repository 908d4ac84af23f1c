"""The two exceptions whose text is for the person at the terminal, and refusals.

A refusal is a condition and the sentence for where it holds. The condition is written with the
operators that numbers and arrays share, so that one rule judges one layout, whose sentence is then
asked for, or a million of them in columns, where only the condition counts.
"""

from collections.abc import Callable, Iterator
from typing import Any

Refusal = tuple[Any, Callable[[], str]]
"""Whether something can't run, a truth value or an array of them, and the sentence that says why,
which is asked for only where the condition is one truth value."""


def first_sentence(refusals: Iterator[Refusal]) -> str | None:
    """That of the first refusal that holds; None where none does."""
    return next((sentence() for refused, sentence in refusals if refused), None)


class InputError(Exception):
    """What was given is wrong: one sentence says what was given, what is required, what to change.

    The command line prints the sentence alone, without a traceback, and exits with code 2.
    """


class RunError(Exception):
    """A run ended early: the text says why and how to go on. Exit code 1.

    Where a rank died, its own traceback has been printed before.
    """


EXIT_SAVED = 75
"""What a process exits with that stopped before its end and is to be started again: EX_TEMPFAIL of
sysexits.h."""

EXIT_LEFT_OUT = 69
"""What a node's agent exits with where an elastic run goes on without it, as it was the cause of
losses again and again, or failed the check: EX_UNAVAILABLE of sysexits.h."""


class StoppedInTimeError(SystemExit):
    """A run was stopped before its last step: what is to be kept is kept, start it again.

    Nobody but who ends a process catches it: what stands after the training is not for a module
    that has not finished.
    """

    code: int

    def __init__(self) -> None:
        super().__init__(EXIT_SAVED)
