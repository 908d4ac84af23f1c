"""Muon: symmetric products, singular values near one, steps in stacks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import switch
from paceline.kernels.muon import FAST, muon_, orthogonalize, reference, step_scale
from paceline.kernels.muon.kernel import symmetric_product
from tests.kernels.agreement import DEVICE, check, kernels, random, relative_error, with_kernels

pytestmark = with_kernels
shapes = st.tuples(st.integers(1, 2), st.integers(1, 140), st.integers(1, 140))


@given(shape=shapes, has_plus=st.booleans())
@settings(max_examples=8, deadline=None)
def test_the_symmetric_product_is_the_product(shape, has_plus):
    x = random(*shape, seed=1).detach()
    gram = random(shape[0], shape[1], 7, seed=2).detach()
    plus = gram @ gram.mT if has_plus else None
    with kernels():
        ours = symmetric_product(x, plus, 0.7, -1.3)
    wide = None if plus is None else plus.double()
    right = reference.symmetric_product(x.double(), wide, 0.7, -1.3)
    assert relative_error(ours, right) < 1e-6
    assert torch.equal(ours, ours.mT)


def test_products_of_many_tiles_are_mirrored():
    x = random(1, 300, 70).detach()
    with kernels():
        ours = symmetric_product(x, None, 1.0, 0.0)
    assert relative_error(ours, x.double() @ x.double().mT) < 1e-6
    assert torch.equal(ours, ours.mT)


@given(
    shape=st.sampled_from([(5, 5), (40, 130), (131, 37), (1, 9), (9, 1), (2, 3, 20, 33), (0, 4)])
)
@settings(max_examples=7, deadline=None)
def test_orthogonalize_is_the_reference(shape):
    check(lambda x: orthogonalize(x), [random(*shape).detach()], within=1e-5)


def _image(values: Tensor) -> Tensor:
    """Where the polynomial takes singular values."""
    for a, b, c in FAST:
        values = a * values + b * values**3 + c * values**5
    return values


@pytest.mark.parametrize("shape", [(48, 48), (30, 90), (90, 30)])
def test_singular_values_go_where_the_polynomial_takes_them(shape):
    x = random(*shape).detach()
    with kernels():
        ours = orthogonalize(x)
    left, values, right = torch.linalg.svd(x.double(), full_matrices=False)
    expected = left @ torch.diag(_image(values / values.norm())) @ right
    assert relative_error(ours, expected) < 1e-5
    found = torch.linalg.svdvals(ours.double())
    # Of squares the smallest values may be too small to come all the way.
    assert float(found.max()) < 1.21
    assert float(found.quantile(0.1)) > 0.66


def test_nothing_stays_nothing_and_what_is_not_finite_becomes_nan():
    x = torch.zeros(2, 4, 6, device=DEVICE)
    x[1, 2, 3] = math.inf
    with kernels():
        ours = orthogonalize(x)
    assert (ours[0] == 0).all()
    assert ours[1].isnan().any()


def test_size_does_not_matter():
    x = random(20, 30).detach()
    with kernels():
        right = orthogonalize(x)
        for scale in (1e-20, 1e15):
            torch.testing.assert_close(orthogonalize(x * scale), right, rtol=1e-4, atol=1e-5)


def _state(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[list[Tensor]]:
    """Parameters, gradients, momenta."""
    return [
        [random(*shape, seed=10 * kind + i).detach().to(dtype) for i, shape in enumerate(shapes)]
        for kind in range(3)
    ]


@pytest.mark.parametrize(("nesterov", "rms"), [(True, 0.2), (False, None)])
def test_steps_are_those_of_the_reference(nesterov, rms):
    shapes = [(8, 20), (8, 20), (2, 6, 5)]
    ours, theirs = _state(shapes, torch.float32), _state(shapes, torch.float64)
    with kernels():
        muon_(*ours, lr=0.1, weight_decay=0.3, nesterov=nesterov, rms=rms)
    for param, grad, momentum in zip(*theirs, strict=True):
        reference.step_(
            param,
            grad,
            momentum,
            lr=0.1,
            keep=0.95,
            weight_decay=0.3,
            scale=step_scale(param.shape, rms),
            nesterov=nesterov,
            coefficients=FAST,
        )
    for mine, right in zip(ours, theirs, strict=True):
        for a, b in zip(mine, right, strict=True):
            assert relative_error(a, b) < 1e-5


def test_a_step_has_about_the_size_that_is_asked_for():
    params, grads, momenta = ([random(40, 120, seed=i).detach()] for i in range(3))
    before = params[0].clone()
    muon_(params, grads, momenta, lr=1.0, rms=0.2)
    assert 0.15 < float((params[0] - before).square().mean().sqrt()) < 0.25


def test_rate_factor_and_skipping_may_be_on_the_device():
    ours, theirs = _state([(6, 9), (6, 9)], torch.float32), _state([(6, 9), (6, 9)], torch.float32)
    rate, factor = torch.full((), 0.1, device=DEVICE), torch.full((), 0.25, device=DEVICE)
    for grad in ours[1]:
        grad.mul_(4)
    good, bad = torch.zeros((), device=DEVICE), torch.ones((), device=DEVICE)
    with kernels():
        muon_(*ours, lr=rate, weight_decay=0.3, factor=factor, found_inf=good)
        muon_(*theirs, lr=0.1, weight_decay=0.3)
    for mine, right in zip((*ours[0], *ours[2]), (*theirs[0], *theirs[2]), strict=True):
        torch.testing.assert_close(mine, right)
    kept = [each.clone() for each in (*ours[0], *ours[2])]
    nan = [torch.full_like(each, math.nan) for each in ours[0]]
    with kernels():
        muon_(ours[0], nan, ours[2], lr=rate, weight_decay=0.3, found_inf=bad)
    assert all(torch.equal(a, b) for a, b in zip(kept, (*ours[0], *ours[2]), strict=True))


def test_stacks_are_no_larger_than_they_may_be(monkeypatch):
    monkeypatch.setattr("paceline.kernels.muon._STACK_VALUES", 100)
    ours, theirs = _state([(6, 9)] * 3, torch.float32), _state([(6, 9)] * 3, torch.float32)
    muon_(*ours, lr=0.1)
    monkeypatch.undo()
    muon_(*theirs, lr=0.1)
    for mine, right in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(mine, right)


def test_the_operator_is_what_torch_wants_of_it():
    x = random(2, 5, 8).detach()
    plus = random(2, 5, 5).detach()
    torch.library.opcheck(symmetric_product.custom, (x, plus + plus.mT, 0.5, 2.0))


def test_it_compiles_as_one_graph():
    x = random(2, 12, 20).detach()
    compiled = torch.compile(orthogonalize, fullgraph=True, backend="aot_eager")
    with kernels():
        assert torch.equal(compiled(x), orthogonalize(x))


def test_what_is_no_matrix_is_refused():
    with pytest.raises(InputError, match=r"shape \(3,\)"):
        orthogonalize(torch.zeros(3))
    vector = [torch.zeros(3)]
    with pytest.raises(InputError, match="Muon steps matrices"):
        muon_(vector, vector, vector, lr=0.1)
    with pytest.raises(InputError, match="1 params and 0 grads"):
        muon_(vector, [], vector, lr=0.1)
    with switch.using("reference", DEVICE):
        muon_([], [], [], lr=0.1)
