"""Elastic runs whose processes torchrun starts: the first is the node's agent, the other waits."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.elastic import agent
from paceline.observe.run import Run
from tests.command_line import Started, metrics, write_tiny_job

PATIENCE_S = 400.0


class _Torchrun:
    """A run on this machine, of two processes that torchrun starts."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.run = Run(folder / "runs" / "tiny")
        sets = {
            "cluster.devices_per_node": 2,
            "layout.dp": 2,
            "train.steps": steps,
            "elastic.min_nodes": 1,
        }
        launcher = ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        command = [
            "-m",
            "paceline",
            "train",
            "job.toml",
            *(f"--set={k}={v}" for k, v in sets.items()),
        ]
        told = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        told |= {"PACELINE_MEASURE": "off", "PACELINE_NODE": "here"}
        self.launcher = Started([*launcher, *command], folder, 1, told)

    def __enter__(self) -> "_Torchrun":
        return self

    def __exit__(self, *_failure: object) -> None:
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.launcher.pid).children(recursive=True):
                process.kill()
        self.launcher.kill()

    def processes(self) -> tuple[psutil.Process, psutil.Process]:
        """The agent, and the process that waits for it."""
        given = {
            process.environ().get("LOCAL_RANK"): process
            for process in psutil.Process(self.launcher.pid).children()
        }
        return given["0"], given["1"]

    def end(self) -> tuple[int | None, str]:
        printed = self.launcher.communicate(PATIENCE_S)[0]
        return self.launcher.returncode, printed


def _until(is_so: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_torchruns_first_process_is_the_agent_and_the_other_ends_as_it_does(tmp_path):
    write_tiny_job(tmp_path)
    with _Torchrun(tmp_path, steps=60) as first:
        _until(lambda: len(metrics(tmp_path)) > 5)
        agent_process, waiting = first.processes()
        assert waiting.children() == [], "it starts nothing"
        ranks = [
            one for one in agent_process.children(recursive=True) if os.getsid(one.pid) == one.pid
        ]
        assert len(ranks) == 2
        ranks[1].kill()
        code, printed = first.end()
        assert code == 0, printed
    lost = [event for event in first.run.events().lines if event["event"] == "lost"]
    # A loaded machine may slow one rank for 50 steps, or hold one up for longer than it may take:
    # that is told, or survived as well.
    assert lost[0]["class"] == "dead", lost
    assert {event["class"] for event in lost[1:]} <= {"slow", "stuck"}, lost
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 61))
    with _Torchrun(tmp_path, steps=10**6) as second:
        _until(lambda: len(metrics(tmp_path)) > 65)
        _, waiting = second.processes()
        os.kill(waiting.pid, signal.SIGTERM)  # also where a launcher tells this one alone
        code, printed = second.end()
        assert code == 1, "torchrun knows no other"
    end = second.run.events().lines[-1]
    assert (end["event"], end["state"], end["exit_code"]) == ("end", "saved", 75), printed
    last = second.run.last_checkpoint()
    assert last is not None
    assert last[0] == len(metrics(tmp_path))


@pytest.mark.parametrize("exit_code", [75, None])
def test_who_waits_for_an_agent_sees_its_end_at_once(exit_code, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_NODE", "here")
    monkeypatch.setattr(agent, "_GONE_S", 10 * PATIENCE_S)
    agents = tmp_path / "agents"
    agents.mkdir()
    # An earlier start of the same launcher left this.
    earlier = {"incarnation": "x", "launch": "of another start", "exit_code": 0}
    (agents / "here.end").write_text(json.dumps(earlier))
    stand_in = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(agent, "_first_of_launch", lambda: psutil.Process(stand_in.pid))
    try:
        if exit_code is not None:
            own = {"incarnation": "y", "launch": agent._launch(), "exit_code": exit_code}
            (agents / "here.end").write_text(json.dumps(own))
        else:
            stand_in.kill()
        began = time.monotonic()
        assert agent.await_agent(Run(tmp_path)) == (exit_code or 1)
        assert time.monotonic() - began < PATIENCE_S
    finally:
        stand_in.kill()
        stand_in.wait()
