"""The batches of one rank: gather its samples of each step and hand them over as tensors.

How it works: a step takes the next `global_batch` samples of the order (order.py), each rank a
contiguous part of them, cut into micro-batches. The batch is gathered when it is asked for: copying
16 x 257 tokens out of mapped memory takes microseconds, and a background thread would take the
cores and the interpreter lock from the step that runs meanwhile. Small batches are gathered several
steps at once, but for the first step, which a resumed run waits for. What may take long is storage,
so the kernel is told before which pages come next (madvise; measured on 16 x 2049 tokens that
are not in memory, on a local disk: 1.4 ms to gather unadvised, 0.1 ms advised). On CUDA the copy to
the device goes through pinned memory and the host does not wait for it.

The state is one number, `first_sample`: how many samples the run consumed before.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels.loss import IGNORED
from paceline.train.data.order import Ids, rank_share

_IDS_AT_ONCE = 2**14
_GROWTH = 8
"""Of how many are computed at once, from one step on: a resumed run waits for few."""
_TOKENS_AT_ONCE = 2**17
"""Of the steps that are gathered together: two megabytes with their targets."""


class TokenRows(Protocol):
    """What the tokens of samples are read from: a split, or the log of a stream."""

    def gather(self, sample_ids: Ids, seq_len: int) -> NDArray[np.integer]:
        """Their tokens, (ids, seq_len + 1), of any type."""

    def counted(self, sample_ids: Ids, seq_len: int) -> NDArray[np.bool_] | None:
        """Which of their targets the loss counts, (ids, seq_len); None: all."""

    def document_ids(self, sample_ids: Ids, seq_len: int) -> NDArray[np.int64]:
        """The document that each of their tokens is of, (ids, seq_len)."""

    def sources_of(self, sample_ids: Ids, seq_len: int) -> Ids | None:
        """The number of each one's source, (ids,); None: there is one."""


class Samples(TokenRows, Protocol):
    """Samples of a split, or of several (`TokenDataset`, `PackedConversations`, `MixedDataset`)."""

    def num_samples(self, seq_len: int) -> int:
        """How many there are."""

    def order(self, seed: int, seq_len: int) -> Callable[[int, int], Ids]:
        """Maps a running number in a run and a count to ids; fewer where the samples end."""

    def will_need(self, sample_ids: Ids, seq_len: int) -> None:
        """They are gathered soon."""


class MicroBatch(NamedTuple):
    """What one forward pass reads; all are contiguous int64, shape (micro_batch, seq_len) but where
    it is said."""

    tokens: Tensor
    targets: Tensor
    """The token after each; -100 where the loss doesn't count it."""
    document_ids: Tensor | None
    """Running numbers of documents, where attention starts anew at each."""
    sources: Tensor | None = None
    """(micro_batch,): the number of each sample's source, where there are several."""
    reference: Tensor | None = None
    """What the weights that the run began with give, where the loss asks for it."""


@dataclass(frozen=True)
class BatchShape:
    """How the samples of a step are laid out, and which of them are this rank's."""

    global_batch: int
    """Samples of a step over all ranks."""
    micro_batch: int
    """Samples of one forward pass."""
    seq_len: int
    rank: int = 0
    num_ranks: int = 1
    interleave: int = 1
    """Neighbouring ranks that take micro-batches in turns."""
    reset_at_documents: bool = False
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if self.global_batch % (self.num_ranks * self.micro_batch):
            raise InputError(
                f"train.global_batch = {self.global_batch} can't be cut into micro-batches of "
                f"{self.micro_batch} on {self.num_ranks} ranks: make it a multiple."
            )

    def share(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """This rank's of the samples of a step."""
        kind = {"micro_batch": self.micro_batch, "interleave": self.interleave}
        return rank_share(ids, self.rank, self.num_ranks, **kind)

    def shares(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same of several steps: (steps, global_batch) -> (steps, share)."""
        return ids[:, self.share(np.arange(self.global_batch))]


def train_batches(
    dataset: Samples, shape: BatchShape, seed: int, first_sample: int
) -> Iterator[list[MicroBatch]]:
    """Yield this rank's micro-batches of one step after the other, without end.

    Args:
        dataset: what to train on.
        shape: sizes of the batch and this rank's place.
        seed: `train.seed`, which decides the order.
        first_sample: samples that all ranks together consumed before.

    Raises:
        InputError: the split is shorter than one sample, or there are no more samples.
    """
    groups = _groups(dataset.order(seed, shape.seq_len), shape, first_sample)
    ids = next(groups)
    while True:
        steps = load_steps(dataset, shape, ids)
        following = next(groups, None)
        if following is not None:
            dataset.will_need(shape.shares(following).reshape(-1), shape.seq_len)
        yield from steps
        if following is None:
            raise InputError(
                "data.sources have no more samples by their max_epochs: raise one, or train less."
            )
        ids = following


def _groups(
    order: Callable[[int, int], Ids], shape: BatchShape, first: int
) -> Iterator[NDArray[np.int64]]:
    """The samples of steps that are gathered together, (steps, global_batch): one, then more. Many
    are computed at once, which is cheaper."""
    size = shape.global_batch
    share = size // shape.num_ranks * (shape.seq_len + 1)
    num_steps = max(1, _TOKENS_AT_ONCE // share)
    count, most = size, max(1, _IDS_AT_ONCE // size) * size
    while len(ids := order(first, count)) >= size:
        steps = ids[: len(ids) - len(ids) % size].reshape(-1, size)
        for at in range(0, len(steps), num_steps):
            yield steps[at : at + num_steps]
        first, count = first + count, min(_GROWTH * count, most)


def eval_batches(
    dataset: Samples, shape: BatchShape, num_batches: int
) -> Iterator[list[MicroBatch]]:
    """Yield this rank's micro-batches of the first global batches of a split, in its own order.

    A split of fewer samples is read again from its start.

    Raises:
        InputError: the split is shorter than one sample.
    """
    num_samples = dataset.num_samples(shape.seq_len)
    for batch in range(num_batches):
        first = batch * shape.global_batch
        ids = np.arange(first, first + shape.global_batch) % num_samples
        yield load(dataset, shape, ids)


def load(dataset: TokenRows, shape: BatchShape, ids: NDArray[np.int64]) -> list[MicroBatch]:
    """This rank's micro-batches of the samples of a step."""
    return load_steps(dataset, shape, ids[None])[0]


def load_steps(
    dataset: TokenRows, shape: BatchShape, ids: NDArray[np.int64]
) -> list[list[MicroBatch]]:
    """This rank's micro-batches of several steps, whose samples are `ids` (steps, global_batch)."""
    micro_batches = _micro_batches(dataset, shape, shape.shares(ids).reshape(-1))
    count = len(micro_batches) // len(ids)
    return [micro_batches[at : at + count] for at in range(0, len(micro_batches), count)]


def _micro_batches(
    dataset: TokenRows, shape: BatchShape, ids: NDArray[np.int64]
) -> list[MicroBatch]:
    samples = dataset.gather(ids, shape.seq_len)
    both = np.empty((2, len(ids), shape.seq_len), np.int64)
    both[0], both[1] = samples[:, :-1], samples[:, 1:]
    counted = dataset.counted(ids, shape.seq_len)
    if counted is not None:
        both[1][~counted] = IGNORED
    parts = _to_device(both, shape.device).view(-1, shape.micro_batch, shape.seq_len).unbind()
    tokens, targets = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    documents: tuple[Tensor | None, ...] = (None,) * len(tokens)
    if shape.reset_at_documents:
        document_ids = _to_device(dataset.document_ids(ids, shape.seq_len), shape.device)
        documents = document_ids.split(shape.micro_batch)
    sources: tuple[Tensor | None, ...] = (None,) * len(tokens)
    if (numbers := dataset.sources_of(ids, shape.seq_len)) is not None:
        sources = _to_device(numbers, shape.device).split(shape.micro_batch)
    return [MicroBatch(*parts) for parts in zip(tokens, targets, documents, sources, strict=True)]


def _to_device(array: NDArray[Any], device: torch.device | str) -> Tensor:
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        # The caching host allocator keeps the pinned memory until the copy is done.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
