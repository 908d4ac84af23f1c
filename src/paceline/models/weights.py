"""Decoder weights as Hugging Face directories: `config.json` and safetensors files.

Reading goes one tensor at a time, straight into the parameters (into this rank's share of them
where they are sharded), after the names and shapes of all files have been checked. Writing goes to
a hidden directory beside the target, which is renamed when everything is on the disk: a written
directory is complete or absent.

Only safetensors are read. Pickled weights (.bin, .pt) can run code when opened, and are refused.
This is for weights that come from or go to other programs; training state is another matter.

Format: https://huggingface.co/docs/safetensors
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.config.errors import InputError
from paceline.config.files import read_json, to_disk
from paceline.config.huggingface import from_hf, to_hf
from paceline.config.model import Model
from paceline.models.attention import Attend
from paceline.models.decoder import Decoder
from paceline.models.names import (
    StackJoin,
    TensorSource,
    as_stored,
    slots_name,
    sources,
    their_name,
)
from paceline.models.shares import assign, assign_row, held_rows

Shapes = dict[str, tuple[int, ...]]

_OBJECT = TypeAdapter(dict[str, Any])
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_TABLES = (
    *(".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"),
    *(".attention.bias", ".attention.masked_bias"),
)
"""What names of tensors end with that follow from the config.json."""
_OF_SENTENCES = (
    *("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids"),
    "cls.predictions.decoder.bias",  # the same as cls.predictions.bias
)
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def read_model(directory: str | Path) -> Model:
    """Read the shapes of a network from the `config.json` of a directory.

    Raises:
        InputError: there is none, or the decoder can't be this network.
    """
    return from_hf(_read_json(Path(directory) / "config.json"))


def read_decoder(
    directory: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attend: Attend | None = None,
) -> Decoder:
    """Build the network of a directory and load its weights.

    Args:
        directory: holds `config.json` and safetensors files.
        dtype: of the parameters. The rotary tables stay in fp32.
        device: where the parameters lie.
        attend: the attention core, as for `Decoder`.

    Raises:
        InputError: see `read_model` and `load_weights`.
    """
    decoder = decoder_room(read_model(directory), dtype, device, attend)
    load_weights(decoder, directory)
    return decoder


def decoder_room(
    model: Model,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    attend: Attend | None = None,
) -> Decoder:
    """A network without values, whose rotary tables stay in fp32; arguments as `read_decoder`."""
    with torch.device("meta"), _NoFirstValues():
        decoder = Decoder(model, attend)
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(dtype)
    # As `to_empty` does it, which imports sympy.
    return decoder._apply(lambda each: torch.empty(each.shape, dtype=each.dtype, device=device))


class _NoFirstValues(TorchFunctionMode):
    """Within it modules don't draw their first values: to do so on no device torch imports its
    compiler, which takes as long as the rest of it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **kwargs)


def check_weights(model: Model, directory: str | Path) -> dict[str, Path]:
    """Check that a directory holds the tensors of a network; only the files' headers are read.

    Returns:
        the file of each tensor.

    Raises:
        InputError: no safetensors there, a damaged file, or a tensor (the first one is named) that
            is missing, unexpected or of another shape.
    """
    files = tensor_files(Path(directory))
    shapes = shapes_of(model)
    found = read_shapes(files, model)
    _check_tied(model, found, files)
    wanted = as_stored(sources(model, shapes), files)
    check_shapes(_their_shapes(wanted, shapes), found, str(directory))
    return files


def shapes_of(model: Model) -> Shapes:
    """All tensors of the whole network."""
    with torch.device("meta"), _NoFirstValues():
        return {name: tuple(t.shape) for name, t in Decoder(model).state_dict().items()}


def load_weights(
    decoder: Decoder, directory: str | Path, after_layer: Callable[[], None] | None = None
) -> None:
    """Copy the weights of a directory into a decoder; fill its rotary tables.

    The decoder may be sharded, or a stage of a pipeline, which takes its own part. Nothing is
    copied before all names and shapes have been found to fit.

    Args:
        after_layer: is called when a layer is filled.

    Raises:
        InputError: see `check_weights`.
    """
    copy_weights(decoder, check_weights(decoder.model, directory), after_layer)


def copy_weights(
    decoder: Decoder, files: Mapping[str, Path], after_layer: Callable[[], None] | None = None
) -> None:
    """Copy tensors, which fit, into a decoder, and fill its rotary tables.

    Args:
        files: of each tensor; what isn't named stays as it is.
        after_layer: is called when a layer is filled.
    """
    tensors = decoder.state_dict(keep_vars=True)
    shapes = {name: tuple(each.shape) for name, each in tensors.items()}
    wanted = as_stored(sources(decoder.model, shapes), files)
    decoder.reset_buffers()  # also puts every expert in the slot of its number
    rows = {name: held_rows(tensor) for name, tensor in tensors.items() if tensor.ndim == 3}
    ours = {name: wanted[name].name for name in files if name in wanted}
    # What was read of a file is in this process's memory until it is closed.
    for layer in by_layer(ours):
        for path, names in by_file({name: files[name] for name in layer}).items():
            with opened(path) as file:
                for name in names:
                    _take(file, name, wanted[name], tensors, rows)
        if after_layer is not None:
            after_layer()


def by_layer(names: Mapping[str, str]) -> list[list[str]]:
    """Names of tensors by the layer that they are of; before them embedding, head and norms, each
    for itself.

    Args:
        names: and what each is called in `Decoder.state_dict()`.
    """
    parts: dict[tuple[int, str], list[str]] = {}
    for name, ours in names.items():
        first, _, rest = ours.partition(".")
        part = (int(rest.partition(".")[0]), "") if first == "blocks" else (-1, first)
        parts.setdefault(part, []).append(name)
    return [parts[part] for part in sorted(parts)]


def _take(
    file: Any,
    name: str,
    source: TensorSource,
    tensors: Mapping[str, Tensor],
    rows: Mapping[str, list[int]],
) -> None:
    """Copy one tensor of a file into what this rank has of ours; an expert elsewhere isn't read."""
    if isinstance(source.join, StackJoin):
        stored = file.get_slice(name)
        for place, expert in enumerate(rows[source.name]):
            parts = source.join.parted(stored[expert : expert + 1][0])
            for ours, part in zip(source.join.names, parts, strict=True):
                assign_row(tensors[ours], place, part)
    elif source.join is not None:
        parts = source.join.parted(file.get_tensor(name))
        for ours, part in zip(source.join.names, parts, strict=True):
            assign(tensors[ours], part)
    elif source.expert is None:
        assign(tensors[source.name], file.get_tensor(name))
    elif source.expert in rows[source.name]:
        place = rows[source.name].index(source.expert)
        assign_row(tensors[source.name], place, file.get_tensor(name))


def write_weights(
    directory: str | Path,
    model: Model,
    state: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = 5_000_000_000,
    settings: Mapping[str, Any] | None = None,
    beside: Mapping[str, bytes] | None = None,
    narrowed: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> None:
    """Write a directory that `AutoModelForCausalLM.from_pretrained` (`AutoModelForMaskedLM` where
    tokens see later ones) and `read_decoder` open.

    Args:
        directory: must not exist yet, or be empty.
        state: full tensors under the names of `Decoder.state_dict()`.
        dtype: of the tensors in the files: fp32, bf16 or fp16. A bias of experts stays fp32.
        max_shard_bytes: start another file rather than let one grow beyond this.
        settings: what config.json says besides the shapes.
        beside: further files by name, such as a tokenizer's.
        narrowed: makes of tensors by their names what is written: those in fewer bits otherwise.

    Raises:
        InputError: the directory holds files, transformers has no such network, or the tensors
            aren't those of the model.
    """
    target = Path(directory)
    if dtype not in _DTYPES:
        raise InputError(f"Weights can't be written as {dtype}; choose one of {list(_DTYPES)}.")
    config = {**to_hf(model), **(settings or {}), "torch_dtype": _DTYPES[dtype]}
    shapes = shapes_of(model)
    check_shapes(shapes, {name: tuple(t.shape) for name, t in state.items()}, "the given state")
    with complete_or_absent(target) as partial:
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        named = {name: _given(source, state) for name, source in sources(model, shapes).items()}
        if narrowed is not None:
            named = narrowed(named)
        _write_shards(partial, named, dtype, max_shard_bytes)
        for name, contents in (beside or {}).items():
            (partial / name).write_bytes(contents)


def write_state(
    directory: Path,
    state: Mapping[str, Tensor],
    dtype: torch.dtype,
    config: Mapping[str, Any] | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Write tensors of any network as one safetensors file, and what config.json says of them.

    Args:
        directory: must not exist yet, or be empty.
        state: whole tensors by the names that they are to have.
        dtype: of floating-point numbers in the file.
        config: what config.json holds; None: there is none.
        beside: further files by name, such as a tokenizer's.

    Raises:
        InputError: the directory holds files or can't be written.
    """
    narrow = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in state.items()
    }
    with complete_or_absent(directory) as partial:
        if config is not None:
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(narrow, partial / SINGLE, metadata={"format": "pt"})
        for name, contents in (beside or {}).items():
            (partial / name).write_bytes(contents)


def _given(source: TensorSource, state: Mapping[str, Tensor]) -> Tensor:
    """The tensor of ours that becomes one of theirs: a view, or several put together."""
    if isinstance(source.join, StackJoin):
        slots = state[slots_name(source.name)].to(torch.int64)
        return source.join.joined([state[name][slots] for name in source.join.names])
    if source.join is not None:
        return source.join.joined([state[name] for name in source.join.names])
    if source.expert is None:
        return state[source.name]
    return state[source.name][int(state[slots_name(source.name)][source.expert])]


def _their_shapes(wanted: Mapping[str, TensorSource], shapes: Shapes) -> Shapes:
    return {name: their_shape(source, shapes) for name, source in wanted.items()}


def their_shape(source: TensorSource, shapes: Shapes) -> tuple[int, ...]:
    """The shape of one of their tensors, by the shapes of ours."""
    shape = shapes[source.name] if source.expert is None else shapes[source.name][1:]
    return shape if source.join is None else source.join.shape(shape)


def check_shapes(expected: Shapes, found: Shapes, where: str) -> None:
    """Compare the names and shapes of tensors.

    Raises:
        InputError: naming the first tensor that is missing, unexpected or of another shape.
    """
    for name, shape in expected.items():
        if name not in found:
            raise InputError(
                f"The tensor {name} is missing in {where}; the model requires it with shape "
                f"{shape}, so use the weights and the config.json of one model."
            )
        if found[name] != shape:
            raise InputError(
                f"The tensor {name} in {where} has shape {found[name]}, but the model requires "
                f"{shape}; use the weights and the config.json of one model."
            )
    for name in found:
        if name not in expected:
            raise InputError(
                f"The tensor {name} in {where} is not part of the model; use the weights and the "
                "config.json of one model."
            )


def tensor_files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor: from the index where there is one, else the single file."""
    if (directory / INDEX).is_file():
        return _indexed_files(directory)
    single = directory / SINGLE
    if single.is_file():
        with opened(single) as file:
            return dict.fromkeys(file.keys(), single)
    pickled = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth") for p in directory.glob(kind))
    if pickled:
        raise InputError(
            f"{directory} holds pickled weights ({pickled[0]}), which could run code when opened; "
            "convert them to safetensors first."
        )
    raise InputError(
        f"{directory} holds neither {SINGLE} nor {INDEX}; give a directory that "
        "`save_pretrained` or `write_weights` wrote."
    )


def _indexed_files(directory: Path) -> dict[str, Path]:
    weight_map = _read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{directory / INDEX} has no weight_map; fetch the file again.")
    files = {}
    for name, filename in weight_map.items():
        path = directory / str(filename)
        # A bare name only: an index from elsewhere must not reach files outside its directory.
        if path.name != filename or not path.is_file():
            raise InputError(
                f"{directory / INDEX} puts the tensor {name} into {filename!r}, which is not a "
                "file beside it; fetch that file."
            )
        files[name] = path
    return files


def read_shapes(files: dict[str, Path], model: Model) -> Shapes:
    """The shapes of tensors in files, without those that a network has no use for.

    Raises:
        InputError: a file is damaged, or lacks a tensor.
    """
    shapes: Shapes = {}
    for path, names in by_file(files).items():
        with opened(path) as file:
            stored = set(file.keys())
            for name in names:
                if name not in stored:
                    raise InputError(
                        f"The tensor {name} is missing in {path}, where {INDEX} puts it; fetch "
                        "that file again."
                    )
                if not _left_out(name, model):
                    shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def _left_out(name: str, model: Model) -> bool:
    """What transformers leaves out as well.

    Llama 2 directories store a table that follows from the config.json, those of GPT-2 and GPT-NeoX
    masks, DeepSeek-V3's a last layer that predicts further tokens, BERT's what judges whether
    sentences follow each other.
    """
    if not model.causal and name.startswith(_OF_SENTENCES):
        return True
    extra = f"model.layers.{model.num_layers}."
    return name.endswith(_TABLES) or (model.latent is not None and name.startswith(extra))


def _check_tied(model: Model, found: Shapes, files: dict[str, Path]) -> None:
    """Accept a stored head beside a tied embedding if it is the same, and drop it from `found`."""
    if not model.tie_embeddings:
        return
    head, embedding = (their_name(model, name) for name in ("head.weight", "embed.weight"))
    if head not in found or embedding not in found:
        return
    with opened(files[head]) as first, opened(files[embedding]) as second:
        if not torch.equal(first.get_tensor(head), second.get_tensor(embedding)):
            raise InputError(
                f"{files[head].parent}: config.json ties the head to the embedding, but {head} "
                f"differs from {embedding}; set tie_word_embeddings to false."
            )
    del found[head]


def by_file(files: Mapping[str, Path]) -> dict[Path, list[str]]:
    """The tensors of each file."""
    grouped: dict[Path, list[str]] = {}
    for name, path in files.items():
        grouped.setdefault(path, []).append(name)
    return grouped


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file to read tensors from.

    Raises:
        InputError: it is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path} can't be read as safetensors ({error}); fetch the file again."
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, _OBJECT, "give a directory that holds one, or fetch it again")


def _write_shards(
    directory: Path, tensors: dict[str, Tensor], dtype: torch.dtype, max_shard_bytes: int
) -> None:
    shards = _split(tensors, dtype, max_shard_bytes)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        sharded = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        filename = SINGLE if len(shards) == 1 else sharded
        # Converted shard by shard, so that there is never a second copy of the whole model.
        part = {
            name: tensors[name].detach().to("cpu", _stored(name, tensors[name], dtype)).contiguous()
            for name in names
        }
        save_file(part, directory / filename, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, filename))
    if len(shards) > 1:
        total_size = sum(t.numel() * _stored(n, t, dtype).itemsize for n, t in tensors.items())
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _stored(name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """In which dtype a tensor is written: the bias of a choice between close scores stays fp32."""
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if name.endswith("e_score_correction_bias") else dtype


def _split(tensors: dict[str, Tensor], dtype: torch.dtype, max_shard_bytes: int) -> list[list[str]]:
    """Fill shards in order; a tensor larger than the limit gets one of its own."""
    shards: list[list[str]] = [[]]
    size_bytes = 0
    for name, tensor in tensors.items():
        tensor_bytes = tensor.numel() * _stored(name, tensor, dtype).itemsize
        if shards[-1] and size_bytes + tensor_bytes > max_shard_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(name)
        size_bytes += tensor_bytes
    return shards


@contextmanager
def complete_or_absent(target: Path) -> Iterator[Path]:
    """Yield a hidden directory beside the target; rename it on success, else remove it.

    Raises:
        InputError: the target holds files, or can't be made.
    """
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    try:
        must_be_free(target)
        partial.mkdir(parents=True)
        yield partial
        for path in [*partial.iterdir(), partial]:
            path.chmod((0o777 if path.is_dir() else 0o666) & ~_umask())  # safetensors' are private
            to_disk(path)
        partial.rename(target)
        to_disk(target.parent)
    except (OSError, SafetensorError) as error:
        why = str(error).replace(str(partial), str(target))
        raise InputError(
            f"{target} can't be written ({why}): give a folder that can, with room enough."
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def must_be_free(target: Path) -> None:
    """Refuse a target of `complete_or_absent` that holds files, before work that takes long.

    Raises:
        InputError: it does.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise InputError(f"{target} exists already; choose another directory or remove it.")


def _umask() -> int:
    """What this process takes from the modes of new files; it can only be read by setting it."""
    os.umask(mask := os.umask(0o077))
    return mask
