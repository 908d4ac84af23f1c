"""`paceline export --prune`: a run's decoder with fewer layers, heads and channels, to train on."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.config.layout import ParamDtype
from paceline.config.model import Model
from paceline.kernels.dtypes import DTYPES
from paceline.kernels.loss import cross_entropy
from paceline.models.decoder import Decoder
from paceline.models.pruned import SIZES, check_prunable, chosen, pruned, ratings, smaller
from paceline.models.weights import must_be_free
from paceline.observe.run import Run
from paceline.train.data import BatchShape, MicroBatch, prepare_corpus, train_batches
from paceline.train.export import note_export
from paceline.train.family import Trained
from paceline.train.kept_weights import weights_of
from paceline.train.language import export_decoder

_MOST_TOKENS = 2**14
"""Of the text that parts are rated on."""


class Cut(NamedTuple):
    """What was written."""

    step: int
    whole: Model
    model: Model
    """What is left."""
    num_tokens: int
    """That parts were rated on, of what the run is trained on."""
    losses: tuple[float, float]
    """On them, nats a token: of the whole network, and of what is left."""


def parse_sizes(text: str) -> dict[str, int]:
    """Read "num_layers=6, ffn_size=704".

    Raises:
        InputError: it can't be understood.
    """
    found = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d{1,9})\s*", part)
        if match is None or match[1] not in SIZES or match[1] in found:
            raise InputError(
                f'--prune {text!r} is no list of sizes: write "num_layers=6, ffn_size=704", of '
                f"{', '.join(SIZES)}, each once."
            )
        found[match[1]] = int(match[2])
    return found


@torch.no_grad()
def export_pruned(
    run: Run,
    folder: Path,
    sizes: Mapping[str, int],
    dtype: ParamDtype = "fp32",
    step: int | None = None,
) -> Cut:
    """Write a run's decoder with less in it, as `export` writes it whole.

    Args:
        folder: must not exist yet, or be empty.
        sizes: by their names in the Model.
        dtype: of the written weights.
        step: of the checkpoint; None: the newest good one.

    Raises:
        InputError: as `export`; or a network or sizes that can't be.
    """
    must_be_free(folder)
    step, state = weights_of(run, step)
    job = run.job()
    if not isinstance(job.model, Model):
        raise InputError(f"--prune is of decoders, and {run.path} trains none of them.")
    check_prunable(job.model, sizes)
    batches = [*_texts(job)]
    whole = Decoder(job.model).eval()
    whole.load_state_dict({name: each.float() for name, each in state.items()})
    rated = ratings(whole, ((batch.tokens, batch.document_ids) for batch in batches))
    kept = chosen(job.model, rated, sizes)
    model, weights = smaller(job.model, kept), pruned(job.model, state, kept)
    left = Decoder(model).eval()
    left.load_state_dict({name: each.float() for name, each in weights.items()})
    losses = _loss(whole, batches), _loss(left, batches)
    export_decoder(model, Trained(run, job, step, weights), folder, DTYPES[dtype])
    note_export(run, job.name, step, folder, dtype)
    return Cut(step, job.model, model, sum(b.tokens.numel() for b in batches), losses)


def _texts(job: Job) -> Iterator[MicroBatch]:
    """The first samples that the run was trained on, one at a time."""
    if job.data.stream.is_on:
        raise InputError(
            "--prune rates parts on what a run is trained on, and a stream is gone: leave it out."
        )
    seq_len, size = job.train.seq_len, job.train.global_batch
    shape = BatchShape(size, 1, seq_len, reset_at_documents=job.data.starts_anew)
    split = prepare_corpus(job.data).for_samples(seq_len).train_split(size)
    left = max(1, _MOST_TOKENS // seq_len)
    for step in train_batches(split, shape, job.train.seed, 0):
        yield from step[:left]
        left -= len(step)
        if left <= 0:
            return


def _loss(decoder: Decoder, batches: list[MicroBatch]) -> float:
    found = [
        float(cross_entropy(decoder(each.tokens, each.document_ids), each.targets))
        for each in batches
    ]
    return sum(found) / len(found)
