"""The accounting of a step: interval arithmetic and priorities against a count of every nanosecond
(pure), then real traces of A100s and an H800 against HolisticTraceAnalysis's figures (files)."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.errors import InputError
from paceline.observe.accounting import (
    accounting,
    accounting_ns,
    clip,
    complement,
    device_breakdown,
    join,
    union,
)
from paceline.observe.terms import TERM_ID, TERMS
from paceline.observe.timeline import COMM, PROCESSOR, Builder, Span, Timeline

TRACES = Path(__file__).parents[2] / ".." / "shared" / "data" / "traces"
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
    assert found.total_ns == len(covered(pairs))
    return covered(pairs)


@given(st.lists(edges), st.lists(edges), edges)
def test_interval_arithmetic_is_that_of_sets(one, other, window):
    low, high = window
    inside = set(range(low, high))
    a, b = union(*intervals(one)), union(*intervals(other))
    assert instants(a) == covered(one)
    assert instants(join(a, b)) == covered(one) | covered(other)
    assert instants(clip(a, low, high)) == covered(one) & inside
    assert instants(complement(a, low, high)) == inside - covered(one)


@given(spans, edges)
def test_each_nanosecond_goes_to_the_first_in_line(drawn, window):
    build = Builder()
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


def test_a_rank_without_a_device_has_no_device_breakdown():
    timeline = Timeline.of([Span("mm", "matmul", 0, "main", 0, 1)], [])
    with pytest.raises(InputError, match="rank 0 has no device spans"):
        device_breakdown(timeline, 0)


# --- real traces --------------------------------------------------------------------------------


def trace(name):
    path = TRACES / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not in ../shared/data/traces")
    return Timeline.from_kineto(path)


def to_whole_microseconds(timeline):
    """Shrink spans inwards, as HolisticTraceAnalysis does with traces that have nanoseconds."""
    spans = timeline.spans.copy()
    ends = (spans["start_ns"] + spans["duration_ns"]) // 1000 * 1000
    spans["start_ns"] = -(-spans["start_ns"] // 1000) * 1000
    spans["duration_ns"] = np.maximum(ends - spans["start_ns"], 0)
    return Timeline(spans, timeline.steps, timeline.names, timeline.streams)


@pytest.mark.parametrize(
    ("name", "rank", "shares"),
    [
        # Figures of HolisticTraceAnalysis's temporal breakdown on the same files.
        ("a100_8ranks_rank3", 3, (61.2, 22.6, 16.2)),
        ("a100_2ranks_rank0", 0, (17.3, 5.0, 77.8)),
        ("a100_128ranks_rank0", 0, (17.7, 28.7, 53.6)),
    ],
)
def test_the_split_of_a_device_is_that_of_holistic_trace_analysis(name, rank, shares):
    timeline = to_whole_microseconds(trace(name))
    found = device_breakdown(timeline, rank)
    assert [100 * found[k] for k in ("compute", "non_compute", "idle")] == pytest.approx(
        shares, abs=0.1
    )


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("a100_128ranks_rank1", [551, 552]),
        ("a100_2ranks_rank0", [4, 5, 6]),
        ("a100_alexnet", [0]),
        ("h800_dualpipe_pair", [1]),
    ],
)
def test_the_terms_of_real_steps_sum_to_the_nanosecond(name, steps):
    timeline = trace(name)
    (rank,) = timeline.ranks
    account = accounting_ns(timeline)[rank]
    assert sorted(account) == steps
    for _, step, start, end in timeline.steps.tolist():
        assert sum(account[step].values()) == end - start > 0
        assert "unattributed" not in account[step]


def test_the_dualpipe_pair_is_busy_and_its_exchange_hidden():
    account = accounting(trace("h800_dualpipe_pair"))[0][1]
    whole = sum(account.values())
    assert account["matmul"] > 0.5 * whole
    assert account["attention"] > 0.1 * whole
    assert account["exposed_comm"] < 0.05 * whole  # 112 ms of exchange, 4 ms of it exposed


def test_collectives_of_ddp_are_found_by_the_operator_that_started_them():
    # This NCCL names every kernel SendRecv: only the launching operator tells them apart.
    timeline = trace("a100_128ranks_rank0")
    reduced = timeline.spans[timeline.spans["term"] == TERM_ID["exposed_comm.dp"]]
    assert len(reduced) > 0
    assert set(reduced["layer"]) == {COMM}
    assert (timeline.spans["layer"] == PROCESSOR).sum() > 1000
