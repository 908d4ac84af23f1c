"""Runs under kill -9 on changing ranks read what an undisturbed one reads.

`python -m benchmarks.kills` kills 200 times; here a few.
"""

import random

import pytest

from benchmarks.kills import BATCH, KINDS, differences, disturbed, steps_for, undisturbed

KILLS = 3


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_random_moments_it_reads_the_same_sequence(tmp_path, kind):
    expected = undisturbed(kind, tmp_path / "undisturbed", KILLS)
    assert sorted(expected) == list(range(steps_for(KILLS) * BATCH))
    # Seeded by nothing: other moments at each run of the test, the same result every time.
    found = disturbed(kind, tmp_path / "disturbed", KILLS, random.Random(), 1.0)
    assert found.killed.total() == KILLS
    assert differences(expected, found.read) == []
