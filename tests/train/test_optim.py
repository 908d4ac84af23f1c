"""Schedules, groups, masters, 8-bit and offloaded state (pure, then one process, then ranks)."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.optim import Optim
from paceline.kernels import launch
from paceline.kernels.adamw.eight_bit import decode, encode, num_row_dims, zeros
from paceline.kernels.loss import cross_entropy
from paceline.models.decoder import Decoder
from paceline.train import optim as optim_module
from paceline.train.learning_rates import learning_rate
from paceline.train.optim import AdamW, skip_if
from paceline.train.optimizers import build_optimizer
from tests.kernels.agreement import DEVICE, kernels, relative_error, with_kernels
from tests.ranks import run_ranks

STEPS = 100

FULL = Layout()
CODED = Layout(optimizer_state="8bit")
ON_HOST = Layout(offload=("optimizer",))
BOTH = Layout(optimizer_state="8bit", offload=("optimizer",))


def _curve(**settings) -> list[float]:
    optim = Optim(lr=1.0, final_lr_ratio=0.1, **settings)
    return [learning_rate(optim, step, STEPS) for step in range(STEPS)]


def test_warm_up_rises_linearly_to_the_peak():
    curve = _curve(warmup_steps=10)
    assert curve[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(curve) == pytest.approx(1.0)


def test_cosine_falls_to_the_floor_through_the_middle():
    curve = _curve(schedule="cosine")
    assert curve[0] == pytest.approx(1.0)
    assert curve[-1] == pytest.approx(0.1)
    assert curve[33] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 3)))
    assert all(a >= b for a, b in pairwise(curve))


def test_wsd_stays_and_then_falls_linearly():
    curve = _curve(schedule="wsd", warmup_steps=5, decay_steps=20)
    assert curve[4:79] == pytest.approx([1.0] * 75)
    assert curve[-1] == pytest.approx(0.1)
    falls = [a - b for a, b in pairwise(curve[79:])]
    assert falls == pytest.approx([0.9 / 20] * len(falls))


def test_polynomial_falls_as_its_power_says():
    curve = _curve(schedule="polynomial", warmup_steps=19, power=2.0)
    assert curve[18:20] == pytest.approx([1.0, 1.0])
    assert curve[59] == pytest.approx(0.1 + 0.9 * 0.25)
    assert curve[-1] == pytest.approx(0.1)


def test_inverse_sqrt_falls_by_the_root_of_the_steps_to_the_floor():
    curve = _curve(schedule="inverse_sqrt", warmup_steps=4)
    assert curve[3] == pytest.approx(1.0)
    assert curve[15] == pytest.approx(0.5)
    assert Optim(lr=1.0, schedule="inverse_sqrt", warmup_steps=4).final_lr_ratio == 0.1
    late = learning_rate(Optim(lr=1.0, schedule="inverse_sqrt", warmup_steps=4), 10**4, 10**5)
    assert late == pytest.approx(0.1)


def test_constant_stays():
    assert _curve(schedule="constant") == pytest.approx([1.0] * STEPS)


def test_matrices_decay_and_vectors_do_not():
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    groups = build_optimizer(module.named_parameters(), Optim(weight_decay=0.3), FULL).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert len(decay) == len(list(module.parameters()))
    assert all(decay[id(p)] == (0.3 if p.ndim == 2 else 0.0) for p in module.parameters())


def test_frozen_parameters_are_left_alone():
    module = nn.Linear(4, 4)
    module.bias.requires_grad_(False)
    optimizer = build_optimizer(module.named_parameters(), Optim(), FULL)
    assert [p for g in optimizer.param_groups for p in g["params"]] == [module.weight]


def _steps(module: nn.Module, num: int, layout: Layout = FULL, lr: float = 1e-4) -> AdamW:
    """Steps on inputs that depend on the step only."""
    optimizer = build_optimizer(module.named_parameters(), Optim(lr=lr), layout)
    for step in range(num):
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        module(inputs.to(module.weight.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(16, 16).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", [FULL, ON_HOST])
def test_steps_are_those_of_torch(layout, dtype):
    ours, theirs = _linear(dtype), _linear(dtype)
    _steps(ours, 5, layout)
    groups = [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias]}]
    reference = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(5):
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        theirs(inputs.to(dtype)).square().mean().backward()
        reference.step()
        reference.zero_grad()
    assert torch.allclose(ours.weight, theirs.weight, rtol=0, atol=1e-7)
    assert torch.allclose(ours.bias, theirs.bias, rtol=0, atol=1e-7)


@pytest.mark.parametrize("layout", [FULL, ON_HOST])
def test_bf16_parameters_follow_their_fp32_masters(layout):
    """Updates far below bf16's resolution must add up: 60 steps of 1e-4 move a weight by 0.006."""
    rounded = _linear(torch.bfloat16)
    exact = _linear(torch.bfloat16).float()
    _steps(exact, 60)
    optimizer = _steps(rounded, 60, layout)
    master = optimizer.state[rounded.weight]["master"]
    assert master.dtype == torch.float32
    assert torch.equal(rounded.weight, master.bfloat16())
    assert torch.allclose(master, exact.weight, rtol=0, atol=2e-3)
    assert not torch.allclose(exact.weight, exact.weight.bfloat16().float(), atol=1e-6)


def _after_steps(layout: Layout, dtype: torch.dtype) -> list[torch.Tensor]:
    """Parameters and what checkpoints keep of their state, after some steps of drawn gradients."""
    generator = torch.Generator().manual_seed(3)
    shapes = (5, 300), (7,), (64, 256)
    params = [
        nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes
    ]
    named = ((str(index), p) for index, p in enumerate(params))
    optimizer = build_optimizer(named, Optim(lr=1e-2, weight_decay=0.1), layout)
    for bad in (0.0, 1.0, 0.0):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(DEVICE, dtype)
        skip_if(optimizer, torch.tensor(bad, device=DEVICE))
        optimizer.step()
    kept = [value for p in params for value in optimizer.saved_state(p).values()]
    return [*(p.detach() for p in params), *kept]


@with_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [FULL, CODED, BOTH], ids=["full", "8 bits", "both"])
def test_the_kernel_steps_as_torch_does(layout, dtype):
    expected = _after_steps(layout, dtype)
    with kernels(), launch.record_launches() as seen:
        found = _after_steps(layout, dtype)
    assert {kernel.name.partition(".")[0] for kernel, *_ in seen} == {"adamw"}
    within = 1e-6 if layout == FULL else 2e-2  # a code may be the neighbour
    for mine, right in zip(found, expected, strict=True):
        assert relative_error(mine, right) < max(within, torch.finfo(mine.dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [FULL, CODED, ON_HOST, BOTH])
def test_a_bad_step_changes_nothing_not_even_the_step_count(layout, dtype):
    module = _linear(dtype)
    optimizer = _steps(module, 3, layout)
    parameters = list(module.parameters())
    before = copy.deepcopy([[p.detach() for p in parameters], list(optimizer.state.values())])
    for p in parameters:
        p.grad = torch.full_like(p, math.nan)
    skip_if(optimizer, torch.tensor(True))
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before[0], parameters, strict=True))
    for old, new in zip(before[1], optimizer.state.values(), strict=True):
        assert all(torch.equal(value, new[key]) for key, value in old.items())
    for p in parameters:
        p.grad = torch.ones_like(p)
    skip_if(optimizer, torch.tensor(False))
    optimizer.step()
    assert not torch.equal(before[0][0], parameters[0])


@pytest.mark.parametrize("layout", [CODED, ON_HOST, BOTH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stepping_in_chunks_of_rows_changes_nothing(layout, dtype, monkeypatch):
    whole, cut = _linear(dtype), _linear(dtype)
    _steps(whole, 3, layout)
    monkeypatch.setattr(optim_module, "_CHUNK", 40)
    optimizer = _steps(cut, 3, layout)
    assert torch.equal(whole.weight, cut.weight)
    assert torch.equal(whole.bias, cut.bias)
    assert optimizer.state[cut.weight]["step"] == 3


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(7, 300), (3, 5, 64), (2, 40, 300), (4, 3, 3, 3), (0, 10)])
def test_codes_are_close_and_coding_again_gives_the_same(shape, signed):
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=stream) * torch.rand(shape, generator=stream) ** 4
    x = x if signed else x.abs()
    coded = encode(x, num_row_dims(x.shape), signed=signed)
    decoded = decode(coded, torch.float32, signed=signed)
    again = encode(decoded, num_row_dims(x.shape), signed=signed)
    assert torch.equal(again.codes, coded.codes)
    assert torch.equal(again.scales, coded.scales)
    assert torch.equal(encode(-x, num_row_dims(x.shape), signed=True).scales, coded.scales)
    # Half a level: 1/64 of 0.9 near the largest, 1/14 of a number a thousandth as large.
    largest = x.abs().amax() if x.numel() else 1.0
    assert ((decoded - x).abs() <= 0.0071 * largest).all()
    clear = x.abs() > 1e-3 * largest
    assert ((decoded - x).abs()[clear] <= 0.32 * x.abs()[clear]).all()
    empty = zeros(x.shape, num_row_dims(x.shape), x.device, signed=signed)
    assert empty.codes.shape == coded.codes.shape
    assert empty.scales.shape == coded.scales.shape
    assert not decode(empty, torch.float32, signed=signed).any()


def test_a_small_second_moment_does_not_become_zero():
    x = torch.tensor([[1.0, 1e-9, 0.0]])
    one, small, nothing = decode(encode(x, 1, signed=False), torch.float32, signed=False)[0]
    assert one == 1
    assert small > 0
    assert nothing == 0


def test_rows_are_coded_alone():
    """What one rank codes of a tensor cut between rows is what the whole would have there."""
    x = torch.randn(6, 3, 300, generator=torch.Generator().manual_seed(0))
    whole = encode(x, num_row_dims(x.shape), signed=True)
    part = encode(x[2:5, 1:], num_row_dims(x.shape), signed=True)
    assert torch.equal(part.codes, whole.codes[2:5, 1:])
    assert torch.equal(part.scales, whole.scales[2:5, 1:])


def _bytes_of_state(optimizer: AdamW, p: nn.Parameter) -> int:
    return sum(t.nbytes for t in optimizer.state[p].values())


def test_8_bit_state_takes_two_bytes_per_parameter():
    module = nn.Linear(512, 64)
    optimizer = build_optimizer(module.named_parameters(), Optim(), CODED)
    module(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    per_parameter = _bytes_of_state(optimizer, module.weight) / module.weight.numel()
    assert per_parameter == pytest.approx(2 + 2 * 4 / 256, rel=1e-3)
    assert _bytes_of_state(optimizer, module.bias) == 4 + 2 * module.bias.nbytes


MODEL = Model(
    vocab_size=61, hidden_size=32, ffn_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    max_seq_len=16,
)  # fmt: skip


def _decoder_losses(layout: Layout, steps: int, dtype: torch.dtype = torch.float32) -> list[float]:
    decoder = Decoder(MODEL)
    decoder.init_weights(torch.Generator().manual_seed(0))
    decoder.to(dtype)
    optimizer = build_optimizer(decoder.named_parameters(), Optim(lr=3e-3), layout)
    losses = []
    for step in range(steps):
        stream = torch.Generator().manual_seed(step)
        first = torch.randint(61, (8, 1), generator=stream)
        tokens = (first + 7 * torch.arange(17)) % 61  # to be learnt
        loss = cross_entropy(decoder(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_8_bit_training_follows_full_precision():
    full, coded = (_decoder_losses(layout, 40) for layout in (FULL, CODED))
    assert full[-1] < 0.5 * full[0]
    assert coded == pytest.approx(full, rel=0.02)  # 0.006 seen
    assert coded != full


def test_offloaded_training_is_the_same():
    assert _decoder_losses(ON_HOST, 5) == _decoder_losses(FULL, 5)
    assert _decoder_losses(BOTH, 5) == _decoder_losses(CODED, 5)


@pytest.mark.parametrize("layout", [FULL, CODED, ON_HOST, BOTH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_goes_on_as_if_never_saved(layout, dtype):
    straight, resumed = _linear(dtype), _linear(dtype)
    a, b = _steps(straight, 3, layout), _steps(resumed, 3, layout)
    for p in resumed.parameters():
        saved = b.saved_state(p)
        assert set(saved) - {"master"} == {"step", "exp_avg", "exp_avg_sq"}
        assert saved["exp_avg"].dtype == torch.float32
        b.state[p] = {key: value.clone() for key, value in saved.items()}
    for module, optimizer in ((straight, a), (resumed, b)):
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    for p, q in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
        assert a.state[p].keys() == b.state[q].keys()


def test_a_run_may_change_the_form_of_its_state():
    """Codes from a full checkpoint, and back."""
    module = _linear()
    full = _steps(module, 3)
    coded = build_optimizer(module.named_parameters(), Optim(), CODED)
    for p in module.parameters():
        coded.state[p] = full.saved_state(p)
        p.grad = torch.ones_like(p)
    coded.step()
    assert "exp_avg.codes" in coded.state[module.weight]
    assert "exp_avg" not in coded.state[module.weight]
    again = build_optimizer(module.named_parameters(), Optim(), FULL)
    for p in module.parameters():
        again.state[p] = coded.saved_state(p)
    again.step()
    assert "exp_avg.codes" not in again.state[module.weight]


def _sharded_steps(rank: int, world_size: int):
    """Parameters after steps with layouts of DTensors, and what a checkpoint would get."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    found = {}
    for name, layout in {"full": FULL, "8bit": CODED, "host": ON_HOST}.items():
        module = nn.Sequential(nn.Linear(512, 5), nn.LayerNorm(5)).double()
        for p in module.parameters():
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
        linear = module[0]
        plan = {"weight": [Shard(1)], "bias": [Replicate()]}  # 512 columns: between blocks
        for key, placements in plan.items():
            spread = distribute_tensor(getattr(linear, key).detach(), mesh["tp"], placements)
            setattr(linear, key, nn.Parameter(spread))
        fully_shard(linear, mesh=mesh["fsdp"])  # two meshes together; the norm has neither
        optimizer = build_optimizer(module.named_parameters(), Optim(lr=1e-2), layout)
        for step in range(3):
            for p in module.parameters():
                stream = torch.Generator().manual_seed(step)
                gradient = torch.randn(p.shape, generator=stream, dtype=p.dtype)
                if isinstance(p, DTensor):
                    gradient = distribute_tensor(gradient, p.device_mesh, p.placements)
                p.grad = gradient
            optimizer.step()
        saved = [optimizer.saved_state(p) for p in module.parameters()]
        found[name] = [
            [_whole(p.detach()) for p in module.parameters()],
            [_whole(state["exp_avg_sq"]) for state in saved],
        ]
        for p, state in zip(module.parameters(), saved, strict=True):
            assert isinstance(state["exp_avg"], DTensor) == isinstance(p, DTensor)
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _whole_steps(layout: Layout):
    module = nn.Sequential(nn.Linear(512, 5), nn.LayerNorm(5)).double()
    for p in module.parameters():
        torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
    optimizer = build_optimizer(module.named_parameters(), Optim(lr=1e-2), layout)
    for step in range(3):
        for p in module.parameters():
            stream = torch.Generator().manual_seed(step)
            p.grad = torch.randn(p.shape, generator=stream, dtype=p.dtype)
        optimizer.step()
    parameters = [p.detach() for p in module.parameters()]
    return [parameters, [optimizer.saved_state(p)["exp_avg_sq"] for p in module.parameters()]]


def test_shards_step_as_the_whole_does():
    """Uneven shards over two meshes beside plain parameters; 8-bit codes included."""
    whole = {"full": _whole_steps(FULL), "8bit": _whole_steps(CODED), "host": _whole_steps(FULL)}
    for found in run_ranks(_sharded_steps, 4):
        for name, parts in found.items():
            for mine, theirs in zip(parts, whole[name], strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    assert torch.allclose(a, b, rtol=0, atol=1e-12), name
