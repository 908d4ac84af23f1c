"""The command `paceline export --for edge`: a network for a small device, and what it does there.

How it works: the network is written in another party's format, and that party's runtime then runs
the file on held-out tokens of the run, in a process of its own (`runtime`). Its logits and its loss
are held against those of the run's own weights in fp32. A file that differs by more than is stated
here, or has no place in the budget, is not left behind.

With a budget, forms are tried from the most bits down, and the first that fits is taken.
"""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from paceline.config.errors import InputError, RunError
from paceline.config.job import Job
from paceline.config.model import Model
from paceline.models.decoder import Decoder
from paceline.models.executorch_file import write_executorch
from paceline.models.gguf import read_gguf
from paceline.models.onnx_file import write_onnx
from paceline.models.quantised import Bits
from paceline.models.weights import complete_or_absent, must_be_free
from paceline.observe.run import Run, write_atomic
from paceline.render.figures import bytes_text
from paceline.render.table import Table
from paceline.serve.edge import runtime
from paceline.train.data import BatchShape, eval_batches, prepare_corpus
from paceline.train.export import GGUF_FORMS, note_export, write_gguf_of
from paceline.train.family import Trained
from paceline.train.kept_tokenizer import about_tokens
from paceline.train.kept_weights import weights_of
from paceline.train.language import export_decoder

Form = Literal["fp32", "int8", "int4"]
FORMATS = ("safetensors", "gguf", "onnx", "executorch")
VERDICT = "edge.json"
_BITS: Mapping[Form, Bits | None] = {"fp32": None, "int8": 8, "int4": 4}
_GROUP = 32
_LONGEST, _MOST_TOKENS, _LEAST_TOKENS, _MOST_LOGITS = 256, 2048, 256, 2**26
"""Of held-out samples: tokens of one, of all, and numbers that are compared."""
_PATIENCE_S = 1800
_SIZE = re.compile(r"([\d.]+) *(k|m|g)(i?)b", re.IGNORECASE)
_TIME = re.compile(r"([\d.]+) *ms", re.IGNORECASE)


class Stated(NamedTuple):
    """How much a file may differ from the run's weights in fp32."""

    logit_error: float
    """Norm of the difference of logits, as a part of their norm."""
    loss_difference: float
    """More loss on held-out tokens, nats."""


STATED: Mapping[Form, Stated] = {
    "fp32": Stated(2e-3, 2e-3),
    "int8": Stated(3e-2, 1e-2),
    "int4": Stated(2e-1, 1e-1),
}


@dataclass(frozen=True)
class Budget:
    """What a file may take on its device."""

    most_bytes: float
    most_ms: float | None = None
    """For each token that is made, as measured here."""

    @staticmethod
    def parse(text: str) -> "Budget":
        """Read "50 MB" or "50 MB, 5 ms".

        Raises:
            InputError: it can't be understood.
        """
        size, _, time = (part.strip() for part in text.partition(","))
        found, taken = _SIZE.fullmatch(size), _TIME.fullmatch(time)
        try:
            if found is None or (time and taken is None):
                raise ValueError
            unit = (1024 if found[3] else 1000) ** ("kmg".index(found[2].lower()) + 1)
            return Budget(float(found[1]) * unit, None if taken is None else float(taken[1]))
        except ValueError:
            raise InputError(
                f'--budget {text!r} is no size: write "50 MB", or "50 MB, 5 ms" with the time that '
                "a token may take."
            ) from None

    def refuses(self, verdict: "Verdict") -> str | None:
        """What is over the budget; None: nothing."""
        if verdict.num_bytes > self.most_bytes:
            return f"{bytes_text(verdict.num_bytes)} of {bytes_text(self.most_bytes)}"
        if self.most_ms is not None and verdict.tokens_per_s is not None:
            took = 1e3 / verdict.tokens_per_s
            if took > self.most_ms:
                return f"{took:.3g} ms a token of {self.most_ms:g}"
        return None


@dataclass(frozen=True)
class Verdict:
    """What was found of a file by running it."""

    format: str
    weights: Form
    step: int
    num_bytes: int
    """Of all files that go to a device."""
    held_out_tokens: int
    loss: float
    """Nats a token."""
    loss_of_run: float
    logit_error: float
    """See `Stated`."""
    runtime: str
    threads: int | None = None
    open_s: float | None = None
    prompt_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    """One text, token by token. None: llama.cpp is not installed, which a GGUF is timed by."""
    resident_bytes: int | None = None
    """The most that opening and running the file took of memory, beside the runtime's own."""

    @property
    def loss_difference(self) -> float:
        """More loss than that of the run's weights."""
        return self.loss - self.loss_of_run

    @property
    def is_as_stated(self) -> bool:
        """Whether it is within `STATED`; what is no number is not."""
        stated = STATED[self.weights]
        is_close = self.logit_error <= stated.logit_error
        return is_close and self.loss_difference <= stated.loss_difference

    def told(self) -> dict[str, Any]:
        """The record beside the file."""
        stated = STATED[self.weights]._asdict()
        return {**asdict(self), "loss_difference": self.loss_difference, "stated": stated}


def export_for_edge(
    run: Run,
    folder: Path,
    form: str = "safetensors",
    weights: Form | None = None,
    budget: Budget | None = None,
    step: int | None = None,
) -> Verdict:
    """Write a run's decoder for a small device, run it there, and say what was found.

    Args:
        folder: must not exist yet, or be empty.
        form: one of `FORMATS`.
        weights: of matrices; None: int8, or with a budget the most bits that fit.
        step: of the checkpoint; None: the newest good one.

    Raises:
        InputError: a run, a form or a folder that can't be, a budget with a time where none can be
            measured, or nothing fits into the budget.
        RunError: the file differs by more than is stated, or its runtime can't run it.
    """
    if form == "gguf" and budget is not None and budget.most_ms is not None and not has_llama():
        raise InputError(
            f"--budget: {budget.most_ms:g} ms a token of a gguf file are measured by llama.cpp, "
            "which is not installed: pip install llama-cpp-python, or leave the time out."
        )
    must_be_free(folder)
    step, state = weights_of(run, step)
    job = run.job()
    if not isinstance(job.model, Model) or not job.model.causal:
        raise InputError(f"--for edge is of decoders, and {run.path} trains none of them.")
    trained = Trained(run, job, step, state)
    truth = _Truth(job, job.model, state)
    tried: list[Verdict] = []
    with complete_or_absent(folder) as partial:
        for each in _forms(weights, budget, job.model):
            for file in partial.iterdir():
                file.unlink()
            target = _write(form, partial, trained, job.model, each)
            size = sum(file.stat().st_size for file in partial.iterdir())
            tried.append(truth.verdict(form, each, target, step, size))
            if budget is None or budget.refuses(tried[-1]) is None:
                break
        _show(tried)
        _judge(tried, budget, form)
        write_atomic(partial / VERDICT, json.dumps(tried[-1].told(), indent=2) + "\n")
    note_export(run, job.name, step, folder, f"{form} {tried[-1].weights}")
    return tried[-1]


def has_llama() -> bool:
    """Whether llama.cpp runs GGUF here."""
    return importlib.util.find_spec("llama_cpp") is not None


def _forms(weights: Form | None, budget: Budget | None, model: Model) -> Iterator[Form]:
    """Those to try, in order; forms whose numbers alone are over the budget are not written."""
    if weights is not None or budget is None:
        yield weights or "int8"
        return
    for form, bits in _BITS.items():
        if form == "int4" or model.num_params * (bits or 32) / 8 <= budget.most_bytes:
            yield form


def _judge(tried: list[Verdict], budget: Budget | None, form: str) -> None:
    last = tried[-1]
    over = None if budget is None else budget.refuses(last)
    if over is not None:
        raise InputError(
            f"--budget: {form} in {last.weights} takes {over}: raise the budget, or train a "
            "smaller network."
        )
    if not last.is_as_stated:
        stated = STATED[last.weights]
        raise RunError(
            f"paceline: {form} in {last.weights} has logits {last.logit_error:.2%} off and a loss "
            f"{last.loss_difference:+.4f} nats off, and {stated.logit_error:.2%} and "
            f"{stated.loss_difference:g} are stated: nothing is kept; give more bits."
        )


def _write(form: str, folder: Path, trained: Trained, model: Model, weights: Form) -> Path:
    """Write a network and what is known of its tokens; returns what the runtime opens."""
    bits = _BITS[weights]
    if form == "safetensors":
        dtype = torch.float32 if bits is None else torch.bfloat16
        narrow = None if bits is None else (bits, _GROUP)
        export_decoder(model, trained, folder, dtype, narrow)
        return folder
    if form == "gguf":
        return write_gguf_of(trained, model, folder, GGUF_FORMS[weights])
    for name, contents in about_tokens(trained.run, trained.job, model.max_seq_len).items():
        (folder / name).write_bytes(contents)
    ending, write = ("onnx", write_onnx) if form == "onnx" else ("pte", write_executorch)
    file = folder / f"{trained.job.name}.{ending}"
    write(file, model, trained.weights, bits)
    return file


class _Truth:
    """Held-out tokens of a run, and what its own weights make of them in fp32."""

    def __init__(self, job: Job, model: Model, state: Mapping[str, Tensor]) -> None:
        self._model = model
        self._tokens, self._targets = _held_out(job, model)
        decoder = Decoder(model)
        decoder.load_state_dict({name: tensor.float() for name, tensor in state.items()})
        self._logits = self._logits_of(decoder)
        self._loss = self._loss_of(self._logits)

    def verdict(self, form: str, weights: Form, target: Path, step: int, size: int) -> Verdict:
        """Run a file, and hold it against the run's own weights."""
        logits, told = self._run(form, target)
        if logits.shape != self._logits.shape:
            raise RunError(
                f"paceline: {told['runtime']} gives logits of shape {tuple(logits.shape)}, and "
                f"the run's are {tuple(self._logits.shape)}: nothing is kept."
            )
        error = (logits - self._logits).norm() / self._logits.norm()
        return Verdict(
            format=form,
            weights=weights,
            step=step,
            num_bytes=size,
            held_out_tokens=self._tokens.numel(),
            loss=self._loss_of(logits),
            loss_of_run=self._loss,
            logit_error=float(error),
            **told,
        )

    def _run(self, form: str, target: Path) -> tuple[Tensor, dict[str, Any]]:
        if form == "gguf" and not has_llama():
            decoder = Decoder(self._model)
            decoder.load_state_dict(read_gguf(target, self._model))
            return self._logits_of(decoder), {"runtime": "gguf's reader, and Paceline's network"}
        with tempfile.TemporaryDirectory() as kept:
            samples, results = Path(kept) / "samples.npy", Path(kept) / "logits.npy"
            np.save(samples, self._tokens.numpy())
            # -P: the script's own folder has modules that are not for it.
            command = [sys.executable, "-P", str(Path(runtime.__file__)), form]
            command += map(str, (target, samples, results))
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, check=True, timeout=_PATIENCE_S
                )
            except subprocess.CalledProcessError as error:
                lines = (error.stderr or "").strip().splitlines() or [f"exit {error.returncode}"]
                raise RunError(
                    f"paceline: the runtime of {form} can't run the file ({lines[-1]}): nothing "
                    "is kept."
                ) from None
            except subprocess.TimeoutExpired:
                raise RunError(
                    f"paceline: the runtime of {form} took more than {_PATIENCE_S} s: nothing is "
                    "kept."
                ) from None
            return torch.from_numpy(np.load(results)), json.loads(done.stdout.splitlines()[-1])

    @torch.inference_mode()
    def _logits_of(self, decoder: Decoder) -> Tensor:
        return torch.cat([decoder.eval()(sample[None]) for sample in self._tokens])

    def _loss_of(self, logits: Tensor) -> float:
        return float(F.cross_entropy(logits.flatten(0, 1), self._targets.flatten()))


def _held_out(job: Job, model: Model) -> tuple[Tensor, Tensor]:
    """Tokens and their targets, (samples, seq) each.

    Raises:
        InputError: the run holds none out.
    """
    if job.data.stream.is_on:
        raise InputError(
            "--for edge compares losses on held-out samples, and a run on a stream has none that "
            "stay: export it without --for."
        )
    data = prepare_corpus(job.data).for_samples(job.train.seq_len)
    held_out = data.held_out()[0]
    length = min(job.train.seq_len, _LONGEST)
    most = max(_LEAST_TOKENS, min(_MOST_TOKENS, _MOST_LOGITS // model.vocab_size))
    wanted = min(max(1, most // length), held_out.num_samples(job.train.seq_len))
    shape = BatchShape(1, 1, job.train.seq_len)
    batches = [batch for step in eval_batches(held_out, shape, wanted) for batch in step]
    tokens, targets = (
        torch.cat([getattr(batch, name)[:, :length] for batch in batches])
        for name in ("tokens", "targets")
    )
    return tokens, targets


def _show(tried: list[Verdict]) -> None:
    heads = ("weights", "bytes", "loss", "difference", "logits off", "tokens/s", "resident")
    rows = [
        (
            each.weights,
            bytes_text(each.num_bytes),
            f"{each.loss:.4f}",
            f"{each.loss_difference:+.4f}",
            f"{each.logit_error:.2%}",
            "unknown" if each.tokens_per_s is None else f"{each.tokens_per_s:,.0f}",
            bytes_text(each.resident_bytes),
        )
        for each in tried
    ]
    note = f"{tried[-1].held_out_tokens:,} held-out tokens by {tried[-1].runtime}"
    Console(highlight=False).print(Table(heads, rows, note=note, ruled=True))
