"""Task: what the loop trains, and the Task of a language model.

The loop knows only this record, so that a decoder from a Job and a person's own module
(`train.custom`) get the same parallelism, precision, checkpoints, metrics and profiles.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.comm.rendezvous import Ranks
from paceline.config.frozen import size
from paceline.config.job import Job
from paceline.config.job_sections import Train
from paceline.config.model import Model
from paceline.kernels import switch
from paceline.kernels.loss import cross_entropy
from paceline.models.decoder import Decoder
from paceline.models.weights import load_weights
from paceline.parallel import vocabulary
from paceline.parallel.apply import DTYPES
from paceline.parallel.cp import positions_of
from paceline.recommender.parameter_server.tables import Tables
from paceline.train.data import (
    BatchShape,
    Meta,
    MicroBatch,
    PreparedData,
    eval_batches,
    train_batches,
)
from paceline.train.learning_rates import MakeOptimizer, MakeSchedule
from paceline.train.metrics_buffer import Line
from paceline.train.weighted_loss import WeightedLoss

Loss = Callable[[nn.Module, Any], Tensor | WeightedLoss]


class StagedLoss(NamedTuple):
    """A loss taken apart, so that its module can be cut into pipeline stages."""

    inputs: Callable[[Any], tuple[Tensor, dict[str, Any]]]
    """Maps a micro-batch to what the first stage reads, and what every stage is told besides."""
    criterion: Callable[[Tensor, Any], Tensor]
    """Maps (output of the last stage, micro-batch) to the mean loss of that micro-batch."""


Step = list[Any]
"""The micro-batches of one rank in one step."""


@dataclass(frozen=True)
class LoopOptions:
    """What a person may want of the loop besides."""

    optimizer: MakeOptimizer | None = None
    schedule: MakeSchedule | None = None
    ema: float | None = None
    """Decay of a mean of the weights."""
    find_unused_parameters: bool = False
    """Whether DDP looks which parameters a step doesn't reach."""
    on_step: Callable[[Line], None] | None = None
    """Called on rank 0 with each line of metrics.jsonl."""
    on_eval: Callable[[Line], None] | None = None
    """The same, with lines that have an evaluation."""


@dataclass(frozen=True)
class Task:
    """A module, its loss, and where its batches come from."""

    module: nn.Module
    """On the rank's device with the same weights on every rank; or on no device (meta) at all, to
    be filled when this rank's share of it is known."""
    loss: Loss
    """Maps (module, micro-batch) to the mean loss of that micro-batch, a scalar, and perhaps how
    much it counts."""
    steps_from: Callable[[int], Iterator[Step]]
    """Maps a number of samples already consumed to this rank's steps from there on."""
    eval_steps: Callable[[], Iterable[Step]] | None
    """This rank's share of the held-out batches, the same at each call; None: no evaluation."""
    unit: str
    """What throughput counts: "tokens" or "samples"."""
    units_per_sample: int = 1
    train_flops_per_unit: float | None = None
    """Model FLOPs of forward and backward, None when unknown."""
    data_key: str | None = None
    """Names the data by its contents, None where that is unknown."""
    staged: StagedLoss | None = None
    """The loss taken apart; None: the module can't be pipelined."""
    fill: Callable[[nn.Module], None] | None = None
    """Gives the parameters of (a part of) the module their first values, in place."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the Run keeps about model and data."""
    tables: Tables | None = None
    """Embedding tables that are no parameters of the module; `loss` reads rows of them."""
    loop_options: LoopOptions = field(default_factory=LoopOptions)
    eval_figures: Callable[[], dict[str, float]] | None = None
    """What an evaluation found besides the loss, the same on every rank; asked after it."""
    tell_by: Callable[[Callable[[str], None]], None] | None = None
    """Is given what tells a person a sentence, for what only batches show."""


def language_task(job: Job, ranks: Ranks, data: PreparedData) -> Task:
    """The Job's own decoder on its own text."""
    model, train = job.model, job.train
    assert isinstance(model, Model)
    shape = BatchShape(
        global_batch=train.global_batch,
        micro_batch=job.micro_batch,
        seq_len=train.seq_len,
        rank=job.layout.data_rank(ranks.rank),
        num_ranks=job.layout.num_data_ranks,
        reset_at_documents=job.data.reset_at_documents,
        device=ranks.device,
    )
    data = data.for_samples(train.seq_len)
    train_split, eval_split = data.dataset("train"), data.dataset("eval")
    staged = next_token(job, ranks)
    return Task(
        module=decoder_on_meta(model),
        loss=unstaged_loss(staged),
        steps_from=lambda first: train_batches(train_split, shape, train.seed, first),
        eval_steps=lambda: eval_batches(eval_split, shape, train.eval_batches),
        unit="tokens",
        units_per_sample=train.seq_len,
        train_flops_per_unit=model.train_flops_per_token(train.seq_len),
        data_key=data.meta.fingerprint,
        staged=staged,
        fill=partial(fill_decoder, train),
        facts={"num_params": model.num_params, "data": _data_facts(data.meta)},
    )


def _data_facts(meta: Meta) -> dict[str, Any]:
    return {
        "tokenizer": meta.tokenizer,
        "vocab_size": meta.vocab_size,
        "train_tokens": meta.train_tokens,
        "eval_tokens": meta.eval_tokens,
        "num_documents": meta.num_documents,
        "unigram_loss": meta.unigram_loss,
        "tokens_sha256": meta.tokens_sha256,
    }


def decoder_on_meta(model: Model) -> Decoder:
    """The network without memory: a rank allocates only its share."""
    with torch.device("meta"):
        return Decoder(model)


def fill_decoder(train: Train, module: nn.Module) -> None:
    """Give (a stage of) a decoder the Job's weights, or random ones by the Job's seed."""
    assert isinstance(module, Decoder)
    if train.weights is not None:
        load_weights(module, train.weights)
    else:
        module.init_weights(torch.Generator().manual_seed(train.seed))


def next_token(job: Job, ranks: Ranks) -> StagedLoss:
    """The loss of a decoder: of the tokens of each sequence that this rank holds."""
    layout, seq_len = job.layout, job.train.seq_len
    if layout.is_plain:
        assert layout.precision != "auto"
        dtype = DTYPES[layout.precision]
        return StagedLoss(partial(_whole_inputs, ranks.device.type, dtype), _whole_loss)
    ulysses = size(layout.ulysses)
    place = layout.place(ranks.rank).cp
    held = positions_of(seq_len, size(layout.cp) // ulysses, ulysses, place).to(ranks.device)
    return StagedLoss(
        inputs=lambda batch: (
            batch.tokens[:, held],
            {"document_ids": batch.document_ids, "positions": held},
        ),
        criterion=lambda logits, batch: _cross_entropy(logits, batch.targets[:, held]),
    )


def _whole_inputs(
    device_type: str, dtype: torch.dtype, batch: MicroBatch
) -> tuple[Tensor, dict[str, Any]]:
    told = {"document_ids": batch.document_ids}
    if switch.takes_on("loss", device_type, dtype):
        # The fused loss needs the head's weight, so it is the network's last layer. Plain torch's
        # is better off outside, where FSDP2 has let that weight go.
        told["targets"] = batch.targets
    return batch.tokens, told


def _whole_loss(out: Tensor, batch: MicroBatch) -> Tensor:
    """What the network returned, if that is the loss."""
    return out if out.ndim == 0 else cross_entropy(out, batch.targets)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of logits that may be split over the vocabulary (tensor parallel)."""
    if isinstance(logits, DTensor):
        return vocabulary.cross_entropy(logits, targets)
    return cross_entropy(logits, targets)


def unstaged_loss(staged: StagedLoss) -> Loss:
    """The loss in one piece, for a module that isn't cut into stages."""

    def loss(module: nn.Module, batch: Any) -> Tensor:
        x, told = staged.inputs(batch)
        return staged.criterion(module(x, **told), batch)

    return loss
