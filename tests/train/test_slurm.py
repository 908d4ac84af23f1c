"""`srun paceline train` without MASTER_ADDR and MASTER_PORT: two tasks of two nodes that this
machine plays, with the variables of Slurm; and how the second ends when the first one does."""

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.command_line import COMMAND, Started, losses, metrics, paceline, ranks, write_tiny_job


def _free_slurm_job() -> int:
    """A job whose port nobody has."""
    for job in range(1000, 12_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 20_000 + job)) != 0:
                return job
    raise AssertionError("all ports are taken")


class _Tasks:
    """Of one job step."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self._folder = folder
        self._program = [COMMAND, "train", "job.toml", *(f"--set={each}" for each in settings)]
        self._slurm = {
            "SLURM_JOB_ID": str(_free_slurm_job()),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "localhost,node[7-9]",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "SLURM_LOCALID": "0",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.started: list[Started] = []

    def start(self) -> Started:
        """The next task."""
        place = {**self._slurm, "SLURM_NODEID": str(len(self.started))}
        self.started.append(Started(self._program, self._folder, 1, place))
        return self.started[-1]


@contextmanager
def _tasks(folder: Path, *settings: str) -> Iterator[_Tasks]:
    write_tiny_job(folder)
    tasks = _Tasks(folder, *settings)
    try:
        yield tasks
    finally:
        for task in tasks.started:
            task.kill()


def test_two_tasks_of_srun_train_as_one_rank_does(tmp_path):
    with _tasks(tmp_path, "name=slurm") as tasks:
        for task in [tasks.start(), tasks.start()]:
            printed, _ = task.communicate(200)
            assert task.returncode == 0, printed
    assert paceline("train", "job.toml", *ranks(1), folder=tmp_path).returncode == 0
    assert losses(tmp_path, "slurm") == pytest.approx(losses(tmp_path), rel=1e-5)


def _listens(pid: int) -> bool:
    sockets = psutil.Process(pid).net_connections("tcp")
    return any(one.status == psutil.CONN_LISTEN for one in sockets)


def test_a_task_that_starts_late_hears_that_the_input_is_wrong(tmp_path):
    """Nothing but the first rank's store could tell it, so that one stays."""
    with _tasks(tmp_path, "data.source=missing.txt") as tasks:
        first = tasks.start()
        while not _listens(first.pid):
            assert first.poll() is None, first.communicate()[0]
            time.sleep(0.02)
        time.sleep(2)
        second = tasks.start()
        printed = [task.communicate(100)[0] for task in (first, second)]
    assert [task.returncode for task in (first, second)] == [2, 2], printed
    assert "missing.txt" in printed[0]
    assert "Traceback" not in printed[0] + printed[1]


def test_a_first_task_that_is_killed_ends_the_other_in_one_sentence(tmp_path):
    settings = ("train.steps=1000000", "checkpoint.every=0", "comm.timeout_s=10")
    with _tasks(tmp_path, *settings) as tasks:
        first, second = tasks.start(), tasks.start()
        while len(metrics(tmp_path)) < 4:
            assert second.poll() is None, second.communicate()[0]
            time.sleep(0.02)
        psutil.Process(first.pid).send_signal(signal.SIGKILL)
        printed, _ = second.communicate(100)
    assert second.returncode == 1
    assert "Traceback" not in printed, printed
    last = printed.strip().splitlines()[-1]
    assert "lost rank 0" in last
    assert last.endswith("from the last checkpoint.")
