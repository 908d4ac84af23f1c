"""Holdings: what each pipeline rank has in memory, in blocks and micro-batches.

Two ways that agree (tests compare them for every schedule):

- `holdings_of` counts along the schedule's own list of actions: a forward pass (F) starts to hold
  the activations of its stage, and the end of its backward pass lets them go. Where the backward
  pass is split, that end is W: what products need for the gradients of their weights stays until
  then, and what I leaves for it beside (`paceline.plan.memory.split_backward`). Only where a
  runtime can't split a block's backward pass in two (it is recomputed, compiled or offloaded, see
  `paceline.parallel.pp.stage`) does I do all of it, and let go of everything.
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

Gradients come with the backward passes: which of a rank's stages had one before its peak is counted
along the list too.

Papers: those of `paceline.plan.schedules.build`; the count for interleaved 1F1B is Megatron's,
https://arxiv.org/abs/2205.05198 (section 4.2.3).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from paceline.config.layout import RECOMPUTE, Layout
from paceline.config.schedule import SCHEDULES, Action, Schedule
from paceline.plan.block_kinds import block_kinds_of
from paceline.plan.memory.activations import block_activations, head_activations
from paceline.plan.memory.split_backward import (
    bytes_left_to_weights,
    has_split_backward,
    has_whole_backward,
)
from paceline.plan.points import Array, Points, Setting
from paceline.plan.stages import Holdings

_ROUNDING = 1e-9  # of sums of bytes


def holdings_of(setting: Setting, layout: Layout, schedule: Schedule | None) -> Holdings:
    """What the ranks of a layout's pipeline hold, counted along the list of actions.

    Args:
        setting: the model, and what a micro-batch is.
        layout: concrete, with its split.
        schedule: of the pipeline; None without one.

    Returns:
        Holdings of s = pp ranks and n = 1 point.
    """
    kinds = block_kinds_of(setting.model)
    if schedule is None:
        layers = np.array([len(kind.layers) for kind in kinds], float)[:, None, None]
        one = np.ones((1, 1))
        several = Points.of([layout], setting).num_micro_batches > 1
        return Holdings(layers, layers, 0 * layers, one, one, one, one * several)
    stage_layers = _layers_of_stages(setting, layout)  # (k, stages)
    points = Points.of([layout], setting)
    split = bool(has_split_backward(points)[0])
    released = ("B", "W") if split else ("B", "I")
    changes = _changes(setting, points, stage_layers, released)
    peaks = [_peak_of(actions, changes) for actions in schedule.actions]
    held = _open_at(peaks, schedule.num_stages, "F", released)
    halves = split * _open_at(peaks, schedule.num_stages, "I", ("W",))
    halves[:, 0] = 0  # its input needs no gradient: nothing is left to the second half
    owned = np.array([_stages_owned(schedule, rank) for rank in range(schedule.num_ranks)])
    blocks = owned * stage_layers.sum(0)  # (s, stages), as held
    through = np.array([_went_through(peak, schedule.num_stages, released) for peak in peaks])
    return Holdings(
        layers=np.einsum("kt,st->ks", stage_layers, owned)[:, :, None],
        in_flight=np.einsum("kt,st->ks", stage_layers, held)[:, :, None],
        halves=np.einsum("kt,st->ks", stage_layers, halves)[:, :, None],
        embeddings=owned[:, :1],
        heads=owned[:, -1:],
        heads_in_flight=held[:, -1:],
        with_grads=((blocks * through).sum(1) / np.maximum(blocks.sum(1), 1))[:, None],
    )


def _layers_of_stages(setting: Setting, layout: Layout) -> Array:
    """Blocks of each kind in each stage: (k, stages)."""
    stage_of = np.repeat(np.arange(len(layout.split)), layout.split)
    return np.array(
        [
            np.bincount(stage_of[list(kind.layers)], minlength=len(layout.split))
            for kind in block_kinds_of(setting.model)
        ],
        float,
    )


def _changes(
    setting: Setting, points: Points, stage_layers: Array, released: tuple[str, str]
) -> dict[str, Array]:
    """Bytes that each kind of action adds to a rank, or takes, by stage."""
    forward = block_activations(setting, points)[:, 0] @ stage_layers  # (stages,)
    forward[-1] += head_activations(setting, points)[0]
    half = bytes_left_to_weights(setting, points)[:, 0] @ stage_layers
    half[0] = 0
    changes = {"F": forward, "I": half, "W": -half}
    return changes | {kind: changes.get(kind, 0) - forward for kind in released}


def _peak_of(actions: Sequence[Action], changes: Mapping[str, Array]) -> Sequence[Action]:
    """A rank's actions up to where what it holds weighs most."""
    held = best = 0.0
    peak_at = 0
    for index, (kind, stage, _) in enumerate(actions):
        change = float(changes[kind][stage])
        held += change
        # The later of equal moments is the worse: gradients are there by then.
        if change >= 0 and held >= best * (1 - _ROUNDING):
            best, peak_at = held, index
    return actions[: peak_at + 1]


def _open_at(
    peaks: Sequence[Sequence[Action]], num_stages: int, opens: str, closes: Sequence[str]
) -> Array:
    """Micro-batches of each stage that one kind of action has begun, and none of others ended, at
    each rank's peak: (s, stages)."""
    counts = np.zeros((len(peaks), num_stages))
    for rank, actions in enumerate(peaks):
        for kind, stage, _ in actions:
            counts[rank, stage] += (kind == opens) - (kind in closes)
    return counts


def _went_through(
    actions: Sequence[Action], num_stages: int, released: tuple[str, str]
) -> list[bool]:
    """Which stages had a backward pass by then, hence gradients."""
    done = {stage for kind, stage, _ in actions if kind in released}
    return [stage in done for stage in range(num_stages)]


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
    count = np.array([len(kind.layers) for kind in block_kinds_of(setting.model)], float)[:, None]
    per_stage = count * np.ceil(setting.model.num_layers / stages) / setting.model.num_layers
    per_stage = np.minimum(per_stage, count)[:, None, :]  # (k, 1, n)
    holds_first = (ranks == 0) | (_is("dualpipe", points) & (ranks == points.pp - 1))
    at_last = np.where(_is_v(points), 0, points.pp - 1)
    holds_last = (ranks == at_last) | (_is("dualpipe", points) & (ranks == 0))
    in_flight = stages_in_flight(points, ranks)
    return Holdings(
        layers=per_stage * np.broadcast_to(points.stages_per_rank, ranks.shape),
        in_flight=per_stage * in_flight,
        halves=per_stage * between_halves(points, ranks, in_flight),
        embeddings=holds_first * 1.0,
        heads=holds_last * 1.0,
        heads_in_flight=holds_last * _heads_in_flight(points),
        with_grads=share_with_grads(points, in_flight),
    )


def stages_in_flight(points: Points, ranks: Array) -> Array:
    """Stages x micro-batches whose activations a pipeline rank holds at its peak: (s, n).

    Args:
        points: n layouts.
        ranks: (s, n) or (s, 1), indices along pp.
    """
    p, m, v = points.pp, points.num_micro_batches, points.stages_per_rank
    waiting = np.where(has_whole_backward(points), ranks, 0)
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


def between_halves(points: Points, ranks: Array, in_flight: Array) -> Array:
    """Stages x micro-batches whose W is still to come after their I at a rank's peak, at most:
    (s, n). In DualPipe they are halves of one stage, if any.

    Args:
        points: n layouts.
        ranks: as in `stages_in_flight`.
        in_flight: what that gives.
    """
    split = has_split_backward(points)
    if not split.any():
        return np.zeros((1, 1))
    in_turn = _is("interleaved_zb", points) | _is("zb_h1", points)
    put_off = np.where(in_turn, ranks + 1, np.where(_is("zbv", points), 2 * ranks + 1, 1))
    # Nothing is put off on the first stage, whose input needs no gradient.
    put_off = np.where(_is("zb_h1", points) & (ranks == 0), 0, put_off)
    return np.where(split, np.minimum(put_off, in_flight), 0) * 1.0


def share_with_grads(points: Points, in_flight: Array) -> Array:
    """At most which share of a pipeline rank's blocks had a backward pass before its last forward
    pass, when it holds as much as ever: (s, n).

    GPipe's ranks had none. Where stages are interleaved, rounds of as many micro-batches as there
    are ranks go through one stage after the other, the last one first.

    Args:
        points: n layouts.
        in_flight: what `stages_in_flight` gives.
    """
    several = np.broadcast_to(points.num_micro_batches > 1, np.shape(in_flight)) * 1.0
    if not np.any(points.pp > 1):
        return several
    passes = points.num_micro_batches * points.stages_per_rank / _directions(points)
    before = np.maximum(passes - in_flight, 0)
    in_rounds = _is("interleaved", points) | _is("interleaved_zb", points)
    rounds = np.ceil(before / points.pp) / points.stages_per_rank
    share = np.where(in_rounds, np.minimum(rounds, 1), before > 0)
    return np.where(points.pp > 1, share, several)


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
