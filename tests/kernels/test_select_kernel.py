"""Collecting and adding up on a device: the reference's results, bit by bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels import switch
from paceline.kernels.select import first_at_least, kernel, largest, reference, scatter_add_
from tests.kernels.agreement import DEVICE, kernels, with_kernels

pytestmark = with_kernels
BLOCK = kernel.COUNT.rule(0).blocks["BLOCK"]
lengths = st.one_of(
    st.integers(0, 40), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 16])
)


def _values(n: int, seed: int = 0) -> Tensor:
    values = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    if n > 5:
        values[[1, 3, 5]] = torch.tensor([math.nan, -math.inf, 1.0])
    return values.to(DEVICE)


@given(n=lengths, threshold=st.sampled_from([0.0, 0.5, 1.0, 2.5, 1e9]))
@settings(max_examples=8, deadline=None)
def test_what_reaches_a_threshold_is_found(n, threshold):
    values = _values(n)
    with kernels():
        found = kernel.at_least(values, threshold)
    assert torch.equal(found, reference.at_least(values, threshold))


@pytest.mark.parametrize("most", [0, 1, 300, BLOCK + 700])
def test_there_may_be_room_for_fewer_or_more(most):
    values, threshold = _values(2 * BLOCK + 77), torch.full((), 1.0, device=DEVICE)
    with kernels():
        ours = first_at_least(values, threshold, most)
    with switch.using("reference", DEVICE):
        theirs = first_at_least(values, threshold, most)
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0, equal_nan=True)


def test_the_largest_are_found_with_it(monkeypatch):
    monkeypatch.setattr(largest, "_SAMPLE", 256)
    values = _values(5000)
    for k in (1, 40, 700):
        with kernels():
            where = largest.largest(values, k)
        assert torch.equal(where, reference.largest(values, k))


def _sent(n: int, ranks: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(n, generator=generator)[:k].sort().values for _ in range(ranks)]
    positions = torch.stack(rows) if rows else torch.empty(0, k, dtype=torch.int64)
    return positions.to(DEVICE), torch.randn(ranks, k, generator=generator).to(DEVICE)


@given(
    size=st.sampled_from([(1, 1), (7, 3), (300, 300), (5000, 40), (9000, 500), (8192, 0)]),
    ranks=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, deadline=None)
def test_what_ranks_sent_is_added_in_their_order(size, ranks, seed):
    n, k = size
    positions, sent = _sent(n, ranks, k, seed)
    ours = torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    theirs = ours.clone()
    with kernels():
        scatter_add_(ours, positions, sent)
    reference.scatter_add_(theirs, positions, sent)
    assert torch.equal(ours, theirs)


def test_sixteen_bits_are_added_to_thirty_two():
    positions, sent = _sent(500, 2, 60, 1)
    ours, theirs = torch.zeros(500, device=DEVICE), torch.zeros(500, device=DEVICE)
    with kernels():
        scatter_add_(ours, positions, sent.bfloat16())
    reference.scatter_add_(theirs, positions, sent.bfloat16())
    assert torch.equal(ours, theirs)


def test_operators_are_what_torch_wants_of_them():
    threshold = torch.full((), 1.0, device=DEVICE)
    torch.library.opcheck(kernel.first_at_least.custom, (_values(50)[6:].clone(), threshold, 9))
    torch.library.opcheck(
        kernel.scatter_add_.custom, (_values(50)[6:].clone(), *_sent(44, 2, 5, 1))
    )
