"""Resolve every "auto" of a Job, by simple stated rules, for a known Cluster.

This is the planner's seam: a pure function from a partial Job and the hardware to a concrete Job
and the reason for each choice. It does not predict or search yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster, Device
from paceline.config.job import Job
from paceline.config.layout import Layout
from paceline.config.model import Model

# fp32 parameters, gradients and two Adam moments.
_STATE_BYTES_PER_PARAM = 16
# The rest of the memory is for activations, buffers and the allocator.
_STATE_SHARE_OF_MEMORY = 0.5
# About as many tokens as keep a large GPU's matrix units busy. A CPU core is busy with far fewer,
# and faster while activations stay near it (measured: 1024 tokens 4-6 % faster than 2048, LOG.md).
_TOKENS_PER_MICRO_BATCH = {"cuda": 8192, "cpu": 1024}


# What stored parameters may be computed with.
_ARITHMETIC = {"fp64": ("fp64",), "fp32": ("fp32", "bf16", "fp16"), "bf16": ("bf16",)}


@dataclass(frozen=True)
class Plan:
    """A concrete Job and why each "auto" became what it is."""

    job: Job
    reasons: Mapping[str, str]


def resolve(job: Job, machine: Cluster) -> Plan:
    """Replace every "auto" of the Job.

    Args:
        job: a partial or concrete Job.
        machine: the concrete Cluster that stands for an "auto" one.

    Raises:
        InputError: one sentence, where no layout satisfies what the Job demands.
    """
    reasons: dict[str, str] = {}
    cluster = _resolve_cluster(job.cluster, machine, reasons)
    assert cluster.device != "auto"
    layout = _resolve_precision(job.layout, cluster.device, reasons)
    layout = _resolve_switches(job, layout, reasons)
    layout = _resolve_axes(job, layout, cluster, reasons)
    layout = _resolve_micro_batch(job, layout, cluster.device, reasons)
    return Plan(job.replace(cluster=cluster, layout=layout), reasons)


def _resolve_cluster(given: Cluster, machine: Cluster, reasons: dict[str, str]) -> Cluster:
    found = {key: value for key, value in vars(given).items() if value != "auto"}
    for key in vars(machine).keys() - found.keys():
        reasons[f"cluster.{key}"] = "what this machine has"
    return Cluster.parse({**vars(machine), **found}, "cluster")


def _resolve_precision(layout: Layout, device: Device, reasons: dict[str, str]) -> Layout:
    if layout.precision == "auto":
        # fp16 needs loss scaling and its range costs stability, so it is never chosen unasked. On
        # a CPU bf16 is a wish of the person: eager kernels are not reliably faster there.
        wanted = "bf16" if device.kind == "cuda" and "bf16" in device.precisions else "fp32"
        reasons["layout.precision"] = f"the safest fast arithmetic of {device.name}"
        layout = layout.replace(precision=wanted)
    for name, wish in (("precision", layout.precision), ("param_dtype", layout.param_dtype)):
        if wish not in device.precisions:
            raise InputError(
                f'layout.{name} = "{wish}" is not supported by {device.name}: '
                f"it has {', '.join(device.precisions)}."
            )
    if layout.precision not in _ARITHMETIC[layout.param_dtype]:
        raise InputError(
            f'layout.param_dtype = "{layout.param_dtype}" needs layout.precision = '
            f'"{_ARITHMETIC[layout.param_dtype][0]}", not "{layout.precision}": change one of them.'
        )
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
    assert cluster.devices_per_node != "auto"
    assert cluster.num_nodes != "auto"
    ranks = cluster.devices_per_node * cluster.num_nodes
    dp, fsdp = layout.dp, layout.fsdp
    if dp == "auto" and fsdp == "auto":
        fsdp = ranks if _must_shard(job, cluster) else 1
        dp = ranks // fsdp
        reasons["layout.fsdp"] = (
            "parameters, gradients and optimizer state of one replica would fill the device"
            if fsdp > 1
            else "a whole replica fits on one device"
        )
    elif dp == "auto":
        dp = _cofactor(ranks, fsdp, "fsdp")
    elif fsdp == "auto":
        fsdp = _cofactor(ranks, dp, "dp")
    reasons.setdefault("layout.dp", f"every one of the {ranks} devices takes part")
    layout = layout.replace(dp=dp, fsdp=fsdp)
    if layout.num_ranks != ranks:
        raise InputError(
            f"layout.dp x layout.fsdp = {layout.dp} x {layout.fsdp} asks for {layout.num_ranks} "
            f"ranks but the cluster has {ranks}: change one of them or cluster.devices_per_node."
        )
    return layout


def _cofactor(ranks: int, size: int | str, name: str) -> int:
    assert isinstance(size, int)
    if ranks % size:
        raise InputError(f"layout.{name} = {size} does not divide the {ranks} ranks.")
    return ranks // size


def _must_shard(job: Job, cluster: Cluster) -> bool:
    device = cluster.device
    if not isinstance(job.model, Model) or device == "auto" or device.memory_bytes is None:
        return False
    states_bytes = job.model.num_params * _STATE_BYTES_PER_PARAM
    return states_bytes > _STATE_SHARE_OF_MEMORY * device.memory_bytes.value


def _resolve_micro_batch(
    job: Job, layout: Layout, device: Device, reasons: dict[str, str]
) -> Layout:
    batch, ranks = job.train.global_batch, layout.num_ranks
    if batch % ranks:
        raise InputError(
            f"train.global_batch = {batch} can't be split over {ranks} ranks: "
            f"use {_nearest_multiple(batch, ranks)}, the nearest that works."
        )
    share = batch // ranks
    if layout.micro_batch == "auto":
        most = max(1, _TOKENS_PER_MICRO_BATCH[device.kind] // job.train.seq_len)
        micro_batch = max(size for size in _divisors(share) if size <= most)
        if not isinstance(job.model, Model):
            micro_batch = share
        reasons["layout.micro_batch"] = (
            f"the largest divisor of {share} samples a rank up to {most}"
        )
        return layout.replace(micro_batch=micro_batch)
    if share % layout.micro_batch:
        step = ranks * layout.micro_batch
        raise InputError(
            f"train.global_batch = {batch} is not a multiple of {ranks} ranks x micro-batches of "
            f"{layout.micro_batch}: use {_nearest_multiple(batch, step)}, the nearest that works."
        )
    return layout


def _nearest_multiple(value: int, factor: int) -> int:
    return max(1, round(value / factor)) * factor


def _divisors(value: int) -> list[int]:
    return [size for size in range(1, value + 1) if value % size == 0]
