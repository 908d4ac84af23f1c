"""The network benchmark's ways of exchanging gradients, and the Job of each. Pure.

A way is a line of WAYS: PyTorch's DDP with its hooks, ours with its settings, or nothing at all.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.network_cell import Way
from benchmarks.network_table import CONTROL, PEER
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import Job, read_job
from paceline.machine.discovery import this_machine
from paceline.plan.points import Setting
from paceline.plan.price.step import predict
from paceline.plan.resolve import resolve
from paceline.plan.search.choose import plan_job
from paceline.plan.search.gradient_comm import AFTER_WARM_UP, WARM_UP_STEPS

STEPS = 10_000
"""Of the timed Jobs' schedule, not that they were done."""
_COMPRESS = (
    "none", "bf16", "int8", "int4", "quinary", "onebit", "topk:0.01", "powersgd:4", "auto"
)  # fmt: skip
_WARM_UP = {
    "powersgd:4": {"comm.warmup_steps": 2},  # as PyTorch's hook
    **{form: {"comm.warmup_steps": WARM_UP_STEPS} for form in AFTER_WARM_UP},  # as "auto" begins
}
LOCAL = (
    Way(
        "diloco",
        "paceline",
        settings={
            "comm.local.method": "diloco",
            "comm.local.every": 150,
            "comm.local.compress": "int4",
        },
    ),
    Way(
        "streaming",
        "paceline",
        settings={
            "comm.local.method": "streaming",
            "comm.local.every": 20,
            "comm.local.fragments": 2,
            "comm.local.overlap_steps": 5,
            "comm.local.compress": "int4",
        },
    ),
)
"""Who stands still to meet does so seldom; who steps on meanwhile meets as often as the workers of
local_updates.py, which measures the loss. Nothing is under way when a round of these ends."""
_SHARDED = {"layout.dp": 1, "layout.fsdp": "auto", "layout.zero": 2}
_BOTH_WAYS = {"comm.fsdp.compress": "int8", "comm.fsdp.compress_weights": "int8"}
SHARDS = (
    Way("shards", "paceline", settings=_SHARDED),
    Way("shards int8", "paceline", settings={**_SHARDED, "comm.fsdp.compress": "int8"}),
    Way("shards int8, both ways", "paceline", settings={**_SHARDED, **_BOTH_WAYS}),
    Way("shards auto", "paceline", settings={**_SHARDED, "comm.fsdp.compress": "auto"}),
)
"""FSDP2 over all hosts, which gathers parameters once a step; in which form gradients are reduced,
and parameters gathered."""
WAYS = (
    Way(CONTROL, "alone"),
    Way(PEER, "ddp", settings={"layout.bucket_mib": 25.0}),
    Way("DDP fp16 hook", "ddp", "fp16"),
    Way("DDP PowerSGD 1", "ddp", "powersgd:1"),
    Way("DDP PowerSGD 4", "ddp", "powersgd:4"),
    *(
        Way(mode, "paceline", settings={"comm.dp.compress": mode, **_WARM_UP.get(mode, {})})
        for mode in _COMPRESS
    ),
    *SHARDS,
    *LOCAL,
)
"""All of them; what this version of Paceline refuses is left out, and said."""
MODEL = {
    "family": "decoder",
    "vocab_size": 4096,
    "hidden_size": 384,
    "ffn_size": 1024,
    "num_layers": 6,
    "num_heads": 6,
    "num_kv_heads": 6,
    "max_seq_len": 128,
    "tie_embeddings": True,
}


SMALL_MODEL = {
    **MODEL,
    "hidden_size": 96,
    "ffn_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
}
"""Of the losses, unless the whole one is asked for: they take many steps."""


def job_of(
    way: Way,
    num_hosts: int,
    steps: int,
    seed: int = 0,
    *,
    cluster: Cluster | None = None,
    model: Mapping[str, Any] = MODEL,
) -> Job:
    """The concrete Job of a way: one rank on each host.

    Args:
        way: which one.
        num_hosts: with a rank each.
        steps: of its schedule.
        seed: of weights and batches.
        model: of the Job.
        cluster: a measured one, by which the planner chooses; None: simple rules do.

    Raises:
        InputError: this version of Paceline can't do it.
    """
    sets = {
        "name": "network",
        "cluster.num_nodes": num_hosts,
        "cluster.devices_per_node": 1,
        "layout.dp": num_hosts,
        "layout.micro_batch": 8,
        "layout.precision": "fp32",
        "layout.compile": False,
        "layout.recompute": "none",
        "train.global_batch": 8 * num_hosts,
        "train.seq_len": 128,
        "train.steps": steps,
        "train.seed": seed,
        **{f"model.{key}": value for key, value in model.items()},
        **way.settings,
    }
    text = [f"{key}={json.dumps(value)}" for key, value in sets.items()]
    job = read_job(None, text)
    if cluster is not None:
        return plan_job(job, cluster).job
    return resolve(job, this_machine().replace(num_nodes=num_hosts, devices_per_node=1)).job


def predicted_s(way: Way, job: Job) -> float | None:
    """Step time of a way by the planner; None: it knows nothing of PyTorch's hooks."""
    if way.hook != "none":
        return None
    if way.kind == "alone":
        job = _on_one_rank(job)
    return predict(Setting.of(job), job.layout).step_s


def _on_one_rank(job: Job) -> Job:
    """What a rank of the Job computes, without the others."""
    return job.replace(
        cluster=job.cluster.replace(num_nodes=1, tiers=()),
        layout=job.layout.replace(dp=1, fsdp=1, zero=0),
        train=job.train.replace(global_batch=job.layout.micro_batch),
    )


def form_of(way: Way, job: Job) -> str:
    """What our gradients travel as, or what workers changed in so many steps."""
    if way.kind != "paceline":
        return ""
    local = job.comm.local
    if local.method != "none":
        return f"{local.compress}, every {local.every}"
    if job.layout.fsdp != 1:
        return f"{job.comm.fsdp.compress}, zero {job.layout.zero}"
    return f"{job.comm.dp.compress}, {job.layout.bucket_mib:g} MiB"


def possible(ways: Sequence[Way], num_hosts: int, say: Callable[[str], None]) -> list[Way]:
    """The ways that Paceline can go, and a line for each that it can't."""
    found = []
    for way in ways:
        try:
            job_of(way, num_hosts, STEPS)
        except InputError as error:
            say(f"left out: {way.name} ({error})")
        else:
            found.append(way)
    return found
