"""Who reads a dataset's samples: this process, or others once that is seen to hold the steps up."""

import os
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.train.custom.feed import BatchPartition, feed_of
from paceline.train.custom.reading import workers_for

DEAL = BatchPartition(8, 4, 0, Ranks())
NUM = 60


class Slow(Dataset):
    """Takes its time, as a decoder does, and leaves a file of each process that read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.owner = folder, os.getpid()

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        (self.folder / str(os.getpid())).touch()
        return self.sample(index)

    def sample(self, index: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


class Different(Slow):
    """Has a state of its own in each process."""

    def sample(self, index: int) -> torch.Tensor:
        return torch.tensor(float(os.getpid()))


class Owned(Slow):
    """Can't be read by others."""

    def sample(self, index: int) -> torch.Tensor:
        if os.getpid() != self.owner:
            raise RuntimeError("not here")
        return torch.tensor(float(index))


class Damaged(Slow):
    """One sample is none."""

    def sample(self, index: int) -> torch.Tensor:
        if index == 7:
            raise InputError("sample 7 is none")
        return torch.tensor(float(index))


def _read(data: Dataset, workers: int | None, count: int = 20) -> tuple[list, list[str]]:
    """The batches of some steps, and what was said."""
    feed, said = feed_of(data, DEAL, None, workers), []
    feed.tell_by(said.append)
    steps = feed.steps(0)
    found = [part.batch for _ in range(count) for part in next(steps)]
    steps.close()
    return found, said


def _readers(folder: Path) -> set[int]:
    return {int(each.name) for each in folder.iterdir()}


def test_slow_samples_are_read_ahead_and_stay_the_same(tmp_path):
    (tmp_path / "ahead").mkdir()
    ahead, said = _read(Slow(tmp_path / "ahead"), None)
    assert len(said) == 1
    assert "processes of each rank read ahead" in said[0]
    assert len(_readers(tmp_path / "ahead")) > 1
    (tmp_path / "here").mkdir()
    here, nothing = _read(Slow(tmp_path / "here"), 0)
    assert nothing == []
    assert _readers(tmp_path / "here") == {os.getpid()}
    assert torch.equal(torch.stack(ahead), torch.stack(here))


@pytest.mark.parametrize("kind", [Different, Owned])
def test_what_others_read_differently_is_read_here(kind, tmp_path):
    found, said = _read(kind(tmp_path), None)
    assert "differ from these" in said[-1]
    wanted, _ = _read(kind(tmp_path), 0)
    assert torch.equal(torch.stack(found), torch.stack(wanted))


def test_a_sample_that_is_none_ends_in_one_sentence(tmp_path):
    for workers in (0, 1):
        with pytest.raises(InputError, match="sample 7 is none") as error:
            _read(Damaged(tmp_path), workers)
        assert str(error.value) == "sample 7 is none"


def test_as_many_processes_as_keep_up():
    assert workers_for(reading_s=0.001, whole_s=0.002) == 0  # sending takes as long
    assert workers_for(reading_s=0.05, whole_s=1.0) == 0
    assert workers_for(reading_s=0.2, whole_s=1.0) == 1
    assert workers_for(reading_s=0.6, whole_s=0.8) == 3
    assert workers_for(reading_s=0.8, whole_s=0.8) > 100
