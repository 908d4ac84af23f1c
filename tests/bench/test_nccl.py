"""Recommended settings of NCCL: pure, from tables made up here."""

import pytest

from paceline.bench.network.nccl import CANDIDATES, NcclTrial, recommend

OWN, TREE, RING = (), (("NCCL_ALGO", "Tree"),), (("NCCL_ALGO", "Ring"),)
SMALL, LARGE = ("all_reduce", 2**16), ("all_reduce", 2**28)


def trials(tree_small, spread=0.0):
    return [
        NcclTrial(OWN, *SMALL, 100e-6, spread),
        NcclTrial(OWN, *LARGE, 10e-3),
        NcclTrial(TREE, *SMALL, tree_small),
        NcclTrial(TREE, *LARGE, 12e-3),
        NcclTrial(RING, *SMALL, 1e-6),  # never measured at the other size
    ]


def test_what_a_step_sends_decides():
    many_small = recommend(trials(50e-6), {SMALL: 100, LARGE: 1})
    assert many_small.settings == TREE
    assert many_small.reason == ("NCCL_ALGO=Tree: 17 ms of collectives a step instead of 20 (-15%)")
    one_large = recommend(trials(50e-6), {SMALL: 1, LARGE: 10})
    assert one_large.settings == OWN
    assert "nothing measured is clearly better" in one_large.reason


def test_a_gain_within_the_noise_is_none():
    assert recommend(trials(98e-6), {SMALL: 1}).settings != TREE
    assert recommend(trials(50e-6, spread=0.6), {SMALL: 100, LARGE: 1}).settings == OWN


def test_without_its_own_choice_there_is_nothing_to_compare():
    with pytest.raises(ValueError, match="own choice was not measured"):
        recommend(trials(1e-6)[2:], {SMALL: 1, LARGE: 1})


def test_candidates_hold_nothing_that_may_spoil_data():
    assert CANDIDATES[0] == OWN
    assert not any("LL128" in value for settings in CANDIDATES for _, value in settings)
