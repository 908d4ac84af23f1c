"""Stopping in time: notices at any moment, exit code 75, and losses as if there had been none."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from paceline.config.elastic import Elastic
from paceline.observe.run import Run
from paceline.train.stopping import StopRequest
from tests.command_line import (
    Started,
    losses,
    metrics,
    paceline,
    ranks,
    start_paceline,
    write_tiny_job,
)
from tests.train.test_slurm import _tasks

STEPS = 24
IN_TIME = ("--set", "elastic.save_within_s=60")
SETTINGS = (
    *("--set", f"train.steps={STEPS}", "--set", "train.eval_every=3"),
    *("--set", "train.eval_batches=20", "--set", "checkpoint.every=5", *IN_TIME, *ranks(2)),
)


def _results(folder):
    return [(line["step"], line["loss"], line.get("eval_loss")) for line in metrics(folder)]


def _events(folder):
    text = (folder / "runs/tiny/events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def _to_launcher(pid):
    os.kill(pid, signal.SIGTERM)


def _to_everyone_twice(pid):
    launcher = psutil.Process(pid)
    for _ in range(2):
        for each in [launcher, *launcher.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGTERM)
        time.sleep(0.05)


def _as_slurm_does(pid):
    os.kill(pid, signal.SIGUSR1)
    time.sleep(1.2)  # later than what counts as one signal that arrives twice
    os.kill(pid, signal.SIGTERM)


WAYS = (_to_launcher, _to_everyone_twice, _as_slurm_does)


def _hears_sigterm(pid):
    """Whether the command has begun: before, the signal ends Python, which has done nothing."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, mask = line.partition(":")
            if name in ("SigBlk", "SigCgt") and int(mask, 16) >> (signal.SIGTERM - 1) & 1:
                return True
    return False


def _moment(folder, pick):
    """What says that it is time: in the start, in or between steps, in a save, an evaluation."""
    phase, begun = pick.choice(("start", "step", "save", "evaluation")), len(metrics(folder))
    began, wait_s = time.monotonic(), pick.uniform(0.1, 2)
    ahead = {"start": 0, "step": pick.randint(1, 4), "save": 1, "evaluation": 2 - begun % 3}[phase]
    saves = folder / "runs/tiny/checkpoints"
    saved = {each.name for each in saves.glob("step-*")}

    def is_time():
        if phase == "start":
            return time.monotonic() - began > wait_s
        if len(metrics(folder)) < begun + ahead:
            return False
        # A save takes milliseconds: where none was seen under way, right after it will do.
        return phase != "save" or bool({each.name for each in saves.glob("step-*")} - saved)

    return is_time


def _stopped_again_and_again(folder, pick):
    """Each stop of a run until it ended by itself: how it was asked, and the exit code."""
    write_tiny_job(folder)
    told, code = [], 75
    while code == 75 and len(told) < 12:
        process = start_paceline("train", "job.toml", *SETTINGS, folder=folder)
        is_time, way = _moment(folder, pick), pick.choice(WAYS)
        while process.poll() is None and not (
            len(told) < 6 and is_time() and _hears_sigterm(process.pid)
        ):
            time.sleep(0.001)
        # It may end by itself at any moment, or after the first of several signals.
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if process.poll() is None:
                way(process.pid)
        output, _ = process.communicate(timeout=300)
        code = process.returncode
        told.append((way.__name__, code))
        assert code in (0, 75), (told, output)
        saved = (folder / "runs/tiny/checkpoints").glob("step-*[0-9]/manifest.json")
        newest = max((int(each.parent.name[5:]) for each in saved), default=0)
        assert len(metrics(folder)) == newest, (told, output)
        assert not list((folder / "runs/tiny/checkpoints").glob("*.tmp"))
    return told


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says whether a process hears signals")
@pytest.mark.parametrize("seed", [1, 2])
def test_stopped_at_random_moments_it_is_saved_and_goes_on_bit_identically(seed, tmp_path):
    pick, whole = random.Random(seed), tmp_path / "whole"
    whole.mkdir()
    write_tiny_job(whole)
    assert paceline("train", "job.toml", *SETTINGS, folder=whole).returncode == 0
    # On a busy machine a run may end before this process comes to stop it twice: then another one.
    num_stops = 0
    for attempt in range(5):
        folder = tmp_path / f"stopped-{attempt}"
        folder.mkdir()
        told = _stopped_again_and_again(folder, pick)
        assert _results(folder) == _results(whole), told
        num_stops += [code for _, code in told].count(75)
        if num_stops > 1:
            return
    pytest.fail("nothing was stopped twice")


def test_a_run_that_is_finished_exits_with_0(tmp_path):
    write_tiny_job(tmp_path)
    done = paceline("train", "job.toml", *IN_TIME, *ranks(2), folder=tmp_path)
    assert done.returncode == 0
    events = _events(tmp_path)
    assert (events[-1]["event"], events[-1]["state"]) == ("end", "finished")


def test_a_number_in_the_stop_file_is_a_notice_of_any_run(tmp_path):
    write_tiny_job(tmp_path)
    settings = ("--set", "train.steps=100000", *ranks(2))
    process = start_paceline("train", "job.toml", *settings, folder=tmp_path)
    while len(metrics(tmp_path)) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    (tmp_path / "runs/tiny/stop").write_text("30 the cloud takes the machine\n")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 75, output
    begun, *events = _events(tmp_path)
    assert begun == begun | {"event": "start", "step": 0, "num_devices": 2}
    assert [each["event"] for each in events] == ["notice", "end"]
    assert events[0]["source"] == "the cloud takes the machine"
    assert events[0]["within_s"] == 30
    assert events[1] == events[1] | {"state": "saved", "exit_code": 75}
    assert len(losses(tmp_path)) == events[1]["step"]


@pytest.mark.parametrize("is_late", [False, True])
def test_one_task_of_two_is_told_and_both_stop(is_late, tmp_path):
    """As torchrun's nodes or a step of srun: nobody passes the signal on."""
    settings = ("train.steps=100000", "checkpoint.every=0", "elastic.save_within_s=60")
    with _tasks(tmp_path, *settings) as tasks:
        started = [tasks.start(), tasks.start()]
        while (
            not (tmp_path / "runs/tiny/job.toml").exists() or len(metrics(tmp_path)) < 4 * is_late
        ):
            assert started[1].poll() is None, started[1].communicate()[0]
            time.sleep(0.01)
        psutil.Process(started[1].pid).send_signal(signal.SIGTERM)
        printed = [task.communicate(100)[0] for task in started]
    assert [task.returncode for task in started] == [75, 75], printed
    assert "Traceback" not in printed[0] + printed[1]


SCRIPT = """
import torch
import paceline.train

if __name__ == "__main__":
    model = torch.nn.Linear(4, 1)
    data = [(torch.ones(4), torch.ones(1))] * 64
    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    job = {
        "name": "tiny",
        "train": {"steps": 100000, "global_batch": 4},
        "elastic": {"save_within_s": 60},
        "cluster": {"devices_per_node": RANKS},
    }
    paceline.train(job, model, loss, data)
    print("what stands after the training")
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_script_ends_with_75_and_does_not_take_the_model_for_trained(num_ranks, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.replace("RANKS", str(num_ranks)))
    process = Started(["script.py"], tmp_path, num_outputs=1)
    while len(metrics(tmp_path)) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 75, output
    assert "what stands after" not in output


def _native_rank(folder, within_s, done):
    program = [sys.executable, "-m", "tests.train.native_rank", str(folder), within_s, done]
    rank = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert rank.stdout.readline() == "ready\n"
    return rank


def test_a_rank_in_native_code_that_did_no_step_ends_at_once(tmp_path):
    rank = _native_rank(tmp_path, "600", "-")
    rank.send_signal(signal.SIGTERM)
    output, _ = rank.communicate(timeout=300)
    assert rank.returncode == 75
    assert "nothing was trained since the start" in output
    assert (tmp_path / "stop").read_text() == "600.0 SIGTERM\n"  # for the others


def test_a_rank_that_can_not_save_in_time_says_what_is_lost(tmp_path):
    rank = _native_rank(tmp_path, "1", "7")
    rank.send_signal(signal.SIGUSR1)
    output, _ = rank.communicate(timeout=300)
    assert rank.returncode == 75
    assert "the checkpoint of step 7 is not written: there is no checkpoint" in output


def test_a_rank_whose_copy_is_not_done_in_time_says_so(tmp_path):
    rank = _native_rank(tmp_path, "1", "7+")
    rank.send_signal(signal.SIGUSR1)
    output, _ = rank.communicate(timeout=300)
    assert rank.returncode == 75
    assert "stopped after step 7, checkpoint kept on the disk, its copy in the store" in output


def test_a_rank_that_entered_its_first_exchange_waits_for_it(tmp_path):
    stop = StopRequest(Run(tmp_path), Elastic(save_within_s=600))
    try:
        assert not stop.in_exchange()
        stop.ask("a test")
        time.sleep(1.2)  # two looks of the watch, which would have ended this process
        stop.stepped(1)
        assert stop.in_exchange()
    finally:
        stop.close()


def test_the_end_of_slurms_time_is_a_notice(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    for within_s, is_asked in ((50, False), (200, True)):
        stop = StopRequest(Run(tmp_path), Elastic(save_within_s=within_s))
        stop.stepped(1)
        try:
            assert bool(stop) == is_asked
        finally:
            stop.close()


def test_sigusr1_is_none_of_a_jobs_that_does_not_ask_for_it(tmp_path):
    """Without the setting SIGUSR1 means what it means to any program."""
    write_tiny_job(tmp_path)
    settings = ("--set", "train.steps=100000", *ranks(1))
    process = start_paceline("train", "job.toml", *settings, folder=tmp_path)
    while len(metrics(tmp_path)) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGUSR1)
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGUSR1
