"""Step: the seconds of a training step by term of the vocabulary, for one layout or for columns.

How it works: a micro-batch's passes of each part (`paceline.plan.price.parts`) are added up to
those of each pipeline stage; a pipeline (`paceline.plan.price.pipelined`) turns them into the time
from the first action to the last and says which rank has most to do; what the data axes leave
exposed (`paceline.plan.price.data_axes`), the optimizer and the host's work once per step come on
top. The terms are those of the busiest rank; what it waits for is the bubble.

The host launches kernels ahead of the device: the pass of a stage takes the larger of the two
times, and what the host takes longer is `host_gap`. On a CPU the host's work adds to that of the
kernels, which run on the same cores.

Every rank waits for the slowest at the end of a step: the expected maximum of n normal values, by
the spread of ranks' work, is `straggler_wait`.

It knows no data loading and no checkpoints: `data_wait` and `checkpoint_stall` are 0.

Legend of shapes: s stages (or classes of stage), n points.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from paceline.config.layout import PRECISIONS, Layout
from paceline.config.schedule import Schedule
from paceline.config.stack import CONSTANTS, constant
from paceline.observe.terms import TERMS
from paceline.plan.block_kinds import BlockKind, block_kinds_of
from paceline.plan.collectives.groups import tiers_of
from paceline.plan.data_groups import dense_groups
from paceline.plan.memory import checkpoint_spike_bytes, memory_bytes
from paceline.plan.memory.holdings import holdings_of
from paceline.plan.points import Array, Points, Setting
from paceline.plan.prediction import Memory, Prediction
from paceline.plan.price.data_axes import DataAxes, HeldParameters
from paceline.plan.price.muon import muon_s
from paceline.plan.price.pace import slowed_s, slowest_wait_s, stepped_s
from paceline.plan.price.parts import (
    BLOCKING,
    COMPUTE,
    CollectiveRequest,
    NetworkPart,
    PartPass,
    exchange_s,
    hidden_share,
    part_seconds,
)
from paceline.plan.price.pipelined import (
    Pipeline,
    PipelineRun,
    StagePasses,
    bounding_stages,
    closed_form,
    one_stage,
    schedule_for,
    simulated,
    stages_of,
    with_transfers,
)
from paceline.plan.rates import memory_s, origins
from paceline.plan.residuals import relative_error
from paceline.plan.stages import StageWork
from paceline.plan.work import PartWork, block_work, embedding_work, head_work, sizes_of

# Passes of an Adam step over a held parameter, in bytes (train/optim.py, train/trainer.py): the
# norm reads the gradient, clipping reads and writes it, the step reads parameter, gradient and
# state and writes all but the gradient.
_NORM_AND_CLIP_BYTES = 12.0
_STEP_BYTES = 12.0
_ADAM_STATE = 8.0
# A 16-bit parameter: its gradient is cast to fp32, the fp32 copy steps, and is cast back.
_MASTER_BYTES = 12.0
# Decoding and coding two moments is some ten passes over fp32 copies of each, in plain torch
# (kernels/adamw/eight_bit.py).
_CODING_BYTES = 70.0
# One kernel per operation and group of parameters reads and writes everything in between as well.
_FOREACH_FACTOR = 2.0

# A 16-bit weight is read and written in fp8, as it is and transposed.
_FP8_COPY_BYTES = 4.0

_FP8 = PRECISIONS.index("fp8")


@dataclass(frozen=True, eq=False)
class StepTimes:
    """Seconds of a step, and what they were made of."""

    step_s: Array
    """(n,)"""
    terms: Mapping[str, Array]
    """By term of TERMS, (n,) each; they sum to step_s."""
    passes: StagePasses
    """Of each stage for one micro-batch, the host's delays included: (s, n) each."""
    gaps: StagePasses
    """The host's delays in them."""
    ran: PipelineRun
    """What became of its micro-batches, if transfers took no time."""
    hidden_s: Array
    """(n,), communication of the data axes beside computing."""
    hop_s: Array
    """(n,), of a transfer between pipeline stages."""


class NetworkParts(NamedTuple):
    """A setting's parts: blocks of each kind, the embedding, the head."""

    kinds: tuple[BlockKind, ...]
    works: list[PartWork]
    parts: list[NetworkPart]

    @classmethod
    def of(cls, setting: Setting, points: Points) -> "NetworkParts":
        """The work and the seconds of every part."""
        kinds = block_kinds_of(setting.model)
        works = [block_work(setting, points, kind) for kind in kinds]
        works += [embedding_work(setting, points), head_work(setting, points)]
        return cls(kinds, works, part_seconds(setting, points, works))


class Simulated(NamedTuple):
    """The step of one layout, whose schedule's own list of actions was executed."""

    points: Points
    """The layout alone."""
    schedule: Schedule | None
    """None: no pipeline."""
    network: NetworkParts
    stages: StageWork
    times: StepTimes

    @classmethod
    def of(
        cls, setting: Setting, layout: Layout, network: NetworkParts | None = None
    ) -> "Simulated":
        """Price the parts, where that isn't done, and run the schedule.

        Raises:
            InputError: the device has no known rate at the layout's precision.
        """
        points, schedule = Points.of([layout], setting), schedule_for(setting, layout)
        network = network or NetworkParts.of(setting, points)
        stages = stages_of(setting, layout, network.kinds)
        pipeline = one_stage if schedule is None else simulated(schedule)
        found = times_of(setting, points, network, stages, pipeline)
        return cls(points, schedule, network, stages, found)

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return float(self.times.step_s[0])


def predict(setting: Setting, layout: Layout, network: NetworkParts | None = None) -> Prediction:
    """Time and memory of one layout, with its schedule's own list of actions.

    Args:
        setting: model, cluster, batch and stack.
        layout: concrete.
        network: its priced parts, where many layouts' were priced together.

    Raises:
        InputError: the device has no known rate at the layout's precision.
    """
    one = Simulated.of(setting, layout, network)
    error = relative_error(setting)
    tokens_per_s = setting.global_batch * setting.seq_len / one.step_s
    return Prediction(
        layout=layout,
        step_s=one.step_s,
        time_s={term: float(seconds[0]) for term, seconds in one.times.terms.items()},
        memory=_memory(setting, one, layout),
        tokens_per_s=tokens_per_s,
        mfu=model_flops_utilisation(setting, layout, tokens_per_s),
        interval_s=(one.step_s / (1 + error), one.step_s * (1 + error)),
        assumptions=assumptions(setting),
    )


def _memory(setting: Setting, one: Simulated, layout: Layout) -> tuple[Memory, ...]:
    holdings = holdings_of(setting, layout, one.schedule)
    terms = memory_bytes(setting, one.points, holdings)
    spike = float(np.max(checkpoint_spike_bytes(setting, one.points, holdings)))
    num_ranks = max(np.shape(rows)[0] for rows in terms.values())
    return tuple(
        Memory(rank, {term: float(rows[rank, 0]) for term, rows in terms.items()}, spike)
        for rank in range(num_ranks)
    )


def model_flops_utilisation(setting: Setting, layout: Layout, tokens_per_s: float) -> float | None:
    """Model FLOPs per second over the devices' peak; None where the peak is not known."""
    device = setting.device
    peak = device.peak(layout.precision)
    if peak is None:
        return None
    flops = setting.model.train_flops_per_token(setting.seq_len) * tokens_per_s
    return flops / (peak.value * layout.num_ranks)


def assumptions(setting: Setting) -> dict[str, str]:
    """Where the figures come from: the device's curves, and the stack's constants."""
    found = {f"device.{name}": origin for name, origin in origins(setting.device).items()}
    for tier in tiers_of(setting.cluster) if setting.cluster.num_devices > 1 else ():
        for name in ("latency_s", "bytes_per_s"):
            figure = getattr(tier, name)
            found[f"links.{tier.name}.{name}"] = f"{figure.origin}: {figure.source}"
    stack = setting.stack
    return found | {
        f"stack.{name}": stack.origin if name in stack.constants else "assumed"
        for name in CONSTANTS
    }


def closed_times(
    setting: Setting, points: Points, network: NetworkParts
) -> tuple[StageWork, StepTimes]:
    """What stages hold, and the seconds of many layouts' steps, by closed forms."""
    weight = head_layers(network)
    stages = bounding_stages(setting.model, points, network.kinds, weight)
    return stages, times_of(setting, points, network, stages, closed_form)


def head_layers(network: NetworkParts) -> Array:
    """How many blocks the head weighs as much as."""
    *blocks, _, head = network.parts
    total = sum(len(kind.layers) for kind in network.kinds)
    each = sum(
        _device_s(part) * len(kind.layers) / total
        for part, kind in zip(blocks, network.kinds, strict=True)
    )
    return _device_s(head) / each


def _device_s(part: NetworkPart) -> Array:
    return part.forward.device_s + part.backward_s


def times_of(
    setting: Setting, points: Points, network: NetworkParts, stages: StageWork, pipeline: Pipeline
) -> StepTimes:
    """Seconds of a step by term.

    Args:
        setting: what stays the same.
        points: columns of layouts.
        network: their parts.
        stages: what their stages hold (`pipelined.stages_of`, `pipelined.bounding_stages`).
        pipeline: `pipelined.simulated` of a layout's list, `closed_form`, or `one_stage`.
    """
    passes, gaps = _stage_passes(setting, points, network, stages)
    alone = pipeline(setting, points, stages, passes, np.zeros(len(points)))
    data = DataAxes(setting, points, network.works, _held(points, stages, alone.work))
    asked = [*_requests(data), *data.requests()]
    hop, gathered, norm_s, tied, copies, tp_norms, *units = exchange_s(setting, asked)
    exposed = data.seconds(network.parts, units)
    hop_s = np.broadcast_to(hop + gathered, len(points))
    terms = _work_terms(stages, alone, network, gaps)
    # Products, which fill the device, are what loses.
    terms["matmul"] = terms["matmul"] + slowed_s(setting.stack, exposed.hidden_s)
    terms["exposed_comm.fsdp"] = exposed.fsdp_s
    terms["exposed_comm.dp"] = exposed.dp_s
    terms["exposed_comm.tp"] = terms["exposed_comm.tp"] + tp_norms
    # What each pass gathers and reduces makes it longer, so that others wait longer for it.
    busy_s = alone.seconds_of(passes)
    longer = np.where(points.zero >= 2, 1 + exposed.fsdp_s / busy_s, 1.0)
    terms["bubble"] = np.maximum(alone.makespan_s - busy_s, 0.0) * longer
    terms["exposed_comm.pp"] = _transfer_s(
        setting, points, stages, passes, hop_s, pipeline, alone.makespan_s
    ) + np.where(points.pp > 1, tied + copies, 0.0)
    _once_per_step(data, norm_s, terms)
    if (beside := setting.of_teacher) is not None:
        _add_teacher(beside, points, terms)
    whole = _summed(setting, points, terms, alone.scattered_s)
    step_s = sum(whole.values(), np.zeros(len(points)))
    return StepTimes(step_s, whole, passes, gaps, alone, exposed.hidden_s, hop_s)


def _summed(
    setting: Setting, points: Points, terms: dict[str, Array], scattered_s: Array
) -> dict[str, Array]:
    """Add what ranks wait for slower ones, and bring every term to n points."""
    own_s = sum(terms.values(), np.zeros(1))
    wait_s = slowest_wait_s(setting.stack, own_s, points.num_ranks)
    terms["straggler_wait"] = scattered_s + wait_s
    n = len(points)
    return {
        term: np.broadcast_to(np.asarray(terms[term], float), n) for term in TERMS if term in terms
    }


def _stage_passes(
    setting: Setting, points: Points, network: NetworkParts, stages: StageWork
) -> tuple[StagePasses, StagePasses]:
    """Of each stage: the seconds of its passes, and those of them in which the host is late."""
    overhead_s = constant(setting.stack, "micro_batch_overhead_ms") * 1e-3
    whole: list[Array] = []
    late: list[Array] = []
    for name in ("forward", "input_grad", "weight_grad"):
        passes = [getattr(part, name) for part in network.parts]
        device_s = _over_stages(stages, [one.device_s for one in passes])
        # Part by part: where the host sets the pace, the device is idle when a part begins.
        gap_s = _over_stages(stages, [_late_s(setting, one) for one in passes])
        gap_s = gap_s + (stages.has_head * overhead_s if name == "forward" else 0.0)
        gap_s = gap_s + _over_stages(stages, [one.wait_s for one in passes])
        gap_s = gap_s + (0.0 if name == "weight_grad" else _sends_s(setting, points, stages))
        whole.append(device_s + gap_s)
        late.append(gap_s)
    return unsplit_first(stages, StagePasses(*whole)), unsplit_first(stages, StagePasses(*late))


def _add_teacher(setting: Setting, points: Points, terms: dict[str, Array]) -> None:
    """What a teacher adds to a step: its forward passes and its head's comparison with each
    micro-batch, and its parameters, gathered where they are sharded."""
    # Its experts are all on each rank.
    kinds, _, parts = NetworkParts.of(setting, replace(points, ep=np.ones_like(points.ep)))
    counts = [*(float(len(kind.layers)) for kind in kinds), 1.0, 1.0]
    times = points.num_micro_batches
    passes_s = np.zeros(1)
    for count, part in zip(counts, parts, strict=True):
        one = part.forward
        for term, seconds in one.terms.items():
            terms[term] = terms.get(term, np.zeros(1)) + times * count * seconds
        terms["host_gap"] = terms["host_gap"] + times * count * (_late_s(setting, one) + one.wait_s)
        passes_s = passes_s + count * one.device_s
    shards = np.where(points.is_fsdp, dense_groups(points).shards, 1)
    num_bytes = setting.model.num_params * points.value_bytes
    (gather_s,) = exchange_s(
        setting, [CollectiveRequest("all_gather", num_bytes, shards, np.ones(1))]
    )
    exposed_s = np.maximum(gather_s - hidden_share(setting) * passes_s, 0.0)
    terms["exposed_comm.fsdp"] = terms["exposed_comm.fsdp"] + times * exposed_s


def _late_s(setting: Setting, one: PartPass) -> Array:
    """Seconds of a pass in which the device waits for the host."""
    return one.host_s if setting.device.is_cpu else np.maximum(one.host_s - one.device_s, 0.0)


def _sends_s(setting: Setting, points: Points, stages: StageWork) -> Array:
    """What Python does on CPUs to send and to receive a pass's tensors: half a hop at each end."""
    if not setting.device.is_cpu:
        return np.zeros(1)
    ends = 2.0 - stages.has_embedding - stages.has_head
    return np.where(points.pp > 1, ends * constant(setting.stack, "hop_us") * 1e-6 / 2, 0.0)


def unsplit_first(stages: StageWork, passes: StagePasses) -> StagePasses:
    """The first stage's input needs no gradient, and its backward pass is one (parallel/pp)."""
    late = passes.weight_grad_s
    first = np.broadcast_to(stages.has_embedding, late.shape)
    return StagePasses(
        passes.forward_s,
        passes.input_grad_s + np.where(first, late, 0.0),
        np.where(first, 0.0, late),
    )


def _over_stages(stages: StageWork, columns: Sequence[Array]) -> Array:
    """Sum of the parts that each stage holds: (s, n)."""
    *blocks, embedding, head = columns
    total = stages.has_embedding * embedding + stages.has_head * head
    for layers, block in zip(stages.layers, blocks, strict=True):
        total = total + layers * block
    return total


def _held(points: Points, stages: StageWork, work: Array) -> HeldParameters:
    """What the busiest rank holds, of parameters: its stages, however many micro-batches each."""
    times_held = work * points.num_directions / np.maximum(points.num_micro_batches, 1)
    return HeldParameters(
        [(times_held * layers).sum(0) for layers in stages.layers],
        (times_held * stages.has_embedding).sum(0),
        (times_held * stages.has_head).sum(0),
    )


def _requests(data: DataAxes) -> list[CollectiveRequest]:
    """Collectives of a step that belong to no block: see the names in `times_of`."""
    setting, points = data.setting, data.points
    model, sizes = setting.model, sizes_of(setting, points)
    stage_ranks = points.ranks_of_a_worker / points.pp
    one, fp32 = np.ones(1), 4.0
    between = np.where(points.pp > 1, 2, 1)
    stream = sizes.stream_tokens * model.hidden_size * sizes.value_bytes
    dense = dense_groups(points)
    table = model.num_embedding_params / points.tp / dense.shards * fp32
    is_adapted = setting.finetune.is_adapted
    tied = np.where(model.tie_embeddings and not is_adapted, between, 1)
    copies = np.where(points.num_directions > 1, between, 1)
    stage_bytes = data.num_stepped / 2 * fp32
    # Gradients of what is whole on every tp rank: norms, or an adapter's narrow side (at most all).
    norms = np.where(points.sequence_parallel | is_adapted, points.tp, 1)
    summed = 2 * model.hidden_size * sum(data.held.blocks, np.zeros(1))
    summed = data.num_trained if is_adapted else summed
    shared = setting.stack.scatters_pp & (points.pp > 1) & ~points.sequence_parallel
    senders = np.where(shared, points.tp, 1)
    return [
        CollectiveRequest("send_recv", stream / senders, points.pp, stage_ranks),
        CollectiveRequest("all_gather", stream, senders, one),
        CollectiveRequest("all_reduce", 24.0 * one, points.ranks_of_a_worker, one),
        CollectiveRequest("all_reduce", table, tied, stage_ranks * np.maximum(points.pp - 1, 1)),
        CollectiveRequest("all_reduce", stage_bytes, copies, stage_ranks),
        CollectiveRequest("all_reduce", summed * fp32 + 1, norms, one),
    ]


def _work_terms(
    stages: StageWork, ran: PipelineRun, network: NetworkParts, gaps: StagePasses
) -> dict[str, Array]:
    """Seconds of the busiest rank's own passes, by term."""
    # Without shared cores all three are one array, and of millions of points it matters.
    distinct = {id(spent): _counts(stages, spent) for spent in ran.spent}
    by_pass = [distinct[id(spent)] for spent in ran.spent]
    terms: dict[str, Array] = {}
    for term in (*COMPUTE, *BLOCKING):
        total: Array = np.zeros(1)
        for number, part in enumerate(network.parts):
            passes = (part.forward, part.input_grad, part.weight_grad)
            for counts, one in zip(by_pass, passes, strict=True):
                if term in one.terms:
                    total = total + counts[number] * one.terms[term]
        terms[term] = total
    terms["host_gap"] = ran.seconds_of(gaps)
    return terms


def _counts(stages: StageWork, work: Array) -> list[Array]:
    """How often each part is worked on: blocks of each kind, the embedding, the head."""
    counts = [(work * layers).sum(0) for layers in stages.layers]
    return [*counts, (work * stages.has_embedding).sum(0), (work * stages.has_head).sum(0)]


def _transfer_s(
    setting: Setting,
    points: Points,
    stages: StageWork,
    passes: StagePasses,
    hop_s: Array,
    pipeline: Pipeline,
    alone_s: Array,
) -> Array:
    """What transfers between stages add: beside the computing, or in its way."""
    if not np.any(points.pp > 1):
        return np.zeros(1)
    passes, wire_s = with_transfers(setting.stack, points, passes, hop_s)
    whole_s = pipeline(setting, points, stages, passes, wire_s).makespan_s
    # Ranks that wait for transfers leave others their cores: it may even be the better order.
    return np.maximum(whole_s - alone_s, 0.0)


def _once_per_step(data: DataAxes, norm_s: Array, terms: dict[str, Array]) -> None:
    """Optimizer, sums of gradients, copies to the host, and the host's own work."""
    setting, points, copied = data.setting, data.points, data.grad_copy_bytes
    terms["optimizer"] = norm_s + optimizer_s(setting, points, data.num_stepped)
    copies_s = points.num_micro_batches * memory_s(setting.device, np.maximum(copied, 1.0))
    if setting.stack.elementwise == "fused":
        weights = (points.precision == _FP8) * data.num_params
        copies_s = copies_s + memory_s(setting.device, np.maximum(_FP8_COPY_BYTES * weights, 1.0))
    terms["other_kernels"] = terms["other_kernels"] + copies_s * constant(
        setting.stack, "memory_time"
    )
    terms["host_gap"] = terms["host_gap"] + constant(setting.stack, "step_overhead_ms") * 1e-3
    link = constant(setting.stack, "host_copy_gb_per_s") * 1e9
    # Each gathering brings the shard in, each reduction takes its gradient out.
    gathers = np.where(points.zero == 3, 2 * points.num_micro_batches, 1)
    moved = (data.num_kept * gathers + data.num_stepped) * points.param_bytes / link
    exposed = terms["exposed_comm.fsdp"] + points.offload_params * moved
    if (stream := setting.device.streamed_bytes_per_s) is not None:
        # Weights twice a micro-batch, gradients once a step, both beside the products.
        streamed = data.num_kept * 2 * points.num_micro_batches + data.num_stepped
        streamed_s = streamed * points.value_bytes / stream.value
        exposed = exposed + np.maximum(streamed_s - terms["matmul"], 0.0)
    terms["exposed_comm.fsdp"] = exposed


def optimizer_s(setting: Setting, points: Points, stepped: Array) -> Array:
    """Seconds of norm, clipping and step of so many parameters."""
    stack = setting.stack
    has_master = points.param_bytes == 2
    num_bytes = (
        _NORM_AND_CLIP_BYTES
        + _STEP_BYTES
        + 2 * (_ADAM_STATE if setting.state_bytes is None else setting.state_bytes)
        + np.where(has_master, _MASTER_BYTES, 0.0)
        + np.where(points.optimizer_8bit, _CODING_BYTES, 0.0)
    ) * (_FOREACH_FACTOR if stack.optimizer == "foreach" else 1.0)
    here = stepped_s(setting.device, stack, stepped * num_bytes)
    stream = setting.device.streamed_bytes_per_s
    link = constant(stack, "host_copy_gb_per_s") * 1e9 if stream is None else stream.value
    state = np.where(points.optimizer_8bit, 2.03, _ADAM_STATE) + np.where(has_master, 4.0, 0.0)
    travel = points.offload_optimizer * 2 * state * stepped / link
    # What waits outside steps there: its passes go at the pace of the way to it.
    outside_s = stepped * num_bytes / link
    step_s = np.where(setting.has_params_outside(points), outside_s, here) + travel
    return step_s + (muon_s(setting, points, stepped) if setting.has_muon else 0.0)
