"""Table: what a bench found, in rows of text, and as tables for the person at the terminal."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from paceline.bench.measure import BenchResult
from paceline.config.curves import AttentionCurve, DeviceCurves
from paceline.config.hardware import Cluster, Device, Figure, Tier
from paceline.config.stack import CONSTANTS, Stack, constant
from paceline.observe.summary import bytes_text, step_time_text
from paceline.plan.points import Setting
from paceline.plan.price.step import predict

LINKS = ("collective", "ranks", "smallest", "largest", "of", "bytes/s")
"""Columns of `link_rows`."""
STEPS = ("job", "measured", "fitted", "error")
"""Columns of `step_rows`."""


def summary(cluster: Cluster, outcome: BenchResult) -> RenderableType:
    """The figures that say most of a Cluster and of the measurements behind it."""
    parts: list[RenderableType] = [_grid("This machine", machine_rows(cluster, outcome))]
    parts += [_table(tier_title(tier), LINKS, link_rows(tier)) for tier in cluster.tiers]
    if outcome.steps:
        table = _table("Reference steps", STEPS, step_rows(cluster, outcome))
        table.caption, table.caption_justify = constants_text(cluster.stack), "left"
        parts.append(table)
    return Group(*parts)


def figures(cluster: Cluster, outcome: BenchResult) -> dict[str, Any]:
    """What was measured as plain data, seconds and bytes; the curves are in the Cluster file."""
    device = cluster.known_device
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
    device = cluster.known_device
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


def flops_text(flops_per_s: float) -> str:
    """A rate to three digits."""
    factor, unit = (1e12, "TFLOP/s") if flops_per_s >= 9.995e11 else (1e9, "GFLOP/s")
    value = flops_per_s / factor
    return f"{value:,.1f} {unit}" if value < 99.95 else f"{value:,.0f} {unit}"


def _codec_rows(device: Device) -> Iterator[tuple[str, str]]:
    for name, curve in device.codecs.items():
        largest = 4 * curve.values[-1]
        encode, decode = (
            bytes_text(largest / seconds[-1]) for seconds in (curve.encode, curve.decode)
        )
        yield f"codec {name}", f"encodes {encode}/s of fp32, decodes {decode}/s"


def _grid(title: str, rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_header=False)
    table.add_column(style="bright_black")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _table(title: str, heads: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for index, name in enumerate(heads):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return table


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
                step_time_text(small),
                step_time_text(large),
                bytes_text(curve.bytes[-1]),
                bytes_text(curve.bytes[-1] / large),
            )


def step_rows(cluster: Cluster, outcome: BenchResult) -> Iterator[tuple[str, ...]]:
    """The reference Jobs: measured, and predicted with the constants fitted to them."""
    for each in outcome.steps:
        fitted = predict(Setting.of(each.job.replace(cluster=cluster)), each.job.layout).step_s
        error = fitted / each.step_s - 1
        yield each.job.name, step_time_text(each.step_s), step_time_text(fitted), f"{error:+.1%}"


def constants_text(stack: Stack | None) -> str:
    """The constants of our runtime that were measured, and by what; "" where none was."""
    if stack is None:
        return ""
    told = (f"{name} {constant(stack, name):.3g}" for name in CONSTANTS if name in stack.constants)
    return f"{', '.join(told)} ({stack.origin})"
