"""Adapters as PEFT keeps them: adapter_config.json and adapter_model.safetensors.

Written adapters are opened by `peft.PeftModel.from_pretrained` over the network that they were
trained for, and by whoever serves adapters in that form. Names are those of Hugging Face's network.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.files import read_json
from paceline.config.finetune import TENSORS_FILE, Finetune
from paceline.config.huggingface import is_like_llama
from paceline.config.model import Model
from paceline.models.adapters import (
    DOWN,
    MAGNITUDE,
    UP,
    adapt,
    adapted_names,
    is_of_adapter,
    of_experts,
)
from paceline.models.decoder import Decoder
from paceline.models.names import sources
from paceline.models.peft_experts import StackedFormat, their_parameter, wrapper_of
from paceline.models.shares import assign
from paceline.models.weights import Shapes, check_shapes, complete_or_absent, opened

CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model."
_THEIRS = {DOWN: "lora_A.weight", UP: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
_OBJECT = TypeAdapter(dict[str, Any])
# What changes the arithmetic in ways that adapters of ours don't have, and when it doesn't.
_OTHERWISE: Mapping[str, tuple[Any, ...]] = {
    "use_rslora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "lora_bias": (False, None),
}


def write_adapters(
    folder: Path,
    model: Model,
    state: Mapping[str, Tensor],
    finetune: Finetune,
    base: str | None,
    dtype: torch.dtype,
) -> None:
    """Write a folder that PEFT opens.

    Args:
        folder: must not exist yet, or be empty.
        model: that the adapters belong to.
        state: whole tensors under the names of the decoder; those of adapters are written.
        finetune: what they were trained with.
        base: where the network's weights are.
        dtype: of the tensors in the file.

    Raises:
        InputError: the folder holds files or can't be written.
    """
    names, form = _their_names(model, _shapes(model, finetune)), StackedFormat.of(model)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": finetune.rank,
        "lora_alpha": finetune.alpha,
        "lora_dropout": finetune.dropout,
        "use_dora": finetune.decomposed,
        "target_modules": _targets(model, finetune, names),
        "target_parameters": _target_parameters(model, finetune),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    tensors = {
        theirs: form.theirs(ours, state).to(dtype).contiguous() for ours, theirs in names.items()
    }
    with complete_or_absent(folder) as partial:
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, partial / TENSORS_FILE, metadata={"format": "pt"})


def check_adapters(model: Model, finetune: Finetune, folder: str) -> None:
    """Look whether a folder holds adapters of a network with these settings.

    Raises:
        InputError: it holds none or others; the sentence names the difference.
    """
    path = Path(folder) / CONFIG_FILE
    stated = read_json(path, _OBJECT, "give finetune.adapters a folder that PEFT wrote")
    if stated.get("peft_type") != "LORA":
        raise InputError(
            f"{path} is of {stated.get('peft_type')!r} adapters, and finetune.adapters takes LoRA's"
            ": give others."
        )
    for name, plain in _OTHERWISE.items():
        if name in stated and stated[name] not in plain:
            raise InputError(
                f"{path} has {name} = {stated[name]!r:.60}, which adapters don't have here: merge "
                "it into the base with PEFT, and start from that."
            )
    for name, ours, theirs in (
        ("rank", finetune.rank, stated.get("r")),
        ("alpha", finetune.alpha, stated.get("lora_alpha")),
        ("decomposed", finetune.decomposed, stated.get("use_dora", False)),
    ):
        if ours != theirs:
            raise InputError(
                f"finetune.{name} = {json.dumps(ours)}, but the adapters in {folder} were trained "
                f"with {json.dumps(theirs)}: set it to that."
            )
    shapes, form = _shapes(model, finetune), StackedFormat.of(model)
    names = _their_names(model, shapes)
    with opened(Path(folder) / TENSORS_FILE) as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    wanted = {theirs: form.shape(ours, shapes[ours]) for ours, theirs in names.items()}
    check_shapes(wanted, found, folder)


def load_adapters(decoder: Decoder, folder: str) -> None:
    """Copy adapters, which fit, into a decoder (or a stage of one, or a rank's share)."""
    tensors, form = decoder.state_dict(keep_vars=True), StackedFormat.of(decoder.model)
    with opened(Path(folder) / TENSORS_FILE) as file:
        for ours, theirs in _their_names(decoder.model, tensors).items():
            assign(tensors[ours], form.ours(ours, file.get_tensor(theirs), tensors))


def _shapes(model: Model, finetune: Finetune) -> Shapes:
    """Of the tensors of all adapters, by our names."""
    decoder = _on_meta(model)
    with torch.device("meta"):
        adapt(decoder, finetune)
    state = decoder.state_dict()
    return {name: tuple(each.shape) for name, each in state.items() if is_of_adapter(name)}


def _on_meta(model: Model) -> Decoder:
    with torch.device("meta"):
        return Decoder(model)


def _their_names(model: Model, state: Iterable[str]) -> dict[str, str]:
    """Our names of the tensors of adapters, among those of a state -> theirs."""
    names: dict[str, str] = {}
    adapters = [*filter(is_of_adapter, state)]
    for name in adapters:
        part = next(each for each in _THEIRS if name.endswith(f".{each}"))
        if of_experts(name):
            names[name] = f"{_PREFIX}{wrapper_of(name, adapters)}.{_THEIRS[part]}"
            continue
        weight = f"{name.removesuffix(part)}weight"
        (theirs, source), *_ = sources(model, {weight: ()}).items() or [("", None)]
        if source is None or (source.join is not None and len(source.join.names) > 1):
            raise InputError(
                f"{weight} is a part of one matrix in Hugging Face's network, and PEFT has no "
                "adapters of a part: leave it out of finetune.targets, or export merged weights."
            )
        names[name] = _PREFIX + theirs.removesuffix("weight") + _THEIRS[part]
    return names


def _target_parameters(model: Model, finetune: Finetune) -> list[str]:
    """The stacked matrices with adapters, as PEFT is told them."""
    ours = adapted_names(_on_meta(model), finetune)
    return [their_parameter(name) for name in filter(of_experts, ours)]


def _targets(model: Model, finetune: Finetune, names: Mapping[str, str]) -> list[str]:
    """The modules with adapters, as PEFT is told them: by their last parts, where these say it."""
    decoder = _on_meta(model)
    ours = [name for name in adapted_names(decoder, finetune) if not of_experts(name)]
    last = tuple({name.rpartition(".")[2] for name in ours})
    modules = {
        theirs.removeprefix(_PREFIX).rpartition(".lora_")[0]
        for name, theirs in names.items()
        if not of_experts(name)
    }
    # Other families have one name for matrices of attention and of feed-forward.
    is_told = (
        is_like_llama(model)
        and last != ()
        and adapted_names(decoder, finetune.replace(targets=last)) == ours
    )
    if is_told:
        modules = {name.rpartition(".")[2] for name in modules}
    return sorted(modules)
