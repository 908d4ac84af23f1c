"""The pipeline runtime against the serial model, fp64 to 1e-10.

Layers: one pure function; then one launch of gloo ranks per number of ranks, with many cases in it;
then ranks that fail. What the ranks execute is proved in test_pp_program.py.
"""

import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from paceline.config.errors import InputError
from paceline.config.schedule import Action, Schedule
from paceline.parallel.pp import Pipeline
from paceline.parallel.pp.stage import can_split
from tests.parallel.test_pp_program import CASES, scheduled
from tests.ranks import run_ranks

CPU = torch.device("cpu")
VOCAB, WIDTH, BATCH, SEQ = 11, 6, 2, 5


def test_what_recomputes_or_is_compiled_is_not_split():
    part = nn.Sequential(nn.Linear(2, 2))
    assert can_split(part)
    assert not can_split(nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2))))
    part[0].compile(backend="eager")
    assert not can_split(part)


class Block(nn.Module):
    """A residual block whose output is a view, which split backward passes have to live with."""

    gives_views = True

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is not None:
            x = x * (1 + 0.01 * positions[:, None])
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x.view(x.shape) if self.gives_views else x


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.block = Block()

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.block(self.table(x), positions)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.head(self.block(x, positions)) + 0  # not a view, of which FSDP2 warns


def build(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(1)
    parts = [Embed(), *[Block() for _ in range(num_stages - 2)], Head()]
    return [part.double() for part in parts]


def data(number: int, seq: int = SEQ, seed: int = 2) -> tuple[list[Any], list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (number, BATCH, seq + 1), generator=draw)
    inputs = []
    for index, each in enumerate(tokens):
        positions = torch.arange(seq) + index if index % 2 else None
        inputs.append((each[:, :-1], {"positions": positions}))
    return inputs, [each[:, 1:] for each in tokens]


def loss_of(number: int, targets: list[Tensor], output: Tensor, micro_batch: int) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets[micro_batch].flatten()) / number


def serial(parts: list[nn.Module], inputs: list[Any], criterion: Any, which: Any = None) -> float:
    """Loss of the micro-batches, with their gradients; `which` are the ones that count."""
    total = 0.0
    for micro_batch, (x, keywords) in enumerate(inputs):
        if which is None or micro_batch in which:
            for part in parts:
                x = part(x, **keywords)
            loss = criterion(x, micro_batch)
            if torch.is_grad_enabled():
                loss.backward()
            total += loss.item()
    return total


def total_of(losses: Tensor, group: dist.ProcessGroup | None = None) -> float:
    loss = losses.sum()
    dist.all_reduce(loss, group=group)
    return loss.item()


def check_gradients(part: nn.Module, wanted: nn.Module, scale: float = 1.0) -> None:
    own = {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad
        for name, parameter in part.named_parameters()
    }
    for name, parameter in wanted.named_parameters():
        gradient = own[name]
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        torch.testing.assert_close(gradient, scale * parameter.grad, rtol=1e-10, atol=1e-12)


def check_schedule(schedule: Schedule, rank: int) -> None:
    """Two steps and two evaluations of other sizes between them, equal to the serial model."""
    number, places = schedule.num_micro_batches, schedule.stages_of(rank)
    inputs, targets = data(number)
    criterion = partial(loss_of, number, targets)
    parts = [build(schedule.num_stages)[stage] for _, stage in places]
    pipeline = Pipeline(schedule, parts, dist.group.WORLD, CPU)
    for times in (1, 2):
        loss = total_of(pipeline.step(inputs, criterion, scale=lambda loss: 4 * loss))
        for (direction, stage), part in zip(places, parts, strict=True):
            model = build(schedule.num_stages)
            own = [mb for mb in range(number) if schedule.direction(mb) == direction]
            serial(model, inputs, criterion, own)
            check_gradients(part, model[stage], scale=4 * times)
        assert abs(loss - serial(build(schedule.num_stages), inputs, criterion)) < 1e-10
        for other in (1, number + 1):
            held_out, wanted = data(other, seq=SEQ + times, seed=times)
            evaluate = partial(loss_of, other, wanted)
            loss = total_of(pipeline.forward_only(held_out, evaluate))
            with torch.no_grad():
                expected = serial(build(schedule.num_stages), held_out, evaluate)
            assert abs(loss - expected) < 1e-10


def check_splitting(rank: int) -> None:
    """I computes no gradient of a weight, W the rest; where I can't be split off, it does all."""
    counts: dict[str, int] = {"input": 0, "weight": 0}

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, what: str) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.what = inputs[1]

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            counts[ctx.what] += 1
            return gradient, None

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return Counting.apply(x, "input") + Counting.apply(self.weight, "weight")

    seen = []

    split = [Action("F", 1, 0), Action("I", 1, 0), Action("F", 1, 1), Action("W", 1, 0)]
    mine = (*split, Action("B", 1, 1))
    others = tuple(Action(kind, 0, mb) for kind, mb in (("F", 0), ("F", 1), ("B", 0), ("B", 1)))
    schedule = Schedule("own", 2, (others, mine), ((0, 1),))
    part = Part() if rank == 1 else nn.Identity()
    pipeline = Pipeline(schedule, [part], dist.group.WORLD, CPU)

    def criterion(output: Tensor, _micro_batch: int) -> Tensor:
        seen.append(dict(counts))
        return output.sum()

    x = torch.ones(3, requires_grad=True)
    pipeline.step([(x, {}), (x, {})], criterion)
    if rank == 0:
        assert torch.equal(x.grad, torch.full((3,), 2.0))  # of an input that asks for it
    if rank == 1:
        assert seen == [{"input": 0, "weight": 0}, {"input": 1, "weight": 0}]
        assert counts == {"input": 2, "weight": 2}
        assert torch.equal(part.weight.grad, torch.full((3,), 2.0))


def check_recompute(rank: int) -> None:
    """Recomputed blocks, also selectively, in a schedule that splits backward passes."""
    selective = partial(
        create_selective_checkpoint_contexts,
        lambda *_args, **_keywords: CheckpointPolicy.PREFER_RECOMPUTE,
    )
    schedule = scheduled("zbv", 2, 4)
    inputs, targets = data(4)
    criterion = partial(loss_of, 4, targets)
    for options in ({}, {"context_fn": selective}):
        parts = [build(4)[stage] for _, stage in schedule.stages_of(rank)]
        for part in parts:
            if hasattr(part, "block"):
                part.block = checkpoint_wrapper(part.block, **options)
        wrapped = [checkpoint_wrapper(p, **options) if isinstance(p, Block) else p for p in parts]
        pipeline = Pipeline(schedule, wrapped, dist.group.WORLD, CPU)
        loss = total_of(pipeline.step(inputs, criterion))
        model = build(4)
        assert abs(loss - serial(model, inputs, criterion)) < 1e-10
        for (_, stage), part in zip(schedule.stages_of(rank), parts, strict=True):
            check_gradients(part, model[stage])


def check_autocast(rank: int) -> None:
    """Under autocast the wires carry bf16, without it fp32; backward passes are not cast."""
    torch.manual_seed(1)
    first = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH))
    part = first if rank == 0 else nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))
    pipeline = Pipeline(scheduled("zb_h1", 2, 4), [part], dist.group.WORLD, CPU)
    inputs, targets = data(4)
    inputs = [(x, {}) for x, _ in inputs]
    criterion = partial(loss_of, 4, targets)
    arrived = []
    if rank == 1:
        part.register_forward_pre_hook(lambda _module, args: arrived.append(args[0].dtype))

    def no_autocast(_gradient: Tensor) -> None:
        assert not torch.is_autocast_enabled("cpu")

    part[1].weight.register_hook(no_autocast)
    with torch.autocast("cpu", torch.bfloat16):
        low = total_of(pipeline.step(inputs, criterion))
    gradients = [parameter.grad.clone() for parameter in part.parameters()]
    part.zero_grad()
    full = total_of(pipeline.step(inputs, criterion))
    assert 0 < abs(low - full) < 0.05
    for parameter, gradient in zip(part.parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).norm() < 0.03 * parameter.grad.norm()
    if rank == 1:
        assert arrived == [torch.bfloat16] * 4 + [torch.float32] * 4


def check_stage_without_gradient(rank: int) -> None:
    """A frozen first stage, and a stage that doesn't use its input."""

    class Deaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * 2

    for name in ("1f1b", "zb_h1"):
        part = nn.Linear(3, 3).requires_grad_(False) if rank == 0 else nn.Linear(3, 3)
        pipeline = Pipeline(scheduled(name, 2, 2), [part], dist.group.WORLD, CPU)
        pipeline.step([(torch.ones(2, 3), {})] * 2, lambda output, _: output.mean())
        assert (part.weight.grad is None) == (rank == 0)
    part = nn.Linear(3, 3) if rank == 0 else Deaf()
    pipeline = Pipeline(scheduled("1f1b", 2, 2), [part], dist.group.WORLD, CPU)
    pipeline.step([(torch.ones(3), {})] * 2, lambda output, _: output.mean())
    wanted = torch.zeros(3, 3) if rank == 0 else torch.full((3,), 4 / 3)
    torch.testing.assert_close(part.weight.grad, wanted)


def check_refusals(rank: int) -> None:
    pipeline = Pipeline(scheduled("1f1b", 2, 2), [build(2)[rank]], dist.group.WORLD, CPU)
    inputs, targets = data(3)
    with pytest.raises(InputError, match=r"3 micro-batches were given, but .* is for 2"):
        pipeline.step(inputs, partial(loss_of, 2, targets))
    with pytest.raises(InputError, match="2 different shapes"):
        pipeline.step([inputs[0], data(1, seq=9)[0][0]], partial(loss_of, 2, targets))


def check_bounded_memory(rank: int) -> None:
    """No more receive buffers than micro-batches in flight, and nothing is left after a step."""
    number = 12
    pipeline = Pipeline(scheduled("1f1b", 2, number), [build(2)[rank]], dist.group.WORLD, CPU)
    inputs, targets = data(number)
    stage, held = pipeline._stages[0], []

    def count(*_args: Any) -> None:
        held.append(sum(flight.input is not None for flight in stage.flights.values()))

    stage.submod.register_forward_hook(count)
    pipeline.step(inputs, partial(loss_of, number, targets))
    assert max(held) <= 2
    assert not stage.flights
    assert not pipeline._wires.sends


def two_ranks(rank: int, _world_size: int) -> None:
    for name, num_ranks, num_micro_batches in CASES:
        if num_ranks == 2:
            check_schedule(scheduled(name, num_ranks, num_micro_batches), rank)
    check_splitting(rank)
    check_recompute(rank)
    check_autocast(rank)
    check_stage_without_gradient(rank)
    check_refusals(rank)
    check_bounded_memory(rank)


def check_sharded(
    rank: int, name: str, sizes: tuple[int, int, int], recompute: bool, zero: int = 1
) -> None:
    """FSDP2 in every stage, over (dp, fsdp): it gathers and reduces as often as a degree says."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "fsdp"))
    axes = mesh["dp", "fsdp"] if sizes[1] > 1 else mesh["fsdp"]
    my_pp, num_data = mesh.get_local_rank("pp"), sizes[1] * sizes[2]
    my_data = mesh.get_local_rank("dp") * sizes[2] + mesh.get_local_rank("fsdp")
    schedule = scheduled(name, sizes[0], 4) if sizes[0] > 1 else one_rank_schedule()
    number, places = schedule.num_micro_batches, schedule.stages_of(my_pp)
    every = [data(number, seed=seed) for seed in range(num_data)]
    inputs, targets = every[my_data]
    parts = [build(schedule.num_stages)[stage] for _, stage in places]
    for part in parts:
        for module in part.modules():
            module.gives_views = False  # FSDP2 warns of them
        block = part.block if hasattr(part, "block") else None
        if block is not None:
            block = checkpoint_wrapper(block) if recompute else block
            part.block = fully_shard(block, mesh=axes, reshard_after_forward=zero == 3)
        fully_shard(part, mesh=axes, reshard_after_forward=False)
    pipeline = Pipeline(schedule, parts, mesh.get_group("pp"), CPU, zero=zero)
    for times in (1, 2):
        with Collectives() as collectives:
            losses = pipeline.step(inputs, partial(loss_of, number, targets))
        num_blocks = sum(hasattr(part, "block") for part in parts)
        num_groups = len(parts) + num_blocks
        if sizes[2] > 1:
            gathers = len(parts) + num_blocks * (2 * number if zero == 3 else 1)
            reductions = num_groups * (number if zero >= 2 else 1)
            wanted_counts = {"gather": gathers, "reduce_scatter": reductions}
            assert collectives.counts == wanted_counts, (name, zero, collectives.counts)
        own = serial(build(schedule.num_stages), inputs, partial(loss_of, number, targets))
        assert abs(total_of(losses, mesh.get_group("pp")) - own) < 1e-10
        for (_, stage), part in zip(places, parts, strict=True):
            model = build(schedule.num_stages)
            for other, wanted in every:
                serial(model, other, partial(loss_of, number * num_data, wanted))
            check_gradients(part, model[stage], times)
        held_out, wanted = data(3, seq=SEQ + 2)
        losses = pipeline.forward_only(held_out, partial(loss_of, 3, wanted))
        loss = total_of(losses, mesh.get_group("pp"))
        with torch.no_grad():
            plain = serial(build(schedule.num_stages), held_out, partial(loss_of, 3, wanted))
        assert abs(loss - plain) < 1e-10
        assert all(isinstance(p, DTensor) for part in parts for p in part.parameters())


class Collectives(TorchDispatchMode):
    """Counts the collectives of FSDP by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"gather": 0, "reduce_scatter": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            for kind in self.counts:
                self.counts[kind] += kind in func.__name__
        return func(*args, **(kwargs or {}))


def one_rank_schedule() -> Schedule:
    """Three stages on a single rank, one split, so that everything passes locally."""
    actions = [Action("F", stage, mb) for mb in range(2) for stage in range(3)]
    for mb in range(2):
        actions += [Action("I", 2, mb), Action("B", 1, mb), Action("B", 0, mb)]
    actions += [Action("W", 2, mb) for mb in range(2)]
    return Schedule("own", 2, (tuple(actions),), ((0, 0, 0),))


def check_tensor_parallel(rank: int, name: str) -> None:
    """Blocks whose products two ranks share: DTensor parameters, also in split backward passes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    schedule = scheduled(name, 2, 4)
    places = schedule.stages_of(mesh.get_local_rank("pp"))
    parts = [build(schedule.num_stages)[stage] for _, stage in places]
    for part in parts:
        block = part.block if hasattr(part, "block") else part
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], styles)
    inputs, targets = data(4)
    pipeline = Pipeline(schedule, parts, mesh.get_group("pp"), CPU)
    for times in (1, 2):
        losses = pipeline.step(inputs, partial(loss_of, 4, targets))
        loss = total_of(losses, mesh.get_group("pp"))
        model = build(schedule.num_stages)
        assert abs(loss - serial(model, inputs, partial(loss_of, 4, targets))) < 1e-10
        for (_, stage), part in zip(places, parts, strict=True):
            check_gradients(part, model[stage], scale=times)


def four_ranks(rank: int, _world_size: int) -> None:
    for name, num_ranks, num_micro_batches in CASES:
        if num_ranks == 4:
            check_schedule(scheduled(name, num_ranks, num_micro_batches), rank)
    check_sharded(rank, "1f1b", (2, 1, 2), recompute=False)
    check_sharded(rank, "zbv", (2, 1, 2), recompute=False)
    check_sharded(rank, "zbv", (2, 1, 2), recompute=True)
    check_sharded(rank, "dualpipev", (2, 2, 1), recompute=False)
    check_sharded(rank, "own", (1, 2, 2), recompute=False)
    check_sharded(rank, "interleaved_zb", (2, 1, 2), recompute=True)
    for zero in (2, 3):
        check_sharded(rank, "1f1b", (2, 1, 2), recompute=False, zero=zero)
        check_sharded(rank, "zbv", (2, 1, 2), recompute=False, zero=zero)
        check_sharded(rank, "zbv", (2, 1, 2), recompute=True, zero=zero)
        check_sharded(rank, "own", (1, 2, 2), recompute=False, zero=zero)
    check_tensor_parallel(rank, "zb_h1")
    check_tensor_parallel(rank, "zbv")


def test_two_ranks_equal_the_serial_model():
    run_ranks(two_ranks, 2)


def test_four_ranks_equal_the_serial_model():
    run_ranks(four_ranks, 4)


class Failing(nn.Module):
    """Fails in its third forward pass, or in its second backward pass."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.weight, self.calls = where, nn.Parameter(torch.ones(3)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.where == "forward" and self.calls == 3:
            raise ArithmeticError("the third is broken")
        y = x * self.weight
        if self.where != "forward" and self.calls == 2:
            y.register_hook(self.fail)
        return y

    def fail(self, _gradient: Tensor) -> None:
        raise ArithmeticError("the second is broken")


def failing_rank(rank: int, _world_size: int, name: str, where: str) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torch.distributed.pipelining").addHandler(handler)
    part = Failing(where) if rank == 1 else nn.Linear(3, 3)
    pipeline = Pipeline(scheduled(name, 2, 4), [part], dist.group.WORLD, CPU)
    try:
        pipeline.step([(torch.ones(2, 3), {})] * 4, lambda output, _: output.sum())
    finally:
        assert not lines


@pytest.mark.parametrize(
    ("name", "where", "note"),
    [
        ("1f1b", "forward", "in the forward pass of micro-batch 2, stage 1"),
        ("1f1b", "backward", "in the backward pass of micro-batch 1, stage 1"),
        ("zb_h1", "backward", "in the backward pass of micro-batch 1, stage 1"),
    ],
)
def test_a_failing_stage_says_what_and_where(name, where, note):
    with pytest.raises(AssertionError) as caught:
        run_ranks(failing_rank, 2, name, where)
    text = str(caught.value)
    assert "ArithmeticError: the" in text
    assert note in text
