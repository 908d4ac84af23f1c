"""Pipelined: from the seconds of a pipeline's stages to those of a step.

Two ways, of one signature (`Pipeline`): `simulated` executes the list of actions that the runtime
will execute, with each stage's own seconds; `closed_form` prices columns of layouts by the
published formulas, adapted to unequal stages, where no list is at hand. A test holds the second
against the first.

A step of m micro-batches takes what the busiest rank computes, plus its waiting (the bubble). With
unequal stages the busiest rank sets the pace of the others; what comes before its first and after
its last micro-batch is the other stages' work: T = sum T_i + (m - 1) max T_i (Alpa,
https://arxiv.org/abs/2201.12023), divided by the stages of a rank where they are interleaved
(https://arxiv.org/abs/2104.04473). The zero-bubble formulas are those that
papers have (benchmarks/published_bubbles.py), with the same adaptation.

Ranks on a CPU share its cores, and one that waits leaves them to the others. Where the device has a
curve of that (`config.curves.SharingCurve`), the list is executed with it, so that a bubble costs
less than it would where every rank has a device of its own (`plan.schedules.contention`).

Transfers between stages run beside the computing, but each must be waited for: a stage that has few
micro-batches under way stands still while one travels there and back.

Legend of shapes: s stages (or classes of them), n points.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.schedule import SCHEDULES, Schedule
from paceline.config.stack import Stack
from paceline.plan.block_kinds import BlockKind
from paceline.plan.points import Array, Points, Setting
from paceline.plan.price.core_contention import core_contention_of, paces, sharing_curve_of
from paceline.plan.schedules import build_schedule
from paceline.plan.schedules.contention import scatter_wait_s, shared_timeline, stretch_factors
from paceline.plan.schedules.timing import StageCost, Timed, makespan, schedule_end_s
from paceline.plan.stages import StageWork


class StagePasses(NamedTuple):
    """Seconds of each stage for one micro-batch: (s, n) each."""

    forward_s: Array
    input_grad_s: Array
    weight_grad_s: Array

    @property
    def whole_s(self) -> Array:
        """Forward and backward."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s


class PipelineRun(NamedTuple):
    """What became of a step's micro-batches."""

    makespan_s: Array
    """(n,), from the first action's start to the last one's end."""
    work: Array
    """(s, n): how many micro-batches of each stage the busiest rank works on."""
    spent: StagePasses
    """(s, n): the same by pass, each for the share of its seconds that it took; less than `work`
    where ranks that wait leave this one their cores."""
    scattered_s: Array = np.zeros(1)
    """(n,) or (1,), what ranks wait besides because passes of one length scatter."""

    def seconds_of(self, passes: StagePasses) -> Array:
        """Seconds (n,) of the busiest rank in passes, or in a part of them."""
        each = (spent * s for spent, s in zip(self.spent, passes, strict=True))
        return sum((rows.sum(0) for rows in each), np.zeros(1))


Pipeline = Callable[[Setting, Points, StageWork, StagePasses, Array], PipelineRun]
"""Maps a setting, points, their stages, the stages' seconds and the seconds of a transfer (n,) to
what became of them."""

_INDEX = {name: index for index, name in enumerate(SCHEDULES)}
_V_SHAPED = [_INDEX["zbv"], _INDEX["dualpipev"], _INDEX["dualpipe"]]
# Classes of stage in columns.
_FIRST, _INNER, _LAST, _REST = range(4)
_CLASSES = 4


# ---- which stage holds what --------------------------------------------------------------------


def stages_of(setting: Setting, layout: Layout, kinds: tuple[BlockKind, ...]) -> StageWork:
    """Every stage of a layout; one, where there is no pipeline: arrays (.., s, 1)."""
    split = layout.split or (setting.model.num_layers,)
    ends = np.cumsum(split)
    starts = ends - np.array(split)
    layers = np.array(
        [
            [
                sum(start <= layer < end for layer in kind.layers)
                for start, end in zip(starts, ends, strict=True)
            ]
            for kind in kinds
        ],
        float,
    )
    first, last = np.arange(len(split)) == 0, np.arange(len(split)) == len(split) - 1
    return StageWork(layers[:, :, None], first[:, None], last[:, None], np.ones((len(split), 1)))


def bounding_stages(
    model: Model, points: Points, kinds: tuple[BlockKind, ...], head_layers: Array | float
) -> StageWork:
    """Four classes of stage for columns, with layers as they'd be split: the first, the inner ones
    of the rank that has most of them, the last, and the rest, which no busiest rank holds.

    Args:
        model: the network.
        points: columns.
        kinds: of its blocks; each stage is taken to have its share of all kinds.
        head_layers: how many layers the head weighs as much as.
    """
    stages, total = points.num_stages, float(model.num_layers)
    several = stages > 1
    inner, early, last = _even_split(total, points, head_layers)
    first, last = np.where(several, early, total), np.where(several, last, 0.0)
    num_inner = np.clip(np.maximum(stages / points.pp, points.num_directions), 0, stages - 2)
    num_inner = np.maximum(num_inner, 0)
    num_rest = np.maximum(stages - 2 - num_inner, 0)
    rest = np.maximum(total - first - last - num_inner * inner, 0) / np.maximum(num_rest, 1)
    layers = np.stack(np.broadcast_arrays(first, inner, last, rest))
    count = np.stack(np.broadcast_arrays(1.0, num_inner, np.where(several, 1.0, 0.0), num_rest))
    shares = np.array([len(kind.layers) / total for kind in kinds])
    number = np.arange(_CLASSES)[:, None]
    has_head = np.where(several, number == _LAST, number == _FIRST)
    return StageWork(
        shares[:, None, None] * layers, (number == _FIRST) & (count > 0), has_head, count
    )


def _even_split(
    total: float, points: Points, head_layers: Array | float
) -> tuple[Array, Array, Array]:
    """Layers of an inner stage of the busiest rank, of an early stage, and of the last one.

    As `split_layers`: the heaviest stage is as light as can be, and of the others those with a
    layer more come last. They go round the ranks, so that each has about as many of them.
    """
    stages = points.num_stages
    ideal = (total + head_layers) / stages - head_layers
    others = np.maximum(stages - 1, 1)
    best_last: Array = np.zeros(1)
    best: Array = np.full(1, np.inf)
    for candidate in (np.floor(ideal), np.ceil(ideal)):
        last = np.clip(candidate, 1, np.maximum(total - others, 1))
        early = np.floor((total - last) / others)
        num_larger = total - last - early * others
        heaviest = np.maximum(early + (num_larger > 0), last + head_layers)
        squares = others * early**2 + num_larger * (2 * early + 1) + (last + head_layers) ** 2
        # The lightest, of those the most even, and of those the one that is lighter early on.
        cost = heaviest + 1e-6 * squares
        better = cost <= best * (1 + 1e-12)
        best_last, best = np.where(better, last, best_last), np.where(better, cost, best)
    left = np.maximum(total - best_last, 0)
    early = np.floor(left / others)
    num_larger = left - early * others
    ranks = points.pp / points.num_directions
    per_rank = np.maximum(stages / ranks, 1)
    # There and back, the two middle stages share a rank: both are larger where half of all are.
    round_trip = np.where(num_larger > 0, 1 + np.floor(num_larger / (stages / 2)), 0)
    is_v = np.isin(points.schedule, _V_SHAPED)
    most = np.where(is_v, round_trip, np.ceil(num_larger / np.maximum(ranks, 1)))
    larger = np.minimum(most / per_rank, 1)
    return early + larger, early, best_last


def with_transfers(
    stack: Stack, points: Points, passes: StagePasses, hop_s: Array
) -> tuple[StagePasses, Array]:
    """The passes, and the seconds of a transfer beside them: where a stack doesn't overlap its
    transfers, each pass waits for what it receives and for what it sends.
    """
    if stack.overlaps_pp:
        return passes, hop_s
    both = np.where(points.pp > 1, 2 * hop_s, 0.0)
    waiting = StagePasses(passes.forward_s + both, passes.input_grad_s + both, passes.weight_grad_s)
    return waiting, np.zeros_like(hop_s)


def paired_share(points: Points) -> Array:
    """Share of a rank's forward passes that a backward pass of another micro-batch may be worked on
    with: (n,).

    Without a pipeline all but the first one. Else those of the rank that the others wait for: the
    last one of interleaved stages goes (v - 1) p + 1 passes ahead (Megatron's schedule for it has
    the one more), DualPipeV's 2 p of 2 m. Other schedules have no pass to spare: of two stages that
    wait for each other's micro-batch at once, neither would go on.
    """
    ahead = {
        "none": np.ones(1),
        "interleaved": (points.stages_per_rank - 1) * points.pp + 1,
        "dualpipev": 2 * points.pp,
        "dualpipe": points.pp,
    }
    passes = points.num_micro_batches * points.stages_per_rank / points.num_directions
    alone = np.broadcast_arrays(*(ahead.get(name, passes) for name in SCHEDULES))
    return np.maximum(1 - np.choose(points.schedule, alone) / passes, 0.0)


# ---- without a pipeline, and by simulation -----------------------------------------------------


def one_stage(
    setting: Setting, points: Points, stages: StageWork, passes: StagePasses, hop_s: Array
) -> PipelineRun:
    """No pipeline: one micro-batch after the other."""
    work = np.broadcast_to(points.num_micro_batches, passes.forward_s.shape)
    return PipelineRun((work * passes.whole_s).sum(0), work, StagePasses(work, work, work))


@lru_cache(maxsize=64)
def schedule_of(name: str, num_ranks: int, num_micro_batches: int, per_rank: int) -> Schedule:
    """The list of actions; kept, for predictions of many layouts ask for the same ones."""
    return build_schedule(name, num_ranks, num_micro_batches, per_rank)


def schedule_for(setting: Setting, layout: Layout) -> Schedule | None:
    """The schedule of a layout; None without a pipeline."""
    if layout.pp == 1:
        return None
    assert layout.schedule != "none"
    batches = setting.global_batch // (layout.num_data_ranks * layout.micro_batch)
    return schedule_of(layout.schedule, layout.pp, batches, layout.stages_per_rank)


def simulated(schedule: Schedule) -> Pipeline:
    """Execute the list of one layout (n = 1), with every stage's own seconds."""

    def run(
        setting: Setting, points: Points, stages: StageWork, passes: StagePasses, hop_s: Array
    ) -> PipelineRun:
        cost = cost_of(passes, float(hop_s[0]))
        work = work_of_ranks(schedule)
        busiest = int(np.argmax(work @ passes.whole_s[:, 0]))
        own = work[busiest][:, None]
        contention = core_contention_of(setting, points)
        if contention is None:
            return PipelineRun(
                np.array([makespan(schedule, cost)]), own, StagePasses(own, own, own)
            )
        rows = shared_timeline(schedule, cost, contention)
        scattered_s = np.array([scatter_wait_s(schedule, cost, contention)])
        return PipelineRun(
            np.array([schedule_end_s(rows)]), own, _spent(rows[busiest], cost), scattered_s
        )

    return run


def cost_of(passes: StagePasses, p2p_s: float) -> StageCost:
    """What the actions of one layout (n = 1) cost."""
    forward, input_grad, weight_grad = (seconds[:, 0].tolist() for seconds in passes)
    return StageCost(forward, input_grad, weight_grad, p2p_s)


def work_of_ranks(schedule: Schedule) -> Array:
    """How many micro-batches of each stage each rank does: (ranks, s)."""
    batches = schedule.num_micro_batches / len(schedule.stage_ranks)
    work = np.zeros((schedule.num_ranks, schedule.num_stages))
    for ranks in schedule.stage_ranks:
        work[list(ranks), np.arange(schedule.num_stages)] += batches
    return work


def _spent(row: Sequence[Timed], cost: StageCost) -> StagePasses:
    """How many micro-batches of each stage's passes (s, 1) a rank was busy with, each for the share
    of its seconds at pace 1 that it took."""
    spent = {kind: np.zeros((len(cost.forward_s), 1)) for kind in "FIW"}
    for timed, stretch in zip(row, stretch_factors(row, cost), strict=True):
        for kind in "IW" if timed.action.kind == "B" else timed.action.kind:
            spent[kind][timed.action.stage] += stretch
    # A first stage has its whole backward pass in I, and nothing to do in W.
    late = np.where(np.array(cost.weight_grad_s)[:, None] > 0, spent["W"], spent["I"])
    return StagePasses(spent["F"], spent["I"], late)


# ---- closed forms ------------------------------------------------------------------------------


def closed_form(
    setting: Setting, points: Points, stages: StageWork, passes: StagePasses, hop_s: Array
) -> PipelineRun:
    """The step of columns with the classes of stage of `bounding_stages`."""
    work = _busiest_class(points, stages, passes.whole_s)
    busy_s = (work * passes.whole_s).sum(0)
    waits = [
        stages.count * seconds
        for seconds in (passes.forward_s, passes.input_grad_s, passes.weight_grad_s)
    ]
    forward, input_grad, weight_grad = (seconds.sum(0) for seconds in waits)
    micro_batches = np.maximum(points.num_micro_batches, 1)
    own = [(work * seconds).sum(0) / micro_batches for seconds in passes]
    per_rank = np.maximum(points.num_stages / points.pp, 1)
    # What the other ranks' stages do while the busiest one waits.
    others = [
        np.maximum(all_ranks - own_rank, 0) / per_rank
        for all_ranks, own_rank in zip((forward, input_grad, weight_grad), own, strict=True)
    ]
    bubble = np.where(points.pp > 1, _bubble(points, *others), 0.0)
    even_s = (stages.count * passes.whole_s).sum(0) * micro_batches / points.pp
    stretch = _stretch(setting, points, busy_s, bubble, even_s)
    spent = work * stretch
    end_s = (busy_s + bubble) * stretch + _hops(points, passes, hop_s)
    return PipelineRun(end_s, work, StagePasses(spent, spent, spent))


def _stretch(
    setting: Setting, points: Points, busy_s: Array, bubble_s: Array, even_s: Array
) -> Array:
    """Seconds of a pipeline whose ranks share cores over those without: (n,).

    While it fills and drains, twice the bubble, the ranks start or end one after the other; in
    between as many compute as have something to do on average. It never takes less than the work
    of all ranks while all compute.
    """
    if sharing_curve_of(setting) is None:
        return np.ones(1)
    most = int(points.pp.max())
    counts = [
        np.where(k < points.pp, 1 / paces(setting, points, np.full(1, k)), 0.0)
        for k in range(1, most)
    ]
    waiting = sum(counts, np.zeros(1)) / np.maximum(points.pp - 1, 1)
    end_s = busy_s + bubble_s
    partly_s = np.minimum(2 * bubble_s, end_s)
    steady = 1 / paces(setting, points, points.pp * np.minimum(even_s / busy_s, 1.0))
    shared_s = np.maximum((end_s - partly_s) * steady + partly_s * waiting, even_s)
    return np.where(points.pp > 1, np.minimum(shared_s / end_s, 1.0), 1.0)


def _busiest_class(points: Points, stages: StageWork, whole_s: Array) -> Array:
    """Micro-batches of each class that the busiest rank works on: (4, n).

    Stages go round the ranks, so that the first and the last live on different ones, or there and
    back (V), so that they share a rank; DualPipe's ranks hold one stage of each direction.
    """
    per_rank, one, none = points.stages_per_rank, np.ones(1), np.zeros(1)
    both_ends = np.where(np.isin(points.schedule, _V_SHAPED), 1.0, 0.0)
    others = np.maximum(per_rank - 1 - both_ends, 0)
    # A rank with an end of the network has the smaller ones of the inner stages.
    smaller = np.where(stages.count[_REST] >= others, others, 0)
    candidates = [
        (one, others - smaller, both_ends, smaller),
        (none, per_rank, none, none),
        (both_ends, others - smaller, one, smaller),
    ]
    share = 1 / points.num_directions
    work = np.stack([np.stack(np.broadcast_arrays(*each)) for each in candidates]) * share
    alone = np.eye(_CLASSES)[_FIRST][:, None]
    work = np.where(points.pp > 1, np.maximum(work, 0), alone)  # (candidates, 4, n)
    exists = ((work == 0) | (stages.count > 0)).all(1)
    seconds = np.where(exists, (work * whole_s).sum(1), -1.0)
    busiest = np.argmax(seconds, 0)
    chosen = np.take_along_axis(work, busiest[None, None, :], 0)[0]
    return chosen * points.num_micro_batches


def _bubble(points: Points, forward: Array, input_grad: Array, weight_grad: Array) -> Array:
    """Waiting of the busiest rank, from what the other ranks do for a micro-batch.

    The published formulas hold where forward, I and W take about as long; beyond, these follow what
    our lists do (seen by simulating them, 3 % of the step where m is at least 2p).
    """
    whole = forward + input_grad + weight_grad
    zero = np.maximum(forward + input_grad - weight_grad, forward)
    v_shape = np.maximum.reduce([forward, input_grad, weight_grad, 2 * (input_grad - weight_grad)])
    # Late pairs of a long and a short pass wait for the longer one.
    ranks = points.pp / points.num_directions
    uneven = np.clip((ranks - 2.5) / np.maximum(ranks - 1, 1), 0, 1)
    dual = zero + uneven * np.maximum(input_grad - forward, 0)
    both_ends = np.maximum(points.pp / 2 - 1, 0) / np.maximum(points.pp - 1, 1)
    by_schedule = {
        "none": np.zeros(1),
        "gpipe": whole,
        "1f1b": whole,
        "interleaved": whole,
        "zb_h1": zero,
        "interleaved_zb": zero,
        "zbv": v_shape,
        "dualpipev": dual,
        "dualpipe": dual * both_ends,
    }
    waits = np.broadcast_arrays(*(by_schedule[name] for name in SCHEDULES))
    return np.choose(points.schedule, waits)


def _hops(points: Points, passes: StagePasses, hop_s: Array) -> Array:
    """What transfers add: the way there and back, and what the steady state waits for.

    Under 1F1B stage p - 2 has two micro-batches under way and waits for each to come back: the
    steady state loses 2 (p - 1) transfers for every p micro-batches. Schedules with more under way,
    or with weight gradients to do meanwhile, don't wait.
    """
    ways = 2 * (points.num_stages - 1)
    rounds = np.maximum(points.num_micro_batches / np.maximum(points.pp, 1), 1)
    lean = ways * rounds + np.where(rounds > 1, 2 * (points.pp - 2), 0)
    is_split = passes.weight_grad_s.max(0) > 0
    by_schedule = {
        "1f1b": lean,
        "zb_h1": np.where(is_split, 2 * ways, lean),
        "interleaved_zb": np.where(is_split, ways, lean),
    }
    waits = np.broadcast_arrays(*(by_schedule.get(name, ways) for name in SCHEDULES))
    return hop_s * np.where(points.pp > 1, np.choose(points.schedule, waits), 0)
