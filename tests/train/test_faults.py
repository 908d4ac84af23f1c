"""Ranks that die and steps that go wrong: whole runs on gloo ranks, faults injected by a script."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.command_line import (
    Started,
    losses,
    metrics,
    paceline,
    python,
    ranks,
    start_paceline,
    write_tiny_job,
)

# A module whose loss goes wrong on one rank at one step: fault(rank, step) is called in between.
SCRIPT = """
import os, sys, time
import torch, paceline

def fault(rank, step):
    {fault}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = torch.nn.Linear(4, 1), 0

    def forward(self, x):
        return self.linear(x)

def loss(model, batch):
    net = getattr(model, "module", model)
    net.calls += 1
    value = model(batch[0]).square().mean()
    return value * (fault(int(os.environ.get("RANK", "0")), net.calls) or 1.0)

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
job = {{"name": "own", "train": {{"steps": {steps}, "global_batch": 8}},
       "checkpoint": {{"every": 2}}, "cluster": {{"devices_per_node": 2}}}}
run = paceline.train(job, model=Net(), loss=loss, data=data)
print("after train", run.path)
"""


def _run_script(folder, fault: str, steps: int = 12):
    (folder / "own.py").write_text(SCRIPT.format(fault=fault, steps=steps))
    return python("own.py", folder=folder, timeout_s=300)


def _assert_only_the_persons_traceback(printed: str, ends: str) -> None:
    """One traceback, of their lines alone; a sentence of ours before it."""
    sentence, traceback = printed.split("Traceback (most recent call last):")
    assert sentence.startswith("rank 1 (pid ")
    assert "failed and took the run down; its log is" in sentence
    assert traceback.rstrip().endswith(ends)
    files = {line.split('"')[1] for line in traceback.splitlines() if line.startswith("  File ")}
    assert {Path(file).name for file in files} == {"own.py"}, traceback


LONG = "'first\\n' + '\\n'.join(f'line {i} ' * 300 for i in range(300)) + '\\nlast'"
LIKE_GLOO = "[../gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:12345"


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (f"ValueError({LONG})", "\nlast"),
        (f"RuntimeError('{LIKE_GLOO}')", f"RuntimeError: {LIKE_GLOO}"),
        ("torch.distributed.DistNetworkError('lost')", "DistNetworkError: lost"),
    ],
    ids=["many lines", "like gloo's", "like torch's"],
)
def test_a_rank_that_raises_ends_the_others_whatever_it_says(error, ends, tmp_path):
    mark = "open('died', 'w').write(str(time.time()))"
    done = _run_script(tmp_path, f"if (rank, step) == (1, 5): {mark}; raise {error}")
    assert time.time() - float((tmp_path / "died").read_text()) < 20
    assert done.returncode == 1
    assert "after train" not in done.stdout
    _assert_only_the_persons_traceback(done.stderr, ends)
    assert losses(tmp_path, "own").keys() == {1, 2, 3, 4}


def test_a_rank_that_a_launcher_gave_says_why_it_failed_and_the_others_follow(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    fault = "if (rank, step) == (1, 5): raise ValueError('the tokeniser ate it')"
    (tmp_path / "own.py").write_text(SCRIPT.format(fault=fault, steps=12))
    place = {**meeting, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    tasks = [
        Started(["own.py"], tmp_path, 1, {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    first, second = (task.communicate(60)[0] for task in tasks)
    assert [task.returncode for task in tasks] == [1, 1]
    assert "failed (ValueError: the tokeniser ate it) and took the run down" in first
    assert "Traceback" not in first
    assert second.count("Traceback") == 1
    assert second.rstrip().endswith("ValueError: the tokeniser ate it")


def test_an_operator_whose_backward_raises_on_one_rank_ends_the_run(tmp_path):
    operator = """
class Torn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, is_torn):
        ctx.is_torn = is_torn
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.is_torn:
            open('died', 'w').write(str(time.time()))
            raise RuntimeError('gloo: torn')
        return grad, None

class Net("""
    script = SCRIPT.format(fault="pass", steps=12).replace("\nclass Net(", operator)
    is_torn = "(os.environ.get('RANK'), net.calls) == ('1', 5)"
    script = script.replace("model(batch[0])", f"Torn.apply(model(batch[0]), {is_torn})")
    (tmp_path / "own.py").write_text(script)
    done = python("own.py", folder=tmp_path, timeout_s=300)
    assert time.time() - float((tmp_path / "died").read_text()) < 20
    assert done.returncode == 1
    _assert_only_the_persons_traceback(done.stderr, "RuntimeError: gloo: torn")
    assert losses(tmp_path, "own").keys() == {1, 2, 3, 4}


def test_a_last_evaluation_that_fails_loses_no_trained_step(tmp_path):
    fails = "if not net.training and os.environ['RANK'] == '1': raise ValueError('no eval')"
    script = SCRIPT.format(fault="pass", steps=5).replace(
        "data=data)", "data=data, eval_data=data)"
    )
    (tmp_path / "own.py").write_text(script.replace("    net.calls += 1", f"    {fails}"))
    done = python("own.py", folder=tmp_path, timeout_s=300)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: no eval")
    lines = metrics(tmp_path, "own")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert "eval_loss" not in lines[-1]
    kept = sorted(path.name for path in (tmp_path / "runs/own/checkpoints").glob("step-*"))
    assert kept == ["step-4", "step-5"]
    (tmp_path / "own.py").write_text(script.replace('"steps": 5', '"steps": 7'))
    again = python("own.py", folder=tmp_path, timeout_s=300)
    assert again.returncode == 0, again.stderr
    assert "going on after step 5 of 7" in again.stdout
    assert "eval_loss" in metrics(tmp_path, "own")[-1]


EXPERTS = "model.experts={num_experts=4,experts_per_token=2,ffn_size=32}"


@pytest.mark.parametrize(
    "layout",
    [("tp=2",), ("cp=2",), ("pp=2", "schedule=zbv"), ("dp=2", "ep=2")],
    ids=lambda layout: " ".join(layout),
)
def test_a_rank_that_raises_inside_a_layer_ends_any_layout(layout, tmp_path):
    write_tiny_job(tmp_path)
    settings = [f"layout.{each}" for each in layout]
    settings += ["model.num_layers=4", "model.vocab_size=260", "layout.micro_batch=3"]
    settings += [EXPERTS] if "ep=2" in layout else []
    command = [*(f"--set={each}" for each in settings), *ranks(2)]
    faulty = ("-m", "tests.train.faulty_rank", "train", "job.toml")
    done = python(*faulty, *command, folder=tmp_path, timeout_s=300)
    assert done.returncode == 1, done.stderr
    lived_s = time.time() - float((tmp_path / "runs/tiny/died").read_text())
    tracebacks = done.stderr.split("Traceback (most recent call last):")
    assert "ValueError: the layer is on fire" in tracebacks[1]
    assert "rank 1 " in done.stderr
    assert lived_s < 10


def test_a_killed_rank_takes_the_run_down_and_it_can_go_on(tmp_path):
    write_tiny_job(tmp_path)
    process = start_paceline(
        "train", "job.toml", "--set", "train.steps=100000", *ranks(2), folder=tmp_path
    )
    saved = tmp_path / "runs/tiny/checkpoints/step-4/manifest.json"
    while not saved.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    logs = sorted((tmp_path / "runs/tiny/log").glob("rank*.log"))
    assert [log.name for log in logs] == ["rank0.log", "rank1.log"]
    started = psutil.Process(process.pid).children(recursive=True)
    _rank_process(process.pid, logs[1]).send_signal(signal.SIGKILL)
    killed = time.monotonic()
    output, _ = process.communicate(timeout=300)
    assert time.monotonic() - killed < 10
    assert process.returncode == 1
    assert "SIGKILL" in output
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive, "everything that a run started is gone with it"
    done = max(losses(tmp_path))
    again = paceline(
        "train", "job.toml", "--set", f"train.steps={done + 5}", *ranks(2), folder=tmp_path
    )
    assert again.returncode == 0, again.stderr
    assert "going on after step" in again.stdout
    assert max(losses(tmp_path)) == done + 5


def _rank_process(launcher: int, log) -> psutil.Process:
    """The rank that writes to this log."""
    for child in psutil.Process(launcher).children(recursive=True):
        if os.path.realpath(f"/proc/{child.pid}/fd/2") == str(log):
            return child
    raise AssertionError(f"nobody writes to {log}")


def test_steps_that_are_not_finite_are_skipped_and_counted(tmp_path):
    done = _run_script(tmp_path, "return float('nan') if step in (3, 4) and rank == 1 else 1.0")
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path, "own")
    assert [line["skipped"] for line in lines] == [0, 0, 1, 2, *[2] * 8]
    # JSON has no NaN: what is not finite is null.
    assert [line["loss"] is None for line in lines] == [s in (3, 4) for s in range(1, 13)]
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_too_many_bad_steps_end_the_run_in_one_sentence(tmp_path):
    done = _run_script(tmp_path, "return float('inf') if step > 6 else 1.0", steps=40)
    assert done.returncode == 1
    assert "not finite for 5 steps in a row" in done.stderr
    assert "Traceback" not in done.stderr
    manifest = json.loads((tmp_path / "runs/own/checkpoints/latest/manifest.json").read_text())
    assert manifest["manifest"]["step"] <= 10


_LAUNCHER_GOES_BETWEEN = """
import time
import psutil
from paceline.train import stopping

class Going:
    def __init__(self, pid):
        self.pid = pid
    def is_running(self):
        return True
    def status(self):
        raise psutil.NoSuchProcess(self.pid)

psutil.Process = Going
stopping.exit_with_parent(1)
time.sleep(30)
"""


def test_a_rank_ends_though_its_launcher_goes_between_two_questions():
    program = [sys.executable, "-c", _LAUNCHER_GOES_BETWEEN]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (1, "")
