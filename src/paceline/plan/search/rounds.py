"""Rounds: how often workers of local updates meet, how late and in what form, by predicted seconds.

What a round adds to a step falls with the steps between two. Both rare rounds and few bits may cost
loss, so the least of either is taken that leaves `KEPT` of the time to computing: a form before a
form of fewer bits, a fragment that is less late before one that is later. Where `every` is open, a
form has to do with the Job's default of it; the last form takes as many steps as it needs.

It chooses for the layout that was chosen, from the Cluster's links. Workers of several ranks send
their shards side by side, which the prediction knows (`plan.price.data_axes`).
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from paceline.config.comm import LocalUpdates
from paceline.config.job import JobOnCluster
from paceline.config.layout import Layout
from paceline.plan.comm import open_rounds
from paceline.plan.points import Setting
from paceline.plan.prediction import Prediction
from paceline.plan.price.step import predict
from paceline.plan.search.search import memory_limit

KEPT = 0.95
"""Share of the time of computing alone. Assumed."""
FORMS = ("none", "int8", "int4")
"""The paper of streaming DiLoCo saw no loss with floats of 4 bits
(https://arxiv.org/abs/2501.18512); ours are whole numbers with error feedback."""
LEAST_STEPS, MOST_STEPS = 10, 500
"""Between two rounds: with fewer, workers are hardly on their own; DiLoCo's paper
(https://arxiv.org/abs/2311.08105) tried up to 2000, and lost little up to 500."""
MOST_LATE = 5
"""Steps that a fragment may be on its way. Assumed."""
_NEVER = 10**9


class _Round(NamedTuple):
    """A form and an overlap, and the steps between rounds that they need."""

    local: LocalUpdates
    needed: int
    share: float
    """Of the time that computing has with as many steps between rounds as `local` says."""


def choose_rounds(job: JobOnCluster, layout: Layout) -> tuple[LocalUpdates, dict[str, str]]:
    """Choose what a Job leaves open of its local updates.

    Args:
        layout: of all workers, concrete.

    Returns:
        comm.local without "auto", and why each setting became what it is.
    """
    asked = job.comm.local
    tried: list[_Round] = []
    for one in _tried(job, layout):
        tried.append(one)
        if one.needed <= asked.round_steps:
            break
    else:
        tried.append(min(tried, key=lambda one: one.needed))
    best = tried[-1]
    why = (
        f"computing keeps {best.share:.1%} of a step's time with {best.local.compress} every "
        f"{best.local.every} steps"
    )
    if best.share < KEPT - 0.001:
        why += f", the most that these links leave it ({KEPT:.0%} is wanted)"
    return best.local, dict.fromkeys(open_rounds(asked), why)


def few_rounds(job: JobOnCluster, local: LocalUpdates) -> str | None:
    """A note where the outer momentum is that of long runs, and the run is short; else None."""
    rounds, default = job.train.steps // local.round_steps, LocalUpdates()
    is_default = local.outer_momentum == default.outer_momentum
    if local.method != "diloco" or not is_default or rounds >= 100:
        return None
    return (
        f"this run has {rounds} rounds: with as few, comm.local.outer_momentum=0.6 and "
        "comm.local.outer_lr=0.9 ended at a lower loss (benchmarks/local_updates.py)."
    )


def _tried(job: JobOnCluster, layout: Layout) -> Iterator[_Round]:
    """Forms and overlaps that fit in memory, those that may cost least loss first."""
    asked, limit = job.comm.local, memory_limit(job.cluster.device)
    forms = FORMS if asked.compress == "auto" else (asked.compress,)
    if layout.param_dtype == "fp64":
        forms = forms[:1]
    most_late = min(MOST_LATE, asked.round_steps - 1)
    late = range(most_late + 1) if asked.overlap_steps == "auto" else (asked.overlap_steps,)
    for form, steps in product(forms, late):
        local = asked.settled.replace(compress=form, overlap_steps=steps)
        found = _priced(job, layout, local.replace(every=1))
        if form == forms[0] or limit is None or found.peak_memory_bytes <= limit:
            alone_s = _priced(job, layout, local.replace(every=_NEVER)).step_s
            yield _round(job, local, alone_s, found.step_s - alone_s)


def _priced(job: JobOnCluster, layout: Layout, local: LocalUpdates) -> Prediction:
    comm = job.comm.replace(local=local)
    return predict(replace(Setting.of(job), comm=comm), layout)


def _round(job: JobOnCluster, local: LocalUpdates, alone_s: float, round_s: float) -> _Round:
    """How many steps rounds of so many seconds need, and what `local` is with them."""
    needed = math.ceil(round_s / (alone_s * (1 / KEPT - 1)))
    if job.comm.local.every == "auto":
        least = max(LEAST_STEPS, local.fragments, local.late_steps + 1)
        most = max(least, min(MOST_STEPS, job.train.steps))
        local = local.replace(every=min(most, max(least, needed)))
    return _Round(local, needed, alone_s / (alone_s + round_s / local.round_steps))
