"""Trainer: one optimizer step, as the recipe it is.

The host never waits for a CUDA device inside a step: a bad step (non-finite loss or gradient) is
skipped on the device, and the step's numbers are read when the next step has been launched.

Under local updates a rank is a worker: its layout is that of one rank, and it meets the others only
in rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function as span

from paceline.comm.busy import BusyClock
from paceline.comm.compress.messages import messages_of
from paceline.comm.mesh import Meshes, build_meshes
from paceline.comm.queued import CoreClock
from paceline.comm.ranks import Ranks, wait_limit
from paceline.comm.rounds import Membership
from paceline.config.comm import Comm
from paceline.config.job import Job
from paceline.config.noun import size
from paceline.config.schedule import Schedule
from paceline.kernels import switch
from paceline.models.attention import Sdpa
from paceline.models.decoder import Decoder
from paceline.parallel.apply import apply, arithmetic, prepare_micro_batch
from paceline.parallel.changing import ChangingRounds
from paceline.parallel.ep import messages_in
from paceline.parallel.fsdp import free as free_gathered
from paceline.parallel.gradients import Gradients
from paceline.parallel.hybrid import HybridExchange, hybrid_exchange_of
from paceline.parallel.local import LocalRounds
from paceline.parallel.pp import Criterion, MicroBatch, Pipeline
from paceline.parallel.replicate import GradientExchange, exchange_of
from paceline.parallel.stages import Stages
from paceline.parallel.statistics import RunningStatistics
from paceline.parallel.tail import Tail, tail_of
from paceline.plan.schedules import build_schedule
from paceline.train.attention_core import attention_choice
from paceline.train.balance import Balance
from paceline.train.checkpoint import parameter_names, restore_rng_state, rng_state
from paceline.train.ema import Ema
from paceline.train.loss_scale import LossScale
from paceline.train.optim import learning_rate
from paceline.train.rates import Rates, optimizer_of
from paceline.train.results import Numbers, Reports, StepResult, read_later
from paceline.train.standing import standing
from paceline.train.task import Step, Task
from paceline.train.weighed import Tally, Weighed, means

# Keeps a gradient of zero from being divided by: torch's clip_grad_norm_ adds as much.
_CLIP_EPS = 1e-6
# A pass over as many values as there are parameters: too much for every step.
_ERROR_NORM_EVERY = 10


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
    statistics: RunningStatistics
    exchange: GradientExchange | HybridExchange | None
    """Of replicas or shards, where they don't leave it to DDP or FSDP2."""
    clock: BusyClock
    cores: CoreClock
    tail: Tail | None
    local: LocalRounds | None
    """Of workers that step each for itself."""
    reports: Reports
    optimizer: torch.optim.Optimizer
    rates: Rates
    ema: Ema | None
    loss_scale: LossScale
    balance: Balance
    lr: float = 0.0
    """Of the last step."""

    @classmethod
    def of(
        cls, job: Job, ranks: Ranks, task: Task, membership: Membership | None = None
    ) -> "Trainer":
        """Put the task's module on the ranks as the Job's layout says.

        Args:
            membership: of a worker whose run goes on without lost ones, and without process group.
        """
        layout, is_local = job.layout, job.comm.local.method != "none"
        switch.use(layout.kernels, ranks.device)
        if is_local:
            layout = layout.replace(dp=1)  # of one worker, which is one rank
        attention = attention_choice(job, ranks.device)
        if attention is not None and isinstance(task.module, Decoder):
            task.module.set_attend(Sdpa(attention.backend))
        meshes = None if is_local else build_meshes(layout, ranks)
        schedule = _schedule(job) if layout.pp != 1 else None
        module = apply(
            task.module,
            layout,
            meshes,
            job.comm,
            schedule=schedule,
            device=ranks.device,
            fill=task.fill,
            find_unused=task.wishes.find_unused_parameters,
        )
        clock = BusyClock()
        names, _ = parameter_names(module)
        named = [(name, parameter) for parameter, name in names.items()]
        optimizer = optimizer_of(named, job.optim, layout, task.wishes.optimizer)
        return cls(
            job,
            ranks,
            task,
            module,
            _pipeline(schedule, module, meshes, ranks, job.comm),
            Gradients(module, named, meshes, layout),
            RunningStatistics(module),
            exchange_of(module, names, job.comm, ranks.local_world_size)
            or hybrid_exchange_of(module, names, job.comm, layout, meshes, job.accumulation),
            clock,
            CoreClock(),
            tail_of(module, ranks, clock),
            _rounds(job, module, names, membership) if is_local else None,
            Reports(),
            optimizer,
            Rates(job, optimizer, task.wishes.schedule),
            None if task.wishes.ema is None else Ema(named, task.wishes.ema),
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
        self.lr = self.rates.begin(index)
        self.balance.before_step(self.loss_scale.value.double() / len(micro_batches))
        if self.exchange is not None:
            self.exchange.begin(index)
        tally = self._forward_backward(micro_batches)
        if self.exchange is not None:
            with self.clock.waiting():
                self.exchange.finish()
        with span("paceline.optimizer"):
            squared_norm = self.gradients.finish()
            each = standing(self.ranks, self.clock, self.cores, index)
            rest = [torch.tensor(float(stop_wanted)), squared_norm, *self._squared_error(index)]
            sums, each, num_ranks = self._agree_in_step(tally, rest, each)
            # The mean over ranks of what backward passes left, by the mean weight of a rank.
            to_mean = num_ranks / sums.weight
            grad_norm = sums.rest[1].sqrt() * to_mean / self.loss_scale.value
            bad = ~torch.isfinite(grad_norm + sums.loss / sums.weight)
            self.gradients.scale(to_mean * self._clip_factor(grad_norm))
            if self.local is None:
                self.statistics.average()
            self.rates.step(bad)
            if self.ema is not None:
                self.ema.update(index, bad)
            self._update_scale(bad)
            self._update_tables(index, bad)
            self.optimizer.zero_grad()
            self.balance.after_step(index + 1, self.optimizer)
        if self.local is not None:
            with span("paceline.round"):
                self.local.after_step(index + 1)
        sent = self._sent()
        if self.task.tables is not None:
            sent |= self.task.tables.figures()
        stops, _, *squared_error = sums.rest
        shared = [sums.loss, sums.weight, grad_norm, stops, *sums.figures, *squared_error]
        kept = Numbers(torch.cat([torch.stack(shared), each]), tally.names, sent, len(each))
        read = self.reports.add(kept) if self.local is not None else read_later(kept)

        def read_and_wait() -> StepResult:
            with self.clock.waiting():  # on CUDA for this rank's device
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
        if self.local is None or not (at_once or self.local.is_round(done)):
            return False
        is_round = self.local.is_round(done)
        self.reports.agree(partial(self._sum_up, ends_round=is_round))
        if is_round and not isinstance(self.local, ChangingRounds):
            self.statistics.average()
            self._take_first_buffers()
        return True

    def _sum_up(self, values: Tensor, *, ends_round: bool = False) -> tuple[Tensor, int]:
        """Numbers of all ranks: their sum, and how many ranks it is of."""
        if isinstance(self.local, ChangingRounds):
            return self.local.sum_up(values, ends_round=ends_round)
        if self.ranks.world_size > 1:
            dist.all_reduce(values)
        return values, self.ranks.world_size

    def _sent(self) -> dict[str, float]:
        """What this rank sent in a form of ours in the last step, in bytes, by axis."""
        sent: dict[str, float] = {}
        if self.pipeline is not None and self.pipeline.messages is not None:
            sent["pp.bytes"] = self.pipeline.messages.take_sent()
        if self.job.comm.ep.compress != "none":
            sent["ep.bytes"] = sum(each.take_sent() for each in messages_in(self.module))
        if isinstance(self.exchange, HybridExchange):
            return sent | self.exchange.sent()
        if isinstance(self.local, ChangingRounds):
            sent["dp.workers"] = len(self.local.membership.members)
        sender = self.exchange or self.local
        return sent if sender is None else {**sent, "dp.bytes": sender.sent_bytes}

    def _squared_error(self, index: int) -> tuple[Tensor, ...]:
        """This rank's share of what compression owes, squared, at some of the steps."""
        is_due = self.exchange is not None and index % _ERROR_NORM_EVERY == 0
        return (self.exchange.feedback.squared_norm(),) if self.exchange and is_due else ()

    def _update_tables(self, index: int, bad: Tensor) -> None:
        """Send the gradients of embedding rows to whoever holds them."""
        if self.task.tables is not None:
            optim = self.job.optim
            share = learning_rate(optim, index, self.job.train.steps) / optim.lr
            self.task.tables.finish(optim.rows.lr * share, skip=bool(bad))

    def _update_scale(self, bad: Tensor) -> None:
        before = self.loss_scale.value
        self.loss_scale.update(bad)
        if self.exchange is not None:
            is_scaled = self.loss_scale.enabled
            self.exchange.after_step(bad, self.loss_scale.value / before if is_scaled else None)

    def _forward_backward(self, micro_batches: Step) -> Tally:
        """Leave the gradients of this rank's loss, times its weight, in the parameters."""
        tally = Tally(self.ranks.device, len(micro_batches) if self.pipeline is None else 1)
        if self.pipeline is not None:
            with arithmetic(self.job.layout, self.ranks.device_type):
                loss = self.pipeline.step(*self._staged(micro_batches), self.loss_scale.scale)
            tally.add(Weighed(loss), loss)
            return tally
        for number, micro_batch in enumerate(micro_batches):
            prepare_micro_batch(self.module, self.job.layout, number, len(micro_batches))
            with span("paceline.forward"):
                part = self.forward(micro_batch)
                loss = part.times_weight(part.loss) / len(micro_batches)
            with span("paceline.backward"):
                self._backward(self.loss_scale.scale(loss))
            tally.add(part, loss)
        return tally

    def _backward(self, loss: Tensor) -> None:
        if self.tail is not None:
            self.tail.backward(loss)
        else:
            loss.backward()

    def _staged(self, micro_batches: Step) -> tuple[list[MicroBatch], Criterion]:
        """What enters the pipeline, and what its last stage does; the sum of losses is the mean."""
        staged = self.task.staged
        assert staged is not None

        def criterion(output: Tensor, index: int) -> Tensor:
            return staged.criterion(output, micro_batches[index]) / len(micro_batches)

        return [staged.inputs(micro_batch) for micro_batch in micro_batches], criterion

    def forward(self, micro_batch: object) -> Weighed:
        """Loss of one micro-batch, in the layout's arithmetic."""
        with arithmetic(self.job.layout, self.ranks.device_type):
            return Weighed.of(self.task.loss(self.module, micro_batch))

    @torch.no_grad()
    def evaluate(self, steps: list[Step]) -> tuple[float, dict[str, float]]:
        """Mean loss over held-out steps, of all ranks, and means of the loss's figures."""
        self.agree_on_buffers()
        self.module.eval()
        tally = Tally(self.ranks.device)
        with nullcontext() if self.ema is None else self.ema.taken():
            for step in steps:
                self._forward_only(step, tally)
            free_gathered(self.module)
        self.module.train()
        (loss, weight, *figures), _ = self._agree(torch.stack(tally.sums()))
        return (loss / weight).item(), means(tally.names, figures, weight)

    def _forward_only(self, micro_batches: Step, tally: Tally) -> None:
        if self.pipeline is not None:
            with arithmetic(self.job.layout, self.ranks.device_type):
                loss = self.pipeline.forward_only(*self._staged(micro_batches))
            tally.add(Weighed(loss), loss)
            return
        for micro_batch in micro_batches:
            part = self.forward(micro_batch)
            tally.add(part, part.times_weight(part.loss.double()))

    def agree_on_buffers(self) -> None:
        """Give every rank the buffers of rank 0, as DDP does before a step.

        What is evaluated or kept then does not depend on which rank computes or writes it. Running
        statistics and a decoder's buffers are the same wherever they are, a stage has its own, and
        so has a worker until the next round.
        """
        if self.local is None and self.ranks.world_size > 1 and self.job.layout.is_plain:
            self._take_first_buffers()

    @torch.no_grad()
    def _take_first_buffers(self) -> None:
        kept = self.module.state_dict(keep_vars=True)
        for name, buffer in self.module.named_buffers():
            if name in kept:
                dist.broadcast(buffer, 0)

    @property
    def needs_warm_up(self) -> bool:
        """Whether a first backward pass adds gradients up in another order than later ones."""
        # What is compressed together depends on the buckets as well.
        least = 2 if self.exchange is None else 1
        return isinstance(self.module, DistributedDataParallel) and self.ranks.world_size > least

    def warm_up(self, micro_batches: Step) -> None:
        """Run a step's forward and backward without its effect, before a resumed run goes on.

        DDP sums gradients in one large bucket at its first backward pass and in its final buckets
        from then on. Three or more ranks add in an order that depends on the buckets, so a resumed
        run would round its first step differently from one that never stopped.
        """
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        generators = rng_state()
        prepare_micro_batch(self.module, self.job.layout, 0, 1)
        if self.exchange is not None:
            self.exchange.begin(None)
        self.forward(micro_batches[0]).loss.backward()
        if self.exchange is not None:
            self.exchange.finish()
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

    def _agree_in_step(
        self, tally: Tally, rest: Sequence[Tensor], each: Tensor
    ) -> tuple["_Sums", Tensor, int]:
        """Sums over all ranks, and what each rank says of itself, in one exchange.

        A worker that steps for itself has to agree with nobody, and keeps its own numbers.

        Returns:
            the sums, what the ranks said, and how many ranks' losses the gradients are a mean of.
        """
        own = tally.sums()
        own += [value.to(own[0]) for value in rest]
        values, num_ranks = torch.cat([torch.stack(own), each.to(own[0])]), 1
        if self.local is None:
            values, num_ranks = self._agree(values)
        loss, weight, *others = values[: len(own)]
        num_figures = len(tally.names)
        sums = _Sums(loss, weight, others[:num_figures], others[num_figures:])
        return sums, values[len(own) :], num_ranks

    def _agree(self, values: Tensor) -> tuple[Tensor, int]:
        """Sums over all ranks of numbers that begin with loss and weight, and how many losses."""
        values, num_ranks = self._sum_up(values)
        # In a pipeline only the ranks of the last stage have a loss.
        num_losses = num_ranks // size(self.job.layout.pp)
        values[1] *= num_losses / num_ranks
        return values, num_losses


class _Sums(NamedTuple):
    """Over the ranks."""

    loss: Tensor
    """Of losses times weights; the mean is the quotient."""
    weight: Tensor
    figures: list[Tensor]
    rest: list[Tensor]


def _schedule(job: Job) -> Schedule:
    layout = job.layout
    assert layout.schedule not in ("auto", "none")
    return build_schedule(
        layout.schedule, size(layout.pp), job.accumulation, size(layout.stages_per_rank)
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
        return ChangingRounds(module, names, local, least, *workers, num_steps)
    # A group of its own: fragments travel beside whatever else the ranks say to each other.
    group = dist.new_group(timeout=wait_limit())
    return LocalRounds(module, names, local, least, group, num_steps)


def _pipeline(
    schedule: Schedule | None,
    module: nn.Module,
    meshes: Meshes | None,
    ranks: Ranks,
    comm: Comm,
) -> Pipeline | None:
    if schedule is None:
        return None
    assert meshes is not None
    assert isinstance(module, Stages)
    messages = messages_of(comm.pp.compress, comm.compress_from)
    return Pipeline(schedule, list(module), meshes.dense.get_group("pp"), ranks.device, messages)
