"""Tables as training sees them: rows for a batch, and their gradients afterwards.

`Tables` lends rows to a forward pass as leaves of autograd's graph, each distinct row once, and
collects their gradients when the step is over. Where rows live is up to two kinds of it:
`ServedTables` pulls from and pushes to servers; `AllToAllTables` (in `all_to_all`) has whole tables
on ranks, and exchanges ids, rows and gradients by all-to-all. Both update rows by the same code
(`recommender.parameter_server.rows.RowStore`), so both equal one process that holds everything.

The tables are no parameters of the module: DDP never sees them, gradient clipping leaves them out,
and the run's checkpoints keep them beside the module's, through `save` and `load`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.recommender.parameter_server.cache import RowCache
from paceline.recommender.parameter_server.client import Servers
from paceline.recommender.parameter_server.consistent_hash import Ids, RowPlacement
from paceline.recommender.parameter_server.rows import Rows, merged
from paceline.recommender.parameter_server.supervisor import SupervisedServer
from paceline.recommender.parameter_server.wire import MessageKind

Say = Callable[[str], None]


class Tables(Protocol):
    """What training asks of tables, on every rank in the same order."""

    def open(self, folder: Path, run_checkpoints: Path, say: Say) -> None:
        """Get ready; `folder` keeps the tables' checkpoints, `say` takes sentences for a person."""

    def rows(self, ids: Tensor) -> Tensor:
        """Row ids (batch, tables), numbered within their table -> rows (batch, tables, dim)."""

    def finish(self, lr: float, *, skip: bool) -> None:
        """Send the gradients of all rows lent since the last call; `skip`: none of them counts."""

    def save(self, step: int) -> None:
        """Keep the tables as they are after `step` steps."""

    def load(self, step: int) -> None:
        """Go back to how they were after `step` steps, 0: to the start."""

    def figures(self) -> dict[str, float]:
        """What a line of metrics says about the last step."""

    def close(self) -> None:
        """End whatever was started."""


class BorrowedRows(NamedTuple):
    """Rows that a forward pass reads."""

    ids: Ids
    """Each once."""
    leaf: Tensor
    """(rows, dim)"""


class ServerPlan(NamedTuple):
    """What the servers of a run are, apart from where they are."""

    placement: RowPlacement
    dim: int
    num_workers: int
    worker: int
    lag: int | None
    """Of pulls, in steps; None: any."""
    cache_rows: int
    staleness: int
    """Of cached rows, in steps."""
    timeout_s: float


class ServedTables:
    """Rows held by servers.

    Args:
        serving: what is served.
        start: starts this rank's servers and tells all ranks where all of them are: given folder,
            the run's checkpoints and say, it returns the servers kept here, all addresses, the key.
        device: of the rows.
    """

    def __init__(
        self, serving: ServerPlan, start: Callable[..., Any], device: torch.device
    ) -> None:
        self.serving, self.device = serving, device
        self._start = start
        self._kept: list[SupervisedServer] = []
        self._servers: Servers | None = None
        self._step = 0
        self._lent: list[BorrowedRows] = []
        rows, age = serving.cache_rows, serving.staleness
        self._cache = RowCache(rows, serving.dim, age) if rows else None
        self._num_pulled = 0

    def open(self, folder: Path, run_checkpoints: Path, say: Say) -> None:
        """Start the servers."""
        self._kept, addresses, key = self._start(folder, run_checkpoints, say)
        serving = self.serving
        self._servers = Servers(
            serving.placement, serving.dim, addresses, key, serving.worker, serving.timeout_s
        )

    def rows(self, ids: Tensor) -> Tensor:
        """Pull the distinct rows of a batch."""
        numbered = ids.cpu().numpy() + self.serving.placement.numbering.offsets[:-1]
        distinct, inverse = np.unique(numbered, return_inverse=True)
        leaf = torch.from_numpy(self._pull(distinct)).to(self.device)
        if torch.is_grad_enabled():
            self._lent.append(BorrowedRows(distinct, leaf.requires_grad_()))
        places = torch.from_numpy(inverse.reshape(ids.shape)).to(self.device)
        return torch.nn.functional.embedding(places, leaf)

    def _pull(self, ids: Ids) -> Rows:
        servers = self._connected()
        if self._cache is None:
            self._num_pulled += len(ids)
            return servers.pull(ids, self._step)[0]
        values = np.empty((len(ids), self.serving.dim), np.float32)
        missing = ~self._cache.look_up(ids, self._step, values)
        self._num_pulled += int(missing.sum())
        if missing.any():
            pulled, clock = servers.pull(ids[missing], self._step)
            if self.serving.lag is None:
                clock = self._step  # without a bound, a row's age is what this worker has seen
            values[missing] = pulled
            self._cache.put(ids[missing], pulled, clock)
        return values

    def finish(self, lr: float, *, skip: bool) -> None:
        """Push the gradients of this worker's share of the mean loss."""
        lent, self._lent = self._lent, []
        ids, gradients = merged_gradients(lent, self.serving.dim, skip=skip)
        gradients = gradients / np.float32(self.serving.num_workers)
        self._connected().push(ids, gradients, self._step, lr)
        self._step += 1

    def save(self, step: int) -> None:
        """Have the servers keep their rows."""
        self._connected().settle()  # before the first worker asks, all pushes have arrived
        self._from_first(MessageKind.SAVE, step)

    def load(self, step: int) -> None:
        """Have the servers load their rows."""
        for kept in self._kept:
            kept.set_base(step)
        self._from_first(MessageKind.LOAD, step)
        self._connected().greet(step)
        self._step = step
        if self._cache is not None:
            self._cache.clear()

    def _from_first(self, kind: MessageKind, step: int) -> None:
        """Let one worker ask for all of them."""
        together()
        if self.serving.worker == 0:
            self._connected().ask_all(kind, step)
        together()

    def figures(self) -> dict[str, float]:
        """Rows pulled by this worker in this step, and what its cache was worth so far."""
        pulled, self._num_pulled = self._num_pulled, 0
        figures = {"rows_pulled": float(pulled)}
        if self._cache is not None and self._cache.num_asked:
            figures["cache_hits"] = self._cache.num_hits / self._cache.num_asked
        return figures

    def close(self) -> None:
        """End this rank's servers, once nobody needs them any more."""
        if self._servers is not None:
            self._servers.close()
        for kept in self._kept:
            kept.close()

    def _connected(self) -> Servers:
        assert self._servers is not None, "open comes first"
        return self._servers


def merged_gradients(lent: list[BorrowedRows], dim: int, *, skip: bool) -> tuple[Ids, Rows]:
    """The gradients of rows lent to several micro-batches: each row once."""
    used = [] if skip else [one for one in lent if one.leaf.grad is not None]
    if not used:
        return np.empty(0, np.int64), np.empty((0, dim), np.float32)
    gradients = [_host(one.leaf.grad) for one in used]
    if len(used) == 1:
        return used[0].ids, gradients[0]
    return merged(np.concatenate([one.ids for one in used]), np.concatenate(gradients))


def _host(gradient: Tensor | None) -> Rows:
    assert gradient is not None
    return gradient.float().cpu().numpy()


def together() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))
