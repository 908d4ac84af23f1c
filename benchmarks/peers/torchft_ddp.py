"""torchft's DDP loop, after its example train_ddp.py: a replica group of one process.

torchrun starts a replica that died again; a replica that comes gets the state from another one.
A step counts the replicas that took part: samples of a missing replica are left out, which is
torchft's own behaviour (`torchft.data.DistributedSampler` says so).
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from stamps import NODE, Stamps
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from workload import Workload

from paceline.kernels.loss import cross_entropy

_TIMEOUT_S = 5.0  # of a collective, as for the other peers


def main() -> None:
    work = Workload.of(Path(sys.argv[1]), Path(sys.argv[2]))
    node, size = int(os.environ[NODE]), int(sys.argv[3])
    limit = timedelta(seconds=_TIMEOUT_S)
    network = work.network()
    inner = work.adamw(network)
    scheduler = LambdaLR(inner, work.lr_factor)

    def state() -> dict:
        parts = {"model": network, "optimizer": inner, "scheduler": scheduler}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(kept: dict) -> None:
        network.load_state_dict(kept["model"])
        inner.load_state_dict(kept["optimizer"])
        scheduler.load_state_dict(kept["scheduler"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"node{node}",
        timeout=limit,
        hostname=f"host{node}",
        init_sync=False,  # all start from the same weights
    )
    model = DistributedDataParallel(manager, network)
    optimizer = Optimizer(manager, inner)
    stamps, train = Stamps(), work.job.train
    while (step := manager.current_step()) < train.steps:
        batch = torch.from_numpy(work.share(step, node, size).astype(np.int64))
        optimizer.zero_grad()  # starts the quorum
        loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        clip_grad_norm_(model.parameters(), work.job.optim.clip_norm)
        optimizer.step()
        if manager.current_step() > step:
            scheduler.step()
            samples = train.global_batch * manager.num_participants() // size
            stamps.step_done(manager.current_step(), samples, node)
        else:
            print(f"step {step} was not committed", flush=True)
    manager.shutdown()
    os._exit(0)  # as in `workload.Clock.finish`


if __name__ == "__main__":
    assert not dist.is_initialized()
    main()
