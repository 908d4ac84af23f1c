"""Paceline's data path, as `paceline train` reads it."""

import random
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np

from benchmarks.loaders.task import Asked, answer, asked
from paceline.config.job_sections import Data
from paceline.train.data import BatchShape, MicroBatch, prepare_corpus, train_batches

_FURTHEST, _RESUMES = 10**9, 20


TEXTS, TOKENS = "texts.jsonl", "tokens"


def data_of(task: Asked, cache: str) -> Data:
    """The corpus as a Job has it: text on a disk, published tokens in a store."""
    place = task.place_of("paceline")
    if task.in_store:
        data = {"source": f"{place}/{TOKENS}", "format": "tokens"}
    else:
        data = {"source": f"{place}/{TEXTS}"}
    return Data.model_validate(data | {"tokenizer": "bytes", "cache_dir": cache})


def mixture_of(task: Asked, cache: str) -> Data:
    """The same text twice, with other weights from three steps on."""
    names, data = ("once", "again"), data_of(task, cache)
    sources = [{"name": name, "source": data.source, "weight": 1.0} for name in names]
    weights = ({"once": 2.0, "again": 1.0}, {"once": 1.0}, {"once": 1.0, "again": 3.0})
    stages = [
        {"from_step": 10 ** (number + 2), "weights": each} for number, each in enumerate(weights)
    ]
    return Data.model_validate({**data.model_dump(), "sources": sources, "stages": stages})


def steps_of(data: Data, task: Asked, first: int = 0) -> Iterator[list[MicroBatch]]:
    """The steps of one rank from a sample on, from nothing but the Job."""
    shape = BatchShape(task.batch, task.batch, task.seq_len)
    corpus = prepare_corpus(data).for_samples(task.seq_len)
    return train_batches(corpus.train_split(task.batch), shape, task.seed, first)


def main() -> None:
    """Do what is asked."""
    task = asked()
    kept = task.cache if task.in_store else str(Path(task.folder) / "cache")
    resumes = {} if task.in_store else _resumes(task, kept)
    answer(
        task,
        version("paceline"),
        lambda: steps_of(data_of(task, kept), task),
        lambda step: np.concatenate([step[0].tokens.numpy(), step[0].targets.numpy()[:, -1:]], 1),
        resumes=resumes,
    )


def _resumes(task: Asked, kept: str) -> dict[str, list[float]]:
    """Seconds from the Job to the first step after an offset, by the kind of data."""
    pick, found = random.Random(task.seed), {}
    for name, data in (("corpus", data_of(task, kept)), ("mixture", mixture_of(task, kept))):
        next(steps_of(data, task))  # tokenised, or mapped for the first time
        found[name] = []
        for _ in range(_RESUMES):
            first = pick.randrange(_FURTHEST // task.batch) * task.batch
            began = time.perf_counter()
            next(steps_of(data, task, first))
            found[name].append(time.perf_counter() - began)
    return found


if __name__ == "__main__":
    main()
