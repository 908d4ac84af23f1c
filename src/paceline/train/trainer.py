"""Trainer: one optimizer step, as the recipe it is.

The host never waits for a CUDA device inside a step: a bad step (non-finite loss or gradient) is
skipped on the device, and the step's numbers are read when the next step has been launched.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function as span

from paceline.comm.mesh import Meshes, build_meshes
from paceline.comm.ranks import Ranks
from paceline.config.job import Job
from paceline.config.noun import size
from paceline.config.schedule import Schedule
from paceline.parallel.apply import apply, arithmetic, prepare_micro_batch
from paceline.parallel.fsdp import free as free_gathered
from paceline.parallel.gradients import Gradients
from paceline.parallel.pp import Criterion, MicroBatch, Pipeline
from paceline.parallel.stages import Stages
from paceline.plan.schedules import build_schedule
from paceline.train.balance import Balance
from paceline.train.checkpoint import parameter_names, restore_rng_state, rng_state
from paceline.train.loss_scale import LossScale
from paceline.train.optim import build_optimizer, learning_rate, set_learning_rate, skip_if
from paceline.train.task import Step, Task

# Keeps a gradient of zero from being divided by: torch's clip_grad_norm_ adds as much.
_CLIP_EPS = 1e-6


@dataclass(frozen=True)
class StepResult:
    """What a step gave, the same on every rank."""

    loss: float
    grad_norm: float
    is_bad: bool
    """Loss or gradient was not finite, and the step was skipped."""
    stop_wanted: bool
    """Some rank was asked to stop."""


@dataclass
class Trainer:
    """A parallel module with its optimizer, ready to step."""

    job: Job
    ranks: Ranks
    task: Task
    module: nn.Module
    """This rank's part of the network, as `parallel.apply` left it."""
    pipeline: Pipeline | None
    gradients: Gradients
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale
    balance: Balance

    @classmethod
    def of(cls, job: Job, ranks: Ranks, task: Task) -> "Trainer":
        """Put the task's module on the ranks as the Job's layout says."""
        layout = job.layout
        meshes = build_meshes(layout, ranks)
        schedule = _schedule(job) if layout.pp != 1 else None
        module = apply(
            task.module, layout, meshes, schedule=schedule, device=ranks.device, fill=task.fill
        )
        names, _ = parameter_names(module)
        named = [(name, parameter) for parameter, name in names.items()]
        return cls(
            job,
            ranks,
            task,
            module,
            _pipeline(schedule, module, meshes, ranks),
            Gradients(module, named, meshes, layout),
            build_optimizer(named, job.optim, layout),
            LossScale(ranks.device, enabled=layout.precision == "fp16"),
            Balance(job, module, meshes),
        )

    def step(
        self, index: int, micro_batches: Step, stop_wanted: bool = False
    ) -> Callable[[], StepResult]:
        """Do optimizer step `index` (from 0) on this rank's micro-batches.

        Returns:
            a function that waits for the step's numbers and gives them.
        """
        set_learning_rate(
            self.optimizer, learning_rate(self.job.optim, index, self.job.train.steps)
        )
        self.balance.before_step(self.loss_scale.value.double() / len(micro_batches))
        loss = self._forward_backward(micro_batches)
        with span("paceline.optimizer"):
            squared_norm = self.gradients.finish()
            loss, stops, squared_norm = self._agree(loss, float(stop_wanted), squared_norm)
            grad_norm = squared_norm.sqrt() / self.loss_scale.value
            bad = ~torch.isfinite(grad_norm + loss)
            self.gradients.scale(self._clip_factor(grad_norm))
            skip_if(self.optimizer, bad)
            self.optimizer.step()
            self.loss_scale.update(bad)
            self.optimizer.zero_grad()
            self.balance.after_step(index + 1, self.optimizer)
        return _read_later(torch.stack([loss, grad_norm, stops]))

    def _forward_backward(self, micro_batches: Step) -> Tensor:
        """Leave the gradients of the mean loss in the parameters; return this rank's part of it."""
        if self.pipeline is not None:
            with arithmetic(self.job.layout, self.ranks.device_type):
                return self.pipeline.step(*self._staged(micro_batches), self.loss_scale.scale)
        loss = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for number, micro_batch in enumerate(micro_batches):
            prepare_micro_batch(self.module, self.job.layout, number, len(micro_batches))
            with span("paceline.forward"):
                part = self.forward(micro_batch) / len(micro_batches)
            with span("paceline.backward"):
                self.loss_scale.scale(part).backward()
            loss += part.detach()
        return loss

    def _staged(self, micro_batches: Step) -> tuple[list[MicroBatch], Criterion]:
        """What enters the pipeline, and what its last stage does; the sum of losses is the mean."""
        staged = self.task.staged
        assert staged is not None

        def criterion(output: Tensor, index: int) -> Tensor:
            return staged.criterion(output, micro_batches[index]) / len(micro_batches)

        return [staged.inputs(micro_batch) for micro_batch in micro_batches], criterion

    def forward(self, micro_batch: object) -> Tensor:
        """Loss of one micro-batch, in the layout's arithmetic."""
        with arithmetic(self.job.layout, self.ranks.device_type):
            return self.task.loss(self.module, micro_batch)

    @torch.no_grad()
    def evaluate(self, steps: list[Step]) -> float:
        """Mean loss over held-out steps, of all ranks."""
        self.agree_on_buffers()
        self.module.eval()
        losses = [self._forward_only(step) for step in steps]
        self.module.train()
        free_gathered(self.module)
        (mean_loss,) = self._agree(torch.stack(losses).mean())
        return mean_loss.item()

    def _forward_only(self, micro_batches: Step) -> Tensor:
        if self.pipeline is not None:
            with arithmetic(self.job.layout, self.ranks.device_type):
                return self.pipeline.forward_only(*self._staged(micro_batches))
        losses = [self.forward(micro_batch).double() for micro_batch in micro_batches]
        return torch.stack(losses).mean()

    @torch.no_grad()
    def agree_on_buffers(self) -> None:
        """Give every rank the buffers of rank 0 (running statistics), as DDP does before a step.

        What is evaluated or kept then does not depend on which rank computes or writes it. A
        decoder's buffers are the same wherever they are, and a stage has its own.
        """
        if self.ranks.world_size > 1 and self.job.layout.is_plain:
            kept = self.module.state_dict(keep_vars=True)
            for name, buffer in self.module.named_buffers():
                if name in kept:
                    dist.broadcast(buffer, 0)

    @property
    def needs_warm_up(self) -> bool:
        """Whether a first backward pass adds gradients up in another order than later ones."""
        return isinstance(self.module, DistributedDataParallel) and self.ranks.world_size > 2

    def warm_up(self, micro_batches: Step) -> None:
        """Run a step's forward and backward without its effect, before a resumed run goes on.

        DDP sums gradients in one large bucket at its first backward pass and in its final buckets
        from then on. Three or more ranks add in an order that depends on the buckets, so a resumed
        run would round its first step differently from one that never stopped.
        """
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        generators = rng_state()
        prepare_micro_batch(self.module, self.job.layout, 0, 1)
        self.forward(micro_batches[0]).backward()
        self.optimizer.zero_grad()
        restore_rng_state(generators)
        for buffer, before in zip(self.module.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def _clip_factor(self, grad_norm: Tensor) -> Tensor:
        """What takes the loss scale out of the gradients, and clips them to the Job's norm."""
        factor = 1 / self.loss_scale.value.double()
        clip_norm = self.job.optim.clip_norm
        if clip_norm:
            factor = factor * (clip_norm / (grad_norm + _CLIP_EPS)).clamp(max=1)
        return factor

    def _agree(self, loss: Tensor, *sums: Tensor | float) -> tuple[Tensor, ...]:
        """The mean loss of all ranks, and the sums of other numbers, in one exchange."""
        values = torch.stack([torch.as_tensor(value).to(loss) for value in (loss, *sums)])
        if self.ranks.world_size > 1:
            dist.all_reduce(values)
        layout = self.job.layout
        # In a pipeline only the ranks of the last stage have a loss.
        return (values[0] / (layout.num_ranks // size(layout.pp)), *values[1:])


def _schedule(job: Job) -> Schedule:
    layout = job.layout
    assert layout.schedule not in ("auto", "none")
    return build_schedule(
        layout.schedule, size(layout.pp), job.accumulation, size(layout.stages_per_rank)
    )


def _pipeline(
    schedule: Schedule | None, module: nn.Module, meshes: Meshes | None, ranks: Ranks
) -> Pipeline | None:
    if schedule is None:
        return None
    assert meshes is not None
    assert isinstance(module, Stages)
    return Pipeline(schedule, list(module), meshes.dense.get_group("pp"), ranks.device)


def _read_later(values: Tensor) -> Callable[[], StepResult]:
    """Start copying a step's numbers to the host; the result waits for them."""
    is_cuda = values.device.type == "cuda"
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=is_cuda)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event() if is_cuda else None
    if arrived is not None:
        arrived.record()

    def read() -> StepResult:
        if arrived is not None:
            arrived.synchronize()
        loss, grad_norm, stops = host.tolist()
        is_bad = not (abs(loss) < float("inf") and abs(grad_norm) < float("inf"))
        return StepResult(loss, grad_norm, is_bad, stops > 0)

    return read
