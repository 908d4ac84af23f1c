"""A person's script around an elastic `paceline.train`, for test_own_elastic.py.

    PACELINE_NODE=a python own_elastic_script.py '{"name": "run", "job": {...}, "data": "loader"}'

Each call of a callback is a line of calls.jsonl, and what stands after the training one of
after.jsonl. Where a folder "slow" stands, a step waits a moment.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import paceline

STEPS, COUNT = 40, 96
JOB: dict[str, Any] = {
    "train": {"steps": STEPS, "global_batch": 12, "eval_every": 10},
    "layout": {"micro_batch": 1},
    "cluster": {"num_nodes": 3, "devices_per_node": 1},
    "elastic": {"min_nodes": 1, "heartbeat_s": 5.0},
    "observe": {"tensorboard": False},
}


class Tied(nn.Module):
    """Three layers, two of which share one weight."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(8) if norm == "batchnorm" else nn.LayerNorm(8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x + self.second(self.first(x).tanh())))


class Uncopyable(Tied):
    def __deepcopy__(self, _memo: dict[int, Any]) -> nn.Module:
        raise TypeError("it holds a file")


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(5)
        self.x = torch.randn(COUNT, 8, generator=chance)
        self.labels = (self.x[:, :4] + torch.randn(COUNT, 4, generator=chance)).argmax(1)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if Path("slow").exists():
            time.sleep(0.01)
        return self.x[index] + 0.01 * torch.randn(8), self.labels[index]  # drawn anew in each epoch


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Any:
        samples = Samples()
        return (samples[index] for index in range(COUNT))


def data_of(kind: str) -> Any:
    if kind == "loader":
        return DataLoader(Samples(), 12, shuffle=True, num_workers=1)
    return Stream() if kind == "stream" else Samples()


def call(kind: str) -> Any:
    def write(line: dict[str, Any]) -> None:
        with Path("calls.jsonl").open("a") as out:
            out.write(json.dumps({"kind": kind, "step": line["step"], "pid": os.getpid()}) + "\n")

    return write


def optimizer(named: Any) -> torch.optim.Optimizer:
    if os.environ["PACELINE_NODE"] == "c" and Path("dies").exists():
        victim = Path("dies").read_text()
        Path("dies").unlink()
        if victim == "agent":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9, foreach=False)


def schedule(given: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1 / (1 + 0.05 * step))


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, labels = batch
    return F.cross_entropy(model(x), labels)


def main(settings: dict[str, Any]) -> None:
    torch.manual_seed(settings.get("seed", 3))
    kinds = {"uncopyable": Uncopyable}
    model = kinds.get(settings.get("module", ""), Tied)(settings.get("module", ""))
    changes = settings.get("job", {})
    job = {name: {**JOB.get(name, {}), **changes.get(name, {})} for name in {**JOB, **changes}}
    run = paceline.train(
        {**job, "name": settings["name"]},
        model,
        loss,
        data_of(settings.get("data", "map")),
        Samples() if settings.get("eval", True) else None,
        optimizer=optimizer,
        schedule=schedule,
        ema=settings.get("ema", 0.9),
        on_step=call("step"),
        on_eval=call("eval"),
    )
    norm = sum(p.detach().double().square().sum().item() for p in model.parameters())
    line = {"node": os.environ.get("PACELINE_NODE"), "squares": norm, "run": str(run.path)}
    with Path("after.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
