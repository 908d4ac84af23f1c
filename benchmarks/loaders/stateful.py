"""torchdata's StatefulDataLoader over rows of a mapped file; from a store it is fetched first."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.loaders.task import BUCKET, Asked, do_what_is_asked

NAME = "stateful"


class _Rows(Dataset):
    def __init__(self, file: Path) -> None:
        self._rows = np.load(file, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(np.array(self._rows[index]))


def write(task: Asked) -> None:
    """Make its form of the corpus."""
    np.save(Path(task.folder) / NAME / "rows.npy", task.rows())


def _batches(task: Asked) -> Iterator[Tensor]:
    file = Path(task.place_of(NAME)) / "rows.npy"
    if task.in_store:
        import boto3

        file = Path(task.cache) / "rows.npy"
        boto3.client("s3").download_file(BUCKET, f"{NAME}/rows.npy", str(file))
    torch.manual_seed(task.seed)
    return iter(StatefulDataLoader(_Rows(file), batch_size=task.batch, shuffle=True))


if __name__ == "__main__":
    do_what_is_asked("torchdata", write, _batches, lambda batch: batch.numpy())
