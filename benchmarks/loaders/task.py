"""What a loader is asked, and how its answer is timed; needs no package but numpy and torch."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

BUCKET = "corpus"


@dataclass(frozen=True)
class Asked:
    """Batches of a corpus."""

    folder: str
    """Has each loader's form of the corpus under the loader's name, and rows.npy."""
    cache: str
    """An empty folder."""
    batch: int
    seq_len: int
    num_batches: int
    seed: int
    in_store: bool
    """Whether the corpus is to be read from s3://BUCKET, and not from the folder."""

    def write(self, file: Path) -> None:
        """For `asked`."""
        file.write_text(json.dumps(asdict(self)))

    def place_of(self, name: str) -> str:
        """Where a loader's form is."""
        return f"s3://{BUCKET}/{name}" if self.in_store else f"{self.folder}/{name}"

    def rows(self) -> np.ndarray:
        """The corpus, (samples, seq_len + 1) int32, mapped."""
        return np.load(Path(self.folder) / "rows.npy", mmap_mode="r")


def asked() -> Asked:
    """What this process was started for."""
    torch.set_num_threads(1)
    return Asked(**json.loads(Path(sys.argv[1]).read_text()))


def do_what_is_asked(
    package: str,
    write: Callable[[Asked], None],
    batches: Callable[[Asked], Iterator[Any]],
    rows_of: Callable[[Any], np.ndarray],
) -> None:
    """Make a loader's form of the corpus, or time its batches, see `answer`.

    Args:
        package: of the loader.
        write: makes its form.
        batches: opens it.
        rows_of: maps a batch to its samples.
    """
    task = asked()
    if len(sys.argv) == 2:
        write(task)
        return
    answer(task, version(package), lambda: batches(task), rows_of)


def answer(
    task: Asked,
    loader_version: str,
    read: Callable[[], Iterator[Any]],
    rows_of: Callable[[Any], np.ndarray],
    **more: Any,
) -> None:
    """Time batches, and write the answer.

    Args:
        task: what was asked.
        loader_version: of the package that it is from.
        read: opens the corpus and yields batches.
        rows_of: maps a batch to its samples, (batch, seq_len + 1).
        more: goes into the answer.
    """
    if task.in_store:
        import boto3  # noqa: F401 - some import it when they are opened, some before
    began = time.perf_counter()
    batches = read()
    first = next(batches)
    first_s = time.perf_counter() - began
    began, used = time.perf_counter(), time.process_time()
    for _ in range(task.num_batches):
        next(batches)
    found = {
        "version": loader_version,
        "first_s": first_s,
        "cpu_s": time.process_time() - used,
        "wall_s": time.perf_counter() - began,
        "samples": task.num_batches * task.batch,
        "first_rows": rows_of(first).tolist(),
    }
    Path(sys.argv[2]).write_text(json.dumps(found | more))
