"""Holdings: what each pipeline rank has in memory, in blocks and micro-batches.

Two ways that agree (tests compare them for every schedule):

- `holdings_of` counts along the schedule's own list of actions: a forward pass (F) starts to hold
  the activations of its stage, and the end of its backward pass lets them go. Where the backward
  pass is split, that end is W: what products need for the gradients of their weights stays until
  then. Only where a runtime can't split a block's backward pass in two (it is recomputed, compiled
  or offloaded, see `paceline.parallel.pp.stage`) does I do all of it, and let go of everything.
- `bounding_holdings` has a closed form per schedule, for columns of layouts.

Which moment of a list is the peak depends on what a block and the logits weigh; the list takes
their bytes, from `paceline.plan.memory`.

In units of one stage and one micro-batch, rank r of p with m micro-batches and v stages per rank
holds at most

| schedule | W lets go | I lets go |
|---|---|---|
| gpipe | m | |
| 1f1b | min(m, p - r) | |
| interleaved | min(mv, (v-1)p + 2(p-1-r) + 1) | |
| zb_h1 | min(m, p) | min(m, p - r) |
| interleaved_zb | min(mv, vp) | min(mv, vp - r) |
| zbv | min(2m, m+1+r, 2p) | the same |
| dualpipev | min(2m, m+1+r, 2p+1) | the same |
| dualpipe | as dualpipev of p/2 ranks and m/2 micro-batches, at the nearer end's rank | the same |

Papers: those of `paceline.plan.schedules.build`; the count for interleaved 1F1B is Megatron's,
https://arxiv.org/abs/2205.05198 (section 4.2.3).
"""

from collections.abc import Sequence

import numpy as np

from paceline.config.layout import Layout
from paceline.config.schedule import Action, Schedule
from paceline.plan.kinds import kinds_of
from paceline.plan.memory.activations import held_by_block, held_by_head
from paceline.plan.points import RECOMPUTE, SCHEDULES, Array, Points, Setting
from paceline.plan.stages import Holdings


def holdings_of(setting: Setting, layout: Layout, schedule: Schedule | None) -> Holdings:
    """What the ranks of a concrete layout's pipeline hold, counted along the list of actions.

    Args:
        setting: the model, and what a micro-batch is.
        layout: concrete, with its split.
        schedule: of the pipeline; None without one.

    Returns:
        Holdings of s = pp ranks and n = 1 point.
    """
    kinds = kinds_of(setting.model)
    if schedule is None:
        layers = np.array([len(kind.layers) for kind in kinds], float)[:, None, None]
        one = np.ones((1, 1))
        return Holdings(layers, layers, one, one, one)
    stage_layers = _layers_of_stages(setting, layout)  # (k, stages)
    weights = _weights(setting, layout, stage_layers)
    released = ("B", "I") if _backward_is_whole(layout) else ("B", "W")
    counts = [
        _held_at_peak(actions, schedule.num_stages, weights, released)
        for actions in schedule.actions
    ]
    owned = np.array([_stages_owned(schedule, rank) for rank in range(schedule.num_ranks)])
    held = np.array(counts, float)  # (s, stages), as owned
    return Holdings(
        layers=np.einsum("kt,st->ks", stage_layers, owned)[:, :, None],
        in_flight=np.einsum("kt,st->ks", stage_layers, held)[:, :, None],
        embeddings=owned[:, :1],
        heads=owned[:, -1:],
        heads_in_flight=held[:, -1:],
    )


def _layers_of_stages(setting: Setting, layout: Layout) -> Array:
    """Blocks of each kind in each stage: (k, stages)."""
    assert layout.split != "auto"
    stage_of = np.repeat(np.arange(len(layout.split)), layout.split)
    return np.array(
        [
            np.bincount(stage_of[list(kind.layers)], minlength=len(layout.split))
            for kind in kinds_of(setting.model)
        ],
        float,
    )


def _weights(setting: Setting, layout: Layout, stage_layers: Array) -> list[float]:
    """Bytes that one micro-batch leaves in each stage."""
    points = Points.of([layout], setting)
    weights = held_by_block(setting, points)[:, 0] @ stage_layers  # (stages,)
    weights[-1] += held_by_head(setting, points)[0]
    return [float(weight) for weight in weights]


def _backward_is_whole(layout: Layout) -> bool:
    """Whether our runtime does all of a split backward pass in its first half."""
    return bool(
        layout.compile is True or layout.recompute != "none" or "activations" in layout.offload
    )


def _held_at_peak(
    actions: Sequence[Action],
    num_stages: int,
    weights: Sequence[float],
    released: tuple[str, str],
) -> list[int]:
    """Micro-batches of each stage that a rank holds when what it holds weighs most."""
    held = best = 0.0
    peak_at = 0
    for index, (kind, stage, _) in enumerate(actions):
        if kind == "F":
            held += weights[stage]
            # The later of equal moments is the worse: gradients are there by then.
            if held >= best:
                best, peak_at = held, index
        elif kind in released:
            held -= weights[stage]
    counts = [0] * num_stages
    for kind, stage, _ in actions[: peak_at + 1]:
        if kind == "F":
            counts[stage] += 1
        elif kind in released:
            counts[stage] -= 1
    return counts


def _stages_owned(schedule: Schedule, rank: int) -> list[int]:
    """How many copies of each stage live on a rank."""
    owned = [0] * schedule.num_stages
    for _, stage in schedule.stages_of(rank):
        owned[stage] += 1
    return owned


# ---- closed forms ------------------------------------------------------------------------------


def bounding_holdings(setting: Setting, points: Points) -> Holdings:
    """The most that three ranks of each point's pipeline hold: first, heaviest inner, last.

    Stages are taken to have as many layers as the largest of an even split, of each kind in
    proportion. A pipeline of one or two ranks names the same rank twice.

    Returns:
        Holdings of s = 3 classes of rank and the points' n.
    """
    ranks = _bounding_ranks(points)  # (s, n)
    stages = points.pp * points.stages_per_rank / _directions(points)
    count = np.array([len(kind.layers) for kind in kinds_of(setting.model)], float)[:, None]
    per_stage = count * np.ceil(setting.model.num_layers / stages) / setting.model.num_layers
    per_stage = np.minimum(per_stage, count)[:, None, :]  # (k, 1, n)
    holds_first = (ranks == 0) | (_is("dualpipe", points) & (ranks == points.pp - 1))
    at_last = np.where(_is_v(points), 0, points.pp - 1)
    holds_last = (ranks == at_last) | (_is("dualpipe", points) & (ranks == 0))
    in_flight = stages_in_flight(points, ranks)
    return Holdings(
        layers=per_stage * np.broadcast_to(points.stages_per_rank, ranks.shape),
        in_flight=per_stage * in_flight,
        embeddings=holds_first * 1.0,
        heads=holds_last * 1.0,
        heads_in_flight=holds_last * _heads_in_flight(points),
    )


def stages_in_flight(points: Points, ranks: Array) -> Array:
    """Stages x micro-batches whose activations a pipeline rank holds at its peak: (s, n).

    Args:
        points: n layouts.
        ranks: (s, n) or (s, 1), indices along pp.
    """
    p, m, v = points.pp, points.num_micro_batches, points.stages_per_rank
    is_whole = (points.compile | (points.recompute != 0) | points.offload_activations).astype(bool)
    waiting = np.where(is_whole, ranks, 0)
    half, near = p // 2, np.minimum(ranks, p - 1 - ranks)
    forms = {
        "none": np.ones_like(ranks * m),
        "gpipe": m,
        "1f1b": np.minimum(m, p - ranks),
        "interleaved": np.minimum(m * v, (v - 1) * p + 2 * (p - 1 - ranks) + 1),
        "zb_h1": np.minimum(m, p - waiting),
        "interleaved_zb": np.minimum(m * v, v * p - waiting),
        "zbv": np.minimum(np.minimum(2 * m, m + 1 + ranks), 2 * p),
        "dualpipev": np.minimum(np.minimum(2 * m, m + 1 + ranks), 2 * p + 1),
        "dualpipe": np.minimum(np.minimum(m, m // 2 + 1 + near), 2 * half + 1),
    }
    shape = np.broadcast_shapes(np.shape(ranks), np.shape(m), np.shape(points.schedule))
    held = np.zeros(shape)
    for index in np.unique(points.schedule):
        held = np.where(points.schedule == index, forms[SCHEDULES[index]], held)
    return held


def _heads_in_flight(points: Points) -> Array:
    """Micro-batches whose logits wait: the last stage's backward pass follows its forward pass at
    once but in GPipe, and where W is put off."""
    waits = _is("gpipe", points) * points.num_micro_batches
    split = _is("zb_h1", points) | _is("interleaved_zb", points)
    is_eager = ~(points.compile | (points.recompute != RECOMPUTE.index("none"))).astype(bool)
    put_off = (split & is_eager) * np.minimum(points.num_micro_batches, points.pp)
    return np.maximum(np.maximum(waits, put_off), 1)


def _bounding_ranks(points: Points) -> Array:
    """First rank, heaviest inner rank, last rank: (3, n)."""
    inner = np.where(_is_v(points), points.pp - 2, 1)
    inner = np.where(_is("dualpipe", points), points.pp // 2 - 1, inner)
    inner = np.clip(inner, np.minimum(1, points.pp - 1), points.pp - 1)
    first, inner, last = np.broadcast_arrays(np.zeros_like(inner), inner, points.pp - 1)
    return np.stack([first, inner, last])


def _is(schedule: str, points: Points) -> Array:
    return points.schedule == SCHEDULES.index(schedule)


def _is_v(points: Points) -> Array:
    return _is("zbv", points) | _is("dualpipev", points)


def _directions(points: Points) -> Array:
    return np.where(_is("dualpipe", points), 2, 1)
