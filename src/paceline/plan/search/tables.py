"""Tables of columns, and their products: what a space of layouts is made of.

A table is a mapping from names to arrays of one length. `join` multiplies two of them and keeps the
pairs that can run together by the rules of `config.feasible`, without ever writing out the others.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.config.feasible import RULES
from paceline.plan.points import Array, Setting

Columns = Mapping[str, Array]
"""Some columns of Points, by name; they broadcast against each other."""


def allowed(setting: Setting, columns: Columns, new: Iterable[str]) -> Array:
    """Whether layouts can run, as far as their columns tell: by the rules that read a `new` column
    and no unknown one, so that a space that is built column by column drops what can't run as early
    as possible."""
    refused: Any = np.array(False)
    for rule in RULES:
        if columns.keys() >= set(rule.reads) and not set(new).isdisjoint(rule.reads):
            for each, _ in rule.refusals(setting, *(columns[name] for name in rule.reads)):
                refused = refused | each
    return ~refused


def size_of(table: Columns) -> int:
    """Rows of a table."""
    return len(next(iter(table.values())))


def take(table: Columns, rows: Array) -> Columns:
    """Some rows of a table."""
    return {name: column[rows] for name, column in table.items()}


def crossing(
    setting: Setting,
    left: Columns,
    right: Columns,
    also: Callable[[Columns], Array] | None = None,
) -> tuple[Array, Array]:
    """Pairs of rows of two tables that can run together, by what the rules say of the pair.

    Args:
        also: a condition on the columns of both, besides the rules.

    Returns:
        rows of left and rows of right, ordered by left.
    """
    both = {name: column[:, None] for name, column in left.items()}
    both |= {name: column[None, :] for name, column in right.items()}
    mask = allowed(setting, both, right)
    if also is not None:
        mask = mask & also(both)
    pairs = np.nonzero(np.broadcast_to(mask, (size_of(left), size_of(right))))
    return pairs[0], pairs[1]


def join(
    setting: Setting,
    left: Columns,
    right: Columns,
    also: Callable[[Columns], Array] | None = None,
) -> Columns:
    """The pairs of `crossing` as one table."""
    rows, options = crossing(setting, left, right, also)
    return {**take(left, rows), **take(right, options)}


def distinct(table: Columns, names: Iterable[str]) -> tuple[Array, Array, Array]:
    """The first row of each group of rows that agree in some columns, the group of every row, and
    how many rows a group has."""
    codes: Array = np.zeros(size_of(table), np.int64)
    for name in names:
        values, code = np.unique(table[name], return_inverse=True)
        codes = codes * len(values) + code
    _, first, group, counts = np.unique(
        codes, return_index=True, return_inverse=True, return_counts=True
    )
    return first, group, counts


def joined(tables: Sequence[Columns]) -> Columns:
    """The rows of tables that have the same columns, one table after the other."""
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
