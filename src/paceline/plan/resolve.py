"""Resolve every "auto" of a JobSpec by simple stated rules, where nothing can be predicted.

A pure function from a JobSpec and the hardware to a Job and the reason for each choice.
`paceline.plan.search.choose` searches instead wherever the speed of the devices is known.

How it works: it begins with the layout of one rank, in which stands what a person fixed, and
replaces what they left open, rule by rule.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from paceline.config.errors import InputError
from paceline.config.feasible import check_layout, nearest_multiple, num_stages
from paceline.config.hardware import Cluster, ClusterSpec
from paceline.config.job import Job, JobOnCluster, JobSpec
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.schedule import STAGES_PER_RANK, refusal
from paceline.plan.comm import resolve_comm
from paceline.plan.points import decoder_of
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

_BUCKET_MIB = 25.0
"""DDP's own, where nothing is known of the gradients."""


Choices = dict[str, tuple[object, str]]
"""Settings of the layout, what they should be, and why."""


@dataclass(frozen=True)
class Plan:
    """A Job and why each "auto" became what it is."""

    job: Job
    reasons: Mapping[str, str]
    notes: tuple[str, ...] = ()
    """What decides between the layouts, or why they could not be searched."""
    ranked: tuple[Prediction, ...] = ()
    """The Job's own layout as predicted, and the next best; none where nothing is known."""


def resolve(job: JobSpec, machine: Cluster) -> Plan:
    """Replace every "auto" of a JobSpec.

    Args:
        job: what a person asks for.
        machine: the Cluster that stands for an "auto" one.

    Raises:
        InputError: one sentence, where no layout satisfies what the Job demands.
    """
    cluster, reasons = concrete_cluster(job.cluster, machine)
    asked = job.on(cluster)
    fixed = {name: value for name, value in vars(job.layout).items() if value != "auto"}
    layout = Layout.parse(fixed)
    for rule in (_switches, _axes, _sharing, _stages_per_rank, _micro_batch, _split):
        choices = rule(asked, layout)
        left = {name: choices[name] for name in choices if name in job.layout.undecided}
        layout = layout.replace(**{name: value for name, (value, _) in left.items()})
        reasons |= {f"layout.{name}": reason for name, (_, reason) in left.items()}
    check_layout(layout, job.model, cluster, job.train.seq_len, job.train.global_batch)
    comm, why = resolve_comm(job, layout, cluster)
    return Plan(asked.with_layout(layout, comm), reasons | why)


def concrete_cluster(given: ClusterSpec, machine: Cluster) -> tuple[Cluster, dict[str, str]]:
    """A Job's cluster with the machine's data where it says nothing, and the reasons."""
    nothing = ClusterSpec()
    said = {key: value for key, value in vars(given).items() if value != getattr(nothing, key)}
    measured = {"tiers", "stack"} if said.get("device", machine.device) == machine.device else set()
    here = {key: value for key, value in vars(machine).items() if key not in _MEASURED - measured}
    reasons = {f"cluster.{key}": "what this machine has" for key in given.undecided}
    return Cluster.parse({**here, **said}, "cluster"), reasons


def _switches(job: JobOnCluster, _layout: Layout) -> Choices:
    device = job.cluster.device
    return {
        "precision": (
            device.safest_fast_precision,
            f"the safest fast arithmetic of {device.name}",
        ),
        "compile": (False, "eager starts at once; compiling pays on long runs: ask for it"),
        "recompute": ("none", "activations are kept unless they don't fit"),
        "bucket_mib": (
            bucket_mib_of(decoder_of(job)) if job.model.knows_layers else _BUCKET_MIB,
            "an eighth of the gradients, so that most of them overlap",
        ),
    }


def _axes(job: JobOnCluster, layout: Layout) -> Choices:
    """Axes nobody asked for have size 1, except dp and fsdp, which share out what is left."""
    ranks, left = job.cluster.num_devices, job.layout.undecided
    choices: Choices = dict.fromkeys(
        ("tp", "pp", "cp", "ep"), (1, "used only where it is asked for")
    )
    rest = _cofactor(ranks, layout, ("tp", "pp", "cp"))
    all_take_part = f"every one of the {ranks} devices takes part"
    if "fsdp" in left and "dp" not in left:
        choices["fsdp"] = (_cofactor(ranks, layout, ("tp", "pp", "cp", "dp")), all_take_part)
    elif "fsdp" in left and _must_shard(job, layout):
        layout = layout.replace(fsdp=rest)
        why = "parameters, gradients and optimizer state of one replica would fill the device"
        choices["fsdp"] = (rest, why)
    elif "fsdp" in left:
        choices["fsdp"] = (1, "a whole replica fits on its devices")
    if "dp" in left:
        choices["dp"] = (_cofactor(ranks, layout, ("tp", "pp", "cp", "fsdp")), all_take_part)
    return choices


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


def _sharing(job: JobOnCluster, layout: Layout) -> Choices:
    """The settings that belong to an axis, where that axis is in use."""
    return {
        "zero": _zero(layout),
        "sequence_parallel": _sequence_parallel(job, layout),
        "ulysses": (1, "a ring takes any number of heads"),
        "schedule": (
            ("none", "there is no pipeline")
            if layout.pp == 1
            else ("1f1b", "the least memory, and any number of micro-batches")
        ),
    }


def _sequence_parallel(job: JobOnCluster, layout: Layout) -> tuple[bool, str]:
    if layout.tp == 1:
        return False, "there is no tp"
    if not job.model.knows_layers:
        return False, "the plan of tp says how the tokens lie"
    if job.train.seq_len // layout.cp % layout.tp:
        return False, "tp does not divide the tokens of a rank's sequence"
    return True, "with tp it saves activations at no more traffic"


def _zero(layout: Layout) -> tuple[int, str]:
    if layout.fsdp == 1:
        return 0, "nothing is sharded"
    if layout.pp != 1:
        return 1, "in a pipeline the others gather or reduce for every micro-batch"
    return 3, "the least memory; fsdp was asked for to save some"


def _stages_per_rank(_job: JobOnCluster, layout: Layout) -> Choices:
    per_rank = 1 if layout.pp == 1 else STAGES_PER_RANK.get(layout.schedule) or 2
    return {"stages_per_rank": (per_rank, "what the schedule takes at least")}


def _must_shard(job: JobOnCluster, layout: Layout) -> bool:
    memory = job.cluster.device.memory_bytes
    if not job.model.knows_layers or memory is None:
        return False
    ranks_of_a_replica = layout.tp * layout.pp
    states_bytes = decoder_of(job).num_params * _STATE_BYTES_PER_PARAM / ranks_of_a_replica
    return states_bytes > _STATE_SHARE_OF_MEMORY * memory.value


def _micro_batch(job: JobOnCluster, layout: Layout) -> Choices:
    if "micro_batch" not in job.layout.undecided:
        return {}
    batch, ranks = job.train.global_batch, layout.num_data_ranks
    if batch % ranks:
        raise InputError(
            f"train.global_batch = {batch} can't be split over {ranks} ranks: "
            f"use {nearest_multiple(batch, ranks)}, the nearest that works."
        )
    share = batch // ranks
    if not job.model.knows_layers:
        return {"micro_batch": (share, "what a model of your own does best is not known")}
    tokens = job.train.seq_len // layout.cp
    most = max(1, _TOKENS_PER_MICRO_BATCH[job.cluster.device.kind] // tokens)
    sizes = [part for part in divisors(share) if part <= most]
    reason = f"the largest divisor of {share} samples a rank up to {most}"
    if layout.pp != 1:
        sizes = _that_fill_the_pipeline(layout, share, sizes)
        reason += " that keeps the pipeline busy"
    return {"micro_batch": (max(sizes), reason)}


def _that_fill_the_pipeline(layout: Layout, share: int, sizes: list[int]) -> list[int]:
    """Micro-batch sizes that the schedule takes; if there are, those with two per rank or more."""
    pp, per_rank = layout.pp, layout.stages_per_rank
    takes = [
        part for part in sizes if refusal(layout.schedule, pp, per_rank, share // part) is None
    ]
    busy = [part for part in takes if share // part >= 2 * pp]
    return busy or takes or [1]


def _split(job: JobOnCluster, layout: Layout) -> Choices:
    if "split" not in job.layout.undecided:
        return {}
    if layout.pp == 1 or not job.model.knows_layers:
        return {"split": ((), "there is no pipeline")}
    stages, model = num_stages(layout), decoder_of(job)
    if stages > model.num_layers:
        return {"split": ((1,) * stages, "the check that follows refuses it")}
    reason = "the heaviest stage is as light as can be; the head weighs something"
    return {"split": (split_of(model, job.train.seq_len, stages), reason)}


# ---- what the search has of these rules ----------------------------------------------------------


def bucket_mib_of(model: Model) -> float:
    """Small enough that reducing starts early, large enough that each one uses the link."""
    gradients_mib = model.num_params * 4 / 2**20
    return round(min(25.0, max(1.0, gradients_mib / 8)), 2)


@lru_cache(maxsize=256)
def split_of(model: Model, seq_len: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, the heaviest as light as can be; the head weighs something."""
    head = 2 * model.num_embedding_params
    attention = model.attention_flops_per_token(seq_len) / model.num_layers
    layers = range(model.num_layers)
    costs = [attention + 2 * model.num_block_matmul_params(layer) for layer in layers]
    return split_layers(costs, stages, 0.0, head)


def divisors(value: int) -> list[int]:
    """All of them, the smallest first."""
    small = [part for part in range(1, int(value**0.5) + 1) if value % part == 0]
    return sorted({*small, *(value // part for part in small)})
