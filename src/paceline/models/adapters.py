"""Adapters of low rank beside the matrices of a decoder, which stay as they are.

How it works: `adapt` puts an `AdaptedLinear` in the place of each linear layer that is named. It
keeps the layer's weight and bias under their names, and adds two narrow layers: what they make of
the input, times a factor, is added to what the matrix makes. The second one begins as zero, so that
nothing is changed at first. `merged` gives the weights of the network without adapters that
computes the same.

With magnitudes (DoRA) the matrix and its adapter together say only the direction of each row; its
length is a parameter, and no gradient goes through the division by the length that they have.

The matrices may be kept in 4 bits (QLoRA, `nf4`): `weight` is then a tensor of bytes.

Routed experts have an adapter each, stacked as their weights are and multiplied in the same grouped
products (`AdaptedExperts`). Gate and up, which read the same rows, share one, as in PEFT.

Papers: LoRA https://arxiv.org/abs/2106.09685, DoRA https://arxiv.org/abs/2402.09353, QLoRA
https://arxiv.org/abs/2305.14314.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.local_part import local_part
from paceline.config.errors import InputError
from paceline.config.finetune import Finetune, fits, narrow_bytes
from paceline.kernels.experts import grouped_linear
from paceline.models import nf4
from paceline.models.moe import Experts, Stacks
from paceline.models.placements import Style
from paceline.models.shares import Streams, assign

DOWN, UP, MAGNITUDE = "lora_a.weight", "lora_b.weight", "magnitude"
_OF_ADAPTERS = (f".{DOWN}", f".{UP}", f".{MAGNITUDE}")
# By what tensor parallelism does with a matrix, what it does with the two of its adapter.
_STYLES: Mapping[Style, tuple[Style, Style]] = {
    "column": ("inner", "column"),
    "row": ("summand", "inner"),
    "summand": ("summand", "inner"),
    "inner": ("inner", "inner"),
}
_STACKED = ".experts.adapters."
# Of experts: what an adapter stands beside, and what tensor parallelism does with its two matrices.
_MATRICES: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
_EXPERT_STYLES: Mapping[str, tuple[Style, Style]] = {
    "gate_up_proj": ("experts_inner", "experts"),
    "down_proj": ("experts", "experts_inner"),
}


class AdaptedLinear(nn.Linear):
    """A linear layer that stays as it is, and its adapter."""

    magnitude: nn.Parameter | None  # (out,)
    is_off = False
    """Computes as if there were no adapter."""

    def __init__(self, base: nn.Linear, finetune: Finetune) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        if finetune.is_narrow:
            width = narrow_bytes(base.in_features, double=finetune.base == "nf4_double")
            room = torch.empty(base.out_features, width, dtype=torch.uint8)
            self.weight = nn.Parameter(room, requires_grad=False)
        self.scaling, self.dropout = finetune.scaling, finetune.dropout
        self.lora_a = nn.Linear(base.in_features, finetune.rank, bias=False)
        self.lora_b = nn.Linear(finetune.rank, base.out_features, bias=False)
        self.lora_a.requires_grad_(finetune.trains("a"))
        self.lora_b.requires_grad_(finetune.trains("b"))
        length = nn.Parameter(torch.empty(base.out_features)) if finetune.decomposed else None
        self.register_parameter("magnitude", length)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        if self.is_off:
            plain = _product(x, self.weight)
            return plain if self.bias is None else plain + self.bias
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        added = self.lora_b(self.lora_a(dropped)) * self.scaling
        plain = _product(x, self.weight)
        if self.magnitude is not None:
            change = self.magnitude / self._row_lengths() - 1  # (out,)
            turned = plain if dropped is x else _product(dropped, self.weight)
            added = change * turned + (change + 1) * added
        return plain + added if self.bias is None else plain + self.bias + added

    @torch.no_grad()
    def _row_lengths(self) -> Tensor:
        """Of the matrix and its adapter together: (out,)."""
        down, up = self.lora_a.weight, self.lora_b.weight
        return (_dense(self.weight, down) + self.scaling * (up @ down)).norm(dim=1)


class _Stack(nn.Module):
    """A matrix of each expert."""

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))


class ExpertAdapter(nn.Module):
    """What is added to a stacked matrix of experts.

    Args:
        sizes: experts, inputs and outputs.
        finetune: rank and factor.
    """

    def __init__(self, sizes: tuple[int, int, int], finetune: Finetune) -> None:
        super().__init__()
        num, inputs, outputs = sizes
        self.scaling = finetune.scaling
        self.lora_a = _Stack(num, inputs, finetune.rank)
        self.lora_b = _Stack(num, finetune.rank, outputs)
        self.lora_a.requires_grad_(finetune.trains("a"))
        self.lora_b.requires_grad_(finetune.trains("b"))


class AdaptedExperts(Experts):
    """Experts that stay as they are, and their adapters.

    Args:
        base: whose weights are taken.
        finetune: rank and factor.
        matrices: "gate_up_proj", whose outputs are those of gate and up in turn, so that tensor
            parallelism cuts both; "down_proj"; or both.
    """

    is_off = False
    """Computes as if there were no adapters."""

    def __init__(self, base: Experts, finetune: Finetune, matrices: Collection[str]) -> None:
        nn.Module.__init__(self)
        self.limit = base.limit
        for name, parameter in base._parameters.items():
            self.register_parameter(name, parameter)
        num, ffn, hidden = base.gate_proj.shape
        sizes = {"gate_up_proj": (num, hidden, 2 * ffn), "down_proj": (num, ffn, hidden)}
        self.adapters = nn.ModuleDict(
            {name: ExpertAdapter(sizes[name], finetune) for name in matrices}
        )

    def gate_up(self, rows: Tensor, counts: Tensor, stacks: Stacks) -> tuple[Tensor, Tensor]:
        """As without adapters, and what they add."""
        gate, up = super().gate_up(rows, counts, stacks)
        added = self._added("gate_up_proj", rows, counts, stacks)
        return (gate, up) if added is None else (gate + added[:, ::2], up + added[:, 1::2])

    def down(self, inner: Tensor, counts: Tensor, stacks: Stacks) -> Tensor:
        """As without adapters, and what they add."""
        plain = super().down(inner, counts, stacks)
        added = self._added("down_proj", inner, counts, stacks)
        return plain if added is None else plain + added

    def _added(self, matrix: str, rows: Tensor, counts: Tensor, stacks: Stacks) -> Tensor | None:
        if self.is_off or matrix not in self.adapters:
            return None
        down, up = (stacks[f"adapters.{matrix}.{name}"] for name in (DOWN, UP))
        adapter = self.adapters[matrix]
        assert isinstance(adapter, ExpertAdapter)
        return grouped_linear(grouped_linear(rows, down, counts), up, counts) * adapter.scaling


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return nf4.product(x, weight) if weight.dtype == torch.uint8 else F.linear(x, weight)


def _dense(weight: Tensor, down: Tensor) -> Tensor:
    """The matrix beside an adapter as numbers: of its type; of the adapter's where it has 4 bits.

    Args:
        weight: the matrix.
        down: (rank, in) of its adapter.
    """
    if weight.dtype != torch.uint8:
        return weight
    return nf4.unpacked(weight, down.shape[1], down.dtype)


def adapt(decoder: nn.Module, finetune: Finetune) -> None:
    """Give matrices of a decoder adapters, in place, and let nothing else be trained.

    Raises:
        InputError: a pattern names no matrix of a block.
    """
    decoder.requires_grad_(False)
    names = adapted_names(decoder, finetune)
    for name in names:
        if not of_experts(name):
            base = decoder.get_submodule(name)
            assert isinstance(base, nn.Linear)
            _replace(decoder, name, AdaptedLinear(base, finetune))
    for stack in dict.fromkeys(name.rpartition(".")[0] for name in names if of_experts(name)):
        experts = decoder.get_submodule(stack)
        assert isinstance(experts, Experts)
        matrices = [name for name in _MATRICES if f"{stack}.{name}" in names]
        _replace(decoder, stack, AdaptedExperts(experts, finetune, matrices))


def _replace(decoder: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(decoder.get_submodule(parent), last, module)


def adapted_names(decoder: nn.Module, finetune: Finetune) -> list[str]:
    """The matrices of a decoder without adapters that get one: linear layers, and stacks of experts
    by the names that PEFT has for them ("blocks.3.ffn.experts.gate_up_proj").

    Raises:
        InputError: see `adapt`.
    """
    layers: list[str] = []
    for name, module in decoder.get_submodule("blocks").named_modules(prefix="blocks"):
        if isinstance(module, nn.Linear):
            layers.append(name)
        elif isinstance(module, Experts):
            layers += [f"{name}.{matrix}" for matrix in _MATRICES]
    for pattern in finetune.targets:
        if not any(fits(name, pattern) for name in layers):
            last = sorted({name.split(".ffn." if of_experts(name) else ".")[-1] for name in layers})
            raise InputError(
                f"finetune.targets: {pattern!r} names no matrix of the network, whose blocks have "
                f"{', '.join(last)}: correct it."
            )
    return [name for name in layers if finetune.names(name)]


def adapted_layers(module: nn.Module) -> dict[str, AdaptedLinear]:
    """All layers with adapters in a module, by name."""
    return {n: m for n, m in module.named_modules() if isinstance(m, AdaptedLinear)}


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Let the layers of a module compute as if they had no adapters."""
    adapted = AdaptedLinear | AdaptedExperts
    layers = [each for each in module.modules() if isinstance(each, adapted)]
    for layer in layers:
        layer.is_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_off = False


def adapter_placements(decoder: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    """How tensor parallelism cuts adapters: the way of their matrix along the side that both have.

    The narrow side is whole on every rank. What a rank's columns or rows contribute to the gradient
    of a matrix that is whole is added up over the ranks, as for norms.
    """
    found: dict[str, Style] = {}
    for name in adapted_layers(decoder):
        anywhere = ".".join("*" if part.isdigit() else part for part in name.split("."))
        down, up = _STYLES[styles[name if name in styles else anywhere]]
        found |= {f"{name}.lora_a": down, f"{name}.lora_b": up}
    for name, module in decoder.named_modules():
        if isinstance(module, ExpertAdapter):
            down, up = _EXPERT_STYLES[name.rpartition(".")[2]]
            found |= {f"{name}.lora_a": down, f"{name}.lora_b": up}
    return found


@torch.no_grad()
def init_adapters(decoder: nn.Module, generator: torch.Generator) -> None:
    """Let adapters begin without effect, and as PEFT does: U(-1, 1) / √in, and zero.

    A matrix has its values already. Every adapter has a stream of its own, as in
    `Decoder.init_weights`: the result doesn't depend on the ranks.
    """
    seed = int(torch.randint(2**62, (), generator=generator))
    streams = Streams(seed, torch.device("cpu"))
    # state_dict, not named_modules: its names are the same under checkpoint wrappers.
    state = decoder.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if name.endswith(f".{DOWN}"):
            full = torch.empty(tensor.shape).uniform_(-1, 1, generator=streams.of(name))
            assign(tensor, full * tensor.shape[-1] ** -0.5)
        elif name.endswith(f".{UP}"):
            tensor.zero_()
        elif name.endswith(f".{MAGNITUDE}"):
            layer = name.removesuffix(MAGNITUDE)
            base, down = (local_part(state[f"{layer}{each}"]) for each in ("weight", DOWN))
            local_part(tensor).copy_(_dense(base, down).norm(dim=1))


def is_of_adapter(name: str) -> bool:
    """Whether a tensor of a state belongs to an adapter."""
    return name.endswith(_OF_ADAPTERS)


def merged(weights: Mapping[str, Tensor], finetune: Finetune) -> dict[str, Tensor]:
    """The weights of a network without adapters that computes the same.

    Args:
        weights: whole, of a network with adapters; they are left as they are.
        finetune: what it was trained with.
    """
    found = {name: tensor for name, tensor in weights.items() if not is_of_adapter(name)}
    for name in weights:
        if not name.endswith(f".{DOWN}"):
            continue
        layer = name.removesuffix(f".{DOWN}")
        matrices = _beside(layer)
        for part, matrix in enumerate(matrices):
            base = _dense(weights[matrix], weights[name])
            wide = torch.promote_types(base.dtype, torch.float32)
            down, up = (weights[f"{layer}.{each}"].to(wide) for each in (DOWN, UP))
            whole = base.to(wide) + finetune.scaling * (up[..., part :: len(matrices), :] @ down)
            if f"{layer}.{MAGNITUDE}" in weights:
                length = weights[f"{layer}.{MAGNITUDE}"].to(wide)
                whole *= (length / whole.norm(dim=1))[:, None]
            found[matrix] = whole.to(base.dtype)
    return found


def of_experts(name: str) -> bool:
    """Whether a matrix, or a tensor of an adapter, is that of stacked experts."""
    return ".experts." in name


def _beside(layer: str) -> list[str]:
    """The matrices of an adapter, whose outputs are theirs in turn."""
    stack, is_stacked, kind = layer.partition(_STACKED)
    if not is_stacked:
        return [f"{layer}.weight"]
    return [f"{stack}.experts.{each}" for each in _MATRICES[kind]]
