"""What a person gives to `paceline.train` besides the Job."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from paceline.parallel.tp_plan import TpPlan
from paceline.train.custom.changes import Traits, traits_of
from paceline.train.custom.collate import Collate
from paceline.train.custom.loss import Loss
from paceline.train.task import LoopOptions


@dataclass(frozen=True)
class UserInputs:
    """As `paceline.train` describes its arguments."""

    model: nn.Module
    loss: Loss
    data: Any
    eval_data: Any | None = None
    collate: Collate | None = None
    workers: int | None = None
    tp_plan: TpPlan | None = None
    loop_options: LoopOptions = field(default_factory=LoopOptions)

    def traits(self) -> Traits:
        """Short names of what decides the training, to tell when it is another one."""
        brought = {
            "the code of the loss": self.loss,
            "the code of collate": self.collate,
            "the code of optimizer": self.loop_options.optimizer,
            "the code of schedule": self.loop_options.schedule,
            "ema": self.loop_options.ema,
        }
        return traits_of(self.model, self.data, brought)
