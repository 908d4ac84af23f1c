"""mosaicml-streaming's StreamingDataset of MDS shards, in torch's DataLoader."""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader

from benchmarks.loaders.task import Asked, answer, asked, is_to_write

NAME = "mosaic"


def write(task: Asked) -> None:
    """Make its form of the corpus."""
    columns = {"tokens": f"ndarray:int32:{task.seq_len + 1}"}
    with MDSWriter(out=str(Path(task.folder) / NAME), columns=columns) as writer:
        for row in task.rows():
            writer.write({"tokens": np.array(row)})


def _batches(task: Asked) -> Iterator[dict[str, Any]]:
    place = {"local": task.place_of(NAME)}
    if task.in_store:
        place = {"remote": task.place_of(NAME), "local": task.cache}
    dataset = StreamingDataset(
        **place, shuffle=True, shuffle_seed=task.seed, batch_size=task.batch, num_canonical_nodes=1
    )
    return iter(DataLoader(dataset, batch_size=task.batch))


def main() -> None:
    """Do what is asked."""
    torch.set_num_threads(1)
    task = asked()
    if is_to_write():
        write(task)
        return
    of = version("mosaicml-streaming")
    answer(task, of, lambda: _batches(task), lambda batch: batch["tokens"].numpy())


if __name__ == "__main__":
    main()
