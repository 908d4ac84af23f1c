"""A worker's cache of hot rows, each with the clock it was pulled at.

A row pulled when all updates of the first c steps were in may be used for step t as long as
t - c <= staleness: the promise is the same as that of a pull in stale mode (the cache of Ho et al.,
NIPS 2013). A row has one place it can be, by a hash of its id. Where two want the same place, the
one that is there stays while it is hit between two attempts of the other: hot rows settle, rows
seen once don't drive them out.

A worker's own pushes don't change its cached rows: they too are seen within the staleness.
"""

import numpy as np

from paceline.recommender.parameter_server.consistent_hash import Ids, mix
from paceline.recommender.parameter_server.rows import Rows

_EMPTY = -1


class RowCache:
    """Up to `num_rows` rows of `dim` values that are at most `staleness` steps old."""

    def __init__(self, num_rows: int, dim: int, staleness: int) -> None:
        self.staleness = staleness
        self.num_hits = self.num_asked = 0
        self._ids = np.full(num_rows, _EMPTY, np.int64)
        self._clock = np.zeros(num_rows, np.int64)
        self._was_hit = np.zeros(num_rows, bool)
        self._values = np.zeros((num_rows, dim), np.float32)

    def look_up(self, ids: Ids, step: int, values: Rows) -> np.ndarray:
        """Fill in the rows that are here and fresh enough; return which those are, as booleans.

        Args:
            ids: rows, each once.
            step: the step that is about to be computed.
            values: filled in place, shape (len(ids), dim).
        """
        place = self._place(ids)
        hit = (self._ids[place] == ids) & (step - self._clock[place] <= self.staleness)
        values[hit] = self._values[place[hit]]
        self._was_hit[place[hit]] = True
        self.num_hits += int(hit.sum())
        self.num_asked += len(ids)
        return hit

    def put(self, ids: Ids, values: Rows, clock: int) -> None:
        """Keep rows that were just pulled, where nothing hotter is in their place."""
        place = self._place(ids)
        stays = self._was_hit[place] & (self._ids[place] != ids)
        self._was_hit[place[stays]] = False
        enters = ~stays
        _, first = np.unique(place[enters], return_index=True)  # of several, one
        chosen = np.flatnonzero(enters)[first]
        into = place[chosen]
        self._ids[into], self._clock[into] = ids[chosen], clock
        self._values[into] = values[chosen]

    def clear(self) -> None:
        """Forget everything."""
        self._ids[:] = _EMPTY

    def _place(self, ids: Ids) -> Ids:
        return (mix(ids.astype(np.uint64)) % np.uint64(len(self._ids))).astype(np.int64)
