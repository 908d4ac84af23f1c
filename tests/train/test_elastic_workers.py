"""Workers that are lost and taken back: what follows from an end, and whole runs."""

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.train.elastic_workers import MOST_RESTARTS, restart_decision
from tests.command_line import Started, losses, metrics, paceline, ranks, write_tiny_job

SETTINGS = ("comm.local.method=diloco", "comm.local.every=4")
TIMEOUT_S = 60
ENDLESS = ("train.steps=100000", "checkpoint.every=4000", "optim.schedule=constant")


def _sets(*settings: str) -> list[str]:
    return [f"--set={each}" for each in (*SETTINGS, *settings)]


def test_a_worker_is_started_again_a_few_times():
    log = Path("runs/a/log/rank2.log")
    assert restart_decision(2, 77, 0, 0, log) is None
    killed = restart_decision(2, 77, -9, MOST_RESTARTS - 1, log)
    assert killed is not None
    assert killed.is_restarted
    assert killed.sentence == (
        "worker 2 (pid 77) ended by SIGKILL, its log is runs/a/log/rank2.log; the others go on, "
        "and it is started again (3 of 3 times)."
    )
    failed = restart_decision(2, 77, 1, MOST_RESTARTS, log)
    assert failed is not None
    assert not failed.is_restarted
    assert failed.sentence == (
        "worker 2 (pid 77) ended with 1, its log is runs/a/log/rank2.log; the others go on without "
        "it: it was started again 3 times already."
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ("model={family='custom'}", "checkpoint.every=8"),
            "comm.local.min_workers = 2 needs a model of Paceline's own, for a script's ranks are "
            "started and end together: set it to 0.",
        ),
        (
            ("checkpoint.every=6",),
            "checkpoint.every = 6 would keep the first worker's steps since the last round and "
            "nobody else's: make it a multiple of comm.local.every = 4.",
        ),
    ],
)
def test_what_can_not_go_on_without_a_worker_is_refused(settings, sentence):
    with pytest.raises(InputError) as refused:
        read_job(None, [*SETTINGS, "comm.local.min_workers=2", *settings])
    assert str(refused.value) == sentence


def test_where_nobody_is_lost_a_run_is_that_of_fixed_workers(tmp_path):
    write_tiny_job(tmp_path)
    for least in (0, 2):
        settings = [*_sets(f"comm.local.min_workers={least}", f"name=at_least_{least}"), *ranks(2)]
        done = paceline("train", "job.toml", *settings, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    fixed, changing = (metrics(tmp_path, f"at_least_{least}") for least in (0, 2))
    assert [line["loss"] for line in changing] == [line["loss"] for line in fixed]
    assert changing[-1]["eval_loss"] == fixed[-1]["eval_loss"]
    shutil.rmtree(tmp_path / "runs/at_least_2/checkpoints/step-12")
    again = paceline("train", "job.toml", *settings, folder=tmp_path)
    assert "going on after step 8" in again.stdout, again.stderr
    assert max(losses(tmp_path, "at_least_2")) == 12


def _kill(run: Path, rank: int) -> None:
    log = str(run / f"log/rank{rank}.log")
    for child in psutil.Process().children(recursive=True):
        if os.path.realpath(f"/proc/{child.pid}/fd/2") == log:
            child.send_signal(signal.SIGKILL)
            return
    raise AssertionError(f"nobody writes to {log}")


class _Watched:
    """A run of three workers in the background."""

    def __init__(self, folder: Path, *settings: str) -> None:
        write_tiny_job(folder)
        self.folder, self.run = folder, folder / "runs/tiny"
        sets = _sets(*ENDLESS, f"comm.timeout_s={TIMEOUT_S}", *settings)
        keeping = ("-m", "tests.train.keeping_rank", "train", "job.toml")
        self.process = Started([*keeping, *sets, *ranks(3)], folder, num_outputs=1)

    def __enter__(self) -> "_Watched":
        return self

    def __exit__(self, *_failure: object) -> None:
        self.process.kill()  # its workers watch it
        self.process.communicate()

    def log(self, rank: int = 0) -> str:
        file = self.run / f"log/rank{rank}.log"
        return file.read_text() if file.exists() else ""

    def until(self, is_so) -> None:
        """Wait."""
        while not is_so():
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.02)

    def kill(self, rank: int) -> None:
        """A worker, by SIGKILL."""
        _kill(self.run, rank)

    def output(self) -> str:
        """All of it, when it has ended."""
        return self.process.communicate(timeout=60)[0]


def test_a_killed_worker_is_gone_on_without_and_taken_back(tmp_path):
    with _Watched(tmp_path, "comm.local.min_workers=2") as watched:
        watched.until(lambda: len(metrics(tmp_path)) >= 8)
        watched.kill(2)
        killed = time.monotonic()
        watched.until(lambda: "worker 2 is taken in: 3 workers go on." in watched.log())
        assert time.monotonic() - killed < TIMEOUT_S - 10, "it asked, and was waited for all same"
        back = len(metrics(tmp_path))
        watched.until(lambda: len(metrics(tmp_path)) >= back + 8)
        (watched.run / "stop").touch()
        output = watched.output()
    assert watched.process.returncode == 0, output
    assert "ended by SIGKILL" in output
    assert "the others go on, and it is started again (1 of 3 times)." in output
    assert "worker 2 is lost: 2 workers go on." in watched.log()
    assert "Traceback" not in watched.log() + watched.log(1)
    num_workers = [line["comm"]["dp.workers"] for line in metrics(tmp_path)]
    assert set(num_workers) == {2, 3}
    assert (num_workers[0], num_workers[-1]) == (3, 3)
    steps = max(losses(tmp_path))
    assert steps % 4 == 0, "it stopped where workers meet"
    kept = [torch.load(watched.run / f"parameters-{rank}.pt") for rank in range(3)]
    for name, parameter in kept[0].items():
        assert all(torch.equal(parameter, other[name]) for other in kept[1:]), name


def test_too_few_workers_end_the_run_in_one_sentence(tmp_path):
    write_tiny_job(tmp_path)
    settings = [*_sets("comm.local.min_workers=2", *ENDLESS), *ranks(2)]
    with ThreadPoolExecutor() as beside:
        running = beside.submit(paceline, "train", "job.toml", *settings, folder=tmp_path)
        while len(metrics(tmp_path)) < 4:
            assert not running.done(), running.result()
            time.sleep(0.02)
        _kill(tmp_path / "runs/tiny", 1)
        ended = running.result()
    assert ended.returncode == 1
    assert "1 workers are fewer than the 2 that a round needs" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
