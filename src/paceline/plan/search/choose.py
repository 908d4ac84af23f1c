"""Choose: every "auto" of a Job's layout by the search, with the reason for each.

Where the search has nothing to go by (a model of one's own, a device or links of unknown speed) the
simple rules of `plan.resolve` decide, and the reasons say so.
"""

from dataclasses import replace

from paceline.config.errors import InputError
from paceline.config.feasible import check_layout
from paceline.config.hardware import Cluster
from paceline.config.job import JobOnCluster, JobSpec
from paceline.config.layout import Layout, LayoutSpec
from paceline.plan.collectives import tiers_of
from paceline.plan.comm import resolve_comm
from paceline.plan.families import family_of
from paceline.plan.points import Setting
from paceline.plan.prediction import Prediction
from paceline.plan.price.step import predict
from paceline.plan.rates import matmul_s
from paceline.plan.resolve import Plan, concrete_cluster, resolve
from paceline.plan.search.gradient_comm import choose_exchange, worth_compressing
from paceline.plan.search.rounds import choose_rounds, few_rounds
from paceline.plan.search.search import Found, search
from paceline.plan.search.space import SearchConstraints
from paceline.plan.search.why import explain, shortage

# What settings are where no technique is used.
_UNUSED = Layout()
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


def plan_job(job: JobSpec, machine: Cluster, *, explained: bool = True) -> Plan:
    """Replace every "auto" by the search, and predict the layout that the Job has then.

    Args:
        job: what a person asks for.
        machine: the Cluster that stands for an "auto" one.
        explained: whether the notes say what decides: a third of the time, as profiled in a search
            of 202 points.

    Raises:
        InputError: one sentence, where no layout satisfies what the Job demands, or none fits.
    """
    cluster, reasons = concrete_cluster(job.cluster, machine)
    asked = job.on(cluster)
    unknown = unsearchable(asked)
    if unknown is not None:
        plan = replace(resolve(job, machine), notes=(unknown,))
        return with_prediction(plan) if _is_quick(cluster) else plan
    if not job.model.knows_layers:
        return with_prediction(resolve(job, machine))
    if not job.layout.undecided:
        return _with_exchange(asked, resolve(job, machine))
    return _with_exchange(asked, _searched(asked, reasons, explained))


def with_prediction(plan: Plan) -> Plan:
    """The plan that rules made, with what is predicted of it where its model's shapes are known."""
    model = plan.job.model
    try:
        found = family_of(model).predict(model, plan.job)
    except InputError as error:  # it can run, but isn't priced
        return replace(plan, notes=(*plan.notes, f"not predicted: {error}"))
    return plan if found is None else replace(plan, ranked=(found,))


def _with_exchange(asked: JobOnCluster, plan: Plan) -> Plan:
    """The plan with the form and the buckets in which data ranks exchange gradients.

    Args:
        asked: as it was given.
        plan: of a layout whose speed can be predicted.
    """
    layout = plan.job.layout
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
    if asked.comm.local.is_open:
        local, why = choose_rounds(asked, concrete.layout)
        concrete = concrete.replace(comm=concrete.comm.replace(local=local).settled)
        reasons |= why
    note = few_rounds(concrete, concrete.comm.local)
    notes += () if note is None else (note,)
    best = predict(Setting.of(concrete), concrete.layout)
    return replace(
        plan, job=concrete, reasons=reasons, notes=notes, ranked=(best, *plan.ranked[1:])
    )


def _searched(job: JobOnCluster, reasons: dict[str, str], explained: bool) -> Plan:
    found = search(Setting.of(job), SearchConstraints(layout=job.layout))
    if not found.ranked:
        raise InputError(shortage(found).text)
    layout = found.ranked[0].layout
    check_layout(layout, job.model, job.cluster, job.train.seq_len, job.train.global_batch)
    reasons |= _reasons(job.layout, layout, found)
    comm, why = resolve_comm(job, layout, job.cluster)
    reasons |= why
    notes = explain(found) if explained else ()
    return Plan(job.with_layout(layout, comm), reasons, notes, found.ranked)


def unsearchable(job: JobOnCluster) -> str | None:
    """Why there is nothing to search by, as one sentence; None where there is."""
    cluster = job.cluster
    if not family_of(job.model).is_priced:
        return "simple rules decided: what a model of your own costs is not known."
    if _is_quick(cluster):
        return (
            "simple rules decided: this machine was measured quickly only, and the search "
            "needs what `paceline bench` measures."
        )
    try:
        wanted = job.layout.precision
        wanted = cluster.device.safest_fast_precision if wanted == "auto" else wanted
        matmul_s(cluster.device, wanted, 1, 1, 1)
        if cluster.num_devices > 1:
            tiers_of(cluster)
    except InputError as error:
        return f"simple rules decided: {error}"
    return None


def _is_quick(cluster: Cluster) -> bool:
    curves = cluster.device.curves
    return curves is not None and curves.is_quick


# ---- reasons -------------------------------------------------------------------------------------


def _reasons(given: LayoutSpec, chosen: Layout, found: Found) -> dict[str, str]:
    """Why each setting that was "auto" became what it is, by the best layout with another value."""
    return {f"layout.{name}": _reason(name, chosen, found) for name in given.undecided}


def _reason(name: str, chosen: Layout, found: Found) -> str:
    axis = _BELONGS_TO.get(name)
    value = getattr(chosen, name)
    if name == "ep" and found.space.setting.model.experts is None:
        return "the model has no experts"
    if axis is not None and getattr(chosen, axis) == 1 and value == getattr(_UNUSED, name):
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
