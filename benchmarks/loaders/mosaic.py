"""mosaicml-streaming's StreamingDataset of MDS shards, in torch's DataLoader."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader

from benchmarks.loaders.task import Asked, do_what_is_asked

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


if __name__ == "__main__":
    do_what_is_asked("mosaicml-streaming", write, _batches, lambda batch: batch["tokens"].numpy())
