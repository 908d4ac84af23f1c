"""What the tables share: one list of names, and the steps that times are in."""

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe.kineto.host import NONE

_Array = npt.NDArray[Any]


class Names(dict[str, int]):
    """Numbers names in the order in which they are first asked for."""

    def __missing__(self, name: str) -> int:
        self[name] = number = len(self)
        return number

    def of(self, names: tuple[str, ...]) -> _Array:
        """Return the numbers of names, and NONE as the last, which index -1 finds."""
        return np.array([*(self[name] for name in names), NONE])


def step_of(windows: _Array, at: _Array) -> _Array:
    """Return the index of the step that each time is in, or NONE."""
    place = np.searchsorted(windows["start_ns"], at, "right") - 1
    inside = (place >= 0) & (at < windows["end_ns"][place])
    return np.where(inside, place, NONE)


def step_numbers(windows: _Array, index: _Array) -> _Array:
    """Return the numbers of steps by their indices, NONE among them."""
    return np.append(windows["step"], NONE)[index]
