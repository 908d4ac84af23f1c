"""Who this process is among the ranks of a run.

A rank learns its place from the environment that a launcher set: Paceline's own, torchrun or
Slurm's srun. A process without such an environment is alone. torch is imported only where a device
is asked for: `paceline train --show` and `paceline plan` need none.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Ranks:
    """This process's place: rank `rank` of `world_size`, `local_rank` of those on this host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device_type: str = "cpu"

    @property
    def device(self) -> "torch.device":
        """The device this rank computes on."""
        import torch

        if self.device_type == "cuda":
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks and writes for the run."""
        return self.rank == 0


def ranks_from_env(device_type: str) -> Ranks | None:
    """The place that a launcher gave this process, None where it was started by hand."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return Ranks(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env.get("LOCAL_RANK", "0")),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
            device_type=device_type,
        )
    if "SLURM_STEP_NUM_TASKS" in env:  # set by srun only, not by sbatch or salloc
        return _given_by_slurm(env, device_type)
    return None


def _given_by_slurm(env: Mapping[str, str], device_type: str) -> Ranks:
    """Ranks of a node follow each other, however srun dealt its tasks out (--distribution=cyclic):
    a layout's inner axes are neighbours in rank order."""
    counts = tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
    node, local_rank = int(env["SLURM_NODEID"]), int(env["SLURM_LOCALID"])
    return Ranks(
        rank=sum(counts[:node]) + local_rank,
        world_size=int(env["SLURM_STEP_NUM_TASKS"]),
        local_rank=local_rank,
        local_world_size=counts[node],
        device_type=device_type,
    )


def tasks_per_node(text: str) -> list[int]:
    """Slurm's compressed list: "4(x2),3" -> [4, 4, 3]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(number) for number, times in found for _ in range(int(times or 1))]
