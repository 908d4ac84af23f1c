"""Passes: forward and backward over a rank's micro-batches, one after another or in a pipeline."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function as span

from paceline.comm.busy_clock import BusyClock
from paceline.comm.compress.messages import CodedMessages, messages_of
from paceline.comm.mesh import Meshes
from paceline.comm.rendezvous import Ranks
from paceline.config.job import Job
from paceline.config.layout import Layout
from paceline.config.schedule import Schedule
from paceline.parallel.apply import arithmetic, prepare_micro_batch
from paceline.parallel.ep import messages_in, take_stayed
from paceline.parallel.exposed_all_reduce import ExposedAllReduce, exposed_all_reduce_of
from paceline.parallel.fsdp import free_gathered
from paceline.parallel.pp import Criterion, MicroBatch, Pipeline
from paceline.parallel.replicas import Replicas
from paceline.parallel.stages import StageModules
from paceline.plan.schedules import build_schedule
from paceline.train.custom.isolated_rng import seed_of
from paceline.train.loss_scale import LossScale
from paceline.train.noise_scale import PartNorms
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
    copies_experts: bool
    """Whether tokens of hot experts stay."""
    replicas: Replicas
    seed: int
    data_rank: int
    """Whose samples this rank has: tp ranks have the same."""
    exact: bool
    """Whether losses and gradients don't depend on who computes them."""
    part_norms: PartNorms | None
    """None: the noise of gradients is not measured."""

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
        replicas: Replicas,
    ) -> "Passes":
        """Through a module as `parallel.apply` left it."""
        pipeline = None if meshes is None else _pipeline(job, ranks, module, meshes)
        exposed = exposed_all_reduce_of(module, ranks, clock)
        to_experts = messages_in(module) if job.comm.ep.compress != "none" else None
        return cls(
            module,
            task,
            job.step_layout,
            ranks.device,
            loss_scale,
            pipeline,
            exposed,
            to_experts,
            job.comm.ep.hot_experts > 0,
            replicas,
            job.train.seed,
            job.layout.data_rank(ranks.rank),
            job.elastic.exact,
            PartNorms(module, every) if (every := job.observe.noise_scale_every) else None,
        )

    def prepared(self, micro_batches: Step) -> Step:
        """Micro-batches with what the task computes of them first."""
        if self.task.prepare is None:
            return micro_batches
        with torch.no_grad(), self._arithmetic():
            found = self.task.prepare(self.module, micro_batches, self._give_outputs)
        free_gathered(self.module)
        return found

    def _give_outputs(self, micro_batches: Step, take: Callable[[Tensor, int], None]) -> None:
        """See `GiveOutputs`."""
        staged = self.task.staged
        assert staged is not None
        inputs = [staged.inputs(micro_batch) for micro_batch in micro_batches]
        if self.pipeline is None:
            for number, (x, told) in enumerate(inputs):
                take(self.module(x, **told), number)
            return

        def criterion(output: Tensor, index: int) -> Tensor:
            take(output, index)
            return torch.zeros((), device=self.device)

        self.pipeline.forward_only(inputs, criterion)

    def tally(self, num_parts: int = 1) -> WeightedSums:
        """What a rank's losses are added up in."""
        task = self.task
        return WeightedSums(self.device, num_parts, task.part_names, task.figure_names)

    def forward_backward(self, index: int, micro_batches: Step) -> WeightedSums:
        """Leave the gradients of this rank's loss, times its weight, in the parameters.

        Args:
            index: of the step, from 0.
        """
        if self.pipeline is not None:
            return self._through_pipeline(self.pipeline, micro_batches)
        total, num_parts = len(micro_batches), self.num_parts(len(micro_batches))
        tally, norms = self.tally(num_parts), self.part_norms
        is_measured = norms is not None and norms.begin(index)
        for number, micro_batch in enumerate(micro_batches):
            prepare_micro_batch(self.module, self.layout, number, total, exact=self.exact)
            self._draw_alike(index, number)
            with span("paceline.forward"):
                part = self.forward(micro_batch)
                loss = part.times_weight(part.loss) / num_parts
            with span("paceline.backward"):
                self._backward(self.loss_scale.scale(loss))
            self.replicas.take(number)
            if norms is not None and is_measured:
                part = norms.of_part(part, self.loss_scale.value, num_parts)
            tally.add(part, loss)
        return tally

    def num_parts(self, num_micro_batches: int) -> int:
        """What a loss is divided by, on a rank with so many micro-batches."""
        return self.replicas.num_parts or num_micro_batches

    def _draw_alike(self, index: int, micro_batch: int) -> None:
        """Let what a forward pass draws at random (dropout) not depend on the rank, where several
        ranks must draw the same."""
        number = self.replicas.number(micro_batch)
        if number is not None:
            torch.manual_seed(seed_of(self.seed, index, number))
        elif self.task.tp_plan is not None and self.layout.tp != 1:
            torch.manual_seed(seed_of(self.seed, index, self.data_rank, micro_batch))

    def forward(self, micro_batch: object) -> WeightedLoss:
        """Loss of one micro-batch, in the layout's arithmetic."""
        with self._arithmetic():
            return WeightedLoss.of(self.task.loss(self.module, micro_batch))

    def forward_only(self, micro_batches: Step, tally: WeightedSums) -> None:
        """Count held-out micro-batches in."""
        if self.pipeline is not None:
            inputs, criterion, parts = self._staged(micro_batches)
            with self._arithmetic():
                self.pipeline.forward_only(inputs, criterion)
            for part in parts:
                tally.add(part, part.times_weight(part.loss.double()))
            return
        loss = self.task.eval_loss or self.task.loss
        for micro_batch in micro_batches:
            with self._arithmetic():
                part = WeightedLoss.of(loss(self.module, micro_batch))
            tally.add(part, part.times_weight(part.loss.double()))

    def without_effect(self, micro_batch: object) -> Tensor:
        """One forward and backward apart from training, for what they settle or show; the loss."""
        prepare_micro_batch(self.module, self.layout, 0, 1)
        loss = self.forward(self.prepared([micro_batch])[0]).loss
        loss.backward()
        return loss.detach()

    def sent(self) -> dict[str, float]:
        """What this rank sent in a form of ours in the last step, in bytes, by axis; and what share
        of its tokens' copies it worked on itself, where hot experts are copied."""
        sent: dict[str, float] = {}
        if self.pipeline is not None and self.pipeline.messages is not None:
            sent["pp.bytes"] = self.pipeline.messages.take_sent()
        if self.to_experts is not None:
            sent["ep.bytes"] = sum(each.take_sent() for each in self.to_experts)
        stayed = take_stayed(self.module) if self.copies_experts else None
        return sent if stayed is None else sent | {"ep.stayed": stayed}

    def _backward(self, loss: Tensor) -> None:
        if self.exposed_all_reduce is not None:
            self.exposed_all_reduce.backward(loss)
        else:
            loss.backward()

    def _through_pipeline(self, pipeline: Pipeline, micro_batches: Step) -> WeightedSums:
        num_parts = self.num_parts(len(micro_batches))
        inputs, criterion, parts = self._staged(micro_batches, num_parts)
        with self._arithmetic():
            losses = pipeline.step(inputs, criterion, self.loss_scale.scale, self.replicas.take)
        tally = self.tally(num_parts)
        for part, loss in zip(parts, losses, strict=True):
            tally.add(part, loss)
        return tally

    def _arithmetic(self) -> AbstractContextManager[Any]:
        return arithmetic(self.layout, self.device.type, exact=self.exact)

    def _staged(
        self, micro_batches: Step, num_parts: int = 1
    ) -> tuple[list[MicroBatch], Criterion, list[WeightedLoss]]:
        """What enters the pipeline, and what its last stage does: a part of the mean loss, which it
        adds to a list."""
        staged = self.task.staged
        assert staged is not None
        parts: list[WeightedLoss] = []

        def criterion(output: Tensor, index: int) -> Tensor:
            part = WeightedLoss.of(staged.criterion(output, micro_batches[index]))
            parts.append(replace(part, loss=part.loss.detach()))
            return part.times_weight(part.loss) / num_parts

        return [staged.inputs(micro_batch) for micro_batch in micro_batches], criterion, parts


def schedule_of(job: Job) -> Schedule | None:
    """Of a Job's pipeline; None: it has none."""
    layout = job.layout
    if layout.pp == 1:
        return None
    assert layout.schedule != "none"
    return build_schedule(layout.schedule, layout.pp, job.accumulation, layout.stages_per_rank)


def _pipeline(job: Job, ranks: Ranks, module: nn.Module, meshes: Meshes) -> Pipeline | None:
    schedule = schedule_of(job)
    if schedule is None:
        return None
    assert isinstance(module, StageModules)
    messages = messages_of(job.comm.pp.compress, job.comm.compress_from)
    # Exact sums are of whole gradients: stages exchange them once, as at ZeRO-1.
    zero = 1 if job.elastic.exact else job.layout.zero
    group = meshes.dense.get_group("pp")
    return Pipeline(schedule, list(module), group, ranks.device, messages, zero)
