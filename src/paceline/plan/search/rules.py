"""Rules: which layouts can run, for columns of layouts at once.

The same rules as `paceline.config.feasible`, which says in a sentence what is wrong with one
layout; here each is a comparison of columns, for millions of them. A property test keeps the two in
step. A rule names the columns that it reads, so that a space that is built column by column drops
what can't run as early as possible.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from paceline.config.feasible import ARITHMETIC, FP8_MULTIPLE, fp8_sides, tensor_sizes
from paceline.config.schedule import DEMANDS
from paceline.plan.points import PRECISIONS, RECOMPUTE, SCHEDULES, Array, Points, Setting

Columns = Mapping[str, Array]
"""Some columns of Points, by name; they broadcast against each other."""


class LayoutRule(NamedTuple):
    """A condition on columns, true where a layout can run."""

    reads: tuple[str, ...]
    holds: Callable[..., Array]
    """Of the setting and the columns that it reads, in that order."""


def can_run(setting: Setting, points: Points) -> Array:
    """Whether each layout can run: True where `config.feasible.refusal` has nothing to say.

    Splits and counts of recomputed layers are those that the search makes, which fit by themselves.
    """
    every = set(vars(points))
    return np.broadcast_to(allowed(setting, vars(points), every, every), len(points))


def allowed(setting: Setting, columns: Columns, known: set[str], new: set[str]) -> Array:
    """Whether the rules hold that can be judged by the `known` columns and concern a `new` one."""
    answer: Array = np.array(True)
    for rule in RULES:
        if known.issuperset(rule.reads) and not new.isdisjoint(rule.reads):
            answer = answer & rule.holds(setting, *(columns[name] for name in rule.reads))
    return answer


def _is_on_cuda(setting: Setting) -> bool:
    return setting.device.kind == "cuda"


def _ranks(setting: Setting, dp: Array, fsdp: Array, cp: Array, tp: Array, pp: Array) -> Array:
    return dp * fsdp * cp * tp * pp == setting.cluster.num_devices


def _precision(setting: Setting, precision: Array, param_dtype: Array) -> Array:
    device = setting.device
    native = [name in device.precisions for name in PRECISIONS]
    pairs = [[name in ARITHMETIC.get(stored, ()) for name in PRECISIONS] for stored in PRECISIONS]
    works = np.array(pairs) & np.outer(native, native)
    return works[param_dtype, precision]


def _zero(setting: Setting, zero: Array, fsdp: Array, pp: Array) -> Array:
    return ((zero == 0) == (fsdp == 1)) & ((pp == 1) | (zero < 2))


def _tensor(setting: Setting, tp: Array) -> Array:
    return np.all([size % tp == 0 for size in tensor_sizes(setting.model).values()], axis=0)


def _sequence(setting: Setting, tp: Array, sequence_parallel: Array, cp: Array) -> Array:
    return ~sequence_parallel | ((tp > 1) & (setting.seq_len // cp % tp == 0))


def _async_tp(
    setting: Setting, async_tp: Array, tp: Array, sequence_parallel: Array, compile: Array
) -> Array:
    return ~async_tp | ((tp > 1) & sequence_parallel & compile & _is_on_cuda(setting))


def _no_pipeline(setting: Setting, pp: Array, schedule: Array, stages_per_rank: Array) -> Array:
    alone = (schedule == 0) & (stages_per_rank == 1)
    return np.where(pp == 1, alone, schedule != 0)


def num_stages(pp: Array, schedule: Array, stages_per_rank: Array) -> Array:
    """Stages that a micro-batch passes; DualPipe's two per rank are one of each direction."""
    return pp * np.where(schedule == SCHEDULES.index("dualpipe"), 1, stages_per_rank)


def _layers(setting: Setting, pp: Array, schedule: Array, stages_per_rank: Array) -> Array:
    return num_stages(pp, schedule, stages_per_rank) <= setting.model.num_layers


# What each schedule demands, by its index: stages per rank (0: two or more), ends that
# micro-batches enter at, whether they go in rounds of pp.
_STAGES_PER_RANK = np.array([1, *(each.stages_per_rank or 0 for each in DEMANDS.values())])
_DIRECTIONS = np.array([1, *(each.num_directions for each in DEMANDS.values())])
_IN_ROUNDS = np.array([False, *(each.multiple_of_ranks for each in DEMANDS.values())])


def _schedule(
    setting: Setting, pp: Array, schedule: Array, stages_per_rank: Array, num_micro_batches: Array
) -> Array:
    wanted, ends = _STAGES_PER_RANK[schedule], _DIRECTIONS[schedule]
    stages_fit = np.where(wanted == 0, stages_per_rank >= 2, stages_per_rank == wanted)
    smallest = np.where(_IN_ROUNDS[schedule], pp, ends)
    batches_fit = (num_micro_batches >= 1) & (num_micro_batches % smallest == 0)
    return stages_fit & (pp % ends == 0) & batches_fit


def _context(setting: Setting, cp: Array, ulysses: Array, tp: Array) -> Array:
    ring = np.maximum(1, cp // ulysses)
    parts = np.where(ring > 1, 2 * ring, 1) * ulysses
    fits = (setting.seq_len % parts == 0) & (setting.model.num_heads // tp % ulysses == 0)
    return (cp % ulysses == 0) & ((cp == 1) | fits)


def _experts(setting: Setting, ep: Array, dp: Array, fsdp: Array, cp: Array) -> Array:
    experts = setting.model.experts
    if experts is None:
        return ep == 1
    inner = fsdp * cp
    folds = (inner * dp % ep == 0) & ((ep % inner == 0) | (inner % ep == 0))
    left = np.maximum(1, inner // ep)
    shards = (fsdp == 1) | (setting.model.hidden_size % left == 0)
    return (ep == 1) | ((experts.num_experts % ep == 0) & folds & shards)


def _twin_experts(setting: Setting, schedule: Array) -> Array:
    experts = setting.model.experts
    if experts is None or not experts.bias_update_speed:
        return schedule >= 0
    return schedule != SCHEDULES.index("dualpipe")


def _share(setting: Setting, recompute: Array, recompute_share: Array) -> Array:
    return (recompute == 0) == (recompute_share == 0)


def _offload_activations(setting: Setting, offload_activations: Array, recompute: Array) -> Array:
    return ~offload_activations | (recompute != RECOMPUTE.index("selective"))


def _offload_params(setting: Setting, offload_params: Array, fsdp: Array, tp: Array) -> Array:
    adds_up = tp == 1 if _is_on_cuda(setting) else tp > 0
    return ~offload_params | ((fsdp > 1) & adds_up)


def _offload_once(setting: Setting, offload_params: Array, offload_optimizer: Array) -> Array:
    return ~(offload_params & offload_optimizer)


_FP8 = PRECISIONS.index("fp8")


def _fp8_sides(setting: Setting, precision: Array, tp: Array) -> Array:
    sides = [size // tp for size in fp8_sides(setting.model).values()]
    fits = np.all([side % FP8_MULTIPLE == 0 for side in sides], axis=0)
    return (precision != _FP8) | (fits & (setting.model.hidden_size % FP8_MULTIPLE == 0))


def _fp8_tokens(setting: Setting, precision: Array, micro_batch: Array, cp: Array) -> Array:
    tokens = micro_batch * (setting.seq_len // cp)
    return (precision != _FP8) | (tokens % FP8_MULTIPLE == 0) | (not _is_on_cuda(setting))


def _samples(setting: Setting, dp: Array, fsdp: Array) -> Array:
    return setting.global_batch % (dp * fsdp) == 0


def _batch(setting: Setting, dp: Array, fsdp: Array, micro_batch: Array) -> Array:
    return setting.global_batch % (dp * fsdp * micro_batch) == 0


RULES = (
    LayoutRule(("dp", "fsdp", "cp", "tp", "pp"), _ranks),
    LayoutRule(("precision", "param_dtype"), _precision),
    LayoutRule(("zero", "fsdp", "pp"), _zero),
    LayoutRule(("tp",), _tensor),
    LayoutRule(("tp", "sequence_parallel", "cp"), _sequence),
    LayoutRule(("async_tp", "tp", "sequence_parallel", "compile"), _async_tp),
    LayoutRule(("pp", "schedule", "stages_per_rank"), _no_pipeline),
    LayoutRule(("pp", "schedule", "stages_per_rank"), _layers),
    LayoutRule(("pp", "schedule", "stages_per_rank", "num_micro_batches"), _schedule),
    LayoutRule(("cp", "ulysses", "tp"), _context),
    LayoutRule(("ep", "dp", "fsdp", "cp"), _experts),
    LayoutRule(("schedule",), _twin_experts),
    LayoutRule(("recompute", "recompute_share"), _share),
    LayoutRule(("offload_activations", "recompute"), _offload_activations),
    LayoutRule(("offload_params", "fsdp", "tp"), _offload_params),
    LayoutRule(("offload_params", "offload_optimizer"), _offload_once),
    LayoutRule(("precision", "tp"), _fp8_sides),
    LayoutRule(("precision", "micro_batch", "cp"), _fp8_tokens),
    LayoutRule(("dp", "fsdp"), _samples),
    LayoutRule(("dp", "fsdp", "micro_batch"), _batch),
)
