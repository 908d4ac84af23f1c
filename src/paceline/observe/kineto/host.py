"""The host's side of a trace: operators and ranges, each with what surrounds it.

Events of a thread nest. What an outer one says (this is the optimizer, this is FSDP's all-gather)
holds for everything inside it, and is passed on here in one walk through the events.

Recomputed activations are seen by this: operators that record for autograd (they carry a sequence
number) inside a node of the backward pass. The backward of an attention that was computed from
plain matrix products is found by the same number, which a node of the graph shares with its
operator.
"""

from dataclasses import dataclass, field
from typing import Any

from paceline.observe import terms as words
from paceline.observe.terms import EXPOSED_COMM

Thread = tuple[Any, Any]  # (pid, tid)

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


@dataclass(frozen=True, eq=False, slots=True)
class Event:
    """One complete event of the trace, times in ns since the epoch."""

    name: str
    kind: str
    """"op", "range", "launch" on the host; "kernel", "copy" on a device."""
    thread: Thread
    start: int
    end: int
    args: dict[str, Any]


@dataclass(eq=False, slots=True)
class Scope:
    """What surrounds a host event, itself included."""

    parent: int
    """Index of the event around it, or -1."""
    end: int
    """Where the event ends, at the latest where its parent does."""
    claim: str | None = None
    """A key of STRENGTH: the term that all within belongs to."""
    axis: str | None = None
    is_axis_sure: bool = False
    """Whether the axis was named by the process group or by a range of ours, not inferred."""
    in_backward: bool = False
    in_attention: bool = False


@dataclass(frozen=True, eq=False)
class Host:
    """The host's events in order of their start, each with its surroundings."""

    events: list[Event]
    scopes: list[Scope]
    axis: str | None
    """The axis of collectives whose process group and surroundings say nothing."""


@dataclass(frozen=True, eq=False)
class _Graph:
    """Which nodes of the autograd graph belong to attention, by sequence number.

    Numbers are counted per thread. Only those of the thread that runs the forward pass are kept,
    which the profiler calls thread 1.
    """

    thread: Thread | None
    is_attention: dict[int, bool] = field(default_factory=dict)


def nest(events: list[Event], axis: str | None) -> Host:
    """Find what surrounds each event.

    Args:
        events: of the host, in order of start, outer before inner.
        axis: mesh axis of collectives that don't tell theirs.
    """
    graph = _Graph(next((event.thread for event in events if _records(event)), None))
    scopes: list[Scope] = []
    open_on: dict[Thread, list[int]] = {}
    for index, event in enumerate(events):
        stack = open_on.setdefault(event.thread, [])
        while stack and scopes[stack[-1]].end <= event.start:
            stack.pop()
        parent = stack[-1] if stack else -1
        scope = _inherit(event, parent, scopes[parent] if stack else None)
        if event.kind != "launch":
            _place_in_graph(scope, event, graph)
            _claim(scope, event)
            _name_axis(scope, event)
        scopes.append(scope)
        stack.append(index)
    return Host(events, scopes, axis)


def own_term(event: Event, scope: Scope) -> str:
    """Return the term of a host event's own time; communication without its axis."""
    if scope.claim:
        return scope.claim
    return words.op_term(event.name) if event.kind == "op" else "host_gap"


def _inherit(event: Event, parent: int, outer: Scope | None) -> Scope:
    if outer is None:
        return Scope(parent, event.end)
    return Scope(
        parent,
        min(event.end, outer.end),  # rounding lets some children outlive their parents by a ns
        outer.claim,
        outer.axis,
        outer.is_axis_sure,
        outer.in_backward,
        outer.in_attention,
    )


def _records(event: Event) -> bool:
    """Say whether an operator records for autograd: nodes name their forward thread as well."""
    return "Sequence number" in event.args and not event.args.get("Fwd thread id")


def _place_in_graph(scope: Scope, event: Event, graph: _Graph) -> None:
    if event.name.startswith(_NODE):
        scope.in_backward = True
        known = event.args.get("Fwd thread id") == 1
        number = event.args.get("Sequence number", -1)
        scope.in_attention = known and graph.is_attention.get(number, False)
    elif words.is_attention_op(event.name):
        scope.in_attention = True
    if event.thread == graph.thread and _records(event):
        # Of all operators with a node's number, the last to start is the one that made the node.
        graph.is_attention[event.args["Sequence number"]] = scope.in_attention


def _claim(scope: Scope, event: Event) -> None:
    own = None
    if event.kind == "range":
        own = words.range_term(event.name)
    elif words.is_comm_op(event.name):
        own = EXPOSED_COMM
    elif scope.in_backward and _records(event):
        own = "recompute"
    elif scope.in_attention:
        own = "attention"
    if own and STRENGTH[own] > (STRENGTH[scope.claim] if scope.claim else 0):
        scope.claim = own


def _name_axis(scope: Scope, event: Event) -> None:
    group = words.axis_of_group(str(event.args.get("Process Group Description", "")))
    hint = words.axis_hint(event.name)
    if group:
        scope.axis, scope.is_axis_sure = group, True
    elif event.name.startswith(words.COMM_RANGE):
        scope.axis, scope.is_axis_sure = hint, True
    elif scope.is_axis_sure:
        return
    elif words.is_all_to_all(event.name):
        scope.axis = None  # neither DDP nor FSDP started it, wherever it stands
    elif scope.axis == "fsdp" and event.name == "c10d::allreduce_":
        scope.axis = "dp"  # FSDP2 all-reduces over replicas only (HSDP)
    else:
        scope.axis = hint or scope.axis
