"""Preferences: of two answers to a prompt the better one is to become likelier (DPO).

How it works: a sample holds pairs of texts, the better answer and then the worse one, each with
attention of its own. Log-probabilities of answers are sums over their tokens. The loss of a pair is
-log σ(β · margin), where the margin is what training has added to the log-probability of the
better answer, less what it has added to that of the worse one. What the first weights give is
computed right before the step (`Reference`). The mean is over the pairs of the whole batch.

Papers: DPO https://arxiv.org/abs/2305.18290 (equation 7); label smoothing
https://ericmitchell.ai/cdpo.pdf (equation 3).
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.rendezvous import Ranks
from paceline.config.finetune import Dpo
from paceline.config.job import Job
from paceline.kernels.loss import IGNORED
from paceline.parallel import vocabulary
from paceline.train.data import MicroBatch
from paceline.train.reference import Reference
from paceline.train.task import GiveOutputs, StagedLoss, Step
from paceline.train.weighted_loss import WeightedLoss

FIGURES = ("accuracy", "margin", "reward_chosen", "reward_rejected")


def preference_loss(job: Job, _ranks: Ranks) -> StagedLoss:
    """The loss of a decoder on pairs, whose `reference` is known."""
    most = job.micro_batch * job.train.seq_len
    return StagedLoss(inputs=_inputs, criterion=partial(_criterion, job.finetune.dpo, most))


def with_reference(
    reference: Reference, module: nn.Module, step: Step, give_outputs: GiveOutputs
) -> Step:
    """Micro-batches with the log-probabilities that the first weights give their texts."""
    found: dict[int, Tensor] = {}

    def take(logits: Tensor, number: int) -> None:
        found[number] = text_log_probs(logits, step[number])

    with reference.in_place_of(module):
        give_outputs(step, take)
    return [batch._replace(reference=found.get(number)) for number, batch in enumerate(step)]


def dpo(ratios: Tensor, settings: Dpo) -> tuple[Tensor, Tensor]:
    """The loss of pairs.

    Args:
        ratios: (..., 2) what training has added to the log-probabilities of the better and of the
            worse answer.
        settings: of the loss.

    Returns:
        losses in nats and margins times beta, (...) each.
    """
    margins = settings.beta * (ratios[..., 0] - ratios[..., 1])
    wrong = settings.label_smoothing
    return -(1 - wrong) * F.logsigmoid(margins) - wrong * F.logsigmoid(-margins), margins


def text_log_probs(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Log-probabilities of the answers in the texts of samples.

    Args:
        logits: (batch, seq, vocab), which may be split over the vocabulary.
        batch: with `document_ids`.

    Returns:
        (batch, most texts) in nats, fp32 (fp64 for fp64 logits); 0 where there is no text.
    """
    return _by_text(-vocabulary.losses_of_tokens(logits, batch.targets), batch)


def _criterion(settings: Dpo, most: int, logits: Tensor, batch: MicroBatch) -> WeightedLoss:
    assert batch.reference is not None
    ratios = (text_log_probs(logits, batch) - batch.reference).unflatten(-1, (-1, 2))
    losses, margins = dpo(ratios, settings)
    is_pair = _by_text((batch.targets != IGNORED).float(), batch)[:, ::2] > 0  # (batch, most pairs)
    count = is_pair.sum()

    def mean(values: Tensor) -> Tensor:
        return torch.where(is_pair, values, 0).sum() / count

    better, worse = (settings.beta * ratios).unbind(-1)
    values = ((margins > 0).to(margins.dtype), margins, better, worse)
    figures = dict(zip(FIGURES, map(mean, values), strict=True))
    # Shares of a power of two, as of answers: divided without rounding, and in fp16's range.
    return WeightedLoss(mean(losses), count.float() / (1 << most.bit_length()), figures)


def _inputs(batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor | None]]:
    return batch.tokens, {"document_ids": batch.document_ids}


def _by_text(values: Tensor, batch: MicroBatch) -> Tensor:
    """Sums over the tokens of each text: (batch, an even number that is enough)."""
    assert batch.document_ids is not None
    size, seq_len = values.shape
    sums = values.new_zeros(size, seq_len + 2 - seq_len % 2)
    return sums.scatter_add(1, batch.document_ids, values)
