"""Schedules, parameter groups, fp32 masters and skipped steps (pure, then one process)."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from paceline.config.job import Optim
from paceline.train.optim import (
    build_optimizer,
    clip_gradients,
    learning_rate,
    skip_if,
)

STEPS = 100


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


def test_constant_stays():
    assert _curve(schedule="constant") == pytest.approx([1.0] * STEPS)


def test_matrices_decay_and_vectors_do_not():
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    groups = build_optimizer(module, Optim(weight_decay=0.3)).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert len(decay) == len(list(module.parameters()))
    assert all(decay[id(p)] == (0.3 if p.ndim == 2 else 0.0) for p in module.parameters())


def test_frozen_parameters_are_left_alone():
    module = nn.Linear(4, 4)
    module.bias.requires_grad_(False)
    optimizer = build_optimizer(module, Optim())
    assert [p for g in optimizer.param_groups for p in g["params"]] == [module.weight]


def _steps(module: nn.Module, num: int, **settings) -> torch.optim.Optimizer:
    optimizer = build_optimizer(module, Optim(lr=1e-4, **settings))
    for step in range(num):
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        module(inputs.to(module.weight.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_bf16_parameters_follow_their_fp32_masters():
    """Updates far below bf16's resolution must add up: 200 steps of 1e-4 move a weight by 0.02."""
    torch.manual_seed(0)
    exact = nn.Linear(16, 16).bfloat16().float()
    rounded = nn.Linear(16, 16).bfloat16()
    rounded.load_state_dict({k: v.bfloat16() for k, v in exact.state_dict().items()})
    _steps(exact, 200)
    optimizer = _steps(rounded, 200)
    master = optimizer.state[rounded.weight]["master"]
    assert master.dtype == torch.float32
    assert torch.equal(rounded.weight, master.bfloat16())
    assert torch.allclose(master, exact.weight, atol=2e-3)
    assert not torch.allclose(exact.weight, exact.weight.bfloat16().float(), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_step_changes_nothing_not_even_the_step_count(dtype):
    module = nn.Linear(16, 16).to(dtype)
    optimizer = _steps(module, 2)
    before = [p.detach().clone() for p in module.parameters()]
    count = optimizer.state[module.weight]["step"].clone()
    for p in module.parameters():
        p.grad = torch.full_like(p, math.nan)
    skip_if(optimizer, ~torch.isfinite(clip_gradients(module, 1.0)))
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert optimizer.state[module.weight]["step"] == count
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    skip_if(optimizer, ~torch.isfinite(clip_gradients(module, 1.0)))
    optimizer.step()
    assert not torch.equal(before[0], next(module.parameters()))


def test_clipping_bounds_the_norm_and_zero_leaves_gradients_alone():
    module = nn.Linear(4, 4)
    for p in module.parameters():
        p.grad = torch.full_like(p, 3.0)
    norm = 3.0 * math.sqrt(20)
    assert clip_gradients(module, 0.0).item() == pytest.approx(norm)
    assert module.bias.grad[0].item() == 3.0
    assert clip_gradients(module, 1.0).item() == pytest.approx(norm)
    assert clip_gradients(module, 0.0).item() == pytest.approx(1.0)
