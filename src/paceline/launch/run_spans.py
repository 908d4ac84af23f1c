"""Spans of a Run: what its devices did when, from the lines of its steps and from its events.

A step's time is split as rank 0 saw it (`observe.terms`): what waits for data, checkpoints and
other ranks is told apart, all the rest computes. Evaluations compute as well. Steps that were taken
back are lost work, and so is the one that was under way when a rank was lost. What a recovery
takes is a restart, whether in the same attempt or in the next one; an elastic run's is as
`observe.generations` reckons it. Devices that wait for ranks that are stopped or stuck hang. What
is left after a notice that machines go away is preempted.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import groupby, islice, pairwise

from paceline.config.job import Job
from paceline.launch.contract import Attempt
from paceline.launch.ledger import Span, microseconds
from paceline.launch.run_records import Line, RunRecords
from paceline.observe.generations import Generation, Generations
from paceline.observe.summary import number, typical
from paceline.observe.terms import EXPOSED_COMM

_WAITS = {
    "checkpoint_stall": "checkpoint_stall",
    "data_wait": "data_wait",
    EXPOSED_COMM: "exposed_comm",
    "straggler_wait": "exposed_comm",
}
"""Terms of a step, of an axis or of none, that are not computing."""
_CLOCKS_S = 1.0
"""By so much the clocks of a run's machines may differ."""
_HANGS = ("stopped", "stuck", "waiting_for_data", "wrong_collective")
"""Classes of losses that are found by nothing happening."""


def spans_of(records: RunRecords, attempts: Sequence[Attempt]) -> list[Span]:
    """What the devices of a Run did.

    Args:
        records: of the Run.
        attempts: that held the devices.
    """
    timeline, lines, found = _Timeline(), records.lines, records.found
    devices = _devices(records)
    for line in lines:
        timeline.add_step(line, devices(line))
    for event in records.named("taken_back"):
        num = devices({"time": event["ended"]})
        timeline.add("lost_work", event["began"], event["ended"], num)
    if found is not None:
        _add_generations(timeline, records.job, found)
    ends = [event["time"] for event in records.named("end")]
    notices = [event["time"] for event in records.named("notice")]
    has_trained = False
    for began, until in pairwise([*_starts(records), math.inf]):
        first, last = timeline.first_after(began), timeline.last_before(until)
        if first is None or last is None or first.begin_us >= microseconds(until):
            continue  # it never trained
        num = last.num_devices
        timeline.add("restart" if has_trained else "starting", began, first.begin_us / 1e6, num)
        has_trained = True
        for ended in (each for each in ends if began <= each < until):
            warned = next((each for each in notices if began <= each <= ended), ended)
            timeline.add("checkpoint_stall", last.end_us / 1e6, warned, num)
            timeline.add("preempted", last.end_us / 1e6, ended, num)
    step_s = typical(lines, "step_time_s") or 0.0
    for attempt in attempts:
        _add_silence(timeline, attempt, ends, notices, step_s)
    return timeline.spans


class _Timeline:
    """Spans that never overlap: what was added first stays."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        """In their order."""

    def add(
        self, kind: str, began: float, ended: float, num_devices: int, *, in_step: bool = False
    ) -> None:
        """What nothing is known of yet between two moments, Unix seconds."""
        self._add(kind, microseconds(began), microseconds(ended), num_devices, in_step=in_step)

    def add_step(self, line: Line, num_devices: int) -> None:
        """A step that was kept, and the evaluation after it."""
        ended, seconds = number(line.get("time")), number(line.get("step_time_s"))
        if ended is None or not seconds or seconds < 0:
            return
        waits = dict.fromkeys(("checkpoint_stall", "data_wait", "exposed_comm"), 0.0)
        for term, value in (line.get("terms") or {}).items():
            kind = _WAITS.get(term.partition(".")[0])
            if kind is not None and value is not None and value > 0:
                waits[kind] += value
        ended_us = microseconds(ended)
        at_us = ended_us - microseconds(seconds)
        stall_us, data_us, exposed_us = map(microseconds, waits.values())
        compute_us = max(0, ended_us - at_us - stall_us - data_us - exposed_us)
        for kind, length_us in (
            ("checkpoint_stall", stall_us),
            ("data_wait", data_us),
            ("compute", compute_us),
            ("exposed_comm", exposed_us),
        ):
            until_us = min(at_us + length_us, ended_us)
            self._add(kind, at_us, until_us, num_devices, in_step=True)
            at_us = until_us
        eval_s = max(0.0, number(line.get("eval_s")) or 0.0)
        self.add("compute", ended, ended + eval_s, num_devices)

    def first_after(self, moment: float) -> Span | None:
        """The first span that began at a moment or later, and is no wait for machines."""
        at = bisect_left(self.spans, microseconds(moment), key=_begin)
        return next(
            (each for each in islice(self.spans, at, None) if each.kind != "idle_held"), None
        )

    def last_before(self, moment: float) -> Span | None:
        """The last span that began before a moment."""
        at = bisect_left(self.spans, microseconds(moment), key=_begin)
        return self.spans[at - 1] if at else None

    def _add(
        self, kind: str, begin_us: int, end_us: int, num_devices: int, *, in_step: bool
    ) -> None:
        spans = self.spans
        if spans and begin_us < spans[-1].end_us:
            at = bisect_right(spans, begin_us, key=_begin)
        else:
            at = len(spans)
        if at:
            begin_us = max(begin_us, spans[at - 1].end_us)
        while begin_us < end_us:
            until_us = end_us if at == len(spans) else min(end_us, spans[at].begin_us)
            if begin_us < until_us:
                spans.insert(at, Span(kind, begin_us, until_us, num_devices, in_step))
                at += 1
            if at == len(spans):
                return
            begin_us = max(until_us, spans[at].end_us)
            at += 1


def _begin(span: Span) -> int:
    return span.begin_us


def _devices(records: RunRecords) -> Callable[[Line], int]:
    """How many devices a line's step had."""
    job, found = records.job, records.found
    if found is not None:
        by_number = {one.number: one for one in found.all}

        def of_generation(line: Line) -> int:
            one = by_number.get(line.get("generation", -1))
            if one is None:
                moment = number(line.get("time")) or 0.0
                before = [each for each in found.all if each.began_s <= moment]
                one = before[-1] if before else found.all[0]
            return one.num_ranks or _num_of_nodes(job, one)

        return of_generation
    starts = sorted((event["began"], event["num_devices"]) for event in records.named("start"))

    def of_start(line: Line) -> int:
        at = bisect_right(starts, (line.get("time") or math.inf, math.inf))
        return int(starts[at - 1][1]) if at else job.layout.num_ranks

    return of_start


# ---- starts, recoveries, ends --------------------------------------------------------------------


def _starts(records: RunRecords) -> list[float]:
    """Moments at which a run was started."""
    if records.found is not None:
        starts = groupby(records.found.all, key=lambda one: one.start)
        return [next(group).began_s for _, group in starts]
    told = [event["began"] for event in records.named("start")]
    first = [line["time"] for line in records.lines if number(line.get("time")) is not None][:1]
    return told or first  # earlier versions told of none


def _num_of_nodes(job: Job, one: Generation) -> int:
    return job.cluster.devices_per_node * max(1, len(one.nodes))


def _add_generations(timeline: _Timeline, job: Job, found: Generations) -> None:
    """Of an elastic run: its waits for nodes, its losses and its recoveries."""
    for before, one in pairwise([None, *found.all]):
        assert one is not None
        is_first = before is None or before.start != one.start
        num, left_s, began = _num_of_nodes(job, one), dict(one.seconds), one.began_s
        if is_first and one.steps is None:
            continue  # all of it is a start
        if is_first and "waiting" in left_s:
            began += left_s.pop("waiting")
            timeline.add("idle_held", one.began_s, began, num)
        is_hang = any(loss.kind in _HANGS for loss in one.losses)
        until = one.ended_s
        for phase, kind in (
            ("waiting", "idle_held"),
            ("decide", "restart"),
            ("notice", "hang" if is_hang else "restart"),
            ("recomputed", "hang" if is_hang else "lost_work"),
        ):
            seconds = left_s.get(phase, 0.0)
            timeline.add(kind, until - seconds, until, num)
            until -= seconds
        if not is_first:
            trains = until if one.steps is None else one.steps.began_s
            timeline.add("restart", began, trains, num)


def _add_silence(
    timeline: _Timeline,
    attempt: Attempt,
    ends: Sequence[float],
    notices: Sequence[float],
    step_s: float,
) -> None:
    """What an attempt still held after the last that its run told: the end of a run that was
    killed. Up to two steps had no line yet; longer than that nothing was done.

    Args:
        ends: moments at which starts of the run ended as they should.
        notices: moments at which it was told that machines go away.
        step_s: of a typical step.
    """
    if attempt.started is None:
        return
    ended = math.inf if attempt.ended is None else attempt.ended
    last = timeline.last_before(ended)
    if last is None or last.end_us <= microseconds(attempt.started):
        return
    known, num = last.end_us / 1e6, attempt.num_devices
    if any(attempt.started <= each <= ended and each >= known - _CLOCKS_S for each in ends):
        if any(attempt.started <= each <= known for each in notices):
            timeline.add("preempted", known, ended, num)
    elif attempt.ended is None:
        timeline.add("compute", known, known + 2 * step_s, last.num_devices)
    else:
        timeline.add("lost_work", known, min(ended, known + 2 * step_s), num)
        timeline.add("hang", known, ended, num)
