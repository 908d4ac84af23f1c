"""Training a person's own module on ranks of a test, and the same by hand in one plain loop."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.comm.rendezvous import Ranks
from paceline.config.hardware import Cluster
from paceline.config.job import Job, JobSpec
from paceline.observe.run import Run
from paceline.parallel.tp_plan import TpPlan
from paceline.plan.resolve import resolve
from paceline.train.custom.loss import Loss, parse_loss
from paceline.train.custom.task import custom_task
from paceline.train.custom.user_inputs import UserInputs
from paceline.train.data.order import sample_ids
from paceline.train.trainer import Trainer
from tests.parallel.training import CPU, whole_tensor
from tests.train import api_script

BATCH, STEPS, PLACES = 12, 3, 6
FP64 = {"precision": "fp64", "param_dtype": "fp64"}


def job_of(num_ranks: int, layout: Mapping[str, Any], **sections: Any) -> Job:
    """A concrete Job of an own module."""
    raw = {
        "model": {"family": "custom"},
        "optim": {"lr": 1e-2, "schedule": "constant", "clip_norm": 0.05},
        "train": {"steps": STEPS, "global_batch": BATCH},
        "layout": dict(layout),
        **sections,
    }
    machine = Cluster(device=CPU, devices_per_node=num_ranks, num_nodes=1)
    return resolve(JobSpec.parse(raw), machine).job


def samples(count: int = 36) -> list[dict[str, Tensor]]:
    """Sequences of classes of which ever more places are ignored; of some all."""
    chance = torch.Generator().manual_seed(5)
    made = []
    for index in range(count):
        labels = torch.randint(4, (PLACES,), generator=chance)
        labels[PLACES - index % (PLACES + 1) :] = -100
        x = torch.randn(PLACES, 8, generator=chance, dtype=torch.float64)
        made.append({"x": x, "labels": labels})
    return made


def module() -> nn.Module:
    """The same every time."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def mean_over_labels(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """A mean over the places that aren't ignored, which says how many these are."""
    logits, labels = model(batch["x"]).flatten(0, 1), batch["labels"].flatten()
    counts = labels != -100
    right = (logits.argmax(dim=1) == labels)[counts].double().mean()
    return F.cross_entropy(logits, labels), {"acc": right, "weight": counts.sum()}


class Output(NamedTuple):
    """As the outputs of `transformers` are."""

    loss: Tensor
    logits: Tensor


class Labelling(nn.Module):
    """As causal models of `transformers` are: it shifts labels by one, and its output has the mean
    over those that aren't ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = module()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.layers(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits)


def of_output(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**batch)


def of_output_alone(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**batch).loss


def plain(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def of_classes(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """A mean over labels of which some classes count more than others."""
    weights = torch.tensor([1.0, 0.5, 3.0, 2.0], dtype=torch.float64)
    probabilities = model(batch["x"]).log_softmax(dim=-1).transpose(1, 2)
    return F.nll_loss(probabilities, batch["labels"], weights)


UNSTATED: dict[str, tuple[Any, Any]] = {
    "output": (Labelling, of_output),
    "loss of the output": (Labelling, of_output_alone),
    "cross_entropy": (module, plain),
    "classes": (module, of_classes),
}
"""Modules and losses that state no weight, though they are means over labels."""


def train_here(
    runs: Path, *sections: Mapping[str, Mapping[str, Any]], **given: Any
) -> tuple[Run, nn.Module]:
    """Train api_script's module on one rank, in this process.

    Args:
        runs: the folder of Runs.
        sections: of the Job; what a later one says counts.
        given: arguments of `paceline.train`, in place of api_script's.
    """
    job: dict[str, Any] = {"name": "own"}
    own = {
        "train": {"global_batch": BATCH},
        "cluster": {"devices_per_node": 1},
        "observe": {"tensorboard": False},
    }
    for changes in (own, *sections):
        for name, settings in changes.items():
            job[name] = {**job.get(name, {}), **settings}
    plain = {
        "model": api_script.module("plain"),
        "loss": api_script.loss,
        "data": api_script.samples(),
    }
    given = {**plain, **given}
    return paceline.train(job, **given, runs=runs), given["model"]


def train_on_ranks(
    rank: int,
    world_size: int,
    layout: Mapping[str, Any],
    num_held_out: int,
    make: Callable[[], nn.Module] = module,
    loss_of: Loss = mean_over_labels,
    tp_plan: TpPlan | None = None,
) -> dict[str, Any]:
    """Steps and an evaluation under a layout."""
    job, ranks = job_of(world_size, layout), Ranks(rank, world_size, rank, world_size)
    held_out = samples(num_held_out)
    task = custom_task(
        job, ranks, UserInputs(make(), loss_of, samples(), held_out, tp_plan=tp_plan)
    )
    trainer = Trainer.of(job, ranks, task)
    steps = task.steps_from(0)
    results = [trainer.step(index, next(steps))() for index in range(STEPS)]
    loss, figures = trainer.evaluate(task.eval_steps())
    return {
        "losses": [result.loss for result in results],
        "grad_norms": [result.grad_norm for result in results],
        "acc": [result.figures.get("acc", 0.0) for result in results],
        "eval": [loss, figures.get("acc", 0.0)],
        "weights": [whole_tensor(parameter) for parameter in trainer.module.parameters()],
    }


def by_hand(make: Callable[[], nn.Module], loss_of: Loss, num_held_out: int) -> dict[str, Any]:
    """The whole batch in one plain loop."""
    model = make()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    data, losses, norms, accuracies = samples(), [], [], []
    for step in range(STEPS):
        ids = sample_ids(0, step * BATCH, BATCH, len(data))
        batch = torch.utils.data.default_collate([data[i] for i in ids])
        loss, figures = parse_loss(loss_of(model, batch))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accuracies.append(_number(figures.get("acc", 0.0)))
    held_out = torch.utils.data.default_collate(samples(num_held_out))
    with torch.no_grad():
        loss, figures = parse_loss(loss_of(model, held_out))
    return {
        "losses": losses,
        "grad_norms": norms,
        "acc": accuracies,
        "eval": [loss.item(), _number(figures.get("acc", 0.0))],
        "weights": [p.detach() for p in model.parameters()],
    }


def _number(figure: Any) -> Any:
    return figure.item() if isinstance(figure, Tensor) else figure
