"""Iterables that have a state: a resumed run goes on in the middle, without reading again.

The protocol is torchdata's; its own loader is tested where it is installed.
"""

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import paceline
from paceline.comm.rendezvous import Ranks
from paceline.train.custom.feed import BatchPartition, feed_of
from paceline.train.custom.plain import NotPlainError, from_plain, to_plain

NUM, BATCH, MICRO = 21, 4, 2

pytestmark = pytest.mark.usefixtures("as_if_alone")


class Order:
    """Samples in an order that is drawn at each pass; it counts what is read of it."""

    def __init__(self) -> None:
        self.num_read = 0
        self._kept: dict[str, Any] | None = None
        self._state: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Tensor]:
        kept, self._kept = self._kept, None
        order = np.random.permutation(NUM) if kept is None else kept["order"]
        for place in range(0 if kept is None else kept["place"], NUM):
            self._state = {"order": order, "place": place + 1}
            self.num_read += 1
            yield torch.tensor([float(order[place]), random.random(), float(torch.rand(()))])

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept = state


class Counting(Order, IterableDataset):
    """As samples."""


class Batches(Order):
    """As whole batches."""

    def __iter__(self) -> Iterator[Tensor]:
        for sample in super().__iter__():
            yield sample.repeat(BATCH, 1)


class Object(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"self": self}


def feed(data: Any):
    return feed_of(data, BatchPartition(BATCH, MICRO, 0, Ranks()), None, None)


def rows(step: list[Any]) -> list[Any]:
    return [part.batch.tolist() for part in step]


@pytest.mark.parametrize("kind", [Counting, Batches])
@pytest.mark.parametrize("done", [1, 5, 6, 11, 20, 21, 22])
def test_a_resumed_run_reads_the_rest_alone(kind, done):
    """Also where a pass has ended, or ends within a batch."""
    undisturbed = [rows(step) for step in islice(feed(kind()).steps(0), 30)]
    first = feed(kind())
    assert [rows(step) for step in islice(first.steps(0), done)] == undisturbed[:done]
    state = first.state()
    data = kind()
    resumed = feed(data)
    resumed.load(state)
    rest = [rows(step) for step in islice(resumed.steps(done * BATCH), 30 - done)]
    assert rest == undisturbed[done:]
    assert data.num_read == (30 - done) * (BATCH if kind is Counting else 1)


def test_an_older_state_is_gone_on_from_and_a_newer_one_is_not_used():
    undisturbed = [rows(step) for step in islice(feed(Counting()).steps(0), 12)]
    first = feed(Counting())
    list(islice(first.steps(0), 4))
    state = first.state()
    for wanted, num_read in ((6, 2 + 6), (3, 3 + 9)):
        data = Counting()
        resumed = feed(data)
        resumed.load(state)
        rest = islice(resumed.steps(wanted * BATCH), 12 - wanted)
        assert [rows(step) for step in rest] == undisturbed[wanted:]
        assert data.num_read == num_read * BATCH


def test_a_state_with_an_object_in_it_is_said_and_read_again():
    data, said = Object(), []
    first = feed(data)
    first.tell_by(said.append)
    undisturbed = [rows(step) for step in islice(first.steps(0), 8)]
    assert first.state() is None
    assert first.state() is None
    assert len(said) == 1
    assert "has a Object in it" in said[0]
    resumed = feed(Object())
    resumed.load(None)
    assert [rows(step) for step in islice(resumed.steps(5 * BATCH), 3)] == undisturbed[5:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
@pytest.mark.parametrize("num_workers", [0, 1])
def test_torchdata_goes_on(num_workers):
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is missing")

    def loader() -> Any:
        data = [torch.tensor([float(number)]) for number in range(NUM * BATCH)]
        return loaders.StatefulDataLoader(
            data, BATCH, shuffle=True, num_workers=num_workers, generator=torch.Generator()
        )

    # Batches of a loader that is no plain one are taken as they come.
    undisturbed = [rows(step) for step in islice(feed(loader()).steps(0), 30)]
    first = feed(loader())
    list(islice(first.steps(0), 9))
    resumed = feed(loader())
    resumed.load(first.state())
    assert [rows(step) for step in islice(resumed.steps(9 * BATCH), 21)] == undisturbed[9:]


def test_a_hugging_face_stream_goes_on():
    datasets = pytest.importorskip("datasets")
    columns = {"id": list(range(NUM)), "x": [[i, i + 1] for i in range(NUM)]}

    def stream() -> Any:
        whole = datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=3)
        return whole.shuffle(seed=3, buffer_size=1)

    def ids(steps: Iterator[list[Any]], count: int) -> list[Any]:
        return [[part.batch["id"].tolist() for part in step] for step in islice(steps, count)]

    undisturbed = ids(feed(stream()).steps(0), 12)
    first = feed(stream())
    ids(first.steps(0), 3)
    resumed = feed(stream())
    assert first.state() is not None
    resumed.load(first.state())
    assert ids(resumed.steps(3 * BATCH), 9) == undisturbed[3:]


def test_a_run_keeps_the_state_in_its_checkpoints(tmp_path):
    def run(folder: str, steps: int, data: Counting) -> paceline.Run:
        torch.manual_seed(0)
        job = {
            "name": "own",
            "cluster": {"devices_per_node": 1},
            "train": {"steps": steps, "global_batch": BATCH},
            "observe": {"tensorboard": False},
            "optim": {"schedule": "constant"},
        }
        loss = _loss
        return paceline.train(job, nn.Linear(3, 1), loss, data, runs=tmp_path / folder)

    whole = run("whole", 9, Counting())
    run("cut", 5, Counting())
    data = Counting()
    cut = run("cut", 9, data)
    assert [line["loss"] for line in cut.metrics()] == [line["loss"] for line in whole.metrics()]
    assert data.num_read == 4 * BATCH


def _loss(module: nn.Module, batch: Tensor) -> Tensor:
    return module(batch).square().mean()


def test_plain_data_comes_back_as_it_was():
    value = {
        "a": [1, 2.5, None, True, "text", b"\x00\xff"],
        3: (1, (2,)),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(0.25),
        "tensor": torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8),
        "paceline": {"paceline": 1},
    }
    found = from_plain(to_plain(value))
    assert found.keys() == value.keys()
    assert found["a"] == value["a"]
    assert found[3] == (1, (2,))
    assert found["array"].dtype == np.int16
    assert found["array"].tolist() == value["array"].tolist()
    assert found["scalar"] == np.float32(0.25)
    assert torch.equal(found["tensor"], value["tensor"])
    assert found["paceline"] == {"paceline": 1}
    with pytest.raises(NotPlainError, match="Counting"):
        to_plain({"a": [Counting()]})
