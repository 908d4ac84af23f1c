"""What tests of the planner's time share: a small network, machines, concrete layouts."""

from typing import Any

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
    """A concrete layout: one rank that keeps everything, but for what is given."""
    plain: dict[str, Any] = {
        **dict.fromkeys(("dp", "fsdp", "tp", "pp", "cp", "ep", "ulysses", "micro_batch"), 1),
        "zero": 3 if settings.get("fsdp", 1) > 1 else 0,
        "sequence_parallel": False,
        "schedule": "none",
        "stages_per_rank": 1,
        "split": (),
        "precision": "bf16",
        "recompute": "none",
        "compile": False,
        "bucket_mib": 25.0,
    }
    return Layout(**{**plain, **settings})


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
