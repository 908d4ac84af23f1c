"""What a person brings besides module, loss and data: optimizer, schedule, mean of the weights, the
best checkpoint, early stopping, callbacks. Each against torch's own, and after a resume."""

from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline
from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.train.custom.task import custom_task
from paceline.train.custom.user_inputs import UserInputs
from paceline.train.data.order import sample_ids
from paceline.train.task import LoopOptions
from paceline.train.trainer import Trainer
from tests.parallel.training import whole_tensor
from tests.ranks import run_ranks
from tests.train import api_cases, api_script

STEPS = 8


pytestmark = pytest.mark.usefixtures("as_if_alone")


def _sgd(named):
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def _one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS + 1)


def _train(
    folder: Path, steps: int = STEPS, sections: dict[str, Any] | None = None, **given: Any
) -> tuple[paceline.Run, nn.Module]:
    own = {"optim": {"clip_norm": 0.0}, "train": {"steps": steps}}
    return api_cases.train_here(folder, own, sections or {}, **given)


def _by_hand(schedule=None, decay=None) -> tuple[list[float], nn.Module, nn.Module | None]:
    """The same in a plain loop of torch."""
    model, data = api_script.module("plain"), api_script.samples()
    optimizer = _sgd(list(model.named_parameters()))
    scheduler = None if schedule is None else schedule(optimizer)
    average = (
        None if decay is None else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    )
    rates = []
    for step in range(STEPS):
        ids = torch.from_numpy(sample_ids(0, step * 12, 12, len(data)))
        api_script.loss(model, [each[ids] for each in data.tensors]).backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if average is not None:
            average.update_parameters(model)
    return rates, model, average


def _assert_close(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def _assert_same_bits(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


BROUGHT = {"optimizer": _sgd, "schedule": _one_cycle, "ema": 0.7}


def test_optimizer_schedule_and_mean_are_torchs_own(tmp_path):
    run, model = _train(tmp_path, **BROUGHT)
    rates, _, average = _by_hand(_one_cycle, 0.7)
    assert [line["lr"] for line in run.metrics()] == pytest.approx(rates, rel=1e-12)
    _assert_close(model, average.module)


def test_without_a_schedule_the_jobs_scales_the_optimizers_own_rates(tmp_path):
    sections = {"optim": {"schedule": "cosine", "warmup_steps": 2}}
    run, _ = _train(tmp_path, sections=sections, optimizer=_sgd)
    rates = [line["lr"] for line in run.metrics()]
    assert rates[:2] == pytest.approx([0.05, 0.1])
    assert rates[-1] == pytest.approx(0.01)


def test_all_of_it_resumes_to_the_bit(tmp_path):
    _, whole = _train(tmp_path / "whole", **BROUGHT)
    _train(tmp_path, 3, **BROUGHT)
    run, resumed = _train(tmp_path, **BROUGHT)
    assert len(run.metrics()) == STEPS
    _assert_same_bits(resumed, whole)
    _, again = _train(tmp_path, **BROUGHT)  # complete: nothing is trained, the mean is given
    _assert_same_bits(again, whole)


def _on_ranks(rank: int, world_size: int, layout: dict[str, Any]) -> list[Tensor]:
    job = api_cases.job_of(world_size, layout, optim={"clip_norm": 0.0})
    ranks = Ranks(rank, world_size, rank, world_size)
    given = (api_cases.module(), api_cases.mean_over_labels, api_cases.samples())
    brought = UserInputs(
        *given, api_cases.samples(15), loop_options=LoopOptions(_sgd, _one_cycle, 0.7)
    )
    task = custom_task(job, ranks, brought)
    trainer = Trainer.of(job, ranks, task)
    steps = task.steps_from(0)
    for index in range(api_cases.STEPS):
        trainer.step(index, next(steps))()
    before = [whole_tensor(parameter) for parameter in trainer.module.parameters()]
    loss, _ = trainer.evaluate(task.eval_steps())
    after = [whole_tensor(parameter) for parameter in trainer.module.parameters()]
    assert all(map(torch.equal, before, after)), "an evaluation leaves the weights alone"
    assert trainer.update.ema is not None
    trainer.update.ema.take()
    means = [whole_tensor(parameter) for parameter in trainer.module.parameters()]
    assert not torch.equal(means[0], after[0])
    return [torch.tensor(loss, dtype=torch.float64), *after, *means]


@pytest.mark.parametrize("axis", ["dp", "fsdp"])
def test_on_two_ranks_they_are_those_of_one(axis):
    alone = _on_ranks(0, 1, {**api_cases.FP64, "micro_batch": 12})
    for got in run_ranks(_on_ranks, 2, {**api_cases.FP64, "micro_batch": 3, axis: 2}):
        for ours, theirs in zip(got, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


class Counting(torch.optim.SGD):
    """Keeps a number in its groups, as schedule-free and D-adapted optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["weight_decay"] = 0.01 * group["count"]
        return super().step(closure)


def test_what_an_optimizer_keeps_in_its_groups_resumes(tmp_path):
    constant = {"optim": {"schedule": "constant"}}
    wish = {"sections": constant, "optimizer": lambda named: Counting(named, lr=0.1)}
    _, whole = _train(tmp_path / "whole", **wish)
    _train(tmp_path, 3, **wish)
    _assert_same_bits(_train(tmp_path, **wish)[1], whole)


@pytest.mark.parametrize(
    ("sections", "loop_options", "sentence"),
    [
        ({"optim": {"lr": 0.1}}, {"optimizer": _sgd}, "optim.lr = 0.1 has no effect where opt"),
        ({}, {"optimizer": lambda named: 3}, "optimizer= gave a int"),
        ({"optim": {"warmup_steps": 1}}, {"schedule": _one_cycle}, "optim.warmup_steps = 1 has no"),
        ({}, {"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau}, "schedule= gave a Reduce"),
        ({}, {"ema": 1.5}, "ema = 1.5"),
        ({"checkpoint": {"best": "eval_loss"}}, {}, "judged by evaluations and there are none"),
        ({"train": {"patience": 2}}, {}, "has no effect without a figure to judge by"),
        (
            {"checkpoint": {"best": "acc"}},
            {"eval_data": api_script.samples(12)},
            "is no figure of an evaluation: use one of eval_loss",
        ),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(sections, loop_options, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        _train(tmp_path, 2, sections, **loop_options)


class Scripted:
    """A loss whose evaluations come out as said; training is that of the script."""

    def __init__(self, values: list[float]) -> None:
        self.values = iter(values)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        loss = api_script.loss(model, batch)
        if model.training:
            return loss, {"acc": 0.25}
        value = next(self.values)
        return loss * 0 + value, {"acc": 1 - value}


def _judged(folder: Path, values: list[float], figure: str, most: bool, **train: Any):
    sections = {
        "train": {"eval_every": 1, **train},
        "checkpoint": {"best": figure, "best_is": "most" if most else "least", "keep_last": 1},
        "observe": {"tensorboard": True},
    }
    loop_options = {"loss": Scripted(values), "eval_data": api_script.samples(12)}
    return _train(folder, STEPS, sections, **loop_options)[0]


VALUES = [0.9, 0.8, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8]


@pytest.mark.parametrize(("figure", "most"), [("eval_loss", False), ("acc", True)])
def test_the_best_checkpoint_is_kept_beside_the_last(figure, most, tmp_path):
    run = _judged(tmp_path, VALUES, figure, most)
    kept = sorted(path.name for path in run.checkpoint_folder.glob("step-*"))
    assert kept == ["step-3", "step-8"]
    assert (run.checkpoint_folder / "best").readlink() == Path("step-3")
    lines = run.metrics()
    assert [line["eval_figures"]["acc"] for line in lines] == pytest.approx([1 - v for v in VALUES])
    assert all(line["figures"] == {"acc": 0.25} for line in lines)
    events = EventAccumulator(str(run.tensorboard_folder)).Reload()
    assert [event.value for event in events.Scalars("figures/acc")] == [0.25] * STEPS


def test_patience_ends_a_run_which_stays_ended(tmp_path, capsys):
    run = _judged(tmp_path, VALUES, "eval_loss", most=False, patience=2)
    assert len(run.metrics()) == 5
    assert "stopped early after step 5: eval_loss was best at step 3" in capsys.readouterr().out
    run = _judged(tmp_path, VALUES, "eval_loss", most=False, patience=2)
    assert len(run.metrics()) == 5
    assert "stopped early after step 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "best", "steps"), [([nan, 0.5, nan, 0.4, 0.6, 0.7], 4, 6), ([nan, nan, nan], 1, 3)]
)
def test_an_evaluation_that_is_no_number_is_never_better(tmp_path, values, best, steps):
    run = _judged(tmp_path, values, "eval_loss", most=False, patience=2)
    assert len(run.metrics()) == steps
    assert (run.checkpoint_folder / "best").readlink() == Path(f"step-{best}")


def test_callbacks_get_the_lines_of_metrics(tmp_path):
    steps: list[Any] = []
    evaluations: list[Any] = []
    sections = {"train": {"eval_every": 4}}
    given = {"on_step": steps.append, "on_eval": evaluations.append}
    run, _ = _train(tmp_path, STEPS, sections, eval_data=api_script.samples(24), **given)
    assert steps == run.metrics()
    assert [line["step"] for line in evaluations] == [4, 8]


class Halved(nn.Module):
    """Of which a step reaches one half."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.halves[0](x)


def _unused(rank: int, world_size: int) -> int:
    job = api_cases.job_of(world_size, {**api_cases.FP64, "micro_batch": 3, "dp": 2})
    ranks = Ranks(rank, world_size, rank, world_size)
    given = (Halved(), api_cases.mean_over_labels, api_cases.samples())
    task = custom_task(
        job, ranks, UserInputs(*given, loop_options=LoopOptions(find_unused_parameters=True))
    )
    trainer = Trainer.of(job, ranks, task)
    steps = task.steps_from(0)
    return sum(not trainer.step(index, next(steps))().is_bad for index in range(3))


def test_parameters_that_no_step_reaches_are_found():
    assert run_ranks(_unused, 2) == [3, 3]
