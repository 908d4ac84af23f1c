"""What tests of tune share: a small decoder on two CPU ranks whose speed is stated."""

from typing import Any

from paceline.bench.reference import small_job
from paceline.config.curves import (
    AttentionCurve,
    CollectiveCurve,
    DeviceCurves,
    MatmulCurve,
    MemoryCurve,
)
from paceline.config.hardware import Cluster, Device, Figure, Tier
from paceline.config.job import Job


def figure(value: float) -> Figure:
    return Figure(value=value, origin="assumed", source="a test")


_CURVES = {
    op: (CollectiveCurve(num_ranks=2, bytes=(1e3, 1e6), seconds=(1e-3, 1e-2), source="a test"),)
    for op in ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "all_to_all")
}
_DEVICE = Device(
    name="here",
    kind="cpu",
    precisions=("fp64", "fp32"),
    peak_flops={"fp32": figure(2e10)},
    memory_bytes=figure(1e9),
    memory_bytes_per_s=figure(1e10),
    curves=DeviceCurves(
        matmul={"fp32": MatmulCurve(m=(64,), n=(64,), k=(64,), share=(0.5,), source="a test")},
        attention={
            "flash": AttentionCurve(
                seq_len=(64,), head_dim=(16,), forward=(0.3,), backward=(0.3,), source="a test"
            )
        },
        memory=MemoryCurve(bytes=(1e3, 1e6), seconds=(1e-6, 1e-4), source="a test"),
    ),
)
_TIER = Tier(
    name="loopback",
    num_devices=2,
    latency_s=figure(1e-4),
    bytes_per_s=figure(1e9),
    collectives=_CURVES,
)
CLUSTER = Cluster(device=_DEVICE, devices_per_node=2, num_nodes=1, tiers=(_TIER,))

MODEL = {"hidden_size": 32, "ffn_size": 64, "num_heads": 4, "num_layers": 4, "vocab_size": 512}
BAD = {"dp": 2, "fsdp": 1, "micro_batch": 1, "recompute": "full", "bucket_mib": 0.1}
"""A layout that can be mended in three places."""


def job(cluster: Cluster = CLUSTER, samples: int = 8, **layout: Any) -> Job:
    """A concrete one."""
    used = {**BAD, **layout}
    assert cluster.devices_per_node == 2
    return small_job(cluster, "small", MODEL, 32, samples, used)
