"""The page of `paceline bench`: how fast devices and links are, by size, and what nobody measured.

Its frame is that of all pages (`paceline.observe.page`), its tables are the terminal's
(`bench.table`). Python decides what is shown.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

from paceline.bench.measure import PARTS, BenchRequest, BenchResult, Part
from paceline.bench.table import (
    LINKS,
    STEPS,
    attention_peak,
    constants_text,
    flops_text,
    link_rows,
    machine_rows,
    step_rows,
    tier_title,
)
from paceline.config.curves import MemoryCurve
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster, Device, Tier
from paceline.config.outputs import check_output
from paceline.observe.page import COLOURS, Card, Chart, chart_layout, render_page
from paceline.observe.report import fact_rows
from paceline.observe.summary import bytes_text, rate_text, step_time_text
from paceline.train.session import software

_OF_WHAT: Mapping[Part, str] = {
    "device": "products, attention, moving bytes, launching operators, the optimizer",
    "codecs": "coding and decoding what is sent in a compressed form",
    "collectives": "the links: each collective by size and number of ranks",
    "step": "steps of small models, which the constants of our runtime are fitted to",
    "input": "the path of the data",
}


def page_file(out: Path) -> Path:
    """Where the page of a Cluster file stands: beside it, under its name.

    Raises:
        InputError: it can't be written there.
    """
    page = out.with_suffix(".html")
    if page == out:
        raise InputError(
            f"--out {out} is where the page will stand: give the Cluster file another ending, "
            f"such as {out.with_suffix('.toml')}."
        )
    check_output("--out", page)
    return page


def render(found: Cluster, outcome: BenchResult, request: BenchRequest, out: Path) -> str:
    """The page as text: complete HTML without references to anything outside it.

    Args:
        found: what was measured, now and before.
        outcome: of this bench.
        wish: what it was to measure.
        out: the Cluster file.
    """
    device = found.known_device
    tiers = {f"links-{at}": tier for at, tier in enumerate(found.tiers) if [*link_rows(tier)]}
    measured = {part: _measured(part, found, request) for part in PARTS}
    return render_page(
        "paceline.bench",
        "bench.html",
        name=f"Bench of {found.num_devices} x {device.name}",
        subtitle=[request.source, *(["a rough picture (--quick)"] if request.quick else [])],
        next_=_next(device, out),
        lede=_lede(found, [part for part, when in measured.items() if when is None]),
        at=page_file(out),
        cards=list(_cards(found, outcome)),
        charts=_of_device(device) | {name: _links(tier) for name, tier in tiers.items()},
        machine=list(machine_rows(found, outcome)),
        tiers=[(name, tier_title(tier), [*link_rows(tier)]) for name, tier in tiers.items()],
        links=[head.capitalize() for head in LINKS],
        steps=list(step_rows(found, outcome)),
        step_heads=[head.capitalize() for head in STEPS],
        constants=constants_text(found.stack),
        parts=[
            (part, _OF_WHAT[part], when or f"no: paceline bench --only {part} --out {out} does")
            for part, when in measured.items()
        ]
        + list(_others(found)),
        versions=fact_rows(software()),
    )


def _next(device: Device, out: Path) -> str:
    if device.curves is None:
        return f"`paceline bench --out {out}` measures the devices, which the planner needs."
    return f"`paceline plan my.toml --cluster {out}` ranks the layouts of a Job on this machine."


def _lede(found: Cluster, missing: list[Part]) -> str:
    device = found.known_device
    told = [
        f"A rank's {precision} products reach {flops_text(rate)}."
        for precision, rate in _best_products(device).items()
    ]
    told += [
        f"A message over {tier.name} takes {_time_text(tier.latency_s.value)} and moves "
        f"{bytes_text(tier.bytes_per_s.value)}/s."
        for tier in found.tiers
    ]
    if missing:
        told.append(f"Not measured: {', '.join(missing)}.")
    return " ".join(told)


def _cards(found: Cluster, outcome: BenchResult) -> Iterator[Card]:
    device = found.known_device
    for precision, rate in _best_products(device).items():
        yield f"Products, {precision}", flops_text(rate), "of the best size"
    if device.curves is not None and device.curves.memory is not None:
        best = max(_rates(device.curves.memory))
        yield "Moving bytes", f"{bytes_text(best)}/s", "read and written, best size"
    if device.memory_bytes is not None:
        yield "Memory", bytes_text(device.memory_bytes.value), "of a rank"
    if outcome.launching is not None:
        launching = _time_text(outcome.launching.forward_s)
        yield "Launching an operator", launching, "of the host, forward"
    for tier in found.tiers:
        latency = f"between two, {_time_text(tier.latency_s.value)} latency"
        yield f"Link, {tier.name}", f"{bytes_text(tier.bytes_per_s.value)}/s", latency
    if outcome.tokens_per_s is not None:
        yield "Data path", f"{rate_text(outcome.tokens_per_s)}", "tokens a second for each rank"


def _time_text(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else step_time_text(seconds)


def _best_products(device: Device) -> dict[str, float]:
    """FLOP/s by arithmetic."""
    if device.curves is None:
        return {}
    peaks = {precision: device.peak(precision) for precision in device.curves.matmul}
    return {
        precision: peak.value * max(device.curves.matmul[precision].share)
        for precision, peak in peaks.items()
        if peak is not None
    }


# ---- what was measured, and when -----------------------------------------------------------------


def _measured(part: Part, found: Cluster, request: BenchRequest) -> str | None:
    """When and where a part was measured, None where it was not."""
    device, stack = found.known_device, found.stack
    matmul = {} if device.curves is None else device.curves.matmul
    if part == "collectives" and found.num_devices == 1:
        return "nothing to measure: one rank has no links"
    if part in request.parts:
        return "now"
    before = {
        "device": next((curve.source for curve in matmul.values()), None),
        "codecs": next((curve.source for curve in device.codecs.values()), None),
        "collectives": next((tier.latency_s.source for tier in found.tiers), None),
        "step": stack.origin if stack is not None and stack.origin.startswith("fitted") else None,
        "input": None,  # no Cluster has it
    }[part]
    return None if before is None else f"before: {before}"


def _others(found: Cluster) -> Iterator[tuple[str, str, str]]:
    """What other commands measure."""
    if found.num_devices > 1:
        pairs = "every rank to every rank, contention, which link is slow"
        yield "pairs", pairs, "no: paceline bench collectives does"
    if found.known_device.kind == "cuda":
        yield "kernels", "our Triton kernels beside torch's", "no: paceline bench kernels does"


# ---- charts --------------------------------------------------------------------------------------


def _of_device(device: Device) -> dict[str, Chart]:
    """Rates by size, of what was measured."""
    if device.curves is None:
        return {}
    drawn = {"products": _products(device), "attention": _attention(device)}
    if (curve := device.curves.memory) is not None:
        line = _line("memory", curve.bytes, _rates(curve), "%{x:.3~s}B: %{y:.3~s}B/s")
        drawn["memory"] = _chart([line], "bytes read and written", "B/s")
    return {name: chart for name, chart in drawn.items() if chart["data"]}


def _products(device: Device) -> Chart:
    assert device.curves is not None
    traces = []
    for precision, curve in device.curves.matmul.items():
        if (peak := device.peak(precision)) is not None:
            sizes = list(product(curve.m, curve.n, curve.k))
            flops = [2 * m * n * k for m, n, k in sizes]
            rates = [peak.value * share for share in curve.share]
            text = [f"{m:.0f} x {k:.0f} by {k:.0f} x {n:.0f}" for m, n, k in sizes]
            points = _line(precision, flops, rates, "%{text}: %{y:.3~s}FLOP/s")
            traces.append({**points, "mode": "markers", "text": text})
    return _chart(traces, "FLOPs of a product", "FLOP/s")


def _attention(device: Device) -> Chart:
    assert device.curves is not None
    traces = []
    for backend, curve in device.curves.attention.items():
        if (peak := attention_peak(device, curve)) is not None:
            for at, head_dim in enumerate(curve.head_dim):
                shares = curve.forward[at :: len(curve.head_dim)]
                rates = [peak.value * share for share in shares]
                name = f"{backend}, head of {head_dim:.0f}"
                traces.append(_line(name, curve.seq_len, rates, "%{x} tokens: %{y:.3~s}FLOP/s"))
    return _chart(traces, "tokens of a sequence", "FLOP/s")


def _rates(curve: MemoryCurve) -> list[float]:
    return [size / seconds for size, seconds in zip(curve.bytes, curve.seconds, strict=True)]


def _links(tier: Tier) -> Chart:
    """Each collective of the largest group."""
    traces = []
    for op, curves in tier.collectives.items():
        if not curves:
            continue
        curve = max(curves, key=lambda each: each.num_ranks)
        name = f"{op} of {curve.num_ranks}"
        traces.append(_line(name, curve.bytes, curve.seconds, "%{x:.3~s}B: %{y:.3~s}s"))
    return _chart(traces, "bytes of the buffer", "s", type="log", dtick=1)


def _line(name: str, x: Iterable[float], y: Iterable[float], hover: str) -> Chart:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(x),
        "y": [float(f"{value:.4g}") for value in y],
        "hovertemplate": f"{hover}<extra>{name}</extra>",
    }


def _chart(traces: Sequence[Chart], across: str, up: str, **axis: Any) -> Chart:
    """Traces in colours of their own, over the logarithm of a size."""
    for trace, colour in zip(traces, cycle(COLOURS)):
        trace["line"] = {"color": colour, "width": 1.5}
        trace["marker"] = {"color": colour, "size": 5}
    layout = chart_layout(
        {"type": "log", "title": {"text": across}, "tickformat": "~s", "dtick": 1},
        {"title": {"text": up}, "tickformat": "~s", "rangemode": "tozero", **axis},
        showlegend=len(traces) > 1,
    )
    return {"data": list(traces), "layout": layout}
