"""The two exceptions whose text is for the person at the terminal."""


class InputError(Exception):
    """What was given is wrong: one sentence says what was given, what is required, what to change.

    The command line prints the sentence alone, without a traceback, and exits with code 2.
    """


class RunError(Exception):
    """A run ended early: the text says why and how to go on. Exit code 1.

    Where a rank died, its own traceback has been printed before.
    """
