"""Masked tokens: what a network that sees later tokens has to guess.

Which tokens these are, and what stands for them, is a pure function of the seed and of the running
number of a sample in the run: the same on any number of ranks and after any resume, and another in
each epoch.

Paper: BERT https://arxiv.org/abs/1810.04805, section 3.1.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.kernels.loss import IGNORED
from paceline.train.data.batches import BatchShape, MicroBatch

_MASKED, _ANY = 0.8, 0.1
"""Parts of the tokens that are to be guessed; the others stay as they are."""


class Masking(NamedTuple):
    """How tokens are masked."""

    seed: int
    share: float
    """Of the tokens that are to be guessed."""
    token: int
    """Stands for a masked one."""
    num_tokens: int
    """Ids from 0 that others may become."""


def masked(
    steps: Iterable[list[MicroBatch]], shape: BatchShape, masking: Masking | None, first: int
) -> Iterator[list[MicroBatch]]:
    """Mask tokens of this rank's micro-batches, step by step.

    Args:
        steps: of batches; their targets are replaced.
        shape: sizes of a step, and this rank's place.
        masking: None: nothing is masked.
        first: running number of the first step's first sample.
    """
    for batches in steps:
        if masking is None:
            yield batches
            continue
        numbers = shape.share(np.arange(first, first + shape.global_batch))
        parts = np.split(numbers, len(batches))
        yield [_masked(batch, masking, part) for batch, part in zip(batches, parts, strict=True)]
        first += shape.global_batch


def _masked(batch: MicroBatch, masking: Masking, numbers: NDArray[np.int64]) -> MicroBatch:
    tokens, device = batch.tokens, batch.tokens.device
    drawn = [draw(masking, number, tokens.shape[1]) for number in numbers.tolist()]
    guessed, replaced, by = (
        torch.from_numpy(np.stack(part)).to(device, non_blocking=True)
        for part in zip(*drawn, strict=True)
    )
    targets = tokens.masked_fill(~guessed, IGNORED)
    return batch._replace(tokens=torch.where(replaced, by, tokens), targets=targets)


def draw(
    masking: Masking, number: int, seq_len: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.int64]]:
    """What becomes of a sample's tokens.

    Args:
        number: of the sample, in the run.

    Returns:
        which are guessed (at least one), which of them are replaced, and by what: (seq_len,) each.
    """
    random = np.random.Generator(np.random.Philox(key=[masking.seed, number]))
    order, kind = random.random((2, seq_len))
    guessed = order < max(masking.share, float(order.min()) + 1e-12)
    other = random.integers(masking.num_tokens, size=seq_len)
    by = np.where(kind < _MASKED, masking.token, other)
    return guessed, guessed & (kind < _MASKED + _ANY), by
