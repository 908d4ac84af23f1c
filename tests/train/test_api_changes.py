"""A script that was edited and started again: what changed is named, and nothing is pretended."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import paceline
from paceline.config.errors import InputError
from paceline.train.custom.code import code_digest
from tests.command_line import environment, python
from tests.train import api_cases, api_script

JOB = {"optim": {"lr": 1e-2, "schedule": "constant"}, "train": {"steps": 3}}

pytestmark = pytest.mark.usefixtures("as_if_alone")


def _train(folder: Path, sections: dict[str, Any] | None = None, **changes: Any) -> paceline.Run:
    return api_cases.train_here(folder, JOB, sections or {}, **changes)[0]


def _other_loss(model, batch):
    return 2 * api_script.loss(model, batch)


def _others() -> list[tuple[dict[str, Any], dict[str, Any], str]]:
    dropout = nn.Sequential(*api_script.module("plain"), nn.Dropout(0.1))
    return [
        ({"optim": {"lr": 0.1}}, {}, r"optim.lr \(0.01 before, 0.1 now\) changed"),
        ({}, {"loss": _other_loss}, "the code of the loss changed"),
        ({}, {"model": dropout}, "the code of the model changed"),
        ({}, {"data": api_script.samples(48)}, r"the length of data \(60 before, 48 now\)"),
        ({}, {"collate": lambda some: some}, "the code of collate changed"),
    ]


def test_a_complete_run_names_what_changed_and_does_not_pretend_to_train(tmp_path):
    _train(tmp_path)
    for sections, changes, sentence in _others():
        with pytest.raises(InputError, match=f"complete after 3 steps, .*{sentence}.*fresh=True"):
            _train(tmp_path, sections, **changes)
    assert _train(tmp_path).job().optim.lr == 0.01  # nothing was written, nothing changed


def test_with_fresh_or_more_steps_what_changed_is_trained(tmp_path, capsys):
    _train(tmp_path)
    _train(tmp_path, {"train": {"steps": 5}}, loss=_other_loss)
    assert "goes on with another training: the code of the loss changed" in capsys.readouterr().out
    assert len(_steps(tmp_path)) == 5
    _train(tmp_path, {"optim": {"lr": 0.1}}, fresh=True)
    assert len(_steps(tmp_path)) == 3


def _steps(folder: Path) -> list[dict[str, Any]]:
    return paceline.Run(folder / "own").metrics()


def test_a_model_of_another_shape_never_goes_on(tmp_path):
    _train(tmp_path)
    wider = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    with pytest.raises(InputError, match=r"a model with other parameters.*fresh=True"):
        _train(tmp_path, {"train": {"steps": 5}}, model=wider)


FACTOR = 1.0


def _with_constant(model, batch):
    return FACTOR * api_script.loss(model, batch)


def _closed_over(factor):
    return lambda model, batch: factor * api_script.loss(model, batch)


class _Callable:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, model, batch):
        return self.factor * api_script.loss(model, batch)


def test_code_is_told_apart_by_what_it_does(monkeypatch):
    before = code_digest(_with_constant)
    assert before == code_digest(_with_constant)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert code_digest(_with_constant) != before
    assert (
        code_digest(_closed_over(1)) == code_digest(_closed_over(1)) != code_digest(_closed_over(2))
    )
    assert code_digest(_Callable(1)) == code_digest(_Callable(1)) != code_digest(_Callable(2))
    part = functools.partial(_other_loss, scale=1)
    assert code_digest(part) != code_digest(functools.partial(_other_loss, scale=2))
    assert code_digest(nn.Dropout(0.1)) != code_digest(nn.Dropout(0.2))


SCRIPT = """
# {comment}
import torch, paceline
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
def helper(x, y):
    return torch.nn.functional.{name}(x,   y)
def loss(model, batch):
    x, y = batch  # {comment}
    return helper(model(x), y)
job = {{"train": {{"steps": 2, "global_batch": 4}}, "cluster": {{"devices_per_node": 1}},
       "observe": {{"tensorboard": False}}}}
run = paceline.train(job, torch.nn.Linear(2, 1), loss, data)
print("trained", run.path.name)
"""


def test_an_edited_script_ends_with_one_sentence_and_code_2(tmp_path):
    script = tmp_path / "my script.py"

    def run(**edits):
        script.write_text(SCRIPT.format(**edits))
        return python(str(script), folder=tmp_path)

    first = run(name="mse_loss", comment="first")
    assert (first.returncode, first.stderr) == (0, "")
    assert "trained my-script" in first.stdout
    assert run(name="mse_loss", comment="another comment").returncode == 0
    edited = run(name="l1_loss", comment="first")
    assert edited.returncode == 2
    assert "the code of the loss changed" in edited.stderr
    assert edited.stderr.startswith("paceline: ")
    assert edited.stderr.count("\n") == 1


PROMPT = """
import torch, paceline, sys
data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
job = {"train": {"steps": 2, "global_batch": 4}, "observe": {"tensorboard": False}}
run = paceline.train(job, torch.nn.Linear(2, 1), loss, data)
print("trained", run.path.name, run.job().layout.num_ranks)
model = torch.nn.Linear(2, 1)
before = model.weight.detach().clone()
two = {**job, "name": "two", "cluster": {"devices_per_node": 2}}
run = paceline.train(two, model, loss, data)
print("trained", run.path.name, run.job().layout.num_ranks, torch.equal(model.weight, before))
file = open("kept", "w")
three = {**job, "name": "three", "layout": {"dp": 2}}
run = paceline.train(three, model, lambda model, batch: loss(model, batch) + file.tell(), data)
"""


def test_at_a_prompt_one_device_trains_or_ranks_that_are_sent_all(tmp_path):
    pytest.importorskip("cloudpickle")
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=PROMPT,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path),
        timeout=300,
        check=False,
    )
    assert "trained run 1" in done.stdout
    assert "trained two 2 False" in done.stdout, done.stderr
    assert "something of them can't be (PicklingError: " in done.stderr
    assert not (tmp_path / "runs" / "three").exists()
