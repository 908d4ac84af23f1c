"""What a step gave, read late: when a device has got there, or when workers have met.

Replicas that exchange gradients agree on a step's numbers in the step. Workers that step each for
itself (`elastic.local_rounds`) would wait for each other at every step if they did; their numbers
wait until they meet.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.train.rank_stats import figures_of_ranks
from paceline.train.weighted_loss import means, quotient

SumUp = Callable[[Tensor], tuple[Tensor, int]]
"""Maps a rank's numbers to their sum over all workers, in place or not, and how many it is of.
"""


@dataclass(frozen=True)
class StepResult:
    """What a step gave, the same on every rank."""

    loss: float
    grad_norm: float
    """Of the whole gradient; of workers that step each for itself the mean of their norms."""
    is_bad: bool
    """Loss or gradient was not finite, and the step was skipped (by such a worker at least)."""
    stop_wanted: bool
    """Some rank was asked to stop."""
    spike: float
    """The median that the loss is a spike above; 0: it is none."""
    comm: dict[str, float]
    """What rank 0 sent in a form of ours ("dp.bytes"), and now and then the norm of all that
    compression still owes ("error_norm"); of its tokens' copies the share that stayed, where hot
    experts are copied ("ep.stayed"). Empty where there is none of it."""
    ranks: dict[str, list[float]]
    """What each rank said of itself; empty where the step has none of it (`rank_stats`)."""
    figures: dict[str, float]
    """Means that the loss gave besides, by name."""


@dataclass(frozen=True)
class PendingNumbers:
    """A step's numbers, which may still be on their way."""

    values: Tensor
    """Sum of losses times weights and of weights, norm of the gradient, wishes to stop, the median
    below a spike; sums of figures; perhaps the squared error; what each rank said: (5 + figures + 0
    or 1 + num_said,)."""
    names: tuple[str, ...]
    """Of the figures."""
    sent: Mapping[str, float]
    """What is known already."""
    num_said: int


def read_async(numbers: PendingNumbers) -> Callable[[], StepResult]:
    """Start copying a step's numbers to the host; the result waits for them."""
    values = numbers.values
    is_cuda = values.device.type == "cuda"
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=is_cuda)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event() if is_cuda else None
    if arrived is not None:
        arrived.record()

    def read() -> StepResult:
        if arrived is not None:
            arrived.synchronize()
        return _result(host.tolist(), numbers)

    return read


@dataclass
class WorkerReports:
    """The numbers of a worker's own steps, until the workers meet."""

    _waiting: list[Tensor] = field(default_factory=list)
    _agreed: dict[int, list[float]] = field(default_factory=dict)
    _num_added: int = 0

    def add(self, numbers: PendingNumbers) -> Callable[[], StepResult]:
        """Keep a worker's own numbers; the result can be read, once, after the next `agree`."""
        number = self._num_added
        self._num_added += 1
        self._waiting.append(numbers.values)
        return lambda: _result(self._agreed.pop(number), numbers)

    def agree(self, sum_up: SumUp) -> None:
        """Average what is waiting over all workers, who each have as many."""
        if not self._waiting:
            return
        rows, num_workers = sum_up(torch.stack(self._waiting))  # (steps, 5 + ...)
        rows[:, 2] /= num_workers
        first = self._num_added - len(self._waiting)
        self._agreed |= dict(enumerate(rows.tolist(), first))
        self._waiting.clear()


def _result(values: list[float], numbers: PendingNumbers) -> StepResult:
    first_said = len(values) - numbers.num_said
    loss_sum, weight, grad_norm, stops, spike, *rest = values[:first_said]
    loss = quotient(loss_sum, weight)
    squared_error = rest[len(numbers.names) :]
    is_bad = not (abs(loss) < float("inf") and abs(grad_norm) < float("inf"))
    owed = {"error_norm": math.sqrt(squared_error[0])} if squared_error else {}
    return StepResult(
        loss,
        grad_norm,
        is_bad,
        stops > 0,
        spike,
        {**numbers.sent, **owed},
        figures_of_ranks(values[first_said:]),
        means(numbers.names, rest[: len(numbers.names)], weight),
    )
