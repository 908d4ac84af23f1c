"""Distillation: a decoder learns what a larger one, the teacher, says of each next token.

How it works: beside the network stands the teacher, without gradients: whole on each rank, or where
FSDP2 shards the network over the same ranks as that one. It reads each micro-batch right after the
network has; so no more than one micro-batch of its logits is there at a time. The loss of a token
is (1 - w) times its negative log-likelihood plus w T^2 times the divergence of the two
distributions, KL(teacher || network), with both logits divided by T. T^2 keeps the gradient's size
for any T.

Logits are the largest tensors there are. The gradient of the divergence is known with its value, so
it is made in the forward pass, sample by sample, and it alone is kept.

Papers: https://arxiv.org/abs/1503.02531 (section 2), https://arxiv.org/abs/2407.14679 (with
pruning).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.config.model import Model
from paceline.kernels.dtypes import DTYPES
from paceline.kernels.loss import IGNORED
from paceline.models.decoder import Decoder
from paceline.models.shares import assign
from paceline.models.weights import by_layer, check_weights, load_weights, shapes_of
from paceline.observe.run import Run
from paceline.parallel.fsdp import free_gathered, shard
from paceline.train.data import MicroBatch
from paceline.train.kept_weights import KeptWeights
from paceline.train.starting_weights import check_tokens
from paceline.train.task import StagedLoss
from paceline.train.weighted_loss import WeightedLoss


class Teacher:
    """The network that is learnt from.

    Args:
        job: concrete, that names one.
        device: what this rank computes on.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        model, path = job.finetune.teacher, job.finetune.distill.teacher
        assert model is not None
        assert path is not None
        self._model, self._path, self._device = model, Path(path), device
        self._dtype = DTYPES[job.layout.precision]
        self._decoder: Decoder | None = None

    def stand_beside(self, module: nn.Module) -> None:
        """Read the weights, sharded as the module is: in the type of its arithmetic, for nothing
        is added to them."""
        with torch.device("meta"):
            decoder = Decoder(self._model).eval().requires_grad_(False)
        for parameter in decoder.parameters():
            parameter.data = parameter.data.to(self._dtype)
        first = next(module.parameters())
        if isinstance(first, DTensor):
            options = MixedPrecisionPolicy(), OffloadPolicy()
            shard(decoder, decoder.blocks, first.device_mesh, 3, *options)
        decoder.to_empty(device=self._device)
        _load(decoder, self._path)
        self._decoder = decoder

    @torch.no_grad()
    def logits(self, batch: MicroBatch) -> Tensor:
        """Of each next token: (batch, seq, vocab)."""
        assert self._decoder is not None
        found: Tensor = self._decoder(batch.tokens, batch.document_ids)
        free_gathered(self._decoder)
        return found


def distilled(job: Job, teacher: Teacher, likelihood: StagedLoss) -> StagedLoss:
    """The loss beside a teacher.

    Args:
        job: says how much each part counts.
        teacher: will stand beside the network.
        likelihood: the loss of the text alone, of whole sequences.
    """
    settings = job.finetune.distill

    def criterion(logits: Tensor, batch: MicroBatch) -> WeightedLoss:
        wanted = teacher.logits(batch)
        counts = batch.targets != IGNORED
        each = divergences(logits, wanted, settings.temperature)
        divergence = torch.where(counts, each, 0).sum() / counts.sum()
        part = WeightedLoss.of(likelihood.criterion(logits, batch))
        scaled = settings.temperature**2 * divergence
        return replace(
            part,
            loss=(1 - settings.weight) * part.loss + settings.weight * scaled,
            figures={"likelihood": part.loss.detach(), "divergence": divergence.detach()},
        )

    return StagedLoss(inputs=_inputs, criterion=criterion)


def divergences(logits: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """How far distributions are from those of the teacher.

    Args:
        logits: (batch, seq, vocab), of the network.
        wanted: the same of the teacher, without a gradient.
        temperature: that both are divided by.

    Returns:
        (batch, seq) KL(teacher || network) in nats, fp32 (fp64 for fp64 logits).
    """
    found: Tensor = _Divergences.apply(logits, wanted, temperature)
    return found


class _Divergences(torch.autograd.Function):
    """Its gradient is (network's probabilities - teacher's) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, temperature: float) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        found = torch.empty(logits.shape[:-1], dtype=wide, device=logits.device)
        change = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        for number, pair in enumerate(zip(logits, wanted, strict=True)):
            own, theirs = (F.log_softmax(each.to(wide) / temperature, -1) for each in pair)
            chances = theirs.exp()
            found[number] = (chances * (theirs - own)).sum(-1)
            if change is not None:
                change[number] = (own.exp() - chances) / temperature
        ctx.save_for_backward(change)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (change,) = ctx.saved_tensors
        return change * grad.unsqueeze(-1).to(change.dtype), None, None


def check_teacher(job: Job, tokenizer: Path) -> None:
    """Look whether the Job's teacher can be read and knows the data's tokens.

    Args:
        tokenizer: file of that of the data.

    Raises:
        InputError: weights are missing, damaged or of another network, or the tokens are others.
    """
    model, named = job.finetune.teacher, job.finetune.distill.teacher
    assert model is not None
    assert named is not None
    path = Path(named)
    if _is_folder(path):
        check_weights(model, path)
    else:
        _kept(path, model)
    beside = path if _is_folder(path) else path / "tokenizer"
    check_tokens(tokenizer, job.data, str(beside), "finetune.distill.teacher")


def _is_folder(path: Path) -> bool:
    return (path / "config.json").is_file()


def _kept(path: Path, model: Model) -> KeptWeights:
    kept = KeptWeights(Run(path))
    if kept.shapes != shapes_of(model):
        raise InputError(
            f"finetune.distill.teacher = {str(path)!r} has another network than when this run "
            "began: give the one that it learns from."
        )
    return kept


def _load(decoder: Decoder, path: Path) -> None:
    """Fill a decoder, which may be sharded, a layer at a time."""
    if _is_folder(path):
        load_weights(decoder, path)
        return
    kept, own = _kept(path, decoder.model), decoder.state_dict(keep_vars=True)
    decoder.reset_buffers()
    for names in by_layer({name: name for name in kept.shapes}):
        for name, tensor in kept.read(names).items():
            assign(own[name], tensor)


def _inputs(batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor | None]]:
    return batch.tokens, {"document_ids": batch.document_ids}
