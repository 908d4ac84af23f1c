"""A link that is cut under a run: whole runs on the hosts of a laboratory (root, iproute2)."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks.netlab import Finished, Laboratory, StartedRanks, why_not
from tests.command_line import environment, losses, metrics, paceline, ranks, write_tiny_job

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.usefixtures("networks_alone"),
]
TIMEOUT_S = 5
SLACK_S = 15
"""A rank may have begun to wait a little after the cut; and other tests may hold the cores."""


def _start(lab: Laboratory, folder: Path, *settings: str) -> StartedRanks:
    sets = (f"--set={setting}" for setting in ("optim.schedule=constant", *settings))
    command = [sys.executable, "-m", "paceline", "train", "job.toml", *sets]
    return lab.start(command, settings=environment(folder), folder=folder)


def _wait_for_lines(folder: Path, count: int, running: StartedRanks) -> None:
    while len(metrics(folder)) < count:
        assert running.are_running, [rank.output for rank in running.wait(0)]
        time.sleep(0.01)


def _sentence(rank: Finished) -> str:
    """Its last line, after which there is nothing, and no traceback before."""
    assert "Traceback" not in rank.output
    return rank.output.strip().splitlines()[-1]


def test_a_cut_link_ends_the_run_in_time_and_says_who_lost_whom(tmp_path):
    """One that comes back in time does no harm; then one that doesn't; then the run goes on. Its
    losses are those of a run on two ranks of one host to which nothing happened."""
    write_tiny_job(tmp_path)
    with Laboratory(2, 200e6) as lab:
        timeout = f"comm.timeout_s={TIMEOUT_S}"
        with _start(lab, tmp_path, "train.steps=100000", timeout) as running:
            _wait_for_lines(tmp_path, 5, running)
            lab.cut(1)
            time.sleep(0.5)
            num_lines = len(metrics(tmp_path))
            lab.mend(1)
            _wait_for_lines(tmp_path, num_lines + 5, running)
            lab.cut(1)
            cut = time.monotonic()
            first, second = running.wait(60)
            assert time.monotonic() - cut < TIMEOUT_S + SLACK_S
        assert (first.code, second.code) == (1, 1)
        assert _sentence(first).startswith("rank 0 on host0, in ")
        assert "lost rank 1 on host1, which does not answer" in _sentence(first)
        assert "rank 1 on host1, in " in _sentence(second)
        assert "lost rank 0 on 10.77.0.1" in _sentence(second)
        lab.mend(1)
        kept = losses(tmp_path)
        with _start(lab, tmp_path, f"train.steps={max(kept) + 4}") as running:
            first, second = running.wait(100)
    assert (first.code, second.code) == (0, 0)
    assert "going on after step" in first.output
    again = losses(tmp_path)
    assert max(again) == max(kept) + 4
    # Steps that were done a second time, from the checkpoint on, came out the same.
    assert {step: again[step] for step in kept} == kept
    undisturbed = ("--set=name=undisturbed", f"--set=train.steps={max(again)}")
    sets = (*undisturbed, "--set=optim.schedule=constant")
    done = paceline("train", "job.toml", *sets, *ranks(2), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path, "undisturbed") == again


def test_ranks_are_numbered_by_the_cluster_s_hosts(tmp_path):
    """Who is lost has the number of its place in the order, not of its start."""
    write_tiny_job(tmp_path)
    order = 'cluster.hosts=["host2", "host1", "host0"]'
    settings = ("train.steps=100000", f"comm.timeout_s={TIMEOUT_S}", order)
    with Laboratory(3, 200e6) as lab, _start(lab, tmp_path, *settings) as running:
        _wait_for_lines(tmp_path, 3, running)
        lab.cut(1)
        first, *_ = running.wait(60)
    assert _sentence(first).startswith("rank 0 on host0, in ")
    assert "lost rank 2 on host1, which does not answer" in _sentence(first)
