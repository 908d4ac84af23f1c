"""Whose place a process takes, and what machine it is on (pure, one process)."""

import os

import pytest
import torch.distributed as dist

from paceline.comm.ranks import Ranks, connect, first_host, given_ranks
from paceline.comm.topology import num_cores, num_cpu_ranks, this_machine

HIGH_PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def _set(monkeypatch, **values):
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_a_process_started_by_hand_has_no_place():
    assert given_ranks("cpu") is None


def test_torchruns_place(monkeypatch):
    _set(monkeypatch, RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")
    assert given_ranks("cuda") == Ranks(5, 8, 1, 4, "cuda")


def test_sruns_place(monkeypatch):
    _set(
        monkeypatch,
        SLURM_STEP_NUM_TASKS="16",
        SLURM_PROCID="9",
        SLURM_NODEID="1",
        SLURM_LOCALID="1",
        SLURM_STEP_TASKS_PER_NODE="8(x2)",
    )
    assert given_ranks("cpu") == Ranks(9, 16, 1, 8, "cpu")


def test_a_batch_script_of_slurm_is_no_rank(monkeypatch):
    """sbatch sets SLURM_PROCID and SLURM_NTASKS too, for its one script."""
    _set(monkeypatch, SLURM_PROCID="0", SLURM_NTASKS="16")
    assert given_ranks("cpu") is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-006,9],login1", "gpu003"),
        ("a,b", "a"),
        ("host", "host"),
        ("n[7,9]", "n7"),
        ("one,gpu[1-2]", "one"),
    ],
)
def test_first_host_of_a_slurm_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(("cores", "ranks"), [(1, 1), (2, 2), (3, 2), (6, 4), (8, 8), (96, 8)])
def test_cpu_ranks_are_a_power_of_two(cores, ranks):
    assert num_cpu_ranks(cores) == ranks


def test_this_machine_is_concrete():
    machine = this_machine()
    assert "auto" not in vars(machine).values()
    assert machine.num_nodes == 1
    assert num_cores() >= 1
    assert machine.device.memory_bytes.origin in {"measured", "cited"}
    if machine.device.kind == "cpu":
        assert machine.device.peak("fp32") is None, "a CPU's peak is unknown, never guessed"


@pytest.mark.parametrize(("priority", "told"), [("normal", None), ("high", "1")])
def test_messages_come_first_where_the_job_says_so(monkeypatch, priority, told):
    """NCCL's streams are made later, by torch, which reads this variable."""
    _set(monkeypatch, MASTER_ADDR="localhost", MASTER_PORT="1")
    monkeypatch.delenv(HIGH_PRIORITY, raising=False)
    seen = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, **__: seen.append(os.environ.get(HIGH_PRIORITY))
    )
    connect(Ranks(1, 2, 1, 2, "cpu"), priority=priority)
    assert seen == [told]
