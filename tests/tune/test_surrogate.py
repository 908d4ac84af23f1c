"""What is expected of Jobs, and what to try next: pure."""

import math

import numpy as np
import pytest

from paceline.tune.surrogate import Observation, Posterior, Surrogate, most_promising
from paceline.tune.trial import Candidate
from tests.tune.jobs import job

BAD, SOME, OTHER = job(), job(bucket_mib=0.2), job(dp=1, tp=2)


def candidate(one, predicted_s: float, **more) -> Candidate:
    return Candidate(one, "a test", predicted_s, 1.0, **more)


def test_a_gain_is_what_is_saved_on_average():
    draws = np.exp(np.random.default_rng(0).normal(math.log(1.1), 0.2, 1_000_000))
    wanted = np.maximum(0, 1 - draws).mean()
    assert Posterior(math.log(1.1), 0.2).gain(1.0) == pytest.approx(wanted, rel=0.01)
    assert Posterior(math.log(0.8), 0.0).gain(1.0) == pytest.approx(0.2)
    assert Posterior(math.log(1.2), 0.0).gain(1.0) == 0.0


def test_a_trial_corrects_what_is_near_to_it_and_little_of_what_is_far():
    seen = [
        Observation(BAD, 1.0, 1.0),
        Observation(job(dp=1, pp=2), 1.0, 1.0),
        Observation(SOME, 1.0, 1.5),
    ]
    expectation = Surrogate(seen)
    near = expectation.of(candidate(job(bucket_mib=0.21), 1.0))
    far = expectation.of(candidate(OTHER, 1.0))
    assert near.seconds > 1.2 > 1.1 > far.seconds
    assert near.deviation < far.deviation


def test_a_machine_that_is_slower_for_all_doesnt_make_anything_promise_more():
    seen = [Observation(BAD, 1.0, 2.0), Observation(OTHER, 1.5, 3.0)]
    other = Surrogate(seen).of(candidate(job(dp=1, pp=2), 1.0))
    assert other.seconds == pytest.approx(2.0, rel=0.01)


def test_beside_the_first_something_different_is_tried():
    """Two neighbours promise much and the same; the third differs and promises less."""
    twins = [candidate(job(bucket_mib=mib), 0.7) for mib in (4.0, 4.1)]
    other = candidate(OTHER, 0.75)
    chosen = most_promising([*twins, other], [Observation(BAD, 1.0, 1.0)], 1.0, 2, 0.01)
    assert [one.job for one in chosen] == [twins[0].job, other.job]


def test_what_promises_too_little_is_not_tried():
    seen = [Observation(BAD, 1.0, 1.0), Observation(OTHER, 1.0, 1.0), Observation(SOME, 1.0, 1.0)]
    hopeless = candidate(job(dp=1, pp=2), 5.0)
    assert most_promising([hopeless], seen, 1.0, 3, 0.01) == []


def test_a_finding_is_believed_as_it_says():
    found = candidate(SOME, 1.0, known=(math.log(0.5), 0.03))
    assert Surrogate([Observation(BAD, 1.0, 1.0)]).of(found).seconds == pytest.approx(0.5)
