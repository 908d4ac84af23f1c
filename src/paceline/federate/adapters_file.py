"""Adapters in PEFT's format as one vector of numbers for each of the two matrices."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from paceline.config.finetune import TENSORS_FILE
from paceline.federate.grid import Floats
from paceline.federate.rounds import Factor

Tensors = dict[str, NDArray[np.float32]]
_ENDS: Mapping[Factor, str] = {"a": "lora_A.weight", "b": "lora_B.weight"}


def read_tensors(folder: Path) -> Tensors:
    """All tensors of a folder, in the order of their names."""
    return dict(sorted(load_file(folder / TENSORS_FILE).items()))


def write_tensors(folder: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Replace the tensors of a folder at once."""
    partial = folder / f".{TENSORS_FILE}"
    save_file(
        {name: np.ascontiguousarray(each) for name, each in tensors.items()},
        partial,
        metadata={"format": "pt"},
    )
    partial.replace(folder / TENSORS_FILE)


def vector_of(tensors: Tensors, factor: Factor) -> Floats:
    """One matrix of all adapters: (n,)."""
    parts = [each.reshape(-1) for name, each in tensors.items() if name.endswith(_ENDS[factor])]
    return np.concatenate(parts).astype(np.float64)


def plus(tensors: Tensors, factor: Factor, change: Floats) -> Tensors:
    """The tensors with a change of one matrix: (n,) as `vector_of`."""
    found, at = dict(tensors), 0
    for name, each in tensors.items():
        if name.endswith(_ENDS[factor]):
            part = change[at : at + each.size].reshape(each.shape)
            found[name] = (each + part).astype(np.float32)
            at += each.size
    return found
