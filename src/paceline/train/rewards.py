"""Rewards: completions with more reward than others of their prompt become likelier (GRPO).

How it works: the advantage of a completion is its reward less the mean of its group, divided by
their standard deviation. The loss of a token is -min(r A, clip(r) A), where r is how much likelier
it has become since it was made; where it is learnt from once, r is 1 and only its gradient counts.
With `beta` the divergence from the first weights is added, as an estimate that is never negative
(http://joschu.net/blog/kl-approx.html). The loss of a completion is the mean over its tokens, and
all completions count alike.

Paper: https://arxiv.org/abs/2402.03300 (equations 3 and 4).
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm.rendezvous import Ranks
from paceline.config.finetune import Grpo
from paceline.config.job import Job
from paceline.kernels.loss import IGNORED
from paceline.parallel import vocabulary
from paceline.train.task import StagedLoss
from paceline.train.weighted_loss import WeightedLoss

_LEAST_DEVIATION = 1e-4


class Completions(NamedTuple):
    """A micro-batch of prompts with their completions, filled up at the end."""

    tokens: Tensor
    """(completions, seq) int64."""
    targets: Tensor
    """The same shape: the token after each; -100 where it is none of the completion's."""
    advantages: Tensor
    """(completions,) fp32, as rewards."""
    rewards: Tensor
    made_with: Tensor | None = None
    """(completions, seq) log-probabilities of the targets when they were made; None: those of the
    weights as they are."""
    reference: Tensor | None = None
    """The same by the first weights, where the loss asks for them."""


def reward_loss(job: Job, _ranks: Ranks) -> StagedLoss:
    """The loss of a decoder on `Completions`."""
    return StagedLoss(
        inputs=lambda batch: (batch.tokens, {}),
        criterion=partial(_criterion, job.finetune.grpo),
    )


def figures_of_rewards(settings: Grpo) -> list[str]:
    """Of the loss, by name."""
    return ["reward", "completion_tokens", "clipped", *(["divergence"] if settings.beta else [])]


def advantages_of(rewards: Tensor) -> Tensor:
    """How much better than others of its group each completion is.

    Args:
        rewards: (groups, completions of a group).
    """
    mean, deviation = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
    return (rewards - mean) / (deviation + _LEAST_DEVIATION)


def log_probs_of(module: nn.Module, batch: Completions, settings: Grpo) -> Tensor:
    """(completions, seq) log-probabilities of the targets; 0 where there is none."""
    return _log_probs(module(batch.tokens), batch, settings)


def _log_probs(logits: Tensor, batch: Completions, settings: Grpo) -> Tensor:
    return -vocabulary.losses_of_tokens(logits / settings.temperature, batch.targets)


def _criterion(settings: Grpo, logits: Tensor, batch: Completions) -> WeightedLoss:
    log_probs, counted = _log_probs(logits, batch, settings), batch.targets != IGNORED

    def mean(values: Tensor) -> Tensor:
        return ((values * counted).sum(1) / counted.sum(1).clamp(min=1)).mean()

    before = log_probs.detach() if batch.made_with is None else batch.made_with
    ratio, advantages = (log_probs - before).exp(), batch.advantages[:, None].to(log_probs)
    bounded = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    losses = -torch.minimum(ratio * advantages, bounded * advantages)
    figures = {
        "reward": batch.rewards.mean(),
        "completion_tokens": counted.sum(1).float().mean(),
        "clipped": mean((bounded * advantages < ratio * advantages).float()),
    }
    if batch.reference is not None:
        difference = batch.reference - log_probs
        divergence = difference.exp() - difference - 1
        losses = losses + settings.beta * divergence
        figures["divergence"] = mean(divergence)
    return WeightedLoss(mean(losses), 1.0, figures)
