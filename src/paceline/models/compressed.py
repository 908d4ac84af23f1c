"""Folders of quantised weights, as vLLM and transformers read them by compressed-tensors.

What `config.json` holds besides is its `quantization_config`. A matrix of 8 bits is an int8 tensor
with `weight_scale`, one for each row; tokens are rounded to 8 bits, too. One of 4 bits is
`weight_packed`, eight numbers in an int32 with the first in its lowest bits, and a scale for each
group. Head, routers, experts and `kv_b_proj` keep their type.

Format: https://github.com/vllm-project/compressed-tensors ("int-quantized", "pack-quantized").
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor, nn

from paceline.config.errors import InputError
from paceline.config.files import read_json
from paceline.config.huggingface import from_hf
from paceline.config.model import Model
from paceline.models.decoder import Decoder
from paceline.models.names import sources
from paceline.models.quantised import HEAD, Bits, QuantisedMatrix, matrices_of, quantised
from paceline.models.weights import (
    Shapes,
    check_shapes,
    copy_weights,
    opened,
    read_shapes,
    shapes_of,
    tensor_files,
)

CONFIG = "quantization_config"
_OBJECT = TypeAdapter(dict[str, Any])
_CURE = "put a good copy there"
_FORMATS: dict[Bits, str] = {8: "int-quantized", 4: "pack-quantized"}
_PER_INT, _ZERO = 8, 8
"""Numbers of 4 bits in an int32, and the one that is stored for 0."""
_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


class _Weights(BaseModel):
    num_bits: Literal[4, 8]
    type: Literal["int"]
    symmetric: Literal[True]
    strategy: Literal["channel", "group"]
    group_size: Annotated[int, Field(ge=_PER_INT, le=10**6, multiple_of=_PER_INT)] | None = None


class _Group(BaseModel):
    targets: tuple[Literal["Linear"]]
    weights: _Weights


class _Groups(BaseModel):
    model_config = ConfigDict(extra="forbid")
    group_0: _Group


class _Said(BaseModel):
    """What has to be said of a network for its weights to be read."""

    quant_method: Literal["compressed-tensors"]
    format: Literal["int-quantized", "pack-quantized"]
    config_groups: _Groups


def narrow_names(model: Model) -> dict[str, str]:
    """Modules whose matrices are written in fewer bits: their names, and ours."""
    with torch.device("meta"):
        ours = {name for name, _ in matrices_of(Decoder(model))} - {HEAD}
    named = sources(model, shapes_of(model))
    if any(source.join is not None for source in named.values()):
        raise InputError(
            "Weights in fewer bits are written of networks whose files keep queries, keys and "
            "values apart, and GPT-2's and GPT-NeoX's put them together: leave out --weights, and "
            'set serve.weights = "int8" or "int4" to serve them so.'
        )
    return {
        theirs.removesuffix(".weight"): source.name.removesuffix(".weight")
        for theirs, source in named.items()
        if source.name.removesuffix(".weight") in ours and source.name.endswith(".weight")
    }


def narrow_config(model: Model, bits: Bits, group_size: int) -> dict[str, Any]:
    """The `quantization_config` of a network.

    Args:
        group_size: weights that share a scale in 4 bits.
    """
    names = narrow_names(model)
    others = [
        name.removesuffix(".weight")
        for name, source in sources(model, shapes_of(model)).items()
        if name.endswith(".weight") and "norm" not in name and source.name != "embed.weight"
    ]
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    shared = {"strategy": "group", "group_size": group_size}
    group = {
        "targets": ["Linear"],
        "weights": {**weights, **({"strategy": "channel"} if bits == 8 else shared)},
        "input_activations": _TOKENS if bits == 8 else None,
        "output_activations": None,
        "format": _FORMATS[bits],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[bits],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted({"lm_head", *others} - names.keys()),
        "kv_cache_scheme": None,
    }


def narrowed(
    model: Model, bits: Bits, group_size: int, dtype: torch.dtype
) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """What makes of a network's tensors, by their names, those that are stored.

    Args:
        group_size: weights that share a scale in 4 bits.
        dtype: of the scales.

    Raises:
        InputError: groups don't divide a matrix.
    """
    names, shapes = narrow_names(model), shapes_of(model)
    for theirs, ours in names.items():
        columns = shapes[f"{ours}.weight"][1]
        if bits == 4 and columns % group_size:
            raise InputError(
                f"{theirs} has {columns} inputs, which groups of {group_size} don't divide: choose "
                "another --group."
            )

    def of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            module = name.removesuffix(".weight")
            if module in names and module != name:
                size = group_size if bits == 4 else None
                matrix = quantised(tensor, bits, size, dtype)
                stored |= narrow_tensors(module, matrix, dtype)
            else:
                stored[name] = tensor
        return stored

    return of


def narrow_tensors(name: str, matrix: QuantisedMatrix, dtype: torch.dtype) -> dict[str, Tensor]:
    """What is stored of a matrix.

    Args:
        name: of the module.
        dtype: of the scales, which fit into it.
    """
    scales = {f"{name}.weight_scale": matrix.scales.to(dtype)}
    if matrix.bits == 8:
        return {f"{name}.weight": matrix.values, **scales}
    shape = torch.tensor(matrix.values.shape, dtype=torch.int64)
    return {
        f"{name}.weight_packed": _packed(matrix.values),
        **scales,
        f"{name}.weight_shape": shape,
    }


def _packed(values: Tensor) -> Tensor:
    """(rows, columns / 8) int32 of (rows, columns) int8."""
    shifts = 4 * torch.arange(_PER_INT)
    return ((values.long() + _ZERO).unflatten(1, (-1, _PER_INT)) << shifts).sum(-1).int()


def _unpacked(packed: Tensor) -> Tensor:
    """The inverse of `_packed`."""
    shifts = 4 * torch.arange(_PER_INT, dtype=torch.int32)
    return ((packed[..., None] >> shifts & 15) - _ZERO).to(torch.int8).flatten(1)


def is_narrow(folder: Path) -> bool:
    """Whether a folder's weights are in fewer bits."""
    return read_json(folder / "config.json", _OBJECT, _CURE).get(CONFIG) is not None


def read_narrow(
    folder: Path, dtype: torch.dtype, device: torch.device
) -> tuple[Decoder, dict[str, QuantisedMatrix]]:
    """Read a network whose matrices are in fewer bits.

    Args:
        dtype: of everything else.

    Returns:
        a decoder whose narrow matrices have no memory (they are on the meta device), and these
        matrices by their modules' names.

    Raises:
        InputError: another form than is written here, tensors that aren't those of the network, or
            damaged files.
    """
    said = read_json(folder / "config.json", _OBJECT, _CURE)
    bits, group_size = _form_of(said.pop(CONFIG), folder)
    model = from_hf(said)
    narrow, shapes, files = narrow_names(model), shapes_of(model), tensor_files(folder)
    whole: Shapes = {}
    parts: dict[str, Shapes] = {}
    for name, source in sources(model, shapes).items():
        shape = shapes[source.name] if source.expert is None else shapes[source.name][1:]
        module = name.removesuffix(".weight")
        if module in narrow and module != name:
            parts[module] = _part_shapes(module, shape, bits, group_size)
        else:
            whole[name] = shape
    expected = whole | {name: shape for each in parts.values() for name, shape in each.items()}
    check_shapes(expected, read_shapes(files, model), str(folder))
    decoder = _room(model, set(narrow.values()), dtype, device)
    copy_weights(decoder, {name: files[name] for name in whole})
    matrices = {}
    for module, each in parts.items():
        tensors = {}
        for name in each:
            with opened(files[name]) as file:
                tensors[name.removeprefix(f"{module}.")] = file.get_tensor(name).to(device)
        matrices[narrow[module]] = _matrix(module, tensors, shapes[f"{narrow[module]}.weight"])
    return decoder, matrices


def _part_shapes(module: str, shape: tuple[int, ...], bits: Bits, group_size: int) -> Shapes:
    """What is stored of a matrix of this shape."""
    rows, columns = shape
    if bits == 8:
        return {f"{module}.weight": shape, f"{module}.weight_scale": (rows, 1)}
    return {
        f"{module}.weight_packed": (rows, columns // _PER_INT),
        f"{module}.weight_scale": (rows, columns // group_size),
        f"{module}.weight_shape": (2,),
    }


def _matrix(module: str, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> QuantisedMatrix:
    is_whole = "weight" in parts
    stored = parts["weight" if is_whole else "weight_packed"]
    scales = parts["weight_scale"].float()
    if stored.dtype != (torch.int8 if is_whole else torch.int32):
        raise InputError(f"{module} is stored as {stored.dtype}, not in whole numbers: {_CURE}.")
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise InputError(f"{module} has a scale that is no positive number: {_CURE}.")
    if not is_whole and tuple(parts["weight_shape"].tolist()) != shape:
        raise InputError(f"{module} is said to have another shape than {shape}: {_CURE}.")
    return QuantisedMatrix(stored if is_whole else _unpacked(stored), scales, 8 if is_whole else 4)


def _room(model: Model, narrow: set[str], dtype: torch.dtype, device: torch.device) -> Decoder:
    """A network without values, and without memory for the matrices of the named modules."""
    with torch.device("meta"):
        decoder = Decoder(model)
    for name, module in decoder.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            where = "meta" if name in narrow and key == "weight" else device
            empty = torch.empty_like(parameter, dtype=dtype, device=where)
            setattr(module, key, nn.Parameter(empty, requires_grad=False))
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, torch.empty_like(buffer, device=device))
    return decoder


def _form_of(said: Any, folder: Path) -> tuple[Bits, int]:
    """The bits of a `quantization_config`, and the weights that share a scale in 4 bits.

    Raises:
        InputError: it is not like one that is written here.
    """
    try:
        known = _Said.model_validate(said)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (CONFIG, *first["loc"])))
        raise InputError(
            f"{folder / 'config.json'}: {where} is not as paceline export "
            "writes it (compressed-tensors with int8 rows, or int4 groups): serve the weights that "
            "it was made from."
        ) from None
    weights = known.config_groups.group_0.weights
    if known.format != _FORMATS[weights.num_bits] or (weights.num_bits == 4) != (
        weights.group_size is not None
    ):
        raise InputError(
            f"{folder / 'config.json'}: quantization_config has {weights.num_bits} bits as "
            f"{known.format}, and paceline reads 8 bits by rows and 4 bits by groups: serve the "
            "weights that it was made from."
        )
    return weights.num_bits, weights.group_size or 0
