"""Batch normalisation with residual and ReLU against torch's in fp64, and folded."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import switch
from paceline.kernels.batch_norm import batch_norm_act, reference
from tests.kernels.agreement import DEVICE, check, kernels, random, with_kernels

pytestmark = with_kernels
EPS = 1e-3
shapes = st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 7), st.integers(1, 7))


def _weights(channels: int) -> tuple[Tensor, Tensor]:
    return random(channels, seed=5), random(channels, seed=6)


def _apply(relu: bool = True):
    """A function of x, weight, bias and maybe a residual."""

    def apply(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
        return batch_norm_act(x, residual, weight, bias, None, None, True, 0.1, EPS, relu)

    return apply


@given(shape=shapes, has_residual=st.booleans(), relu=st.booleans(), scale=st.sampled_from([1, 9]))
@settings(max_examples=8, deadline=None)
def test_it_is_the_reference(shape, has_residual, relu, scale):
    if shape[0] * shape[2] * shape[3] < 8:
        shape = (8, *shape[1:])  # of two values, the gradient of x is next to nothing
    x = random(*shape, seed=1, scale=scale)
    residual = (random(*shape, seed=2),) if has_residual else ()
    check(_apply(relu), (x, *_weights(shape[1]), *residual), within=1e-5)


def test_channels_of_many_blocks_and_stretches_of_many_rows():
    shape = (3, 150, 9, 7)
    x = random(*shape, seed=1).detach().contiguous(memory_format=torch.channels_last)
    residual = random(*shape, seed=2)
    check(_apply(), (x.requires_grad_(), *_weights(150), residual), within=1e-5)


def test_many_stretches_are_put_together(monkeypatch):
    from paceline.kernels.batch_norm import kernel

    monkeypatch.setattr(kernel, "num_programs", lambda blocks, *_: min(blocks, 7))
    monkeypatch.setattr(kernel, "_PARTS", 2)
    x = random(7, 3, 40, 8, seed=1) * torch.linspace(0.1, 3, 7, device=DEVICE).view(-1, 1, 1, 1)
    x = (x + torch.linspace(-3, 5, 7, device=DEVICE).view(-1, 1, 1, 1)).detach().requires_grad_()
    check(_apply(), (x, *_weights(3)), within=1e-5)


@pytest.mark.parametrize("mean", [1e3, -1e5])
def test_a_large_mean_does_not_drown_the_variance(mean):
    """What fp32 left of the values is right; squares less the squared mean would be nothing."""
    x = (random(6, 4, 20, 10) + mean).detach()
    with kernels():
        out = batch_norm_act(x, None, *_weights(4), None, None, True, 0.1, EPS, False)
    right = reference.batch_norm_act(
        x.double(), None, *(w.double() for w in _weights(4)), None, None, True, 0.1, EPS, False
    )
    torch.testing.assert_close(out.double(), right, rtol=0, atol=4e-7 * abs(mean))


def test_running_statistics_move_as_those_of_torch():
    x, (weight, bias) = random(3, 5, 4, 4, scale=3), _weights(5)
    ours = torch.full((5,), 0.5, device=DEVICE), torch.full((5,), 2.0, device=DEVICE)
    theirs = ours[0].clone(), ours[1].clone()
    for _ in range(2):
        with kernels():
            batch_norm_act(x, None, weight, bias, *ours, True, 0.3)
        F.batch_norm(x, *theirs, weight, bias, True, 0.3)
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right)
        assert not mine.requires_grad


def test_evaluation_uses_the_running_statistics():
    x, (weight, bias) = random(3, 5, 4, 4), _weights(5)
    statistics = random(5, seed=7).detach(), random(5, seed=8).detach().square()
    with kernels():
        out = batch_norm_act(x, x, weight, bias, *statistics, False)
    right = F.relu(F.batch_norm(x, *statistics, weight, bias) + x)
    torch.testing.assert_close(out, right)


def test_results_are_channels_last_and_inputs_may_lie_otherwise():
    x = random(2, 12, 3, 5).detach()
    strided = random(2, 12, 5, 6).detach()[..., ::2].transpose(2, 3)
    with kernels():
        out = batch_norm_act(x, strided, *_weights(12), None, None, True)
    assert out.is_contiguous(memory_format=torch.channels_last)
    with switch.using("reference", DEVICE):
        right = batch_norm_act(x, strided, *_weights(12), None, None, True)
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_stays_in_its_channel():
    x = random(2, 9, 3, 3).detach()
    x[0, 4, 1, 1] = float("nan")
    with kernels():
        out = batch_norm_act(x, None, *_weights(9), None, None, True)
    assert out[:, 4].isnan().all()
    assert out[:, [c for c in range(9) if c != 4]].isfinite().all()


def test_what_does_not_fit_is_refused():
    x, (weight, bias) = random(1, 4, 1, 1), _weights(4)
    with pytest.raises(InputError, match="larger batch"):
        batch_norm_act(x, None, weight, bias, None, None, True)
    with pytest.raises(InputError, match="running_mean"):
        batch_norm_act(x, None, weight, bias, None, None, False)
    with pytest.raises(InputError, match="channels"):
        batch_norm_act(x, None, weight[:3], bias, None, None, True)
    with pytest.raises(InputError, match="residual"):
        batch_norm_act(x, random(4, 4, 1, 1), weight, bias, None, None, True)
    with pytest.raises(InputError, match="height"):
        batch_norm_act(random(3, 4), None, weight, bias, None, None, True)


def test_operators_are_what_torch_wants_of_them():
    from paceline.kernels.batch_norm import kernel

    x, residual, weights = random(2, 9, 2, 3), random(2, 9, 2, 3, seed=1), _weights(9)
    with torch.no_grad():
        _, bits, mean, _, scale = kernel._forward.custom(x, residual, *weights, EPS, True)
    torch.library.opcheck(kernel._forward.custom, (x, residual, *weights, EPS, True))
    torch.library.opcheck(kernel._forward.custom, (x, None, *weights, EPS, False))
    taken = x.detach(), x.detach(), bits, weights[0].detach(), mean, scale, True, True
    torch.library.opcheck(kernel._backward.custom, taken)


def test_it_compiles_as_one_graph():
    inputs = random(2, 8, 3, 3, seed=1), *_weights(8), random(2, 8, 3, 3, seed=2)

    def apply(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        out = batch_norm_act(x, residual, weight, bias, mean, variance, True)
        return batch_norm_act(out, residual, weight, bias, None, None, True, relu=False)

    results = []
    for function in (torch.compile(apply, fullgraph=True, backend="aot_eager"), apply):
        mean, variance = torch.zeros(8, device=DEVICE), torch.ones(8, device=DEVICE)
        with kernels():
            out = function(*inputs)
            results.append([*torch.autograd.grad(out.square().sum(), inputs), mean, variance])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)
