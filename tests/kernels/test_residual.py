"""Bias, dropout and residual: the generator against Triton's, then results and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import switch
from paceline.kernels.residual import bias_dropout_residual, reference
from tests.kernels.agreement import DEVICE, check, kernels, random, with_kernels

pytestmark = with_kernels
shapes = st.lists(st.integers(0, 9), min_size=0, max_size=2).flatmap(
    lambda outer: st.integers(1, 100).map(lambda width: (*outer, width))
)
SEEDS = (0, 1, -1, 2**40 + 7)


def _seed(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64, device=DEVICE)


def test_random_words_are_those_of_the_paper():
    """Known answers of Random123 for Philox4x32-10: counter and key of zeros, and of ones."""
    words = reference.philox(torch.tensor(0), torch.tensor([0]))
    assert [f"{int(word):08x}" for word in words] == [
        "6627e8d5",
        "e169c58d",
        "bc57ac4c",
        "9b00dbd8",
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_words_are_those_of_triton(seed):
    import triton
    import triton.language as tl

    @triton.jit
    def draw(out, seed, counters, BLOCK: tl.constexpr):
        place = tl.arange(0, BLOCK)
        words = tl.randint4x(tl.load(seed), tl.load(counters + place))
        for index in tl.static_range(4):
            tl.store(out + index * BLOCK + place, words[index].to(tl.int32, bitcast=True))

    counters = torch.arange(32, device=DEVICE) * 2**31 // 3
    out = torch.empty(4, 32, dtype=torch.int32, device=DEVICE)
    with kernels():
        draw[(1,)](out, _seed(seed), counters, BLOCK=32)
    ours = torch.stack(reference.philox(_seed(seed), counters))
    assert torch.equal(out.long() & 0xFFFFFFFF, ours)


@given(
    shape=shapes,
    p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    seed=st.sampled_from(SEEDS),
    has_bias=st.booleans(),
)
@settings(max_examples=8, deadline=None)
def test_it_is_the_reference(shape, p, seed, has_bias):
    bias = (random(shape[-1], seed=3),) if has_bias else ()

    def apply(x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        return bias_dropout_residual(x, bias, residual, p, seed)

    check(apply, (random(*shape, seed=1), random(*shape, seed=2), *bias))


@pytest.mark.parametrize("shape", [(3, 2500), (70, 90)])
def test_rows_of_many_blocks_and_blocks_of_many_rows(shape):
    inputs = random(*shape, seed=1), random(*shape, seed=2), random(shape[1], seed=3)
    check(lambda x, residual, bias: bias_dropout_residual(x, bias, residual, 0.3, 5), inputs)


def test_rows_are_read_where_they_lie():
    def apply(both: Tensor, across: Tensor) -> Tensor:
        out = bias_dropout_residual(both.chunk(2, dim=-1)[1], None, across.transpose(0, 1), 0.5, 1)
        return out.transpose(0, 1)

    check(apply, (random(6, 80, seed=1), random(40, 6, seed=2)))


def test_nothing_is_drawn_and_nothing_changed_without_dropout():
    x, residual = random(3, 20, seed=1), random(3, 20, seed=2)
    with kernels():
        out = bias_dropout_residual(x, None, residual, 0.0, 1)
        assert torch.equal(out, residual + x)
        grads = torch.autograd.grad(out.sum(), (x, residual))
    assert all(torch.equal(grad, torch.ones_like(x)) for grad in grads)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.77])
def test_the_share_and_the_expectation_are_as_asked_for(p):
    x = torch.ones(1000, 1003, device=DEVICE)
    with switch.using("reference", DEVICE):
        out = bias_dropout_residual(x, None, torch.zeros_like(x), p, 3)
    dropped, within = float((out == 0).float().mean()), 5 * (p * (1 - p) / x.numel()) ** 0.5
    assert dropped == pytest.approx(p, abs=within)
    assert float(out.double().mean()) == pytest.approx(1, abs=within / (1 - p))
    for dim in (0, 1):  # no row and no column is special
        assert float((out == 0).float().mean(dim).sub(p).abs().max()) < 0.1


def test_a_seed_is_a_number_or_a_tensor_and_decides():
    x = torch.ones(4, 64, device=DEVICE)
    with kernels():
        first, same, other = (
            bias_dropout_residual(x, None, x, 0.5, seed) for seed in (7, _seed(7), 8)
        )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_what_is_not_finite_stays_where_it_is():
    x = torch.zeros(4, 16, device=DEVICE)
    x[0, 2], x[1, 3] = float("nan"), float("inf")
    with kernels():
        out = bias_dropout_residual(x, None, torch.zeros_like(x), 0.5, 1)
    kept = reference.kept(x, 32768, _seed(1))
    wanted = torch.where(kept, x, 0.0)  # twice what is not finite is itself
    torch.testing.assert_close(out, wanted, equal_nan=True)


def test_what_does_not_fit_is_refused():
    x = random(2, 8)
    with pytest.raises(InputError, match="residual"):
        bias_dropout_residual(x, None, random(8), 0.1, 0)
    with pytest.raises(InputError, match="bias"):
        bias_dropout_residual(x, random(1), x, 0.1, 0)
    with pytest.raises(InputError, match="share"):
        bias_dropout_residual(x, None, x, 1.5, 0)


def test_operators_are_what_torch_wants_of_them():
    from paceline.kernels.residual import kernel

    x, residual, bias = random(3, 8, seed=1), random(3, 8, seed=2), random(8, seed=3)
    torch.library.opcheck(kernel._residual.custom, (x, bias, residual, 0.5, _seed(1)))
    taken = x.detach(), bias.detach(), 0.5, _seed(1)
    torch.library.opcheck(kernel._residual_backward.custom, taken)


def test_it_compiles_as_one_graph():
    inputs = random(3, 8, seed=1), random(3, 8, seed=2), random(8, seed=3)

    def apply(x: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
        out = bias_dropout_residual(x, bias, residual, 0.5, _seed(4))
        return bias_dropout_residual(out, bias, residual, 0.0, 4)

    compiled = torch.compile(apply, fullgraph=True, backend="aot_eager")
    with kernels():
        results = [
            torch.autograd.grad(function(*inputs).square().sum(), inputs)
            for function in (compiled, apply)
        ]
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)
