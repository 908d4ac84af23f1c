"""Export: the weights of a Run as a folder that others open; or into a module of one's own.

What the folder holds is the family's to say (`TrainFamily.export`).
"""

import json
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from paceline.config.errors import InputError
from paceline.config.layout import ParamDtype
from paceline.config.model import Model
from paceline.kernels.dtypes import DTYPES
from paceline.models.dcp_names import (
    MEGATRON_METADATA,
    Form,
    megatron_objects,
    state_as,
)
from paceline.models.gguf import GgufForm, write_gguf
from paceline.models.peft_format import write_adapters
from paceline.models.quantised import Bits
from paceline.models.weights import complete_or_absent
from paceline.observe.events import append_line
from paceline.observe.run import Run, write_atomic
from paceline.train.checkpoint.loading import load as read_checkpoint
from paceline.train.checkpoint.lockstep import LockstepRanks
from paceline.train.checkpoint.state import STATE_PREFIX, parameter_names, split_state_path
from paceline.train.families import family_of
from paceline.train.family import Trained
from paceline.train.kept_tokenizer import GENERATION, about_tokens
from paceline.train.kept_weights import (
    EMA_SECTION,
    KeptWeights,
    checkpoint_of,
    room_for,
    weights_of,
)
from paceline.train.language import export_decoder
from paceline.train.starting_weights import ORIGIN_FILE

FORMS: Mapping[str, Form] = {"torchtitan": "torchtitan", "megatron": "megatron"}
"""Whose names in DCP are written, by their names on a command line."""
GGUF_FORMS: Mapping[str, GgufForm] = {
    "fp32": "F32",
    "bf16": "BF16",
    "int8": "Q8_0",
    "int4": "Q4_0",
}
"""Forms of matrices in GGUF, by theirs."""


def export(
    run: Run,
    folder: Path,
    dtype: ParamDtype = "fp32",
    step: int | None = None,
    narrow: tuple[Bits, int] | None = None,
) -> int:
    """Write the weights of a checkpoint of a Run, and what others need beside them.

    Where the Run keeps a running mean of the weights, that is written. The folder says where they
    are from, and the Run where they went.

    Args:
        run: on any layout.
        folder: must not exist yet, or be empty.
        dtype: of the written weights.
        step: of the checkpoint; None: the newest good one.
        narrow: of a decoder: bits of matrices, and how many weights share a scale in 4 bits; as
            compressed-tensors has them. None: as `dtype` says.

    Returns:
        the step the weights are of.

    Raises:
        InputError: no Run, no checkpoint, a network that the family has no form for, or a folder
            that holds files or can't be written.
    """
    step, weights = weights_of(run, step)
    job = run.job()
    trained = Trained(run, job, step, weights)
    if narrow is None:
        family_of(job.model).export(job.model, trained, folder, DTYPES[dtype])
    elif isinstance(job.model, Model):
        export_decoder(job.model, trained, folder, DTYPES[dtype], narrow)
    else:
        raise InputError(f"--weights is of decoders, and {run.path} trains none of them.")
    note_export(run, job.name, step, folder, dtype)
    return step


def export_dcp(run: Run, folder: Path, step: int | None = None) -> int:
    """Write a checkpoint of a Run in the format of torch's Distributed Checkpoint.

    `torch.distributed.checkpoint.load` reads it into `{"model": model.state_dict(), "optimizer":
    {"state": {name: {key: tensor}}}}`, with the names and types of the run; a running mean of the
    weights is "ema". Nothing else of the run is there, and DCP keeps no checksums.

    Args:
        run: on any layout.
        folder: must not exist yet, or be empty.
        step: of the checkpoint; None: the newest good one.

    Returns:
        the step that it is of.

    Raises:
        InputError: no Run, no checkpoint, matrices in 4 bits, or a folder that holds files or can't
            be written.
    """
    found = checkpoint_of(run, step)
    if run.job().finetune.is_narrow:
        raise InputError(
            f"--format dcp keeps tensors as the run has them, and those of {run.path} are bytes of "
            "4-bit matrices: leave it out, or use --format peft."
        )
    sections = {name: room_for(found, name) for name in ("model", "optimizer", EMA_SECTION)}
    sections = {name: room for name, room in sections.items() if room}
    read_checkpoint(found, sections, LockstepRanks.alone())
    of_optimizer = {f"{STATE_PREFIX}{key}": t for key, t in sections.pop("optimizer", {}).items()}
    numbers = found.manifest.values.items()
    of_optimizer |= {key: torch.tensor(n) for key, n in numbers if key.startswith(STATE_PREFIX)}
    state: dict[str, Any] = {}
    for path, tensor in of_optimizer.items():
        if (split := split_state_path(path, sections["model"])) is not None:
            state.setdefault(split[0], {})[".".join(split[1])] = tensor
    written = {**sections, **({"optimizer": {"state": state}} if state else {})}
    with complete_or_absent(folder) as partial:
        _save(partial, written)
    note_export(run, run.job().name, found.step, folder, "dcp")
    return found.step


def export_adapters(
    run: Run, folder: Path, dtype: ParamDtype = "fp32", step: int | None = None
) -> int:
    """Write the adapters of a checkpoint of a Run in PEFT's format.

    Args:
        run: that trained adapters, on any layout.
        folder: must not exist yet, or be empty.
        dtype: of the written tensors.
        step: of the checkpoint; None: the newest good one.

    Returns:
        the step that they are of.

    Raises:
        InputError: as `export`; or the Run has no adapters.
    """
    checkpoint_of(run, step)  # is it a Run at all?
    job = run.job()
    if not isinstance(job.model, Model) or not job.finetune.is_adapted:
        raise InputError(
            f"--format peft is of adapters, and {run.path} trained none "
            '(finetune.method = "lora" does): leave it out.'
        )
    kept = KeptWeights(run, step)
    step, weights = kept.step, kept.read_as_trained()
    kind = DTYPES[dtype]
    write_adapters(folder, job.model, weights, job.finetune, job.train.weights, kind)
    note_export(run, job.name, step, folder, "peft")
    return step


def export_as(
    form: Form, run: Run, folder: Path, dtype: ParamDtype = "fp32", step: int | None = None
) -> int:
    """Write the weights of a checkpoint of a Run as torchtitan or Megatron-Core keep theirs in DCP.

    Where the Run keeps a running mean of the weights, that is written. `train.weights` takes it.

    Args:
        form: whose names.
        run: of a decoder, on any layout.
        folder: must not exist yet, or be empty.
        dtype: of the written weights.
        step: of the checkpoint; None: the newest good one.

    Returns:
        the step that they are of.

    Raises:
        InputError: as `export`; or the form's names are not known of such a network.
    """
    step, weights = weights_of(run, step)
    job = run.job()
    if not isinstance(job.model, Model):
        raise InputError(f"--format {form} is of decoders, and {run.path} trains none of them.")
    theirs = state_as(form, job.model, {key: t.to(DTYPES[dtype]) for key, t in weights.items()})
    with complete_or_absent(folder) as partial:
        _save(partial, {**theirs, **(megatron_objects(theirs) if form == "megatron" else {})})
        if form == "megatron":
            (partial / "metadata.json").write_text(json.dumps(MEGATRON_METADATA))
            torch.save({}, common := BytesIO())
            # torch's own errors of a full disk are no OSError.
            (partial / "common.pt").write_bytes(common.getvalue())
    note_export(run, job.name, step, folder, form)
    return step


def export_gguf(run: Run, folder: Path, form: GgufForm = "F32", step: int | None = None) -> int:
    """Write the weights of a checkpoint of a Run as one file that llama.cpp opens.

    Where the Run keeps a running mean of the weights, that is written.

    Args:
        run: of a decoder, on any layout.
        folder: must not exist yet, or be empty; the file there has the run's name.
        form: of matrices.
        step: of the checkpoint; None: the newest good one.

    Returns:
        the step that they are of.

    Raises:
        InputError: as `export` and `write_gguf`.
    """
    step, weights = weights_of(run, step)
    job = run.job()
    if not isinstance(job.model, Model):
        raise InputError(f"--format gguf is of decoders, and {run.path} trains none of them.")
    with complete_or_absent(folder) as partial:
        write_gguf_of(Trained(run, job, step, weights), job.model, partial, form)
    note_export(run, job.name, step, folder, form)
    return step


def write_gguf_of(trained: Trained, model: Model, folder: Path, form: GgufForm) -> Path:
    """Write a decoder into a folder that is there, with the tokens that its run keeps.

    Returns:
        the file, which has the run's name.

    Raises:
        InputError: as `write_gguf`.
    """
    beside = about_tokens(trained.run, trained.job, model.max_seq_len)
    end = json.loads(beside[GENERATION]).get("eos_token_id")
    file = folder / f"{trained.job.name}.gguf"
    tokenizer, end = beside["tokenizer.json"], end if isinstance(end, int) else None
    write_gguf(file, model, trained.weights, form, tokenizer, end)
    return file


def _save(folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be
        try:
            save(state, storage_writer=_NamelessWriter(folder), no_dist=True)
        except CheckpointException as error:  # around what the disk said
            cause, _ = next(iter(error.failures.values()))
            # Where a write fails torch's own writer of zip files raises a RuntimeError.
            if not isinstance(cause, OSError | RuntimeError):
                raise
            raise OSError(str(cause)) from None


class _NamelessWriter(FileSystemWriter):
    """Keeps to itself where it wrote: the folder gets another name when it is complete."""

    def storage_meta(self) -> None:
        return None


def note_export(run: Run, name: str, step: int, folder: Path, dtype: str) -> None:
    """Say where weights are from, beside them, and in the Run where they went; a Run that can't be
    written is exported all the same."""
    known = {"step": step, "checkpoint": run.checkpoint_sum(step)}
    origin = {"run": name, **known, "path": str(run.path.absolute())}
    write_atomic(folder / ORIGIN_FILE, json.dumps(origin, indent=2) + "\n")
    record = {"time": time.time(), **known, "folder": str(folder.absolute()), "dtype": dtype}
    with suppress(OSError):
        append_line(run.exports_file, json.dumps(record).encode() + b"\n")


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
    found = checkpoint_of(run if isinstance(run, Run) else Run(Path(run)))
    names, aliases = parameter_names(model)
    state = get_model_state_dict(model)
    own = {name: value for name, value in state.items() if name not in aliases}
    read_checkpoint(found, {"model": own}, LockstepRanks.alone())
    if means := room_for(found, EMA_SECTION):
        read_checkpoint(found, {EMA_SECTION: means}, LockstepRanks.alone())
        with torch.no_grad():
            for parameter, name in names.items():
                parameter.copy_(means[name])
    return found.step
