"""Pipeline schedules as pure functions: make the list, check it, time it; and the split of layers.

A list (`paceline.config.schedule.Schedule`) is all there is to a schedule: `build_schedule` makes
it, `check` proves that it is complete and can't deadlock, `timeline` says when each action runs,
and the runtime executes it as it stands. Imports no torch.
"""

from paceline.plan.schedules.build import build_schedule
from paceline.plan.schedules.check import Checked, ScheduleError, check
from paceline.plan.schedules.split import split_layers
from paceline.plan.schedules.timing import (
    StageCost,
    Timed,
    equal_cost,
    makespan,
    timeline,
)

__all__ = [
    "Checked",
    "ScheduleError",
    "StageCost",
    "Timed",
    "build_schedule",
    "check",
    "equal_cost",
    "makespan",
    "split_layers",
    "timeline",
]
