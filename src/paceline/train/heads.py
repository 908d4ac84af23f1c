"""Heads in training: those of the decoder of another run, which is read and stays as it is."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.config.heads import Heads
from paceline.config.job import Job, JobSpec
from paceline.models.decoder import Decoder
from paceline.models.heads import GuessHeads
from paceline.observe.run import Run
from paceline.train.data import MicroBatch, prepare_corpus
from paceline.train.data.build import Progress
from paceline.train.family import TrainFamily
from paceline.train.kept_tokenizer import about_tokens
from paceline.train.kept_weights import checkpoint_of, weights_of
from paceline.train.language import LanguageModels
from paceline.train.task import Task

_TEXT = LanguageModels()


class HeadsOfDecoders(TrainFamily[Heads]):
    """See `TrainFamily`. What isn't about heads is as for their decoder."""

    def read_inputs(
        self, model: Heads, job: Job, progress: Progress, say: Callable[[str], None]
    ) -> str:
        """Tokenise the text, and look whether the decoder and its tokens are there."""
        if job.train.weights is not None or job.train.exact_eval:
            raise InputError(
                'train.weights and train.exact_eval have no effect with model.family = "heads", '
                "whose decoder is that of model.of: leave them out."
            )
        run = Run(Path(model.of))
        checkpoint_of(run, model.step)
        kept = about_tokens(run, run.job(), model.trunk.max_seq_len)["tokenizer.json"]
        if kept != prepare_corpus(job.data, progress).tokenizer_path.read_bytes():
            raise InputError(
                f"data.tokenizer = {job.data.tokenizer!r} is another tokenizer than that of "
                f"{model.of}: use that run's [data], or the tokenizer that stands in it."
            )
        return _TEXT.read_inputs(model.trunk, job, progress, say)

    def task(self, model: Heads, job: Job, ranks: Ranks) -> Task:
        """Heads on the decoder's own text, or other text."""
        return self._of_heads(_TEXT.task(model.trunk, job, ranks), model, job, ranks)

    def task_without_data(self, model: Heads, job: Job, ranks: Ranks) -> Task:
        """On the same random tokens at each step."""
        return self._of_heads(_TEXT.task_without_data(model.trunk, job, ranks), model, job, ranks)

    def num_samples(self, model: Heads, job: JobSpec, progress: Progress | None) -> int:
        """Those of the train split."""
        return _TEXT.num_samples(model.trunk, job, progress)

    def eval_figures(self, model: Heads, job: JobSpec) -> list[str]:
        """Those of the decoder's text."""
        return _TEXT.eval_figures(model.trunk, job)

    def keep_inputs(self, run: Run, job: Job) -> None:
        """What is said of the tokens."""
        _TEXT.keep_inputs(run, job)

    @staticmethod
    def _of_heads(task: Task, model: Heads, job: Job, ranks: Ranks) -> Task:
        """The task of the decoder, with heads in its place."""
        with torch.device("meta"):
            module = GuessHeads(model, cast(Decoder, task.module))
        return replace(
            task,
            module=module,
            loss=_loss,
            staged=None,
            fill=partial(_fill, model, job.train.seed),
            train_flops_per_unit=model.train_flops_per_unit(job.train.seq_len),
            facts={**task.facts, "num_params": model.num_params},
        )


def read_trunk(model: Heads, module: GuessHeads, dtype: torch.dtype, device: torch.device) -> None:
    """Give heads the decoder of its run, which stays as it is."""
    trunk = module.trunk.to(dtype).to_empty(device=device)
    trunk.reset_buffers()
    trunk.load_state_dict(weights_of(Run(Path(model.of)), model.step)[1])
    trunk.requires_grad_(False).eval()


def _fill(model: Heads, seed: int, module: nn.Module) -> None:
    assert isinstance(module, GuessHeads)
    module.init_weights(torch.Generator().manual_seed(seed))
    first = next(module.parameters())
    read_trunk(model, module, first.dtype, first.device)


def _loss(module: nn.Module, batch: MicroBatch) -> Tensor:
    loss: Tensor = module(batch.tokens, batch.targets, batch.document_ids)
    return loss
