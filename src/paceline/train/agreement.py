"""Agreement: what the ranks of a run find together, and when.

Replicas that exchange gradients agree on a step's numbers within it. Workers that step each for
itself keep theirs until they meet. Gradients themselves are `parallel.replicas`' to agree on.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.mesh import Meshes
from paceline.comm.rendezvous import Ranks, collective_timeout
from paceline.config.frozen import size
from paceline.config.job import Job
from paceline.config.layout import Layout
from paceline.elastic.elastic_rounds import ElasticRounds
from paceline.elastic.local_rounds import LocalRounds
from paceline.elastic.membership import Membership
from paceline.parallel.hybrid import hybrid_reduction_of
from paceline.parallel.replicas import Replicas
from paceline.parallel.replicate import compressed_all_reduce_of
from paceline.parallel.statistics import RunningStatistics
from paceline.train.rank_stats import RankStats
from paceline.train.results import PendingNumbers, StepResult, WorkerReports, read_async
from paceline.train.weighted_loss import WeightedSums

# A pass over as many values as there are parameters: too much for every step.
_ERROR_NORM_EVERY = 10


class Agreed(NamedTuple):
    """A step's numbers: sums over all ranks, () fp64 each; a lone worker's are its own."""

    loss: Tensor
    """Of losses times weights; the mean is the quotient."""
    weight: Tensor
    num_losses: int
    """Ranks that have one, and whose losses the gradients are a mean of."""
    figures: list[Tensor]
    """Of what the loss gave besides, times weights."""
    stops: Tensor
    """Wishes to stop."""
    squared_norm: Tensor
    """Of the whole gradient."""
    squared_error: list[Tensor]
    """What compression owes, squared: one, or none in this step."""
    each: Tensor
    """What each rank said of itself: (3 * ranks,) or (0,)."""


class Agreement:
    """Of one rank with the others.

    Args:
        job: of the run.
        ranks: this process's place.
        module: as `parallel.apply` left it.
        replicas: how gradients are agreed on.
        stats: what this rank says of itself.
    """

    def __init__(
        self, job: Job, ranks: Ranks, module: nn.Module, replicas: Replicas, stats: RankStats
    ) -> None:
        self.replicas = replicas
        self._layout, self._ranks, self._module, self._stats = job.layout, ranks, module, stats
        self._statistics = RunningStatistics(module)
        self._reports = WorkerReports()

    def in_step(
        self, index: int, tally: WeightedSums, squared_norm: Tensor, stop_wanted: bool
    ) -> Agreed:
        """Find a step's numbers, and what each rank says of itself, in one exchange.

        Args:
            index: of the step, from 0.
            tally: of this rank's micro-batches.
            squared_norm: this rank's share of it.
            stop_wanted: this rank was asked to stop.
        """
        is_due = index % _ERROR_NORM_EVERY == 0
        error = self.replicas.squared_error() if is_due else None
        rest = [torch.tensor(float(stop_wanted)), squared_norm, *([] if error is None else [error])]
        own = tally.sums()
        own += [value.to(own[0]) for value in rest]
        each = self._stats.take(index).to(own[0])
        values, num_losses = torch.cat([torch.stack(own), each]), 1
        if not self.replicas.steps_alone:
            values, num_losses = self.sums(values)
            self._statistics.average()
        loss, weight, *others = values[: len(own)]
        figures, rest = others[: len(tally.names)], others[len(tally.names) :]
        stops, norm, *errors = rest
        said = values[len(own) :]
        return Agreed(loss, weight, num_losses, figures, stops, norm, errors, said)

    def sums(self, values: Tensor) -> tuple[Tensor, int]:
        """Sums over all ranks of numbers that begin with loss and weight, and how many losses."""
        values, num_ranks = self.replicas.sum_up(values)
        # In a pipeline only the ranks of the last stage have a loss.
        num_losses = num_ranks // size(self._layout.pp)
        values[1] *= num_losses / num_ranks
        return values, num_losses

    def result(
        self, agreed: Agreed, grad_norm: Tensor, names: tuple[str, ...], sent: Mapping[str, float]
    ) -> Callable[[], StepResult]:
        """A function that waits for a step's numbers and gives them.

        Args:
            agreed: in the step.
            grad_norm: () of the whole gradient, unscaled.
            names: of the figures.
            sent: what this rank sent, by axis.
        """
        first = [agreed.loss, agreed.weight, grad_norm, agreed.stops]
        shared = torch.stack([*first, *agreed.figures, *agreed.squared_error])
        numbers = PendingNumbers(torch.cat([shared, agreed.each]), names, sent, len(agreed.each))
        later = self._reports.add if self.replicas.steps_alone else read_async
        read = later(numbers)

        def read_and_wait() -> StepResult:
            with self._stats.clock.waiting():  # on CUDA for this rank's device
                return read()

        return read_and_wait

    def meet(self, done: int, *, at_once: bool = False) -> bool:
        """Agree with the other workers on the numbers of the steps since they last met.

        Args:
            done: steps of the run.
            at_once: don't wait for a round.

        Returns:
            whether they met; ranks that agree in every step never have to.
        """
        is_round = self.replicas.is_round(done)
        if not self.replicas.steps_alone or not (at_once or is_round):
            return False
        self._reports.agree(partial(self.replicas.sum_up, ends_round=is_round))
        # Workers that may be lost share no process group, and their rounds see to buffers.
        if is_round and dist.is_initialized():
            self._statistics.average()
            self._take_first_buffers()
        return True

    def on_buffers(self) -> None:
        """Give every rank the buffers of rank 0, as DDP does before a step.

        What is evaluated or kept then does not depend on which rank computes or writes it. Running
        statistics and a decoder's buffers are the same wherever they are, a stage has its own, and
        so has a worker until the next round.
        """
        is_shared = self._ranks.world_size > 1 and self._layout.is_plain
        if is_shared and not self.replicas.steps_alone:
            self._take_first_buffers()

    @torch.no_grad()
    def _take_first_buffers(self) -> None:
        kept = self._module.state_dict(keep_vars=True)
        for name, buffer in self._module.named_buffers():
            if name in kept:
                dist.broadcast(buffer, 0)


def replicas_of(
    job: Job,
    ranks: Ranks,
    module: nn.Module,
    names: Mapping[nn.Parameter, str],
    layout: Layout,
    meshes: Meshes | None,
    membership: Membership | None,
) -> Replicas:
    """How a Job's ranks agree on gradients.

    Args:
        job: of the run.
        ranks: this process's place.
        module: as `parallel.apply` left it.
        names: of its parameters.
        layout: of the module.
        meshes: of all ranks, where there are several.
        membership: of workers that may be lost.
    """
    if job.comm.local.method != "none":
        return _rounds(job, module, names, membership)
    return (
        compressed_all_reduce_of(module, names, job.comm, ranks.local_world_size)
        or hybrid_reduction_of(module, names, job.comm, layout, meshes, job.accumulation)
        or Replicas()
    )


def _rounds(
    job: Job,
    module: nn.Module,
    names: Mapping[nn.Parameter, str],
    membership: Membership | None,
) -> LocalRounds:
    local, least, num_steps = job.comm.local, job.comm.compress_from, job.train.steps
    if membership is not None:
        workers = (membership, job.layout.num_ranks)
        return ElasticRounds(module, names, local, least, *workers, num_steps)
    # A group of its own: fragments travel beside whatever else the ranks say to each other.
    group = dist.new_group(timeout=collective_timeout())
    return LocalRounds(module, names, local, least, group, num_steps)
