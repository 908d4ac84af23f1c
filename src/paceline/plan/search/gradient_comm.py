"""Gradient comm: the compression and the buckets of a layout's data axes, by predicted seconds.

The search compares layouts in the form that the Job names, "auto" as exact sums, in buckets of one
stated size. For the layout it chose, this tries what the Job leaves open: forms of `FORMS`, sizes
of `BUCKETS_MIB`. Exact sums stay unless another form wins by more than the prediction may be wrong,
which on most data-centre links it doesn't (https://arxiv.org/abs/2103.00543); and a form whose
errors don't fit in memory is none to choose.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from paceline.config.comm import Comm
from paceline.config.errors import InputError
from paceline.config.feasible_comm import check_comm
from paceline.config.job import JobOnCluster
from paceline.config.layout import Layout
from paceline.plan.points import Setting
from paceline.plan.prediction import Prediction
from paceline.plan.price.step import predict
from paceline.plan.search.search import memory_limit
from paceline.plan.search.simple import AS_GOOD

FORMS = ("none", "bf16", "int8")
"""What "auto" chooses from."""
AFTER_WARM_UP = ("int4", "quinary")
"""And from these where a run is long enough for their first steps to be exact. onebit, top-k and
PowerSGD fall too far behind (benchmarks/compression_loss.py): a person asks for them by name."""
SHARDS_AFTER_WARM_UP = ("int4",)
"""The same between shards, which have no other form of few bits that keeps the loss."""
WARM_UP_STEPS = 30
"""With so many exact steps int4 and quinary ended 300 steps 0.1 to 0.3 % above the loss of exact
sums, without them 0.4 %, up to 0.7 % (three seeds, two ranks, benchmarks/compression_loss.py)."""
LEAST_STEPS = 10 * WARM_UP_STEPS
"""Runs shorter than this have none of them."""
BUCKETS_MIB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0)
_BETWEEN = {"dp": "replicas", "fsdp": "shards"}
AXES = tuple(_BETWEEN)
"""Data axes, as Comm calls them."""


class ChosenComm(NamedTuple):
    """What was chosen, and why each "auto" became what it is."""

    layout: Layout
    comm: Comm
    reasons: Mapping[str, str]


class _TriedComm(NamedTuple):
    layout: Layout
    comm: Comm
    found: Prediction

    @property
    def step_s(self) -> float:
        return self.found.step_s

    @property
    def num_lossy(self) -> int:
        """Axes that send something else than exact sums."""
        return sum(_form(self.comm, axis) != "none" for axis in AXES)


def choose_exchange(job: JobOnCluster, layout: Layout) -> ChosenComm:
    """Choose what the Job leaves open of how data ranks exchange gradients.

    Args:
        job: its layout says whether buckets were left open.
        layout: the Job's as it was decided.

    Returns:
        layout and comm without "auto" in `comm.dp.compress`, `comm.fsdp.compress` and, where there
        are buckets, `layout.bucket_mib`.
    """
    tried = _fitting(job, [_try(job, *candidate) for candidate in _candidates(job, layout)])
    fastest_s = min(one.step_s for one in tried)
    close = [one for one in tried if one.step_s <= fastest_s * (1 + AS_GOOD)]
    fewest = min(one.num_lossy for one in close)
    best = min((one for one in close if one.num_lossy == fewest), key=lambda one: one.step_s)
    reasons = {
        f"comm.{axis}.compress": _why_form(best, axis, tried)
        for axis in AXES
        if _form(job.comm, axis) == "auto"
    }
    if _has_open_buckets(job, layout):
        reasons["layout.bucket_mib"] = _why_bucket(best, tried)
    return ChosenComm(best.layout, best.comm, reasons)


def named_forms(comm: Comm) -> str:
    """What data ranks exchange, in words."""
    forms = {axis: form for axis in AXES if (form := _form(comm, axis)) != "none"}
    lossy = (f"{form} between {_BETWEEN[axis]}" for axis, form in forms.items())
    return " and ".join(lossy) or "exact sums"


def worth_compressing(job: JobOnCluster, layout: Layout) -> str | None:
    """A note where a Job with exact sums would be a good deal faster with "auto"; else None."""
    is_exact = all(_form(job.comm, axis) == "none" for axis in AXES)
    if not is_exact or job.comm.local.method != "none":
        return None
    asked = job.replace(comm=_in_forms(job.comm, dict.fromkeys(AXES, "auto")))
    chosen = choose_exchange(asked, layout)
    lossy = {axis: form for axis in AXES if (form := _form(chosen.comm, axis)) != "none"}
    if not lossy:
        return None
    gain = _try(job, layout, job.comm).step_s / _try(job, chosen.layout, chosen.comm).step_s
    if gain < 1 + 2 * AS_GOOD:
        return None
    named = named_forms(chosen.comm)
    settings = " ".join(f"--set comm.{axis}.compress=auto" for axis in lossy)
    return (
        f"gradients in another form ({named}) would make the step {gain:.2g} times as fast: "
        f"{settings}."
    )


def _candidates(job: JobOnCluster, layout: Layout) -> Iterator[tuple[Layout, Comm]]:
    buckets = BUCKETS_MIB if _has_open_buckets(job, layout) else ()
    forms = product(*(_forms(job, layout, axis) for axis in AXES))
    for chosen, bucket in product(forms, (layout.bucket_mib, *buckets)):
        comm = _in_forms(job.comm, dict(zip(AXES, chosen, strict=True)))
        if set(chosen) == {"none"} or _can(comm, layout):
            yield layout.replace(bucket_mib=bucket), comm


def _has_open_buckets(job: JobOnCluster, layout: Layout) -> bool:
    return job.layout.bucket_mib == "auto" and layout.dp != 1 and layout.fsdp == 1


def _forms(job: JobOnCluster, layout: Layout, axis: str) -> tuple[str, ...]:
    given = _form(job.comm, axis)
    if given != "auto":
        return (given,)
    if not layout.is_plain:
        return ("none",)  # what codecs cost parts of a network is not priced
    few_bits = AFTER_WARM_UP if axis == "dp" else SHARDS_AFTER_WARM_UP
    return (*FORMS, *few_bits) if job.train.steps >= LEAST_STEPS else FORMS


def _form(comm: Comm, axis: str) -> str:
    return str(getattr(comm, axis).compress)


def _in_forms(comm: Comm, forms: Mapping[str, str]) -> Comm:
    """With the exact steps that "auto" begins with where it chooses one of these forms."""
    for axis, form in forms.items():
        if _form(comm, axis) == "auto" and form in AFTER_WARM_UP:
            comm = comm.replace(warmup_steps=max(comm.warmup_steps, WARM_UP_STEPS))
        comm = comm.replace(**{axis: getattr(comm, axis).replace(compress=form)})
    return comm


def _can(comm: Comm, layout: Layout) -> bool:
    try:
        check_comm(comm, layout)
    except InputError:
        return False
    return True


def _try(job: JobOnCluster, layout: Layout, comm: Comm) -> _TriedComm:
    return _TriedComm(layout, comm, predict(replace(Setting.of(job), comm=comm), layout))


def _fitting(job: JobOnCluster, tried: list[_TriedComm]) -> list[_TriedComm]:
    """Those that fit in memory, and the least lossy ones, whose memory is not decided here."""
    limit = memory_limit(job.cluster.device)
    least = min(one.num_lossy for one in tried)
    return [
        one
        for one in tried
        if limit is None or one.num_lossy == least or one.found.peak_memory_bytes <= limit
    ]


def _why_form(best: _TriedComm, axis: str, tried: list[_TriedComm]) -> str:
    begins = f"after {best.comm.warmup_steps} exact steps " if best.comm.warmup_steps else ""
    mine = _form(best.comm, axis)
    others = [one for one in tried if _form(one.comm, axis) != mine]
    if not others:
        return "nothing else can be used with this layout"
    other = min(others, key=lambda one: one.step_s)
    gain = other.step_s / best.step_s - 1
    than = f"{gain:.0%} slower" if gain >= 0.005 else "no faster than the forecast's error"
    return f"{begins}a step takes {best.step_s * 1e3:.4g} ms; {_form(other.comm, axis)} is {than}"


def _why_bucket(best: _TriedComm, tried: list[_TriedComm]) -> str:
    same = [one for one in tried if one.comm == best.comm]
    slowest = max(one.step_s for one in same) / best.step_s - 1
    return f"the least that is not hidden beside the backward pass: others cost up to {slowest:.1%}"
