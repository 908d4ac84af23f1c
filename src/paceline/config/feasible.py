"""What a layout demands of model, cluster and batch: each rule refuses in one sentence.

`refusal` is pure and knows the rules of every technique, so that an impossible layout is refused
before any process starts, and the planner can ask about thousands of them. What it lets pass runs
(a property test draws layouts and runs them).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from paceline.config.errors import InputError
from paceline.config.frozen import FrozenConfig, size
from paceline.config.hardware import Cluster
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.recommender import Dlrm
from paceline.config.schedule import refusal as schedule_refusal
from paceline.config.vision import ResNet

# What stored parameters may be computed with.
ARITHMETIC = {
    "fp64": ("fp64",),
    "fp32": ("fp32", "bf16", "fp16", "fp8"),
    "bf16": ("bf16", "fp8"),
}
FP8_MULTIPLE = 16


class Demand(NamedTuple):
    """A concrete layout and what it is for."""

    layout: Layout
    model: Model | FrozenConfig
    """A decoder's shapes, or a CustomModel, of which nothing is known."""
    cluster: Cluster
    seq_len: int
    global_batch: int


Rule = Callable[[Demand], Iterator[str]]


def check_layout(
    layout: Layout, model: FrozenConfig, cluster: Cluster, seq_len: int, global_batch: int
) -> None:
    """Refuse what can't run, for a concrete layout: pure, and before any process starts.

    Args:
        layout: concrete.
        model: a Model, or a CustomModel.
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
    return next((sentence for rule in _RULES for sentence in rule(demand)), None)


def _ranks(demand: Demand) -> Iterator[str]:
    layout, cluster = demand.layout, demand.cluster
    ranks = cluster.num_devices
    if layout.num_ranks != ranks:
        axes = {key: getattr(layout, key) for key in ("pp", "dp", "fsdp", "cp", "tp")}
        used = {key: size for key, size in axes.items() if size != 1} or {"dp": 1}
        yield (
            f"layout.{' x '.join(used)} = {' x '.join(map(str, used.values()))} asks for "
            f"{layout.num_ranks} ranks but the cluster has {ranks}: change one of them or "
            "cluster.devices_per_node."
        )


def _precision(demand: Demand) -> Iterator[str]:
    layout, device = demand.layout, demand.cluster.known_device
    for name, wish in (("precision", layout.precision), ("param_dtype", layout.param_dtype)):
        if wish not in device.precisions:
            yield (
                f'layout.{name} = "{wish}" is not supported by {device.name}: '
                f"use one of {', '.join(device.precisions)}."
            )
    if layout.precision not in ARITHMETIC[layout.param_dtype]:
        yield (
            f'layout.param_dtype = "{layout.param_dtype}" needs layout.precision = '
            f'"{ARITHMETIC[layout.param_dtype][0]}", not "{layout.precision}": change one of them.'
        )


def _kernels(demand: Demand) -> Iterator[str]:
    device = demand.cluster.known_device
    if demand.layout.kernels == "triton" and device.kind != "cuda":
        yield (
            f'layout.kernels = "triton" needs CUDA devices and the cluster has {device.name}: '
            'use "auto" or "reference".'
        )
    if demand.layout.kernels == "triton" and demand.layout.precision == "fp64":
        yield (
            'layout.kernels = "triton" can\'t compute in layout.precision = "fp64": set kernels to '
            '"reference" or precision to fp32 or less.'
        )


def _known_model(demand: Demand) -> Iterator[str]:
    """Only a decoder says how it can be cut; any module can be replicated or sharded."""
    layout = demand.layout
    if isinstance(demand.model, Model):
        return
    for axis in ("tp", "pp", "cp", "ep"):
        if getattr(layout, axis) != 1:
            yield (
                f"layout.{axis} = {getattr(layout, axis)} needs a model that Paceline knows the "
                f"layers of, not one of your own: set it to 1 and use dp or fsdp."
            )


def _images(demand: Demand) -> Iterator[str]:
    """Batch norms need two values a channel; and a ResNet's products are convolutions."""
    layout, model = demand.layout, demand.model
    if not isinstance(model, ResNet):
        return
    if layout.precision == "fp8":
        yield ('layout.precision = "fp8" has no effect on convolutions: use "bf16" or "fp16".')
    if layout.micro_batch == 1 and model.convolutions[-1].out_side == 1:
        yield (
            f"layout.micro_batch = 1 with model.image_size = {model.image_size} leaves the last "
            "batch norms one value a channel, and statistics need two: raise one of them."
        )


def _shared_statistics(demand: Demand) -> Iterator[str]:
    if demand.layout.sync_batch_norm and isinstance(demand.model, Model | Dlrm):
        yield (
            f'layout.sync_batch_norm = true has no effect on model.family = "{demand.model.family}"'
            ", which has no batch norms: leave it out."
        )


def _zero(demand: Demand) -> Iterator[str]:
    layout = demand.layout
    if (layout.zero == 0) != (layout.fsdp == 1):
        yield (
            f"layout.zero = {layout.zero} has nothing to shard over with layout.fsdp = 1: "
            "raise fsdp or set zero = 0."
            if layout.fsdp == 1
            else f"layout.zero = 0 contradicts layout.fsdp = {layout.fsdp}: set zero to 1, 2 or 3."
        )
    if layout.pp != 1 and layout.zero in (2, 3):
        yield (
            f"layout.zero = {layout.zero} would gather or reduce once per micro-batch in a "
            f"pipeline (layout.pp = {layout.pp}): set zero = 1."
        )


def _tensor(demand: Demand) -> Iterator[str]:
    layout, model = demand.layout, demand.model
    if layout.tp == 1:
        if layout.sequence_parallel:
            yield "layout.sequence_parallel has no effect with layout.tp = 1: raise tp or unset it."
        if layout.async_tp:
            yield "layout.async_tp has no effect with layout.tp = 1: raise tp or unset it."
        return
    assert isinstance(model, Model)
    for name, value in tensor_sizes(model).items():
        yield from _must_divide(f"model.{name}", value, "tp", size(layout.tp))
    tokens = demand.seq_len // size(layout.cp)
    if layout.sequence_parallel and tokens % size(layout.tp):
        yield (
            f"train.seq_len = {demand.seq_len} leaves {tokens} tokens to a rank's sequence, which "
            f"layout.tp = {layout.tp} with sequence_parallel does not divide: "
            f"use a seq_len that is a multiple of {size(layout.tp) * size(layout.cp)}."
        )
    if layout.async_tp:
        device = demand.cluster.known_device
        if device.kind != "cuda" or not layout.compile or not layout.sequence_parallel:
            yield (
                "layout.async_tp needs CUDA devices, layout.compile = true and "
                "layout.sequence_parallel = true: set those or unset async_tp."
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


def _pipeline(demand: Demand) -> Iterator[str]:
    layout, model = demand.layout, demand.model
    if layout.pp == 1:
        for name, none in (("schedule", "none"), ("stages_per_rank", 1), ("split", ())):
            if getattr(layout, name) != none:
                yield (
                    f"layout.{name} = {_shown(getattr(layout, name))} has no effect with "
                    f"layout.pp = 1: raise pp or remove it."
                )
        return
    assert isinstance(model, Model)
    assert layout.split != "auto"
    pp, per_rank = size(layout.pp), size(layout.stages_per_rank)
    if layout.schedule == "none":
        yield f'layout.schedule = "none" can\'t run layout.pp = {pp}: choose a schedule.'
        return
    batches = demand.global_batch // (layout.num_data_ranks * size(layout.micro_batch))
    sentence = schedule_refusal(layout.schedule, pp, per_rank, batches)
    if sentence is not None:
        yield sentence
    stages = num_stages(layout)
    if stages > model.num_layers:
        yield (
            f"layout.pp = {pp} with {per_rank} stages per rank makes {stages} stages, more than "
            f"the model's {model.num_layers} layers: lower pp or stages_per_rank."
        )
    elif len(layout.split) != stages or sum(layout.split) != model.num_layers:
        yield (
            f"layout.split = {list(layout.split)} must give the layers of {stages} stages, "
            f'{model.num_layers} in all: correct it or leave it to "auto".'
        )


def num_stages(layout: Layout) -> int:
    """Stages that a micro-batch passes; DualPipe's two per rank are one of each direction."""
    per_rank = 1 if layout.schedule == "dualpipe" else size(layout.stages_per_rank)
    return size(layout.pp) * per_rank


def _context(demand: Demand) -> Iterator[str]:
    layout, model = demand.layout, demand.model
    cp, ulysses = size(layout.cp), size(layout.ulysses)
    if cp % ulysses:
        yield (
            f"layout.ulysses = {ulysses} does not divide layout.cp = {cp}, of whose ranks it is a "
            "part: choose a divisor of cp."
        )
        return
    if cp == 1:
        return
    assert isinstance(model, Model)
    ring = cp // ulysses
    parts = (2 * ring if ring > 1 else 1) * ulysses
    if demand.seq_len % parts:
        nearest = max(1, round(demand.seq_len / parts)) * parts
        yield (
            f"train.seq_len = {demand.seq_len} can't be cut into the {parts} parts that "
            f"layout.cp = {cp} needs: use {nearest}, the nearest that works."
        )
    heads = model.num_heads // size(layout.tp)
    if heads % ulysses:
        yield (
            f"layout.ulysses = {ulysses} can't share out the {heads} heads that a rank has: "
            "choose a divisor, or pass keys in a ring instead (ulysses = 1)."
        )


def _experts(demand: Demand) -> Iterator[str]:
    layout, model = demand.layout, demand.model
    ep = size(layout.ep)
    if ep == 1:
        if layout.rebalance_every:
            yield (
                f"layout.rebalance_every = {layout.rebalance_every} has no effect with "
                "layout.ep = 1: raise ep or set it to 0."
            )
        return
    assert isinstance(model, Model)
    if model.experts is None:
        yield f"layout.ep = {ep} needs a model with experts, and this one is dense: set ep = 1."
        return
    yield from _must_divide("model.experts.num_experts", model.experts.num_experts, "ep", ep)
    inner = size(layout.fsdp) * size(layout.cp)
    data = inner * size(layout.dp)
    if data % ep or (ep % inner and inner % ep):
        yield (
            f"layout.ep = {ep} can't be folded over the {data} data ranks (dp x fsdp x cp = "
            f"{layout.dp} x {layout.fsdp} x {layout.cp}): it must divide fsdp x cp, or be a "
            "multiple of it that divides all."
        )
        return
    left = max(1, inner // ep)
    if layout.fsdp != 1 and model.hidden_size % left:
        yield (
            f"model.hidden_size = {model.hidden_size} can't be sharded over the {left} ranks that "
            f"layout.ep = {ep} leaves of fsdp x cp = {layout.fsdp} x {layout.cp}: change ep or "
            "fsdp."
        )


def _twin_experts(demand: Demand) -> Iterator[str]:
    layout, model = demand.layout, demand.model
    if layout.schedule != "dualpipe" or not isinstance(model, Model) or model.experts is None:
        return
    if model.experts.bias_update_speed or layout.rebalance_every:
        yield (
            'layout.schedule = "dualpipe" gives every stage to two ranks, which would balance '
            "their experts differently: set model.experts.bias_update_speed and "
            'layout.rebalance_every to 0, or use "dualpipev".'
        )


def _memory(demand: Demand) -> Iterator[str]:
    layout = demand.layout
    if layout.recompute == "none" and layout.recompute_layers != "all":
        yield (
            f"layout.recompute_layers = {layout.recompute_layers} has no effect with "
            'layout.recompute = "none": set recompute to "full" or "selective".'
        )
    if "activations" in layout.offload and layout.recompute == "selective":
        yield (
            'layout.offload = ["activations"] would move block inputs only, for what '
            'layout.recompute = "selective" keeps stays on the device: set recompute to "full" or '
            '"none".'
        )
    if "params" in layout.offload and layout.fsdp == 1:
        yield (
            'layout.offload = ["params"] keeps shards on the host, and layout.fsdp = 1 makes none: '
            "raise fsdp or offload the optimizer only."
        )
    if {"params", "optimizer"} <= set(layout.offload):
        yield (
            "layout.offload: params takes the optimizer along, so that optimizer has no effect: "
            "remove it."
        )
    if "params" in layout.offload and _is_on_cuda(demand) and layout.tp != 1:
        yield (
            f'layout.offload = ["params"] leaves gradients on the host, where layout.tp = '
            f"{layout.tp} can't add them up: set tp = 1 or offload the optimizer only."
        )


def _fp8(demand: Demand) -> Iterator[str]:
    """fp8 hardware multiplies matrices with sides that are multiples of 16."""
    layout, model = demand.layout, demand.model
    if layout.precision != "fp8" or not isinstance(model, Model):
        return
    tp = size(layout.tp)
    sides = {"hidden_size": model.hidden_size} | {
        name: value // tp for name, value in fp8_sides(model).items()
    }
    for name, side in sides.items():
        if side % FP8_MULTIPLE:
            yield (
                f'layout.precision = "fp8" needs sides of {FP8_MULTIPLE}, and model.{name} leaves '
                f'{side} to a rank: change the model or layout.tp, or use "bf16".'
            )
    tokens = size(layout.micro_batch) * (demand.seq_len // size(layout.cp))
    if _is_on_cuda(demand) and tokens % FP8_MULTIPLE:
        yield (
            f'layout.precision = "fp8" needs a multiple of {FP8_MULTIPLE} tokens in a rank\'s '
            f"micro-batch, not {tokens}: change layout.micro_batch or train.seq_len."
        )


def fp8_sides(model: Model) -> dict[str, int]:
    """Sides of a block's linear layers that tensor parallelism shares out."""
    sides = {"num_heads x head_dim": model.num_heads * model.value_dim}
    if model.latent is None:
        sides["num_kv_heads x head_dim"] = model.num_kv_heads * model.head_dim
    if any(not model.has_experts(layer) for layer in range(model.num_layers)):
        sides["ffn_size"] = model.ffn_size
    return sides


def _is_on_cuda(demand: Demand) -> bool:
    device = demand.cluster.known_device
    return device.kind == "cuda"


def _batch(demand: Demand) -> Iterator[str]:
    layout = demand.layout
    ranks, micro_batch = layout.num_data_ranks, size(layout.micro_batch)
    if demand.global_batch % (ranks * micro_batch):
        nearest = nearest_multiple(demand.global_batch, ranks * micro_batch)
        yield (
            f"train.global_batch = {demand.global_batch} is not a multiple of {ranks} ranks x "
            f"micro-batches of {micro_batch}: use {nearest}, the nearest that works."
        )


def nearest_multiple(value: int, factor: int) -> int:
    """The multiple of factor, at least one factor, that is nearest to value."""
    return max(1, round(value / factor)) * factor


def _must_divide(name: str, value: int, axis: str, ranks: int) -> Iterator[str]:
    if value % ranks:
        works = ", ".join(str(size) for size in range(1, ranks + 1) if value % size == 0)
        yield (
            f"layout.{axis} = {ranks} does not divide {name} = {value}: "
            f"use a divisor ({works}) or change the model."
        )


def _shown(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else str(value)


_RULES: tuple[Rule, ...] = (
    _precision,
    _kernels,
    _known_model,
    _images,
    _shared_statistics,
    _ranks,
    _zero,
    _context,
    _tensor,
    _experts,
    _batch,
    _pipeline,
    _twin_experts,
    _memory,
    _fp8,
)
