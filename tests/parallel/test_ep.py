"""Expert parallel on gloo ranks against one process.

A small network with routed and shared experts, several AdamW steps on tokens that every data rank
has other ones of: losses, every gradient and the parameters, in fp64 to 1e-10. Then what is sent,
ranks without tokens, experts that move in the middle of a run, and copies of hot experts, other
ones in each step. Pure first, then two ranks, then
four; all layouts of a number of ranks share one launch.
"""

from functools import cache
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from paceline.config.layers import Experts
from paceline.models.moe import ExpertLayer
from paceline.parallel.ep import (
    AllToAllDispatcher,
    _transposition,
    apply_placement,
    copy_experts,
    expert_layers,
    expert_loads,
    expert_parallel,
    fsdp_dim,
    move_slots,
    share_sequences,
    slots_of_experts,
    take_stayed,
)
from paceline.parallel.hot_experts import Copies
from paceline.parallel.tp import finish_gradients, tensor_parallel
from paceline.train.optim import AdamW
from tests.ranks import run_ranks

HIDDEN, FFN, EXPERTS, TOP, LAYERS = 8, 12, 8, 2, 2
BATCH, SEQ, STEPS = 8, 4, 3
EXPERT_AXES = ("pp", "edp", "efsdp", "ep", "tp")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


class Case(NamedTuple):
    """How the ranks share the experts."""

    edp: int = 1
    efsdp: int = 1
    ep: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float64
    recompute: bool = False
    cp: bool = False
    """The ranks of ep have different tokens of the same sequences, not different sequences."""
    closed: int = 0
    """Experts that the router never chooses: the last ones."""
    move_after: int = 0
    """Steps after which the experts get other slots; 0: never."""
    hot: int = 0
    """Experts of each layer that every rank gets a copy of, drawn anew for each step."""
    top: int = TOP
    """Experts of each token."""


ON_TWO = {
    "ep": Case(ep=2),
    "fp32": Case(ep=2, dtype=torch.float32),
    "recompute": Case(ep=2, recompute=True),
    "shared sequences": Case(ep=2, cp=True),
    "a rank without tokens": Case(ep=2, closed=4),
    "moved": Case(ep=2, move_after=1),
    "copies": Case(ep=2, hot=2),
    "copies, top 1": Case(ep=2, hot=3, top=1),
    "copies, fp32": Case(ep=2, hot=2, dtype=torch.float32),
    "copies, recompute": Case(ep=2, hot=1, recompute=True),
    "copies, a rank without tokens": Case(ep=2, hot=3, closed=4),
    "copies, moved": Case(ep=2, hot=2, move_after=1),
    "copies of all but one": Case(ep=2, hot=7, top=1, dtype=torch.float32),
    "tp": Case(tp=2),
    "tp, sequence": Case(tp=2, sequence_parallel=True),
}
ON_FOUR = {
    "ep": Case(ep=4),
    "three ranks without tokens": Case(ep=4, closed=6, recompute=True),
    "ep x tp": Case(ep=2, tp=2),
    "ep x tp, sequence": Case(ep=2, tp=2, sequence_parallel=True, recompute=True),
    "ep x tp, moved": Case(ep=2, tp=2, move_after=2),
    "replicas": Case(edp=2, ep=2),
    "shards": Case(efsdp=2, ep=2),
    "shards without tokens": Case(efsdp=2, ep=2, closed=4),
    "shards, moved": Case(efsdp=2, ep=2, move_after=1),
    "shards x tp": Case(efsdp=2, tp=2, sequence_parallel=True),
    "moved by four": Case(ep=4, move_after=1),
    "copies by four": Case(ep=4, hot=3),
    "copies x tp": Case(ep=2, tp=2, hot=2),
    "copies x tp, sequence": Case(ep=2, tp=2, hot=2, sequence_parallel=True, recompute=True),
    "copies, replicas": Case(edp=2, ep=2, hot=2, top=1),
    "copies, shards": Case(efsdp=2, ep=2, hot=2),
    "copies, shards, moved": Case(efsdp=2, ep=2, hot=2, move_after=1),
}


SHAPE = Experts(
    num_experts=EXPERTS, experts_per_token=TOP, ffn_size=FFN, shared_ffn_size=12, shared_gate=True,
    choice_bias=True, balance_loss=0.1, scores="sigmoid", num_groups=2, groups_per_token=2,
)  # fmt: skip


class Block(nn.Module):
    def __init__(self, closed: int, top: int) -> None:
        super().__init__()
        self.plain = nn.Linear(HIDDEN, HIDDEN)
        self.layer = ExpertLayer(HIDDEN, SHAPE.replace(experts_per_token=top))
        self.layer.choice_bias[EXPERTS - closed :] = -9

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.plain(x))


STYLES = {
    "blocks.*.plain": "norm",
    "blocks.*.layer": "layer",
    "blocks.*.layer.router": "inner",
    "blocks.*.layer.experts": "experts",
    "blocks.*.layer.shared.gate_proj": "column",
    "blocks.*.layer.shared.up_proj": "column",
    "blocks.*.layer.shared.down_proj": "summand",
    "blocks.*.layer.shared_gate": "inner",
}


class Net(nn.Module):
    def __init__(self, closed: int, top: int = TOP) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(closed, top) for _ in range(LAYERS)))
        stream = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=stream)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def _tokens(step: int) -> Tensor:
    stream = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, SEQ, HIDDEN, generator=stream, dtype=torch.float64)


def _new_slots() -> Tensor:
    stream = torch.Generator().manual_seed(5)
    return torch.stack([torch.randperm(EXPERTS, generator=stream) for _ in range(LAYERS)])


def _drawn(step: int, num: int) -> Tensor:
    """Experts of each layer."""
    stream = torch.Generator().manual_seed(9 + step)
    drawn = [torch.randperm(EXPERTS, generator=stream)[:num] for _ in range(LAYERS)]
    return torch.stack(drawn)


class Trained(NamedTuple):
    losses: list[float]
    grads: dict[str, Tensor]
    params: dict[str, Tensor]
    loads: Tensor


def _train(net, case, split, sync, around_step):
    """Three steps; `split` picks this rank's tokens, `sync` completes gradients and sums losses."""
    net.to(case.dtype)
    # A large epsilon: Adam divides by the size of a gradient, and would turn the rounding of one
    # that is nearly zero into a visible step.
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4, fused=True)
    losses, grads = [], {}
    for step in range(STEPS):
        x = split(_tokens(step).to(case.dtype))
        loss = net(x).square().sum() / _tokens(0).numel()
        loss.backward()
        losses.append(sync(loss.detach()))
        grads = grads or _whole({n: p.grad for n, p in net.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        around_step(step, optimizer)
    return losses, grads


def _whole(tensors):
    """Full copies by plain names; a weight that got no gradient has one of zero."""
    names = {n: n.replace("_checkpoint_wrapped_module.", "") for n in tensors}
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    return {names[n]: t.detach().clone() for n, t in full.items()}


def _by_expert(tensors, net):
    """Bring the stacked weights from the order of the slots into that of the experts."""
    slots = iter(slots_of_experts(net))
    order = {f"blocks.{block}.layer.experts": next(slots) for block in range(LAYERS)}
    return {
        n: t[order[n.rpartition(".")[0]]] if ".experts." in n else t for n, t in tensors.items()
    }


def test_transposition():
    """Rows named by (a, b) end up sorted by (b, a), and the transposed call brings them back."""
    counts = torch.tensor([[2, 0, 1], [0, 3, 4]])
    pairs = [(a, b) for a in range(2) for b in range(3) for _ in range(counts[a, b])]
    place = _transposition(counts, 10)
    turned = [None] * 10
    for pair, to in zip(pairs, place.tolist(), strict=True):
        turned[to] = pair
    assert turned == sorted(pairs, key=lambda pair: (pair[1], pair[0]))
    back = _transposition(counts.T, 10)
    assert torch.equal(back[place], torch.arange(10))
    assert _transposition(torch.zeros(2, 3, dtype=torch.int64), 0).shape == (0,)


def test_experts_move_within_one_process():
    net = Net(closed=0)
    optimizer = torch.optim.AdamW(net.parameters())
    x = _tokens(0).float()
    net(x).square().sum().backward()
    optimizer.step()
    output, weight = net(x), net.blocks[1].layer.experts.up_proj
    old, moment = weight.detach().clone(), optimizer.state[weight]["exp_avg"].clone()
    apply_placement(net, optimizer, _new_slots(), None)
    assert torch.equal(weight[_new_slots()[1]], old)
    assert torch.equal(optimizer.state[weight]["exp_avg"][_new_slots()[1]], moment)
    assert torch.allclose(net(x), output)
    apply_placement(net, None, slots_of_experts(Net(closed=0)), None)
    assert torch.equal(weight, old)


def test_moments_in_eight_bits_move():
    net = Net(closed=0)
    eight_bits = {"is_coded": True, "is_on_host": False}
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = AdamW([{"params": list(net.parameters())}], settings, **eight_bits)
    net(_tokens(0).float()).square().sum().backward()
    optimizer.step()
    weight = net.blocks[1].layer.experts.down_proj
    before = {key: value.clone() for key, value in optimizer.saved_state(weight).items()}
    apply_placement(net, optimizer, _new_slots(), None)
    after = optimizer.saved_state(weight)
    for moment in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(after[moment][_new_slots()[1]], before[moment])
        assert before[moment].any()


def test_what_is_not_cut_by_slots_is_not_moved():
    net = Net(closed=0)
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.state[net.blocks[0].layer.experts.up_proj]["codes"] = torch.zeros(4, 9)
    with pytest.raises(ValueError, match="optimizer state codes"):
        apply_placement(net, optimizer, _new_slots(), None)
    with pytest.raises(ValueError, match="4 of 8 slots are held by one of 1 ranks"):
        move_slots(torch.zeros(4, 2), torch.arange(8), None)


def test_loads_are_counted_until_they_are_reset():
    net = Net(closed=2)
    net(_tokens(0).float())
    net(_tokens(1).float())
    loads = expert_loads(net, None, reset=False)
    assert loads.shape == (LAYERS, EXPERTS)
    assert loads.sum(dim=1).tolist() == [2 * BATCH * SEQ * TOP] * LAYERS
    assert not loads[:, -2:].any()
    assert torch.equal(expert_loads(net, None), loads)
    assert not expert_loads(net, None).any()


@cache
def _serial(dtype, closed, top):
    net = Net(closed, top)
    case = Case(dtype=dtype, closed=closed)
    losses, grads = _train(net, case, lambda x: x, Tensor.item, lambda step, optimizer: None)
    return Trained(losses, grads, _whole(dict(net.named_parameters())), expert_loads(net, None))


def _parallel(case, meshes):
    dense, experts = meshes
    net = Net(case.closed, case.top).to(case.dtype)
    data = case.edp * case.efsdp * case.ep
    if case.tp > 1:
        tensor_parallel(net, STYLES, dense["tp"], case.sequence_parallel)
    if case.ep > 1 or case.tp > 1:
        expert_parallel(net, experts["ep", "tp"] if case.ep > 1 else dense["tp"])
    if case.cp:
        share_sequences(net, experts["ep"])
    if case.recompute:
        for name, block in list(net.blocks.named_children()):
            net.blocks.register_module(name, checkpoint_wrapper(block))
    layers = expert_layers(net)
    for layer in layers:  # as their part of the loss: see `split`
        layer.balance_scale.fill_(1 / (data * case.tp))
    for layer in layers if case.ep > 1 else []:
        fully_shard(layer.experts, mesh=experts["edp", "efsdp"], shard_placement_fn=fsdp_dim)
    for block in net.blocks:
        fully_shard(block, mesh=dense["dp", "fsdp"])
    fully_shard(net, mesh=dense["dp", "fsdp"])

    def split(x):
        rank = dense["dp"].get_local_rank() * dense["fsdp"].size() + dense["fsdp"].get_local_rank()
        mine = x.chunk(data, 1 if case.cp else 0)[rank]
        return (
            mine.chunk(case.tp, 1)[dense["tp"].get_local_rank()] if case.sequence_parallel else mine
        )

    def sync(loss):
        finish_gradients(net)
        for layer in layers:
            for weight in layer.experts.parameters():
                weight.grad.mul_(data / case.ep)
        for weight in net.parameters():
            if not any(weight is w for layer in layers for w in layer.experts.parameters()):
                weight.grad.mul_(data)
        dist.all_reduce(loss)
        return loss.item() if case.sequence_parallel else loss.item() / case.tp

    def around(step, optimizer):
        if step + 1 == case.move_after:
            _move_and_check(net, optimizer, experts)
        if case.hot:
            copy_experts(net, _drawn(step, case.hot))

    if case.hot:
        copy_experts(net, _drawn(-1, case.hot))
    losses, grads = _train(net, case, split, sync, around)
    params = _by_expert(_whole(dict(net.named_parameters())), net)
    loads = expert_loads(net, dense["dp", "fsdp"]) / (2 if case.recompute else 1)
    stayed = take_stayed(net)
    if case.hot == EXPERTS - 1:
        assert 0.7 < stayed <= 1
    assert take_stayed(net) is None
    assert not any(layer.expert_load.any() for layer in layers)
    return Trained(losses, grads, params, loads)


def _move_and_check(net, optimizer, experts):
    """The same experts, bit for bit, at new slots: weights and both of Adam's moments."""

    def everything():
        states = {
            f"{name}.{key}": value
            for name, p in net.named_parameters()
            for key, value in optimizer.state[p].items()
            if value.ndim
        }
        whole = _whole(dict(net.named_parameters()) | states)
        stacked = {n: t for n, t in whole.items() if ".experts." in n}
        assert len(stacked) == LAYERS * 3 * 3
        slots = slots_of_experts(net)
        return {n: (t, t[slots[int(n.split(".")[1])]]) for n, t in stacked.items()}

    before = everything()
    apply_placement(net, optimizer, _new_slots(), experts["ep"])
    after = everything()
    assert torch.equal(slots_of_experts(net), _new_slots())
    for name, (by_slot, by_expert) in after.items():
        assert torch.equal(by_expert, before[name][1]), name
        assert not torch.equal(by_slot, before[name][0]), name


def _difference(got, wanted):
    """The largest, relative to 1 + the value."""
    pairs = [*zip(got.losses, wanted.losses, strict=True)]
    for mine, theirs in ((got.grads, wanted.grads), (got.params, wanted.params)):
        assert mine.keys() == theirs.keys()
        pairs += [(mine[name], theirs[name]) for name in theirs]
    pairs = [(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs]
    assert torch.equal(got.loads, wanted.loads)
    return max(((a - b).abs() / (1 + b.abs())).max().item() for a, b in pairs)


def _run_all(rank, world_size, cases):
    _move_at_random(rank, world_size)
    _copy_some(rank, world_size)
    return _run_cases(rank, world_size, cases), _exchanges(rank, world_size)


def _move_at_random(rank, world_size):
    """Any permutation, and only the rows that change their rank are sent."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("ep",))
    stream = torch.Generator().manual_seed(1)
    whole = torch.randn(3 * world_size, 5, 2, generator=stream).bfloat16()
    for _ in range(10):
        source = torch.randperm(3 * world_size, generator=stream)
        held = whole.chunk(world_size)[rank].clone()
        move_slots(held, source, mesh)
        assert torch.equal(held, whole[source].chunk(world_size)[rank])
    with torch.profiler.profile() as recorded:
        within = torch.arange(3 * world_size).view(-1, 3).flip(1).flatten()
        move_slots(held, within, mesh)
    assert not any(event.name.startswith("gloo") for event in recorded.events())


def _copy_some(rank, world_size):
    """Rows of copied experts stay, and what their weights owe comes home: in bf16, added in fp32;
    nothing is sent for a stack that doesn't train but its weights."""
    group, slots = dist.group.WORLD, 3 * world_size
    for hot in ((1,), (0, 1, slots - 1)):
        made = Copies()
        made.slots = hot
        whole = (torch.arange(slots * 10.0) % 7).view(slots, 5, 2).bfloat16()
        mine = slice(3 * rank, 3 * rank + 3)
        trained, frozen = (whole[mine].clone().requires_grad_(flag) for flag in (True, False))
        with torch.profiler.profile() as recorded:
            own, wait = made.of({"a": trained, "b": frozen}, group)
            copies = wait()
            (own["a"].square().sum() + (rank + 1) * copies["a"].square().sum()).backward()
        for name in ("a", "b"):
            assert torch.equal(copies[name], whole[list(hot)]), name
            assert torch.equal(own[name], whole[mine]), name
        owed = 2 * whole
        owed[list(hot)] *= 1 + world_size * (world_size + 1) / 2
        assert torch.equal(trained.grad, owed[mine])
        assert not copies["b"].requires_grad
        names = [event.name for event in recorded.events()]
        owners = len({slot // 3 for slot in hot})
        assert [names.count(f"gloo:{op}") for op in ("broadcast", "reduce")] == [owners] * 2


def _run_cases(rank, world_size, cases):
    results, meshes = {}, {}
    for name, case in cases.items():
        sizes = (case.edp, case.efsdp, case.ep, case.tp)
        if sizes not in meshes:
            dense = (case.edp, case.efsdp * case.ep, case.tp)
            meshes[sizes] = (
                init_device_mesh("cpu", dense, mesh_dim_names=("dp", "fsdp", "tp")),
                init_device_mesh("cpu", (1, *sizes), mesh_dim_names=EXPERT_AXES),
            )
        wanted = _serial(case.dtype, case.closed, case.top)
        results[name] = _difference(_parallel(case, meshes[sizes]), wanted)
    return results


def _exchanges(rank, world_size):
    """The exchange alone: rows, gradients, what is sent, and backward without any row."""
    group, slots = dist.group.WORLD, 2 * world_size
    assert group is not None
    results = {}
    for name, dtype, num_rows in (
        ("fp64", torch.float64, 20 + rank),
        ("bf16", torch.bfloat16, 9),
        ("some have none", torch.float64, 5 * (rank % 2)),
        ("nobody has any", torch.float64, 0),
    ):
        stream = torch.Generator().manual_seed(rank)
        slot = torch.randint(slots, (num_rows,), generator=stream).sort().values
        rows = torch.randn(num_rows, 3, generator=stream, dtype=dtype, requires_grad=True)
        seen = []

        def experts(arrived, counts, seen=seen):
            assert counts.sum() == len(arrived)
            seen.append(counts)
            if not len(arrived):  # a network need not take care of the way back
                return torch.empty_like(arrived)
            own = torch.arange(rank * 2, rank * 2 + 2).repeat_interleave(counts)
            return arrived * (own + 1)[:, None].to(arrived.dtype)

        counts = torch.bincount(slot, minlength=slots)
        with torch.profiler.profile(record_shapes=True) as recorded:
            output = AllToAllDispatcher(group)(rows, counts, experts)
            output.backward(torch.ones_like(output))
        factor = (slot + 1)[:, None].to(dtype)
        assert output.dtype == dtype
        assert torch.equal(output, rows * factor), name
        assert torch.equal(rows.grad, factor.expand_as(rows)), name
        dist.all_reduce(counts)
        assert torch.equal(seen[0], counts[rank * 2 : rank * 2 + 2]), name
        results[name] = sum(e.name == "gloo:all_to_all" for e in recorded.events())
    return results


@pytest.fixture(scope="module")
def on_two():
    return run_ranks(_run_all, 2, ON_TWO)


@pytest.fixture(scope="module")
def on_four():
    return run_ranks(_run_all, 4, ON_FOUR)


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_equal_one(name, on_two):
    for result, _ in on_two:
        assert result[name] < TOLERANCE[ON_TWO[name].dtype]


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_equal_one(name, on_four):
    for result, _ in on_four:
        assert result[name] < TOLERANCE[ON_FOUR[name].dtype]


def test_an_exchange_sends_counts_and_twice_rows_and_twice_gradients(on_two, on_four):
    """Also with no rows: a rank that left one out would let the others wait."""
    for _, exchanges in (*on_two, *on_four):
        assert set(exchanges.values()) == {1 + 2 + 2}
