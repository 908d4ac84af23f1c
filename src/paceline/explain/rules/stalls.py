"""Rules about what steps wait for besides other ranks: data, disks, the interpreter."""

from math import ceil
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.config.job import Job
from paceline.explain.finding import Evidence, Finding
from paceline.explain.profiled_steps import WAITING
from paceline.explain.subject import Subject
from paceline.observe.summary import number
from paceline.render.figures import time_text

Array = npt.NDArray[Any]

# Evaluations may take this part of the time before it is worth a word.
_FAIR_EVALUATION = 0.01
_GC_RANGE = "paceline.gc"


def loader_bound(subject: Subject) -> Finding | None:
    """Ranks wait for their next batch: what is left of the wait after other ranks' work hid it."""
    clocked_s = subject.mean_s("data_wait")
    wait_s, gain_s, where = clocked_s, clocked_s, ""
    evidence = []
    if subject.account is not None:
        waits = subject.measured.term_s("data_wait")
        by_rank = waits.mean(axis=0)
        worst = int(by_rank.argmax())
        seen_s = float(by_rank[worst])
        share = subject.measured.gain_s(waits) / seen_s if seen_s else 0.0
        wait_s = max(wait_s, seen_s)
        gain_s = wait_s * share
        if len(by_rank) > 1 and seen_s > 2 * float(by_rank.min()):
            where = f" on rank {subject.measured.ranks[worst]}"
        if seen_s:
            evidence = [
                Evidence(
                    "host",
                    f"In profiled steps the loop waits {time_text(seen_s)} in its "
                    f"loader{where}, {seen_s / subject.measured.step_s:.0%} of the step.",
                ),
                *_beside(subject, by_rank, worst),
            ]
    if clocked_s:
        evidence.append(
            Evidence(
                "clock",
                f"By the run's own clock it is {time_text(clocked_s)} in the mean of "
                f"{len(subject.steady)} steps on rank 0.",
            )
        )
    return Finding.of(
        subject,
        f"A step waits {time_text(wait_s)} for its data{where}.",
        gain_s,
        evidence,
        advice="Prepare batches ahead: more loader workers, tokenise and decode once before the "
        "run, read from a faster disk.",
        basis="measured",
        of_s=subject.mean_step_s,
    )


def _beside(subject: Subject, by_rank: Array, worst: int) -> list[Evidence]:
    """What others say of a wait for data: the device had nothing to do, other ranks waited."""
    assert subject.account is not None
    told = []
    if subject.account.is_device:
        told.append(Evidence("device", "Nothing runs on the device meanwhile."))
    late_s = subject.measured.term_s(*WAITING).mean(axis=0)
    others_s = float(np.delete(late_s, worst).max(initial=0.0))
    if others_s > float(late_s[worst]) and others_s > float(by_rank[worst]) / 2:
        rank = subject.measured.ranks[worst]
        told.append(
            Evidence(
                "ranks",
                f"The other ranks wait {time_text(others_s)} of a step, rank {rank} "
                f"{time_text(float(late_s[worst]))}.",
            )
        )
    return told


def checkpoint_stall(subject: Subject) -> Finding | None:
    """Steps wait until the state has been copied for a checkpoint; on cores that are all at work
    they lose what writing it takes of them, too."""
    stall_s = subject.mean_s("checkpoint_stall")
    taken_s = subject.background_s("checkpoint_cpu_s") if subject.cores_are_taken else 0.0
    lost_s = stall_s + taken_s
    stalls = [
        number((line.get("terms") or {}).get("checkpoint_stall")) or 0.0 for line in subject.steady
    ]
    job = subject.job
    every = job.checkpoint.every if job else 0
    fewer = 0 if not every else every * ceil(max(1.0, lost_s / subject.mean_step_s / 0.002))
    fewer = _within_run(job, every, fewer)
    # What is left when there are fewer.
    left = every / fewer if fewer else 1.0
    evidence = [Evidence("clock", f"The longest stall took {time_text(max(stalls, default=0.0))}.")]
    if every:
        evidence.append(Evidence("settings", f"A checkpoint is due every {every} steps."))
    if taken_s:
        sentence = f"Writing them takes {time_text(taken_s)} of a step from its core."
        evidence.append(Evidence("machine", sentence))
    return Finding.of(
        subject,
        f"Checkpoints hold up a step by {time_text(stall_s)} on average.",
        lost_s * (1 - left) if fewer > every else lost_s,
        evidence,
        changes=(f"checkpoint.every={fewer}",) if fewer > every else (),
        advice="Keep checkpoints less often, or on a disk that takes them faster.",
        basis="measured",
        of_s=subject.mean_step_s,
    )


def garbage_collection(subject: Subject) -> Finding | None:
    """Python's garbage collector stops a rank, and the others wait for it."""
    mean_s = subject.mean_s("gc_s")
    gain_s, evidence = mean_s, []
    if mean_s:
        sentence = f"Rank 0 spends {time_text(mean_s)} of a step in it, by its own clock."
        evidence.append(Evidence("clock", sentence))
    if subject.account is not None:
        gaps = subject.account.gaps
        paused = gaps[[_GC_RANGE in subject.account.names[name] for name in gaps["name"]]]
        if len(paused):
            gain_s = max(mean_s, subject.measured.gain_s(subject.measured.sum_s(paused)))
            sentence = f"{len(paused)} pauses are in the profiled steps; others wait meanwhile."
            evidence.append(Evidence("host", sentence))
    return Finding.of(
        subject,
        f"Python's garbage collector stops a step for {time_text(gain_s)} on average.",
        gain_s,
        evidence,
        advice="Find what makes so many objects, or switch it off in the loop (gc.freeze() after "
        "the set-up, gc.disable(), and gc.collect() on all ranks every few hundred steps).",
        basis="measured",
        of_s=subject.mean_step_s,
    )


def evaluation_stall(subject: Subject) -> Finding | None:
    """The run evaluates so often that it takes a considerable part of the time."""
    job = subject.job
    spent_s = sum(number(line.get("eval_s")) or 0.0 for line in subject.steady)
    every = job.train.eval_every if job else 0
    if job is None or not spent_s or not every:
        return None
    mean_s = spent_s / len(subject.steady)
    share = min(1.0, mean_s / subject.mean_step_s)
    fewer = _within_run(job, every, every * max(1, ceil(share / _FAIR_EVALUATION)))
    if fewer <= every:
        return None
    return Finding.of(
        subject,
        f"Evaluations take {share:.1%} of the time, one every {every} steps.",
        mean_s * (1 - every / fewer),
        [
            Evidence(
                "clock",
                f"{time_text(mean_s)} for each step of training; the gain is that of one "
                f"every {fewer} steps.",
            ),
            Evidence("settings", f"train.eval_every is {every}, of {job.train.steps} steps."),
        ],
        changes=(f"train.eval_every={fewer}",),
        advice="Evaluate less often, or on fewer samples.",
        basis="measured",
        of_s=subject.mean_step_s,
    )


def logging_stall(subject: Subject) -> Finding | None:
    """Between steps, rank 0 writes lines and events, and the others wait for it."""
    between = subject.between_s
    if not between:
        return None
    mean_s = fmean(between)
    return Finding.of(
        subject,
        f"{time_text(mean_s)} pass between two steps, for writing and reporting.",
        mean_s,
        [
            Evidence(
                "clock",
                f"Over {len(between)} steps with neither an evaluation nor a profiled window "
                "before.",
            )
        ],
        changes=("observe.tensorboard=false",),
        advice="Keep the Run on a local disk, and log less often in hooks of your own.",
        of_s=subject.mean_step_s,
    )


def _within_run(job: Job | None, every: int, fewer: int) -> int:
    """How many steps between two that are wanted, and at most as many as the run has."""
    return fewer if job is None else max(every, min(fewer, job.train.steps))
