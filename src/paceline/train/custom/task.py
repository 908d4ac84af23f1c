"""The Task of a person's own module, loss and data."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.comm.ranks import Ranks
from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.train.custom.batches import Collate
from paceline.train.custom.feed import Deal, Feed, Step, check_enough, feed_of
from paceline.train.custom.loss import Loss, StatedLoss
from paceline.train.task import Task


def custom_task(
    job: Job,
    ranks: Ranks,
    module: nn.Module,
    loss: Loss,
    data: Any,
    eval_data: Any | None,
    collate: Collate | None = None,
    workers: int | None = None,
) -> Task:
    """A person's own module, on the ranks of a concrete Job.

    The arguments are those of `paceline.train`.

    Raises:
        InputError: the data can't be used.
    """
    module.to(ranks.device)
    _take_from_first(module, ranks)
    deal = Deal.of(job, ranks)
    check_enough(data, deal.global_batch)
    feed = feed_of(data, deal, collate, workers)
    held_out = None if eval_data is None else feed_of(eval_data, deal, collate, workers)
    return Task(
        module=module,
        loss=StatedLoss(loss, deal.micro_batch, ranks.world_size),
        steps_from=feed.steps,
        eval_steps=None if held_out is None else lambda: _evaluation(held_out, deal),
        unit="samples",
        facts={"num_params": sum(p.numel() for p in module.parameters())},
    )


def _evaluation(held_out: Feed, deal: Deal) -> list[Step]:
    """All held-out steps of this rank: as many as of every other one."""
    steps = list(held_out.once())
    if not steps:
        raise InputError("eval_data yields nothing: bring at least one sample, or leave it out.")
    deal.compare(len(steps), "the number of batches of eval_data")
    return steps


@torch.no_grad()
def _take_from_first(module: nn.Module, ranks: Ranks) -> None:
    """Start every rank from rank 0's weights: a script may not have seeded its module alike.

    DDP does this by itself; FSDP2 doesn't, and replicas of shards would differ for ever.
    """
    if ranks.world_size > 1:
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            dist.broadcast(tensor, 0)
