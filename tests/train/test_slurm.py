"""`srun paceline train` without MASTER_ADDR and MASTER_PORT: two tasks of two nodes that this
machine plays, with the variables of Slurm."""

import socket

import pytest

from tests.command_line import COMMAND, Started, losses, paceline, ranks, write_tiny_job


def _free_slurm_job() -> int:
    """A job whose port nobody has."""
    for job in range(1000, 12_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 20_000 + job)) != 0:
                return job
    raise AssertionError("all ports are taken")


def test_two_tasks_of_srun_train_as_one_rank_does(tmp_path):
    write_tiny_job(tmp_path)
    slurm = {
        "SLURM_JOB_ID": str(_free_slurm_job()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost,node[7-9]",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_LOCALID": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    program = [COMMAND, "train", "job.toml", "--set=name=slurm"]
    tasks = [
        Started(program, tmp_path, 1, {**slurm, "SLURM_NODEID": str(node)}) for node in range(2)
    ]
    for task in tasks:
        printed, _ = task.communicate(200)
        assert task.returncode == 0, printed
    assert paceline("train", "job.toml", *ranks(1), folder=tmp_path).returncode == 0
    assert losses(tmp_path, "slurm") == pytest.approx(losses(tmp_path), rel=1e-5)
