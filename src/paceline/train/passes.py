"""Passes: forward and backward over a rank's micro-batches, one after another or in a pipeline."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import record_function as span

from paceline.comm.busy_clock import BusyClock
from paceline.comm.compress.messages import CodedMessages, messages_of
from paceline.comm.mesh import Meshes
from paceline.comm.rendezvous import Ranks
from paceline.config.frozen import size
from paceline.config.job import Job
from paceline.config.layout import Layout
from paceline.config.schedule import Schedule
from paceline.parallel.apply import arithmetic, prepare_micro_batch
from paceline.parallel.ep import messages_in
from paceline.parallel.exposed_all_reduce import ExposedAllReduce, exposed_all_reduce_of
from paceline.parallel.pp import Criterion, MicroBatch, Pipeline
from paceline.parallel.stages import StageModules
from paceline.plan.schedules import build_schedule
from paceline.train.loss_scale import LossScale
from paceline.train.task import Step, Task
from paceline.train.weighted_loss import WeightedLoss, WeightedSums


@dataclass
class Passes:
    """Of one rank's part of a network."""

    module: nn.Module
    task: Task
    layout: Layout
    device: torch.device
    loss_scale: LossScale
    pipeline: Pipeline | None
    exposed_all_reduce: ExposedAllReduce | None
    """Takes the time of DDP's last buckets, where a host clock can."""
    to_experts: list[CodedMessages] | None
    """Forms in which tokens travel; None: as they are."""

    @classmethod
    def of(
        cls,
        job: Job,
        ranks: Ranks,
        task: Task,
        module: nn.Module,
        meshes: Meshes | None,
        loss_scale: LossScale,
        clock: BusyClock,
    ) -> "Passes":
        """Args:
        job: of the run.
        ranks: this process's place.
        task: whose loss is taken.
        module: as `parallel.apply` left it.
        meshes: of all ranks, where there are several.
        loss_scale: that backward passes begin from.
        clock: counts the waits of this rank.
        """
        pipeline = None if meshes is None else _pipeline(job, ranks, module, meshes)
        exposed = exposed_all_reduce_of(module, ranks, clock)
        to_experts = messages_in(module) if job.comm.ep.compress != "none" else None
        return cls(
            module, task, job.layout, ranks.device, loss_scale, pipeline, exposed, to_experts
        )

    def forward_backward(self, micro_batches: Step) -> WeightedSums:
        """Leave the gradients of this rank's loss, times its weight, in the parameters."""
        if self.pipeline is not None:
            return self._through_pipeline(self.pipeline, micro_batches)
        tally = WeightedSums(self.device, len(micro_batches))
        for number, micro_batch in enumerate(micro_batches):
            prepare_micro_batch(self.module, self.layout, number, len(micro_batches))
            with span("paceline.forward"):
                part = self.forward(micro_batch)
                loss = part.times_weight(part.loss) / len(micro_batches)
            with span("paceline.backward"):
                self._backward(self.loss_scale.scale(loss))
            tally.add(part, loss)
        return tally

    def forward(self, micro_batch: object) -> WeightedLoss:
        """Loss of one micro-batch, in the layout's arithmetic."""
        with arithmetic(self.layout, self.device.type):
            return WeightedLoss.of(self.task.loss(self.module, micro_batch))

    def forward_only(self, micro_batches: Step, tally: WeightedSums) -> None:
        """Count held-out micro-batches in."""
        if self.pipeline is not None:
            with arithmetic(self.layout, self.device.type):
                loss = self.pipeline.forward_only(*self._staged(micro_batches))
            tally.add(WeightedLoss(loss), loss)
            return
        for micro_batch in micro_batches:
            part = self.forward(micro_batch)
            tally.add(part, part.times_weight(part.loss.double()))

    def without_effect(self, micro_batch: object) -> None:
        """One forward and backward as they come first in a process, for what they settle."""
        prepare_micro_batch(self.module, self.layout, 0, 1)
        self.forward(micro_batch).loss.backward()

    def sent(self) -> dict[str, float]:
        """What this rank sent in a form of ours in the last step, in bytes, by axis."""
        sent: dict[str, float] = {}
        if self.pipeline is not None and self.pipeline.messages is not None:
            sent["pp.bytes"] = self.pipeline.messages.take_sent()
        if self.to_experts is not None:
            sent["ep.bytes"] = sum(each.take_sent() for each in self.to_experts)
        return sent

    def _backward(self, loss: Tensor) -> None:
        if self.exposed_all_reduce is not None:
            self.exposed_all_reduce.backward(loss)
        else:
            loss.backward()

    def _through_pipeline(self, pipeline: Pipeline, micro_batches: Step) -> WeightedSums:
        with arithmetic(self.layout, self.device.type):
            loss = pipeline.step(*self._staged(micro_batches), self.loss_scale.scale)
        tally = WeightedSums(self.device)
        tally.add(WeightedLoss(loss), loss)
        return tally

    def _staged(self, micro_batches: Step) -> tuple[list[MicroBatch], Criterion]:
        """What enters the pipeline, and what its last stage does; the sum of losses is the mean."""
        staged = self.task.staged
        assert staged is not None

        def criterion(output: Tensor, index: int) -> Tensor:
            return staged.criterion(output, micro_batches[index]) / len(micro_batches)

        return [staged.inputs(micro_batch) for micro_batch in micro_batches], criterion


def schedule_of(job: Job) -> Schedule | None:
    """Of a concrete Job's pipeline; None: it has none."""
    layout = job.layout
    if layout.pp == 1:
        return None
    assert layout.schedule not in ("auto", "none")
    return build_schedule(
        layout.schedule, size(layout.pp), job.accumulation, size(layout.stages_per_rank)
    )


def _pipeline(job: Job, ranks: Ranks, module: nn.Module, meshes: Meshes) -> Pipeline | None:
    schedule = schedule_of(job)
    if schedule is None:
        return None
    assert isinstance(module, StageModules)
    messages = messages_of(job.comm.pp.compress, job.comm.compress_from)
    return Pipeline(schedule, list(module), meshes.dense.get_group("pp"), ranks.device, messages)
