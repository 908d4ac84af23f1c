import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.activations import gated
from tests.kernels.agreement import DEVICE, check, kernels, random, with_kernels

pytestmark = with_kernels
shapes = st.lists(st.integers(0, 5), min_size=0, max_size=2).flatmap(
    lambda outer: st.integers(1, 70).map(lambda width: (*outer, width))
)


@given(shape=shapes)
@settings(max_examples=15, deadline=None)
def test_gated_is_the_reference(shape):
    check(gated, (random(*shape, seed=1, scale=3), random(*shape, seed=2)))


def test_rows_longer_than_a_block():
    check(gated, (random(2, 5000, seed=1), random(2, 5000, seed=2)))


def test_halves_of_one_product_are_read_where_they_lie():
    def halves(both: Tensor) -> Tensor:
        return gated(*both.chunk(2, dim=-1))

    check(halves, [random(3, 2, 74)])
    check(lambda x: gated(x.transpose(0, 1), x.transpose(0, 1)), [random(7, 5)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_what_is_not_finite_stays_so(value):
    gate, up = torch.full((1, 4), value, device=DEVICE), torch.ones(1, 4, device=DEVICE)
    with kernels():
        out = gated(gate, up)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), equal_nan=True)


def test_operators_are_what_torch_wants_of_them():
    from paceline.kernels.activations.kernel import _forward

    torch.library.opcheck(_forward.custom, (random(3, 8, seed=1), random(3, 8, seed=2)))


def test_it_compiles_as_one_graph():
    gate, up = random(3, 8, seed=1), random(3, 8, seed=2)
    compiled = torch.compile(gated, fullgraph=True, backend="aot_eager")
    with kernels():
        compiled(gate, up).sum().backward()
        grads = gate.grad, up.grad
        gate.grad = up.grad = None
        gated(gate, up).sum().backward()
    assert torch.equal(gate.grad, grads[0])
    assert torch.equal(up.grad, grads[1])
