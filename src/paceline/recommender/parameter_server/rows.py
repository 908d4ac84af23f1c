"""Rows of tables with their optimizer: what a server, or a rank by all-to-all, holds.

A row's first value is a pure function of the seed and its id, so it does not matter who holds it;
it is uniform within 1 / sqrt(rows of the table), as DLRM's are. An update touches only the rows it
names. `adagrad` is row-wise (one number a row: the sum of mean squared gradients,
https://arxiv.org/abs/2010.11305); `adam` keeps its second moment per row and counts the updates of
each row by itself, so a row that is seen rarely is not taken for one with a zero gradient.

Everything is numpy, in fp32: a server needs no torch and is up again in a second.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.config.recommender import RowOptim
from paceline.recommender.parameter_server.consistent_hash import Ids, Numbering, mix

Rows = NDArray[np.float32]
State = dict[str, NDArray[np.float32]]


def initial_rows(numbering: Numbering, ids: Ids, dim: int, seed: int) -> Rows:
    """First values of rows, shape (len(ids), dim)."""
    start = mix(np.asarray([seed], np.uint64))
    row = mix(ids.astype(np.uint64) ^ start)
    bits = mix(row[:, None] ^ mix(np.arange(dim, dtype=np.uint64))[None, :])
    uniform = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
    bound = 1 / np.sqrt(numbering.rows_of_table(ids))
    return uniform * bound.astype(np.float32)[:, None]


def merged(ids: Ids, gradients: Rows) -> tuple[Ids, Rows]:
    """Sum the gradients of each row; rows ascending. Equal rows are added in the order given."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    if not len(ordered):
        return ids, gradients
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    if len(starts) == len(ordered):
        return ordered, gradients[order]
    return ordered[starts], np.add.reduceat(gradients[order], starts, axis=0)


def new_state(kind: str, num_rows: int, dim: int) -> State:
    """What an optimizer knows of rows that were never updated."""
    if kind == "adagrad":
        return {"square_sum": np.zeros(num_rows, np.float32)}
    return {
        "exp_avg": np.zeros((num_rows, dim), np.float32),
        "exp_avg_sq": np.zeros(num_rows, np.float32),
        "updates": np.zeros(num_rows, np.float32),
    }


def _adagrad(optim: RowOptim, gradients: Rows, state: State) -> Rows:
    state["square_sum"] += np.square(gradients).mean(axis=1)
    return gradients / (np.sqrt(state["square_sum"]) + np.float32(optim.eps))[:, None]


def _adam(optim: RowOptim, gradients: Rows, state: State) -> Rows:
    beta1, beta2 = (np.float32(beta) for beta in optim.betas)
    state["updates"] += 1
    state["exp_avg"] += (1 - beta1) * (gradients - state["exp_avg"])
    state["exp_avg_sq"] += (1 - beta2) * (np.square(gradients).mean(axis=1) - state["exp_avg_sq"])
    first = state["exp_avg"] / (1 - beta1 ** state["updates"])[:, None]
    second = state["exp_avg_sq"] / (1 - beta2 ** state["updates"])
    direction = first / (np.sqrt(second) + np.float32(optim.eps))[:, None]
    return direction.astype(np.float32, copy=False)


_DIRECTIONS: dict[str, Callable[[RowOptim, Rows, State], Rows]] = {
    "adagrad": _adagrad,
    "adam": _adam,
}


class RowStore:
    """Some rows of some tables, and how to update them.

    Args:
        numbering: of all tables.
        ids: the rows held here, ascending.
        dim: width of a row.
        seed: of the first values.
    """

    def __init__(
        self, numbering: Numbering, ids: Ids, dim: int, seed: int, optim: RowOptim
    ) -> None:
        self.ids, self.dim, self.optim = ids, dim, optim
        self._place = np.full(numbering.num_rows, -1, np.int32)
        self._place[ids] = np.arange(len(ids), dtype=np.int32)
        self._first_values = lambda: initial_rows(numbering, ids, dim, seed)
        self.reset()

    def reset(self) -> None:
        """Go back to the first values."""
        self.values = self._first_values()
        self.state = new_state(self.optim.kind, len(self.ids), self.dim)

    def read(self, ids: Ids) -> Rows:
        """Values of rows held here, a copy, shape (len(ids), dim).

        Raises:
            ValueError: a row is held elsewhere.
        """
        return self.values[self._places(ids)]

    def update(self, ids: Ids, gradients: Rows, lr: float) -> None:
        """Step on the gradients of rows, of which none is named twice."""
        places = self._places(ids)
        state = {name: held[places] for name, held in self.state.items()}
        direction = _DIRECTIONS[self.optim.kind](self.optim, gradients, state)
        self.values[places] -= np.float32(lr) * direction
        for name, changed in state.items():
            self.state[name][places] = changed

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Everything held, by name; the arrays themselves, not copies."""
        return {"ids": self.ids, "values": self.values, **self.state}

    def take(self, arrays: dict[str, NDArray[np.generic]]) -> int:
        """Take over those rows of a snapshot that are held here; return how many there were."""
        found = self._place[arrays["ids"]]
        here = found >= 0
        for name, held in {"values": self.values, **self.state}.items():
            if name in arrays:  # another optimizer's state has other names, and starts anew
                held[found[here]] = arrays[name][here]
        return int(here.sum())

    def _places(self, ids: Ids) -> NDArray[np.int32]:
        places = self._place[ids]
        if len(places) and places.min() < 0:
            raise ValueError(f"row {int(ids[places.argmin()])} is not held here")
        return places
