"""Isolated rng: the random numbers that reading data takes, apart from those of training.

Ranks seed torch differently, for dropout. A loader, a sampler or an augmentation that drew from the
same generators would differ from rank to rank, and after a resume from what it would have been. So
whatever reads data runs with generators of its own: torch's on the CPU, numpy's and `random`'s.
"""

import hashlib
import random
from typing import Any, Self

import numpy as np
import torch
from numpy.random import mtrand


def seed_of(*key: object) -> int:
    """63 bits that depend on every part of a key."""
    text = " ".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class IsolatedRng:
    """Global generators in a state of one's own, inside a `with`; outside they are as before."""

    def __init__(self, *key: object) -> None:
        """Args:
        key: what the random numbers are a function of.
        """
        self._numpy = np.random.MT19937()
        self._others: tuple[Any, ...] | None = None
        self._outside: tuple[Any, ...] = ()
        self._key = key

    def __enter__(self) -> Self:
        self._outside = (mtrand.get_bit_generator(), random.getstate(), torch.get_rng_state())
        mtrand.set_bit_generator(self._numpy)
        if self._others is None:
            self.seed(*self._key)
        else:
            _set(*self._others)
        return self

    def __exit__(self, *_failure: object) -> None:
        self._others = (random.getstate(), torch.get_rng_state())
        numpy_outside, *others = self._outside
        mtrand.set_bit_generator(numpy_outside)
        _set(*others)

    def state(self) -> dict[str, Any] | None:
        """Where the generators are, outside the `with`; None: at their beginning."""
        if self._others is None:
            return None
        python, of_torch = self._others
        return {"numpy": self._numpy.state, "random": python, "torch": of_torch}

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from what `state` gave."""
        if state is not None:
            self._numpy.state = state["numpy"]
            self._others = (state["random"], state["torch"])

    @staticmethod
    def seed(*key: object) -> None:
        """Begin anew, with other numbers for another key; CUDA's generators are left alone."""
        seed = seed_of(*key)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        torch.default_generator.manual_seed(seed)


def _set(python: Any, of_torch: torch.Tensor) -> None:
    random.setstate(python)
    torch.set_rng_state(of_torch)
