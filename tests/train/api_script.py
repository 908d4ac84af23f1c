"""A person's script around `paceline.train`, for test_api.py.

    python api_script.py '{"job": {...}, "module": "plain", "data": "dataset"}' ...

Trains once for each argument, and writes the weights that the module holds then to <name>.pt.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

JOB: dict[str, Any] = {
    "optim": {"lr": 1e-2, "schedule": "constant"},
    "train": {"steps": 8, "global_batch": 12},
    "observe": {"tensorboard": False},
}


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())[:, :4]


def module(kind: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "tied":
        return Tied()
    norm = nn.BatchNorm1d(16) if kind == "batchnorm" else nn.LayerNorm(16)
    return nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Linear(16, 4))


def samples(count: int = 60) -> TensorDataset:
    """Noisy, so that the order of the samples shows in the losses."""
    chance = torch.Generator().manual_seed(5)
    x = torch.randn(count, 8, generator=chance)
    labels = (x[:, :4] + torch.randn(count, 4, generator=chance)).argmax(dim=1)
    return TensorDataset(x, labels)


class Batches:
    """Global batches of the samples, anew at each `iter`; may ask the run to stop."""

    def __init__(self, size: int, stop_at: int = 0, stop_file: Path = Path()) -> None:
        self.size, self.stop_at, self.stop_file = size, stop_at, stop_file

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        x, labels = samples().tensors
        for number in range(len(x) // self.size):
            if number + 1 == self.stop_at:
                self.stop_file.touch()
            rows = slice(number * self.size, (number + 1) * self.size)
            yield {"x": x[rows], "labels": labels[rows]}


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, labels = (batch["x"], batch["labels"]) if isinstance(batch, dict) else batch
    return F.cross_entropy(model(x), labels)


def train(settings: dict[str, Any], runs: Path) -> tuple[paceline.Run, nn.Module]:
    """Train with the Job's sections changed as the settings say."""
    name, changes = settings.get("name", "own"), settings.get("job", {})
    sections = {key: {**JOB.get(key, {}), **value} for key, value in changes.items()}
    job = {**JOB, "name": name, **sections}
    model = module(settings.get("module", "plain"))
    stop_at = settings.get("stop_at", 0)
    data = samples()
    if settings.get("data") == "batches":
        data = Batches(settings.get("size", 12), stop_at, runs / name / "stop")
    if settings.get("data") == "loader":
        data = DataLoader(samples(), 12, shuffle=True)
    run = paceline.train(
        job, model, loss, data, samples(24), tp_plan=settings.get("tp_plan"), runs=runs
    )
    return run, model


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        run, trained = train(json.loads(argument), Path("runs"))
        torch.save(trained.state_dict(), f"{run.path.name}.pt")
