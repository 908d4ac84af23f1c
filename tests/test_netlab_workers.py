"""A worker behind a link that is cut: others go on without it and take it back (root, iproute2)."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks.netlab import Laboratory, StartedRanks, why_not
from tests.command_line import environment, metrics, write_tiny_job

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.usefixtures("networks_alone"),
]
SETTINGS = (
    *("comm.local.method=diloco", "comm.local.every=4", "comm.local.min_workers=1"),
    *("comm.timeout_s=3", "train.steps=100000", "optim.schedule=constant"),
)
TAKEN_IN = "worker 1 is taken in: 2 workers go on."


def _start(lab: Laboratory, folder: Path, only_on: int | None = None) -> StartedRanks:
    sets = (f"--set={setting}" for setting in SETTINGS)
    command = [sys.executable, "-m", "paceline", "train", "job.toml", *sets]
    return lab.start(command, settings=environment(folder), folder=folder, only_on=only_on)


def _until_said(folder: Path, sentence: str, started: StartedRanks, times: int = 1) -> None:
    log = folder / "runs/tiny/log/rank0.log"
    while not log.exists() or log.read_text().count(sentence) < times:
        assert started.are_running, [each.output for each in started.wait(0)]
        time.sleep(0.02)


def _wait_for_lines(folder: Path, count: int, started: StartedRanks) -> None:
    while len(metrics(folder)) < count:
        assert started.are_running, [each.output for each in started.wait(0)]
        time.sleep(0.02)


def test_a_worker_behind_a_cut_link_is_gone_on_without_and_taken_back(tmp_path):
    write_tiny_job(tmp_path)
    with Laboratory(2, 200e6) as lab, _start(lab, tmp_path) as both:
        _wait_for_lines(tmp_path, 8, both)
        lab.cut(1)
        _until_said(tmp_path, "worker 1 is lost: 1 worker goes on.", both)
        lab.mend(1)
        while both.are_running:  # the one that was cut off ends by itself
            time.sleep(0.02)
        with _start(lab, tmp_path, only_on=1) as again:
            _until_said(tmp_path, TAKEN_IN, again, times=2)
            _wait_for_lines(tmp_path, len(metrics(tmp_path)) + 8, again)
            (tmp_path / "runs/tiny/stop").touch()
            (back,) = again.wait(60)
        first, cut_off = both.wait(60)
    assert (first.code, back.code) == (0, 0), first.output + back.output
    assert cut_off.code == 1
    assert cut_off.output.splitlines()[-1].endswith(
        ("start it again to join them.", "start this worker again.")
    )
    assert "Traceback" not in cut_off.output
    num_workers = [line["comm"]["dp.workers"] for line in metrics(tmp_path)]
    assert num_workers[0] == num_workers[-1] == 2
    assert 1 in num_workers
