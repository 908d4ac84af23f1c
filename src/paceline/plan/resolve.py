"""Resolve every "auto" of a Job by simple stated rules, where nothing can be predicted.

A pure function from a partial Job and the hardware to a concrete Job and the reason for each
choice. `paceline.plan.search.choose` searches instead wherever the speed of the devices is known.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config.errors import InputError
from paceline.config.feasible import check_layout, nearest_multiple, num_stages
from paceline.config.frozen import size
from paceline.config.hardware import Cluster, Device
from paceline.config.job import Job
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.schedule import STAGES_PER_RANK, refusal
from paceline.plan.comm import resolve_comm
from paceline.plan.prediction import Prediction
from paceline.plan.schedules import split_layers

# What is measured of one device's links and software says nothing about another's.
_MEASURED = {"tiers", "stack"}
# fp32 parameters, gradients and two Adam moments.
_STATE_BYTES_PER_PARAM = 16
# The rest of the memory is for activations, buffers and the allocator.
_STATE_SHARE_OF_MEMORY = 0.5
# About as many tokens as keep a large GPU's matrix units busy. A CPU core is busy with far fewer,
# and faster while activations stay near it (1024 tokens are 4-6 % faster than 2048, see
# docs/decisions/overhead.md).
_TOKENS_PER_MICRO_BATCH = {"cuda": 8192, "cpu": 1024, "other": 8192}


@dataclass(frozen=True)
class Plan:
    """A concrete Job and why each "auto" became what it is."""

    job: Job
    reasons: Mapping[str, str]
    notes: tuple[str, ...] = ()
    """What decides between the layouts, or why they could not be searched."""
    ranked: tuple[Prediction, ...] = ()
    """The Job's own layout as predicted, and the next best; none where nothing is known."""


def resolve(job: Job, machine: Cluster) -> Plan:
    """Replace every "auto" of the Job.

    Args:
        job: a partial or concrete Job.
        machine: the concrete Cluster that stands for an "auto" one.

    Raises:
        InputError: one sentence, where no layout satisfies what the Job demands.
    """
    cluster, reasons = concrete_cluster(job.cluster, machine)
    layout = _resolve_precision(job.layout, cluster.known_device, reasons)
    layout = _resolve_switches(job, layout, reasons)
    layout = _resolve_axes(job, layout, cluster, reasons)
    layout = _resolve_sharing(job, layout, reasons)
    layout = _resolve_micro_batch(job, layout, cluster.known_device, reasons)
    layout = _resolve_split(job, layout, reasons)
    check_layout(layout, job.model, cluster, job.train.seq_len, job.train.global_batch)
    comm, why = resolve_comm(job, layout, cluster)
    return Plan(job.replace(cluster=cluster, layout=layout, comm=comm), reasons | why)


def concrete_cluster(given: Cluster, machine: Cluster) -> tuple[Cluster, dict[str, str]]:
    """A Job's cluster with the machine's data where it says nothing, and the reasons."""
    nothing = Cluster()
    said = {key: value for key, value in vars(given).items() if value != getattr(nothing, key)}
    measured = {"tiers", "stack"} if said.get("device", machine.device) == machine.device else set()
    here = {key: value for key, value in vars(machine).items() if key not in _MEASURED - measured}
    autos = [key for key, value in vars(given).items() if value == "auto"]
    reasons = {f"cluster.{key}": "what this machine has" for key in autos}
    return Cluster.parse({**here, **said}, "cluster"), reasons


def _resolve_precision(layout: Layout, device: Device, reasons: dict[str, str]) -> Layout:
    if layout.precision == "auto":
        reasons["layout.precision"] = f"the safest fast arithmetic of {device.name}"
        layout = layout.replace(precision=device.safest_fast_precision)
    return layout


def _resolve_switches(job: Job, layout: Layout, reasons: dict[str, str]) -> Layout:
    changes: dict[str, object] = {}
    if layout.compile == "auto":
        changes["compile"] = False
        reasons["layout.compile"] = "eager starts at once; compiling pays on long runs: ask for it"
    if layout.recompute == "auto":
        changes["recompute"] = "none"
        reasons["layout.recompute"] = "activations are kept unless they don't fit"
    if layout.bucket_mib == "auto":
        changes["bucket_mib"] = _bucket_mib(job)
        reasons["layout.bucket_mib"] = "an eighth of the gradients, so that most of them overlap"
    return layout.replace(**changes)


def _bucket_mib(job: Job) -> float:
    """Small enough that reducing starts early, large enough that each one uses the link."""
    if not isinstance(job.model, Model):
        return 25.0
    gradients_mib = job.model.num_params * 4 / 2**20
    return round(min(25.0, max(1.0, gradients_mib / 8)), 2)


def _resolve_axes(job: Job, layout: Layout, cluster: Cluster, reasons: dict[str, str]) -> Layout:
    """Axes nobody asked for have size 1, except dp and fsdp, which share out what is left."""
    ranks = cluster.num_devices
    unasked = [axis for axis in ("tp", "pp", "cp", "ep") if getattr(layout, axis) == "auto"]
    reasons |= {f"layout.{axis}": "used only where it is asked for" for axis in unasked}
    layout = layout.replace(**dict.fromkeys(unasked, 1))
    left = _cofactor(ranks, layout, ("tp", "pp", "cp"))
    if layout.dp == "auto" and layout.fsdp == "auto":
        fsdp = left if _must_shard(job, layout, cluster) else 1
        layout = layout.replace(fsdp=fsdp)
        reasons["layout.fsdp"] = (
            "parameters, gradients and optimizer state of one replica would fill the device"
            if fsdp > 1
            else "a whole replica fits on its devices"
        )
    for axis, other in (("dp", "fsdp"), ("fsdp", "dp")):
        if getattr(layout, axis) == "auto":
            rest = _cofactor(ranks, layout, ("tp", "pp", "cp", other))
            layout = layout.replace(**{axis: rest})
            reasons[f"layout.{axis}"] = f"every one of the {ranks} devices takes part"
    return layout


def _cofactor(ranks: int, layout: Layout, axes: tuple[str, ...]) -> int:
    """Ranks that these axes leave to the others."""
    sizes = {axis: getattr(layout, axis) for axis in axes if getattr(layout, axis) != 1}
    product = math.prod(sizes.values())
    if ranks % product:
        names, values = " x ".join(sizes), " x ".join(map(str, sizes.values()))
        raise InputError(
            f"layout.{names} = {values} does not divide the {ranks} ranks: change it or "
            "cluster.devices_per_node."
        )
    return ranks // product


def _resolve_sharing(job: Job, layout: Layout, reasons: dict[str, str]) -> Layout:
    """The settings that belong to an axis, where that axis is in use."""
    chosen = {
        "zero": _auto_zero(layout),
        "sequence_parallel": _auto_sequence_parallel(job, layout),
        "ulysses": (1, "a ring takes any number of heads"),
        "schedule": (
            ("none", "there is no pipeline")
            if layout.pp == 1
            else ("1f1b", "the least memory, and any number of micro-batches")
        ),
    }
    layout = _fill(layout, chosen, reasons)
    per_rank = STAGES_PER_RANK.get(layout.schedule) or 2
    if layout.pp == 1:
        per_rank = 1
    return _fill(
        layout, {"stages_per_rank": (per_rank, "what the schedule takes at least")}, reasons
    )


def _auto_sequence_parallel(job: Job, layout: Layout) -> tuple[bool, str]:
    if layout.tp == 1:
        return False, "there is no tp"
    if job.train.seq_len // size(layout.cp) % size(layout.tp):
        return False, "tp does not divide the tokens of a rank's sequence"
    return True, "with tp it saves activations at no more traffic"


def _auto_zero(layout: Layout) -> tuple[int, str]:
    if layout.fsdp == 1:
        return 0, "nothing is sharded"
    if layout.pp != 1:
        return 1, "a pipeline would gather and reduce for every micro-batch otherwise"
    return 3, "the least memory; fsdp was asked for to save some"


def _fill(
    layout: Layout, chosen: Mapping[str, tuple[object, str]], reasons: dict[str, str]
) -> Layout:
    """Put in what was chosen where the layout says "auto", and why."""
    autos = {key: value for key, value in chosen.items() if getattr(layout, key) == "auto"}
    reasons |= {f"layout.{key}": reason for key, (_, reason) in autos.items()}
    return layout.replace(**{key: value for key, (value, _) in autos.items()})


def _must_shard(job: Job, layout: Layout, cluster: Cluster) -> bool:
    device = cluster.device
    if not isinstance(job.model, Model) or device == "auto" or device.memory_bytes is None:
        return False
    ranks_of_a_replica = size(layout.tp) * size(layout.pp)
    states_bytes = job.model.num_params * _STATE_BYTES_PER_PARAM / ranks_of_a_replica
    return states_bytes > _STATE_SHARE_OF_MEMORY * device.memory_bytes.value


def _resolve_micro_batch(
    job: Job, layout: Layout, device: Device, reasons: dict[str, str]
) -> Layout:
    if layout.micro_batch != "auto":
        return layout
    batch, ranks = job.train.global_batch, layout.num_data_ranks
    if batch % ranks:
        raise InputError(
            f"train.global_batch = {batch} can't be split over {ranks} ranks: "
            f"use {nearest_multiple(batch, ranks)}, the nearest that works."
        )
    share = batch // ranks
    if not isinstance(job.model, Model):
        reasons["layout.micro_batch"] = "what a model of your own does best is not known"
        return layout.replace(micro_batch=share)
    tokens = job.train.seq_len // size(layout.cp)
    most = max(1, _TOKENS_PER_MICRO_BATCH[device.kind] // tokens)
    sizes = [part for part in _divisors(share) if part <= most]
    reason = f"the largest divisor of {share} samples a rank up to {most}"
    if layout.pp != 1:
        sizes = _that_fill_the_pipeline(layout, share, sizes)
        reason += " that keeps the pipeline busy"
    reasons["layout.micro_batch"] = reason
    return layout.replace(micro_batch=max(sizes))


def _that_fill_the_pipeline(layout: Layout, share: int, sizes: list[int]) -> list[int]:
    """Micro-batch sizes that the schedule takes; if there are, those with two per rank or more."""
    assert layout.schedule != "auto"
    pp, per_rank = size(layout.pp), size(layout.stages_per_rank)
    takes = [
        part for part in sizes if refusal(layout.schedule, pp, per_rank, share // part) is None
    ]
    busy = [part for part in takes if share // part >= 2 * pp]
    return busy or takes or [1]


def _resolve_split(job: Job, layout: Layout, reasons: dict[str, str]) -> Layout:
    if layout.split != "auto":
        return layout
    if layout.pp == 1 or not isinstance(job.model, Model):
        reasons["layout.split"] = "there is no pipeline"
        return layout.replace(split=())
    stages = num_stages(layout)
    if stages > job.model.num_layers:
        return layout.replace(split=(1,) * stages)  # refused by the check that follows
    reasons["layout.split"] = "the heaviest stage is as light as can be; the head weighs something"
    model = job.model
    head = 2 * model.num_embedding_params
    attention = model.attention_flops_per_token(job.train.seq_len) / model.num_layers
    layers = range(model.num_layers)
    costs = [attention + 2 * model.num_block_matmul_params(layer) for layer in layers]
    return layout.replace(split=split_layers(costs, stages, 0.0, head))


def _divisors(value: int) -> list[int]:
    return [part for part in range(1, value + 1) if value % part == 0]
