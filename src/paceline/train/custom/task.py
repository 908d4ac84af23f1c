"""The Task of a person's own module, loss and data."""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from paceline.comm.records import all_gather
from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.train.custom.changes import Traits
from paceline.train.custom.feed import BatchPartition, CustomFeed, Step, check_enough, feed_of
from paceline.train.custom.loss import UserLoss
from paceline.train.custom.user_inputs import UserInputs
from paceline.train.task import Task


def custom_task(
    job: Job,
    ranks: Ranks,
    brought: UserInputs,
    traits: Traits | None = None,
    *,
    has_values: bool = True,
) -> Task:
    """A person's own module, on the ranks of a concrete Job.

    Args:
        traits: of that, to be kept in the Run's facts.
        has_values: whether the module's parameters are those that the script made.

    Raises:
        InputError: the data can't be used.
    """
    module = brought.model.to(ranks.device)
    has_values = _share_values(module, ranks, has_values=has_values)
    deal = BatchPartition.of(job, ranks)
    check_enough(brought.data, deal.global_batch)
    how = (deal, brought.collate, brought.workers)
    feed = feed_of(brought.data, *how)
    held_out = None if brought.eval_data is None else feed_of(brought.eval_data, *how)
    loss = UserLoss(brought.loss, deal.micro_batch, ranks.world_size)

    def tell_by(say: Callable[[str], None]) -> None:
        feed.tell_by(say)
        if deal.micro_batch < deal.global_batch:
            loss.tell_by(say)

    facts = {"num_params": sum(p.numel() for p in module.parameters()), "own": traits or {}}
    return Task(
        module=module,
        has_values=has_values,
        loss=loss,
        steps_from=feed.steps,
        eval_steps=None if held_out is None else lambda: _evaluation(held_out, deal),
        unit="samples",
        facts=facts,
        loop_options=brought.loop_options,
        tp_plan=brought.tp_plan,
        data_state=feed,
        tell_by=tell_by,
    )


def _evaluation(held_out: CustomFeed, deal: BatchPartition) -> list[Step]:
    """All held-out steps of this rank: as many as of every other one."""
    steps = list(held_out.once())
    if not steps:
        raise InputError("eval_data yields nothing: bring at least one sample, or leave it out.")
    deal.compare(len(steps), "the number of batches of eval_data")
    return steps


@torch.no_grad()
def _share_values(module: nn.Module, ranks: Ranks, *, has_values: bool) -> bool:
    """Start every rank from the weights of the first one that has any: a script may not have seeded
    its module alike.

    DDP does this by itself; FSDP2 doesn't, and replicas of shards would differ for ever.

    Returns:
        whether some rank has any.
    """
    owners = [rank for rank, has in enumerate(all_gather(has_values)) if has]
    if ranks.world_size > 1:
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            dist.broadcast(tensor, min(owners, default=0))
    return bool(owners)
