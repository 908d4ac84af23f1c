"""Choose: every "auto" of a Job's layout by the search, with the reason for each.

Where the search has nothing to go by (a model of one's own, a device or links of unknown speed) the
simple rules of `plan.resolve` decide, and the reasons say so.
"""

from collections.abc import Mapping
from dataclasses import replace

from paceline.config.errors import InputError
from paceline.config.feasible import check_layout
from paceline.config.hardware import Cluster
from paceline.config.job import Job
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.vision import ResNet
from paceline.plan.collectives import tiers_of
from paceline.plan.comm import resolve_comm
from paceline.plan.convnet import predict_convnet
from paceline.plan.points import Setting
from paceline.plan.prediction import Prediction
from paceline.plan.price.step import predict
from paceline.plan.rates import matmul_s
from paceline.plan.resolve import Plan, concrete_cluster, resolve
from paceline.plan.search.gradient_comm import choose_exchange, worth_compressing
from paceline.plan.search.search import Found, search
from paceline.plan.search.space import SearchConstraints
from paceline.plan.search.why import explain, shortage

# What a setting is when a technique is not used.
_UNUSED: Mapping[str, object] = {
    "zero": 0, "ulysses": 1, "sequence_parallel": False, "schedule": "none", "stages_per_rank": 1,
    "split": (),
}  # fmt: skip
# Settings that stated rules decide, not the search.
_RULES = {
    "precision": "the safest fast arithmetic of the device",
    "bucket_mib": "replicas exchange no whole gradients",
    "split": "the heaviest stage is as light as can be; the head weighs something",
}
# A setting that is told together with the axis it belongs to.
_BELONGS_TO = {
    "zero": "fsdp", "sequence_parallel": "tp", "ulysses": "cp", "schedule": "pp",
    "stages_per_rank": "pp", "split": "pp",
}  # fmt: skip


def plan_job(job: Job, machine: Cluster, constraints: SearchConstraints | None = None) -> Plan:
    """Replace every "auto" of the Job by the search, and predict the layout that it has then.

    Args:
        job: a partial or concrete Job.
        machine: the concrete Cluster that stands for an "auto" one.
        constraints: what to free and bound; its layout is replaced by the Job's.

    Raises:
        InputError: one sentence, where no layout satisfies what the Job demands, or none fits.
    """
    cluster, reasons = concrete_cluster(job.cluster, machine)
    unknown = unsearchable(job, cluster)
    if unknown is not None:
        plan = replace(resolve(job, machine), notes=(unknown,))
        return with_prediction(plan) if _is_quick(cluster) else plan
    if isinstance(job.model, ResNet):
        return with_prediction(resolve(job, machine))
    if not job.layout.undecided:
        return _with_exchange(job, resolve(job, machine))
    constraints = replace(constraints or SearchConstraints(), layout=job.layout)
    return _with_exchange(job, _searched(job, cluster, constraints, reasons))


def with_prediction(plan: Plan) -> Plan:
    """The plan that rules made, with what is predicted of it where its model's shapes are known."""
    job = plan.job
    try:
        if isinstance(job.model, ResNet):
            found = predict_convnet(
                job.model, job.cluster, job.layout, job.train.global_batch, comm=job.comm
            )
        elif isinstance(job.model, Model):
            found = predict(Setting.of(job), job.layout)
        else:
            return plan
    except InputError as error:  # it can run, but isn't priced
        return replace(plan, notes=(*plan.notes, f"not predicted: {error}"))
    return replace(plan, ranked=(found,))


def _with_exchange(job: Job, plan: Plan) -> Plan:
    """The plan with the form and the buckets in which data ranks exchange gradients.

    Args:
        job: as it was given.
        plan: of a layout whose speed can be predicted.
    """
    layout = plan.job.layout
    asked = job.replace(cluster=plan.job.cluster)
    notes, reasons = plan.notes, dict(plan.reasons)
    concrete = plan.job
    if layout.is_plain and layout.num_data_ranks > 1:
        chosen = choose_exchange(asked, layout)
        dp = concrete.comm.dp.replace(compress=chosen.comm.dp.compress)
        fsdp = concrete.comm.fsdp.replace(compress=chosen.comm.fsdp.compress)
        comm = concrete.comm.replace(dp=dp, fsdp=fsdp, warmup_steps=chosen.comm.warmup_steps)
        concrete = concrete.replace(layout=chosen.layout, comm=comm.settled)
        reasons |= chosen.reasons
        note = worth_compressing(asked, layout)
        notes += () if note is None else (note,)
    best = predict(Setting.of(concrete), concrete.layout)
    return replace(
        plan, job=concrete, reasons=reasons, notes=notes, ranked=(best, *plan.ranked[1:])
    )


def _searched(
    job: Job, cluster: Cluster, constraints: SearchConstraints, reasons: dict[str, str]
) -> Plan:
    assert isinstance(job.model, Model)
    found = search(Setting.of(job.replace(cluster=cluster)), constraints)
    if not found.ranked:
        raise InputError(shortage(found).text)
    layout = found.ranked[0].layout
    check_layout(layout, job.model, cluster, job.train.seq_len, job.train.global_batch)
    reasons |= _reasons(job.layout, layout, found)
    comm, why = resolve_comm(job, layout, cluster)
    reasons |= why
    concrete = job.replace(cluster=cluster, layout=layout, comm=comm)
    return Plan(concrete, reasons, explain(found), found.ranked)


def unsearchable(job: Job, cluster: Cluster) -> str | None:
    """Why there is nothing to search by, as one sentence; None where there is."""
    if not isinstance(job.model, Model | ResNet):
        return "simple rules decided: what a model of your own costs is not known."
    if _is_quick(cluster):
        return (
            "simple rules decided: this machine was measured quickly only, and the search "
            "needs what `paceline bench` measures."
        )
    try:
        wanted = job.layout.precision
        wanted = cluster.known_device.safest_fast_precision if wanted == "auto" else wanted
        matmul_s(cluster.known_device, wanted, 1, 1, 1)
        if cluster.num_devices > 1:
            tiers_of(cluster)
    except InputError as error:
        return f"simple rules decided: {error}"
    return None


def _is_quick(cluster: Cluster) -> bool:
    curves = cluster.known_device.curves
    return curves is not None and curves.is_quick


# ---- reasons -------------------------------------------------------------------------------------


def _reasons(given: Layout, chosen: Layout, found: Found) -> dict[str, str]:
    """Why each setting that was "auto" became what it is, by the best layout with another value."""
    return {f"layout.{name}": _reason(name, chosen, found) for name in given.undecided}


def _reason(name: str, chosen: Layout, found: Found) -> str:
    axis = _BELONGS_TO.get(name)
    value = getattr(chosen, name)
    if name == "ep" and found.space.setting.model.experts is None:
        return "the model has no experts"
    if axis is not None and getattr(chosen, axis) == 1 and value == _UNUSED.get(name):
        return f"{axis} is not used"
    if name in _RULES:
        return _RULES[name]
    other = _best_other(name, value, found.ranked)
    if other is not None:
        return _loses(name, found.ranked[0], other)
    smaller = _best_other(name, value, found.near)
    if smaller is not None and found.limit_bytes is not None:
        lacks = (smaller.peak_memory_bytes - found.limit_bytes) / 1e9
        return f"{_told(name, smaller.layout)} lacks {lacks:.3g} GB a device"
    return "none of the best layouts has another value"


def _best_other(name: str, value: object, ranked: tuple[Prediction, ...]) -> Prediction | None:
    return next((each for each in ranked if getattr(each.layout, name) != value), None)


def _loses(name: str, best: Prediction, other: Prediction) -> str:
    by = other.step_s / best.step_s - 1
    if by < -0.001:
        return f"{_told(name, other.layout)} is {-by:.1%} faster, less than the forecast's error"
    if by < 0.001:
        return f"{_told(name, other.layout)} is no faster"
    losses = {
        term: other.time_s.get(term, 0.0) - best.time_s.get(term, 0.0) for term in other.time_s
    }
    return f"{_told(name, other.layout)} is {by:.1%} slower: {max(losses, key=losses.__getitem__)}"


def _told(name: str, layout: Layout) -> str:
    value = getattr(layout, name)
    return f"{name} = {list(value) if isinstance(value, tuple) else value}"
