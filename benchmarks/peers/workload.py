"""What the peers share with Paceline: the network, the batches, the schedule, and a clock.

Everything a framework is there to do (ranks, wrapping, loading, clipping, stepping) stands in the
peer's own file. The clock costs a peer next to nothing: a time stamp and a reference to the loss;
losses are averaged over the ranks and written down after the last step.
"""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.config.job import Job, decided, read_job
from paceline.models.decoder import Decoder
from paceline.train.learning_rates import learning_rate


@dataclass(frozen=True)
class Workload:
    """The same work for every peer."""

    job: Job
    """The one that Paceline trains."""
    samples: np.ndarray
    """(steps * global_batch, seq + 1) token ids, memory-mapped, in the order of training."""
    result: Path
    """Where the clock of rank 0 is written to."""

    @classmethod
    def read(cls) -> "Workload":
        """The workload whose folder and result file are the arguments of this program."""
        return cls.of(*(Path(argument) for argument in sys.argv[1:]))

    @classmethod
    def of(cls, folder: Path, result: Path) -> "Workload":
        """The workload of a folder."""
        samples = np.load(folder / "samples.npy", mmap_mode="r")
        return cls(decided(read_job(folder / "job.toml")), samples, result)

    def share(self, step: int, rank: int, size: int) -> np.ndarray:
        """A rank's samples of a step from 0, of a global batch shared out as evenly as it goes."""
        batch = self.job.train.global_batch
        first, end = rank * batch // size, (rank + 1) * batch // size
        return self.samples[step * batch + first : step * batch + end]

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
        if self.job.cluster.device.kind == "cuda":
            return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        return torch.device("cpu")

    def network(self) -> Decoder:
        """The Job's decoder with the weights that Paceline starts from."""
        network = Decoder(self.job.model)
        network.init_weights(torch.Generator().manual_seed(self.job.train.seed))
        return network.to(self.device)

    def adamw(self, network: nn.Module) -> torch.optim.AdamW:
        """Fused AdamW; matrices decay, vectors don't."""
        optim, params = self.job.optim, list(network.parameters())
        groups = [
            {"params": [p for p in params if p.ndim >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)

    def lr_factor(self, step: int) -> float:
        """Learning rate of a step over the peak, for LambdaLR."""
        optim = self.job.optim
        return learning_rate(optim, step, self.job.train.steps) / optim.lr


class Samples(Dataset):
    """The workload's samples as (tokens, targets), for a DataLoader that keeps their order."""

    def __init__(self, work: Workload) -> None:
        self.samples = work.samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.from_numpy(self.samples[index].astype(np.int64))
        return row[:-1], row[1:]


@dataclass
class Clock:
    """When each step ended, and its loss on this rank.

    A CUDA device is behind its host: there the ends are those of the device, by its own events.
    """

    ends_s: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    events: list[torch.cuda.Event] = field(default_factory=list)

    def step_done(self, loss: Tensor) -> None:
        """Stamp a step; the loss is not read before the end, so nothing waits for it."""
        self.ends_s.append(time.time())
        self.losses.append(loss.detach())
        if loss.is_cuda:
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()

    def finish(self, file: Path) -> NoReturn:
        """Average the losses over the ranks, write them and the stamps (rank 0), and end."""
        losses = torch.stack(self.losses).double()
        if self.events:
            torch.cuda.synchronize()
            last, now = self.events[-1], time.time()
            self.ends_s = [now - event.elapsed_time(last) / 1e3 for event in self.events]
        if dist.is_initialized():
            dist.all_reduce(losses)
            losses /= dist.get_world_size()
        if not dist.is_initialized() or dist.get_rank() == 0:
            file.write_text(json.dumps({"ends_s": self.ends_s, "losses": losses.tolist()}))
        # Not by the interpreter's own way out: gloo's threads may still hold tensors then and abort
        # the process (https://github.com/pytorch/pytorch/pull/179291; one of five did, torch 2.13).
        os._exit(0)
