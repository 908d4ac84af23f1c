"""TrainFamily: what training asks of a family of models; `train.families` says who answers.

The answers that stand here are those of a family whose samples are made as they are needed, and
whose weights leave under their own names.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from paceline.comm.rendezvous import Ranks
from paceline.config.family import ModelFamily
from paceline.config.job import Job, JobSpec
from paceline.models.weights import write_state
from paceline.observe.run import Run
from paceline.train.data.build import Progress
from paceline.train.task import Task

M = TypeVar("M", bound=ModelFamily)


class Trained(NamedTuple):
    """What a Run has learnt."""

    run: Run
    job: Job
    """Concrete."""
    step: int
    weights: dict[str, Tensor]
    """Whole, on the host, under the names of the module's parameters and buffers."""


class TrainFamily(ABC, Generic[M]):
    """How models of a family are trained, and how their weights leave. It keeps nothing.

    `model` is always that of the Job.
    """

    endless = "synthetic samples have no end"
    """Why nobody can say how many samples an epoch has, where `num_samples` can't."""

    @abstractmethod
    def task(self, model: M, job: Job, ranks: Ranks) -> Task:
        """The Task of a concrete Job on this rank."""

    @abstractmethod
    def read_inputs(
        self, model: M, job: Job, progress: Progress, say: Callable[[str], None]
    ) -> str | None:
        """Read what the Job trains on, so that the ranks find it ready.

        Args:
            progress: called with the bytes tokenised so far and those of the whole source.
            say: called with a sentence for a person.

        Returns:
            what names the data by its contents; None: nothing does.

        Raises:
            InputError: something that is read doesn't fit the Job.
        """

    def task_without_data(self, model: M, job: Job, ranks: Ranks) -> Task:
        """A Task of the same work whose samples nobody has to read."""
        return self.task(model, job, ranks)

    def num_samples(self, model: M, job: JobSpec, progress: Progress | None) -> int | None:
        """Samples of an epoch; None: see `endless`."""
        return None

    def eval_figures(self, model: M, job: JobSpec) -> Sequence[str] | None:
        """What evaluations may be judged by (`checkpoint.best`); None: only they can tell."""
        return None

    def keep_inputs(self, run: Run, job: Job) -> None:
        """Keep in the Run what an export needs of what was read."""

    def export(self, model: M, trained: Trained, folder: Path, dtype: torch.dtype) -> None:
        """Write the weights into a folder for other programs.

        Args:
            folder: must not exist yet, or be empty.
            dtype: of the written weights.

        Raises:
            InputError: the folder can't be written, or there is no form that others open.
        """
        write_state(folder, trained.weights, dtype)
