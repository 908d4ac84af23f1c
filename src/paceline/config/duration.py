"""Durations as a person writes them on a command line."""

import re

from paceline.config.errors import InputError

_DURATION = re.compile(
    r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|sec|seconds?|min|minutes?|h|hours?|d|days?)", re.ASCII
)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(option: str, text: str) -> float:
    """Seconds of "90 s", "15 min", "1.5 h" or "30 days".

    Args:
        option: how the command line names it: "--budget".

    Raises:
        InputError: it can't be understood, or is 0.
    """
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise InputError(
            f'{option} {text!r} is no time: write "90 s", "15 min", "2 h" or "30 days".'
        )
    return float(found[1]) * _SECONDS[found[2][0]]
