"""Why: what decides between the layouts that a search found, in figures and sentences.

- the margin to the runner-up and the terms it loses by,
- the term that binds: the largest one that is no progress,
- sensitivities: what other hardware, or another batch, would make the best choice, of layout and,
  where the Job leaves it open, of the form in which gradients are exchanged,
- where nothing fits: the layout that comes nearest, what fills its memory, and the smallest change
  that fits.

How it works: sensitivities price the layouts at hand anew, by the closed form under changed
settings; they don't search again, so a layout that only another cluster could run is not among
them. Everything is data with one sentence each.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from paceline.config.curves import CollectiveCurve
from paceline.config.errors import InputError
from paceline.config.figure import Figure
from paceline.config.hardware import Tier
from paceline.config.layout import Layout
from paceline.plan.collectives import tiers_of
from paceline.plan.points import Points, Setting
from paceline.plan.prediction import Prediction
from paceline.plan.price.step import predict
from paceline.plan.search.bounds import leanest, least_bytes
from paceline.plan.search.pricing import peak_bytes, step_seconds
from paceline.plan.search.search import Found
from paceline.plan.search.simple import AS_GOOD
from paceline.plan.search.space import SearchConstraints, Space
from paceline.plan.search.tables import joined, take

_PROGRESS = ("matmul", "attention")
_AXES = ("pp", "dp", "fsdp", "cp", "tp", "ep")
_MESHES_AT_ONCE = 2048
# How much mightier a cluster is looked at before one gives up, in nodes.
_MORE_NODES = (2, 4, 8, 16, 32, 64)
_SPEEDS = ((2.0, "twice as fast"), (0.5, "half as fast"))


@dataclass(frozen=True)
class Margin:
    """The runner-up: the fastest layout of another mesh, and why it is not the best."""

    runner_up: Layout
    slower_by: float
    """Share of the best layout's step: 0.04 is 4 % slower."""
    loses_s: Mapping[str, float]
    """Seconds that it takes longer, by term; negative where it gains. They sum to the whole."""
    text: str


@dataclass(frozen=True)
class Binding:
    """What the best layout's step is spent on besides progress."""

    term: str
    share: float
    """Of the step."""
    text: str


@dataclass(frozen=True)
class Sensitivity:
    """What would become of the choice if something were different."""

    change: str
    best: Layout
    exchange: str | None
    """How its data ranks exchange gradients, where the Job leaves that open."""
    is_other: bool
    """Whether another layout or exchange than today's best is the best then."""
    gain: float
    """How much faster samples pass than today: 0.04 is 4 %."""
    text: str


class ChosenLayout(NamedTuple):
    """A layout under some setting."""

    layout: Layout
    exchange: str | None
    """As in Sensitivity."""
    rate: float
    """Samples per second; 0: it doesn't fit."""


ChooseExchange = Callable[[Setting, Layout], ChosenLayout]
"""Chooses the exchange that is best for a layout under a setting."""


@dataclass(frozen=True)
class MemoryShortage:
    """Nothing fits: what comes nearest, and what would help."""

    nearest: Prediction
    term: str
    """Of memory, the largest."""
    lacks_bytes: float
    """Of the heaviest device."""
    change: str | None
    """The smallest change that fits; None: none of those that were tried does."""
    text: str


def margin(found: Found) -> Margin | None:
    """How far the runner-up is behind; None where there is only one mesh."""
    if not found.ranked:
        return None
    best = found.ranked[0]
    others = [each for each in found.ranked if _mesh(each.layout) != _mesh(best.layout)]
    if not others:
        return None
    second = others[0]
    loses = {
        term: second.time_s.get(term, 0.0) - best.time_s.get(term, 0.0)
        for term in dict.fromkeys([*best.time_s, *second.time_s])
    }
    by = second.step_s / best.step_s - 1
    worst = max(loses, key=lambda term: loses[term])
    behind = f"{by:.1%} slower" if by >= 5e-4 else "as fast"
    if by <= -5e-4:
        behind = f"{-by:.1%} faster, less than the forecast's error, and not as simple"
    text = f"{name_of(second.layout, best.layout)} is {behind}"
    if loses[worst] > 0 and by > -5e-4:
        text += f", most of all by {worst} (+{loses[worst]:.3g} s)"
    return Margin(second.layout, by, loses, text + ".")


def binding(best: Prediction) -> Binding:
    """The largest term of a step that is neither products nor attention."""
    waste = {term: seconds for term, seconds in best.time_s.items() if term not in _PROGRESS}
    term = max(waste, key=lambda name: waste[name])
    share = waste[term] / best.step_s
    return Binding(term, share, f"{term} takes {share:.0%} of the step, the most besides progress.")


def sensitivities(
    found: Found, exchanging: ChooseExchange | None = None
) -> tuple[Sensitivity, ...]:
    """What faster links, more memory, a faster device or another batch would change.

    Args:
        found: by a search, which prices gradients as exact sums.
        exchanging: given where the Job leaves the exchange open: it may change with the links, too.
    """
    if not found.ranked:
        return ()
    setting = found.space.setting
    layouts = [each.layout for each in (*found.ranked, *found.near)]
    tight = found.is_tight
    today = _rates(setting, layouts, found.limit_bytes, tight)
    # The one that was chosen, unless the bound on its memory is too far above what it holds.
    best = 0 if today[0] else int(np.argmax(today))
    now = _choice(setting, layouts[best], today[best], exchanging)
    result = []
    for change, changed, limit in _changes(setting, found.limit_bytes):
        rates = _rates(changed, layouts, limit, tight)
        both = dict.fromkeys((best, int(np.argmax(rates))))  # often the same one
        choices = [_choice(changed, layouts[at], rates[at], exchanging) for at in both]
        stays, other = choices[0], choices[-1]
        # Today's choice stays where nothing is clearly better.
        is_close = other.rate <= (1 + AS_GOOD) * stays.rate
        result.append(_sensitivity(change, now, stays if is_close else other))
    return tuple(result)


def _choice(
    setting: Setting, layout: Layout, rate: float, exchanging: ChooseExchange | None
) -> ChosenLayout:
    if exchanging is None or not rate:
        return ChosenLayout(layout, None, rate)
    return exchanging(setting, layout)


def _sensitivity(change: str, now: ChosenLayout, then: ChosenLayout) -> Sensitivity:
    gain = float(then.rate / now.rate - 1)
    is_other = (then.layout, then.exchange) != (now.layout, now.exchange)
    what = f"{name_of(then.layout, now.layout)} becomes best" if is_other else "the choice stays"
    if then.exchange != now.exchange:  # exact sums are chosen where they are nearly the fastest
        what = f"{name_of(then.layout, now.layout)} with {then.exchange} is chosen"
    text = f"{change}: {what}, {gain:+.1%} speed."
    return Sensitivity(change, then.layout, then.exchange, is_other, gain, text)


def _rates(
    setting: Setting, layouts: Sequence[Layout], limit: float | None, tight: bool
) -> np.ndarray:
    """Samples per second by the closed form, 0 for what doesn't fit or can't share the batch."""
    points = Points.of(layouts, setting)
    rates = setting.global_batch / step_seconds(setting, points).step_s
    if limit is not None:
        # The exact count of what is held let today's layouts pass: the bound errs on the safe side.
        rates = np.where(peak_bytes(setting, points, tight) <= 1.02 * limit, rates, 0.0)
    return rates


def _changes(setting: Setting, limit: float | None) -> Iterable[tuple[str, Setting, float | None]]:
    cluster = setting.cluster
    tiers = tiers_of(cluster) if cluster.tiers or _has_links(setting) else ()
    for at, tier in enumerate(tiers):
        for factor, word in _SPEEDS:
            faster = (*tiers[:at], _scaled(tier, factor), *tiers[at + 1 :])
            changed = cluster.replace(tiers=faster, network=None)
            yield f"{tier.name} {word}", replace(setting, cluster=changed), limit
    if (stream := cluster.device.streamed_bytes_per_s) is not None:
        for factor, word in _SPEEDS:
            device = cluster.device.replace(streamed_bytes_per_s=_times(stream, factor))
            changed = cluster.replace(device=device)
            yield f"the streaming of weights {word}", replace(setting, cluster=changed), limit
    if limit is not None:
        yield "a quarter more memory", setting, 1.25 * limit
    yield "twice the batch", replace(setting, global_batch=2 * setting.global_batch), limit


def _has_links(setting: Setting) -> bool:
    try:
        return bool(tiers_of(setting.cluster))
    except InputError:
        return False


def _scaled(tier: Tier, factor: float) -> Tier:
    """Links of another bandwidth and the same latency; curves keep what their least size takes."""
    curves = {
        op: tuple(_curve_scaled(curve, factor) for curve in of_op)
        for op, of_op in tier.collectives.items()
    }
    return tier.replace(bytes_per_s=_times(tier.bytes_per_s, factor), collectives=curves)


def _times(figure: Figure, factor: float) -> Figure:
    return Figure(value=figure.value * factor, origin="assumed", source="what if")


def _curve_scaled(curve: CollectiveCurve, factor: float) -> CollectiveCurve:
    latency_s = curve.seconds[0]
    saved = [max(each - latency_s, 0.0) * (1 - 1 / factor) for each in curve.seconds]
    return curve.replace(seconds=tuple(np.subtract(curve.seconds, saved).tolist()))


def name_of(layout: Layout, other: Layout | None = None) -> str:
    """A layout by its axes ("fsdp 8 x tp 2"), and by what else differs from the other."""
    axes = [f"{axis} {getattr(layout, axis)}" for axis in _AXES if getattr(layout, axis) != 1]
    text = " x ".join(axes) or "one device"
    if other is None:
        return text
    differs = [
        f"{name} {getattr(layout, name)}"
        for name in (
            *("zero", "sequence_parallel", "ulysses", "schedule", "stages_per_rank"),
            *("micro_batch", "precision", "recompute", "recompute_layers", "offload", "compile"),
        )
        if getattr(layout, name) != getattr(other, name)
    ]
    return f"{text} ({', '.join(differs)})" if differs and _mesh(layout) == _mesh(other) else text


def _mesh(layout: Layout) -> tuple[object, ...]:
    return tuple(getattr(layout, axis) for axis in _AXES)


# ---- where nothing fits --------------------------------------------------------------------------


def shortage(found: Found) -> MemoryShortage:
    """What comes nearest to fitting, and the smallest change that fits.

    Tried are, in this order: what `free` allows (offload of activations, 8-bit optimizer state,
    offload of the optimizer, of the parameters), and more nodes.
    """
    assert found.limit_bytes is not None
    space, limit = replace(found.space, tight=True), found.limit_bytes
    nearest = leanest_prediction(space)
    lacks = nearest.needed_bytes - limit
    terms = nearest.heaviest.terms
    term = max(terms, key=lambda name: terms[name])
    change = _smallest_change(space, limit)
    text = (
        f"nothing fits: {name_of(nearest.layout)} comes nearest and lacks {lacks / 1e9:.3g} GB a "
        f"device, with {terms[term] / 1e9:.3g} GB of {term}; "
        + (f"{change} would fit." if change else "no change that was tried fits.")
    )
    return MemoryShortage(nearest, term, lacks, change, text)


def leanest_prediction(space: Space) -> Prediction:
    """The layout whose heaviest device holds the least memory; of equals the fastest."""
    rows = []
    for meshes in space.chunks(_MESHES_AT_ONCE):
        partial_layouts = space.partial_layouts(meshes)
        least = least_bytes(space, partial_layouts)
        least = np.where(
            least > 0, least, np.inf
        )  # 0: none of the leanest memory savings can run there
        rows.append(
            take({**partial_layouts, "least": least}, np.argsort(least, kind="stable")[:50])
        )
    partial_layouts = joined(rows)
    partial_layouts = take(
        partial_layouts, np.argsort(partial_layouts["least"], kind="stable")[:50]
    )
    table = space.completed(space.pipelined(partial_layouts), leanest(space.memory_savings))
    points = space.points(table)
    needs = peak_bytes(space.setting, points, space.tight)
    some = np.flatnonzero(needs <= 1.001 * needs.min())
    step_s = step_seconds(space.setting, points.take(some)).step_s
    return predict(space.setting, space.layout(points, int(some[np.argmin(step_s)])))


def tightness(found: Found) -> str:
    """That the choice fits only as torch gives back what it reserved, as a sentence."""
    best = found.ranked[0]
    needs, reserved = (each / 1e9 for each in (best.needed_bytes, best.peak_memory_bytes))
    return (
        f"it is tight: {needs:.3g} GB a device must be there, and torch would reserve "
        f"{reserved:.3g}; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True leaves fewer holes."
    )


def _smallest_change(space: Space, limit: float) -> str | None:
    setting, constraints = space.setting, space.constraints
    offloads = (("activations",), ("optimizer",), ("activations", "optimizer"), ("params",))
    states = replace(constraints, layout=constraints.layout.replace(optimizer_state="8bit"))
    has_adamw = space.setting.state_bytes is None
    tries = [("8-bit optimizer state", states)] if has_adamw else []
    for offload in offloads:
        if "optimizer" in offload and not has_adamw:
            continue
        layout = constraints.layout.replace(offload=offload)
        tries.append((f"offload of {' and '.join(offload)}", replace(constraints, layout=layout)))
    for change, wish in tries:
        if _fits(setting, wish, limit):
            return change
    for factor in _MORE_NODES:
        cluster = setting.cluster
        more = cluster.replace(num_nodes=factor * cluster.num_nodes)
        if _fits(replace(setting, cluster=more), constraints, limit):
            return f"{factor} times as many nodes ({more.num_nodes})"
    return None


def _fits(setting: Setting, constraints: SearchConstraints, limit: float) -> bool:
    space = replace(Space.of(setting, constraints), tight=True)
    return bool(space.count()) and leanest_prediction(space).needed_bytes <= limit


def explain(found: Found) -> tuple[str, ...]:
    """The sentences of all that decides, the most important first."""
    if not found.ranked:
        return (shortage(found).text,) if found.limit_bytes is not None else ()
    best, runner_up = found.ranked[0], margin(found)
    sentences = [f"{name_of(best.layout)}: {best.step_s:.4g} s a step.", binding(best).text]
    sentences += [tightness(found)] if found.is_tight else []
    sentences += [runner_up.text] if runner_up else []
    return (*sentences, *(flip.text for flip in sensitivities(found)))
