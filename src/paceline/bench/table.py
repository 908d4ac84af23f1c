"""Table: what a bench found, in rows of text, and as tables for the person at the terminal."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType

from paceline.bench.measure import BenchResult
from paceline.config.curves import AttentionCurve, DeviceCurves
from paceline.config.hardware import Cluster, Device, Figure, Tier
from paceline.config.stack import CONSTANTS, Stack, constant
from paceline.plan.points import Setting
from paceline.plan.price.step import predict
from paceline.render.figures import bytes_text, flops_text, time_text
from paceline.render.table import Pairs, Table

LINKS = ("collective", "ranks", "smallest", "largest", "of", "bytes/s")
"""Columns of `link_rows`."""
STEPS = ("job", "measured", "fitted", "error")
"""Columns of `step_rows`."""


def summary(cluster: Cluster, outcome: BenchResult) -> RenderableType:
    """The figures that say most of a Cluster and of the measurements behind it."""
    steps = Table(
        STEPS,
        list(step_rows(cluster, outcome)),
        title="Reference steps",
        note=constants_text(cluster.stack),
        ruled=True,
    )
    return Group(
        Pairs(list(machine_rows(cluster, outcome)), title="This machine"),
        *(
            Table(LINKS, list(link_rows(tier)), title=tier_title(tier), ruled=True)
            for tier in cluster.tiers
        ),
        *([steps] if steps else []),
    )


def figures(cluster: Cluster, outcome: BenchResult) -> dict[str, Any]:
    """What was measured as plain data, seconds and bytes; the curves are in the Cluster file."""
    device = cluster.device
    bandwidth, stack, launching = device.memory_bytes_per_s, cluster.stack, outcome.launching
    return {
        "device": device.name,
        "devices_per_node": cluster.devices_per_node,
        "num_nodes": cluster.num_nodes,
        "peak_flops": {name: peak.value for name, peak in device.peak_flops.items()},
        "memory_bytes_per_s": None if bandwidth is None else bandwidth.value,
        "launch_s": None if launching is None else launching._asdict(),
        "optimizer_s_per_param": outcome.optimizer_s_per_param,
        "input_tokens_per_s": outcome.tokens_per_s,
        "step_s": {each.job.name: each.step_s for each in outcome.steps},
        "constants": {} if stack is None else dict(stack.constants),
    }


def machine_rows(cluster: Cluster, outcome: BenchResult) -> Iterator[tuple[str, str]]:
    """Name and figures of what is known of a rank and its device."""
    device = cluster.device
    yield "ranks", f"{cluster.devices_per_node} on each of {cluster.num_nodes} x {device.name}"
    if device.memory_bytes is not None:
        yield "memory of a rank", bytes_text(device.memory_bytes.value)
    if device.curves is not None:
        yield from _curve_rows(device, device.curves)
    yield from _codec_rows(device)
    if outcome.launching is not None:
        yield (
            "launching an operator",
            f"{outcome.launching.forward_s * 1e6:.1f} us forward, "
            f"{outcome.launching.backward_s * 1e6:.1f} us backward",
        )
    if outcome.optimizer_s_per_param is not None:
        yield "optimizer", f"{outcome.optimizer_s_per_param * 1e9:.2f} s per 10^9 parameters"
    if outcome.tokens_per_s is not None:
        yield "data path", f"{outcome.tokens_per_s:,.0f} tokens/s for each rank"


def _curve_rows(device: Device, curves: DeviceCurves) -> Iterator[tuple[str, str]]:
    for precision, curve in curves.matmul.items():
        peak = device.peak(precision)
        if peak is not None:
            yield f"products, {precision}", f"{_range(peak, curve.share)}, by size"
    for backend, attention in curves.attention.items():
        peak = attention_peak(device, attention)
        if peak is not None:
            yield f"attention, {backend}", f"{_range(peak, attention.forward)} forward, by size"
    if curves.memory is not None:
        rates = [b / s for b, s in zip(curves.memory.bytes, curves.memory.seconds, strict=True)]
        yield (
            "moving bytes",
            f"{max(rates) / 1e9:,.1f} GB/s at best, {rates[-1] / 1e9:,.1f} at most",
        )


def attention_peak(device: Device, curve: AttentionCurve) -> Figure | None:
    """What the shares of an attention curve are of."""
    return device.peak("bf16" if "in bf16" in curve.source else "fp32")


def _range(peak: Figure, shares: Sequence[float]) -> str:
    low, high = (flops_text(peak.value * share) for share in (min(shares), max(shares)))
    return f"{low} to {high}"


def _codec_rows(device: Device) -> Iterator[tuple[str, str]]:
    for name, curve in device.codecs.items():
        largest = 4 * curve.values[-1]
        encode, decode = (
            bytes_text(largest / seconds[-1]) for seconds in (curve.encode, curve.decode)
        )
        yield f"codec {name}", f"encodes {encode}/s of fp32, decodes {decode}/s"


def tier_title(tier: Tier) -> str:
    """Which links, and how many ranks they join."""
    return f"{tier.name}: {tier.num_devices} ranks"


def link_rows(tier: Tier) -> Iterator[tuple[str, ...]]:
    """Latency and bandwidth of each collective: its smallest and its largest buffer."""
    for op, curves in tier.collectives.items():
        for curve in curves:
            small, large = curve.seconds[0], curve.seconds[-1]
            yield (
                op,
                str(curve.num_ranks),
                time_text(small),
                time_text(large),
                bytes_text(curve.bytes[-1]),
                bytes_text(curve.bytes[-1] / large),
            )


def step_rows(cluster: Cluster, outcome: BenchResult) -> Iterator[tuple[str, ...]]:
    """The reference Jobs: measured, and predicted with the constants fitted to them."""
    for each in outcome.steps:
        fitted = predict(Setting.of(each.job.replace(cluster=cluster)), each.job.layout).step_s
        error = fitted / each.step_s - 1
        yield each.job.name, time_text(each.step_s), time_text(fitted), f"{error:+.1%}"


def constants_text(stack: Stack | None) -> str:
    """The constants of our runtime that were measured, and by what; "" where none was."""
    if stack is None:
        return ""
    told = (f"{name} {constant(stack, name):.3g}" for name in CONSTANTS if name in stack.constants)
    return f"{', '.join(told)} ({stack.origin})"
