"""Rotation with a norm before it: kernels in the interpreter against the reference in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import launch
from paceline.kernels.launch import Launch, MeasuredLaunch
from paceline.kernels.rope import rotate
from tests.kernels.agreement import DEVICE, check, kernels, random, with_kernels


def tables(batch: int, seq_len: int, rope_dim: int) -> tuple[Tensor, Tensor]:
    angles = random(batch, seq_len, 1, rope_dim // 2, seed=9, scale=3).detach()
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def norm_weight(width: int) -> Tensor:
    return (random(width, seed=width).detach() / 3 + 1).requires_grad_()


def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 rows, and 5 programs backward, whatever the size."""
    few = (
        MeasuredLaunch(Launch({"ROWS": 4}), 0, 0),
        MeasuredLaunch(Launch({"ROWS": 4, "PROGRAMS": 5}), 0, 0),
    )
    rows = {"rope.forward": few[0], "rope.backward": few[1]}
    monkeypatch.setattr(launch, "measured", lambda device, kernel, dtype, size: rows[kernel])


@with_kernels
@given(
    batch=st.integers(1, 2),
    seq_len=st.integers(0, 5),
    heads=st.sampled_from([1, 3, 6, 8]),
    half=st.sampled_from([1, 3, 8]),
    has_norm=st.booleans(),
    shared=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_it_is_the_reference(batch, seq_len, heads, half, has_norm, shared):
    x, rope = (
        random(batch, seq_len, heads, 2 * half),
        tables(1 if shared else batch, seq_len, 2 * half),
    )
    check(rotate, [x, *rope, *([norm_weight(2 * half)] if has_norm else [])])


@with_kernels
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("heads", [6, 3])
def test_more_tiles_than_programs(monkeypatch, has_norm, heads):
    few_programs(monkeypatch)
    check(
        rotate, [random(2, 5, heads, 8), *tables(2, 5, 8), *([norm_weight(8)] if has_norm else [])]
    )


@with_kernels
def test_parts_of_one_product_are_read_where_they_lie():
    cos, sin = tables(1, 3, 8)

    def parts(product: Tensor, *norms: Tensor) -> tuple[Tensor, Tensor]:
        q, k, _ = product.unflatten(-1, (-1, 8)).split((4, 2, 2), dim=2)
        rope = cos.to(q.dtype), sin.to(q.dtype)
        return rotate(q, *rope, norms[0]), rotate(k, *rope, norms[1])

    check(parts, [random(2, 3, 64), norm_weight(8), norm_weight(8)])

    def heads_first(x: Tensor) -> Tensor:
        return rotate(x.transpose(1, 2), cos.to(x.dtype), sin.to(x.dtype)).transpose(1, 2)

    check(heads_first, [random(2, 4, 3, 8)])


def test_pairs_are_complex_numbers_that_turn():
    x, angles = random(2, 3, 4, 8), random(2, 3, 1, 4, seed=9, scale=3).detach()
    cos, sin = angles.cos(), angles.sin()
    turned = rotate(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    expected = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), -1))


@with_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_head(value):
    x = random(1, 2, 2, 8).detach()
    x[0, 1, 1, 3] = value
    inputs = (x, *tables(1, 2, 8), torch.ones(8, device=DEVICE))
    with kernels():
        turned = rotate(*inputs)
    torch.testing.assert_close(turned, rotate(*inputs), equal_nan=True)
    assert turned[0, 1, 1].isnan().any()
    assert turned[0, :, 0].isfinite().all()


@with_kernels
@pytest.mark.parametrize("has_norm", [False, True])
def test_operators_are_what_torch_wants_of_them(has_norm):
    from paceline.kernels.rope.kernel import _forward_operator

    weight = norm_weight(8) if has_norm else None
    inputs = random(1, 2, 2, 8), *tables(1, 2, 8), weight, 1e-6
    torch.library.opcheck(_forward_operator.custom, inputs)


@with_kernels
@pytest.mark.parametrize("has_norm", [False, True])
def test_it_compiles_as_one_graph(has_norm):
    rope, inputs = tables(1, 2, 8), [random(1, 2, 2, 8), *([norm_weight(8)] if has_norm else [])]

    def gradients(function):
        return torch.autograd.grad(function(inputs[0], *rope, *inputs[1:]).square().sum(), inputs)

    with kernels():
        compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")
        for mine, right in zip(gradients(compiled), gradients(rotate), strict=True):
            assert torch.equal(mine, right)


def test_what_does_not_fit_is_refused():
    x, (cos, sin) = random(1, 3, 2, 8), tables(1, 3, 8)
    with pytest.raises(InputError, match="an even head_dim"):
        rotate(x[..., :7], cos, sin)
    with pytest.raises(InputError, match="Tables of shapes"):
        rotate(x, cos[:, :2], sin[:, :2])
    with pytest.raises(InputError, match="A norm weight of shape"):
        rotate(x, cos, sin, torch.ones(4, device=DEVICE))
