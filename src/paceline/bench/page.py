"""The page of `paceline bench`: how fast devices and links are, by size, and what nobody measured.

Its tables are the terminal's (`bench.table`).
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle, product
from pathlib import Path
from typing import Any

from paceline.bench.measure import PARTS, BenchRequest, BenchResult, Part
from paceline.bench.table import (
    LINKS,
    STEPS,
    attention_peak,
    constants_text,
    link_rows,
    machine_rows,
    step_rows,
    tier_title,
)
from paceline.config.curves import MemoryCurve
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster, Device, Tier
from paceline.config.outputs import check_output
from paceline.observe.report import fact_rows
from paceline.render.charts import COLOURS, Chart, Plot, curve, plot
from paceline.render.figures import amount_text, bytes_text, flops_text, short_time_text
from paceline.render.page import Card, Page
from paceline.render.parts import Section
from paceline.render.table import Pairs, Table
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
        request: what it was to measure.
        out: the Cluster file.
    """
    device = found.device
    measured = {part: _measured(part, found, request) for part in PARTS}
    page = Page(
        name=f"Bench of {found.num_devices} x {device.name}",
        next=_next(device, out),
        subtitle=[request.source, *(["a rough picture (--quick)"] if request.quick else [])],
        lede=_lede(found, [part for part, when in measured.items() if when is None]),
        cards=list(_cards(found, outcome)),
        parts=(
            Section("This machine", Pairs(list(machine_rows(found, outcome)))),
            *_of_device(device),
            *(each for at, tier in enumerate(found.tiers) for each in _of_tier(at, tier)),
            Section(
                "Reference steps",
                Table(STEPS, list(step_rows(found, outcome))),
                note="Steps of small models, and what the planner predicts for them with the "
                f"constants fitted to them: {constants_text(found.stack)}.",
            ),
            Section(
                "What was measured, and what was not",
                Table(
                    ("part", "of what", "measured"),
                    [*_parts(measured, out), *_others(found)],
                    words=(0, 1, 2),
                ),
            ),
            Section("Versions", Pairs(fact_rows(software()))),
        ),
        at=page_file(out),
    )
    return page.html()


def _next(device: Device, out: Path) -> str:
    if device.curves is None:
        return f"`paceline bench --out {out}` measures the devices, which the planner needs."
    return f"`paceline plan my.toml --cluster {out}` ranks the layouts of a Job on this machine."


def _lede(found: Cluster, missing: list[Part]) -> str:
    device = found.device
    told = [
        f"A rank's {precision} products reach {flops_text(rate)}."
        for precision, rate in _best_products(device).items()
    ]
    told += [
        f"A message over {tier.name} takes {short_time_text(tier.latency_s.value)} and moves "
        f"{bytes_text(tier.bytes_per_s.value)}/s."
        for tier in found.tiers
    ]
    if missing:
        told.append(f"Not measured: {', '.join(missing)}.")
    return " ".join(told)


def _cards(found: Cluster, outcome: BenchResult) -> Iterator[Card]:
    device = found.device
    for precision, rate in _best_products(device).items():
        yield f"Products, {precision}", flops_text(rate), "of the best size"
    if device.curves is not None and device.curves.memory is not None:
        best = max(_rates(device.curves.memory))
        yield "Moving bytes", f"{bytes_text(best)}/s", "read and written, best size"
    if device.memory_bytes is not None:
        yield "Memory", bytes_text(device.memory_bytes.value), "of a rank"
    if outcome.launching is not None:
        launching = short_time_text(outcome.launching.forward_s)
        yield "Launching an operator", launching, "of the host, forward"
    for tier in found.tiers:
        latency = f"between two, {short_time_text(tier.latency_s.value)} latency"
        yield f"Link, {tier.name}", f"{bytes_text(tier.bytes_per_s.value)}/s", latency
    if outcome.tokens_per_s is not None:
        yield "Data path", f"{amount_text(outcome.tokens_per_s)}", "tokens a second for each rank"


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
    device, stack = found.device, found.stack
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


def _parts(measured: Mapping[Part, str | None], out: Path) -> Iterator[tuple[str, str, str]]:
    for part, when in measured.items():
        how = f"no: paceline bench --only {part} --out {out} does"
        yield part, _OF_WHAT[part], when or how


def _others(found: Cluster) -> Iterator[tuple[str, str, str]]:
    """What other commands measure."""
    if found.num_devices > 1:
        pairs = "every rank to every rank, contention, which link is slow"
        yield "pairs", pairs, "no: paceline bench collectives does"
    if found.device.kind == "cuda":
        yield "kernels", "our Triton kernels beside torch's", "no: paceline bench kernels does"


# ---- charts --------------------------------------------------------------------------------------


def _of_device(device: Device) -> Iterator[Section]:
    """Rates by size, of what was measured."""
    if device.curves is None:
        return
    yield Section(
        "Products of matrices",
        Chart("products", _over_sizes(_products(device), "FLOPs of a product", "FLOP/s")),
        note="Every size that was measured, while all ranks measure the same. Small products reach "
        "a small part of the best; the planner looks up each size that a layout has.",
    )
    yield Section(
        "Attention",
        Chart("attention", _over_sizes(_attention(device), "tokens of a sequence", "FLOP/s")),
        note="Causal, forward, by the length of a sequence and the size of a head; half the square "
        "counts.",
    )
    if (moved := device.curves.memory) is not None:
        line = _line("memory", moved.bytes, _rates(moved), "%{x:.3~s}B: %{y:.3~s}B/s")
        yield Section(
            "Moving bytes",
            Chart("memory", _over_sizes([line], "bytes read and written", "B/s"), "low"),
            note="A kernel that only reads and writes so many bytes, as norms and activations do.",
        )


def _of_tier(at: int, tier: Tier) -> Iterator[Section]:
    """Each collective: a chart of the largest group, a table of all."""
    traces = []
    for op, curves in tier.collectives.items():
        if curves:
            widest = max(curves, key=lambda each: each.num_ranks)
            name = f"{op} of {widest.num_ranks}"
            traces.append(_line(name, widest.bytes, widest.seconds, "%{x:.3~s}B: %{y:.3~s}s"))
    title = tier_title(tier)
    chart = _over_sizes(traces, "bytes of the buffer", "s", type="log", dtick=1)
    yield Section(
        f"Links, {title}",
        Chart(f"links-{at}", chart),
        note="Seconds of a collective by the bytes of its whole buffer, of the most ranks that "
        "were measured together.",
    )
    yield Section(f"Each collective, {title}", Table(LINKS, list(link_rows(tier))))


def _products(device: Device) -> Iterator[Plot]:
    assert device.curves is not None
    for precision, measured in device.curves.matmul.items():
        if (peak := device.peak(precision)) is not None:
            sizes = list(product(measured.m, measured.n, measured.k))
            flops = [2 * m * n * k for m, n, k in sizes]
            rates = [peak.value * share for share in measured.share]
            text = [f"{m:.0f} x {k:.0f} by {k:.0f} x {n:.0f}" for m, n, k in sizes]
            points = _line(precision, flops, rates, "%{text}: %{y:.3~s}FLOP/s")
            yield {**points, "mode": "markers", "text": text}


def _attention(device: Device) -> Iterator[Plot]:
    assert device.curves is not None
    for backend, measured in device.curves.attention.items():
        if (peak := attention_peak(device, measured)) is not None:
            for at, head_dim in enumerate(measured.head_dim):
                shares = measured.forward[at :: len(measured.head_dim)]
                rates = [peak.value * share for share in shares]
                name = f"{backend}, head of {head_dim:.0f}"
                yield _line(name, measured.seq_len, rates, "%{x} tokens: %{y:.3~s}FLOP/s")


def _rates(curve: MemoryCurve) -> list[float]:
    return [size / seconds for size, seconds in zip(curve.bytes, curve.seconds, strict=True)]


def _line(name: str, x: Iterable[float], y: Iterable[float], hover: str) -> Plot:
    return curve(name, x, y, hovertemplate=f"{hover}<extra>{name}</extra>")


def _over_sizes(traces: Iterable[Plot], across: str, up: str, **axis: Any) -> Plot:
    """Traces in colours of their own, over the logarithm of a size."""
    drawn = [
        {**trace, "line": {"color": paint, "width": 1.5}, "marker": {"color": paint, "size": 5}}
        for trace, paint in zip(traces, cycle(COLOURS))
    ]
    return plot(
        drawn,
        {"type": "log", "title": across, "tickformat": "~s", "dtick": 1},
        {"title": up, "tickformat": "~s", "rangemode": "tozero", **axis},
        showlegend=len(drawn) > 1,
    )
