"""Export: the weights of a Run as a folder that Hugging Face's transformers opens."""

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.layout import ParamDtype
from paceline.config.model import Model
from paceline.models.weights import write_weights
from paceline.observe.run import Run
from paceline.parallel.apply import DTYPES
from paceline.train.checkpoint import FoundCheckpoint, load, newest_good
from paceline.train.checkpoint.agreement import Ranks
from paceline.train.data import prepare


def export(run: Run, folder: Path, dtype: ParamDtype = "fp32") -> int:
    """Write config.json, safetensors and the tokenizer of a Run's newest good checkpoint.

    Args:
        run: of a language model, on any layout.
        folder: must not exist yet, or be empty.
        dtype: of the written weights.

    Returns:
        the step the weights are of.

    Raises:
        InputError: no Run, no checkpoint, a model that transformers has no name for, or a folder
            that holds files.
    """
    if not run.exists:
        raise InputError(f"{run.path} is not a run: give the directory of one, such as runs/demo.")
    job = run.job()
    if not isinstance(job.model, Model):
        raise InputError(f"{run.path} trained a module of your own: only language models export.")
    found, _ = newest_good(run.checkpoint_folder, Ranks.alone(), print)
    if found is None:
        raise InputError(f"{run.path} has no checkpoint yet: train it first.")
    state = _room_for_weights(found)
    load(found, {"model": state}, Ranks.alone())
    write_weights(folder, job.model, state, DTYPES[dtype])
    _write_tokenizer(prepare(job.data).tokenizer_path, folder)
    return found.step


def _room_for_weights(found: FoundCheckpoint) -> dict[str, Tensor]:
    """Whole tensors of the saved types, however they were cut when they were saved."""
    return {
        name.removeprefix("model."): torch.empty(entry.size, dtype=entry.torch_dtype)
        for name, entry in found.manifest.tensors.items()
        if name.startswith("model.")
    }


def _write_tokenizer(tokenizer: Path, folder: Path) -> None:
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
