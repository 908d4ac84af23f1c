"""What tests of the planner's time share: a small network, machines, layouts."""

from typing import Any

from paceline.config.curves import CollectiveCurve
from paceline.config.figure import Figure
from paceline.config.hardware import Cluster, Tier, device
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.stack import Stack
from paceline.plan.points import Setting

MODEL = Model(
    vocab_size=32000,
    hidden_size=2048,
    ffn_size=5632,
    num_layers=16,
    num_heads=16,
    num_kv_heads=8,
    max_seq_len=65536,
)
EXPERTS: dict[str, Any] = {"num_experts": 16, "experts_per_token": 2, "ffn_size": 1024}


def layout(**settings: Any) -> Layout:
    """One rank that keeps everything, but for what is given."""
    zero = 3 if settings.get("fsdp", 1) > 1 else 0
    return Layout(**{"zero": zero, "precision": "bf16", **settings})


def cluster(name: str = "H100-SXM", nodes: int = 2, **changes: Any) -> Cluster:
    """Nodes of eight devices of the catalogue, with changes to the device."""
    return Cluster(device=device(name).replace(**changes), devices_per_node=8, num_nodes=nodes)


def setting(
    model: Model = MODEL,
    *,
    batch: int = 64,
    seq_len: int = 2048,
    on: Cluster | None = None,
    stack: Stack | None = None,
    **more: Any,
) -> Setting:
    """Two nodes of H100 and our own runtime, but for what is given."""
    return Setting(model, on or cluster(), seq_len, batch, stack or Stack(), **more)


def figure(value: float) -> Figure:
    """A number for a test."""
    return Figure(value=value, origin="assumed", source="a test")


def tiers(fast: float, slow: float) -> tuple[Tier, ...]:
    """Links inside and between nodes of eight, bytes per second."""
    return tuple(
        Tier(name=name, num_devices=num, latency_s=figure(5e-6), bytes_per_s=figure(rate))
        for name, num, rate in (("nvlink", 8, fast), ("infiniband", 16, slow))
    )


def faster(tier: Tier, factor: float) -> Tier:
    """The tier with `factor` times the bandwidth: measured curves keep their latency."""

    def scaled(curve: CollectiveCurve) -> CollectiveCurve:
        latency = min(curve.seconds)
        seconds = tuple(latency + (each - latency) / factor for each in curve.seconds)
        return curve.replace(seconds=seconds)

    return tier.replace(
        bytes_per_s=figure(tier.bytes_per_s.value * factor),
        collectives={op: tuple(map(scaled, curves)) for op, curves in tier.collectives.items()},
    )
