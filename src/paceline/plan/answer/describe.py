"""Describe: layouts and answers in words, the same on a terminal and on a page.

Pure functions of `plan.answer.answer.Answer`; they work nothing out.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline.config.job import to_raw
from paceline.config.layout import Layout
from paceline.config.stack import Stack
from paceline.plan.answer.answer import Answer
from paceline.plan.answer.outlook import Outlook
from paceline.plan.goodput import GoodputOutlook
from paceline.plan.prediction import Prediction
from paceline.plan.search.simple import AS_GOOD
from paceline.render.figures import (
    amount_text,
    bytes_text,
    count_text,
    duration_text,
    listed,
    plural,
    share_text,
    time_text,
)

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
    assert model.num_params is not None, "what can be planned can be counted"
    nodes = "" if cluster.num_nodes == 1 else f"{cluster.num_nodes:,} nodes of "
    size = f"{train.global_batch:,} x {train.seq_len:,} tokens"
    if found.unit == "images":
        size = f"{train.global_batch:,} images"
    whose = (cluster.stack or Stack()).whose
    if cluster.stack is None and cluster.device.kind == "other":
        whose += " as if on a GPU (it trains on CUDA devices and CPUs alone)"
    return [
        f"{count_text(model.num_params)} parameters",
        f"{nodes}{cluster.devices_per_node} x {cluster.device.name}",
        f"{size} a step",
        f"run by {whose}",
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
        layers = "" if count == "all" else f" of {plural(count, 'layer')}"
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
    return f"{time_text(one.step_s)} ({time_text(low)} to {time_text(high)})"


def slower_text(one: Prediction, best: Prediction) -> str:
    """How much slower than the choice a layout is, or that it is as good."""
    by = one.step_s / best.step_s - 1
    if one is best:
        return "–"
    return f"as good ({by:+.1%})" if abs(by) <= AS_GOOD else f"{by:.1%}"


def figure_cells(one: Prediction, best: Prediction) -> tuple[str, ...]:
    """Of a table of layouts: step, how much slower than the choice, samples/s, MFU, memory."""
    return (
        time_text(one.step_s),
        slower_text(one, best),
        amount_text(one.tokens_per_s),
        share_text(one.mfu),
        bytes_text(one.peak_memory_bytes),
    )


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
    return said + ([f"the choice stays with {listed(stays)}."] if stays else [])


def outlook_rows(run: Outlook, unit: str) -> list[tuple[str, str]]:
    """Label and figure of what a run takes."""
    rows = [
        ("the run", f"{run.steps:,} steps, {count_text(run.amount)} {unit}"),
        ("takes", f"{duration_text(run.train_s)} without failures"),
    ]
    if run.mtbf_s is not None and run.checkpoint_every_s is not None and run.goodput is not None:
        rows += [
            ("a failure every", duration_text(run.mtbf_s)),
            ("checkpoint every", f"{duration_text(run.checkpoint_every_s)} (Daly)"),
            ("goodput", goodput_text(run.goodput)),
        ]
    rows += [("device-hours", amount_text(run.device_hours)), ("price", _price(run))]
    if run.energy_kwh is None:
        rows.append(("energy", "unknown: the device's power is not known"))
    else:
        rows.append(("energy", f"{amount_text(run.energy_kwh)} kWh at most"))
    return [*rows, ("checkpoints", _storage(run))]


_YEAR_S = 365.25 * 86400
GOODPUT_HEADS = ("failures are met by", "spares", "goodput", "trains", "per node", "takes")


def goodput_cells(found: GoodputOutlook, train_s: float) -> list[tuple[str, ...]]:
    """Of a table with GOODPUT_HEADS: how a run meets its failures, and what that leaves of it.

    Args:
        train_s: seconds of all steps without failures.
    """
    return [
        (
            one.policy.name,
            str(one.policy.spares),
            goodput_text(one.goodput),
            goodput_text(one.ratio),
            goodput_text(one.per_node),
            duration_text(train_s / one.progress) if one.progress > 0 else "never ends",
        )
        for one in found.found
    ]


def goodput_sentences(found: GoodputOutlook) -> list[str]:
    """What the failures are, and which settings suit them."""
    disk, memory = found.found[0].policy, found.found[-1].policy
    best = max(found.found, key=lambda one: one.per_node)
    fails = duration_text(found.node_mtbf_s / found.num_nodes)
    back = duration_text(found.return_s)
    suits = f"checkpoint.every = {max(1, round(disk.interval_s / found.step_s))} suits a run"
    said = [
        f"one of the nodes fails every {fails} and is back after {back}; goodput is the time in "
        "steps that are kept, trains counts the time between starts as well, and per node is the "
        "progress over that of all nodes that are paid for.",
        f"{suits} that is started again (Daly).",
    ]
    if found.lost_with_its_copy_s is not None:
        every = plural(max(1, round(memory.interval_s / found.step_s)), "step")
        years = found.lost_with_its_copy_s / _YEAR_S
        rare = duration_text(found.lost_with_its_copy_s) if years < 1 else f"{years:,.0f} years"
        said.append(
            f"copies every {every} block {share_text(memory.save_s / memory.interval_s)} of the "
            f"time; a node and its copy are lost together every {rare}, which the checkpoint on "
            "disk is for."
        )
    if found.one_fewer < found.num_nodes - 1:
        said.append(
            f"while one of {found.num_nodes:,} nodes is lost {found.one_fewer:,} train, for more "
            "can't share out the micro-batches of a step evenly: choose train.global_batch and "
            "layout.micro_batch so that they can, or have a spare."
        )
    return [*said, f"elastic.spares = {best.policy.spares} pays most ({best.policy.name})."]


def goodput_text(kept: float) -> str:
    """Part of the time that is kept; never more than all but a thousandth."""
    return ">99.9%" if kept >= 0.9995 else f"{kept:.1%}"


def _price(run: Outlook) -> str:
    if run.usd is None or run.usd_per_step is None:
        return "unknown: give --price or cluster.prices"
    return f"{amount_text(run.usd)} USD, {run.usd_per_step:.3g} USD a step"


def _storage(run: Outlook) -> str:
    text = f"{run.num_checkpoints} kept, {bytes_text(run.checkpoint_bytes)} each"
    if run.storage_usd_per_month is None:
        return text
    return f"{text}, {amount_text(run.storage_usd_per_month)} USD a month"


HARDWARE_HEADS = ("figure", "", "source")


def hardware_rows(best: Prediction) -> list[tuple[str, str, str]]:
    """What the prediction takes of devices and links: name, whether it is measured, cited or
    assumed, and the source."""
    rows = []
    for name, origin in best.assumptions.items():
        room, _, figure = name.partition(".")
        if room in ("device", "links"):
            mark, found, source = origin.partition(": ")
            if not found or " " in mark:  # a measured curve, by its source alone
                mark, source = "measured", origin
            rows.append((figure.replace("_", " "), mark, source))
    return rows


def known(best: Prediction) -> str:
    """How much of what the prediction rests on was measured, cited or assumed."""
    count = {"measured": 0, "cited": 0, "assumed": 0}
    for origin in best.assumptions.values():
        word = next((word for word in count if word in origin.split(":")[0]), "measured")
        count[word] += 1
    parts = [f"{number} {word}" for word, number in count.items() if number]
    pace = best.assumptions.get("stack.matmul_time", "").removeprefix("cited: ")
    behind = f"; the pace of kernels and the interval on {pace}" if "like stacks" in pace else ""
    return f"rests on {listed(parts)} figures, which plan.json (--out) names{behind}"
