"""One rank of a cell of the network benchmark: the ways of exchanging gradients, in turns.

How it works: all ways live in one process group, so that starting is paid once, and take turns in
short blocks of steps; each round begins with another one. A step is from the end of the step before
to the reading of its loss. A block's bytes are those that this host's interface counted. The link
is shaped when all ways have warmed up: buckets are rebuilt, buffers allocated, PowerSGD compresses.

Workers under local updates meet once in many steps. Their blocks are one whole round, which begins
and ends with nothing under way, and the wait for the slowest worker counts; the control's blocks
are then as long.

What differs between ways is the exchange alone: decoder, weights, batches, optimizer, clipping and
learning rates are those of the Job. "alone" exchanges nothing and is the control.

Started by network.py, which says what to do in plan.json; rank 0 writes result.json.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from paceline.comm.rendezvous import Ranks, connect, exit_rank, ranks_from_env
from paceline.config.job import Job, decided, read_job
from paceline.machine.discovery import num_cores
from paceline.machine.freed_memory import keep_freed_memory
from paceline.train.families import task_of
from paceline.train.learning_rates import learning_rate
from paceline.train.optimizers import build_optimizer
from paceline.train.results import StepResult
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
    is_round: bool = False
    """Whether some of the steps cost more than others, all of them together being a whole round."""


class Contender(Protocol):
    """A way, ready to step."""

    losses: list[float]
    """Of the steps so far: of this rank or the mean of all, where they have met."""

    def step(self, batch: Step) -> None:
        """Do the next step."""

    def evaluate(self) -> float:
        """Mean loss on the held-out batches, of all ranks."""


class Ours:
    """Paceline's own Trainer."""

    def __init__(self, job: Job, ranks: Ranks, task: Task) -> None:
        self._task = task
        self._trainer = Trainer.of(job, ranks, task)
        self.losses = []
        self.first = 0
        """The number of the first step: later ones are no longer exact."""

    def step(self, batch: Step) -> None:
        """Do a step; the loss is the mean of all ranks."""
        number = self.first + len(self.losses)
        self.losses.append(self._trainer.step(number, batch)().loss)

    def evaluate(self) -> float:
        """Mean loss on the held-out batches."""
        assert self._task.eval_steps is not None
        return self._trainer.evaluate(list(self._task.eval_steps()))[0]


class Workers(Ours):
    """Paceline's own Trainer under local updates."""

    def __init__(self, job: Job, ranks: Ranks, task: Task) -> None:
        super().__init__(job, ranks, task)
        self._unread: list[Callable[[], StepResult]] = []
        self._done = 0
        self.round_steps = job.comm.local.every

    def step(self, batch: Step) -> None:
        """Do a step; losses are known when the workers meet."""
        self._unread.append(self._trainer.step(self._done, batch))
        self._done += 1
        if self._trainer.agreement.meet(self._done):
            self.losses += [read().loss for read in self._unread]
            self._unread.clear()

    def pass_a_round(self) -> None:
        """Exchange everything once without stepping; the next step's end begins a round."""
        for done in range(self._done + 1, 2 * self.round_steps):
            self._trainer.replicas.after_step(done)
        self._done = 2 * self.round_steps - 1


class Stock:
    """What a person writes with PyTorch alone; one micro-batch a step."""

    def __init__(self, job: Job, ranks: Ranks, task: Task, way: Way) -> None:
        self._job, self._task = job, task
        self.is_alone = way.kind == "alone"
        network = task.module.to_empty(device=ranks.device)
        assert task.fill is not None
        task.fill(network)
        self._module = network if self.is_alone else _hooked(network, way.hook)
        self._optimizer = build_optimizer(network.named_parameters(), job.optim, job.layout)
        self.losses: list[float] = []

    def step(self, batch: Step) -> None:
        """Do a step; the loss is this rank's."""
        (micro_batch,) = batch
        index = len(self.losses)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._job.optim, index, self._job.train.steps)
        loss = self._task.loss(self._module, micro_batch)
        loss.backward()
        clip_grad_norm_(self._module.parameters(), self._job.optim.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.item())

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on the held-out batches."""
        assert self._task.eval_steps is not None
        self._module.eval()
        parts = [self._task.loss(self._module, *step) for step in self._task.eval_steps()]
        self._module.train()
        (mean,) = means_of_ranks([torch.stack(parts).double().mean().item()])
        return mean


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


def means_of_ranks(values: Sequence[float]) -> list[float]:
    """The same numbers on every rank."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return (tensor / dist.get_world_size()).tolist()


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
        for _ in range(WARM_UP_STEPS):
            contender.step(next(supply))
        if isinstance(contender, Workers):
            contender.pass_a_round()
    dist.barrier()
    shaped()
    num_steps = _num_steps(contenders, supply)
    return [
        _block(name, number, contenders[name], list(islice(supply, num_steps[name])))
        for number, name in turns([*contenders], num_rounds)
    ]


def _num_steps(contenders: Mapping[str, Contender], supply: Iterator[Step]) -> dict[str, int]:
    """Steps of the blocks, the same on every rank; the control's are no fewer than a round's."""
    rounds = {name: c.round_steps for name, c in contenders.items() if isinstance(c, Workers)}
    sized = {name: _sized(c, next(supply)) for name, c in contenders.items() if name not in rounds}
    longest = max(rounds.values(), default=0)
    is_control = {name: isinstance(c, Stock) and c.is_alone for name, c in contenders.items()}
    return rounds | {name: max(steps, longest * is_control[name]) for name, steps in sized.items()}


def _sized(contender: Contender, batch: Step) -> int:
    """Steps that fill a block."""
    dist.barrier()
    began = time.perf_counter()
    contender.step(batch)
    (step_s,) = means_of_ranks([time.perf_counter() - began])
    return steps_of_a_block(step_s)


def _block(name: str, number: int, contender: Contender, batches: list[Step]) -> Block:
    is_round = isinstance(contender, Workers)
    dist.barrier()
    before, began, times = sent_bytes(), time.perf_counter(), []
    for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
        contender.step(batch)
        if is_round and not left:
            dist.barrier()
        ended = time.perf_counter()
        times.append(ended - began)
        began = ended
    return Block(name, number, times, (sent_bytes() - before) / len(batches), is_round)


def losses_of(contender: Contender, task: Task, num_steps: int) -> dict[str, Any]:
    """Train from the start.

    Returns:
        the loss of each step, mean of the ranks, and the one on held-out batches at the end.
    """
    for batch in islice(task.steps_from(0), num_steps):
        contender.step(batch)
    return {"losses": means_of_ranks(contender.losses), "eval_loss": contender.evaluate()}


def contender_of(way: Way, job: Job, ranks: Ranks) -> tuple[Contender, Task]:
    """A way with weights of its own, drawn by the Job's seed."""
    torch.manual_seed(job.train.seed)
    task = task_of(job, ranks)
    if way.kind == "paceline":
        ours = Ours if job.comm.local.method == "none" else Workers
        return ours(job, ranks, task), task
    return Stock(job, ranks, task, way), task


def main() -> None:
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "plan.json").read_text())
    ranks = ranks_from_env("cpu")
    assert ranks is not None, "network.py starts this program on the hosts of a laboratory"
    torch.set_num_threads(max(1, num_cores() // ranks.local_world_size))
    keep_freed_memory()
    connect(ranks)
    ways = [
        (Way(**way), decided(read_job(folder / f"{at}.toml")))
        for at, way in enumerate(plan["ways"])
    ]
    work = _losses if plan["part"] == "loss" else _times
    result = work(ways, ranks, plan, folder)
    if ranks.is_first:
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    exit_rank()


def _times(
    ways: list[tuple[Way, Job]], ranks: Ranks, plan: dict[str, Any], folder: Path
) -> list[Any]:
    ready = {way.name: contender_of(way, job, ranks) for way, job in ways}
    _, task = next(iter(ready.values()))
    batches = cycle(list(islice(task.steps_from(0), _BATCHES)))
    contenders = {name: contender for name, (contender, _) in ready.items()}
    for way, job in ways:
        contender = contenders[way.name]
        if isinstance(contender, Ours):
            contender.first = job.comm.warmup_steps

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
