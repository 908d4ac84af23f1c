"""Task: what the loop trains.

The loop knows only this record, so that a network from a Job (`train.families`) and a person's own
module (`train.custom`) get the same parallelism, precision, checkpoints, metrics and profiles.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from paceline.observe.run import Run
from paceline.parallel.tp_plan import TpPlan
from paceline.recommender.parameter_server.tables import Tables
from paceline.train.data.stream.feed import StreamFeed
from paceline.train.learning_rates import MakeOptimizer, MakeSchedule
from paceline.train.metrics_buffer import Line
from paceline.train.weighted_loss import WeightedLoss

Loss = Callable[[nn.Module, Any], Tensor | WeightedLoss]


class StagedLoss(NamedTuple):
    """A loss taken apart, so that its module can be cut into pipeline stages."""

    inputs: Callable[[Any], tuple[Tensor, dict[str, Any]]]
    """Maps a micro-batch to what the first stage reads, and what every stage is told besides."""
    criterion: Callable[[Tensor, Any], Tensor | WeightedLoss]
    """Maps (output of the last stage, micro-batch) to the mean loss of that micro-batch, and
    perhaps how much it counts."""


Step = list[Any]
"""The micro-batches of one rank in one step."""
GiveOutputs = Callable[[Step, Callable[[Tensor, int], None]], None]
"""Passes micro-batches through a module as it is, and calls a function with each output and the
number of its micro-batch; of a pipeline on the ranks of the last stage."""


class DataState(Protocol):
    """What checkpoints keep of the data besides the number of samples."""

    def state(self) -> Any:
        """Plain JSON, of where the newest step ended."""

    def load(self, state: Any) -> None:
        """Take what a checkpoint kept, or None, for the next `steps_from`."""


@dataclass(frozen=True)
class LoopOptions:
    """What a person may want of the loop besides."""

    optimizer: MakeOptimizer | None = None
    schedule: MakeSchedule | None = None
    ema: float | None = None
    """Decay of a mean of the weights."""
    find_unused_parameters: bool = False
    """Whether DDP looks which parameters a step doesn't reach."""
    on_step: Callable[[Line], None] | None = None
    """Called on rank 0 with each line of metrics.jsonl."""
    on_eval: Callable[[Line], None] | None = None
    """The same, with lines that have an evaluation."""
    reports: bool = True
    """Whether its end writes the report: not where the run is sure to go on."""


@dataclass(frozen=True)
class Task:
    """A module, its loss, and where its batches come from."""

    module: nn.Module
    """On the rank's device with the same weights on every rank; or on no device (meta) at all, to
    be filled when this rank's share of it is known."""
    loss: Loss
    """Maps (module, micro-batch) to the mean loss of that micro-batch, a scalar, and perhaps how
    much it counts."""
    steps_from: Callable[[int], Iterator[Step]]
    """Maps a number of samples already consumed to this rank's steps from there on. They have no
    end, but for a stream's, which end where the ranks are to stop."""
    eval_steps: Callable[[], Iterable[Step]] | None
    """This rank's share of the held-out batches, the same at each call; None: no evaluation."""
    unit: str
    """What throughput counts: "tokens" or "samples"."""
    units_per_sample: int = 1
    train_flops_per_unit: float | None = None
    """Model FLOPs of forward and backward, None when unknown."""
    data_key: str | None = None
    """Names the data by its contents, None where that is unknown."""
    staged: StagedLoss | None = None
    """The loss taken apart; None: the module can't be pipelined."""
    part_names: tuple[str, ...] = ()
    """Of the parts that losses are told apart by (`WeightedLoss.parts`)."""
    eval_names: tuple[str, ...] = ()
    """Of equal parts of the held-out batches, in their order, each of which has a loss of its own;
    what is held out has the mean of these."""
    figure_names: tuple[str, ...] = ()
    """Of the loss's figures, which the ranks of a pipeline don't all see."""
    prepare: Callable[[nn.Module, Step, GiveOutputs], Step] | None = None
    """What is made of a rank's micro-batches with the module, without gradients, before they are
    trained on or evaluated; None: they are ready."""
    eval_loss: Loss | None = None
    """Of held-out micro-batches; None: `loss`."""
    fill: Callable[[nn.Module], None] | None = None
    """Gives the parameters of (a part of) the module their first values, in place."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the Run keeps about model and data."""
    tables: Tables | None = None
    """Embedding tables that are no parameters of the module; `loss` reads rows of them."""
    loop_options: LoopOptions = field(default_factory=LoopOptions)
    sentences: tuple[str, ...] = ()
    """What a person is told before the first step."""
    tp_plan: TpPlan | None = None
    """By which tp cuts the module; None: it says itself how."""
    eval_figures: Callable[[], dict[str, float]] | None = None
    """What an evaluation found besides the loss, the same on every rank; asked after it."""
    has_values: bool = True
    """Whether the parameters are a run's first ones; otherwise they wait for a state."""
    tell_by: Callable[[Callable[[str], None]], None] | None = None
    """Is given what tells a person a sentence, for what only batches show."""
    keep_in: Callable[[Run], None] | None = None
    """Is given the Run on the first rank, where batches are made that a person may want to see."""
    data_state: DataState | None = None
    """None: the number of samples says all."""
    stream: StreamFeed | None = None
    """Where steps are waited for; None: all data is there."""
