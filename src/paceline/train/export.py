"""Export: the weights of a Run as a folder that Hugging Face's transformers opens."""

import json
import shutil
from pathlib import Path

import torch

from paceline.config.errors import InputError
from paceline.config.layout import ParamDtype
from paceline.config.model import Model
from paceline.models.decoder import Decoder
from paceline.models.weights import write_weights
from paceline.observe.run import Run
from paceline.parallel.apply import DTYPES
from paceline.train.checkpoint import Checkpointer
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
    with torch.device("meta"):
        decoder = Decoder(job.model).to(DTYPES[job.layout.param_dtype])
    state = decoder.to_empty(device="cpu").state_dict()
    checkpointer = Checkpointer(run.checkpoint_folder, keep_last=1, say=print)
    found = checkpointer.latest_good()
    if found is None:
        raise InputError(f"{run.path} has no checkpoint yet: train it first.")
    checkpointer.load(found, {"model": state})
    write_weights(folder, job.model, state, DTYPES[dtype])
    _write_tokenizer(prepare(job.data).tokenizer_path, folder)
    return found.step


def _write_tokenizer(tokenizer: Path, folder: Path) -> None:
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
