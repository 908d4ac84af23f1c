"""What all share, adapters in PEFT's format or weights in Hugging Face's, as vectors of numbers."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from paceline.config.files import read_json
from paceline.config.finetune import TENSORS_FILE
from paceline.federate.grid import Floats
from paceline.federate.rounds import Factor

Tensors = dict[str, NDArray[np.float32]]
WEIGHTS_FILE = "model.safetensors"
FOUND = "found"
"""Of a client: the folder of its newest gradient or change, times its samples, laid out as what is
shared."""
TRAINED_FILE = "trained.json"
"""Of a federation that shares weights: names of the tensors that clients train."""
_NAMES = TypeAdapter(list[str])
_ENDS: Mapping[Factor, str] = {"a": "lora_A.weight", "b": "lora_B.weight", "all": ""}


def trained_names(federation: Path) -> list[str] | None:
    """Names of the tensors that clients train; None: all that are shared, which are adapters."""
    file = federation / TRAINED_FILE
    return read_json(file, _NAMES, "start the rounds anew") if file.exists() else None


def read_tensors(folder: Path, names: Collection[str] | None = None) -> Tensors:
    """Tensors of a folder, all or those with some names, in the order of their names."""
    with safe_open(_file_of(folder), "numpy") as opened:
        wanted = opened.keys() if names is None else names
        return {name: opened.get_tensor(name) for name in sorted(wanted)}


def write_tensors(folder: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Replace tensors of a folder, at once; others stay."""
    file = _file_of(folder)
    partial = file.with_name(f".{file.name}")
    new = {name: np.ascontiguousarray(each) for name, each in tensors.items()}
    save_file({**load_file(file), **new}, partial, metadata={"format": "pt"})
    partial.replace(file)


def _file_of(folder: Path) -> Path:
    adapters = folder / TENSORS_FILE
    return adapters if adapters.exists() else folder / WEIGHTS_FILE


def vector_of(tensors: Tensors, factor: Factor) -> Floats:
    """One matrix of all adapters, or all numbers: (n,)."""
    parts = [each.reshape(-1) for name, each in tensors.items() if name.endswith(_ENDS[factor])]
    return np.concatenate(parts).astype(np.float64)


def plus(tensors: Tensors, factor: Factor, change: Floats) -> Tensors:
    """The tensors with a change: (n,) as `vector_of`."""
    found, at = dict(tensors), 0
    for name, each in tensors.items():
        if name.endswith(_ENDS[factor]):
            part = change[at : at + each.size].reshape(each.shape)
            found[name] = (each + part).astype(np.float32)
            at += each.size
    return found
