"""The peers' job: DistributedDataParallel with a checkpoint every so many steps, as their
documentation has it. Slurm says which rank this is; ranks meet by a file."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from benchmarks.cluster.trace import GLOBAL_BATCH
from benchmarks.cluster.work import Slept, Work, samples, squared_error


class Trainer:
    """Trains, and can save at any moment."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._rank, self._size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        torch.set_num_threads(1)
        torch.manual_seed(0)
        start = os.environ.get("SLURM_RESTART_COUNT", "0")
        meet = Path(work.folder) / f"{work.name}.meet-{start}"
        dist.init_process_group(
            "gloo", init_method=f"file://{meet}", rank=self._rank, world_size=self._size
        )
        self._model = DistributedDataParallel(Slept())
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._file = Path(work.folder) / f"{work.name}.pt"
        self._step = 0
        if self._file.exists():
            saved = torch.load(self._file, weights_only=True)
            self._step = saved["step"]
            self._model.load_state_dict(saved["model"])
            self._optimizer.load_state_dict(saved["optimizer"])

    def train(self) -> None:
        """To the end; rank 0 marks it."""
        data, work = samples(), self._work
        while self._step < work.steps:
            batch = self._share(data)
            squared_error(self._model, batch).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._step += 1
            if self._rank == 0:
                work.stamp(self._step)
                if self._step % work.every == 0:
                    self.save()
        if self._rank == 0:
            work.finish()

    def save(self) -> None:
        """A checkpoint, complete or absent."""
        draft = self._file.with_suffix(".draft")
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        torch.save({"step": self._step, **state}, draft)
        draft.replace(self._file)

    def _share(self, data: TensorDataset) -> list[torch.Tensor]:
        first = self._step * GLOBAL_BATCH
        at = [(first + number) % len(data) for number in range(GLOBAL_BATCH)]
        return [part[at[self._rank :: self._size]] for part in data.tensors]


class Submission:
    """What submitit starts: it calls `checkpoint` when it is told that the job will be ended."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._trainer: Trainer | None = None

    def __call__(self) -> None:
        """Train."""
        self._trainer = Trainer(Work.read(self._file))
        self._trainer.train()

    def checkpoint(self) -> object:
        """Save, and ask to be started again."""
        from submitit.helpers import DelayedSubmission

        if self._trainer is not None:
            self._trainer.save()
        return DelayedSubmission(Submission(self._file))


if __name__ == "__main__":
    Trainer(Work.read(sys.argv[1])).train()
