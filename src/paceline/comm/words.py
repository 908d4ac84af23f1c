"""Words that ranks leave for each other in the run's store: JSON, and read with suspicion.

Whoever reaches the store can write there (docs/security.md). Nothing in it is unpickled, and what
is not of the form that ranks write ends the run in one sentence.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TypeVar

import msgspec
from torch._C._distributed_c10d import Store

from paceline.config.errors import RunError

T = TypeVar("T")

_LOOK_S = 0.02


def say(store: Store, key: str, word: object) -> None:
    """Leave a word: numbers, text, lists, dicts and dataclasses of them."""
    store.set(key, msgspec.json.encode(word).decode())


def heard(store: Store, key: str, kind: type[T]) -> T:
    """The word at a key, waiting for it as long as the store does.

    Args:
        kind: what ranks write there; `int` reads what `Store.add` counts as well.

    Raises:
        RunError: it is of another kind.
        RuntimeError: there is none in time, or the store is gone.
    """
    text = store.get(key)
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError):
        raise RunError(
            f"the store of the run holds at {key!r} what no rank wrote: somebody else reaches it "
            "(docs/security.md); start the run again to go on from the last checkpoint."
        ) from None


def await_all(store: Store, key: str, ranks: Iterable[int], most_s: float) -> None:
    """As the rank that keeps the store: stay until others have left a word, or the time is over.

    Args:
        key: of their words, with {} in the place of the rank.
        ranks: who should leave one.
        most_s: one that is lost never does.
    """
    keys, end = [key.format(rank) for rank in ranks], time.monotonic() + most_s
    with suppress(RuntimeError):
        while not store.check(keys) and time.monotonic() < end:
            time.sleep(_LOOK_S)
