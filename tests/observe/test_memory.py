"""Memory over a window: what the recorders write (a CPU), and what is read of CUDA's snapshots.

No CUDA device is needed: an allocator made for the test writes the format that torch documents, and
knows the truth that the reader must find again.
"""

import json
import mmap
import pickle
import random

import numpy as np
import pytest
import torch

from paceline.config.errors import InputError
from paceline.observe.memory import ResidentMemory
from paceline.observe.snapshot import CATEGORIES, MemoryOverTime

FORWARD = [("/site/torch/nn/modules/linear.py", "forward"), ("/mine/loop.py", "train")]
# Who asks and who gives back (None: nobody does) -> what it is.
LIVES = {
    "activations": (FORWARD, []),
    "grads": ([], [("/site/torch/optim/optimizer.py", "zero_grad")]),
    "gather_buffers": ([("/site/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "alloc")], []),
    "comm_buffers": ([("/site/torch/distributed/distributed_c10d.py", "all_reduce")], []),
    "optimizer": ([("/site/torch/optim/adamw.py", "step")], FORWARD),
    "logits": ([("/site/torch/nn/functional.py", "cross_entropy"), *FORWARD], []),
    "unattributed": ([("/mine/loop.py", "train")], FORWARD),
}
SIZE = 512


def frames(places):
    return [{"filename": file, "line": 1, "name": name} for file, name in places]


class Allocator:
    """Gives blocks of one segment at a time, writes the history, and remembers the truth."""

    def __init__(self):
        self.events, self.live, self.truth, self.num_segments = [], {}, [], 0
        self.note()

    def note(self):
        row = dict.fromkeys(CATEGORIES, 0)
        for category in self.live.values():
            row[category] += SIZE
        row["allocator_slack"] = self.num_segments * 64 * SIZE - sum(row.values())
        self.truth.append(list(row.values()))

    def event(self, action, address, size=SIZE, places=()):
        at_us = 1000 + 10 * len(self.events)
        entry = {"action": action, "addr": address, "size": size, "frames": frames(places)}
        self.events.append({**entry, "stream": 0, "time_us": at_us})
        self.note()

    def grow(self):
        self.num_segments += 1
        self.event("segment_alloc", (self.num_segments - 1) * 64 * SIZE + 4096, 64 * SIZE)

    def take(self, address, category, *, before=False):
        self.live[address] = category
        if before:
            self.truth.pop()
            self.note()
        else:
            self.event("alloc", address, places=LIVES[category][0])

    def give(self, address):
        category = self.live[address]
        self.event("free_requested", address, places=LIVES[category][1])
        del self.live[address]
        self.event("free_completed", address)

    def snapshot(self):
        segments = []
        for number in range(self.num_segments):
            base = number * 64 * SIZE + 4096
            blocks = [
                {"size": SIZE, "state": self.state(base + at * SIZE), "address": base + at * SIZE}
                for at in range(64)
            ]
            segments.append({"address": base, "total_size": 64 * SIZE, "blocks": blocks})
        return {"segments": segments, "device_traces": [self.events]}

    def state(self, address):
        return "active_allocated" if address in self.live else "inactive"


def written(folder, snapshot, held=None):
    file = folder / "rank0-step4.pickle"
    file.write_bytes(pickle.dumps(snapshot))
    if held is not None:
        file.with_suffix(".json").write_text(json.dumps({"held": held}))
    return file


@pytest.mark.parametrize("seed", range(5))
def test_every_category_is_found_again_at_every_moment(tmp_path, seed):
    draw = random.Random(seed)
    allocator = Allocator()
    allocator.num_segments = 2
    places = [4096 + at * SIZE for at in range(128)]
    held = places[:6]
    for address in held:  # there before the history, and named by their owner
        allocator.take(address, "params", before=True)
    for _ in range(400):
        address = draw.choice(places[6:])
        if address in allocator.live:
            allocator.give(address)
        else:
            allocator.take(address, draw.choice(list(LIVES)))
    for address in [each for each in allocator.live if each not in held]:
        allocator.give(address)
    file = written(tmp_path, allocator.snapshot(), {"params": [(each, SIZE) for each in held]})
    read = MemoryOverTime.read(file)
    np.testing.assert_array_equal(read.bytes, allocator.truth)
    assert read.has_times
    assert read.times_us[:3].tolist() == [0, 10, 20]


def test_what_was_reserved_within_the_history_was_not_before(tmp_path):
    allocator = Allocator()
    allocator.grow()
    allocator.take(4096, "activations")
    allocator.give(4096)
    allocator.grow()
    read = MemoryOverTime.read(written(tmp_path, allocator.snapshot()))
    np.testing.assert_array_equal(read.bytes, allocator.truth)
    assert read.peak == {"activations": SIZE, "allocator_slack": 63 * SIZE}


def test_what_nobody_is_known_to_own_is_unattributed(tmp_path):
    allocator = Allocator()
    allocator.num_segments = 1
    allocator.take(4096, "params", before=True)
    read = MemoryOverTime.read(written(tmp_path, allocator.snapshot()))
    assert read.peak == {"unattributed": SIZE, "allocator_slack": 63 * SIZE}


class Harmful:
    def __reduce__(self):
        return (print, ("it ran",))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not a pickle", "no snapshot of CUDA memory"),
        (pickle.dumps([1, 2]), "not a snapshot of CUDA memory"),
        (pickle.dumps(Harmful()), "it names builtins.print"),
        (b"", "no snapshot of CUDA memory"),
    ],
    ids=["text", "other data", "code", "empty"],
)
def test_what_is_no_snapshot_is_said_and_never_run(tmp_path, capsys, content, words):
    file = tmp_path / "x.pickle"
    file.write_bytes(content)
    with pytest.raises(InputError, match=words):
        MemoryOverTime.read(file)
    assert capsys.readouterr().out == ""


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        MemoryOverTime.read(tmp_path / "x.pickle")


def test_on_a_cpu_resident_memory_is_sampled(tmp_path):
    recorder = ResidentMemory(tmp_path / "memory")
    recorder.begin()
    for _ in range(3):
        # 128 MiB, touched. Not of malloc's, which may have kept as much from a test before.
        with mmap.mmap(-1, 128 << 20) as pages:
            held = torch.frombuffer(pages, dtype=torch.float32)
            for _ in range(20):
                held.add_(1)
            del held
    recorder.end("rank0-step4")
    samples = json.loads((tmp_path / "memory/rank0-step4.json").read_text())["resident"]
    seconds, resident = zip(*samples, strict=True)
    assert list(seconds) == sorted(seconds)
    assert max(resident) - resident[0] > 100 << 20
    recorder.begin()
    recorder.end(None)
    assert [each.name for each in (tmp_path / "memory").iterdir()] == ["rank0-step4.json"]
