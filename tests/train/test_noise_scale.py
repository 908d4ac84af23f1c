"""The noise scale of gradients: its estimates against those computed by hand, the same for however
the batch is cut over ranks, and right on gradients whose noise is known."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.observe.noise_scale import GRADIENT, TRACE, noise_scales
from paceline.train.custom.task import custom_task
from paceline.train.custom.user_inputs import UserInputs
from paceline.train.data.order import sample_ids
from paceline.train.noise_scale import NoiseEstimates
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train import api_cases

BATCH, EVERY = api_cases.BATCH, {"noise_scale_every": 1}


def _estimates(
    rank: int, world_size: int, layout: dict[str, Any], every: int = 1
) -> list[dict[str, float]]:
    """Figures of a few steps of a loss whose parts count unlike each other."""
    observe = {"noise_scale_every": every}
    job = api_cases.job_of(world_size, {**api_cases.FP64, **layout}, observe=observe)
    ranks = Ranks(rank, world_size, rank, world_size)
    given = UserInputs(api_cases.module(), api_cases.mean_over_labels, api_cases.samples())
    task = custom_task(job, ranks, given)
    trainer, steps, made = Trainer.of(job, ranks, task), task.steps_from(0), NoiseEstimates.of(job)
    results = [trainer.step(index, next(steps))() for index in range(api_cases.STEPS)]
    return [made.among(each.figures, each.grad_norm) for each in results]


def _by_hand(micro_batch: int) -> dict[str, float]:
    """Of the first step, from the gradients of one plain module."""
    data = api_cases.samples()
    ids = [int(number) for number in sample_ids(0, 0, BATCH, len(data))]
    gradients, weights = [], []
    for start in range(0, BATCH, micro_batch):
        module = api_cases.module()
        part = [data[number] for number in ids[start : start + micro_batch]]
        batch = torch.utils.data.default_collate(part)
        loss, stated = api_cases.mean_over_labels(module, batch)
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
        weights.append(float(stated["weight"]))
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    each = torch.stack(gradients)
    of_parts = (shares @ each.square().sum(1)).item()
    of_whole = (shares @ each).square().sum().item()
    return {
        GRADIENT: (BATCH * of_whole - micro_batch * of_parts) / (BATCH - micro_batch),
        TRACE: (of_parts - of_whole) / (1 / micro_batch - 1 / BATCH),
    }


@pytest.mark.parametrize("micro_batch", [3, 6])
def test_the_estimates_are_those_of_the_formula_on_one_plain_module(micro_batch):
    first = _estimates(0, 1, {"micro_batch": micro_batch})[0]
    wanted = _by_hand(micro_batch)
    assert first.keys() == {"acc", *wanted}
    assert {name: first[name] for name in wanted} == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    "layout",
    [
        {"micro_batch": 6},
        {"micro_batch": 3},
        {"micro_batch": 6, "fsdp": 2},
        {"micro_batch": 3, "fsdp": 2, "zero": 1},
        {"micro_batch": 3, "fsdp": 2, "recompute": "full"},
    ],
    ids=["dp", "dp, two parts each", "fsdp", "zero 1", "recompute"],
)
def test_ranks_find_what_one_rank_with_the_same_parts_finds(layout):
    alone = _estimates(0, 1, {"micro_batch": layout["micro_batch"]})
    for got in run_ranks(_estimates, 2, layout):
        for ours, theirs in zip(got, alone, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)


def test_only_every_nth_step_is_measured():
    measured = [GRADIENT in each for each in _estimates(0, 1, {"micro_batch": 3}, every=2)]
    assert measured == [True, False, True]


# Gradients of single samples are the samples themselves: of mean MEAN in each of DIM places, and
# variance one. So |G|^2 is 1, tr(Sigma) is 100, and the noise scale is 100 samples.
DIM, MEAN, STEPS, WHOLE = 100, 0.1, 200, 32


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(1).mean()


def test_noise_that_is_known_is_found_within_the_error_of_the_estimate(tmp_path):
    chance = torch.Generator().manual_seed(2)
    data = list(torch.randn(STEPS * WHOLE, DIM, generator=chance) + MEAN)
    run, _ = api_cases.train_here(
        tmp_path,
        {"train": {"steps": STEPS, "global_batch": WHOLE}, "layout": {"micro_batch": 4}},
        {"observe": EVERY},
        model=_Linear(),
        loss=lambda model, batch: model(batch),
        data=data,
    )
    lines = run.metrics()
    for name, truth, most in ((GRADIENT, DIM * MEAN**2, 0.2), (TRACE, float(DIM), 0.02)):
        found = torch.tensor([line["figures"][name] for line in lines], dtype=torch.float64)
        error = found.std() / math.sqrt(STEPS)
        assert error < most * truth
        assert abs(found.mean() - truth) < 3 * error
    step, scale = noise_scales(lines)[-1]
    assert step == STEPS
    assert scale == pytest.approx(100, rel=0.4)
    page = run.report_file.read_text()
    assert "Noise scale" in page
    assert f"samples; the batch has {WHOLE}" in page


def test_estimates_that_are_not_finite_or_not_there_are_passed_over():
    figures = [{GRADIENT: 2.0, TRACE: 6.0}, None, {"acc": 1.0}, {GRADIENT: None, TRACE: 1.0}]
    lines = [{"step": 1 + at, "figures": each} for at, each in enumerate(figures)]
    assert noise_scales(lines) == [(1, 3.0)]
    assert noise_scales([{"step": 1, "figures": {GRADIENT: -1.0, TRACE: 6.0}}]) == []


@pytest.mark.parametrize(
    ("layout", "sections", "sentence"),
    [
        ({"micro_batch": BATCH}, {}, "layout.micro_batch = 12 makes one part of train.global_batc"),
        ({}, {}, "layout.micro_batch = 12 makes one part of train.global_batch = 12: lower"),
        ({"tp": 2, "micro_batch": 3}, {}, "each whole on a rank, and layout.tp = 2 cuts them: use"),
        (
            {"micro_batch": 3},
            {"elastic": {"exact": True}},
            "with that of all of it, which no step has with elastic.exact: set it to 0.",
        ),
    ],
    ids=["one part", "by default", "tp", "exact"],
)
def test_where_there_are_no_two_batches_it_is_refused(layout, sections, sentence):
    with pytest.raises(InputError) as refused:
        api_cases.job_of(2 if "tp" in layout else 1, layout, observe=EVERY, **sections)
    said = str(refused.value)
    assert "observe.noise_scale_every = 1 compares the gradients of parts of a batch" in said
    assert sentence in said
