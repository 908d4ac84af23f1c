"""The nesting of host events against a stack that walks through them (pure)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.kineto.nest import nest, own_time, within

HORIZON = 30
tangled = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, HORIZON), st.integers(1, HORIZON)), max_size=14
)


def columns(events):
    """Sort (thread, start, length) as `nest` asks for; return thread, start, end."""
    ordered = sorted(events, key=lambda event: (event[0], event[1], -event[2]))
    table = np.array(ordered, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 1] + table[:, 2]


def by_stack(threads, starts, ends):
    parents, kept, stack = [], [], []
    for index, (thread, start, end) in enumerate(zip(threads, starts, ends, strict=True)):
        while stack and (threads[stack[-1]] != thread or kept[stack[-1]] <= start):
            stack.pop()
        parents.append(stack[-1] if stack else -1)
        kept.append(min(end, kept[stack[-1]]) if stack else end)
        stack.append(index)
    return parents, kept


@given(tangled)
def test_events_stand_in_what_a_stack_says(events):
    threads, starts, ends = columns(events)
    found = nest(threads, starts, ends)
    parents, kept = by_stack(threads, starts, ends)
    assert found.parent.tolist() == parents
    assert found.end.tolist() == kept
    depth = [0] * len(parents)
    for index, parent in enumerate(parents):
        depth[index] = depth[parent] + 1 if parent >= 0 else 0
    assert found.depth.tolist() == depth
    assert [set(level.tolist()) for level in found.levels] == [
        {i for i, d in enumerate(depth) if d == level} for level in range(len(found.levels))
    ]


def test_a_staircase_of_overlaps_needs_the_walk():
    # Each of 40 events overlaps the next: no number of passes over all at once untangles them.
    events = [(0, 10 * n, 15) for n in range(40)]
    threads, starts, ends = columns(events)
    found = nest(threads, starts, ends)
    assert (found.parent.tolist(), found.end.tolist()) == by_stack(threads, starts, ends)


def test_an_event_without_length_stands_in_what_begins_with_it():
    found = nest(*(np.array(column) for column in ([0, 0, 0], [5, 5, 9], [9, 5, 9])))
    assert found.parent.tolist() == [-1, 0, -1]
    assert found.end.tolist() == [9, 5, 9]


@given(tangled, st.tuples(st.integers(0, HORIZON), st.integers(0, HORIZON)).map(sorted))
def test_the_innermost_event_owns_each_instant(events, window):
    threads, starts, ends = columns(events)
    found = nest(threads, starts, ends)
    at, owners = own_time(found, starts, threads == 1)
    edges = (np.array([edge]) for edge in window)
    pieces = list(zip(*within(at, owners, *edges), strict=True))
    owner = {t: int(o) for a, b, o in pieces for t in range(a, b)}
    assert sorted(owner) == list(range(*window))
    for instant, mine in owner.items():
        around = [i for i in np.flatnonzero(threads == 1) if starts[i] <= instant < found.end[i]]
        assert mine == max(around, key=lambda i: found.depth[i], default=-1)


@pytest.mark.parametrize("windows", [[(2, 4), (6, 8)], [(0, 3), (3, 3), (3, 9)]])
def test_windows_without_events_have_no_owner(windows):
    starts, ends = (np.array(edge) for edge in zip(*windows, strict=True))
    none = np.empty(0, np.int64)
    found = within(none, none, starts, ends)
    assert [list(column) for column in found] == [
        [a for a, b in windows if b > a],
        [b for a, b in windows if b > a],
        [-1 for a, b in windows if b > a],
    ]
