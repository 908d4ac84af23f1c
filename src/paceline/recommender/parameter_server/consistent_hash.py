"""Which server holds a row: a consistent hash of (table, row).

Every server has the same number of points on a circle of 64-bit numbers; a row belongs to the
server of the first point at or after its own hash. One more server takes rows from all others and
moves none between them (Karger et al., STOC 1997, https://doi.org/10.1145/258533.258660). The hash
is the finaliser of splitmix64, a bijection that mixes well; it is not cryptography.

Rows of all tables are numbered through: row r of table t has the id `offsets[t] + r`.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Bits = NDArray[np.uint64]

# The shares of servers differ by about 1 / sqrt(points): 6 %.
_POINTS_PER_SERVER = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Tables may have 2^40 rows.
_ROW_BITS = np.uint64(40)
_POINTS_SALT = np.uint64(1 << 63)


def mix(values: Bits) -> Bits:
    """Spread 64-bit numbers evenly (the finaliser of splitmix64, https://prng.di.unimi.it)."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Numbering:
    """The rows of some tables, numbered through.

    Args:
        tables: rows of each table.
    """

    def __init__(self, tables: tuple[int, ...]) -> None:
        self.tables = tables
        self.offsets: Ids = np.concatenate([[0], np.cumsum(tables)]).astype(np.int64)

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return int(self.offsets[-1])

    def keys(self, ids: Ids) -> Bits:
        """(table, row) of each id, packed into 64 bits: table above, row below."""
        table = np.searchsorted(self.offsets, ids, side="right") - 1
        row = ids - self.offsets[table]
        return (table.astype(np.uint64) << _ROW_BITS) | row.astype(np.uint64)

    def rows_of_table(self, ids: Ids) -> Ids:
        """How many rows the table of each id has."""
        table = np.searchsorted(self.offsets, ids, side="right") - 1
        return np.asarray(self.tables, np.int64)[table]


class HashRing(NamedTuple):
    """The circle: points ascending, and whose each is."""

    points: Bits
    servers: NDArray[np.int64]

    @classmethod
    def of(cls, num_servers: int) -> "HashRing":
        """Put every server's points on the circle."""
        servers = np.repeat(np.arange(num_servers), _POINTS_PER_SERVER)
        number = np.tile(np.arange(_POINTS_PER_SERVER), num_servers).astype(np.uint64)
        points = mix((servers.astype(np.uint64) << np.uint64(32) | number) ^ _POINTS_SALT)
        order = np.argsort(points, kind="stable")
        return cls(points[order], servers[order])

    def server_of(self, keys: Bits) -> NDArray[np.int64]:
        """The server of each packed (table, row)."""
        place = np.searchsorted(self.points, mix(keys))
        return self.servers[place % len(self.points)]


class RowPlacement:
    """Rows of tables on servers."""

    def __init__(self, tables: tuple[int, ...], num_servers: int) -> None:
        self.numbering = Numbering(tables)
        self.num_servers = num_servers
        self._ring = HashRing.of(num_servers)

    def server_of(self, ids: Ids) -> NDArray[np.int64]:
        """The server of each row."""
        return self._ring.server_of(self.numbering.keys(ids))

    @cached_property
    def all_servers(self) -> NDArray[np.int64]:
        """The server of every row there is; only servers ask for it."""
        return self.server_of(np.arange(self.numbering.num_rows))

    def ids_of(self, server: int) -> Ids:
        """The rows of a server, ascending."""
        return np.flatnonzero(self.all_servers == server)
