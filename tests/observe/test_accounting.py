"""The accounting of a step: interval arithmetic and priorities against a count of every nanosecond
(pure)."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.accounting import (
    accounting,
    accounting_ns,
    clip,
    complement,
    intersection,
    join,
    owners,
    union,
)
from paceline.observe.terms import TERM_ID, TERMS
from paceline.observe.timeline import Span, Timeline, TimelineBuilder

HORIZON = 40

edges = st.tuples(st.integers(0, HORIZON), st.integers(0, HORIZON)).map(sorted)
spans = st.lists(st.tuples(st.sampled_from(TERMS), st.integers(0, 4), edges), max_size=12)


def intervals(pairs):
    return np.array([a for a, _ in pairs], np.int64), np.array([b for _, b in pairs], np.int64)


def covered(pairs):
    return {instant for a, b in pairs for instant in range(a, b)}


def instants(found):
    pairs = list(zip(found.starts.tolist(), found.ends.tolist(), strict=True))
    assert all(a < b for a, b in pairs)
    assert all(b < c for (_, b), (c, _) in pairwise(pairs))  # disjoint, sorted
    return covered(pairs)


@given(st.lists(edges), st.lists(edges), edges)
def test_interval_arithmetic_is_that_of_sets(one, other, window):
    low, high = window
    inside = set(range(low, high))
    a, b = union(*intervals(one)), union(*intervals(other))
    assert instants(a) == covered(one)
    assert instants(join(a, b)) == covered(one) | covered(other)
    assert instants(intersection(a, b)) == covered(one) & covered(other)
    assert instants(clip(a, low, high)) == covered(one) & inside
    assert instants(complement(a, low, high)) == inside - covered(one)


@given(spans, edges)
def test_each_nanosecond_goes_to_the_first_in_line(drawn, window):
    build = TimelineBuilder()
    for term, layer, (start, end) in drawn:
        build.add("x", term, 0, "s", start, end, layer)
    expected: dict[str, int] = {}
    for instant in range(*window):
        here = [(layer, TERM_ID[term]) for term, layer, (a, b) in drawn if a <= instant < b]
        term = TERMS[min(here)[1]] if here else "unattributed"
        expected[term] = expected.get(term, 0) + 1
    found = accounting_ns(build.timeline([(0, 3, *window)]))[0][3]
    assert found == expected
    assert sum(found.values()) == window[1] - window[0]


def test_compute_hides_communication_and_that_hides_waiting():
    timeline = Timeline.of(
        [
            Span("mm", "matmul", 0, "compute", 0, 40),
            Span("reduce", "exposed_comm.dp", 0, "comm", 30, 30),
            Span("loader", "data_wait", 0, "host", 50, 30),
        ],
        [(0, 0, 0.0, 100.0)],
    )
    terms = {"matmul": 40e-6, "exposed_comm.dp": 20e-6, "data_wait": 20e-6, "unattributed": 20e-6}
    assert accounting(timeline) == {0: {0: pytest.approx(terms, rel=1e-12)}}


def test_ranks_and_steps_are_kept_apart():
    timeline = Timeline.of(
        [Span("mm", "matmul", 0, "c", 5, 10), Span("sm", "attention", 1, "c", 5, 10)],
        [(0, 0, 0, 10), (0, 1, 10, 20), (1, 0, 0, 10)],
    )
    assert accounting_ns(timeline) == {
        0: {
            0: {"matmul": 5000, "unattributed": 5000},
            1: {"matmul": 5000, "unattributed": 5000},
        },
        1: {0: {"attention": 5000, "unattributed": 5000}},
    }


@given(spans, st.lists(edges, max_size=4), edges)
def test_time_that_is_given_to_another_term_is_taken_from_the_named_ones(drawn, given_away, window):
    build = TimelineBuilder()
    for term, layer, (start, end) in drawn:
        build.add("x", term, 0, "s", start, end, layer)
    before = owners(build.timeline([(0, 0, *window)]), 0)
    of, to = [TERM_ID["exposed_comm"], TERM_ID["matmul"]], TERM_ID["straggler_wait"]
    after = before.give(union(*intervals(given_away)), of, to)
    for instant in range(HORIZON):
        (old,) = np.flatnonzero(before.within(instant, instant + 1))
        moves = instant in covered(given_away) and old in of
        assert np.flatnonzero(after.within(instant, instant + 1)) == [to if moves else old]
    assert after.within(*window).sum() == window[1] - window[0]
