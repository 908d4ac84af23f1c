"""Traffic: the collectives of profiled steps, by what they do: bytes, seconds, bus bandwidth.

A collective begins for real when its last rank arrives: what passes from then on is the link's
time, what passed before is waiting. A line through (bytes, seconds) gives latency and rate. Bus
bandwidth is nccl-tests' (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): what each rank must
send, at least, over the time.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.observe.account import Account
from paceline.observe.terms import AXES, EXPOSED_COMM, TERM_ID

Array = npt.NDArray[Any]

SMALL_BYTES = 4096
"""Collectives of fewer bytes carry numbers, not tensors: their time is latency."""
_AS_MUCH = 0.8


class Flow(NamedTuple):
    """All collectives of a kind over an axis, per step of a rank."""

    axis: str | None
    op: str
    num_ranks: int
    """0: not known."""
    num_calls: float
    bytes: float
    """Of whole buffers; 0 where they are not known."""
    total_s: float
    """Durations, overlapped or not, waiting included."""
    link_s: float
    """Without waiting for the last rank, where that is known."""
    exposed_s: float
    expected_s: float | None = None
    """On the link, by the cluster's curves; None where they don't say."""

    @property
    def bus_bytes_per_s(self) -> float | None:
        """None where bytes or ranks are not known."""
        if not self.bytes or not self.num_ranks or not self.link_s:
            return None
        return self.bytes * bus_factor(self.op, self.num_ranks) / self.link_s


class FittedLink(NamedTuple):
    """Seconds of a message = latency + bytes / rate, as the collectives themselves say."""

    latency_s: float
    bytes_per_s: float


def bus_factor(op: str, num_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""
    part = (num_ranks - 1) / num_ranks
    if op in ("broadcast", "send", "recv", "send_recv"):
        return 1.0
    return 2 * part if op == "all_reduce" else part


@dataclass(frozen=True, eq=False)
class CollectiveTraffic:
    """The collectives of an account, each with what it took without waiting for a late rank."""

    account: Account
    rows: Array
    """The account's collectives."""
    link_ns: Array
    """How long each took from when its last rank came."""

    @classmethod
    def of(cls, account: Account) -> "CollectiveTraffic":
        """That of an account."""
        rows = np.sort(account.collectives, order=["rank", "start_ns"])
        return cls(account, rows, rows["duration_ns"] - rows["wait_ns"])

    def is_axis(self, *axes: str) -> Array:
        """Which rows are of these axes."""
        return np.isin(self.rows["axis"], [AXES.index(axis) for axis in axes])

    def is_op(self, *ops: str) -> Array:
        """Which rows are of these kinds ("all_reduce", ...)."""
        known = [at for at, name in enumerate(self.account.names) if name in ops]
        return np.isin(self.rows["name"], known)

    @cached_property
    def is_large(self) -> Array:
        """Which rows carry tensors, not a few numbers; all, where nothing says how many bytes."""
        known = self.rows["bytes"] >= 0
        return self.rows["bytes"] > SMALL_BYTES if known.any() else np.ones(len(known), bool)

    @cached_property
    def num_steps(self) -> int:
        """Steps of all ranks together: what per-step figures are divided by."""
        return max(1, len(self.account.steps))

    def per_step(self, where: Array, column: str) -> float:
        """Mean over steps and ranks of a column's sum; seconds for times."""
        total = float(np.maximum(self.rows[column][where], 0).sum()) / self.num_steps
        return total / 1e9 if column.endswith("_ns") else total

    def count(self, where: Array) -> float:
        """Collectives of a rank in a step."""
        return float(np.count_nonzero(where)) / self.num_steps

    def link_s(self, where: Array) -> float:
        """Seconds per step without waiting for the last rank."""
        return float(self.link_ns[where].sum()) / self.num_steps / 1e9

    def sent_exposed_s(self, where: Array) -> float:
        """Exposed seconds per step of some collectives, without waiting for late ranks: their
        share of the term that has those of their axis."""
        total = 0.0
        for axis in np.unique(self.rows["axis"][where]).tolist():
            beside = self.rows["axis"] == axis
            of_axis = self.per_step(beside, "exposed_ns")
            share = self.per_step(where & beside, "exposed_ns") / of_axis if of_axis else 0.0
            term = TERM_ID[f"{EXPOSED_COMM}.{AXES[axis]}" if axis >= 0 else EXPOSED_COMM]
            total += share * float(self.account.terms_ns[:, term].sum()) / self.num_steps / 1e9
        return total

    def passes(self, where: Array) -> int:
        """In how many passes of a step the same buffers travel: the median over steps and ranks.

        A pass counts if it carries four fifths of the bytes of the one that carries most, in
        buffers of the same sizes: two networks that are trained in turn don't.
        """
        rows = self.rows[where & (self.rows["micro_batch"] >= 0)]
        keys = np.stack([rows["rank"], rows["step"]], axis=1)
        steps, which = np.unique(keys, axis=0, return_inverse=True)
        counts = [_passes_alike(rows[which.reshape(-1) == at]) for at in range(len(steps))]
        counts += [0] * (self.num_steps - len(counts))
        return int(np.median(counts)) if counts else 0

    def removed_s(self, where: Array) -> float:
        """Seconds by which a step is shorter without some collectives.

        Each rank goes on earlier by what they held it up; the step by what they held up the rank
        that waited least: what the others waited, they wait at the next meeting.
        """
        pairs = np.stack([self.rows["step"][where], self.rows["rank"][where]], axis=1)
        if not len(pairs):
            return 0.0
        held, which = np.unique(pairs, axis=0, return_inverse=True)
        sums = np.bincount(which.reshape(-1), self.rows["exposed_ns"][where])
        num_ranks = len(self.account.ranks)
        least = [
            sums[held[:, 0] == step].min()
            for step in np.unique(held[:, 0])
            if np.count_nonzero(held[:, 0] == step) == num_ranks
        ]
        num_steps = max(1, self.num_steps // num_ranks)
        return float(sum(least)) / num_steps / 1e9

    def flows(self) -> Iterator[Flow]:
        """Every kind over every axis, the most exposed first."""
        keys = np.stack([self.rows["axis"], self.rows["name"], self.rows["group_size"]], axis=1)
        found = []
        for axis, name, ranks in np.unique(keys, axis=0).tolist():
            where = (keys == [axis, name, ranks]).all(axis=1)
            found.append(
                Flow(
                    AXES[axis] if axis >= 0 else None,
                    self.account.names[name],
                    ranks,
                    self.count(where),
                    self.per_step(where, "bytes"),
                    self.per_step(where, "duration_ns"),
                    self.link_s(where),
                    self.per_step(where, "exposed_ns"),
                )
            )
        yield from sorted(found, key=lambda flow: -flow.exposed_s)

    def link(self, where: Array) -> FittedLink | None:
        """The line through the collectives of a kind; None where fewer than two sizes are known.

        Medians of each size, fitted with the least relative errors; neither part is negative.
        """
        rows, seconds = self.rows[where], self.link_ns[where] / 1e9
        known = (rows["bytes"] > 0) & (seconds > 0)
        sizes = np.unique(rows["bytes"][known])
        if len(sizes) < 2:
            return None
        medians = np.array([np.median(seconds[known & (rows["bytes"] == size)]) for size in sizes])
        parts = np.stack([1 / medians, sizes / medians], axis=1)
        late, per_byte = np.linalg.lstsq(parts, np.ones(len(sizes)), rcond=None)[0]
        if late < 0:
            late, per_byte = 0.0, float(np.median(medians / sizes))
        if per_byte <= 0:
            late, per_byte = float(np.median(medians)), 0.0
        return FittedLink(float(late), 1 / per_byte if per_byte > 0 else float("inf"))


def _passes_alike(rows: Array) -> int:
    """How many passes of one rank's step carry the buffers of the one that carries most."""
    sizes = {
        int(number): Counter(np.maximum(rows["bytes"][rows["micro_batch"] == number], 1).tolist())
        for number in np.unique(rows["micro_batch"])
    }
    most = max(sizes.values(), key=_bytes_of)
    return sum(_bytes_of(each & most) >= _AS_MUCH * _bytes_of(most) for each in sizes.values())


def _bytes_of(sizes: Counter[int]) -> int:
    return sum(size * count for size, count in sizes.items())
