"""Update: what a step makes of its gradients.

The host never waits for a CUDA device here: a bad step (non-finite loss or gradient, or a spike
that the Job wants skipped) is skipped on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm.mesh import Meshes
from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.config.layout import Layout
from paceline.parallel.gradients import Gradients
from paceline.train.agreement import Agreed
from paceline.train.balance import ExpertBalancer
from paceline.train.ema import Ema, ScheduleFreeMean, WeightMean
from paceline.train.learning_rates import LearningRates, learning_rate, optimizer_of
from paceline.train.loss_scale import LossScale
from paceline.train.optimizers import RuledOptimizer
from paceline.train.spikes import RecentLosses
from paceline.train.task import Task

# Keeps a gradient of zero from being divided by: torch's clip_grad_norm_ adds as much.
_CLIP_EPS = 1e-6


class Applied(NamedTuple):
    """What became of a step's gradients."""

    grad_norm: Tensor
    """Of the whole gradient, before it was clipped: () fp64."""
    is_bad: Tensor
    """The step was skipped, for loss or gradient was not finite, or the loss a spike: () bool."""
    scale_change: Tensor | None
    """What the loss scale was multiplied by; None where there is none."""
    spike: Tensor
    """The median that the loss is a spike above, 0 where it is none: () fp64."""


@dataclass
class Update:
    """The optimizer of one rank, and what belongs to its steps."""

    job: Job
    task: Task
    gradients: Gradients
    optimizer: torch.optim.Optimizer
    rates: LearningRates
    loss_scale: LossScale
    ema: WeightMean | None
    """The mean that is evaluated."""
    balance: ExpertBalancer
    recent: RecentLosses
    lr: float = 0.0
    """Of the last step."""
    done: int | None = None
    """Steps of the run that what trains has done; None: it is being changed."""

    @classmethod
    def of(
        cls,
        job: Job,
        task: Task,
        module: nn.Module,
        named: Sequence[tuple[str, nn.Parameter]],
        layout: Layout,
        meshes: Meshes | None,
        loss_scale: LossScale,
    ) -> "Update":
        """Of a module as `parallel.apply` left it, with its parameters by name."""
        loop_options = task.loop_options
        if loop_options.schedule is not None and job.elastic.on_spike == "roll_back":
            raise InputError(
                'elastic.on_spike = "roll_back" goes back some steps, and a scheduler of torch\'s '
                'only forward: leave schedule= out, or use "skip".'
            )
        optimizer = optimizer_of(named, job, layout, loop_options.optimizer)
        return cls(
            job,
            task,
            Gradients(
                module,
                named,
                meshes,
                layout,
                exact=job.elastic.exact,
                is_planned=task.tp_plan is not None,
            ),
            optimizer,
            LearningRates(job, optimizer, loop_options.schedule),
            loss_scale,
            _mean_of(job, named, optimizer, loop_options.ema),
            ExpertBalancer(job, module, meshes),
            RecentLosses(job.elastic, loss_scale.value.device),
        )

    def begin(self, index: int, num_parts: int) -> None:
        """Make ready for step `index` (from 0), whose losses are divided by `num_parts`."""
        self.lr = self.rates.begin(index)
        self.balance.before_step(self.loss_scale.value.double() / num_parts)

    def apply(self, index: int, agreed: Agreed) -> Applied:
        """Clip the gradients, step unless the step is bad, and let everything follow."""
        # The mean over ranks of what backward passes left, by the mean weight of a rank.
        to_mean = agreed.num_losses / agreed.weight
        grad_norm = agreed.squared_norm.sqrt() * to_mean / self.loss_scale.value
        loss = agreed.loss / agreed.weight
        overflowed = ~torch.isfinite(grad_norm + loss)
        spike = self._spike(loss)
        bad = overflowed | (spike > 0) if self.job.elastic.on_spike != "go_on" else overflowed
        self.gradients.scale(to_mean * self._clip_factor(grad_norm))
        self.done = None
        self.rates.step(bad)
        if self.ema is not None:
            self.ema.update(index, bad)
        before = self.loss_scale.value
        self.loss_scale.update(overflowed)
        change = self.loss_scale.value / before if self.loss_scale.enabled else None
        self._update_tables(index, bad)
        self.optimizer.zero_grad()
        self.balance.after_step(index + 1, self.optimizer)
        self.done = index + 1
        return Applied(grad_norm, bad, change, spike)

    def sent(self) -> dict[str, float]:
        """What tables sent and held in the last step, by figure."""
        return {} if self.task.tables is None else self.task.tables.figures()

    def _spike(self, loss: Tensor) -> Tensor:
        """Workers that step each for itself have no loss of all of them in a step."""
        is_local = self.job.comm.local.method != "none"
        return torch.zeros_like(loss) if is_local else self.recent.see(loss)

    def _clip_factor(self, grad_norm: Tensor) -> Tensor:
        """What takes the loss scale out of the gradients, and clips them to the Job's norm."""
        factor = 1 / self.loss_scale.value.double()
        clip_norm = self.job.optim.clip_norm
        if clip_norm:
            factor = factor * (clip_norm / (grad_norm + _CLIP_EPS)).clamp(max=1)
        return factor

    def _update_tables(self, index: int, bad: Tensor) -> None:
        """Send the gradients of embedding rows to whoever holds them."""
        if self.task.tables is not None:
            optim = self.job.optim
            share = learning_rate(optim, index, self.job.train.steps) / optim.lr
            self.task.tables.finish(optim.rows.lr * share, skip=bool(bad))


def _mean_of(
    job: Job,
    named: Sequence[tuple[str, nn.Parameter]],
    optimizer: torch.optim.Optimizer,
    decay: float | None,
) -> WeightMean | None:
    if isinstance(optimizer, RuledOptimizer) and job.optim.name == "schedulefree":
        if decay is not None:
            raise InputError(
                f'ema = {decay:g} and optim.name = "schedulefree" each keep a mean of the weights: '
                "leave one of them out."
            )
        return ScheduleFreeMean(named, optimizer)
    return None if decay is None else Ema(named, decay)
