"""Answer: all that the planner says about a Job, as data for the terminal, plan.json and the page.

It puts together what was found (`plan.search.search` for decoders, `plan.convnet` for networks of
convolutions), why (`plan.search.why`), and what the whole run takes (`plan.answer.outlook`).
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

import numpy as np

from paceline.config.comm import Comm
from paceline.config.errors import InputError
from paceline.config.feasible import check_layout
from paceline.config.hardware import Cluster
from paceline.config.job import Job, to_raw
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.stack import Stack
from paceline.config.vision import ConvNet, EfficientNet, ResNet
from paceline.plan.answer.outlook import Outlook, outlook
from paceline.plan.points import Setting
from paceline.plan.prediction import Prediction
from paceline.plan.price.step import predict
from paceline.plan.search import why
from paceline.plan.search.convnets import predict_all, sentences_of
from paceline.plan.search.gradient_comm import AXES, choose_exchange, named_forms
from paceline.plan.search.search import Found, SearchCounts, memory_limit, search
from paceline.plan.search.space import SearchConstraints

_STEP_OF_FRONT = 0.95


@dataclass(frozen=True, eq=False)
class Answer:
    """The best layout of a Job and what decides."""

    job: Job
    """As it was given, with a concrete cluster."""
    unit: Literal["tokens", "images"]
    """What `tokens_per_s` of its predictions counts."""
    counts: SearchCounts
    limit_bytes: float | None
    """What a layout may use of a device's memory; None: unknown."""
    ranked: tuple[Prediction, ...]
    """Layouts that fit, the fastest first; none where nothing fits."""
    front: tuple[Prediction, ...]
    """Of those that were predicted: none is both faster and leaner; the fastest first."""
    margin: why.Margin | None = None
    binding: why.Binding | None = None
    sensitivities: tuple[why.Sensitivity, ...] = ()
    notes: tuple[str, ...] = ()
    """Further sentences about the fastest layout."""
    comm: Comm | None = None
    """What was chosen for the fastest layout where the Job left it open; None: nothing."""
    shortage: why.MemoryShortage | None = None
    """Where nothing fits: what comes nearest, and what would help."""
    outlook: Outlook | None = None

    @property
    def best(self) -> Prediction | None:
        """The fastest layout that fits."""
        return self.ranked[0] if self.ranked else None

    @property
    def best_job(self) -> Job:
        """The concrete Job: with the fastest layout, which must exist, and its exchange."""
        return self.job.replace(layout=self.ranked[0].layout, comm=self.comm or self.job.comm)


def answer(job: Job, constraints: SearchConstraints | None = None) -> Answer:
    """Find the best layout of a Job on its concrete cluster, and say why.

    Args:
        job: what its layout fixes is kept.
        constraints: what is freed and bounded besides; its layout is the Job's.

    Raises:
        InputError: no layout can run, the device's speed is unknown, or the model is one's own.
    """
    constraints = constraints or SearchConstraints(layout=job.layout)
    if isinstance(job.model, Model):
        return _of_decoder(job, constraints)
    if isinstance(job.model, ResNet | EfficientNet):
        return _of_convnet(job, job.model, constraints)
    raise InputError(
        f'model.family = "{job.model.family}" says nothing about its layers: give the shapes of a '
        'decoder, or of a "resnet" or "efficientnet", to plan it.'
    )


def _of_decoder(job: Job, constraints: SearchConstraints) -> Answer:
    if job.is_concrete:  # one sentence that says which setting can't be
        train = job.train
        check_layout(job.layout, job.model, job.cluster, train.seq_len, train.global_batch)
    found = search(Setting.of(job), constraints)
    ranked, comm = found.ranked, None
    notes: tuple[str, ...] = (why.tightness(found),) if found.is_tight else ()
    exchanging = None
    if ranked and "auto" in (job.comm.dp.compress, job.comm.fsdp.compress):
        first, comm, said = _exchanging(job, ranked[0])
        notes += said
        exchanging = partial(_exchanged, job, first.layout.bucket_mib)
        ranked = (first, *ranked[1:])
    best = ranked[0] if ranked else None
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
        shortage=None if best else _shortage(found),
        outlook=outlook(job, best) if best else None,
    )


def _exchanging(job: Job, best: Prediction) -> tuple[Prediction, Comm, tuple[str, ...]]:
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
    job: Job, bucket_mib: float | Literal["auto"], setting: Setting, layout: Layout
) -> why.ChosenLayout:
    """The exchange that is best for a layout of this Job under another setting, in such buckets."""
    layout = layout.replace(bucket_mib=bucket_mib)
    batch = job.train.replace(global_batch=setting.global_batch)
    asked = job.replace(cluster=setting.cluster, train=batch, layout=layout)
    comm = choose_exchange(asked, layout).comm
    step_s = predict(replace(setting, comm=comm), layout).step_s
    return why.ChosenLayout(layout, named_forms(comm), setting.global_batch / step_s)


def _of_convnet(job: Job, network: ConvNet, constraints: SearchConstraints) -> Answer:
    found = predict_all(network, job.cluster, job.train.global_batch, constraints, job.comm)
    limit = memory_limit(job.cluster.known_device)
    fits = tuple(one for one in found if limit is None or one.peak_memory_bytes <= limit)
    best = fits[0] if fits else None
    leanest = min(found, key=lambda one: one.peak_memory_bytes)
    batch = job.train.global_batch
    notes = sentences_of(network, job.cluster, batch, best, job.comm) if best else ()
    return Answer(
        job=job,
        unit="images",
        counts=SearchCounts(len(found), len(found), len(fits)),
        limit_bytes=limit,
        ranked=fits,
        front=_front(fits),
        binding=why.binding(best) if best else None,
        notes=notes,
        shortage=None if best or limit is None else _too_large(leanest, limit),
        outlook=outlook(job, best) if best else None,
    )


def _front(found: tuple[Prediction, ...]) -> tuple[Prediction, ...]:
    """Those than which none is both faster and leaner, by steps of memory that matter."""
    front: list[Prediction] = []
    for one in sorted(found, key=lambda one: (one.step_s, one.peak_memory_bytes)):
        if not front or one.peak_memory_bytes < _STEP_OF_FRONT * front[-1].peak_memory_bytes:
            front.append(one)
    return tuple(front)


def _shortage(found: Found) -> why.MemoryShortage | None:
    return why.shortage(found) if found.limit_bytes is not None else None


def _too_large(nearest: Prediction, limit: float) -> why.MemoryShortage:
    """Of a network of convolutions: its least micro-batch doesn't fit."""
    terms = nearest.heaviest.terms
    term = max(terms, key=lambda name: terms[name])
    lacks = nearest.peak_memory_bytes - limit
    text = (
        f"nothing fits: even micro-batches of {nearest.layout.micro_batch} lack {lacks / 1e9:.3g} "
        f"GB a device, with {terms[term] / 1e9:.3g} GB of {term}; use smaller images or devices "
        "with more memory."
    )
    return why.MemoryShortage(nearest, term, lacks, None, text)


# ---- as plain data -------------------------------------------------------------------------------


def to_json(found: Answer, num: int = 20) -> dict[str, Any]:
    """The answer as plain data, with the `num` best layouts: what plan.json holds."""
    unit = found.unit
    return {
        "name": found.job.name,
        "model": to_raw(found.job.model),
        "cluster": to_raw(found.job.cluster),
        "runtime": runtime_json(found.job.cluster),
        "train": to_raw(found.job.train),
        "layout": to_raw(found.best.layout) if found.best else None,
        "counts": vars(found.counts),
        "memory_limit_bytes": found.limit_bytes,
        "layouts": [prediction_json(each, unit) for each in found.ranked[:num]],
        "pareto": [prediction_json(each, unit) for each in found.front],
        "margin": found.margin and _margin_json(found.margin),
        "binding": found.binding and vars(found.binding),
        "flips": [{**vars(flip), "best": to_raw(flip.best)} for flip in found.sensitivities],
        "notes": list(found.notes),
        "shortage": found.shortage
        and {**vars(found.shortage), "nearest": prediction_json(found.shortage.nearest, unit)},
        "outlook": found.outlook and vars(found.outlook),
        "assumptions": dict(found.best.assumptions) if found.best else {},
        "versions": versions(),
    }


def runtime_json(cluster: Cluster) -> dict[str, Any]:
    """Whose steps are predicted on a cluster."""
    stack = cluster.stack or Stack()
    return {"whose": stack.whose, "features": stack.features}


def _margin_json(margin: why.Margin) -> dict[str, Any]:
    return {
        **vars(margin),
        "runner_up": to_raw(margin.runner_up),
        "loses_s": dict(margin.loses_s),
    }


def prediction_json(one: Prediction, unit: str = "tokens") -> Mapping[str, Any]:
    """A prediction as plain data; `unit` is what it counts."""
    return {
        "layout": to_raw(one.layout),
        "step_s": one.step_s,
        "interval_s": list(one.interval_s),
        "time_s": dict(one.time_s),
        f"{unit}_per_s": one.tokens_per_s,
        "mfu": one.mfu,
        "peak_memory_bytes": one.peak_memory_bytes,
        "memory": [
            {
                "pipeline_rank": each.rank,
                "total_bytes": each.total_bytes,
                "terms_bytes": dict(each.terms),
                "checkpoint_spike_bytes": each.checkpoint_spike_bytes,
            }
            for each in one.memory
        ],
    }


def versions() -> dict[str, str]:
    """Of what the figures were made with."""
    return {
        "paceline": version("paceline"),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
