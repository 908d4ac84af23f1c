"""Table: what a bench found, for the person at the terminal."""

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from paceline.bench.measure import Outcome
from paceline.config.curves import DeviceCurves
from paceline.config.hardware import Cluster, Device, Tier
from paceline.config.stack import CONSTANTS, constant
from paceline.observe.summary import bytes_text, step_time_text
from paceline.plan.points import Setting
from paceline.plan.price.step import predict


def summary(cluster: Cluster, outcome: Outcome) -> RenderableType:
    """The figures that say most of a Cluster and of the measurements behind it."""
    parts: list[RenderableType] = [_grid("This machine", _rows(cluster, outcome))]
    parts += [_tier_table(tier) for tier in cluster.tiers]
    if outcome.steps:
        parts.append(_step_table(cluster, outcome))
    return Group(*parts)


def figures(cluster: Cluster, outcome: Outcome) -> dict[str, Any]:
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


def _rows(cluster: Cluster, outcome: Outcome) -> Iterator[tuple[str, str]]:
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
            low, high = (peak.value * share / 1e9 for share in (min(curve.share), max(curve.share)))
            yield f"products, {precision}", f"{low:,.1f} to {high:,.1f} GFLOP/s, by size"
    for backend, attention in curves.attention.items():
        peak = device.peak("bf16" if "in bf16" in attention.source else "fp32")
        if peak is not None:
            low, high = (f(attention.forward) * peak.value / 1e9 for f in (min, max))
            yield f"attention, {backend}", f"{low:,.1f} to {high:,.1f} GFLOP/s forward, by size"
    if curves.memory is not None:
        rates = [b / s for b, s in zip(curves.memory.bytes, curves.memory.seconds, strict=True)]
        yield (
            "moving bytes",
            f"{max(rates) / 1e9:,.1f} GB/s at best, {rates[-1] / 1e9:,.1f} at most",
        )


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


def _tier_table(tier: Tier) -> Table:
    """Latency and bandwidth of each collective: its smallest and its largest buffer."""
    table = Table(
        title=f"{tier.name}: {tier.num_devices} ranks", title_justify="left", box=SIMPLE_HEAD
    )
    for name in ("collective", "ranks", "smallest", "largest", "of", "bytes/s"):
        table.add_column(name, justify="left" if name == "collective" else "right")
    for op, curves in tier.collectives.items():
        for curve in curves:
            small, large = curve.seconds[0], curve.seconds[-1]
            table.add_row(
                op,
                str(curve.num_ranks),
                step_time_text(small),
                step_time_text(large),
                bytes_text(curve.bytes[-1]),
                bytes_text(curve.bytes[-1] / large),
            )
    return table


def _step_table(cluster: Cluster, outcome: Outcome) -> Table:
    """The reference Jobs: measured, and predicted with the constants fitted to them."""
    table = Table(title="Reference steps", title_justify="left", box=SIMPLE_HEAD)
    for name in ("job", "measured", "fitted", "error"):
        table.add_column(name, justify="left" if name == "job" else "right")
    for each in outcome.steps:
        fitted = predict(Setting.of(each.job.replace(cluster=cluster)), each.job.layout).step_s
        error = fitted / each.step_s - 1
        table.add_row(
            each.job.name, step_time_text(each.step_s), step_time_text(fitted), f"{error:+.1%}"
        )
    stack = cluster.stack
    if stack is not None:
        fitted_constants = (
            f"{name} {constant(stack, name):.3g}" for name in CONSTANTS if name in stack.constants
        )
        table.caption = f"{', '.join(fitted_constants)} ({stack.origin})"
        table.caption_justify = "left"
    return table
