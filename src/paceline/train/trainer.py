"""Trainer: one optimizer step, as the recipe it is.

The host never waits for a CUDA device inside a step: a bad step (non-finite loss or gradient) is
skipped on the device, and the step's numbers are read when the next step has been launched.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.profiler import record_function as span

from paceline.comm.mesh import build_mesh
from paceline.comm.ranks import Ranks
from paceline.config.job import Job
from paceline.parallel.apply import arithmetic, parallelize, sync_gradients
from paceline.train.checkpoint import restore_rng_state, rng_state
from paceline.train.optim import (
    build_optimizer,
    clip_gradients,
    learning_rate,
    set_learning_rate,
    skip_if,
)
from paceline.train.task import Loss, Step, Task


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
    module: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    scaler: GradScaler

    @classmethod
    def of(cls, job: Job, ranks: Ranks, task: Task) -> "Trainer":
        """Put the task's module on the ranks as the Job's layout says."""
        module = parallelize(task.module, job.layout, build_mesh(job.layout, ranks))
        optimizer = build_optimizer(module, job.optim)
        scaler = GradScaler(ranks.device_type, enabled=job.layout.precision == "fp16")
        return cls(job, ranks, module, task.loss, optimizer, scaler)

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
        loss = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for number, micro_batch in enumerate(micro_batches, 1):
            is_last = number == len(micro_batches)
            sync_gradients(self.module, wanted=is_last)
            with span("paceline.forward"):
                part = self.forward(micro_batch) / len(micro_batches)
            loss += part.detach()
            if is_last:
                shared = self._share(loss, stop_wanted)  # travels while the backward pass computes
            with span("paceline.backward"):
                self.scaler.scale(part).backward()
        with span("paceline.optimizer"):
            self.scaler.unscale_(self.optimizer)
            grad_norm = clip_gradients(self.module, self.job.optim.clip_norm)
            mean_loss, stops = shared()
            skip_if(self.optimizer, ~torch.isfinite(grad_norm + mean_loss))
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return _read_later(torch.stack([mean_loss, grad_norm.double(), stops]))

    def forward(self, micro_batch: object) -> Tensor:
        """Loss of one micro-batch, in the layout's arithmetic."""
        with arithmetic(self.job.layout, self.ranks.device_type):
            return self.loss(self.module, micro_batch)

    @torch.no_grad()
    def evaluate(self, steps: list[Step]) -> float:
        """Mean loss over held-out steps, of all ranks."""
        self.agree_on_buffers()
        self.module.eval()
        losses = [self.forward(micro_batch).double() for step in steps for micro_batch in step]
        self.module.train()
        mean_loss, _ = self._share(torch.stack(losses).mean(), stop_wanted=False)()
        return mean_loss.item()

    @torch.no_grad()
    def agree_on_buffers(self) -> None:
        """Give every rank the buffers of rank 0 (running statistics), as DDP does before a step.

        What is evaluated or kept then does not depend on which rank computes or writes it.
        """
        if self.ranks.world_size > 1:
            kept = self.module.state_dict(keep_vars=True)
            for name, buffer in self.module.named_buffers():
                if name in kept:
                    dist.broadcast(buffer, 0)

    def warm_up(self, micro_batches: Step) -> None:
        """Run a step's forward and backward without its effect, before a resumed run goes on.

        DDP sums gradients in one large bucket at its first backward pass and in its final buckets
        from then on. Three or more ranks add in an order that depends on the buckets, so a resumed
        run would round its first step differently from one that never stopped.
        """
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        generators = rng_state()
        sync_gradients(self.module, wanted=True)
        self.forward(micro_batches[0]).backward()
        self.optimizer.zero_grad()
        restore_rng_state(generators)
        for buffer, before in zip(self.module.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def _share(self, loss: Tensor, stop_wanted: bool) -> Callable[[], tuple[Tensor, Tensor]]:
        """Start averaging the loss and adding up the wishes to stop; the result waits for both."""
        sums = torch.stack([loss, torch.full_like(loss, float(stop_wanted))])  # fp64, no host copy
        work = dist.all_reduce(sums, async_op=True) if self.ranks.world_size > 1 else None

        def wait() -> tuple[Tensor, Tensor]:
            if work is not None:
                work.wait()
            return sums[0] / self.ranks.world_size, sums[1]

        return wait


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
