"""Normalisation of rows against fp64; then what torch asks of operators; then two FSDP2 ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from paceline.config.errors import InputError
from paceline.kernels.norm import add_rms_norm, reference, rms_norm
from tests.kernels.agreement import DEVICE, check, kernels, random, relative_error, with_kernels
from tests.ranks import run_ranks

pytestmark = with_kernels
EPS = 1e-5
# With a small eps, gradients of rows of one or two values are differences of nearly equal terms.
LARGE_EPS = 0.5
shapes = st.lists(st.integers(0, 9), min_size=0, max_size=2).flatmap(
    lambda outer: st.integers(1, 300).map(lambda width: (*outer, width))
)


@given(shape=shapes, has_weight=st.booleans())
@settings(max_examples=8, deadline=None)
def test_rms_norm_is_the_reference(shape, has_weight):
    weight = (random(shape[-1], seed=5),) if has_weight else ()
    check(lambda x, w=None: rms_norm(x, w, LARGE_EPS), (random(*shape), *weight))


@given(shape=shapes, has_weight=st.booleans())
@settings(max_examples=8, deadline=None)
def test_add_rms_norm_is_the_reference(shape, has_weight):
    weight = (random(shape[-1], seed=5),) if has_weight else ()
    inputs = random(*shape, seed=1), random(*shape, seed=2), *weight
    check(lambda x, r, w=None: add_rms_norm(x, r, w, LARGE_EPS), inputs)


@pytest.mark.parametrize("unread", [0, 1])
def test_either_result_of_add_rms_norm_may_stay_unread(unread):
    inputs = random(3, 24, seed=1), random(3, 24, seed=2)
    check(lambda x, r: add_rms_norm(x, r, None, EPS)[1 - unread], inputs)


def test_rows_of_many_blocks():
    """Each of the two programs walks over several blocks, and the last one is not full."""
    check(lambda x, w: rms_norm(x, w, EPS), (random(13, 1500), random(1500, seed=1)))


def test_rows_that_are_read_again_backward():
    width = 4100
    x, residual = random(3, width), random(3, width, seed=1)
    check(lambda x, r, w: add_rms_norm(x, r, w, EPS), (x, residual, random(width, seed=5)))
    check(lambda x: rms_norm(x, None, EPS), [x])


def test_rows_of_16_bits_may_be_twice_as_long():
    width = 8200
    x = random(3, width).detach().half().requires_grad_()
    weight, wide = random(width, seed=1), x.detach().double().requires_grad_()
    with kernels():
        ours = torch.autograd.grad(rms_norm(x, weight).sum(), (x, weight))
    right = reference.rms_norm(wide, weight.double(), 1e-6).sum()
    for mine, grad in zip(ours, torch.autograd.grad(right, (wide, weight)), strict=True):
        assert relative_error(mine, grad) < 1e-3


def test_rows_too_wide_for_registers_are_left_to_torch(monkeypatch):
    from paceline.kernels.norm import kernel

    monkeypatch.setattr(kernel, "norm", None)
    monkeypatch.setattr(kernel, "add_norm", None)
    x, residual = random(3, 8193), random(3, 8193, seed=9)
    with kernels():
        assert torch.equal(rms_norm(x, None), reference.rms_norm(x, None, 1e-6))
        _, summed = add_rms_norm(x, residual, None)
    assert torch.equal(summed, x + residual)


def test_rows_are_read_where_they_lie():
    halves = random(6, 2, 40)
    check(lambda both: rms_norm(both.chunk(2, dim=-1)[1], None, EPS), [halves])
    check(lambda x: rms_norm(x.transpose(0, 1), None, EPS), [random(40, 6)])
    check(lambda x: rms_norm(x, None, EPS).transpose(0, 1).sum(0), [random(6, 40)])


def test_weights_may_be_wider_than_x():
    x, weight = random(4, 16).detach().bfloat16(), random(16, seed=1).detach()
    assert rms_norm(x, weight).dtype == torch.bfloat16
    wanted = reference.rms_norm(x.double(), weight.double(), 1e-6)
    assert relative_error(rms_norm(x, weight), wanted) < 3e-3
    half, x = x.half(), x.half().float()
    with kernels():
        ours = rms_norm(half, weight)
    assert ours.dtype == torch.float16
    assert relative_error(ours, reference.rms_norm(x, weight, 1e-6)) < 1e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(value):
    x = random(2, 8).detach()
    x[0, 3] = value
    with kernels():
        normed = rms_norm(x, None)
    assert normed[0, 3].isnan()
    assert normed[1].isfinite().all()
    torch.testing.assert_close(normed, reference.rms_norm(x, None, 1e-6), equal_nan=True)


def test_what_does_not_fit_is_refused():
    x = random(2, 8)
    with pytest.raises(InputError, match="weight"):
        rms_norm(x, random(4))
    with pytest.raises(InputError, match="residual"):
        add_rms_norm(x, random(1, 8), None)


def test_operators_are_what_torch_wants_of_them():
    from paceline.kernels.norm import kernel

    x, weight = random(3, 8), random(8, seed=5)
    torch.library.opcheck(kernel._norm.custom, (x, weight, EPS))
    torch.library.opcheck(kernel._norm.custom, (x, None, EPS))
    torch.library.opcheck(kernel._add_norm.custom, (x, random(3, 8, seed=1), weight, EPS))
    grad, scales = x.detach(), torch.ones(3, 1, device=DEVICE)
    torch.library.opcheck(kernel._backward.custom, (grad, grad, grad, weight.detach(), scales))


def test_it_compiles_as_one_graph():
    def both(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        normed, summed = add_rms_norm(x, residual, weight, EPS)
        return rms_norm(rms_norm(normed, weight) + summed, weight)

    inputs = random(3, 8, seed=1), random(3, 8, seed=2), random(8, seed=3)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    with kernels():
        results = [
            torch.autograd.grad(function(*inputs).square().sum(), inputs)
            for function in (compiled, both)
        ]
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(self.linear(x), self.weight, EPS)


def _under_fsdp(rank, world_size):
    """Gradients of the mean of the ranks' losses: alone, and sharded."""
    batches = random(world_size, 5, 6, seed=4).detach()
    grads = []
    for sharded in (False, True):
        torch.manual_seed(0)
        net = _Net()
        if sharded:
            fully_shard(net, mesh=init_device_mesh("cpu", (world_size,)))
        with kernels():
            for batch in batches[rank : rank + 1] if sharded else batches:
                net(batch).pow(3).mean().div(1 if sharded else world_size).backward()
        grads.append([p.grad.full_tensor() if sharded else p.grad for p in net.parameters()])
    return grads


@pytest.mark.skipif(DEVICE.type != "cpu", reason="ranks of these tests share one CPU")
def test_sharded_weights_equal_one_process():
    for alone, sharded in run_ranks(_under_fsdp, 2):
        for mine, right in zip(sharded, alone, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)
