"""Selecting the largest: equal to sorting everything, whatever the sample says."""

import math

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.select import largest as select
from paceline.kernels.select import positions
from tests.kernels import select_reference as reference

ANY = st.floats(width=32, allow_nan=True, allow_infinity=True)
FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, math.nan, math.inf, -math.inf])


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_what_is_selected_is_what_sorting_selects(data: st.DataObject):
    shape = data.draw(st.integers(1, 300))
    elements = data.draw(st.sampled_from([ANY, FEW]))
    values = torch.from_numpy(data.draw(npst.arrays(np.float32, shape, elements=elements)))
    k = data.draw(st.integers(1, shape))
    assert torch.equal(select.largest(values, k), reference.largest(values, k))


def _large(kind: str) -> Tensor:
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(1))
    if kind == "ties":
        values = values.mul(2).round()
    if kind == "non-finite":
        values[[5, 70_000, 299_999]] = torch.tensor([math.nan, math.inf, -math.inf])
    if kind == "all in one place":  # where the sample, of every fourth value, never looks
        values[1::4] *= 1000
    if kind == "only what is sampled":
        values[::4] *= 1000
    if kind == "zeros":
        values.zero_()
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    ["normal", "ties", "non-finite", "all in one place", "only what is sampled", "zeros"],
)
def test_of_many_values_a_sample_is_enough(kind: str, dtype: torch.dtype):
    values = _large(kind).to(dtype)
    for k in (1, 300, 3000, 80_000, 300_000):
        assert torch.equal(select.largest(values, k), reference.largest(values, k))


def test_a_good_sample_leaves_few_candidates(monkeypatch: pytest.MonkeyPatch):
    """Else it would be right and slow: the exact end sorts what the pass lets through."""
    seen = []
    exactly = select._exactly

    def watched(values: Tensor, where: Tensor, k: int) -> Tensor:
        seen.append(len(values))
        return exactly(values, where, k)

    monkeypatch.setattr(select, "_exactly", watched)
    select.largest(_large("normal"), 3000)
    assert 3000 <= seen[0] < 2 * 3000


@given(st.integers(1, 5000), st.data())
@settings(max_examples=40, deadline=None)
def test_positions_are_read_as_they_were_written(n: int, data: st.DataObject):
    k = data.draw(st.integers(1, n))
    stretch = data.draw(st.sampled_from([1, 300, 100_000]))
    seed = data.draw(st.integers(0, 99))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    where = order[:k].sort().values * stretch
    sizes = positions.position_layout(k, n * stretch)
    low = torch.empty(k * sizes.num_low_bytes, dtype=torch.uint8)
    high = torch.empty(sizes.num_high_bytes, dtype=torch.uint8)
    positions.write(where, sizes, low, high)
    assert torch.equal(positions.read(sizes, low, high), where)


def test_positions_take_the_bytes_that_are_promised():
    assert positions.position_layout(10_000, 1_000_000) == (
        10_000,
        1,
        math.ceil((10_000 + 3906) / 8),
    )
    assert positions.position_layout(100, 1_000_000) == (100, 2, math.ceil((100 + 15) / 8))
