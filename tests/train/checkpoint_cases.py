"""What the checkpoint tests run: a tiny model in each layout, and functions for gloo ranks."""

import multiprocessing.connection
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from paceline.config.errors import InputError
from paceline.train.checkpoint.checkpointer import Checkpointer
from paceline.train.checkpoint.state import (
    restore_rng_state,
    restore_training_state,
    rng_state,
    training_state,
)

NUM_STEPS_BEFORE = 3
NUM_STEPS_AFTER = 2


class Tiny(nn.Module):
    """Tied embedding, a buffer, parameters that 2 or 4 ranks can't share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.inner = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6, bias=False))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:  # (batch,) -> (batch, vocabulary)
        self.seen += tokens.numel()
        hidden = self.embed(tokens)
        return self.head(hidden + self.inner(hidden)) * self.temperature


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny().double()


def optimizer_of(module: nn.Module, **settings: Any) -> torch.optim.AdamW:
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), **settings)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        tokens = torch.arange(step, step + 5) % 7
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(tokens), (tokens + 1) % 7).backward()
        optimizer.step()


def laid_out(layout: str, seed: int = 0) -> nn.Module:
    """The tiny model as "plain", "ddp", "fsdp", "hsdp" (2 x sharded) or "tp" (2 ways, in FSDP)."""
    module = tiny(seed)
    if layout == "plain":
        return module
    if layout == "ddp":
        return DistributedDataParallel(module)
    num_ranks = dist.get_world_size()
    shape = (num_ranks,) if layout == "fsdp" else (num_ranks // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    if layout == "tp":
        by_column = {"0": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(module.inner, mesh["b"], by_column)
        mesh = mesh["a"]
    fully_shard(module.inner, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """The same nested dict with every DTensor gathered, copied."""
    full: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            full[key] = whole(value)
        elif isinstance(value, Tensor):
            gathered = value.full_tensor() if hasattr(value, "full_tensor") else value
            full[key] = gathered.detach().clone()
        else:
            full[key] = value
    return full


def assert_same(one: Any, other: Any, tolerance: float = 0.0) -> None:
    """Nested dicts hold the same names, and the same numbers up to the tolerance."""
    if isinstance(one, dict):
        assert set(one) == set(other)
        for key in one:
            assert_same(one[key], other[key], tolerance)
    elif isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for own, others in zip(one, other, strict=True):
            assert_same(own, others, tolerance)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)
    else:
        assert one == other


def opened(directory: Path, said: list[str] | None = None, **keeping: Any) -> Checkpointer:
    say = (lambda sentence: None) if said is None else said.append
    return Checkpointer(directory, **{"keep_last": 3, **keeping}, say=say)


def train_and_save(directory: Path, layout: str) -> None:
    module = laid_out(layout)
    optimizer = optimizer_of(module)
    train(module, optimizer, range(NUM_STEPS_BEFORE))
    checkpointer = opened(directory)
    state = {**training_state(module, optimizer), "rng": rng_state()}
    checkpointer.save(NUM_STEPS_BEFORE, state, {"tokens": 15})
    train(module, optimizer, range(20, 21))  # must not reach the file
    checkpointer.finish()


def load_and_train(directory: Path, layout: str) -> dict[str, Any]:
    module = laid_out(layout, seed=1)
    optimizer = optimizer_of(module)
    checkpointer = opened(directory)
    found = checkpointer.latest_good()
    assert found is not None
    state = training_state(module, optimizer, found)
    assert checkpointer.load(found, state) == {"tokens": 15}
    restore_training_state(module, optimizer, state)
    train(module, optimizer, range(NUM_STEPS_BEFORE, NUM_STEPS_BEFORE + NUM_STEPS_AFTER))
    return whole(training_state(module, optimizer))


# Functions for run_ranks.


def save_and_load_all(
    rank: int, world_size: int, root: Path, saves: list[str], loads: list[tuple[str, str]]
) -> bytes:
    """Save as each layout into `<root>/<layout>-<ranks>`, then load each (directory, layout).

    Returns the pickled {(directory, layout): state after training on}.
    """
    for layout in saves:
        train_and_save(root / f"{layout}-{world_size}", layout)
    return pickle.dumps({case: load_and_train(root / case[0], case[1]) for case in loads})


def save_rng(rank: int, world_size: int, directory: Path) -> list[float]:
    torch.manual_seed(100 + rank)
    checkpointer = opened(directory)
    checkpointer.save(1, {"rng": rng_state()}, {})
    checkpointer.finish()
    return torch.rand(3).tolist()


def load_rng(rank: int, world_size: int, directory: Path) -> list[float]:
    torch.manual_seed(500 + rank)
    checkpointer = opened(directory)
    found = checkpointer.latest_good()
    assert found is not None
    states = rng_state()
    checkpointer.load(found, {"rng": states})
    restore_rng_state(states)
    return torch.rand(3).tolist()


@contextmanager
def files_limited_to(size_bytes: int) -> Iterator[None]:
    """The kernel refuses to write files further than this; Python sees OSError (EFBIG)."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))


def fill_disk_of_rank_1(rank: int, world_size: int, directory: Path) -> tuple[list[str], Any, Any]:
    """Save 1 well, fail to save 2 on rank 1 alone, save 3 well. Returns said, step, files seen."""
    said: list[str] = []
    checkpointer = opened(directory, said)
    tensors = {"model": {"a": torch.full((4096,), 1.0), "b": torch.full((4096,), 2.0)}}
    checkpointer.save(1, tensors, {})
    checkpointer.finish()
    dist.barrier()
    with files_limited_to(1024 if rank == 1 else resource.RLIM_INFINITY):
        checkpointer.save(2, tensors, {})
        checkpointer.finish()
    dist.barrier()
    found = checkpointer.latest_good()
    names = sorted(path.name for path in directory.iterdir())
    dist.barrier()
    checkpointer.save(3, tensors, {})
    checkpointer.finish()
    return said, found and found.step, names


def damage_and_look(
    rank: int, world_size: int, directory: Path
) -> tuple[Any, list[str], list[str]]:
    """Save 1 and 2, damage 2, return the step found, what was said, and the shards of step 1."""
    said: list[str] = []
    checkpointer = opened(directory, said)
    tensors = {"model": {"a": torch.full((64,), 1.0), "b": torch.full((64,), 2.0)}}
    for step in (1, 2):
        checkpointer.save(step, tensors, {})
    checkpointer.finish()
    if rank == 0:
        path = directory / "step-2" / "rank1.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    dist.barrier()
    found = checkpointer.latest_good()
    return found and found.step, said, sorted(p.name for p in (directory / "step-1").iterdir())


def save_unequal_shapes(rank: int, world_size: int, directory: Path) -> str:
    checkpointer = opened(directory)
    try:
        checkpointer.save(1, {"model": {"w": torch.zeros(2 + rank)}}, {})
    except InputError as error:
        return str(error)
    return "accepted"


def save_different_names(rank: int, world_size: int, directory: Path) -> tuple[str, list[float]]:
    """Each rank holds a part of the names, as under pipeline parallelism; then load it that way."""
    checkpointer = opened(directory)
    mine = {"model": {f"stage{rank}": torch.full((3,), float(rank))}, "lr": {f"{rank}": rank + 0.5}}
    checkpointer.save(1, mine, {})
    found = checkpointer.latest_good()
    assert found is not None
    target: dict[str, Any] = {"model": {f"stage{rank}": torch.zeros(3)}, "lr": {f"{rank}": 0.0}}
    checkpointer.load(found, target)
    try:
        checkpointer.load(found, {"model": {"stage0": torch.zeros(3)}})
    except InputError as error:
        return str(error), [*target["model"][f"stage{rank}"].tolist(), target["lr"][f"{rank}"]]
    return "accepted", []


def save_plain_state_of_sharded(rank: int, world_size: int) -> str:
    module = laid_out("fsdp")
    optimizer = optimizer_of(module)
    train(module, optimizer, range(1))
    weight = module.inner[0].weight
    optimizer.state[weight]["master"] = weight.to_local().detach().float()
    try:
        training_state(module, optimizer)
    except InputError as error:
        return str(error)
    return "accepted"


def save_until_killed(directory: Path, end: multiprocessing.connection.Connection) -> None:
    """Save step after step; every element of a checkpoint equals its step."""
    torch.set_num_threads(1)
    tensors = {"model": {f"w{i}": torch.zeros(20_000) for i in range(4)}}
    checkpointer = opened(directory, keep_last=2)
    found = checkpointer.latest_good()
    step = found.step if found else 0
    while True:
        step += 1
        for tensor in tensors["model"].values():
            tensor.fill_(step)
        checkpointer.save(step, tensors, {"step": step})
        end.send(step)
