"""Simulate: the predicted Timeline of a step, of every rank of one pipeline.

How it works: the schedule's list of actions is executed with the seconds of
`paceline.plan.price.step`, and each action becomes spans, one for each term; what happens once per
step (the last reductions, the optimizer, waiting for the slowest rank) follows the last action.
Waiting between actions is the bubble, or the transfer that the next action waited for.
Communication that is hidden lies on a stream of its own beside the computing.

The order of the terms within an action is not that of the kernels, whose times the planner adds up
by kind. `paceline.observe.accounting` of the result gives back the prediction's terms for the rank
with most to do, to the rounding of nanoseconds.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from paceline.config.layout import Layout
from paceline.config.schedule import Action
from paceline.observe.terms import TERMS
from paceline.observe.timeline import Span, Timeline
from paceline.plan.points import Array, Setting
from paceline.plan.price.core_contention import core_contention_of
from paceline.plan.price.parts import BLOCKING, COMPUTE, PartPass
from paceline.plan.price.pipelined import StagePasses, cost_of, with_transfers
from paceline.plan.price.step import NetworkParts, Simulated, StepTimes, unsplit_first
from paceline.plan.schedules.contention import shared_timeline
from paceline.plan.schedules.timing import Timed, schedule_end_s, timeline
from paceline.plan.stages import StageWork

# Without a pipeline these belong to its micro-batches: they are spread over the actions.
_PER_MICRO_BATCH = ("matmul", "other_kernels", "exposed_comm.fsdp")
_COMPUTE_STREAM, _COMM_STREAM = "device", "device comm"
_PASSES: dict[str, tuple[str, ...]] = {
    "F": ("forward",),
    "B": ("input_grad", "weight_grad"),
    "I": ("input_grad",),
    "W": ("weight_grad",),
}

Terms = Mapping[str, float]


class _Step(NamedTuple):
    """What the spans of all ranks are made from; seconds."""

    actions: dict[tuple[str, int], Terms]
    """By kind and stage: the terms of an action, without waiting."""
    rows: list[list[Timed]]
    """When each rank does what."""
    once: Terms
    """What follows the last action."""
    hop_s: float
    transfers_s: float
    """How much of a rank's waiting is for transfers."""
    hidden_s: float
    """Of communication beside each action."""
    hidden_term: str
    end_s: float


def predicted_timeline(setting: Setting, layout: Layout) -> Timeline:
    """The step of a concrete layout: one rank of each pipeline stage's, numbered by place in pp.

    Raises:
        InputError: the device has no known rate at the layout's precision.
    """
    one = Simulated.of(setting, layout)
    step = _step(setting, one)
    spans = [span for rank, row in enumerate(step.rows) for span in _spans(step, rank, row)]
    end_us = one.step_s * 1e6
    return Timeline.of(spans, [(rank, 0, 0.0, end_us) for rank in range(len(step.rows))])


def _step(setting: Setting, one: Simulated) -> _Step:
    points, schedule, network, stages, found = one
    num_batches = int(points.num_micro_batches[0])
    actions = _action_terms(stages, network, found)
    terms = {term: float(seconds[0]) for term, seconds in found.terms.items()}
    done = _done(found, actions)
    once = {term: terms[term] - done.get(term, 0.0) for term in terms}
    # From the first action to the last, if transfers took no time.
    alone_s = once.pop("bubble") + sum(done.values())
    hop_s = float(found.hop_s[0])
    if schedule is None:
        spread = {term: once.pop(term) / (2 * num_batches) for term in _PER_MICRO_BATCH}
        actions = {key: _added(own, spread) for key, own in actions.items()}
        rows = [_one_after_the_other(actions, num_batches)]
    else:
        passes, wire_s = with_transfers(setting.stack, points, found.passes, found.hop_s)
        cost, contention = (
            cost_of(passes, float(np.max(wire_s))),
            core_contention_of(setting, points),
        )
        rows = (
            timeline(schedule, cost)
            if contention is None
            else shared_timeline(schedule, cost, contention)
        )
        blocked = (passes.forward_s - found.passes.forward_s)[0, 0]
        if blocked > 0:
            waiting = {"exposed_comm.pp": float(blocked)}
            actions = {
                key: own if key[0] == "W" else _added(own, waiting) for key, own in actions.items()
            }
    num_actions = sum(timed.action.kind != "W" for timed in rows[0])
    hidden_term = "exposed_comm.dp" if points.fsdp[0] == 1 else "exposed_comm.fsdp"
    hidden_s = float(np.max(found.hidden_s)) / max(num_actions, 1)
    end_s = schedule_end_s(rows)
    transfers_s = 0.0 if schedule is None else end_s - alone_s
    once["exposed_comm.pp"] -= transfers_s
    return _Step(actions, rows, once, hop_s, transfers_s, hidden_s, hidden_term, end_s)


def _action_terms(
    stages: StageWork, network: NetworkParts, found: StepTimes
) -> dict[tuple[str, int], Terms]:
    num_stages = len(stages.has_embedding)
    terms: dict[str, StagePasses] = {
        term: unsplit_first(stages, StagePasses(*_term_passes(stages, network, term)))
        for term in (*COMPUTE, *BLOCKING)
    }
    terms["host_gap"] = found.gaps
    return {
        (kind, stage): {
            term: sum(float(getattr(passes, f"{name}_s")[stage, 0]) for name in _PASSES[kind])
            for term, passes in terms.items()
        }
        for kind in _PASSES
        for stage in range(num_stages)
    }


def _term_passes(stages: StageWork, network: NetworkParts, term: str) -> Iterator[Array]:
    """One term's seconds of each stage's three passes: (s, 1) each."""
    for name in ("forward", "input_grad", "weight_grad"):
        *blocks, embedding, head = (_term_s(getattr(part, name), term) for part in network.parts)
        total = stages.has_embedding * embedding + stages.has_head * head
        for layers, block in zip(stages.layers, blocks, strict=True):
            total = total + layers * block
        yield total


def _term_s(one: PartPass, term: str) -> float:
    return float(np.max(one.terms.get(term, np.zeros(1))))


def _done(found: StepTimes, actions: dict[tuple[str, int], Terms]) -> dict[str, float]:
    """Seconds of the busiest rank's actions by term."""
    total: dict[str, float] = {}
    for kind, spent in zip("FIW", found.ran.spent, strict=True):
        for stage, number in enumerate(spent[:, 0].tolist()):
            for term, seconds in actions[kind, stage].items():
                total[term] = total.get(term, 0.0) + seconds * number
    return total


def _added(one: Terms, other: Terms) -> Terms:
    return {
        term: one.get(term, 0.0) + other.get(term, 0.0)
        for term in TERMS
        if term in one or term in other
    }


def _one_after_the_other(actions: dict[tuple[str, int], Terms], num_batches: int) -> list[Timed]:
    row: list[Timed] = []
    at_s = 0.0
    for number in range(num_batches):
        for kind in ("F", "B"):
            end_s = at_s + sum(actions[kind, 0].values())
            row.append(Timed(Action(kind, 0, number), at_s, end_s))
            at_s = end_s
    return row


def _spans(step: _Step, rank: int, row: list[Timed]) -> Iterator[Span]:
    """The spans of one rank, in the order of time."""
    starts = np.array([timed.start_s for timed in row] + [step.end_s])
    ends = np.array([0.0] + [timed.end_s for timed in row])
    gaps = np.maximum(starts - ends, 0.0)
    sent = _transfers(gaps, step.hop_s, max(step.transfers_s - _blocked(step, row), 0.0))
    for number, (start_s, gap_s, sent_s) in enumerate(zip(starts, gaps, sent, strict=True)):
        yield _span("wait for a stage", "bubble", rank, start_s - gap_s, start_s - sent_s)
        yield _span("transfer", "exposed_comm.pp", rank, start_s - sent_s, start_s)
        if number < len(row):
            yield from _of_action(step, rank, row[number])
    yield from _in_a_row("step", step.once, rank, step.end_s)


def _transfers(gaps: Array, hop_s: float, total_s: float) -> Array:
    """How much of each gap is for transfers: a hop at most, unless there were more of them."""
    sent = np.minimum(gaps, hop_s)
    found, rest = float(sent.sum()), float((gaps - sent).sum())
    if found >= total_s:
        return sent * (total_s / found if found else 0.0)
    return sent + (gaps - sent) * (min((total_s - found) / rest, 1.0) if rest else 0.0)


def _blocked(step: _Step, row: list[Timed]) -> float:
    """Seconds of transfers inside the actions of a rank."""
    return sum(_terms_of(step, timed).get("exposed_comm.pp", 0.0) for timed in row)


def _terms_of(step: _Step, timed: Timed) -> Terms:
    """The terms of an action in the time that it really takes: less, where others of the machine
    wait meanwhile.
    """
    terms = step.actions[timed.action.kind, timed.action.stage]
    alone_s = sum(terms.values())
    stretch = (timed.end_s - timed.start_s) / alone_s if alone_s else 1.0
    return {term: seconds * stretch for term, seconds in terms.items()}


def _of_action(step: _Step, rank: int, timed: Timed) -> Iterator[Span]:
    action, start_s, terms = timed.action, timed.start_s, _terms_of(step, timed)
    yield from _in_a_row(str(action), terms, rank, start_s)
    compute_s = sum(terms.get(term, 0.0) for term in COMPUTE)
    hidden_s = 0.0 if action.kind == "W" else min(step.hidden_s, compute_s)
    yield _span(
        f"{action} hidden", step.hidden_term, rank, start_s, start_s + hidden_s, _COMM_STREAM
    )


def _in_a_row(name: str, terms: Terms, rank: int, start_s: float) -> Iterator[Span]:
    for term in TERMS:
        seconds = max(terms.get(term, 0.0), 0.0)
        if seconds:
            yield _span(name, term, rank, start_s, start_s + seconds)
            start_s += seconds


def _span(
    name: str, term: str, rank: int, start_s: float, end_s: float, stream: str = _COMPUTE_STREAM
) -> Span:
    return Span(name, term, rank, stream, start_s * 1e6, max(end_s - start_s, 0.0) * 1e6)
