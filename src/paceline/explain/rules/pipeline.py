"""Rules about pipelines: uneven stages, too few micro-batches, parameters gathered again and again.

A pipeline of p stages with k micro-batches takes (k + p - 1) passes of its slowest stage, of which
p - 1 are bubble (https://arxiv.org/abs/1811.06965).
"""

from collections.abc import Sequence

import numpy as np

from paceline.config.errors import InputError
from paceline.config.feasible import num_stages
from paceline.config.job import Job
from paceline.explain.changes import changed_job, runnable_changes
from paceline.explain.finding import Basis, Evidence, Finding
from paceline.explain.rules.busy import FAIR_QUEUE, busy_s, ranks_of
from paceline.explain.subject import Subject
from paceline.explain.what_if import what_if
from paceline.observe.rank_spread import mean_figure
from paceline.plan.points import Setting, decoder_of
from paceline.plan.price.step import Simulated
from paceline.plan.schedules import split_layers
from paceline.render.figures import bytes_text, time_text

_ONCE = ("optimizer", "data_wait", "checkpoint_stall")


def uneven_stages(subject: Subject) -> Finding | None:
    """One stage has more to do than the others, and sets the pace of all."""
    job = subject.job
    if job is None or not _is_simple_pipeline(job):
        return None
    work = stage_work(job)
    best = split_layers(layer_work(job), len(work), 0.0, head_work(job))
    even = stage_work(job, best)
    if tuple(best) == tuple(job.layout.split):
        return None
    change = f"layout.split={list(best)}"
    gain_s, basis = _gain_of_even_s(subject, work, even, change)
    return Finding.of(
        subject,
        f"The heaviest stage has {max(work) / np.mean(work):.2f} times the work of the mean one.",
        gain_s,
        [
            Evidence(
                "settings",
                f"Stages of {list(job.layout.split)} layers do {_listed(work)} blocks' worth of "
                f"work, with the head; {list(best)} would do {_listed(even)}.",
            ),
            *_busy_of_stages(subject),
        ],
        changes=runnable_changes(job, change),
        advice="Give each stage as much to do as the others, the head counted in.",
        basis=basis,
    )


def few_micro_batches(subject: Subject) -> Finding | None:
    """The pipeline is filled and drained for too few micro-batches."""
    job = subject.job
    if job is None or job.layout.pp == 1:
        return None
    best: tuple[str, ...] = ()
    gain_s = 0.0
    for smaller in _divisors_below(job.micro_batch):
        changes = (f"layout.micro_batch={smaller}",)
        seconds = _gain_of_micro_batch(subject, changes)
        if seconds is not None and seconds > gain_s:
            best, gain_s = changes, seconds
    stages, number = job.layout.pp, job.accumulation
    bubble = (stages - 1) / (number + stages - 1)
    return Finding.of(
        subject,
        f"{number} micro-batches in a pipeline of {stages} ranks: {bubble:.0%} of it is bubble.",
        gain_s,
        [
            Evidence("settings", f"{number} micro-batches, {stages} stages."),
            *_told_waits(subject),
        ],
        changes=best,
        advice="A larger train.global_batch, or an interleaved or zero-bubble schedule, shrinks "
        "the bubble too.",
    )


def regather_in_pipeline(subject: Subject) -> Finding | None:
    """Sharded parameters are gathered anew for every micro-batch of a pipeline."""
    if subject.account is None:
        return None
    traffic = subject.traffic
    if not traffic.is_axis("pp").any():
        return None
    gathers = traffic.is_axis("fsdp") & traffic.is_op("all_gather") & traffic.is_large
    times = traffic.passes(gathers)
    if times < 2:
        return None
    total = traffic.per_step(gathers, "bytes")
    return Finding.of(
        subject,
        f"Parameters are gathered {times} times in a step, once for each micro-batch.",
        traffic.removed_s(gathers) * (times - 1) / times,
        [Evidence("host", f"{bytes_text(total)} of all-gathers in a step.")],
        changes=runnable_changes(subject.job, "layout.zero=1"),
        advice="Keep parameters gathered over the step (ZeRO-1, reshard_after_forward=False) in a "
        "pipeline.",
        basis="measured",
    )


# ---- what stages have to do ----------------------------------------------------------------------


def rank_work(job: Job) -> tuple[list[float], bool]:
    """How much each pipeline rank has to do, in any unit, and whether the planner says so: then
    all work counts, else the FLOPs of blocks and head do."""
    try:
        passes = Simulated.of(Setting.of(job), job.layout).times.passes
    except InputError:
        return stage_work(job), False
    return _by_rank(job, passes.whole_s[:, 0].tolist()), True


def layer_work(job: Job) -> list[float]:
    """FLOPs of each block over those of the mean one."""
    model = decoder_of(job)
    attention = model.attention_flops_per_token(job.train.seq_len) / model.num_layers
    flops = [
        2 * model.num_block_matmul_params(layer) + attention for layer in range(model.num_layers)
    ]
    return [each / float(np.mean(flops)) for each in flops]


def head_work(job: Job) -> float:
    """FLOPs of the head over those of the mean block."""
    model = decoder_of(job)
    whole = model.forward_flops_per_token(job.train.seq_len)
    head = 2 * model.num_embedding_params
    return head / ((whole - head) / model.num_layers)


def stage_work(job: Job, split: Sequence[int] = ()) -> list[float]:
    """Work of each pipeline rank in blocks, the head included; of a split, by default the Job's."""
    layers = layer_work(job)
    split = split or job.layout.split
    ends = np.cumsum(split)
    work = [sum(layers[end - count : end]) for count, end in zip(split, ends, strict=True)]
    work[-1] += head_work(job)
    return _by_rank(job, work)


def _by_rank(job: Job, work: Sequence[float]) -> list[float]:
    """The work of stages, added up for the ranks that hold them."""
    ranks = job.layout.pp
    if len(work) == ranks:
        return list(work)
    # Several stages a rank: in turn, or there and back (V-shaped schedules).
    is_v = "v" in job.layout.schedule or job.layout.schedule == "dualpipe"
    sums = [0.0] * ranks
    for stage, each in enumerate(work):
        lap, at = divmod(stage, ranks)
        sums[ranks - 1 - at if is_v and lap % 2 else at] += each
    return sums


def _is_simple_pipeline(job: Job) -> bool:
    """Whether each rank has one stage, so that the heaviest stage sets the pace."""
    is_known = job.model.knows_layers and job.layout.pp > 1
    return is_known and num_stages(job.layout) == job.layout.pp


def _gain_of_even_s(
    subject: Subject, work: Sequence[float], even: Sequence[float], change: str
) -> tuple[float, Basis]:
    """By the planner, which knows that ranks without time to spare slow each other down, and wait
    for each other; else by what ranks were seen to take for their work, or in proportion."""
    asked = what_if(subject, (change,))
    if asked is not None:
        return asked.gain_s - _queued_more_s(subject), "predicted"
    seen_s = _seen_s(subject, max(work) - max(even))
    if seen_s is not None:
        return seen_s, "measured"
    return _in_pipeline_s(subject) * (1 - max(even) / max(work)), "predicted"


def _queued_more_s(subject: Subject) -> float:
    """What a step with even stages loses because no rank has a core to spare.

    Where ranks compute on all cores, threads that send and receive hold up those that compute
    whenever all of them do: with uneven stages while the lightest one is at work, with even ones
    always. The rank that is held up most sets the pace. 0 where that isn't known, and where ranks
    outnumber cores, for then the planner knows what they cost each other.
    """
    job, waits = subject.job, mean_figure(subject.steady, "core_wait_s")
    is_full = subject.threads_of_host == subject.facts.get("num_cores")
    if job is None or not is_full or not isinstance(waits, list):
        return 0.0
    queued_s, at_work_s = np.array(waits), np.median(busy_s(subject), axis=0)
    if len(queued_s) != len(at_work_s) or at_work_s.min() <= 0:
        return 0.0
    share = min(FAIR_QUEUE, queued_s.max() / at_work_s.min())
    more_s = share * at_work_s.mean() - queued_s[at_work_s.argmax()]
    stages, number = job.layout.pp, job.accumulation
    return max(0.0, float(more_s)) * (number + stages - 1) / number


def _seen_s(subject: Subject, less: float) -> float | None:
    """Seconds of so much less work, in blocks, by how much longer ranks with more of it were at
    work; what all have besides, and what they cost each other, is in it.

    None where that isn't known: on a device, where the host's time says little, or where ranks with
    more work were not busy for longer.
    """
    job, ranks = subject.job, ranks_of(subject)
    is_device = subject.account is not None and subject.account.is_device
    if job is None or is_device or len(ranks) != job.layout.num_ranks:
        return None
    of_stage = stage_work(job)
    work = [of_stage[job.layout.place(rank).pp] for rank in ranks]
    each_s, _ = np.polyfit(work, np.median(busy_s(subject), axis=0), 1)
    return float(each_s) * less if each_s > 0 else None


def _in_pipeline_s(subject: Subject) -> float:
    """Seconds of the step that depend on the pace of the pipeline."""
    return max(0.0, subject.step_s - subject.work_s(*_ONCE))


def _gain_of_micro_batch(subject: Subject, changes: tuple[str, ...]) -> float | None:
    """By the planner; where it doesn't know the device, by the bubble's formula."""
    job = subject.job
    assert job is not None
    other = changed_job(job, changes)
    if other is None:
        return None
    asked = what_if(subject, changes)
    if asked is not None:
        return asked.gain_s
    stages = job.layout.pp

    def passes(one: Job) -> float:
        return (one.accumulation + stages - 1) / one.accumulation

    more = other.accumulation - job.accumulation
    saved_s = _in_pipeline_s(subject) * (1 - passes(other) / passes(job))
    # What the host does for each micro-batch however small it is.
    return saved_s - more * subject.work_s("host_gap") / job.accumulation


def _divisors_below(value: int) -> list[int]:
    return [each for each in range(1, value) if value % each == 0]


def _told_waits(subject: Subject) -> list[Evidence]:
    if subject.account is None:
        return []
    waits_s = subject.measured.mean_s("bubble", "exposed_comm.pp", "straggler_wait")
    share = waits_s / subject.measured.step_s
    return [Evidence("ranks", f"Ranks wait for others {share:.0%} of the step.")]


def _busy_of_stages(subject: Subject) -> list[Evidence]:
    job = subject.job
    if subject.account is None or job is None:
        return []
    busy_s = subject.measured.busy_s.mean(axis=0)
    told = [
        f"rank {rank} {time_text(float(seconds))}"
        for rank, seconds in zip(subject.measured.ranks, busy_s, strict=True)
    ]
    return [Evidence("ranks", f"At work in a step: {', '.join(told)}.")]


def _listed(work: Sequence[float]) -> str:
    return ", ".join(f"{each:.1f}" for each in work)
