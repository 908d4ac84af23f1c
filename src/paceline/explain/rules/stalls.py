"""Rules about what steps wait for besides other ranks: data, disks, the interpreter."""

from math import ceil
from statistics import fmean

from paceline.explain.changes import offered
from paceline.explain.finding import Finding
from paceline.explain.subject import Subject
from paceline.observe.summary import number, step_time_text

# Evaluations may take this part of the time before it is worth a word.
_FAIR_EVALUATION = 0.01
_GC_RANGE = "paceline.gc"


def loader_bound(subject: Subject) -> Finding | None:
    """Ranks wait for their next batch: what is left of the wait after other ranks' work hid it."""
    wait_s, gain_s, where = subject.mean_s("data_wait"), subject.mean_s("data_wait"), ""
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
    return Finding.of(
        subject,
        "loader-bound",
        f"A step waits {step_time_text(wait_s)} for its data{where}.",
        gain_s,
        [f"data_wait is {wait_s / subject.step_s:.0%} of the step{where}."],
        advice="Prepare batches ahead: more loader workers, tokenise and decode once before the "
        "run, read from a faster disk.",
        confidence="high",
    )


def checkpoint_stall(subject: Subject) -> Finding | None:
    """Steps wait until the state has been copied for a checkpoint; on cores that are all at work
    they lose what writing it takes of them, too."""
    stall_s = subject.mean_s("checkpoint_stall")
    taken_s = subject.background_s("checkpoint_cpu_s") if subject.cores_are_taken else 0.0
    lost_s = stall_s + taken_s
    stalls = [line["terms"].get("checkpoint_stall", 0.0) for line in subject.steady]
    longest_s = max(stalls, default=0.0)
    every = subject.job.checkpoint.every if subject.job else 0
    fewer = 0 if not every else every * ceil(max(1.0, lost_s / subject.mean_step_s / 0.002))
    # What is left when there are fewer.
    left = every / fewer if fewer else 1.0
    return Finding.of(
        subject,
        "checkpoint-stall",
        f"Checkpoints hold up a step by {step_time_text(stall_s)} on average.",
        lost_s * (1 - left) if every else lost_s,
        [f"The longest stall took {step_time_text(longest_s)}; one is due every {every} steps.",
         *([f"Writing them takes {step_time_text(taken_s)} of a step from its core."]
           if taken_s else [])],
        changes=offered(subject.job, f"checkpoint.every={fewer}") if fewer > every else (),
        advice="Keep checkpoints less often, or on a disk that takes them faster.",
        confidence="high",
        of_s=subject.mean_step_s,
    )  # fmt: skip


def garbage_collection(subject: Subject) -> Finding | None:
    """Python's garbage collector stops a rank, and the others wait for it."""
    mean_s = subject.mean_s("gc_s")
    gain_s = mean_s
    if subject.account is not None:
        gaps = subject.account.gaps
        paused = gaps[[_GC_RANGE in subject.account.names[name] for name in gaps["name"]]]
        if len(paused):
            gain_s = max(mean_s, subject.measured.gain_s(subject.measured.sum_s(paused)))
    return Finding.of(
        subject,
        "garbage-collection",
        f"Python's garbage collector stops a step for {step_time_text(gain_s)} on average.",
        gain_s,
        [f"Rank 0 spends {step_time_text(mean_s)} of a step in it; others wait at their next "
         "collective."],
        advice="Find what makes so many objects, or switch it off in the loop (gc.freeze() after "
        "the set-up, gc.disable(), and gc.collect() on all ranks every few hundred steps).",
        confidence="high",
        of_s=subject.mean_step_s,
    )  # fmt: skip


def evaluation_stall(subject: Subject) -> Finding | None:
    """The run evaluates so often that it takes a considerable part of the time."""
    spent_s = sum(number(line.get("eval_s")) or 0.0 for line in subject.steady)
    every = subject.job.train.eval_every if subject.job else 0
    if not spent_s or not every:
        return None
    mean_s = spent_s / len(subject.steady)
    share = mean_s / subject.mean_step_s
    fewer = every * max(1, ceil(share / _FAIR_EVALUATION))
    return Finding.of(
        subject,
        "evaluation-stall",
        f"Evaluations take {share:.1%} of the time, one every {every} steps.",
        mean_s * (1 - every / fewer),
        [f"{step_time_text(mean_s)} for each step of training; the gain is that of one every "
         f"{fewer} steps."],
        changes=offered(subject.job, f"train.eval_every={fewer}"),
        confidence="high",
        of_s=subject.mean_step_s,
    )  # fmt: skip


def logging_stall(subject: Subject) -> Finding | None:
    """Between steps, rank 0 writes lines and events, and the others wait for it."""
    between = subject.between_s
    if not between:
        return None
    mean_s = fmean(between)
    return Finding.of(
        subject,
        "logging-stall",
        f"{step_time_text(mean_s)} pass between two steps, for writing and reporting.",
        mean_s,
        [f"Over {len(between)} steps with neither an evaluation nor a profiled window before."],
        changes=offered(subject.job, "observe.tensorboard=false"),
        advice="Keep the Run on a local disk, and log less often in hooks of your own.",
        of_s=subject.mean_step_s,
    )
