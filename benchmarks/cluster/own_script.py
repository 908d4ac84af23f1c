"""Paceline's job: a person's script, started once on each node."""

import sys

import torch

import paceline
from benchmarks.cluster.trace import GLOBAL_BATCH
from benchmarks.cluster.work import Slept, Work, samples, squared_error


def main() -> None:
    """Train; the first node that is done marks the end."""
    work = Work.read(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = {
        "name": work.name,
        "optim": {"warmup_steps": 0},
        "train": {"steps": work.steps, "global_batch": GLOBAL_BATCH},
        "checkpoint": {"every": work.every},
        "cluster": {"num_nodes": work.num_nodes, "devices_per_node": 1},
        "observe": {"tensorboard": False},
        "elastic": {"min_nodes": 1, "save_within_s": 7.0},
    }
    paceline.train(
        job,
        model=Slept(),
        loss=squared_error,
        data=samples(),
        on_step=lambda line: work.stamp(line["step"]),
    )
    work.finish()


if __name__ == "__main__":
    main()
