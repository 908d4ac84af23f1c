"""A trial's process: whose rungs come to the same as in processes of their own, what they take, and
what follows when it dies."""

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from paceline.comm.forkserver_start import TRAINING, warm_up_ranks
from paceline.config.job import JobSpec, read_job
from paceline.observe.run import Run
from paceline.search.halving import RungResult
from paceline.search.trial_run import TrialProcess, as_trial
from tests.command_line import write_tiny_job
from tests.tune.jobs import CLUSTER

HERE = CLUSTER.replace(devices_per_node=1, tiers=())
RATES, RUNGS = (1e-3, 1e-2), (2, 4)


@pytest.fixture(autouse=True, scope="module")
def torch_is_imported_once() -> None:
    warm_up_ranks(TRAINING)


def trial(folder: Path, steps: int, rate: float = 1e-3) -> JobSpec:
    """Evaluated after every second step."""
    asked = [f"train.steps={steps}", f"optim.lr={rate}", "checkpoint.every=1"]
    asked.append(f"data.source={folder}/text.txt")
    return as_trial(read_job(write_tiny_job(folder), asked), "trial", 2).replace(cluster=HERE)


def loss_of(result: RungResult | None) -> float:
    assert result is not None
    assert result.loss is not None, result.reason
    return result.loss


def test_rungs_of_one_process_come_to_what_they_do_in_their_own(tmp_path):
    apart, together = {}, {}
    moves = [(rate, steps) for steps in RUNGS for rate in RATES]  # one trial after the other
    for rate, steps in moves:
        with TrialProcess() as process:
            run, job = Run(tmp_path / "apart" / f"lr-{rate}"), trial(tmp_path, RUNGS[-1], rate)
            apart[rate, steps] = loss_of(process.train_to(run, job, steps))
    took = []
    with TrialProcess() as process:
        for rate, steps in moves:
            run, job = Run(tmp_path / "together" / f"lr-{rate}"), trial(tmp_path, RUNGS[-1], rate)
            result = process.train_to(run, job, steps)
            together[rate, steps] = loss_of(result)
            took.append(result.cpu_s)
        [child] = pids(process)
        used = psutil.Process(child).cpu_times()
        again = process.train_to(run, job, RUNGS[-1])
        assert (again.loss, again.cpu_s) == (together[moves[-1]], 0.0)  # nothing is left to do
        assert pids(process) == [child]
    assert together == apart
    assert len(set(together.values())) == len(moves)
    assert min(took) > 0
    total = used.user + used.system + used.children_user + used.children_system
    assert sum(took) == pytest.approx(total, abs=0.25)  # what it does between rungs aside
    assert not psutil.pid_exists(child)
    logs = [(tmp_path / "together" / f"lr-{rate}.log").read_text() for rate in RATES]
    assert all(log.count("stopped after step") == 1 for log in logs)  # each has its own words


def test_a_process_that_is_killed_fails_its_rung_and_another_goes_on(tmp_path):
    job, run = trial(tmp_path, 100_000), Run(tmp_path / "killed" / "trial")
    with TrialProcess() as process:
        threading.Thread(target=kill_after_steps, args=(process, run, 5), daemon=True).start()
        result = process.train_to(run, job, 100_000)
        assert result is not None
        assert (result.loss, result.reason) == (None, "its process ended with code -9")
        done = [line["step"] for line in run.metrics()][-1]
        rung = done + 4 - done % 2
        went_on = loss_of(process.train_to(run, job, rung))
    steps = [line["step"] for line in run.metrics()]
    assert steps == list(range(1, steps[-1] + 1))
    with TrialProcess() as process:
        undisturbed = process.train_to(Run(tmp_path / "whole" / "trial"), job, rung)
    assert went_on == loss_of(undisturbed)


def test_a_rung_that_fails_says_why(tmp_path):
    job = trial(tmp_path, 4)
    wrong = job.replace(data=job.data.replace(source=str(tmp_path / "nowhere.txt")))
    with TrialProcess() as process:
        result = process.train_to(Run(tmp_path / "trials" / "wrong"), wrong, 2)
        assert result is not None
        assert result.loss is None
        assert "nowhere.txt" in result.reason
        assert pids(process) == []  # whatever it left, the next one doesn't meet
        assert loss_of(process.train_to(Run(tmp_path / "trials" / "right"), job, 2)) > 0


def pids(process: TrialProcess) -> list[int]:
    """Of the process that lives, if one does."""
    held = process._process
    return [held.pid] if held is not None and held.is_alive() and held.pid else []


def kill_after_steps(process: TrialProcess, run: Run, steps: int) -> None:
    while not run.exists or len(run.metrics()) < steps:
        time.sleep(0.02)
    os.kill(pids(process)[0], signal.SIGKILL)
