"""A person's own module in an elastic run: scripts on nodes of this machine, whose ranks and agents
are killed, against the same script on one node."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import paceline
from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.train.custom.fresh_module import FreshModules
from paceline.train.custom.task import custom_task
from paceline.train.custom.user_inputs import UserInputs
from tests.elastic.cluster import job_of
from tests.ranks import run_ranks
from tests.train import own_elastic_script as script
from tests.train.api_script import Tied

LIMIT_S = 400.0
EXACT = {"elastic": {"exact": True, "min_nodes": 1, "heartbeat_s": 30.0}}


class _Nodes:
    """Scripts of one run, each a node's."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, {"name": "own", **settings}
        self.run = paceline.Run(folder / "runs" / "own")
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir()

    def start(self, *names: str) -> None:
        for name in names:
            told = {"PACELINE_NODE": name, "PACELINE_ADDRESS": "127.0.0.1"}
            env = {**os.environ, **told, "PACELINE_MEASURE": "off", "OMP_NUM_THREADS": "1"}
            program = [sys.executable, script.__file__, json.dumps(self.settings)]
            with (self.folder / f"{name}.log").open("ab") as log:
                self.agents[name] = subprocess.Popen(
                    program, cwd=self.folder, env=env, stdout=log, stderr=log
                )

    def __enter__(self) -> "_Nodes":
        return self

    def __exit__(self, *_failure: object) -> None:
        for agent in self.agents.values():
            agent.kill()
            agent.wait()

    def until(self, is_so: Callable[[], Any]) -> None:
        end = time.monotonic() + LIMIT_S
        while not is_so():
            logs = "\n".join(log.read_text() for log in self.folder.glob("*.log"))
            assert time.monotonic() < end, f"it never came to that: {self.events()}\n{logs}"
            time.sleep(0.05)

    def until_step(self, step: int, num_nodes: int) -> None:
        """Wait for a step of a generation of so many nodes, which has made one."""

        def is_so() -> bool:
            made = [line["step"] for line in self.lines("runs/own/metrics.jsonl")]
            stepped = {event["generation"] for event in self.events("first_step")}
            is_there = self.generation.get("num_active") == num_nodes
            return (
                is_there
                and self.generation["generation"] in stepped
                and max(made, default=0) >= step
            )

        self.until(is_so)

    def lines(self, file: str) -> list[dict[str, Any]]:
        path = self.folder / file
        raw = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in raw if line.endswith("\n")]

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        found = self.lines("runs/own/events.jsonl")
        return [event for event in found if kind in ("", event["event"])]

    @property
    def generation(self) -> dict[str, Any]:
        return (self.events("generation") or [{}])[-1]

    def kill_first(self, what: str) -> str:
        """Kill rank 0, or the agent of its node; return the node's name."""
        name = self.generation["nodes"][0]
        children = psutil.Process(self.agents[name].pid).children()
        (rank,) = (child.pid for child in children if os.getsid(child.pid) == child.pid)
        os.kill(rank if what == "rank" else self.agents[name].pid, signal.SIGKILL)
        return name

    def codes(self) -> dict[str, int]:
        self.until(lambda: all(agent.poll() is not None for agent in self.agents.values()))
        return {name: agent.returncode for name, agent in self.agents.items()}

    def losses(self) -> list[tuple[float, float, float | None]]:
        lines = self.lines("runs/own/metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(1, script.STEPS + 1))
        return [(line["loss"], line["grad_norm"], line.get("eval_loss")) for line in lines]


@pytest.fixture
def pair(tmp_path, request) -> Iterator[tuple[_Nodes, _Nodes]]:
    """A run on one node that nothing disturbs, and the same on two."""
    job = {**EXACT, "layout": {"micro_batch": 1, **request.param["layout"]}}
    job["elastic"] = {**EXACT["elastic"], "copy_every": request.param.get("copy_every", "auto")}

    def settings(num_nodes: int) -> dict[str, Any]:
        cluster = {"num_nodes": num_nodes, "devices_per_node": 1}
        return {"data": request.param["data"], "job": {**job, "cluster": cluster}}

    one, two = _Nodes(tmp_path / "one", settings(1)), _Nodes(tmp_path / "two", settings(2))
    with one, two:
        (two.folder / "slow").touch()
        one.start("a")
        yield one, two


def _assert_same(two: _Nodes, one: _Nodes, left: str) -> None:
    assert one.codes() == {"a": 0}
    assert two.losses() == one.losses()
    (after,), (expected,) = two.lines("after.jsonl"), one.lines("after.jsonl")
    assert (after["node"], after["squares"]) == (left, expected["squares"])
    every = [(call["kind"], call["step"]) for call in two.lines("calls.jsonl")]
    steps = [("step", step) for step in range(1, script.STEPS + 1)]
    evals = [("eval", step) for step in range(10, script.STEPS + 1, 10)]
    assert sorted(every) == sorted(steps + evals)


SHARDED = {"layout": {"fsdp": "auto", "dp": 1}, "data": "map"}


@pytest.mark.parametrize(
    ("pair", "copy_every"),
    [({**SHARDED, "copy_every": each}, each) for each in (1, 4)],
    indirect=["pair"],
    ids=["copied each step", "copied each fourth step"],
)
def test_a_lost_first_rank_and_agent_change_no_bit_of_sharded_training(pair, copy_every):
    one, two = pair
    two.start("a", "c")
    two.until_step(5, num_nodes=2)
    two.kill_first("rank")
    two.until(lambda: len(two.events("first_step")) == 2)
    lost = two.kill_first("agent")
    (left,) = {"a", "c"} - {lost}
    assert two.codes() == {left: 0, lost: -signal.SIGKILL}
    assert two.events("generation")[0]["layout"] == "fsdp 2 (zero 3)"
    recovered = two.events("recovered")
    assert [event["source"] for event in recovered] == ["start", "buddy", "buddy"]
    # As many as since a copy, or the one before where that had not arrived.
    assert all(event["recomputed"] < 2 * copy_every for event in recovered), recovered
    _assert_same(two, one, left)


@pytest.mark.parametrize("pair", [{"layout": {"dp": "auto"}, "data": "loader"}], indirect=True)
def test_where_no_state_is_left_the_run_begins_with_what_the_script_makes(pair):
    one, two = pair
    # The agent of c is lost when its ranks and others have given their modules away.
    (two.folder / "dies").write_text("agent")
    two.start("a", "c")
    two.until_step(5, num_nodes=1)
    assert "or the weights it began with" in two.events("lost")[-1]["sentence"]
    two.kill_first("rank")  # the only one, and there is no checkpoint
    assert two.codes() == {"a": 0, "c": -signal.SIGKILL}
    assert [(event["source"], event["step"]) for event in two.events("recovered")] == [
        ("start", 0),
        ("start", 0),
    ]
    _assert_same(two, one, "a")


def test_a_module_that_cannot_be_copied_is_refused_before_a_run_begins(tmp_path):
    with _Nodes(tmp_path / "refused", {"module": "uncopyable"}) as nodes:
        nodes.start("a")
        assert nodes.codes() == {"a": 2}
        said = (nodes.folder / "a.log").read_text()
        assert said.startswith(
            "paceline: an elastic run makes the module anew after a loss, and Uncopyable can't be "
            "copied (TypeError: it holds a file): make it work with copy.deepcopy, or set "
        )
        assert "Traceback" not in said
        assert not nodes.run.path.exists()


@pytest.mark.usefixtures("as_if_alone")
def test_a_prompt_has_no_script_to_start_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    job = {**script.JOB, "name": "prompt"}
    with pytest.raises(InputError, match=r"elastic\.min_nodes = 1 starts lost ranks again, from a"):
        paceline.train(job, nn.Linear(8, 4), script.loss, script.Samples(), runs=tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_module_made_anew_keeps_ties_marks_and_buffers():
    module = Tied()
    module.register_buffer("seen", torch.tensor([7.0]))
    module.first.bias.requires_grad_(False)
    module.first.weight.is_marked = True
    modules = FreshModules(module, is_elastic=True)
    taken, again = modules.take(), modules.take()
    assert taken.module is module
    assert (taken.has_values, again.has_values) == (True, False)
    anew = again.module
    assert anew.first.weight is anew.second.weight is not module.first.weight
    assert anew.first.weight.is_marked
    assert anew.first.weight.device.type == "cpu"
    assert not anew.first.bias.requires_grad
    assert anew.seen.item() == 7.0


def _share(rank: int, world_size: int, owner: int | None) -> tuple[bool, float]:
    module = nn.Linear(4, 2, bias=False)
    nn.init.constant_(module.weight, rank)
    job = job_of(1, 1, 1)
    brought = UserInputs(module, script.loss, script.Samples())
    ranks = Ranks(rank, world_size, rank, world_size)
    task = custom_task(job, ranks, brought, has_values=rank == owner)
    return task.has_values, module.weight[0, 0].item()


@pytest.mark.parametrize("owner", [2, None])
def test_ranks_begin_with_the_weights_of_one_that_has_any(owner):
    found = run_ranks(_share, 3, owner)
    assert found == [(owner is not None, float(owner or 0))] * 3
