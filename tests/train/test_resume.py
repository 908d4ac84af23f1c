"""Stopping, dying and going on: whole runs on gloo ranks, through the command line.

Bit-identical means that the losses in metrics.jsonl are equal as floats, not nearly.
"""

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.command_line import (
    losses,
    metrics,
    paceline,
    ranks,
    settings,
    start_paceline,
    write_tiny_job,
)

STEPS = 16


def _train(folder: Path, *arguments: str) -> dict[int, float]:
    done = paceline("train", "job.toml", *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return losses(folder)


def _kill_when(process, reached, timeout_s=300.0) -> None:
    """SIGKILL the launcher alone, once `reached()`; its ranks must end by themselves."""
    deadline = time.monotonic() + timeout_s
    while not reached() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.0005)
    assert process.poll() is None, f"it ended too early: {process.communicate()[0]}"
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=300)  # its output ends when the last rank has ended
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, "ranks outlived their launcher"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Losses of the run on two ranks that is never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    write_tiny_job(folder)
    return _train(folder, "--set", f"train.steps={STEPS}", *ranks(2))


def test_killed_at_random_steps_it_goes_on_bit_identically(tmp_path, uninterrupted):
    write_tiny_job(tmp_path)
    # Seeded by nothing: another moment at each run of the test, the same result every time.
    kills = sorted(random.sample(range(1, STEPS - 1), 2))
    settings = ("--set", f"train.steps={STEPS}", *ranks(2))
    for step in kills:
        process = start_paceline("train", "job.toml", *settings, folder=tmp_path)
        _kill_when(process, lambda step=step: len(metrics(tmp_path)) >= step)
    assert _train(tmp_path, *settings) == uninterrupted, f"killed at steps {kills}"


def test_killed_while_a_checkpoint_is_written_it_goes_on_bit_identically(tmp_path):
    # Larger than the others' network, so that a checkpoint is under way for longer.
    sizes = ("--set", "model.hidden_size=256", "--set", "model.ffn_size=512")
    settings = ("--set", f"train.steps={STEPS}", "--set", "checkpoint.every=1", *sizes, *ranks(2))
    whole = tmp_path / "whole"
    whole.mkdir()
    write_tiny_job(whole)
    expected = _train(whole, *settings)
    write_tiny_job(tmp_path)
    checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"
    for step in (3, 9):
        process = start_paceline("train", "job.toml", *settings, folder=tmp_path)
        _kill_when(
            process,
            # Cheap to ask first: a checkpoint is under way for milliseconds.
            lambda step=step: any(checkpoints.glob("*.tmp")) and len(metrics(tmp_path)) >= step,
        )
    assert _train(tmp_path, *settings) == expected


@pytest.mark.parametrize(("num_ranks", "more"), [(1, ()), (2, ("checkpoint.best=eval_loss",))])
def test_killed_in_the_last_evaluation_it_makes_it_again(tmp_path, num_ranks, more):
    """The last checkpoint is there by then: the run had ended without its last line."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    changes = ("train.steps=4", "train.eval_batches=300", "observe.profile_every=0", *more)
    options = (*settings(*changes), *ranks(num_ranks))
    for folder in (whole, killed):
        folder.mkdir()
        write_tiny_job(folder)
    _train(whole, *options)
    last = killed / "runs" / "tiny" / "checkpoints" / "step-4"
    process = start_paceline("train", "job.toml", *options, folder=killed)
    _kill_when(process, (last / "manifest.json").exists)
    assert len(metrics(killed)) == 3
    _train(killed, *options)
    for key in ("step", "loss", "eval_loss", "eval_perplexity"):
        found, wanted = ([line.get(key) for line in metrics(at)] for at in (killed, whole))
        assert found == wanted
    again = paceline("train", "job.toml", *options, folder=killed)
    assert "complete after 4 steps" in again.stdout + again.stderr


def test_three_ranks_go_on_bit_identically(tmp_path):
    """More than two summands: their order, hence DDP's buckets, must be the same after a resume."""
    write_tiny_job(tmp_path)
    settings = ("--set", f"train.steps={STEPS}", "--set", "layout.bucket_mib=0.02", *ranks(3))
    process = start_paceline("train", "job.toml", *settings, folder=tmp_path)
    _kill_when(process, lambda: len(metrics(tmp_path)) >= 6)
    resumed = _train(tmp_path, *settings)
    whole = tmp_path / "whole"
    whole.mkdir()
    write_tiny_job(whole)
    assert resumed == _train(whole, *settings)


def test_another_number_of_ranks_sees_the_same_samples(tmp_path, uninterrupted):
    write_tiny_job(tmp_path)
    got = _train(tmp_path, "--set", f"train.steps={STEPS}", *ranks(4))
    assert got == pytest.approx(uninterrupted, rel=1e-5)


def _to_everyone(pid: int, number: int) -> None:
    """As scancel, a kubelet or `kill` of a group do: to launcher, ranks and helpers at once."""
    launcher = psutil.Process(pid)
    for each in [launcher, *launcher.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(number)


@pytest.mark.parametrize(
    ("send", "number", "num_ranks"),
    [
        (os.kill, signal.SIGTERM, 1),  # a scheduler, to the process
        (os.kill, signal.SIGTERM, 2),
        (os.killpg, signal.SIGINT, 2),  # Ctrl-C, to the terminal's whole process group
        (_to_everyone, signal.SIGTERM, 2),
        (_to_everyone, signal.SIGINT, 2),
    ],
)
def test_a_signal_stops_after_the_step_and_keeps_a_checkpoint(send, number, num_ranks, tmp_path):
    write_tiny_job(tmp_path)
    settings = ("--set", "train.steps=100000", "--set", "checkpoint.every=0", *ranks(num_ranks))
    process = start_paceline("train", "job.toml", *settings, folder=tmp_path)
    while len(metrics(tmp_path)) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    send(process.pid, number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    done = len(losses(tmp_path))
    assert f"stopped after step {done} of 100000" in output
    assert (tmp_path / "runs/tiny/checkpoints" / f"step-{done}" / "manifest.json").exists()


def test_a_stopped_run_goes_on_from_its_folder_and_a_finished_one_trains_no_further(tmp_path):
    write_tiny_job(tmp_path)
    settings = ("--set", "train.steps=100000", "--set", "checkpoint.every=0", *ranks(1))
    process = start_paceline("train", "job.toml", *settings, folder=tmp_path)
    while len(metrics(tmp_path)) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=300)
    done = len(losses(tmp_path))
    further = ("train", "runs/tiny", "--set", f"train.steps={done + 2}")
    again = paceline(*further, folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert f"going on after step {done}" in again.stdout
    before = losses(tmp_path)
    assert len(before) == done + 2
    finished = paceline(*further, folder=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert f"is complete after {done + 2} steps" in finished.stdout
    assert losses(tmp_path) == before


def test_fresh_starts_over(tmp_path):
    write_tiny_job(tmp_path)
    before = _train(tmp_path, *ranks(1))
    after = _train(tmp_path, "--fresh", "--set", "train.seed=1", *ranks(1))
    assert len(after) == len(before)
    assert after != before


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_taken(
    tmp_path, uninterrupted
):
    write_tiny_job(tmp_path)
    settings = ("--set", f"train.steps={STEPS}", "--set", "checkpoint.keep_last=100", *ranks(2))
    process = start_paceline("train", "job.toml", *settings, folder=tmp_path)
    checkpoints = tmp_path / "runs/tiny/checkpoints"
    _kill_when(process, lambda: len(list(checkpoints.glob("step-*[0-9]/manifest.json"))) >= 2)
    # On a busy machine the kill may come when the run is done, and has nothing to go on with.
    shutil.rmtree(checkpoints / f"step-{STEPS}", ignore_errors=True)
    newest = max(checkpoints.glob("step-*[0-9]"), key=lambda path: int(path.name[5:]))
    shard = newest / "rank1.safetensors"
    content = bytearray(shard.read_bytes())
    content[-10] ^= 1
    shard.write_bytes(content)
    resumed = paceline("train", "job.toml", *settings, folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"checkpoint {newest.name} is refused" in resumed.stdout
    assert "rank1.safetensors" in resumed.stdout
    assert losses(tmp_path) == uninterrupted
