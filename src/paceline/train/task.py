"""Task: what the loop trains. A language model from a Job, or a person's own module and data.

The loop knows only this record, so that both get the same parallelism, precision, checkpoints,
metrics and profiles.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate

from paceline.comm.parameter_server.tables import Tables
from paceline.comm.ranks import Ranks
from paceline.config.errors import InputError
from paceline.config.job import Job, Train
from paceline.config.model import Model
from paceline.config.noun import size
from paceline.kernels import switch
from paceline.models.decoder import Decoder, cross_entropy
from paceline.models.weights import load_weights
from paceline.parallel import vocabulary
from paceline.parallel.apply import DTYPES
from paceline.parallel.cp import positions_of
from paceline.train.data import (
    BatchShape,
    Meta,
    MicroBatch,
    PreparedData,
    eval_batches,
    rank_share,
    sample_ids,
    train_batches,
)

Loss = Callable[[nn.Module, Any], Tensor]


class Staged(NamedTuple):
    """A loss taken apart, so that its module can be cut into pipeline stages."""

    inputs: Callable[[Any], tuple[Tensor, dict[str, Any]]]
    """Maps a micro-batch to what the first stage reads, and what every stage is told besides."""
    criterion: Callable[[Tensor, Any], Tensor]
    """Maps (output of the last stage, micro-batch) to the mean loss of that micro-batch."""


Step = list[Any]
"""The micro-batches of one rank in one step."""


@dataclass(frozen=True)
class Task:
    """A module, its loss, and where its batches come from."""

    module: nn.Module
    """On the rank's device with the same weights on every rank; or on no device (meta) at all, to
    be filled when this rank's share of it is known."""
    loss: Loss
    """Maps (module, micro-batch) to the mean loss of that micro-batch, a scalar."""
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
    staged: Staged | None = None
    """The loss taken apart; None: the module can't be pipelined."""
    fill: Callable[[nn.Module], None] | None = None
    """Gives the parameters of (a part of) the module their first values, in place."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the Run keeps about model and data."""
    tables: Tables | None = None
    """Embedding tables that are no parameters of the module; `loss` reads rows of them."""
    eval_figures: Callable[[], dict[str, float]] | None = None
    """What an evaluation found besides the loss, the same on every rank; asked after it."""


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
    train_split, eval_split = data.dataset("train"), data.dataset("eval")
    staged = next_token(job, ranks)
    return Task(
        module=decoder_on_meta(model),
        loss=whole(staged),
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


def next_token(job: Job, ranks: Ranks) -> Staged:
    """The loss of a decoder: of the tokens of each sequence that this rank holds."""
    layout, seq_len = job.layout, job.train.seq_len
    if layout.is_plain:
        assert layout.precision != "auto"
        dtype = DTYPES[layout.precision]
        return Staged(partial(_whole_inputs, ranks.device.type, dtype), _whole_loss)
    ulysses = size(layout.ulysses)
    place = layout.place(ranks.rank).cp
    held = positions_of(seq_len, size(layout.cp) // ulysses, ulysses, place).to(ranks.device)
    return Staged(
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


def whole(staged: Staged) -> Loss:
    """The loss in one piece, for a module that isn't cut into stages."""

    def loss(module: nn.Module, batch: Any) -> Tensor:
        x, told = staged.inputs(batch)
        return staged.criterion(module(x, **told), batch)

    return loss


def custom_task(
    job: Job,
    ranks: Ranks,
    module: nn.Module,
    loss: Loss,
    data: Any,
    eval_data: Any | None,
) -> Task:
    """A person's own module.

    Args:
        data: a map-style dataset (`len` and `[index]`), whose samples are shuffled by (seed, epoch)
            and collated by torch's default rule; or an iterable that starts anew at each `iter` and
            yields *global* batches (nested tensors with the batch first), of which each rank takes
            its part.
        eval_data: as data, read once through at each evaluation.
    """
    module.to(ranks.device)
    _take_from_first(module, ranks)
    split = _Split(job.train.global_batch, job.micro_batch, ranks)
    if _is_map_style(data) and len(data) < job.train.global_batch:
        raise InputError(
            f"data has {len(data)} samples, fewer than train.global_batch = "
            f"{job.train.global_batch}: lower the batch or bring more data."
        )
    return Task(
        module=module,
        loss=loss,
        steps_from=lambda first: _steps(data, job.train.seed, first, split),
        eval_steps=None if eval_data is None else lambda: _once_through(eval_data, split),
        unit="samples",
        facts={"num_params": sum(p.numel() for p in module.parameters())},
    )


@torch.no_grad()
def _take_from_first(module: nn.Module, ranks: Ranks) -> None:
    """Start every rank from rank 0's weights: a script may not have seeded its module alike.

    DDP does this by itself; FSDP2 doesn't, and replicas of shards would differ for ever.
    """
    if ranks.world_size > 1:
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            dist.broadcast(tensor, 0)


@dataclass(frozen=True)
class _Split:
    """How a global batch is dealt out."""

    global_batch: int
    micro_batch: int
    ranks: Ranks

    def micro_batches(self, batch: Any) -> Step:
        """Cut this rank's part of a global batch (nested tensors) into micro-batches."""
        mine = rank_share(np.arange(self.global_batch), self.ranks.rank, self.ranks.world_size)
        cuts = range(0, len(mine), self.micro_batch)
        return [self._place(batch, torch.from_numpy(mine[c : c + self.micro_batch])) for c in cuts]

    def collate(self, dataset: Any, ids: np.ndarray) -> Step:
        """Read this rank's samples of a global batch and collate them into micro-batches."""
        mine = rank_share(ids, self.ranks.rank, self.ranks.world_size)
        cuts = range(0, len(mine), self.micro_batch)
        parts = [[dataset[int(i)] for i in mine[c : c + self.micro_batch]] for c in cuts]
        return [self._place(default_collate(part), None) for part in parts]

    def _place(self, value: Any, rows: Tensor | None) -> Any:
        if isinstance(value, Tensor):
            return (value if rows is None else value[rows]).to(self.ranks.device)
        if isinstance(value, dict):
            return {key: self._place(item, rows) for key, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [self._place(item, rows) for item in value]
        return value


def _is_map_style(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _steps(data: Any, seed: int, first: int, split: _Split) -> Iterator[Step]:
    if _is_map_style(data):
        while True:
            yield split.collate(data, sample_ids(seed, first, split.global_batch, len(data)))
            first += split.global_batch
    skipped = first // split.global_batch
    for batch in itertools.islice(_endless(data), skipped, None):
        yield split.micro_batches(_checked(batch, split.global_batch))


def _endless(data: Iterable[Any]) -> Iterator[Any]:
    """The iterable again and again; one that yields nothing is an error, not a hang."""
    while True:
        empty = True
        for batch in data:
            empty = False
            yield batch
        if empty:
            raise InputError(
                "data yields no batches (any more): give a dataset, or an iterable that starts "
                "anew each time it is iterated, not a generator."
            )


def _checked(batch: Any, global_batch: int) -> Any:
    size = _batch_size(batch)
    if size != global_batch:
        raise InputError(
            f"data yielded a batch of {size} samples but train.global_batch = {global_batch}: "
            "an iterable must yield whole global batches."
        )
    return batch


def _batch_size(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return batch.shape[0]
    first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return _batch_size(first)


def _once_through(data: Any, split: _Split) -> Iterator[Step]:
    if not _is_map_style(data):
        yield from (split.micro_batches(_checked(batch, split.global_batch)) for batch in data)
        return
    # A last, incomplete global batch is left out: every rank must read as many micro-batches.
    for first in range(0, len(data) - split.global_batch + 1, split.global_batch):
        yield split.collate(data, np.arange(first, first + split.global_batch))
