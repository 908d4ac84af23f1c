"""Tokens to experts and back: kernels in the interpreter against fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import switch
from paceline.kernels.experts import Order, grouped_linear, permute, reference, unpermute
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
# The interpreter rounds to bf16 wrongly.
SIXTEEN_BITS = (torch.float16, torch.bfloat16) if DEVICE.type == "cuda" else (torch.float16,)


def _choices(tokens: int, copies: int, num_experts: int, seed: int = 0) -> Tensor:
    """Different experts for each token, as a router chooses them."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, num_experts, generator=generator)
    return scores.argsort(-1)[:, :copies].to(DEVICE)


@given(
    tokens=st.integers(0, 9),
    copies=st.integers(1, 3),
    more=st.integers(0, 4),
    width=st.integers(1, 70),
)
@settings(max_examples=8, deadline=None)
def test_there_and_back_is_the_reference(tokens, copies, more, width):
    ids = _choices(tokens, copies, copies + more)

    def function(x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        rows, _, order = permute(x, ids, copies + more)
        return rows, unpermute(rows.sin(), order, weights)

    check(function, [random(tokens, width), random(tokens, copies, seed=1)])


def test_rows_longer_than_a_block_and_strided():
    ids = _choices(3, 2, 4)

    def function(x: Tensor, weights: Tensor) -> Tensor:
        rows, _, order = permute(x[:, 7:], ids, 4)
        return unpermute(rows.sin(), order, weights.mT)

    check(function, [random(3, 5000), random(2, 3, seed=1)])


def test_rows_are_sorted_by_expert_and_then_by_token():
    x = torch.arange(4.0, device=DEVICE).unsqueeze(1)
    ids = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]], device=DEVICE)
    with kernels():
        rows, counts, order = permute(x, ids, 4)
    assert rows.flatten().tolist() == [0, 1, 3, 1, 2, 0, 2, 3]
    assert counts.tolist() == [3, 2, 3, 0]
    assert torch.equal(rows[order.rows], x.repeat_interleave(2, dim=0))


@given(
    counts=st.lists(st.integers(0, 80), min_size=1, max_size=4),
    n=st.integers(1, 20),
    k=st.integers(1, 20),
)
@settings(max_examples=8, deadline=None)
def test_grouped_linear_is_the_reference(counts, n, k):
    _check_groups(counts, 4 * n, 4 * k)


def test_several_tiles():
    _check_groups([0, 65, 0, 130, 7, 64, 0], 72, 68)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_16_bits_are_as_near_as_torchs(dtype):
    """On a GPU these are the tiles that matter: large, of TMA, on tensor cores."""
    scale, n, k = (30, 1536, 1024) if DEVICE.type == "cuda" else (1, 72, 40)
    counts = torch.tensor([0, 70, 3, 65], device=DEVICE) * scale
    rows, weights = random(int(counts.sum()), k).detach(), random(4, n, k, seed=1).detach()
    made = [each.to(dtype).requires_grad_() for each in (rows, weights * k**-0.5)]

    def values(inputs: list[Tensor]) -> list[Tensor]:
        out = grouped_linear(*inputs, counts)
        return [out.detach(), *torch.autograd.grad((out * out.detach()).sum(), inputs)]

    with kernels():
        ours = values(made)
    with switch.using("reference", DEVICE):
        theirs = values(made)
        expected = values([each.detach().double().requires_grad_() for each in made])
    for mine, torchs, right in zip(ours, theirs, expected, strict=True):
        assert mine.dtype == dtype
        assert relative_error(mine, right) <= 2 * relative_error(torchs, right)


def test_no_rows_at_all():
    _check_groups([0, 0], 8, 4)


def _check_groups(counts: list[int], n: int, k: int) -> None:
    rows, weights = random(sum(counts), k), random(len(counts), n, k, seed=1, scale=k**-0.5)
    given = torch.tensor(counts, device=DEVICE)
    check(lambda rows, weights: grouped_linear(rows, weights, given), [rows, weights])


def test_experts_do_not_see_each_others_rows_and_weights():
    counts = torch.tensor([3, 2], device=DEVICE)
    rows, weights = random(5, 4), random(2, 8, 4, seed=1)
    with torch.no_grad():
        rows[3:], weights[1] = float("nan"), float("inf")
    with kernels():
        out = grouped_linear(rows, weights, counts)
        grad = torch.ones_like(out)
        grad[3:] = float("nan")
        grads = torch.autograd.grad(out, (rows, weights), grad)
    assert out[:3].isfinite().all()
    assert out[3:].isnan().all()
    assert grads[0][:3].isfinite().all()
    assert grads[1][0].isfinite().all()


def test_rows_that_are_not_aligned_are_copied():
    counts = torch.tensor([2, 3], device=DEVICE)

    def function(rows: Tensor, weights: Tensor) -> Tensor:
        return grouped_linear(rows[:, 1:], weights.mT, counts)

    check(function, [random(5, 9), random(2, 8, 4, seed=1)])


def test_what_the_copy_engine_cannot_read_is_torchs(monkeypatch):
    from paceline.kernels.experts import operators

    monkeypatch.setattr(operators, "grouped_linear", None)
    _check_groups([2, 0, 3], 6, 5)


def test_operators_are_what_torch_wants_of_them():
    from paceline.kernels.experts import operators

    places = torch.tensor([2, 0, 1, 3], device=DEVICE)
    counts = torch.tensor([3, 1], device=DEVICE)
    rows, weights = random(4, 8), random(2, 12, 8, seed=1)
    check = torch.library.opcheck
    check(operators._spread.custom, (random(2, 8), places, 2))
    check(operators._collect.custom, (rows, places, random(2, 2), 2))
    check(operators._collect.custom, (rows.detach(), places, None, 2))
    backward = random(2, 8).detach(), rows.detach(), places, random(2, 2).detach()
    check(operators._collect_backward.custom, backward)
    check(operators._forward.custom, (rows, weights, counts))
    check(operators._rows_gradient.custom, (random(4, 12).detach(), weights.detach(), counts))
    check(operators._weights_gradient.custom, (random(4, 12).detach(), rows.detach(), counts))


def test_it_compiles_as_one_graph():
    ids = _choices(5, 2, 3)
    inputs = [random(5, 8), random(3, 16, 8, seed=1), random(5, 2, seed=2)]

    def function(x: Tensor, weights: Tensor, scores: Tensor) -> Tensor:
        rows, counts, order = permute(x, ids, 3)
        return unpermute(grouped_linear(rows, weights, counts), order, scores).sum()

    with kernels():
        expected = torch.autograd.grad(function(*inputs), inputs)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        found = torch.autograd.grad(compiled(*inputs), inputs)
    for mine, right in zip(found, expected, strict=True):
        assert torch.equal(mine, right)


def test_what_does_not_fit_is_refused():
    rows, weights, counts = torch.ones(3, 4), torch.ones(2, 6, 4), torch.tensor([1, 2])
    for arguments, said in (
        ((rows, weights[0], counts), "give"),
        ((rows, weights, counts[:1]), "one count"),
        ((rows.double(), weights, counts), "convert"),
    ):
        with pytest.raises(InputError, match=said):
            grouped_linear(*arguments)
    with pytest.raises(InputError, match="tokens, width"):
        permute(rows, torch.zeros(2, 2, dtype=torch.int64), 3)
    with pytest.raises(InputError, match="one row and one place"):
        unpermute(rows, Order(torch.arange(3), torch.arange(3)), torch.ones(2, 2))


def test_the_reference_sorts_many_experts():
    ids = _choices(3, 2, 40000)
    order, counts = reference.sort(ids, 40000)
    assert torch.equal(ids.flatten()[order.copies], ids.flatten().sort().values)
    assert torch.equal(order.rows[order.copies], torch.arange(6, device=DEVICE))
    assert counts.sum() == 6


def test_hopper_multiplies_with_its_own_instructions_and_reads_with_tma():
    for ptx in code_for_hopper("experts", "GROUPED", "GROUPED_WEIGHTS"):
        assert "wgmma.mma_async" in ptx
        assert "cp.async.bulk.tensor.2d.shared" in ptx
