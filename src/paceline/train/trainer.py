"""Trainer: one optimizer step, as the recipe it is.

The step's numbers are read when the next one has been launched: the host never waits for a CUDA
device inside a step.

Under local updates the ranks of a worker step as a run of them alone does, and meet those of other
workers only in rounds.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function as span

from paceline.comm.mesh import build_meshes
from paceline.comm.rendezvous import Ranks
from paceline.config.job import Job
from paceline.kernels import switch
from paceline.parallel.apply import apply
from paceline.parallel.fsdp import free_gathered
from paceline.parallel.replicas import Replicas
from paceline.train.agreement import Agreement, replicas_of
from paceline.train.checkpoint.state import parameter_names, restore_rng_state, rng_state
from paceline.train.ema import WeightMean
from paceline.train.kept_weights import EMA_SECTION
from paceline.train.loss_scale import LossScale
from paceline.train.optimizers import check_groups
from paceline.train.passes import Passes, schedule_of
from paceline.train.rank_stats import RankStats
from paceline.train.results import StepResult
from paceline.train.task import Step, Task
from paceline.train.update import Update
from paceline.train.weighted_loss import means, quotient


@dataclass
class Trainer:
    """A parallel module with its optimizer, ready to step."""

    job: Job
    ranks: Ranks
    task: Task
    module: nn.Module
    """This rank's part of the network, as `parallel.apply` left it."""
    passes: Passes
    update: Update
    agreement: Agreement
    stats: RankStats

    @classmethod
    def of(cls, job: Job, ranks: Ranks, task: Task) -> "Trainer":
        """Put the task's module on the ranks as the Job's layout says."""
        layout = job.step_layout
        switch.use(layout.kernels, ranks.device)
        check_groups(parameter_names(task.module)[0].values(), job.optim)
        meshes = build_meshes(layout, ranks, job.num_workers)
        module = apply(
            task.module,
            layout,
            meshes,
            job.comm,
            schedule=schedule_of(job),
            device=ranks.device,
            fill=task.fill,
            find_unused=task.loop_options.find_unused_parameters,
            exact=job.elastic.exact,
            tp_plan=task.tp_plan,
        )
        names, _ = parameter_names(module)
        named = [(name, parameter) for parameter, name in names.items()]
        loss_scale = LossScale(ranks.device, enabled=layout.precision == "fp16")
        stats = RankStats(ranks)
        replicas = replicas_of(job, ranks, task, module, names, layout, meshes)
        update = Update.of(job, task, module, named, layout, meshes, loss_scale)
        passes = Passes.of(job, ranks, task, module, meshes, loss_scale, stats.clock, replicas)
        agreement = Agreement(job, ranks, module, replicas, stats)
        return cls(job, ranks, task, module, passes, update, agreement, stats)

    @property
    def replicas(self) -> Replicas:
        """How the ranks agree on gradients."""
        return self.agreement.replicas

    def stateful_parts(self) -> dict[str, Replicas | WeightMean]:
        """What has a state of its own in a checkpoint, by its section."""
        parts: dict[str, Replicas | WeightMean] = {}
        if self.replicas.section is not None:
            parts[self.replicas.section] = self.replicas
        if self.update.ema is not None:
            parts[EMA_SECTION] = self.update.ema
        return parts

    def step(
        self, index: int, micro_batches: Step, wants_stop: Callable[[], bool] = lambda: False
    ) -> Callable[[], StepResult]:
        """Do optimizer step `index` (from 0) on this rank's micro-batches.

        Args:
            wants_stop: asked right before the ranks exchange the step's numbers.

        Returns:
            a function that waits for the step's numbers and gives them.
        """
        watch = self.stats.watch
        micro_batches = self.passes.prepared(micro_batches)
        self.update.begin(index, self.passes.num_parts(len(micro_batches)))
        self.replicas.begin(index)
        tally = self.passes.forward_backward(index, micro_batches)
        with self.stats.clock.waiting():
            self.replicas.finish()
        watch.enter("agree")
        with span("paceline.optimizer"):
            squared_norm = self.update.gradients.finish()
            agreed = self.agreement.in_step(index, tally, squared_norm, wants_stop())
            watch.enter("update")
            applied = self.update.apply(index, agreed)
            self.replicas.correct(applied.is_bad, applied.scale_change)
        if self.replicas.steps_alone:
            watch.enter("round")
        self.replicas.after_step(index + 1)
        sent = self.passes.sent() | self.replicas.sent() | self.update.sent()
        return self.agreement.result(agreed, applied.grad_norm, applied.spike, tally.names, sent)

    @torch.no_grad()
    def evaluate(
        self, steps: Iterable[Step], wants_stop: Callable[[], bool] = lambda: False
    ) -> tuple[float, dict[str, float]] | None:
        """Mean loss over held-out steps, of all ranks, and means of the loss's figures.

        Args:
            wants_stop: asked before each step.

        Returns:
            None where a rank wanted to stop, and all of them do.
        """
        is_cut = False
        self.agreement.on_buffers()
        self.module.eval()
        ema = self.update.ema
        tally = self.passes.tally()
        with nullcontext() if ema is None else ema.taken():
            for step in steps:
                if is_cut := self.agreement.on_stop(wants_stop()):
                    break
                self.passes.forward_only(self.passes.prepared(step), tally)
            free_gathered(self.module)
        self.module.train()
        if is_cut:
            return None
        sums = self.agreement.sums_of(tally)
        loss, weight, *figures = torch.stack(sums).tolist()
        return quotient(loss, weight), means(tally.names, figures, weight)

    @property
    def needs_warm_up(self) -> bool:
        """Whether a first backward pass adds gradients up in another order than later ones."""
        is_ddp = isinstance(self.module, DistributedDataParallel)
        return is_ddp and self.ranks.world_size >= self.replicas.ordered_from

    def warm_up(self, micro_batches: Step) -> None:
        """Run a step's forward and backward without its effect, before a resumed run goes on.

        DDP sums gradients in one large bucket at its first backward pass and in its final buckets
        from then on. Three or more ranks add in an order that depends on the buckets, so a resumed
        run would round its first step differently from one that never stopped.
        """
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        generators = rng_state()
        self.replicas.begin(None)
        self.passes.without_effect(micro_batches[0])
        self.replicas.finish()
        self.update.optimizer.zero_grad()
        restore_rng_state(generators)
        for buffer, before in zip(self.module.buffers(), buffers, strict=True):
            buffer.copy_(before)
