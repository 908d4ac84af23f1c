"""Learning rates: which optimizer steps, by how much, and whether it does.

By default the Job's optimizer and schedule (`optim`), of which the warm-up-stable-decay one is that
of MiniCPM (https://arxiv.org/abs/2404.06395). A person may bring an optimizer, any of torch's kind,
and a scheduler of torch's. The learning rates of a brought optimizer are its peaks: the Job's
schedule scales them.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.config.layout import Layout
from paceline.config.mup import lr_factor
from paceline.config.optim import Optim
from paceline.train.optim import AdamW, skip_if
from paceline.train.optimizers import RuledOptimizer, build_optimizer

Named = Sequence[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]
"""Maps named trainable parameters, as every optimizer of torch takes them, to an optimizer."""
MakeSchedule = Callable[[Any], LRScheduler]
"""Maps an optimizer to a scheduler of its learning rates, which is stepped once a step."""

_OF_OPTIMIZER = (
    "name", "lr", "betas", "eps", "momentum", "nesterov", "trust", "weight_decay", "groups",
)  # fmt: skip
_OF_SCHEDULE = ("schedule", "warmup_steps", "decay_steps", "power", "final_lr_ratio")


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """Learning rate of step `step` (from 0) of `steps`: a pure function, so it needs no state.

    Linear warm-up; then to final_lr_ratio x lr by a cosine or (1 - progress) ** power, or constant,
    or constant with a linear fall over the last decay_steps; or lr x sqrt(warm-up / steps so far)
    (https://arxiv.org/abs/1706.03762), no lower than that.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    floor = optim.lr * optim.final_lr_ratio
    progress = min(1.0, (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps - 1))
    if optim.schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * progress))
    elif optim.schedule == "polynomial":
        height = (1 - progress) ** optim.power
    elif optim.schedule == "inverse_sqrt":
        return max(floor, optim.lr * math.sqrt(max(1, optim.warmup_steps) / (step + 1)))
    elif optim.schedule == "wsd":
        height = min(1.0, max(0, steps - 1 - step) / optim.decay_steps)
    else:
        height = 1.0
    return floor + (optim.lr - floor) * height


def optimizer_of(named: Named, job: Job, layout: Layout, make: MakeOptimizer | None) -> Optimizer:
    """The optimizer of a run.

    Args:
        make: a person's own; None: the Job's.

    Raises:
        InputError: the Job says how an optimizer is that isn't used, or `make` gives none.
    """
    if make is None:
        return build_optimizer(named, job.optim, layout, partial(lr_factor, job.model))
    _must_be_left_out(job.optim, _OF_OPTIMIZER, "optimizer=")
    if layout.optimizer_state == "8bit" or "optimizer" in layout.offload:
        raise InputError(
            "layout.optimizer_state and offloading it are of Paceline's AdamW, and optimizer= was "
            "given: leave one of them out."
        )
    made = make([(name, parameter) for name, parameter in named if parameter.requires_grad])
    if not isinstance(made, Optimizer):
        raise InputError(
            f"optimizer= gave a {type(made).__name__}: give a function from the named parameters "
            "to an optimizer, lambda named: torch.optim.SGD(named, lr=0.1)."
        )
    return made


def _must_be_left_out(optim: Optim, names: Sequence[str], argument: str) -> None:
    default = Optim()
    for name in names:
        if getattr(optim, name) != getattr(default, name):
            what = (
                "[[optim.groups]]" if name == "groups" else f"optim.{name} = {getattr(optim, name)}"
            )
            raise InputError(
                f"{what} has no effect where {argument} is given: "
                "say it there and leave it out of the Job."
            )


class LearningRates:
    """The learning rates of an optimizer, and its steps."""

    def __init__(self, job: Job, optimizer: Optimizer, make: MakeSchedule | None) -> None:
        """`make`: a person's own schedule; None: the Job's."""
        self._optim, self._num_steps, self._optimizer = job.optim, job.train.steps, optimizer
        self._scheduler = None if make is None else _scheduler(make, optimizer, job.optim)
        self._is_ours = isinstance(optimizer, AdamW | RuledOptimizer)
        self._first = [dict(group) for group in optimizer.param_groups]
        self._num_scheduled = 0

    def begin(self, index: int) -> float:
        """Set the learning rates of step `index` (from 0); return that of the first group."""
        if self._scheduler is not None:
            self._catch_up(index, self._scheduler)
        else:
            rate, peak = learning_rate(self._optim, index, self._num_steps), self._optim.lr
            for group, first in zip(self._optimizer.param_groups, self._first, strict=True):
                own = first["lr"] * (rate / peak)
                group["lr"] = rate * group["lr_factor"] if self._is_ours else own
            if self._is_ours:
                return rate
        return float(self._optimizer.param_groups[0]["lr"])

    def _catch_up(self, index: int, scheduler: LRScheduler) -> None:
        """A scheduler knows the last step only: a resumed run takes it through all before."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "before optimizer.step()": it was, in another process
            while self._num_scheduled < index:
                scheduler.step()
                self._num_scheduled += 1

    def step(self, bad: Tensor) -> None:
        """Step the optimizer, unless `bad` (() bool) is true."""
        if isinstance(self._optimizer, AdamW):
            skip_if(self._optimizer, bad)
            self._optimizer.step()
        elif not bad.item():
            self._optimizer.step()

    def moved(self) -> list[dict[str, Any]]:
        """What an optimizer has changed in its own groups: numbers that aren't its settings."""
        if self._is_ours:
            return []
        return [
            {key: value for key, value in group.items() if _is_moved(key, value, first)}
            for group, first in zip(self._optimizer.param_groups, self._first, strict=True)
        ]

    def put_back(self, moved: Sequence[Mapping[str, Any]]) -> None:
        """Go on with what `moved` gave."""
        for group, values in zip(self._optimizer.param_groups, moved, strict=False):
            group.update(values)


def _is_moved(key: str, value: Any, first: Mapping[str, Any]) -> bool:
    # Schedules are replayed, and what is no number isn't an optimizer's state.
    is_scheduled = key in {"lr", "initial_lr", "betas", "momentum"}
    is_plain = isinstance(value, int | float)
    return is_plain and not is_scheduled and value != first.get(key)


def _scheduler(make: MakeSchedule, optimizer: Optimizer, optim: Optim) -> LRScheduler:
    _must_be_left_out(optim, _OF_SCHEDULE, "schedule=")
    made = make(optimizer)
    if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
        raise InputError(
            f"schedule= gave a {type(made).__name__}: give a function from the optimizer to a "
            "scheduler of torch.optim.lr_scheduler that depends on the number of steps alone."
        )
    return made
