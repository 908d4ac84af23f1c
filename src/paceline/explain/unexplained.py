"""Unexplained: lost time that no rule has a cause for, and what to record to find one.

Nothing is worse than "nothing found" of a device that idles for nine tenths of the step. So what
findings leave of a lost term is told as well, before them if it is more than the first of them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paceline.explain.finding import Finding
from paceline.explain.rules import RULES
from paceline.explain.subject import Subject
from paceline.explain.waterfall import terms_beside
from paceline.observe import caveats
from paceline.observe.tables.gaps import BETWEEN_KERNELS
from paceline.render.figures import time_text

MUCH = 0.1
"""Part of the step that a term is told from on."""
_LOST = (
    *("exposed_comm", "checkpoint_stall", "data_wait", "straggler_wait", "bubble", "host_gap"),
    *("idle", "unattributed"),
)
# Findings that gain so much of a term have said why it is there; the rest is what it costs anyway.
_ENOUGH = 0.5


class Unexplained(NamedTuple):
    """What is left of a lost term when every finding has had its part."""

    term: str
    seconds: float
    share: float
    """Of the step."""
    to_record: str
    """What would show the cause, in a sentence."""

    @property
    def clause(self) -> str:
        """For the head line."""
        return f"{self.share:.0%} of it is {self.term} that no rule explains"

    @property
    def sentence(self) -> str:
        """For people."""
        return (
            f"{time_text(self.seconds)} of a step ({self.share:.0%}) is {self.term}, and no "
            f"rule explains it. {self.to_record}"
        )


def unexplained(subject: Subject, found: Sequence[Finding]) -> list[Unexplained]:
    """Lost terms of a tenth of the step or more without a cause, the largest first.

    What the plan expected of a term is explained by it, and a pipeline's bubble by its schedule.
    """
    if subject.account is None:
        return []
    left = []
    for row in terms_beside(subject):
        if not row.term.startswith(_LOST):
            continue
        gains_s = sum(each.gain_s for each in found if _speaks_of(each, row.term))
        if gains_s >= _ENOUGH * row.measured_s:
            continue
        known_s = max(row.predicted_s or 0.0, _by_schedule_s(subject, row.term))
        seconds = row.measured_s - gains_s - known_s
        if seconds >= MUCH * subject.step_s:
            share = seconds / subject.step_s
            told = " ".join(_to_record(subject, row.term))
            left.append(Unexplained(row.term, seconds, share, told))
    return sorted(left, key=lambda each: -each.seconds)


def _speaks_of(found: Finding, term: str) -> bool:
    rule = RULES.get(found.name)
    # A device of an engine idles for the same reasons as one that trains.
    term = "host_gap" if term == "idle" else term
    return rule is not None and bool(rule.terms) and term.startswith(rule.terms)


def _by_schedule_s(subject: Subject, term: str) -> float:
    """The bubble of a pipeline that is filled and drained once a step."""
    if term != "bubble" or subject.job is None:
        return 0.0
    stages, number = subject.job.layout.pp, subject.job.accumulation
    return subject.step_s * (stages - 1) / (number + stages - 1)


def _to_record(subject: Subject, term: str) -> Iterator[str]:
    """What would show more."""
    if term == "idle":
        yield "An engine without requests idles too: record while requests wait."
    if term in ("host_gap", "idle"):
        yield from _of_idle_time(subject)
    elif term.startswith("exposed_comm"):
        yield from _of_exchanges(subject)
    elif term == "straggler_wait":
        yield (
            "Ranks are late in turn, or for no longer than a moment: record more steps, and look "
            "at the ranks one beside the other on the page (--html)."
        )
    elif term == "data_wait":
        yield "Other ranks' work hides it, or look at the loader's workers with py-spy."
    elif term == "unattributed":
        yield (
            "Neither an operator nor a kernel was recorded then: record the host too "
            "(ProfilerActivity.CPU), with record_function ranges around what the loop does."
        )
    else:
        yield "Look at one step on the page (--html)."


def _of_idle_time(subject: Subject) -> Iterator[str]:
    account = subject.account
    assert account is not None
    if account.caveat(caveats.GRAPH_KERNELS_MISSING):
        yield (
            "A part of it, or all, is kernels of graphs that were not recorded: record without "
            "graphs once, or with a newer CUPTI, before judging it."
        )
        return
    if account.caveat(caveats.NO_KERNELS):
        yield "The device's kernels were not recorded: record with ProfilerActivity.CUDA."
        return
    between = [name == BETWEEN_KERNELS for name in (*account.names, "")]
    queued_ns = account.gaps["duration_ns"][np.array(between)[account.gaps["name"]]].sum()
    if 2 * queued_ns > account.gaps["duration_ns"].sum() > 0:
        yield (
            "For most of it the next kernel had been launched: streams wait for each other, or "
            "launches are slow to arrive. Look at one step on the page (--html)."
        )
    elif not (account.gaps["line"] >= 0).any():
        yield "Record with_stack=True: lines of Python say what the host was doing."
    else:
        yield "Put record_function ranges around what the host does then, and record again."


def _of_exchanges(subject: Subject) -> Iterator[str]:
    account, traffic = subject.account, subject.traffic
    assert account is not None
    everything = np.ones(len(traffic.rows), bool)
    if not subject.all_recorded(everything):
        yield (
            "Record all ranks: one rank's trace can't tell waiting for a late rank from the link."
        )
    if len(traffic.rows) and not (traffic.rows["bytes"] > 0).any():
        yield "Record with record_shapes=True: bytes say what the link carries."
    if subject.job is not None and not subject.job.cluster.tiers:
        yield "Measure the links once with `paceline bench`, to hold these against."
    elif subject.job is None:
        yield "Hold the bus rate against the link's: `paceline bench collectives`."
