"""Who answers for which family of models in training; and what a new family has to bring."""

from itertools import repeat
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.config.family import ModelFamily
from paceline.config.job_sections import Sections
from paceline.observe.run import Run
from paceline.train import families
from paceline.train.command import _description
from paceline.train.families import family_of, task_of, task_without_data
from paceline.train.family import Trained, TrainFamily
from paceline.train.length import length_in_steps
from paceline.train.start import read_inputs
from paceline.train.task import Task
from paceline.train.trainer import Trainer
from tests.parallel.training import FP32, job_of


def test_somebody_answers_for_every_model_of_a_job():
    assert set(families._FAMILIES) == set(get_args(Sections.model_fields["model"].annotation))


class Line(ModelFamily):
    """A family that nobody has heard of: a single line through points."""

    family: str = "line"
    width: int = 3

    @property
    def num_params(self) -> int:
        return self.width + 1


class Lines(TrainFamily[Line]):
    """Its entry."""

    def read_inputs(self, model, job, progress, say) -> str:
        return f"points of {model.width}"

    def task(self, model, job, ranks) -> Task:
        torch.manual_seed(job.train.seed)
        points = torch.randn(job.train.global_batch, model.width)
        parts = list(points.split(job.micro_batch))
        return Task(
            module=nn.Linear(model.width, 1),
            loss=lambda module, batch: (module(batch) - batch.sum(1, keepdim=True)).square().mean(),
            steps_from=lambda _first: repeat(parts),
            eval_steps=None,
            unit=model.unit,
        )


@pytest.fixture
def lines(monkeypatch):
    """A Job of that family, which is in no file of the package."""
    monkeypatch.setattr(families, "_FAMILIES", {**families._FAMILIES, Line: Lines()})
    return job_of(1, (*FP32, "layout.micro_batch=8")).model_copy(update={"model": Line()})


def test_a_new_family_is_a_config_and_an_entry(lines, tmp_path):
    ranks = Ranks()
    assert read_inputs(lines, print) == "points of 3"
    assert "0.0 M parameters" in _description(lines)
    assert "24 samples a step" in _description(lines)
    task = task_of(lines, ranks)
    trainer, steps = Trainer.of(lines, ranks, task), task.steps_from(0)
    losses = [trainer.step(step, next(steps))().loss for step in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1] + 0.01
    assert task_without_data(lines, ranks).unit == "samples"
    weights = dict(trainer.module.state_dict())
    trained = Trained(Run(tmp_path), lines, 4, weights)
    family_of(lines.model).export(lines.model, trained, tmp_path / "weights", torch.float32)
    stored = load_file(tmp_path / "weights" / "model.safetensors")
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], weights[name]) for name in stored)


def test_an_epoch_needs_data_of_known_length(lines):
    endless = lines.model_copy(
        update={"train": lines.train.model_copy(update={"steps": 0, "epochs": 2.0})}
    )
    with pytest.raises(InputError, match="synthetic samples have no end"):
        length_in_steps(endless)
