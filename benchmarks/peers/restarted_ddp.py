"""DistributedDataParallel that torchrun (or NVRx's ft_launcher) starts again after a loss.

As torchrun's documentation has it: rank 0 saves every so many steps, and every start loads what was
saved last. The restart itself is the launcher's. `plain` as third argument: no checkpoints.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from stamps import Stamps
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from workload import Workload

from paceline.kernels.loss import cross_entropy

_TIMEOUT_S = 5.0  # of a collective: how a rank finds out about a node that vanished


def main() -> None:
    work = Workload.of(Path(sys.argv[1]), Path(sys.argv[2]))
    saves = sys.argv[3:] != ["plain"]
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    rank, size = dist.get_rank(), dist.get_world_size()
    stamps = Stamps()
    model = DistributedDataParallel(work.network())
    optimizer = work.adamw(model)
    scheduler = LambdaLR(optimizer, work.lr_factor)
    train, file = work.job.train, work.result
    first = _load(file, model, optimizer, scheduler) if saves and file.exists() else 0
    for step in range(first, train.steps):
        batch = torch.from_numpy(work.share(step, rank, size).astype(np.int64))
        # DDP averages over ranks, whose shares may differ by a sample: weigh them.
        weight = len(batch) * size / train.global_batch
        loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:]) * weight
        loss.backward()
        clip_grad_norm_(model.parameters(), work.job.optim.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        stamps.step_done(step + 1, train.global_batch, rank)
        if saves and rank == 0 and (step + 1) % work.job.checkpoint.every == 0:
            _save(file, step + 1, model, optimizer, scheduler)
    os._exit(0)  # as in `workload.Clock.finish`


def _save(file: Path, step: int, *parts) -> None:
    draft = file.with_suffix(".draft")
    torch.save({"step": step, "parts": [part.state_dict() for part in parts]}, draft)
    draft.replace(file)


def _load(file: Path, *parts) -> int:
    saved = torch.load(file, weights_only=True)
    for part, state in zip(parts, saved["parts"], strict=True):
        part.load_state_dict(state)
    return saved["step"]


if __name__ == "__main__":
    main()
