"""Who answers for which family of models in planning (pure)."""

import pytest

from paceline.config.errors import InputError
from paceline.config.family import ModelFamily
from paceline.config.job_sections import CustomModel
from paceline.config.recommender import Dlrm
from paceline.config.vision import EfficientNet, ResNet
from paceline.plan.answer.find import answer
from paceline.plan.families import family_of
from paceline.plan.search.choose import unsearchable
from tests.plan.answers import IMAGES, job, small_answer
from tests.plan.planned import MODEL, layout

TABLES = {"family": "dlrm", "tables": (100, 100), "dim": 4, "num_dense": 3}


@pytest.mark.parametrize(
    ("model", "is_priced"),
    [
        (MODEL, True),
        (ResNet(), True),
        (EfficientNet(family="efficientnet"), True),
        (Dlrm.parse(TABLES), False),
        (CustomModel(), False),
    ],
)
def test_every_family_has_an_answer(model: ModelFamily, is_priced: bool):
    assert family_of(model).is_priced is is_priced
    # What knows its layers is priced; so are networks of convolutions.
    assert is_priced or not model.knows_layers


def test_a_concrete_job_of_a_priced_family_is_predicted():
    concrete = small_answer().best_job
    found = family_of(concrete.model).predict(concrete.model, concrete)
    assert found.step_s == pytest.approx(small_answer().best.step_s)
    timeline = family_of(concrete.model).timeline(concrete.model, concrete)
    assert timeline is not None
    images = answer(job(IMAGES))
    found = family_of(images.job.model).predict(images.job.model, images.best_job)
    assert found == images.best
    assert family_of(images.job.model).timeline(images.job.model, images.best_job) is None


@pytest.mark.parametrize(
    "sections",
    [{"model": TABLES, "data": {"source": "clicks"}}, {"model": {"family": "custom"}}],
)
def test_what_nobody_can_price_is_said_so(sections):
    one = job({"name": "x", "train": {"steps": 1, "global_batch": 512}, **sections})
    family = family_of(one.model)
    assert family.predict(one.model, one.replace(layout=layout(dp=8))) is None
    assert unsearchable(one) == (
        "simple rules decided: what a model of your own costs is not known."
    )
    with pytest.raises(InputError, match="says nothing about its layers"):
        answer(one)
