"""The order of samples (pure functions, property tests)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.errors import InputError
from paceline.train.data import rank_share, sample_ids


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**32), st.integers(0, 100))
def test_an_epoch_is_a_permutation(num_samples, seed, epoch):
    ids = sample_ids(seed, epoch * num_samples, num_samples, num_samples)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(num_samples))


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_any_part_of_the_order_is_computed_alone(num_samples, first, left, right):
    whole = sample_ids(7, first, left + right, num_samples)
    parts = [
        sample_ids(7, first, left, num_samples),
        sample_ids(7, first + left, right, num_samples),
    ]
    assert np.array_equal(whole, np.concatenate(parts))


def test_epochs_and_seeds_differ():
    orders = [sample_ids(seed, e * 500, 500, 500) for seed in range(3) for e in range(3)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            # Random orders agree in one place on average.
            assert (one == other).sum() < 10


def test_neighbours_are_mixed():
    ids = sample_ids(0, 0, 10_000, 10_000)
    assert (np.abs(np.diff(ids)) == 1).sum() < 10
    # The first tenth of an epoch comes from everywhere: about 10 from each hundredth.
    assert np.abs(np.bincount(ids[:1000] // 100, minlength=100) - 10).max() < 20


@pytest.mark.parametrize("num_bits", [14, 15])
def test_no_bit_of_the_place_shows_in_the_sample(num_bits):
    ids = sample_ids(0, 0, 2**num_bits, 2**num_bits)
    bits = np.arange(num_bits)[:, None]
    shows = np.corrcoef(ids >> bits & 1, np.arange(2**num_bits) >> bits & 1)[:num_bits, num_bits:]
    assert np.abs(shows).max() < 0.06


def test_a_huge_dataset_needs_no_table():
    ids = sample_ids(0, 10**12, 10_000, 10**12 + 1)
    assert len(np.unique(ids)) == 10_000
    assert ids.max() > 0.99e12


def test_the_order_never_changes():
    # A run that is resumed by a later version must read on where it was.
    assert sample_ids(0, 998, 6, 1000).tolist() == [306, 628, 220, 198, 169, 734]


@given(st.integers(1, 16), st.integers(1, 16))
def test_ranks_share_a_batch_without_overlap(num_ranks, share):
    ids = sample_ids(1, 0, num_ranks * share, 10_000)
    shares = [rank_share(ids, rank, num_ranks) for rank in range(num_ranks)]
    assert {len(part) for part in shares} == {share}
    assert np.array_equal(np.concatenate(shares), ids)


def test_a_batch_that_cannot_be_shared_is_refused():
    with pytest.raises(InputError, match="10 can't be split over 4 ranks"):
        rank_share(np.arange(10), 0, 4)
