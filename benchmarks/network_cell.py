"""One rank of a cell of the network benchmark: the ways of exchanging gradients, in turns.

How it works: all ways live in one process group, so that starting is paid once, and take turns in
short blocks of steps; each round begins with another one. A step is from the end of the step before
to the reading of its loss. A block's bytes are those that this host's interface counted. The link
is shaped when all ways have warmed up: buckets are rebuilt, buffers allocated, PowerSGD compresses.

What differs between ways is the exchange alone: decoder, weights, batches, optimizer, clipping and
learning rates are those of the Job. "alone" exchanges nothing and is the control.

Started by network.py, which says what to do in plan.json; rank 0 writes result.json.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from paceline.comm.ranks import Ranks, connect, given_ranks, leave
from paceline.comm.topology import num_cores
from paceline.config.job import Job, read_job
from paceline.train.optim import build_optimizer, learning_rate, set_learning_rate
from paceline.train.session import keep_freed_memory, language_model
from paceline.train.task import Step, Task
from paceline.train.trainer import Trainer

WARM_UP_STEPS = 3
"""PowerSGD's hook compresses from the third step on; DDP rebuilds its buckets after the first."""
MOST_STEPS, LEAST_STEPS = 8, 2
_BLOCK_S = 2.0
_BATCHES = 8
_ONE_BUCKET_MIB = 1 << 20
_PATIENCE_S = 600


@dataclass(frozen=True)
class Way:
    """One way of exchanging gradients."""

    name: str
    kind: str
    """alone: not at all. ddp: PyTorch's DDP. paceline: our Trainer."""
    hook: str = "none"
    """ddp: "none", "fp16", or "powersgd:<rank>", which runs in one bucket (more abort on gloo)."""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Of the Job, by their full names."""


@dataclass(frozen=True)
class Block:
    """Some steps of one way in a row."""

    way: str
    round: int
    steps_s: list[float]
    sent_bytes: float
    """By this host's interface, per step."""


class Contender(Protocol):
    """A way, ready to step."""

    def step(self, index: int, batch: Step) -> float:
        """Do a step and return its loss."""

    def evaluate(self) -> float:
        """Mean loss on the held-out batches, of all ranks."""


class Ours:
    """Paceline's own Trainer."""

    def __init__(self, job: Job, ranks: Ranks, task: Task) -> None:
        self._task = task
        self._trainer = Trainer.of(job, ranks, task)

    def step(self, index: int, batch: Step) -> float:
        """Do a step; the loss is the mean of all ranks."""
        return self._trainer.step(index, batch)().loss

    def evaluate(self) -> float:
        """Mean loss on the held-out batches."""
        assert self._task.eval_steps is not None
        return self._trainer.evaluate(list(self._task.eval_steps()))


class Stock:
    """What a person writes with PyTorch alone; one micro-batch a step."""

    def __init__(self, job: Job, ranks: Ranks, task: Task, way: Way) -> None:
        self._job, self._task = job, task
        network = task.module.to_empty(device=ranks.device)
        assert task.fill is not None
        task.fill(network)
        self._module = network if way.kind == "alone" else _hooked(network, way.hook)
        self._optimizer = build_optimizer(network.named_parameters(), job.optim, job.layout)

    def step(self, index: int, batch: Step) -> float:
        """Do a step; the loss is this rank's."""
        (micro_batch,) = batch
        set_learning_rate(
            self._optimizer, learning_rate(self._job.optim, index, self._job.train.steps)
        )
        loss = self._task.loss(self._module, micro_batch)
        loss.backward()
        clip_grad_norm_(self._module.parameters(), self._job.optim.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on the held-out batches."""
        assert self._task.eval_steps is not None
        self._module.eval()
        parts = [self._task.loss(self._module, *step) for step in self._task.eval_steps()]
        self._module.train()
        return mean_of_ranks(torch.stack(parts).double().mean().item())


def _hooked(network: nn.Module, hook: str) -> DistributedDataParallel:
    name, _, rank = hook.partition(":")
    if name != "powersgd":
        module = DistributedDataParallel(network)
        if name == "fp16":
            module.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return module
    module = DistributedDataParallel(network, bucket_cap_mb=_ONE_BUCKET_MIB)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=int(rank), start_powerSGD_iter=2
    )
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return module


def mean_of_ranks(value: float) -> float:
    """The same number on every rank."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item() / dist.get_world_size()


def turns(names: Sequence[str], num_rounds: int) -> Iterator[tuple[int, str]]:
    """Each round begins with the next way, so that none is always the first."""
    for number in range(num_rounds):
        start = number % len(names)
        for name in (*names[start:], *names[:start]):
            yield number, name


def steps_of_a_block(step_s: float) -> int:
    """About as many as fill a block; slow links get few."""
    return max(LEAST_STEPS, min(MOST_STEPS, int(_BLOCK_S / step_s)))


def sent_bytes(device: str = "eth0") -> int:
    """What an interface of this host has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith(f"{device}:")]
    return int(line.partition(":")[2].split()[8])


def time_in_turns(
    contenders: Mapping[str, Contender], batches: Iterable[Step], num_rounds: int, shaped: Any
) -> list[Block]:
    """Warm up, wait until the links are shaped, and time all ways.

    Args:
        contenders: by name.
        batches: of this rank, as many as are asked for.
        num_rounds: how often each has its turn.
        shaped: called once in between.
    """
    supply = iter(batches)
    for contender in contenders.values():
        for index in range(WARM_UP_STEPS):
            contender.step(index, next(supply))
    dist.barrier()
    shaped()
    num_steps = {name: _sized(each, next(supply)) for name, each in contenders.items()}
    return [
        _block(name, number, contenders[name], list(islice(supply, num_steps[name])))
        for number, name in turns([*contenders], num_rounds)
    ]


def _sized(contender: Contender, batch: Step) -> int:
    """Steps of its blocks, the same on every rank."""
    dist.barrier()
    began = time.perf_counter()
    contender.step(WARM_UP_STEPS, batch)
    return steps_of_a_block(mean_of_ranks(time.perf_counter() - began))


def _block(name: str, number: int, contender: Contender, batches: list[Step]) -> Block:
    dist.barrier()
    before, began, times = sent_bytes(), time.perf_counter(), []
    for batch in batches:
        contender.step(WARM_UP_STEPS + 1, batch)
        ended = time.perf_counter()
        times.append(ended - began)
        began = ended
    return Block(name, number, times, (sent_bytes() - before) / len(batches))


def losses_of(contender: Contender, task: Task, num_steps: int) -> dict[str, Any]:
    """Train from the start.

    Returns:
        the loss of each step, mean of the ranks, and the one on held-out batches at the end.
    """
    batches = islice(task.steps_from(0), num_steps)
    losses = [mean_of_ranks(contender.step(i, batch)) for i, batch in enumerate(batches)]
    return {"losses": losses, "eval_loss": contender.evaluate()}


def contender_of(way: Way, job: Job, ranks: Ranks) -> tuple[Contender, Task]:
    """A way with weights of its own, drawn by the Job's seed."""
    torch.manual_seed(job.train.seed)
    task = language_model(job, ranks)
    if way.kind == "paceline":
        return Ours(job, ranks, task), task
    return Stock(job, ranks, task, way), task


def main() -> None:
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "plan.json").read_text())
    ranks = given_ranks("cpu")
    assert ranks is not None, "network.py starts this program on the hosts of a laboratory"
    torch.set_num_threads(max(1, num_cores() // ranks.local_world_size))
    keep_freed_memory()
    connect(ranks)
    ways = [(Way(**way), read_job(folder / f"{at}.toml")) for at, way in enumerate(plan["ways"])]
    work = _losses if plan["part"] == "loss" else _times
    result = work(ways, ranks, plan, folder)
    if ranks.is_first:
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    leave()


def _times(
    ways: list[tuple[Way, Job]], ranks: Ranks, plan: dict[str, Any], folder: Path
) -> list[Any]:
    ready = {way.name: contender_of(way, job, ranks) for way, job in ways}
    _, task = next(iter(ready.values()))
    batches = cycle(list(islice(task.steps_from(0), _BATCHES)))
    contenders = {name: contender for name, (contender, _) in ready.items()}

    def shaped() -> None:
        if ranks.is_first:
            (folder / "warm").touch()
        deadline = time.monotonic() + _PATIENCE_S
        while not (folder / "shaped").exists():
            assert time.monotonic() < deadline, "network.py shapes the links"
            time.sleep(0.05)

    blocks = time_in_turns(contenders, batches, plan["num_rounds"], shaped)
    return [asdict(block) for block in blocks]


def _losses(
    ways: list[tuple[Way, Job]], ranks: Ranks, plan: dict[str, Any], _folder: Path
) -> dict[str, Any]:
    return {
        way.name: losses_of(*contender_of(way, job, ranks), job.train.steps) for way, job in ways
    }


if __name__ == "__main__":
    main()
