"""litdata's StreamingDataset of tokens, in its StreamingDataLoader."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import litdata
import numpy as np
import torch
from litdata.streaming.item_loader import TokensLoader
from torch import Tensor

from benchmarks.loaders.task import Asked, do_what_is_asked

NAME = "lit"
_CHUNK_ROWS, _ROWS_AT_ONCE = 2048, 1024


def write(task: Asked) -> None:
    """Make its form of the corpus."""
    size = task.seq_len + 1
    litdata.optimize(
        partial(_rows_from, task),
        list(range(0, len(task.rows()), _ROWS_AT_ONCE)),
        output_dir=str(Path(task.folder) / NAME),
        chunk_size=_CHUNK_ROWS * size,
        item_loader=TokensLoader(block_size=size),
        num_workers=1,
    )


def _rows_from(task: Asked, first: int) -> Iterator[Tensor]:
    for row in task.rows()[first : first + _ROWS_AT_ONCE]:
        yield torch.from_numpy(np.array(row))


def _batches(task: Asked) -> Iterator[Tensor]:
    place = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]} if task.in_store else {}
    dataset = litdata.StreamingDataset(
        task.place_of(NAME),
        item_loader=TokensLoader(block_size=task.seq_len + 1),
        shuffle=True,
        seed=task.seed,
        cache_dir=task.cache if task.in_store else None,
        storage_options=place,
    )
    return iter(litdata.StreamingDataLoader(dataset, batch_size=task.batch))


if __name__ == "__main__":
    do_what_is_asked("litdata", write, _batches, lambda batch: batch.numpy())
