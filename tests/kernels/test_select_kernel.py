"""Selecting on a device: the reference's results, bit by bit."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels import launch
from paceline.kernels.launch import Launch, MeasuredLaunch
from paceline.kernels.select import kernel, largest
from tests.kernels import select_reference as reference
from tests.kernels.agreement import DEVICE, kernels, with_kernels

pytestmark = with_kernels
BLOCK = kernel.COLLECT.rule(0).blocks["BLOCK"]
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


def test_a_table_may_have_other_blocks(monkeypatch):
    """Both passes have the same ones, also where each was tuned by itself."""
    tuned = {
        "select.count": MeasuredLaunch(Launch({}, 8), 0, 0),
        "select.collect": MeasuredLaunch(Launch({"BLOCK": 64}), 0, 0),
    }
    monkeypatch.setattr(launch, "measured", lambda device, name, dtype, size: tuned[name])
    values = _values(1000)
    with kernels():
        found = kernel.at_least(values, 0.5)
    assert torch.equal(found, reference.at_least(values, 0.5))


def test_the_largest_are_found_with_it(monkeypatch):
    monkeypatch.setattr(largest, "_SAMPLE", 256)
    values = _values(5000)
    for k in (1, 40, 700):
        with kernels():
            where = largest.largest(values, k)
        assert torch.equal(where, reference.largest(values, k))
