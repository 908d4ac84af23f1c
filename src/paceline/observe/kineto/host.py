"""The host's side of a trace: operators and ranges, each with what surrounds it.

Events of a thread nest. What an outer one says (this is the optimizer, this is FSDP's all-gather)
holds for everything inside it. It is passed on here from each depth to the next, all events of a
depth at once.

Recomputed activations are seen by this: operators that record for autograd (they carry a sequence
number) inside a node of the backward pass. The backward of an attention that was computed from
plain matrix products is found by the same number, which a node of the graph shares with its
operator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe import terms as words
from paceline.observe.kineto.events import LAUNCH, OP, RANGE, Trace
from paceline.observe.kineto.nest import Nest, nest_events
from paceline.observe.terms import AXES, EXPOSED_COMM, TERM_ID

_Array = npt.NDArray[Any]
_Bools = npt.NDArray[np.bool_]

# A claim holds for everything within; the stronger one wins, then the outer one.
STRENGTH = {
    "data_wait": 4,
    "checkpoint_stall": 4,
    EXPOSED_COMM: 3,
    "recompute": 2,
    "optimizer": 2,
    "attention": 1,
}
_NODE = "autograd::engine::evaluate_function: "
NONE = -1
_STRENGTHS = np.array([*(STRENGTH.get(term, 0) for term in TERM_ID), 0])  # last: of NONE


@dataclass(frozen=True, eq=False)
class HostEvents:
    """The host's events by thread and start, each with its surroundings, as columns."""

    events: _Array
    """dtype `events.EVENT`; `end` is at the latest where the surrounding event ends."""
    nest: Nest
    claim: _Array
    """The term that the surroundings claim for each event, or NONE."""
    axis: _Array
    """Index into AXES of the communication in each event, or NONE."""
    in_backward: _Bools
    op: _Array
    """The innermost operator around each event, itself included, or NONE."""
    default_axis: int
    """The axis of collectives whose process group and surroundings say nothing, or NONE."""
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.events)

    def own_term(self) -> _Array:
        """Return the term of each event's own time, communication with its axis."""
        by_name = _each(self.names, lambda name: TERM_ID[words.op_term(name)])[self.events["name"]]
        by_name[self.events["kind"] != OP] = TERM_ID["host_gap"]
        term = np.where(self.claim == NONE, by_name, self.claim)
        return np.where(term == TERM_ID[EXPOSED_COMM], comm_terms(self.axis), term)


def comm_terms(axis: _Array) -> _Array:
    """Return the terms of exposed communication over axes, NONE among them."""
    ids = [*(TERM_ID[words.comm_term(axis)] for axis in AXES), TERM_ID[EXPOSED_COMM]]
    return np.array(ids)[axis]


def call_axes(trace: Trace) -> _Array:
    """Return the axis that each call's process group names, or NONE; the last is "not a call"."""
    groups = _each((*trace.names, ""), lambda name: _axis_id(words.axis_of_group(name)))
    return np.append(groups[trace.calls["group"]], NONE)


def nest_host_events(trace: Trace, events: _Array, axis: str | None) -> HostEvents:
    """Find what surrounds each event of the host.

    Args:
        trace: that they are of.
        events: operators, ranges and launches.
        axis: mesh axis of collectives that don't tell theirs.
    """
    events, found = nest_events(events)
    speaks = events["kind"] != LAUNCH
    flags = _Flags(trace.names, events, speaks)
    records = speaks & (events["sequence"] >= 0) & (events["forward_thread"] <= 0)
    in_backward = inherit_flags(found, flags.is_node)
    in_attention = _in_attention(found, events, flags, records)
    claim = _claims(found, events, flags, records & in_backward, in_attention)
    groups = call_axes(trace)[events["call"]]
    places = np.arange(len(events))
    op = inherit_values(found, np.where(events["kind"] == OP, places, NONE))
    default = _axis_id(axis)
    axes = _axes(found, flags, np.where(speaks, groups, NONE))
    axes[axes == NONE] = default
    return HostEvents(events, found, claim, axes, in_backward, op, default, trace.names)


class _Flags:
    """What the names of the events say, one value for each event."""

    def __init__(self, names: tuple[str, ...], events: _Array, speaks: _Bools) -> None:
        def flag(say: Callable[[str], bool]) -> _Bools:
            return _each(names, say).astype(bool)[events["name"]] & speaks

        def number(say: Callable[[str], int]) -> _Array:
            return np.where(speaks, _each(names, say)[events["name"]], NONE)

        self.is_node = flag(lambda name: name.startswith(_NODE))
        self.is_attention = flag(words.is_attention_op)
        self.is_comm = flag(words.is_comm_op)
        self.range_term = number(lambda name: TERM_ID.get(words.range_term(name) or "", NONE))
        self.hint = number(lambda name: _axis_id(words.axis_hint(name)))
        self.names_axis = flag(lambda name: name.startswith(words.COMM_RANGE))
        self.exchanges = flag(words.is_all_to_all)
        self.is_all_reduce = flag(lambda name: name == "c10d::allreduce_")
        self.is_range = events["kind"] == RANGE


def _in_attention(found: Nest, events: _Array, flags: _Flags, records: _Bools) -> _Bools:
    """Say which events are attention's: by their operator, or by the operator of their node."""
    forward = inherit_flags(found, flags.is_attention)
    number, order = _graph(events, records)
    known = flags.is_node & (events["forward_thread"] == 1) & (events["sequence"] >= 0)
    place = np.searchsorted(number, events["sequence"][known])
    matches = np.append(number, -1)[place] == events["sequence"][known]
    nodes = np.zeros(len(events), bool)
    nodes[known] = matches & np.append(forward[order], False)[place]
    # A node stands for itself, whatever it is evaluated in.
    value = np.where(flags.is_attention, 1, np.where(flags.is_node, nodes.astype(int), NONE))
    return inherit_values(found, value) == 1


def _graph(events: _Array, records: _Bools) -> tuple[_Array, _Array]:
    """Return the sequence numbers of the forward pass, and the operator that made each node.

    Numbers are counted per thread. Only those of the thread that runs the forward pass are kept,
    which the profiler calls thread 1. Of all operators with a node's number, the last to start is
    the one that made the node.
    """
    mine = np.flatnonzero(records)
    if not len(mine):
        return np.empty(0, np.int64), mine
    first = events["thread"][mine[np.argmin(events["start"][mine])]]
    mine = mine[events["thread"][mine] == first][::-1]
    number, last = np.unique(events["sequence"][mine], return_index=True)
    return number, mine[last]


def _claims(
    found: Nest, events: _Array, flags: _Flags, recomputes: _Bools, in_attention: _Bools
) -> _Array:
    own = np.full(len(events), NONE)
    speaks = events["kind"] != LAUNCH
    own[in_attention & speaks] = TERM_ID["attention"]
    own[recomputes] = TERM_ID["recompute"]
    own[flags.is_comm] = TERM_ID[EXPOSED_COMM]
    own = np.where(flags.is_range, flags.range_term, own)
    for level in found.levels[1:]:
        outer = own[found.parent[level]]
        own[level] = np.where(_STRENGTHS[own[level]] > _STRENGTHS[outer], own[level], outer)
    return own


def _axes(found: Nest, flags: _Flags, groups: _Array) -> _Array:
    """Return the axis of communication in each event.

    Named for sure by the process group or by a range of ours; else inferred from who started it.
    """
    sure = (groups != NONE) | flags.names_axis
    axis = np.where(groups != NONE, groups, flags.hint)
    fsdp, dp = AXES.index("fsdp"), AXES.index("dp")
    axis[flags.exchanges & ~sure] = NONE  # neither DDP nor FSDP started it, wherever it stands
    for level in found.levels[1:]:
        outer = found.parent[level]
        around = axis[outer]
        kept = np.where(axis[level] == NONE, around, axis[level])
        # FSDP2 all-reduces over replicas only (HSDP).
        kept = np.where(flags.is_all_reduce[level] & (around == fsdp), dp, kept)
        kept = np.where(flags.exchanges[level], NONE, kept)
        kept = np.where(sure[outer], around, kept)
        axis[level] = np.where(sure[level], axis[level], kept)
        sure[level] |= sure[outer]
    return axis


def inherit_values(found: Nest, own: _Array) -> _Array:
    """Give each event that has no value of its own that of what is around it."""
    own = own.copy()
    for level in found.levels[1:]:
        own[level] = np.where(own[level] == NONE, own[found.parent[level]], own[level])
    return own


def inherit_flags(found: Nest, flag: _Bools) -> _Bools:
    """Say which events, or something around them, have the flag."""
    flag = flag.copy()
    for level in found.levels[1:]:
        flag[level] |= flag[found.parent[level]]
    return flag


def _each(names: tuple[str, ...], say: Callable[[str], Any]) -> _Array:
    """Ask about each name once."""
    return np.array([say(name) for name in names], np.int64)


def _axis_id(axis: str | None) -> int:
    return AXES.index(axis) if axis in AXES else NONE
