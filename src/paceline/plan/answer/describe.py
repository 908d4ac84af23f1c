"""Describe: layouts and answers in words, the same on a terminal and on a page.

Pure functions of `plan.answer.answer.Answer`; they work nothing out.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline.config.job import to_raw
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.stack import Stack
from paceline.config.vision import EfficientNet, ResNet
from paceline.observe.summary import bytes_text, duration_text, step_time_text
from paceline.plan.answer.answer import Answer
from paceline.plan.answer.outlook import Outlook
from paceline.plan.prediction import Prediction
from paceline.plan.search.simple import AS_GOOD

MEMORY_COLOURS = {
    "params": "#2b6cb0",
    "grads": "#3f9bd1",
    "optimizer": "#2f9e8f",
    "activations": "#e2903a",
    "logits": "#d9b13b",
    "gather_buffers": "#8e63ce",
    "comm_buffers": "#c3a6e8",
    "allocator_slack": "#9aa1a9",
    "context": "#68707b",
    "unattributed": "#b39b5d",
}
# Settings that layouts with the same axes may differ in, and how each is said; "" says nothing.
_FINER: Mapping[str, Callable[[Any], str]] = {
    "stages_per_rank": lambda value: f"{value} stages a rank" if value > 1 else "",
    "ulysses": lambda value: f"ulysses {value}" if value > 1 else "",
    "sequence_parallel": lambda value: "sequence parallel" if value else "",
    "precision": str,
    "param_dtype": lambda value: f"{value} parameters",
    "async_tp": lambda value: "async tp" if value else "",
    "compile": lambda value: "compiled" if value else "eager",
}


def headline(found: Answer) -> str:
    """What is planned, on what."""
    return f"{found.job.name}: {', '.join(facts(found))}"


def facts(found: Answer) -> list[str]:
    """The model, the cluster, the work of a step, and whose runtime does it."""
    cluster, model, train = found.job.cluster, found.job.model, found.job.train
    assert isinstance(model, Model | ResNet | EfficientNet)
    nodes = "" if cluster.num_nodes == 1 else f"{cluster.num_nodes:,} nodes of "
    size = f"{train.global_batch:,} x {train.seq_len:,} tokens"
    if found.unit == "images":
        size = f"{train.global_batch:,} images"
    return [
        f"{_count(model.num_params)} parameters",
        f"{nodes}{cluster.devices_per_node} x {cluster.known_device.name}",
        f"{size} a step",
        f"run by {(cluster.stack or Stack()).whose}",
    ]


def counted(found: Answer) -> str:
    """How much was looked at, as a sentence."""
    points, priced = found.counts.points, found.counts.priced
    if points == 1:
        return "one layout agrees with what is fixed"
    if not found.ranked:
        return f"{points:,} layouts can run, and all are too large"
    if points == priced:
        return f"{points:,} layouts can run, and each was priced"
    others = f"the other {points - priced:,} are proved slower or too large"
    return f"{points:,} layouts can run; {priced:,} were priced, {others}"


def detail_text(layout: Layout, told: Iterable[str] = ()) -> str:
    """What a layout says besides its axes: micro-batch, what saves memory, and settings `told`."""
    parts = [f"micro-batch {layout.micro_batch}", *_savings(layout)]
    finer = (_FINER[name](getattr(layout, name)) for name in told)
    return ", ".join([*parts, *filter(None, finer)])


def differing(layouts: Iterable[Layout]) -> tuple[str, ...]:
    """Settings in which layouts with the same axes differ: what a table of them must tell."""
    groups: dict[str, list[Layout]] = {}
    for layout in layouts:
        groups.setdefault(layout.summary, []).append(layout)
    return tuple(
        name
        for name in _FINER
        if any(len({getattr(one, name) for one in group}) > 1 for group in groups.values())
    )


def _savings(layout: Layout) -> list[str]:
    parts = []
    if layout.recompute != "none":
        count = layout.recompute_layers
        layers = "" if count == "all" else f" of {count} layer{'s' if count > 1 else ''}"
        parts.append(f"{layout.recompute} recompute{layers}")
    if layout.offload:
        parts.append(f"offload of {' and '.join(layout.offload)}")
    if layout.optimizer_state == "8bit":
        parts.append("8-bit state")
    return parts


def settings_text(layout: Layout) -> str:
    """A layout in one line."""
    return f"{layout.summary}, {detail_text(layout, ('precision', 'compile'))}"


def all_settings(layout: Layout) -> list[tuple[str, str]]:
    """Every setting of a layout as TOML would say it; equal stages are counted."""
    told = []
    for name, value in to_raw(layout).items():
        if name == "split" and len(value) > 4:
            told.append((name, _counted_runs(value)))
        elif isinstance(value, str):
            told.append((name, f'"{value}"'))
        else:
            told.append((name, str(value).lower() if isinstance(value, bool) else str(value)))
    return told


def _counted_runs(values: list[int]) -> str:
    """ "16 x 2, 15" for [2, 2, ..., 2, 15]."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][1] == value:
            runs[-1][0] += 1
        else:
            runs.append([1, value])
    return ", ".join(f"{count} x {value}" if count > 1 else str(value) for count, value in runs)


def step_title(one: Prediction) -> str:
    """The step and its interval."""
    low, high = one.interval_s
    return f"{step_time_text(one.step_s)} ({step_time_text(low)} to {step_time_text(high)})"


def slower_text(one: Prediction, best: Prediction) -> str:
    """How much slower than the choice a layout is, or that it is as good."""
    by = one.step_s / best.step_s - 1
    if one is best:
        return "–"
    return f"as good ({by:+.1%})" if abs(by) <= AS_GOOD else f"{by:.1%}"


def chosen_text(found: Answer) -> str:
    """What the first layout is among the others."""
    fastest = min(one.step_s for one in found.ranked)
    is_fastest = found.ranked[0].step_s < (1 + 5e-4) * fastest
    return "the fastest" if is_fastest else "the simplest of those as good as the fastest"


def spare_text(one: Prediction, limit_bytes: float | None) -> str:
    """What the heaviest device has left, or lacks."""
    if limit_bytes is None:
        return "how much there is isn't known"
    spare = limit_bytes - one.peak_memory_bytes
    return f"{bytes_text(spare)} to spare" if spare >= 0 else f"{bytes_text(-spare)} too much"


def sentences(found: Answer) -> list[str]:
    """What binds, what the runner-up loses by, and what would change the choice."""
    said = [found.binding.text] if found.binding else []
    said += found.notes
    said += [found.margin.text] if found.margin else []
    said += [flip.text for flip in found.sensitivities if flip.is_other]
    stays = [
        f"{flip.change} ({flip.gain:+.1%})" for flip in found.sensitivities if not flip.is_other
    ]
    return said + ([f"the choice stays with {_listed(stays)}."] if stays else [])


def _listed(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def outlook_rows(run: Outlook, unit: str) -> list[tuple[str, str]]:
    """Label and figure of what a run takes."""
    rows = [
        ("the run", f"{run.steps:,} steps, {_count(run.amount)} {unit}"),
        ("takes", f"{duration_text(run.train_s)} without failures"),
    ]
    if run.mtbf_s is not None and run.checkpoint_every_s is not None and run.goodput is not None:
        rows += [
            ("a failure every", duration_text(run.mtbf_s)),
            ("checkpoint every", f"{duration_text(run.checkpoint_every_s)} (Daly)"),
            ("goodput", goodput_text(run.goodput)),
        ]
    rows += [("device-hours", _figure(run.device_hours)), ("price", _price(run))]
    if run.energy_kwh is None:
        rows.append(("energy", "unknown: the device's power is not known"))
    else:
        rows.append(("energy", f"{_figure(run.energy_kwh)} kWh at most"))
    return [*rows, ("checkpoints", _storage(run))]


def goodput_text(kept: float) -> str:
    """Part of the time that is kept; never more than all but a thousandth."""
    return ">99.9%" if kept >= 0.9995 else f"{kept:.1%}"


def _price(run: Outlook) -> str:
    if run.usd is None or run.usd_per_step is None:
        return "unknown: give --price or cluster.prices"
    return f"{_figure(run.usd)} USD, {run.usd_per_step:.3g} USD a step"


def _storage(run: Outlook) -> str:
    text = f"{run.num_checkpoints} kept, {bytes_text(run.checkpoint_bytes)} each"
    if run.storage_usd_per_month is None:
        return text
    return f"{text}, {_figure(run.storage_usd_per_month)} USD a month"


def _figure(value: float) -> str:
    """Thousands separated; three digits where it is small."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _count(value: float) -> str:
    """A large count in words of three digits: 6.74 billion."""
    for power, word in ((12, "trillion"), (9, "billion"), (6, "million")):
        if value >= 0.9995 * 10**power:
            digits = max(0, 2 - int(f"{value / 10**power:.2e}"[-2:]))
            return f"{value / 10**power:.{digits}f} {word}"
    return f"{value:,.0f}"


def known(best: Prediction) -> str:
    """How much of what the prediction rests on was measured, cited or assumed."""
    count = {"measured": 0, "cited": 0, "assumed": 0}
    for origin in best.assumptions.values():
        word = next((word for word in count if word in origin.split(":")[0]), "measured")
        count[word] += 1
    parts = [f"{number} {word}" for word, number in count.items() if number]
    pace = best.assumptions.get("stack.matmul_time", "").removeprefix("cited: ")
    behind = f"; the pace of kernels and the interval on {pace}" if "like stacks" in pace else ""
    return f"rests on {_listed(parts)} figures, which plan.json (--out) names{behind}"
