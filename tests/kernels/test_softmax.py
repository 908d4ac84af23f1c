"""Softmax over the last dimension against fp64: rows in registers, swept twice, and shared."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.errors import InputError
from paceline.kernels.softmax import softmax
from tests.kernels.agreement import DEVICE, check, kernels, random, with_kernels

pytestmark = with_kernels
WIDE = 16384 + 333
INFINITE = float("inf")
shapes = st.lists(st.integers(0, 9), min_size=0, max_size=2).flatmap(
    lambda outer: st.integers(1, 300).map(lambda width: (*outer, width))
)


@given(shape=shapes)
@settings(max_examples=8, deadline=None)
def test_it_is_the_reference(shape):
    # Larger ones would make rows of few values nearly certain, and their gradients nearly nothing.
    check(softmax, [random(*shape)], within=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_wide_rows_are_shared_where_they_are_few(rows, monkeypatch):
    from paceline.kernels.softmax import kernel

    shared = []
    monkeypatch.setattr(
        kernel.WRITE_PART.__class__,
        "__call__",
        _noting(kernel.WRITE_PART.__class__.__call__, shared),
    )
    check(softmax, [random(rows, WIDE, scale=4)])
    if DEVICE.type == "cpu":  # with two processors
        assert ("softmax.write_part" in shared) == (rows <= 2)
        assert ("softmax.wide_forward" in shared) == (rows > 2)


def _noting(call, names):
    def noted(self, *arguments, **constants):
        names.append(self.name)
        return call(self, *arguments, **constants)

    return noted


@pytest.mark.parametrize("rows", [1, 5])
def test_the_largest_may_come_late(rows):
    """The sum so far is scaled down whenever a larger value turns up."""
    x = (random(rows, WIDE) + torch.linspace(-80, 80, WIDE, device=DEVICE)).detach()
    check(softmax, [x.requires_grad_()], within=1e-5)


def test_rows_are_read_where_they_lie():
    check(lambda both: softmax(both.chunk(2, dim=-1)[1]), [random(6, 2, 40)])
    check(lambda x: softmax(x.transpose(0, 1)), [random(40, 6)])


@pytest.mark.parametrize(("rows", "width"), [(3, 20), (1, WIDE), (3, WIDE)])
def test_what_is_not_finite_does_as_in_torch(rows, width):
    x = torch.zeros(rows, width, device=DEVICE)
    x[0, : width // 2 + 7] = -INFINITE  # whole blocks at first
    for value, at in ((INFINITE, 3), (float("nan"), width - 1), (None, slice(None))):
        if value is not None and rows > 1:
            x[1 + (value != INFINITE), at] = value
        elif rows == 1 and value is None:
            x[0] = -INFINITE
        with kernels():
            torch.testing.assert_close(softmax(x), x.softmax(dim=-1), equal_nan=True)


def test_a_single_number_is_refused():
    with pytest.raises(InputError, match="last dimension"):
        softmax(random())


def test_operators_are_what_torch_wants_of_them():
    from paceline.kernels.softmax import kernel

    pair = random(3, 8, seed=1).detach(), random(3, 8, seed=2).detach()
    with kernels():
        torch.library.opcheck(kernel._softmax.custom, (random(3, 8),))
        torch.library.opcheck(kernel._softmax_backward.custom, pair)


def test_it_compiles_as_one_graph():
    x = random(3, 8)
    compiled = torch.compile(softmax, fullgraph=True, backend="aot_eager")
    with kernels():
        grads = [
            torch.autograd.grad(function(x).square().sum(), x)[0]
            for function in (compiled, softmax)
        ]
    torch.testing.assert_close(*grads)
