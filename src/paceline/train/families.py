"""Families: who answers for which family of models in training. A new family is a line here."""

from collections.abc import Callable, Mapping
from typing import Any

from paceline.comm.rendezvous import Ranks
from paceline.config.family import ModelFamily
from paceline.config.heads import Heads
from paceline.config.job import Job
from paceline.config.job_sections import CustomModel
from paceline.config.mamba import Mamba2
from paceline.config.model import Model
from paceline.config.recommender import Dlrm
from paceline.config.vision import EfficientNet, ResNet
from paceline.train.data.build import Progress
from paceline.train.family import TrainFamily
from paceline.train.heads import HeadsOfDecoders
from paceline.train.language import LanguageModels
from paceline.train.recommendation import Recommenders
from paceline.train.state_space import StateSpaceModels
from paceline.train.task import Task
from paceline.train.vision import ImageModels


class OwnModules(TrainFamily[CustomModel]):
    """Modules of a person's own: `paceline.train` is given them with their data."""

    endless = "this data has no length"

    def task(self, model: CustomModel, job: Job, ranks: Ranks) -> Task:
        """Nobody knows it from the Job."""
        raise AssertionError("paceline.train brings its own Task")

    def read_inputs(
        self, model: CustomModel, job: Job, progress: Progress, say: Callable[[str], None]
    ) -> None:
        """The data is a person's own."""


_FAMILIES: Mapping[type[ModelFamily], TrainFamily[Any]] = {
    Model: LanguageModels(),
    Mamba2: StateSpaceModels(),
    ResNet: ImageModels(),
    EfficientNet: ImageModels(),
    Dlrm: Recommenders(),
    Heads: HeadsOfDecoders(),
    CustomModel: OwnModules(),
}


def family_of(model: ModelFamily) -> TrainFamily[Any]:
    """Who answers for a model."""
    return _FAMILIES[type(model)]


def task_of(job: Job, ranks: Ranks) -> Task:
    """The Task of a Job that is complete in itself."""
    return family_of(job.model).task(job.model, job, ranks)


def task_without_data(job: Job, ranks: Ranks) -> Task:
    """A Task of the same work whose samples nobody has to read."""
    return family_of(job.model).task_without_data(job.model, job, ranks)
