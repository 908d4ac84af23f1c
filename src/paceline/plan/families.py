"""Families: what planning asks of a family of models, and who answers. A new family is a line here.

The best layouts of a Job are found a level higher (`plan.answer.find`).
"""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from paceline.config.family import ModelFamily
from paceline.config.job import Job
from paceline.config.model import Model
from paceline.config.vision import ConvNet, EfficientNet, ResNet
from paceline.observe.timeline import Timeline
from paceline.plan.convnet import predict_convnet
from paceline.plan.points import Setting
from paceline.plan.prediction import Prediction
from paceline.plan.price.simulate import predicted_timeline
from paceline.plan.price.step import predict

M = TypeVar("M", bound=ModelFamily)


class PlanFamily(Generic[M]):
    """What the planner knows about models of a family: nothing, where it can't price their work.

    It keeps nothing. `model` is always that of the Job.
    """

    is_priced = False
    """Whether a step can be predicted."""

    def predict(self, model: M, job: Job) -> Prediction | None:
        """Time and memory of a Job's step; None: nobody knows.

        Raises:
            InputError: the device's rates are not known, or the layout is not priced.
        """
        return None

    def timeline(self, model: M, job: Job) -> Timeline | None:
        """The predicted step of a Job, span by span; None: nobody knows."""
        return None


class LanguageModels(PlanFamily[Model]):
    """Decoders: formulas for each layer, however it is split."""

    is_priced = True

    def predict(self, model: Model, job: Job) -> Prediction:
        """See `PlanFamily.predict`."""
        return predict(Setting.of(job), job.layout)

    def timeline(self, model: Model, job: Job) -> Timeline:
        """See `PlanFamily.timeline`."""
        return predicted_timeline(Setting.of(job), job.layout)


class ImageModels(PlanFamily[ConvNet]):
    """Networks of convolutions: replicas of all of one."""

    is_priced = True

    def predict(self, model: ConvNet, job: Job) -> Prediction:
        """See `PlanFamily.predict`."""
        batch = job.train.global_batch
        return predict_convnet(model, job.cluster, job.layout, batch, comm=job.comm)


_PRICED: Mapping[type[ModelFamily], PlanFamily[Any]] = {
    Model: LanguageModels(),
    ResNet: ImageModels(),
    EfficientNet: ImageModels(),
}
_OTHERS = PlanFamily[Any]()


def family_of(model: ModelFamily) -> PlanFamily[Any]:
    """Who answers for a model; of one's own modules, and of recommenders, nobody knows the work."""
    return _PRICED.get(type(model), _OTHERS)
