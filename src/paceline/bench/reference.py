"""Reference: small Jobs whose steps tell the constants of a software stack apart.

Narrow ones feel the host, wide ones the products, long ones attention; accumulation tells the work
of a micro-batch from that of a step; each axis brings its own exchanges.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from paceline.config.hardware import Cluster
from paceline.config.job import Job, JobSpec
from paceline.plan.resolve import resolve


class DecoderShape(NamedTuple):
    """A small decoder and its samples."""

    hidden_size: int
    seq_len: int
    vocab_size: int
    num_layers: int = 4


_SHAPES = {
    "cpu": {
        "plain": DecoderShape(128, 128, 1024),
        "wide": DecoderShape(384, 128, 2048),
        "long": DecoderShape(128, 512, 1024),
        "narrow": DecoderShape(64, 64, 256),
        "deep": DecoderShape(64, 64, 256, 8),
    },
    "cuda": {
        "plain": DecoderShape(1024, 1024, 32768),
        "wide": DecoderShape(4096, 2048, 32768),
        "long": DecoderShape(1024, 8192, 32768),
        "narrow": DecoderShape(512, 512, 32768),
        "deep": DecoderShape(512, 512, 32768, 8),
    },
}
# Name, shape, samples of a rank, layout.
_ON_ANY: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("plain", "plain", 4, {"micro_batch": 4}),
    ("accumulating", "plain", 4, {"micro_batch": 1}),
    ("wide", "wide", 4, {"micro_batch": 4}),
    ("long", "long", 2, {"micro_batch": 2}),
    ("narrow", "narrow", 4, {"micro_batch": 2}),
    ("recomputing", "plain", 4, {"micro_batch": 4, "recompute": "full"}),
    ("repeating", "narrow", 4, {"micro_batch": 1, "recompute": "full"}),
    ("selecting", "plain", 4, {"micro_batch": 2, "recompute": "selective"}),
)

# Axis, shape, samples of a step for each rank, micro-batch: a usual one over all ranks, and one
# over pairs; that of more layers does so little that what an exchange costs at least decides.
_ON_AN_AXIS: tuple[tuple[str, str, int, int], ...] = (
    ("fsdp", "plain", 4, 2),
    ("fsdp", "deep", 2, 1),
    ("tp", "plain", 4, 2),
    ("tp", "deep", 2, 1),
    ("pp", "plain", 4, 2),
    ("pp", "deep", 2, 1),
    ("cp", "plain", 4, 2),
    ("cp", "long", 2, 1),
)


def reference_jobs(cluster: Cluster) -> list[Job]:
    """Jobs for all ranks of a Cluster: eight, and two for each axis that it has ranks for."""
    return list(_jobs(cluster))


def _jobs(cluster: Cluster) -> Iterator[Job]:
    inside, total = cluster.devices_per_node, cluster.num_devices
    shapes = _SHAPES[cluster.device.kind]
    for name, shape, samples, layout in _ON_ANY:
        chosen = shapes[shape]
        yield small_job(cluster, name, shape_of(chosen), chosen.seq_len, samples * total, layout)
    if total == 1:
        return
    # Sharding goes over all ranks; what exchanges within layers stays inside a node.
    for axis, shape, samples, micro_batch in _ON_AN_AXIS:
        ranks = total if axis == "fsdp" else inside
        if ranks > 1 and shape in ("deep", "long") and inside % 2 == 0:
            ranks = 2  # the rest are replicas
        if ranks > 1:
            chosen = shapes[shape]
            model, seq_len = shape_of(chosen, ranks), _multiple(chosen.seq_len, 2 * ranks)
            layout = {axis: ranks, "dp": total // ranks, "micro_batch": micro_batch}
            name = f"{axis}-{ranks}-{shape}"
            yield small_job(cluster, name, model, seq_len, samples * total, layout)


def shape_of(shape: DecoderShape, ranks: int = 1) -> dict[str, Any]:
    """Settings of a decoder whose heads and layers can be shared out over this many ranks."""
    return {
        "hidden_size": shape.hidden_size,
        "ffn_size": _multiple(3 * shape.hidden_size, ranks),
        "num_heads": _multiple(max(4, shape.hidden_size // 64), ranks),
        "num_layers": max(shape.num_layers, ranks),
        "vocab_size": _multiple(shape.vocab_size, ranks),
    }


def _multiple(value: int, factor: int) -> int:
    """The next multiple."""
    return -(-value // factor) * factor


def small_job(
    cluster: Cluster,
    name: str,
    model: dict[str, Any],
    seq_len: int,
    global_batch: int,
    layout: dict[str, Any],
) -> Job:
    """A Job for a decoder.

    Args:
        cluster: concrete.
        name: for the tables.
        model: as in [model] of a job.toml; key heads and the length of a sequence may be left out.
        seq_len: tokens of a sample.
        global_batch: samples of a step.
        layout: a partial one, as in [layout].

    Raises:
        InputError: this layout can't run.
    """
    defaults = {
        "family": "decoder",
        "num_kv_heads": model["num_heads"],
        "head_dim": max(8, model["hidden_size"] // model["num_heads"] // 2 * 2),
        "max_seq_len": seq_len,
    }
    raw = {
        "name": name,
        "model": {**defaults, **model},
        "layout": layout,
        "train": {"steps": 10_000, "global_batch": global_batch, "seq_len": seq_len},
    }
    return resolve(JobSpec.parse(raw), cluster).job
