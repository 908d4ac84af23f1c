"""Options: rates, lengths and prices of serving, from the words of the command line."""

import re
from typing import NamedTuple

from paceline.config.errors import InputError
from paceline.plan.serving.load import Range

_PER_S = {"s": 1.0, "min": 60.0, "h": 3600.0}
_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(?:/\s*(s|min|h))?", re.ASCII)
_RANGE = re.compile(r"([1-9]\d{0,6})(?:-([1-9]\d{0,6}))?", re.ASCII)
_PRICE = re.compile(r"(\d{1,6}(?:\.\d{1,9})?)\s*,\s*(\d{1,6}(?:\.\d{1,9})?)", re.ASCII)


class ApiPrice(NamedTuple):
    """What somebody else's endpoint asks, USD per million tokens."""

    usd_in: float
    usd_out: float


def rate_of(text: str) -> float:
    """Requests a second of "5/s", "90/min", "2000/h" or "5".

    Raises:
        InputError: it is none of these, or 0.
    """
    found = _RATE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise InputError(
            f"--rate {text[:200]!r} is no rate of requests: write 5/s, 90/min or 2000/h."
        )
    return float(found[1]) / _PER_S[found[2] or "s"]


def range_of(option: str, text: str) -> Range:
    """The fewest and the most tokens of "1000" or "32-128".

    Raises:
        InputError: it is neither.
    """
    found = _RANGE.fullmatch(text.strip())
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise InputError(f"{option} {text[:200]!r} is no number of tokens: write 1000, or 32-128.")
    return int(found[1]), int(found[2] or found[1])


def api_price_of(text: str) -> ApiPrice:
    """The prices of "0.5,1.5".

    Raises:
        InputError: it is no such pair, or both are 0.
    """
    found = _PRICE.fullmatch(text.strip())
    if found is None or not float(found[1]) + float(found[2]):
        raise InputError(
            f'--api-price {text[:200]!r} is not of the form "0.5,1.5": USD per million tokens in '
            "and out."
        )
    return ApiPrice(float(found[1]), float(found[2]))
