"""The honest minimum: a hand-written DistributedDataParallel loop, started by torchrun.

It keeps nothing, shows nothing and can't be resumed: what is left is what PyTorch itself costs.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from workload import Clock, Workload

from paceline.kernels.loss import cross_entropy


def main() -> None:
    work, clock = Workload.read(), Clock()
    dist.init_process_group("cpu:gloo,cuda:nccl" if work.device.type == "cuda" else "gloo")
    share = work.job.train.global_batch // dist.get_world_size()
    model = DistributedDataParallel(work.network())
    optimizer = work.adamw(model)
    scheduler = LambdaLR(optimizer, work.lr_factor)
    for step in range(work.job.train.steps):
        first = step * work.job.train.global_batch + dist.get_rank() * share
        batch = torch.from_numpy(work.samples[first : first + share].astype(np.int64))
        batch = batch.to(work.device)
        loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        clip_grad_norm_(model.parameters(), work.job.optim.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        clock.step_done(loss)
    clock.finish(work.result)


if __name__ == "__main__":
    main()
