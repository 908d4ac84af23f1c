"""Exact sums of one's own module: dropout, labels that count, a mean of the weights, evaluations
that end in an incomplete batch. And what can't be exact is refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.train.custom.task import custom_task
from paceline.train.custom.user_inputs import UserInputs
from paceline.train.task import LoopOptions
from paceline.train.trainer import Trainer
from tests.parallel.training import whole_tensor
from tests.ranks import run_ranks
from tests.train import api_cases

EXACT = {"min_nodes": 1, "exact": True}
LAYOUTS = [
    (2, {"dp": 2}),
    (2, {"fsdp": 2, "zero": 1}),
    (3, {"dp": 3}),
    (3, {"fsdp": 3, "zero": 3}),
    (4, {"dp": 2, "fsdp": 2, "zero": 2}),
]


def _network():
    torch.manual_seed(3)
    layers = [nn.Linear(8, 17), nn.Dropout(0.3), nn.Tanh(), nn.LayerNorm(17), nn.Linear(17, 4)]
    return nn.Sequential(*layers)


def _samples(count):
    return [{**each, "x": each["x"].float()} for each in api_cases.samples(count)]


def _sgd(named):
    return torch.optim.SGD([{"params": [p]} for _, p in named], lr=0.1, momentum=0.9)


def _trainer(rank, world_size, layout, module, **options):
    layout = {"micro_batch": 1, "precision": "fp32", **layout}
    job = api_cases.job_of(world_size, layout, elastic=EXACT, optim={"clip_norm": 0.05})
    ranks = Ranks(rank, world_size, rank, world_size)
    given = (module, api_cases.mean_over_labels, _samples(36))
    brought = UserInputs(*given, _samples(17), loop_options=LoopOptions(ema=0.7, **options))
    task = custom_task(job, ranks, brought)
    return Trainer.of(job, ranks, task), task


def _trained(rank, world_size, layout, own_optimizer):
    torch.manual_seed(rank)  # as a run has it: dropout must not depend on it
    optimizer = _sgd if own_optimizer else None
    trainer, task = _trainer(rank, world_size, layout, _network(), optimizer=optimizer)
    steps = task.steps_from(0)
    results = [trainer.step(index, next(steps))() for index in range(3)]
    loss, figures = trainer.evaluate(task.eval_steps())
    numbers = [(result.loss, result.grad_norm, result.figures) for result in results]
    assert trainer.update.ema is not None
    means = trainer.update.ema.state().values()
    held = [whole_tensor(each) for each in (*trainer.module.parameters(), *means)]
    return [*numbers, (loss, figures)], held


def _trained_each(rank, world_size, layouts):
    return [_trained(rank, world_size, *layout) for layout in layouts]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_an_own_module_has_the_bits_of_one_rank(num_ranks):
    cases = [
        (layout, own) for count, layout in LAYOUTS if count == num_ranks for own in (False, True)
    ]
    alone = {own: _trained(0, 1, {}, own) for own in (False, True)}
    assert alone[False][0][0] != alone[True][0][1]
    for of_rank in run_ranks(_trained_each, num_ranks, cases):
        for (numbers, held), (layout, own) in zip(of_rank, cases, strict=True):
            assert numbers == alone[own][0], layout
            for ours, theirs in zip(held, alone[own][1], strict=True):
                assert torch.equal(ours, theirs), layout


def test_dropout_differs_from_micro_batch_to_micro_batch_and_from_step_to_step():
    trainer, task = _trainer(0, 1, {}, _network())
    drawn = []
    trainer.module[1].register_forward_hook(
        lambda _module, args, out: drawn.append((out == 0) & (args[0] != 0))
    )
    steps = task.steps_from(0)
    for index in range(2):
        trainer.step(index, next(steps))()
    assert len(drawn) == 2 * api_cases.BATCH
    assert len({mask.numpy().tobytes() for mask in drawn}) == len(drawn)


def test_running_statistics_are_refused():
    layers = nn.Linear(8, 16), nn.BatchNorm1d(api_cases.PLACES), nn.Linear(16, 4)
    trainer, task = _trainer(0, 1, {"micro_batch": 3}, nn.Sequential(*layers))
    with pytest.raises(InputError, match=r"changes no buffers.*GroupNorm"):
        trainer.step(0, next(task.steps_from(0)))


class _HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        return self.used(x)


def test_a_parameter_without_gradient_is_named_or_has_a_gradient_of_zero():
    trainer, task = _trainer(0, 1, {}, _HalfUsed())
    with pytest.raises(InputError, match=r"^unused.bias had no gradient"):
        trainer.step(0, next(task.steps_from(0)))
    trainer, task = _trainer(0, 1, {}, _HalfUsed(), find_unused_parameters=True)
    before = trainer.module.unused.bias.detach().clone()
    trainer.step(0, next(task.steps_from(0)))
    assert torch.equal(trainer.module.unused.bias, before)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["comm.dp.compress=int8"], r'comm\.dp\.compress = "int8" rounds'),
        (["comm.pp.compress=int8"], r'comm\.pp\.compress = "int8" rounds'),
        (["comm.fsdp.compress_weights=fp8"], r"comm\.fsdp\.compress_weights"),
        (["comm.dp.algorithm=ring"], r'algorithm = "ring" has no effect'),
    ],
)
def test_what_cannot_be_exact_is_refused(settings, sentence):
    exact = ["elastic.min_nodes=1", "elastic.exact=true"]
    with pytest.raises(InputError, match=sentence):
        read_job(None, [*exact, *settings])


def test_a_family_with_batch_norms_is_refused(tmp_path: Path):
    file = tmp_path / "resnet.toml"
    file.write_text(
        '[model]\nfamily = "resnet"\n[data]\nsource = "images"\n[train]\nsteps = 1\n'
        "global_batch = 8\n[elastic]\nmin_nodes = 1\nexact = true\n"
    )
    with pytest.raises(InputError, match="without batch norms"):
        read_job(file)
