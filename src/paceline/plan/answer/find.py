"""Find: the answer to a Job, by the family of its model: what a search finds, why, and what the
whole run takes (`plan.answer.outlook`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.config.comm import Comm
from paceline.config.errors import InputError
from paceline.config.family import ModelFamily
from paceline.config.feasible import check_layout
from paceline.config.job import JobOnCluster
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.vision import ConvNet, EfficientNet, ResNet
from paceline.plan.answer.answer import Answer
from paceline.plan.answer.outlook import outlook
from paceline.plan.goodput import goodput_outlook
from paceline.plan.points import Setting
from paceline.plan.prediction import Prediction
from paceline.plan.price.step import predict
from paceline.plan.scale import checkpoint_bytes
from paceline.plan.search import why
from paceline.plan.search.convnets import predict_all, sentences_of
from paceline.plan.search.gradient_comm import AXES, choose_exchange, named_forms
from paceline.plan.search.rounds import choose_rounds
from paceline.plan.search.search import SearchCounts, memory_limit, search
from paceline.plan.search.space import SearchConstraints

_STEP_OF_FRONT = 0.95
# SGD keeps a parameter and its momentum, both fp32.
_SGD_BYTES = 8.0


def answer(job: JobOnCluster, constraints: SearchConstraints | None = None) -> Answer:
    """Find the best layout of a Job on its cluster, and say why.

    Args:
        job: what its layout fixes is kept.
        constraints: what is freed and bounded besides; its layout is the Job's.

    Raises:
        InputError: no layout can run, the device's speed is unknown, or the model is one's own.
    """
    constraints = constraints or SearchConstraints(layout=job.layout)
    find = _BY_FAMILY.get(type(job.model))
    if find is None:
        raise InputError(
            f'model.family = "{job.model.family}" says nothing about its layers: give the shapes '
            'of a decoder, or of a "resnet" or "efficientnet", to plan it.'
        )
    return find(job.model, job, constraints)


def _of_decoder(model: Model, job: JobOnCluster, constraints: SearchConstraints) -> Answer:
    """Every way to split it is searched."""
    if not job.layout.undecided:  # one sentence that says which setting can't be
        train, layout = job.train, Layout.parse(vars(job.layout))
        check_layout(layout, model, job.cluster, train.seq_len, train.global_batch)
    found = search(Setting.of(job), constraints)
    notes: tuple[str, ...] = ()
    if found.ranked and job.comm.local.is_open:
        local, reasons = choose_rounds(job, found.ranked[0].layout)
        notes += tuple(f"{name}: {reason}" for name, reason in reasons.items())
        job = job.replace(comm=job.comm.replace(local=local).settled)
        found = search(Setting.of(job), constraints)
    ranked, comm = found.ranked, None
    notes += (why.tightness(found),) if found.is_tight else ()
    exchanging = None
    if ranked and "auto" in (job.comm.dp.compress, job.comm.fsdp.compress):
        first, comm, said = _exchanging(job, ranked[0])
        notes += said
        exchanging = partial(_exchanged, job, first.layout.bucket_mib)
        ranked = (first, *ranked[1:])
    best = ranked[0] if ranked else None
    saved = float(checkpoint_bytes(model.num_params))
    is_short = best is None and found.limit_bytes is not None
    return Answer(
        job=job,
        unit="tokens",
        counts=found.counts,
        limit_bytes=found.limit_bytes,
        ranked=ranked,
        front=_front((*ranked, *found.front)),
        margin=why.margin(found),
        binding=why.binding(best) if best else None,
        sensitivities=why.sensitivities(found, exchanging),
        notes=notes,
        comm=comm,
        shortage=why.shortage(found) if is_short else None,
        outlook=outlook(job, best, saved) if best else None,
        goodput=goodput_outlook(job, best, saved) if best else None,
    )


def _exchanging(job: JobOnCluster, best: Prediction) -> tuple[Prediction, Comm, tuple[str, ...]]:
    """The fastest layout, found with exact sums, in the form and the buckets that are best for it;
    and why."""
    chosen = choose_exchange(job, best.layout)
    setting = replace(Setting.of(job), comm=chosen.comm)
    forms = {f"comm.{axis}.compress": getattr(chosen.comm, axis).compress for axis in AXES}
    notes = (
        f"{name} = {forms[name]}: {reason}"
        for name, reason in chosen.reasons.items()
        if name in forms
    )
    return predict(setting, chosen.layout), chosen.comm, tuple(notes)


def _exchanged(
    job: JobOnCluster, bucket_mib: float, setting: Setting, layout: Layout
) -> why.ChosenLayout:
    """The exchange that is best for a layout of this Job under another setting, in such buckets."""
    layout = layout.replace(bucket_mib=bucket_mib)
    batch = job.train.replace(global_batch=setting.global_batch)
    asked = job.replace(cluster=setting.cluster, train=batch, layout=layout)
    comm = choose_exchange(asked, layout).comm
    step_s = predict(replace(setting, comm=comm), layout).step_s
    return why.ChosenLayout(layout, named_forms(comm), setting.global_batch / step_s)


def _of_convnet(model: ConvNet, job: JobOnCluster, constraints: SearchConstraints) -> Answer:
    """Replicas of all of it are compared."""
    batch, limit = job.train.global_batch, memory_limit(job.cluster.device)
    found = predict_all(model, job.cluster, batch, constraints, job.comm)
    fits = tuple(one for one in found if limit is None or one.peak_memory_bytes <= limit)
    best = fits[0] if fits else None
    saved = _SGD_BYTES * model.num_params
    leanest = min(found, key=lambda one: one.peak_memory_bytes)
    return Answer(
        job=job,
        unit="images",
        counts=SearchCounts(len(found), len(found), len(fits)),
        limit_bytes=limit,
        ranked=fits,
        front=_front(fits),
        binding=why.binding(best) if best else None,
        notes=sentences_of(model, job.cluster, batch, best, job.comm) if best else (),
        shortage=None if best or limit is None else _too_large(leanest, limit),
        outlook=outlook(job, best, saved) if best else None,
        goodput=goodput_outlook(job, best, saved) if best else None,
    )


def _too_large(nearest: Prediction, limit: float) -> why.MemoryShortage:
    """Even the least micro-batch doesn't fit."""
    terms = nearest.heaviest.terms
    term = max(terms, key=lambda name: terms[name])
    lacks = nearest.peak_memory_bytes - limit
    text = (
        f"nothing fits: even micro-batches of {nearest.layout.micro_batch} lack {lacks / 1e9:.3g} "
        f"GB a device, with {terms[term] / 1e9:.3g} GB of {term}; use smaller images or devices "
        "with more memory."
    )
    return why.MemoryShortage(nearest, term, lacks, None, text)


def _front(found: tuple[Prediction, ...]) -> tuple[Prediction, ...]:
    """Those than which none is both faster and leaner, by steps of memory that matter."""
    front: list[Prediction] = []
    for one in sorted(found, key=lambda one: (one.step_s, one.peak_memory_bytes)):
        if not front or one.peak_memory_bytes < _STEP_OF_FRONT * front[-1].peak_memory_bytes:
            front.append(one)
    return tuple(front)


_BY_FAMILY: Mapping[type[ModelFamily], Callable[[Any, JobOnCluster, SearchConstraints], Answer]] = {
    Model: _of_decoder,
    ResNet: _of_convnet,
    EfficientNet: _of_convnet,
}
