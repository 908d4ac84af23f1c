"""Networks of state space layers in training: on text, as decoders are."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.config.mamba import Mamba2, mamba2_to_hf
from paceline.models.mamba import Mamba, check_mamba, exported, load_mamba
from paceline.models.weights import write_state
from paceline.train.data import prepare_corpus
from paceline.train.data.build import Progress
from paceline.train.family import Trained
from paceline.train.kept_tokenizer import GENERATION, about_tokens
from paceline.train.language import LanguageModels, next_token, unstaged_loss
from paceline.train.starting_weights import check_tokens
from paceline.train.task import Task


class StateSpaceModels(LanguageModels):
    """See `TrainFamily`; `model` is a Mamba2."""

    def read_inputs(
        self, model: Any, job: Job, progress: Progress, say: Callable[[str], None]
    ) -> str:
        """Tokenise the text, and hold it and the starting weights against the Job."""
        if job.train.exact_eval:
            raise InputError(
                "train.exact_eval = true takes the passes that serve a decoder, and "
                'model.family = "mamba2" is none: leave it out.'
            )
        weights = job.train.weights
        if weights is not None:
            check_mamba(model, weights)
            check_tokens(prepare_corpus(job.data, progress).tokenizer_path, job.data, weights)
        without = job.replace(train=job.train.replace(weights=None))
        return super().read_inputs(model, without, progress, say)

    def network_task(self, model: Any, job: Job, ranks: Ranks) -> Task:
        """See `LanguageModels.network_task`."""
        staged = next_token(job, ranks)
        with torch.device("meta"):
            module = Mamba(model)
        return Task(
            module=module,
            loss=unstaged_loss(staged),
            steps_from=lambda _first: iter(()),
            eval_steps=None,
            unit=model.unit,
            units_per_sample=job.train.seq_len,
            train_flops_per_unit=model.train_flops_per_unit(job.train.seq_len),
            fill=partial(_fill, job),
            facts={"num_params": model.num_params},
        )

    def export(self, model: Mamba2, trained: Trained, folder: Path, dtype: torch.dtype) -> None:  # type: ignore[override]
        """A folder that transformers opens: config.json, weights, tokenizer."""
        beside = about_tokens(trained.run, trained.job, model.max_seq_len)
        told = json.loads(beside[GENERATION])
        ends = {key: told[key] for key in told if key in ("bos_token_id", "eos_token_id")}
        config = mamba2_to_hf(model) | ends | {"torch_dtype": str(dtype).removeprefix("torch.")}
        write_state(folder, exported(trained.weights), dtype, config, beside)


def _fill(job: Job, module: nn.Module) -> None:
    """Give the network the Job's weights, or random ones by the Job's seed."""
    assert isinstance(module, Mamba)
    if job.train.weights is not None:
        load_mamba(module, job.train.weights)
    else:
        module.init_weights(torch.Generator().manual_seed(job.train.seed))
