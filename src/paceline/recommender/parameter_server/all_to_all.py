"""Whole tables on ranks, rows by all-to-all: the other layout of the same tables.

Each rank holds a run of tables, as equal in number as can be (every sample reads one row of each).
Forward: every rank sends the ids of its samples to the tables' owners, which send the rows back;
after the backward pass gradients take the same way. Nothing is deduplicated on the wire, and every
rank has micro-batches of one size, so sizes need no exchange of their own.

This is the table-wise layout of torchrec (https://dl.acm.org/doi/10.1145/3523227.3547387).
"""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.config.errors import RunError
from paceline.config.recommender import RowOptim
from paceline.recommender.parameter_server.consistent_hash import Ids, Numbering
from paceline.recommender.parameter_server.rows import Rows, RowStore, merged
from paceline.recommender.parameter_server.snapshot import ServerCheckpoints
from paceline.recommender.parameter_server.tables import Say, together


def table_cuts(num_tables: int, num_ranks: int) -> list[int]:
    """Where each rank's run of tables begins, and where the last one ends."""
    return [num_tables * rank // num_ranks for rank in range(num_ranks + 1)]


class _BorrowedRows(NamedTuple):
    """Rows that a forward pass reads, and what their owners were asked."""

    asked: Ids
    """Ids of rows held here, by the rank that asked."""
    leaf: Tensor
    """(batch, tables, dim)"""


class AllToAllTables:
    """Tables held by the ranks.

    Args:
        numbering: of all tables.
        dim: width of a row.
        seed: of the first values.
        rank: this one.
        num_ranks: how many there are; one holds everything, and exchanges nothing.
        device: of the rows.
    """

    def __init__(
        self,
        numbering: Numbering,
        dim: int,
        seed: int,
        optim: RowOptim,
        rank: int,
        num_ranks: int,
        device: torch.device,
    ) -> None:
        self.numbering, self.dim, self.device = numbering, dim, device
        self.rank, self.num_ranks = rank, num_ranks
        self.cuts = table_cuts(len(numbering.tables), num_ranks)
        first, stop = (int(numbering.offsets[cut]) for cut in self.cuts[rank : rank + 2])
        self.store = RowStore(numbering, np.arange(first, stop), dim, seed, optim)
        self._widths = [stop - first for first, stop in pairwise(self.cuts)]
        self._lent: list[_BorrowedRows] = []
        self._snapshots: ServerCheckpoints | None = None
        self._run_checkpoints = Path()

    def open(self, folder: Path, run_checkpoints: Path, say: Say) -> None:
        """Note where checkpoints go."""
        self._snapshots = ServerCheckpoints(folder, self.rank, self.num_ranks)
        self._run_checkpoints = run_checkpoints

    def rows(self, ids: Tensor) -> Tensor:
        """Ask the owners for the rows of a batch."""
        numbered = ids.cpu().numpy() + self.numbering.offsets[:-1]
        batch = len(numbered)
        asked = self._to_owners(numbered)
        found = self._from_owners(torch.from_numpy(self.store.read(asked)), batch)
        leaf = found.to(self.device)
        if torch.is_grad_enabled():
            self._lent.append(_BorrowedRows(asked, leaf.requires_grad_()))
        return leaf

    def _to_owners(self, numbered: Ids) -> Ids:
        """Send ids (batch, tables) to the tables' owners; return those this rank is asked for."""
        parts = [numbered[:, first:stop].ravel() for first, stop in pairwise(self.cuts)]
        sent = torch.from_numpy(np.concatenate(parts))
        return self._exchange(sent, len(numbered), home=False).numpy()

    def _from_owners(self, values: Tensor, batch: int) -> Tensor:
        """Send rows back to whoever asked: (asked, dim) -> (batch, tables, dim)."""
        arrived = self._exchange(values, batch, home=True)
        parts = arrived.split([width * batch for width in self._widths])
        return torch.cat([part.view(batch, -1, self.dim) for part in parts], dim=1)

    def _gradients_to_owners(self, gradient: Tensor) -> Rows:
        """(batch, tables, dim) -> (asked, dim)"""
        batch = len(gradient)
        parts = [
            gradient[:, first:stop].reshape(-1, self.dim) for first, stop in pairwise(self.cuts)
        ]
        return self._exchange(torch.cat(parts), batch, home=False).numpy()

    def _exchange(self, sent: Tensor, batch: int, *, home: bool) -> Tensor:
        """All-to-all of what belongs to the samples of each rank, by tables."""
        if self.num_ranks == 1:
            return sent
        by_owner = [width * batch for width in self._widths]
        by_asker = [self._widths[self.rank] * batch] * self.num_ranks
        given, taken = (by_asker, by_owner) if home else (by_owner, by_asker)
        arrived = sent.new_empty((sum(taken), *sent.shape[1:]))
        dist.all_to_all_single(arrived, sent.contiguous(), taken, given)
        return arrived

    def finish(self, lr: float, *, skip: bool) -> None:
        """Send gradients to the owners, and step on the sums of those for the tables held here."""
        lent, self._lent = self._lent, []
        if skip or not lent:  # all ranks skip together
            return
        parts = []
        for one in lent:
            gradient = torch.zeros_like(one.leaf) if one.leaf.grad is None else one.leaf.grad
            parts.append(self._gradients_to_owners(gradient.float().cpu()))
        ids, gradients = merged(np.concatenate([one.asked for one in lent]), np.concatenate(parts))
        self.store.update(ids, gradients / np.float32(self.num_ranks), lr)

    def save(self, step: int) -> None:
        """Keep the tables held here.

        Raises:
            OSError: the disk is full, ...
        """
        snapshots = self._opened()
        snapshots.write(step, dict(self.store.arrays()))
        snapshots.tidy(self._run_checkpoints)
        together()

    def load(self, step: int) -> None:
        """Take the tables held here from what all ranks kept, however many they were.

        Raises:
            RunError: something is missing or damaged.
        """
        self.store.reset()
        if not step:
            return
        num_taken = sum(self.store.take(arrays) for arrays in self._opened().read(step))
        if num_taken != len(self.store.ids):
            raise RunError(
                f"the tables' checkpoint of step {step} has {num_taken} of the "
                f"{len(self.store.ids)} rows of rank {self.rank}: start over with --fresh."
            )

    def figures(self) -> dict[str, float]:
        """Nothing is worth a line."""
        return {}

    def close(self) -> None:
        """Nothing was started."""

    def _opened(self) -> ServerCheckpoints:
        assert self._snapshots is not None, "open comes first"
        return self._snapshots
