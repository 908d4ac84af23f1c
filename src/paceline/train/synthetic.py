"""Steps of samples that are made from their indices: nothing to read, nothing to shuffle."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.comm.rendezvous import Ranks
from paceline.config.job import Job
from paceline.train.data import rank_share
from paceline.train.task import Step

EVAL_START = 1 << 48
"""Held-out samples come from here on: no training run gets that far."""

Make = Callable[[NDArray[np.int64]], Any]
"""Maps indices of samples to a micro-batch of them on the rank's device."""


def synthetic_steps(job: Job, ranks: Ranks, make: Make, first: int) -> Iterator[Step]:
    """This rank's steps from sample `first` on."""
    while True:
        yield _step(job, ranks, make, first)
        first += job.train.global_batch


def synthetic_eval_steps(job: Job, ranks: Ranks, make: Make) -> Iterable[Step]:
    """This rank's share of the held-out batches."""
    batch = job.train.global_batch
    return (
        _step(job, ranks, make, EVAL_START + number * batch)
        for number in range(job.train.eval_batches)
    )


def _step(job: Job, ranks: Ranks, make: Make, first: int) -> Step:
    """This rank's share of the global batch that begins with a sample."""
    indices = np.arange(first, first + job.train.global_batch)
    kind = {"micro_batch": job.micro_batch, "interleave": job.interleave}
    mine = rank_share(indices, ranks.rank, ranks.world_size, **kind)
    cuts = range(0, len(mine), job.micro_batch)
    return [make(mine[cut : cut + job.micro_batch]) for cut in cuts]
