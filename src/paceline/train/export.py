"""Export: the weights of a Run as a folder that others open; or into a module of one's own.

A language model becomes a folder that Hugging Face's transformers opens: config.json, safetensors,
and what the Run keeps of its tokenizer, so that the training data isn't needed any more. What a
given tokenizer or starting weights came with (chat template, special tokens, how to generate) is
carried along; what is known and nobody gave is set. Any other model becomes one safetensors file
under the names of its own parameters.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from paceline.config.errors import InputError
from paceline.config.files import parse_json, read_bytes
from paceline.config.job import Job
from paceline.config.job_sections import Data
from paceline.config.layout import ParamDtype
from paceline.config.model import Model
from paceline.config.recommender import Dlrm
from paceline.models.weights import SINGLE, complete_or_absent, write_weights
from paceline.observe.run import Run
from paceline.parallel.apply import DTYPES
from paceline.train.checkpoint import FoundCheckpoint, newest_good, parameter_names
from paceline.train.checkpoint import load as read_checkpoint
from paceline.train.checkpoint.lockstep import LockstepRanks
from paceline.train.data import prepare
from paceline.train.data.tokenizer import end_name, given_folder
from paceline.train.ema import EMA_SECTION

_TOKENIZER, _SETTINGS, _GENERATION = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json",
)  # fmt: skip
_CARRIED = (
    _SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", _GENERATION,
)  # fmt: skip
"""What may stand beside a tokenizer.json or weights, and says how to use them."""
_OBJECT = TypeAdapter(dict[str, Any])


def export(run: Run, folder: Path, dtype: ParamDtype = "fp32") -> int:
    """Write the weights of a Run's newest good checkpoint, and its tokenizer where it has one.

    Where the Run keeps a running mean of the weights, that is written.

    Args:
        run: on any layout.
        folder: must not exist yet, or be empty.
        dtype: of the written weights.

    Returns:
        the step the weights are of.

    Raises:
        InputError: no Run, no checkpoint, a model that transformers has no name for, or a folder
            that holds files or can't be written.
    """
    found = _newest(run)
    job = run.job()
    if isinstance(job.model, Dlrm):
        raise InputError(
            f"{run.path} trained a recommender, whose tables are no part of its checkpoints' "
            f"weights: they stand in {run.path / 'tables'}; export another run."
        )
    state = _room_for(found, "model")
    read_checkpoint(found, {"model": state}, LockstepRanks.alone())
    if means := _room_for(found, EMA_SECTION):
        read_checkpoint(found, {EMA_SECTION: means}, LockstepRanks.alone())
        state |= means
    if isinstance(job.model, Model):
        beside = _about_tokens(_kept_tokenizer(run, job), job.model.max_seq_len)
        told = json.loads(beside[_GENERATION])
        settings = {key: told[key] for key in told if key in ("bos_token_id", "eos_token_id")}
        write_weights(folder, job.model, state, DTYPES[dtype], settings=settings, beside=beside)
    else:
        narrow = {name: _as(tensor, DTYPES[dtype]) for name, tensor in state.items()}
        with complete_or_absent(folder) as partial:
            save_file(narrow, partial / SINGLE, metadata={"format": "pt"})
    return found.step


def load(run: Run | Path | str, model: nn.Module) -> int:
    """Put the weights of a Run's newest good checkpoint into a module.

    Where the Run keeps a running mean of the weights, that is taken.

    Args:
        run: a Run or its directory; of this very module, on any layout.
        model: on any device; changed in place.

    Returns:
        the step the weights are of.

    Raises:
        InputError: no Run, no checkpoint, or parameters of other names or shapes.
    """
    found = _newest(run if isinstance(run, Run) else Run(Path(run)))
    names, aliases = parameter_names(model)
    state = get_model_state_dict(model)
    own = {name: value for name, value in state.items() if name not in aliases}
    read_checkpoint(found, {"model": own}, LockstepRanks.alone())
    if means := _room_for(found, EMA_SECTION):
        read_checkpoint(found, {EMA_SECTION: means}, LockstepRanks.alone())
        with torch.no_grad():
            for parameter, name in names.items():
                parameter.copy_(means[name])
    return found.step


def keep_tokenizer(run: Run, data: Data, weights: str | None) -> None:
    """Keep in the Run what an export says of the tokens, for the data may be gone by then.

    Args:
        data: of the Job; it has been tokenised.
        weights: the folder that the training starts from.
    """
    folders = [given_folder(data.tokenizer), None if weights is None else Path(weights)]
    kept = {_TOKENIZER: prepare(data).tokenizer_path.read_bytes()}
    for folder in filter(None, folders):
        for name in _CARRIED:
            if name not in kept and (folder / name).is_file():
                kept[name] = read_bytes(folder / name, "put a good copy there, or remove it")
    run.tokenizer_folder.mkdir(exist_ok=True)
    for name, contents in kept.items():
        (run.tokenizer_folder / name).write_bytes(contents)


def _newest(run: Run) -> FoundCheckpoint:
    if not run.exists:
        raise InputError(f"{run.path} is not a run: give the directory of one, such as runs/demo.")
    found, _ = newest_good(run.checkpoint_folder, LockstepRanks.alone(), print)
    if found is None:
        raise InputError(f"{run.path} has no checkpoint yet: train it first.")
    return found


def _room_for(found: FoundCheckpoint, section: str) -> dict[str, Tensor]:
    """Whole tensors of the saved types, however they were cut when they were saved."""
    return {
        name.removeprefix(f"{section}."): torch.empty(entry.size, dtype=entry.torch_dtype)
        for name, entry in found.manifest.tensors.items()
        if name.startswith(f"{section}.")
    }


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _kept_tokenizer(run: Run, job: Job) -> dict[str, bytes]:
    """The files about tokens; of a Run that an earlier version made, from the data."""
    if not (run.tokenizer_folder / _TOKENIZER).is_file():
        keep_tokenizer(run, job.data, job.train.weights)
    return {file.name: file.read_bytes() for file in run.tokenizer_folder.iterdir()}


def _about_tokens(kept: Mapping[str, bytes], max_seq_len: int) -> dict[str, bytes]:
    """The files about tokens, with what is known and nobody gave."""
    end = end_name(tokenizer := Tokenizer.from_buffer(kept[_TOKENIZER]))
    settings, generation = (_object(kept.get(name), name) for name in (_SETTINGS, _GENERATION))
    known: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if end is not None:
        # Padding is masked out; without a token for it, batches can't be generated.
        known |= {"eos_token": end, "pad_token": end, "model_max_length": max_seq_len}
        number = tokenizer.token_to_id(end)
        generation = {"eos_token_id": number, "pad_token_id": number, **generation}
    texts = {_SETTINGS: {**known, **settings}, _GENERATION: generation}
    return {**kept, **{name: _as_json(value) for name, value in texts.items()}}


def _as_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _object(contents: bytes | None, name: str) -> dict[str, Any]:
    try:
        return {} if contents is None else parse_json(contents, _OBJECT)
    except ValueError as error:
        raise InputError(f"{name} in the run's tokenizer folder {error}: remove it.") from None
