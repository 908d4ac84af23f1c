"""What the jobs do, whoever starts them: a small network on devices that are slept for.

A device takes STEP_S / GLOBAL_BATCH a sample. All nodes of the laboratory share this machine's
cores, so devices that computed would be as many times slower as there are of them.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.cluster.trace import GLOBAL_BATCH, STEP_S

_WIDTH, _SAMPLES = 16, 4096


@dataclass(frozen=True)
class Work:
    """A job, as its processes read it from a file."""

    name: str
    num_nodes: int
    steps: int
    every: int
    """Steps between checkpoints."""
    folder: str
    """Where steps are stamped and the end is marked."""

    @classmethod
    def read(cls, file: str) -> "Work":
        """From a file."""
        return cls(**json.loads(Path(file).read_text()))

    def stamp(self, step: int) -> None:
        """Note that a step is done: one line, by one rank."""
        with (Path(self.folder) / f"{self.name}.steps").open("a") as file:
            file.write(f"{time.time():.3f} {step}\n")

    def finish(self) -> None:
        """Mark the end."""
        (Path(self.folder) / f"{self.name}.done").touch()


class Slept(nn.Module):
    """A network whose forward pass takes as long as a device would."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, width) to the same."""
        time.sleep(STEP_S / GLOBAL_BATCH * len(x))
        return self.layer(x)


def samples() -> TensorDataset:
    """Inputs and targets, (samples, width) each."""
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, _SAMPLES, _WIDTH, generator=draw)
    return TensorDataset(inputs, targets)


def squared_error(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The mean over a batch."""
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)
