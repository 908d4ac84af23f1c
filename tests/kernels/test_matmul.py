"""Products with an epilogue: kernels in the interpreter against fp64, and what they compile to."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import matmul, switch
from paceline.kernels.matmul import feed_forward, grad_linear_act, interleave, linear_act
from tests.kernels.agreement import (
    DEVICE,
    check,
    code_for_hopper,
    kernels,
    random,
    relative_error,
    with_kernels,
)

pytestmark = with_kernels
ACTIVATIONS = ("none", "relu", "gelu", "squared_relu", "swiglu")
# The interpreter rounds to bf16 wrongly.
SIXTEEN_BITS = (torch.float16, torch.bfloat16) if DEVICE.type == "cuda" else (torch.float16,)
# Multiples of 4 take the kernels for TMA (rows of 16 bytes), others the ones for any alignment.
extents = st.one_of(st.integers(1, 90), st.integers(1, 20).map(lambda n: 4 * n))


def _problem(m: int, n: int, k: int, activation: str, *, bias: bool, residual: bool):
    columns = n * (2 if activation == "swiglu" else 1)
    made = random(m, k), random(columns, k, seed=1, scale=k**-0.5)
    extra = random(columns, seed=2) if bias else None
    added = random(m, n, seed=3) if residual else None
    return [each for each in (*made, extra, added) if each is not None]


def _call(activation: str, bias: bool, residual: bool):
    def function(x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        added = rest[-1] if residual else None
        return linear_act(x, weight, rest[0] if bias else None, activation, added)

    return function


@given(
    sizes=st.tuples(extents, extents, extents),
    activation=st.sampled_from(ACTIVATIONS),
    bias=st.booleans(),
    residual=st.booleans(),
)
@settings(max_examples=8, deadline=None)
def test_linear_act_is_the_reference(sizes, activation, bias, residual):
    inputs = _problem(*sizes, activation, bias=bias, residual=residual)
    check(_call(activation, bias, residual), inputs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("k", [72, 71], ids=["described", "pointers"])
def test_several_tiles_of_each_activation(activation, k):
    for bias, residual in ((True, False), (False, True)):
        inputs = _problem(70, 72, k, activation, bias=bias, residual=residual)
        check(_call(activation, bias, residual), inputs)


@pytest.mark.parametrize("shape", [(0, 8, 4), (3, 8, 0), (3, 0, 8)])
def test_nothing_is_multiplied_or_summed(shape):
    m, n, k = shape
    inputs = [random(m, k), random(n, k, seed=1), random(n, seed=2)]
    check(_call("gelu", True, False), inputs)


def test_strides_and_leading_dimensions():
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_act(x.transpose(0, 1)[..., ::2], weight.mT, bias, "gelu")

    check(function, [random(3, 2, 20), random(10, 6, seed=1), random(6, seed=2)])
    check(lambda x, weight: linear_act(x, weight), [random(8), random(4, 8, seed=1)])
    check(lambda x, weight: linear_act(x[:, 4:], weight), [random(3, 12), random(4, 8, seed=1)])


@given(
    sizes=st.tuples(extents, extents, extents),
    activation=st.sampled_from(ACTIVATIONS),
)
@settings(max_examples=6, deadline=None)
def test_the_gradient_over_a_product_is_the_references(sizes, activation):
    m, width, outputs = sizes
    columns = width * (2 if activation == "swiglu" else 1)
    inputs = [random(m, outputs), random(outputs, width, seed=1), random(m, columns, seed=2)]

    def function(grad: Tensor, weight: Tensor, preact: Tensor) -> tuple[Tensor, ...]:
        return grad_linear_act(grad, weight, preact, activation)

    check(function, [each.detach() for each in inputs])


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("m", [37, 68])
def test_feed_forward_is_the_reference(activation, m):
    columns = 24 * (2 if activation == "swiglu" else 1)
    inputs = (
        *(random(m, 20), random(columns, 20, seed=1, scale=0.3), random(16, 24, seed=2)),
        *(random(columns, seed=3), random(16, seed=4)),
    )
    check(lambda *given: feed_forward(*given, activation=activation), inputs)
    check(lambda *given: feed_forward(*given, activation=activation), inputs[:3])


def test_only_what_is_asked_for_has_a_gradient():
    frozen = [random(5, 8), random(12, 8, seed=1).detach(), random(8, 6, seed=2)]
    check(lambda *given: feed_forward(*given, activation="swiglu"), frozen)
    frozen = [random(5, 8).detach(), random(12, 8, seed=1).detach(), random(5, 12, seed=2)]
    check(lambda x, weight, added: linear_act(x, weight, None, "relu", added), frozen)


def test_the_tiles_of_a_group_are_each_done_once():
    """More rows of tiles than a group has, on fewer programs than tiles."""
    check(lambda x, weight: linear_act(x, weight), [random(64 * 9 + 1, 4), random(68, 4, seed=1)])


def test_swiglu_of_interleaved_weights_is_gate_and_up():
    x, gate, up = random(5, 8).detach(), random(6, 8, seed=1).detach(), random(6, 8, seed=2)
    with kernels():
        out = linear_act(x, interleave(gate, up.detach()), None, "swiglu")
    expected = torch.nn.functional.silu(x @ gate.T) * (x @ up.detach().T)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(activation, value):
    x, weight = torch.ones(3, 4, device=DEVICE), torch.ones(2, 4, device=DEVICE)
    x[1, 2] = value
    with kernels():
        out = linear_act(x, weight, None, activation)
    expected = matmul.reference.linear_act(x, weight, None, activation, None)
    torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_16_bits_are_as_near_as_torchs(activation, dtype):
    """On a GPU these are the tiles that matter: large, of TMA, on tensor cores."""
    m, n, k = (2000, 4096, 1024) if DEVICE.type == "cuda" else (70, 72, 40)
    columns = n * (2 if activation == "swiglu" else 1)
    shapes = (m, k), (columns, k), (k, n), (columns,)
    made = [
        (random(*shape, seed=seed).detach() * shape[-1] ** -0.5).to(dtype).requires_grad_()
        for seed, shape in enumerate(shapes)
    ]
    added = random(m, n, seed=5).detach().to(dtype)

    def values(inputs: list[Tensor], extra: Tensor) -> list[Tensor]:
        x, weight_in, weight_out, bias = inputs
        out = feed_forward(x, weight_in, weight_out, bias, None, activation)
        inner = linear_act(out, weight_in, bias, activation, extra)
        return [inner.detach(), *torch.autograd.grad((inner * inner.detach()).sum(), inputs)]

    with kernels():
        ours = values(made, added)
    with switch.using("reference", DEVICE):
        theirs = values(made, added)
        wide = [each.detach().double().requires_grad_() for each in made]
        expected = values(wide, added.double())
    for mine, torchs, right in zip(ours, theirs, expected, strict=True):
        assert mine.dtype == dtype
        assert relative_error(mine, right) <= 2 * relative_error(torchs, right)


def test_operators_are_what_torch_wants_of_them():
    from paceline.kernels.matmul import operators

    x, weight, bias = random(3, 8), random(12, 8, seed=1), random(12, seed=2)
    forward = operators._forward.custom
    torch.library.opcheck(forward, (x, weight, bias, random(3, 6), "swiglu", True))
    torch.library.opcheck(forward, (x, weight, None, None, "relu", False))
    whole = operators._feed_forward.forward.custom
    torch.library.opcheck(whole, (x, weight, random(4, 6), bias, None, "swiglu"))
    kept = random(3, 6).detach()
    grad_act = (random(3, 5).detach(), random(5, 6).detach(), kept, "gelu", False, True)
    torch.library.opcheck(operators._grad_act.custom, grad_act)
    torch.library.opcheck(operators.over_activation.custom, (kept, kept, "relu", True))


def test_it_compiles_as_one_graph():
    inputs = [random(3, 8), random(12, 8, seed=1), random(8, 6, seed=2)]

    def function(x: Tensor, weight_in: Tensor, weight_out: Tensor) -> Tensor:
        inner = linear_act(feed_forward(x, weight_in, weight_out), weight_in, None, "gelu")
        return inner.sum()

    with kernels():
        expected = torch.autograd.grad(function(*inputs), inputs)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        found = torch.autograd.grad(compiled(*inputs), inputs)
    for mine, right in zip(found, expected, strict=True):
        assert torch.equal(mine, right)


def test_autocast_decides_the_type():
    x, weight = random(3, 8).detach(), random(4, 8, seed=1).detach()
    with kernels(), torch.autocast(DEVICE.type, torch.bfloat16):
        out = linear_act(x, weight, None, "relu", x[:, :4])
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, (x @ weight.T).relu() + x[:, :4], atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.ones(2, 3), torch.ones(2, 4)), "give x"),
        ((torch.ones(2, 3), torch.ones(2, 3).double()), "convert one"),
        ((torch.ones(2, 3), torch.ones(2, 3), torch.ones(3)), "bias"),
        ((torch.ones(2, 3), torch.ones(2, 3), None, "silu"), "use one of"),
        ((torch.ones(2, 3), torch.ones(3, 3), None, "swiglu"), "pairs of rows"),
        ((torch.ones(2, 3), torch.ones(2, 3), None, "none", torch.ones(2)), "residual"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, said):
    with pytest.raises(InputError, match=said):
        linear_act(*arguments)


def test_hopper_multiplies_with_its_own_instructions_and_copies_with_tma():
    for ptx in code_for_hopper("matmul", "FORWARD_DESCRIBED", "BACKWARD_DESCRIBED"):
        assert "wgmma.mma_async" in ptx
        assert "cp.async.bulk.tensor.2d.shared" in ptx
        assert "cp.async.bulk.tensor.2d.global" in ptx
