"""Agreement: what the ranks of a run find together, and when.

Ranks that exchange gradients agree on a step's numbers within it. Workers that step each for itself
do so among their own ranks, and keep the numbers until they meet. Gradients themselves are
`parallel.replicas`' to agree on.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.local_part import local_part
from paceline.comm.mesh import Meshes, WorkerGroups
from paceline.comm.rendezvous import Ranks
from paceline.config.job import Job
from paceline.config.layout import Layout
from paceline.elastic.local_rounds import LocalRounds
from paceline.parallel.exact_replicas import ExactReplicas
from paceline.parallel.exact_sums import read_sums
from paceline.parallel.hybrid import hybrid_reduction_of
from paceline.parallel.replicas import Replicas, kept_buffers
from paceline.parallel.replicate import compressed_all_reduce_of
from paceline.parallel.statistics import RunningStatistics
from paceline.train.passes import schedule_of
from paceline.train.rank_stats import RankStats
from paceline.train.results import PendingNumbers, StepResult, WorkerReports, read_async
from paceline.train.task import Task
from paceline.train.weighted_loss import WeightedSums

# A pass over as many values as there are parameters: too much for every step.
_ERROR_NORM_EVERY = 10


class Agreed(NamedTuple):
    """A step's numbers: sums over the ranks that step together, () fp64 each."""

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
    """Of one rank with the others."""

    def __init__(
        self, job: Job, ranks: Ranks, module: nn.Module, replicas: Replicas, stats: RankStats
    ) -> None:
        self.replicas = replicas
        self._layout, self._ranks, self._module, self._stats = job.step_layout, ranks, module, stats
        self._is_exact = job.elastic.exact
        self._has_own_buffers = job.model.is_own or self._layout.is_plain
        self._statistics = RunningStatistics(module)
        self._reports = WorkerReports()

    def in_step(
        self, index: int, tally: WeightedSums, squared_norm: Tensor, stop_wanted: bool
    ) -> Agreed:
        """Find a step's numbers, and what each rank says of itself, in one exchange."""
        if self._is_exact:
            return self._exactly(index, tally, squared_norm, stop_wanted)
        is_due = index % _ERROR_NORM_EVERY == 0
        error = self.replicas.squared_error() if is_due else None
        rest = [torch.tensor(float(stop_wanted)), squared_norm, *([] if error is None else [error])]
        own = tally.sums()
        own += [value.to(own[0]) for value in rest]
        each = self._stats.take(index).to(own[0])
        values, num_ranks = self.replicas.sum_in_step(torch.cat([torch.stack(own), each]))
        num_losses = num_ranks // self._layout.pp  # ranks of other stages have none
        if num_ranks > 1:
            self._statistics.average(self.replicas.together)
        loss, weight, *others = values[: len(own)]
        figures, rest = others[: len(tally.names)], others[len(tally.names) :]
        stops, norm, *errors = rest
        said = values[len(own) :]
        return Agreed(loss, weight, num_losses, figures, stops, norm, errors, said)

    def _exactly(
        self, index: int, tally: WeightedSums, squared_norm: Tensor, stop_wanted: bool
    ) -> Agreed:
        """`in_step`, where `squared_norm` and all that decides about training are exact sums."""
        digits = torch.cat([tally.digits(), squared_norm[None]])
        stop = digits.new_full((1,), float(stop_wanted))
        said = self._stats.take(index).to(digits)
        values, _ = self.replicas.sum_up(torch.cat([digits.flatten(), stop, said]))
        count = digits.numel()
        loss, weight, *figures, norm = read_sums(values[:count].view_as(digits))
        stops, said = values[count], values[count + 1 :]
        # Each tp rank has the loss of the same samples, and the gradients are that of one.
        return Agreed(loss, weight, self._layout.tp, figures, stops, norm, [], said)

    def sums_of(self, tally: WeightedSums) -> list[Tensor]:
        """Sums over all ranks: of losses, of weights, of figures."""
        if self._is_exact:
            digits = tally.digits()
            values, _ = self.replicas.sum_up(digits.flatten())
            return list(read_sums(values.view_as(digits)))
        values, _ = self.replicas.sum_up(torch.stack(tally.sums()))
        return list(values)

    def result(
        self,
        agreed: Agreed,
        grad_norm: Tensor,
        spike: Tensor,
        names: tuple[str, ...],
        sent: Mapping[str, float],
    ) -> Callable[[], StepResult]:
        """A function that waits for a step's numbers and gives them."""
        first = [agreed.loss, agreed.weight, grad_norm, agreed.stops, spike]
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
            at_once: don't wait for a round.

        Returns:
            whether they met; ranks that agree in every step never have to.
        """
        is_round = self.replicas.is_round(done)
        if not self.replicas.steps_alone or not (at_once or is_round):
            return False
        self._stats.watch.enter("round")
        self._reports.agree(self.replicas.sum_in_round)
        if is_round and self._ranks.world_size > 1:
            self._statistics.average()
            self._take_first_buffers()
        return True

    def on_buffers(self) -> None:
        """Give every rank the buffers of the first of those that step together, as DDP does.

        What is evaluated or kept then does not depend on which rank computes or writes it. Running
        statistics and a decoder's buffers are the same wherever they are, a stage has its own, and
        so has a worker until the next round.
        """
        if self._layout.num_ranks > 1 and self._has_own_buffers:
            self._take_first_buffers(self.replicas.together)

    def on_stop(self, is_wanted: bool, *, at_round: bool = False) -> bool:
        """Whether some rank wants to stop, between steps. Workers that step each for itself can't
        ask each other there: no.

        Args:
            at_round: whether all of them are at the same one.
        """
        if self.replicas.steps_alone and not at_round:
            return False
        if self._ranks.world_size == 1:
            return is_wanted
        wishes = torch.tensor(float(is_wanted))  # on the host: no device is waited for
        dist.all_reduce(wishes)
        return bool(wishes)

    @torch.no_grad()
    def _take_first_buffers(self, group: dist.ProcessGroup | None = None) -> None:
        for buffer in kept_buffers(self._module):
            dist.broadcast(local_part(buffer), group=group, group_src=0)


def replicas_of(
    job: Job,
    ranks: Ranks,
    task: Task,
    module: nn.Module,
    names: Mapping[nn.Parameter, str],
    layout: Layout,
    meshes: Meshes | None,
) -> Replicas:
    """How a Job's ranks agree on gradients."""
    if job.comm.local.method != "none":
        return _rounds(job, module, names)
    if job.elastic.exact:
        return ExactReplicas(
            module,
            names,
            meshes,
            job.accumulation,
            schedule_of(job),
            scatters_each=layout.scatters_each,
            may_miss=task.loop_options.find_unused_parameters,
        )
    return (
        compressed_all_reduce_of(module, names, job.comm, ranks.local_world_size)
        or hybrid_reduction_of(module, names, job.comm, layout, meshes, job.accumulation)
        or Replicas()
    )


def _rounds(job: Job, module: nn.Module, names: Mapping[nn.Parameter, str]) -> LocalRounds:
    local, least, num_steps = job.comm.local, job.comm.compress_from, job.train.steps
    return LocalRounds(module, names, local, least, WorkerGroups.of(job.layout), num_steps)
