"""What a layout demands of model, cluster and batch: one table of rules.

A rule is a function of what a layout is for and of the settings that its parameters name. It yields
conditions under which a layout can't run, each with the sentence that refuses it. `refusal` finds
the first that holds for one layout, so that it is refused before any process starts. The planner
asks for the conditions alone, of millions of layouts in columns (`plan.search.tables`). What they
let pass runs (a property test draws layouts and runs them).
"""

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from paceline.config.device import Device
from paceline.config.errors import InputError, Refusal, first_sentence
from paceline.config.family import ModelFamily
from paceline.config.hardware import Cluster
from paceline.config.layout import PRECISIONS, RECOMPUTE, Layout
from paceline.config.model import Model
from paceline.config.schedule import DUALPIPE, SCHEDULES, demands
from paceline.config.schedule import num_stages as _num_stages

# What stored parameters may be computed with.
ARITHMETIC = {
    "fp64": ("fp64",),
    "fp32": ("fp32", "bf16", "fp16", "fp8"),
    "bf16": ("bf16", "fp8"),
}
_AGREE = np.array(
    [[name in ARITHMETIC.get(kept, ()) for name in PRECISIONS] for kept in PRECISIONS]
)
FP8_MULTIPLE = 16
_FP8, _SELECTIVE = PRECISIONS.index("fp8"), RECOMPUTE.index("selective")


class Purpose(Protocol):
    """What layouts are for: that of one (`Demand`), or of all that a search compares."""

    @property
    def model(self) -> Any:
        """Of any family; rules about layers are asked of those that know theirs."""

    @property
    def cluster(self) -> Cluster:
        """Concrete."""

    @property
    def device(self) -> Device:
        """Of the cluster."""

    @property
    def seq_len(self) -> int:
        """Tokens of a sample."""

    @property
    def global_batch(self) -> int:
        """Samples of a step."""


class Demand(NamedTuple):
    """A layout and what it is for."""

    layout: Layout
    model: ModelFamily
    cluster: Cluster
    seq_len: int
    global_batch: int

    @property
    def device(self) -> Device:
        """Of the cluster."""
        return self.cluster.device


class Rule(NamedTuple):
    """One rule of the table."""

    refusals: Callable[..., Iterator[Refusal]]
    """Of the purpose and the settings that it reads, in that order."""
    reads: tuple[str, ...]
    """Names of `settings_of`."""
    of_layers: bool
    """Whether it is about the layers of a model that says what these are."""


def check_layout(
    layout: Layout, model: ModelFamily, cluster: Cluster, seq_len: int, global_batch: int
) -> None:
    """Refuse what can't run: pure, and before any process starts.

    Args:
        layout: concrete.
        model: of any family.
        cluster: concrete.
        seq_len: tokens of a sample (language models).
        global_batch: samples of a step.

    Raises:
        InputError: one sentence with what was given, what is required and what to change.
    """
    sentence = refusal(Demand(layout, model, cluster, seq_len, global_batch))
    if sentence is not None:
        raise InputError(sentence)


def refusal(demand: Demand) -> str | None:
    """The first reason why a concrete layout can't run, as one sentence; None where it can."""
    settings = settings_of(demand.layout, demand.global_batch)
    return first_sentence(
        each
        for rule in RULES
        if demand.model.knows_layers or not rule.of_layers
        for each in rule.refusals(demand, *(settings[name] for name in rule.reads))
    )


def settings_of(layout: Layout, global_batch: int) -> dict[str, Any]:
    """A concrete layout's settings as rules read them and tables of layouts hold them: a word is
    its index among its kind, and what is offloaded is three switches."""
    samples = layout.num_data_ranks * layout.micro_batch
    return vars(layout) | {
        "layout": layout,
        "num_micro_batches": global_batch // samples,
        "schedule": SCHEDULES.index(layout.schedule),
        "precision": PRECISIONS.index(layout.precision),
        "param_dtype": PRECISIONS.index(layout.param_dtype),
        "recompute": RECOMPUTE.index(layout.recompute),
        "offload_activations": "activations" in layout.offload,
        "offload_optimizer": "optimizer" in layout.offload,
        "offload_params": "params" in layout.offload,
    }


def _ranks(of: Purpose, dp: Any, fsdp: Any, cp: Any, tp: Any, pp: Any) -> Iterator[Refusal]:
    asked, ranks = dp * fsdp * cp * tp * pp, of.cluster.num_devices

    def sentence() -> str:
        axes = {"pp": pp, "dp": dp, "fsdp": fsdp, "cp": cp, "tp": tp}
        used = {key: ways for key, ways in axes.items() if ways != 1} or {"dp": 1}
        return (
            f"layout.{' x '.join(used)} = {' x '.join(map(str, used.values()))} asks for "
            f"{asked} ranks but the cluster has {ranks}: change one of them or "
            "cluster.devices_per_node."
        )

    yield asked != ranks, sentence


def _precision(of: Purpose, precision: Any, param_dtype: Any) -> Iterator[Refusal]:
    lacks = np.array([name not in of.device.precisions for name in PRECISIONS])

    def unsupported(name: str, value: Any) -> Refusal:
        return (
            lacks[value],
            lambda: (
                f'layout.{name} = "{PRECISIONS[value]}" is not supported by {of.device.name}: '
                f"use one of {', '.join(of.device.precisions)}."
            ),
        )

    yield unsupported("precision", precision)
    yield unsupported("param_dtype", param_dtype)
    yield (
        ~_AGREE[param_dtype, precision],
        lambda: (
            f'layout.param_dtype = "{PRECISIONS[param_dtype]}" needs layout.precision = '
            f'"{ARITHMETIC[PRECISIONS[param_dtype]][0]}", not "{PRECISIONS[precision]}": change '
            "one of them."
        ),
    )


def _kernels(of: Purpose, kernels: str, precision: int) -> Iterator[Refusal]:
    yield (
        kernels == "triton" and of.device.kind != "cuda",
        lambda: (
            f'layout.kernels = "triton" needs CUDA devices and the cluster has {of.device.name}: '
            'use "auto" or "reference".'
        ),
    )
    yield (
        kernels == "triton" and PRECISIONS[precision] == "fp64",
        lambda: (
            'layout.kernels = "triton" can\'t compute in layout.precision = "fp64": set kernels to '
            '"reference" or precision to fp32 or less.'
        ),
    )


def _family(of: Purpose, layout: Layout) -> Iterator[Refusal]:
    for sentence in of.model.layout_refusals(layout):
        yield True, functools.partial(str, sentence)


def _zero(_of: Purpose, zero: Any, fsdp: Any) -> Iterator[Refusal]:
    yield (
        (zero != 0) & (fsdp == 1),
        lambda: (
            f"layout.zero = {zero} has nothing to shard over with layout.fsdp = 1: raise fsdp or "
            "set zero = 0."
        ),
    )
    yield (
        (zero == 0) & (fsdp != 1),
        lambda: f"layout.zero = 0 contradicts layout.fsdp = {fsdp}: set zero to 1, 2 or 3.",
    )


def _shared_sequence(of: Purpose, sequence_parallel: Any, tp: Any, cp: Any) -> Iterator[Refusal]:
    tokens = of.seq_len // cp
    yield (
        sequence_parallel & (tp == 1),
        lambda: "layout.sequence_parallel has no effect with layout.tp = 1: raise tp or unset it.",
    )
    yield (
        sequence_parallel & (tokens % tp != 0),
        lambda: (
            f"train.seq_len = {of.seq_len} leaves {tokens} tokens to a rank's sequence, which "
            f"layout.tp = {tp} with sequence_parallel does not divide: use a seq_len that is a "
            f"multiple of {tp * cp}."
        ),
    )


def _async_tp(
    of: Purpose, async_tp: Any, tp: Any, sequence_parallel: Any, compile: Any
) -> Iterator[Refusal]:
    ready = sequence_parallel & compile & _is_on_cuda(of)
    yield (
        async_tp & (tp == 1),
        lambda: "layout.async_tp has no effect with layout.tp = 1: raise tp or unset it.",
    )
    yield (
        async_tp & np.logical_not(ready),
        lambda: (
            "layout.async_tp needs CUDA devices, layout.compile = true and "
            "layout.sequence_parallel = true: set those or unset async_tp."
        ),
    )


def _tensor(of: Purpose, tp: Any) -> Iterator[Refusal]:
    for name, value in tensor_sizes(of.model).items():
        if name not in ("num_kv_heads", "vocab_size"):
            yield _must_divide(f"model.{name}", value, "tp", tp)
    yield _key_heads(of.model, tp)
    yield _vocabulary(of.model.vocab_size, tp)


def _key_heads(model: Model, tp: Any) -> Refusal:
    """A rank has whole key heads, or an equal part of one."""
    heads, width = model.num_kv_heads, model.head_dim
    shares = (tp % heads == 0) & (heads * width % tp == 0)

    def sentence() -> str:
        works = ", ".join(
            str(size)
            for size in range(1, tp + 1)
            if heads % size == 0 or (size % heads == 0 and heads * width % size == 0)
        )
        return (
            f"layout.tp = {tp} gives ranks neither whole key heads nor equal parts of one, of "
            f"model.num_kv_heads = {heads} that are {width} wide: use one of {works}, or change "
            "the model."
        )

    return (heads % tp != 0) & ~shares & (model.latent is None), sentence


def _vocabulary(size: int, tp: Any) -> Refusal:
    """Of rows in equal shares, but for the last rank's, that one has some, too."""
    return (
        -(-size // tp) * (tp - 1) >= size,
        lambda: (
            f"layout.tp = {tp} leaves ranks without a row of model.vocab_size = {size}: lower tp "
            "or raise vocab_size."
        ),
    )


def tensor_sizes(model: Model) -> dict[str, int]:
    """What tensor parallelism shares out."""
    sizes = {"num_heads": model.num_heads, "vocab_size": model.vocab_size}
    if model.latent is None:
        sizes["num_kv_heads"] = model.num_kv_heads
    if any(not model.has_experts(layer) for layer in range(model.num_layers)):
        sizes["ffn_size"] = model.ffn_size
    if model.experts is not None:
        sizes["experts.ffn_size"] = model.experts.ffn_size
        sizes["experts.shared_ffn_size"] = model.experts.shared_ffn_size
    return sizes


def _pipeline(_of: Purpose, pp: Any, schedule: Any, stages_per_rank: Any) -> Iterator[Refusal]:
    yield (
        (pp == 1) & (schedule != 0),
        lambda: _no_pipeline("schedule", SCHEDULES[schedule]),
    )
    yield (
        (pp == 1) & (stages_per_rank != 1),
        lambda: _no_pipeline("stages_per_rank", stages_per_rank),
    )
    yield (
        (pp != 1) & (schedule == 0),
        lambda: f'layout.schedule = "none" can\'t run layout.pp = {pp}: choose a schedule.',
    )


def _no_split(_of: Purpose, pp: int, split: tuple[int, ...]) -> Iterator[Refusal]:
    yield pp == 1 and split, lambda: _no_pipeline("split", list(split))


def _no_pipeline(name: str, value: object) -> str:
    shown = f'"{value}"' if isinstance(value, str) else value
    return f"layout.{name} = {shown} has no effect with layout.pp = 1: raise pp or remove it."


def _schedule(
    _of: Purpose, schedule: Any, pp: Any, stages_per_rank: Any, num_micro_batches: Any
) -> Iterator[Refusal]:
    return demands(schedule, pp, stages_per_rank, num_micro_batches)


def _stages(of: Purpose, pp: Any, schedule: Any, stages_per_rank: Any) -> Iterator[Refusal]:
    stages, layers = _num_stages(pp, schedule, stages_per_rank), of.model.num_layers
    yield (
        stages > layers,
        lambda: (
            f"layout.pp = {pp} with {stages_per_rank} stages per rank makes {stages} stages, more "
            f"than the model's {layers} layers: lower pp or stages_per_rank."
        ),
    )


def _split(
    of: Purpose, pp: int, schedule: int, stages_per_rank: int, split: tuple[int, ...]
) -> Iterator[Refusal]:
    stages, layers = _num_stages(pp, schedule, stages_per_rank), of.model.num_layers
    yield (
        pp != 1 and (len(split) != stages or sum(split) != layers),
        lambda: (
            f"layout.split = {list(split)} must give the layers of {stages} stages, {layers} in "
            'all: correct it or leave it to "auto".'
        ),
    )


def num_stages(layout: Layout) -> int:
    """Stages that a micro-batch of a concrete layout passes."""
    schedule = SCHEDULES.index(layout.schedule)
    return int(_num_stages(layout.pp, schedule, layout.stages_per_rank))


def _ulysses(_of: Purpose, cp: Any, ulysses: Any) -> Iterator[Refusal]:
    yield (
        cp % ulysses != 0,
        lambda: (
            f"layout.ulysses = {ulysses} does not divide layout.cp = {cp}, of whose ranks it is a "
            "part: choose a divisor of cp."
        ),
    )


def _context(of: Purpose, cp: Any, ulysses: Any, tp: Any) -> Iterator[Refusal]:
    ring, heads = cp // ulysses, of.model.num_heads // tp
    parts = np.where(ring > 1, 2 * ring, 1) * ulysses
    yield (
        (cp != 1) & (of.seq_len % parts != 0),
        lambda: (
            f"train.seq_len = {of.seq_len} can't be cut into the {parts} parts that layout.cp = "
            f"{cp} needs: use {nearest_multiple(of.seq_len, int(parts))}, the nearest that works."
        ),
    )
    yield (
        (cp != 1) & (heads % ulysses != 0),
        lambda: (
            f"layout.ulysses = {ulysses} can't share out the {heads} heads that a rank has: "
            "choose a divisor, or pass keys in a ring instead (ulysses = 1)."
        ),
    )


def _whole_layers(of: Purpose, cp: Any, tp: Any) -> Iterator[Refusal]:
    """What a network has that some axes can't share out."""
    model = of.model
    yield (
        (cp != 1) & (not model.causal),
        lambda: (
            f"layout.cp = {cp} shares sequences whose tokens see earlier ones, and with "
            "model.causal = false they see all: set it to 1."
        ),
    )
    yield (
        (cp != 1) & (model.sinks or model.score_cap is not None),
        lambda: (
            f"layout.cp = {cp} attends block by block, which knows no "
            f"{'model.sinks' if model.sinks else 'model.score_cap'}: set it to 1."
        ),
    )
    yield (
        (tp != 1) & (model.experts is not None and model.experts.bias),
        lambda: (
            f"layout.tp = {tp} cuts experts by columns, which those with model.experts.bias can't "
            "be: set it to 1, and share experts out by ep."
        ),
    )


def _rebalancing(_of: Purpose, ep: Any, rebalance_every: int) -> Iterator[Refusal]:
    yield (
        (ep == 1) & (rebalance_every > 0),
        lambda: (
            f"layout.rebalance_every = {rebalance_every} has no effect with layout.ep = 1: raise "
            "ep or set it to 0."
        ),
    )


def _experts(of: Purpose, ep: Any, dp: Any, fsdp: Any, cp: Any) -> Iterator[Refusal]:
    experts, hidden_size = of.model.experts, of.model.hidden_size
    if experts is None:
        yield (
            ep != 1,
            lambda: (
                f"layout.ep = {ep} needs a model with experts, and this one is dense: set ep = 1."
            ),
        )
        return
    yield _must_divide("model.experts.num_experts", experts.num_experts, "ep", ep)
    inner = fsdp * cp
    data = inner * dp
    yield (
        (data % ep != 0) | ((ep % inner != 0) & (inner % ep != 0)),
        lambda: (
            f"layout.ep = {ep} can't be folded over the {data} data ranks (dp x fsdp x cp = "
            f"{dp} x {fsdp} x {cp}): it must divide fsdp x cp, or be a multiple of it that divides "
            "all."
        ),
    )
    left = -(-inner // ep)

    def must_share(name: str, size: int) -> Refusal:
        return (
            (ep != 1) & (fsdp != 1) & (size % left != 0),
            lambda: (
                f"model.{name} = {size} can't be sharded over the {left} ranks that "
                f"layout.ep = {ep} leaves of fsdp x cp = {fsdp} x {cp}: change ep or fsdp."
            ),
        )

    yield must_share("hidden_size", hidden_size)
    if experts.bias:
        yield must_share("experts.ffn_size", experts.ffn_size)


def _twin_experts(of: Purpose, schedule: Any, rebalance_every: int) -> Iterator[Refusal]:
    experts = of.model.experts
    balances = experts is not None and (experts.bias_update_speed > 0 or rebalance_every > 0)
    yield (
        (schedule == DUALPIPE) & balances,
        lambda: (
            'layout.schedule = "dualpipe" gives every stage to two ranks, which would balance '
            "their experts differently: set model.experts.bias_update_speed and "
            'layout.rebalance_every to 0, or use "dualpipev".'
        ),
    )


def _recompute(_of: Purpose, recompute: int, recompute_layers: int | str) -> Iterator[Refusal]:
    yield (
        recompute == 0 and recompute_layers != "all",
        lambda: (
            f"layout.recompute_layers = {recompute_layers} has no effect with "
            'layout.recompute = "none": set recompute to "full" or "selective".'
        ),
    )


def _offload_activations(
    _of: Purpose, offload_activations: Any, recompute: Any
) -> Iterator[Refusal]:
    yield (
        offload_activations & (recompute == _SELECTIVE),
        lambda: (
            'layout.offload = ["activations"] would move block inputs only, for what '
            'layout.recompute = "selective" keeps stays on the device: set recompute to "full" or '
            '"none".'
        ),
    )


def _offload_params(
    of: Purpose, offload_params: Any, offload_optimizer: Any, fsdp: Any, tp: Any
) -> Iterator[Refusal]:
    yield (
        offload_params & (fsdp == 1),
        lambda: (
            'layout.offload = ["params"] keeps shards on the host, and layout.fsdp = 1 makes none: '
            "raise fsdp or offload the optimizer only."
        ),
    )
    yield (
        offload_params & offload_optimizer,
        lambda: (
            "layout.offload: params takes the optimizer along, so that optimizer has no effect: "
            "remove it."
        ),
    )
    yield (
        offload_params & (tp != 1) & _is_on_cuda(of),
        lambda: (
            'layout.offload = ["params"] leaves gradients on the host, where layout.tp = '
            f"{tp} can't add them up: set tp = 1 or offload the optimizer only."
        ),
    )


def _fp8_sides(of: Purpose, precision: Any, tp: Any) -> Iterator[Refusal]:
    """fp8 hardware multiplies matrices with sides that are multiples of 16."""
    sides = {"hidden_size": of.model.hidden_size}
    sides |= {name: value // tp for name, value in fp8_sides(of.model).items()}
    unfit = {name: side % FP8_MULTIPLE != 0 for name, side in sides.items()}

    def sentence() -> str:
        name = next(name for name in sides if unfit[name])
        return (
            f'layout.precision = "fp8" needs sides of {FP8_MULTIPLE}, and model.{name} leaves '
            f'{sides[name]} to a rank: change the model or layout.tp, or use "bf16".'
        )

    yield (precision == _FP8) & functools.reduce(operator.or_, unfit.values()), sentence


def _fp8_tokens(of: Purpose, precision: Any, micro_batch: Any, cp: Any) -> Iterator[Refusal]:
    tokens = micro_batch * (of.seq_len // cp)
    yield (
        (precision == _FP8) & (tokens % FP8_MULTIPLE != 0) & _is_on_cuda(of),
        lambda: (
            f'layout.precision = "fp8" needs a multiple of {FP8_MULTIPLE} tokens in a rank\'s '
            f"micro-batch, not {tokens}: change layout.micro_batch or train.seq_len."
        ),
    )


def fp8_sides(model: Model) -> dict[str, int]:
    """Sides of a block's linear layers that tensor parallelism shares out."""
    sides = {"num_heads x head_dim": model.num_heads * model.value_dim}
    if model.latent is None:
        sides["num_kv_heads x head_dim"] = model.num_kv_heads * model.head_dim
    if any(not model.has_experts(layer) for layer in range(model.num_layers)):
        sides["ffn_size"] = model.ffn_size
    return sides


def _is_on_cuda(of: Purpose) -> bool:
    return of.device.kind == "cuda"


def _batch(of: Purpose, dp: Any, fsdp: Any, micro_batch: Any) -> Iterator[Refusal]:
    batch, ranks = of.global_batch, dp * fsdp
    yield (
        batch % (ranks * micro_batch) != 0,
        lambda: (
            f"train.global_batch = {batch} is not a multiple of {ranks} ranks x micro-batches of "
            f"{micro_batch}: use {nearest_multiple(batch, ranks * micro_batch)}, the nearest that "
            "works."
        ),
    )


def nearest_multiple(value: int, factor: int) -> int:
    """The multiple of factor, at least one factor, that is nearest to value."""
    return max(1, round(value / factor)) * factor


def _must_divide(name: str, value: int, axis: str, ranks: Any) -> Refusal:
    def sentence() -> str:
        works = ", ".join(str(size) for size in range(1, ranks + 1) if value % size == 0)
        return (
            f"layout.{axis} = {ranks} does not divide {name} = {value}: "
            f"use a divisor ({works}) or change the model."
        )

    return value % ranks != 0, sentence


def _rules(*functions: Callable[..., Iterator[Refusal]], of_layers: bool = False) -> Iterator[Rule]:
    for each in functions:
        _, *reads = inspect.signature(each).parameters
        yield Rule(each, tuple(reads), of_layers)


RULES: tuple[Rule, ...] = (
    *_rules(_precision, _kernels, _family, _ranks, _zero, _ulysses),
    *_rules(_whole_layers, _context, _tensor, of_layers=True),
    *_rules(_shared_sequence, _async_tp, _rebalancing),
    *_rules(_experts, of_layers=True),
    *_rules(_batch, _pipeline, _no_split),
    *_rules(_schedule, _stages, _split, _twin_experts, of_layers=True),
    *_rules(_recompute, _offload_activations, _offload_params),
    *_rules(_fp8_sides, _fp8_tokens, of_layers=True),
)
"""In the order in which a layout that breaks several is told of one."""
