"""Exchange: the compression and the buckets of a layout's replicas, by predicted seconds.

The search compares layouts in the form that the Job names, "auto" as exact sums, in buckets of one
stated size. For the layout it chose, this tries what the Job leaves open: forms of `FORMS`, sizes
of `BUCKETS_MIB`. Exact sums stay unless another form wins by more than the prediction may be wrong,
which on most data-centre links it doesn't (https://arxiv.org/abs/2103.00543).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from paceline.config.comm import Comm
from paceline.config.errors import InputError
from paceline.config.feasible_comm import check_comm
from paceline.config.job import Job
from paceline.config.layout import Layout
from paceline.plan.points import Setting
from paceline.plan.price.step import predict

FORMS = ("none", "bf16", "int8")
"""What "auto" chooses from."""
AFTER_WARM_UP = ("int4", "quinary")
"""And from these where a run is long enough for their first steps to be exact. onebit, top-k and
PowerSGD fall too far behind (benchmarks/compression_loss.py): a person asks for them by name."""
WARM_UP_STEPS = 30
"""With so many exact steps int4 and quinary ended 300 steps within 0.5 % of the loss of exact sums,
without them 0.6 to 0.7 % above it (means of three seeds, benchmarks/compression_loss.py)."""
LEAST_STEPS = 10 * WARM_UP_STEPS
"""Runs shorter than this have none of them."""
BUCKETS_MIB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0)
_MARGIN = 0.03
"""Of a step: exact sums stay unless another form is predicted to win by more. Assumed."""


class Chosen(NamedTuple):
    """What was chosen, and why each "auto" became what it is."""

    layout: Layout
    comm: Comm
    reasons: Mapping[str, str]


class _Tried(NamedTuple):
    layout: Layout
    comm: Comm
    step_s: float


def choose_exchange(job: Job, layout: Layout) -> Chosen:
    """Choose what the Job leaves open of how replicas exchange gradients.

    Args:
        job: with a concrete cluster; its layout says whether buckets were left open.
        layout: concrete.

    Returns:
        layout and comm without "auto" in `comm.dp.compress` and `layout.bucket_mib`.
    """
    tried = [_try(job, *candidate) for candidate in _candidates(job, layout)]
    by_form = {one.comm.dp.compress: one for one in sorted(tried, key=lambda one: -one.step_s)}
    fastest = min(tried, key=lambda one: one.step_s)
    exact = by_form.get("none", fastest)
    best = exact if exact.step_s <= fastest.step_s * (1 + _MARGIN) else fastest
    reasons = {}
    if job.comm.dp.compress == "auto":
        reasons["comm.dp.compress"] = _why_form(best, by_form)
    if job.layout.bucket_mib == "auto":
        reasons["layout.bucket_mib"] = _why_bucket(best, tried)
    return Chosen(best.layout, best.comm, reasons)


def worth_compressing(job: Job, layout: Layout) -> str | None:
    """A note where a Job with exact sums would be a good deal faster with "auto"; else None."""
    if job.comm.dp.compress != "none" or job.comm.local.method != "none":
        return None
    asked = job.replace(comm=job.comm.replace(dp=job.comm.dp.replace(compress="auto")))
    chosen = choose_exchange(asked, layout)
    if chosen.comm.dp.compress == "none":
        return None
    exact, coded = _try(job, layout, job.comm), _try(job, chosen.layout, chosen.comm)
    gain = exact.step_s / coded.step_s
    if gain < 1 + 2 * _MARGIN:
        return None
    return (
        f"gradients between replicas in another form ({chosen.comm.dp.compress}) would make the "
        f"step {gain:.2g} times as fast: --set comm.dp.compress=auto."
    )


def _candidates(job: Job, layout: Layout) -> Iterator[tuple[Layout, Comm]]:
    buckets = BUCKETS_MIB if job.layout.bucket_mib == "auto" else ()
    for form, bucket in product(_forms(job, layout), (layout.bucket_mib, *buckets)):
        comm = _in_form(job.comm, form)
        if form == "none" or _can(comm, layout):
            yield layout.replace(bucket_mib=bucket), comm


def _forms(job: Job, layout: Layout) -> tuple[str, ...]:
    if job.comm.dp.compress != "auto":
        return (job.comm.dp.compress,)
    if not layout.is_plain or layout.fsdp != 1:
        return ("none",)  # what codecs cost replicas of shards is not priced
    return (*FORMS, *AFTER_WARM_UP) if job.train.steps >= LEAST_STEPS else FORMS


def _in_form(comm: Comm, form: str) -> Comm:
    """With the exact steps that "auto" begins with where it chooses this form."""
    if comm.dp.compress == "auto" and form in AFTER_WARM_UP:
        comm = comm.replace(warmup_steps=max(comm.warmup_steps, WARM_UP_STEPS))
    return comm.replace(dp=comm.dp.replace(compress=form))


def _can(comm: Comm, layout: Layout) -> bool:
    try:
        check_comm(comm, layout)
    except InputError:
        return False
    return True


def _try(job: Job, layout: Layout, comm: Comm) -> _Tried:
    setting = replace(Setting.of(job), comm=comm)
    return _Tried(layout, comm, predict(setting, layout).step_s)


def _why_form(best: _Tried, by_form: Mapping[str, _Tried]) -> str:
    begins = f"after {best.comm.warmup_steps} exact steps " if best.comm.warmup_steps else ""
    told = {form: one.step_s for form, one in by_form.items() if one is not best}
    if not told:
        return "nothing else can be used with this layout"
    other = min(told, key=told.__getitem__)
    gain = told[other] / best.step_s - 1
    than = f"{gain:.0%} slower" if gain >= 0.005 else "no faster than the forecast's error"
    return f"{begins}a step takes {best.step_s * 1e3:.4g} ms; {other} is {than}"


def _why_bucket(best: _Tried, tried: list[_Tried]) -> str:
    same = [one for one in tried if one.comm == best.comm]
    slowest = max(one.step_s for one in same) / best.step_s - 1
    return f"the least that is not hidden beside the backward pass: others cost up to {slowest:.1%}"
