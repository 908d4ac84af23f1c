"""Whole elastic runs: agents as plain processes of this host, that lose a rank, a machine and the
leader, and take a machine back. Their losses are those of one rank that was never disturbed."""

import json
import signal
import time
from pathlib import Path

import pytest

from benchmarks.elastic.agents import Agents
from benchmarks.elastic.jobs import write_job

STEPS = 36
JOB = """
name = "struck"
[model]
family = "decoder"
vocab_size = 257
hidden_size = 32
ffn_size = 64
num_layers = 2
num_heads = 4
max_seq_len = 32
[layout]
precision = "fp32"
micro_batch = 1
[data]
source = "text.txt"
tokenizer = "bytes"
[train]
global_batch = 8
seq_len = 32
eval_batches = 1
[optim]
warmup_steps = 2
[checkpoint]
every = 0
[observe]
tensorboard = false
[elastic]
min_nodes = 1
exact = true
copy_every = 1
"""
LAYOUTS = {
    "dp": {"dp": 4},
    "fsdp": {"fsdp": 4, "zero": 3},
    "pp": {"pp": 2, "dp": 2},
}
PATIENCE_S = 400.0


def train(folder, num_nodes, settings, strike=None):
    """The lines of a run's steps, and its events."""
    folder.mkdir()
    job, _ = write_job(JOB, folder, [f"train.steps={STEPS}"])
    variables = {"PACELINE_MEASURE": "off"}
    with Agents(num_nodes, 1, job, folder, settings, variables) as agents:
        for node in range(num_nodes):
            agents.start(node)
        if strike is not None:
            strike(agents)
        codes = agents.wait(PATIENCE_S)
        assert set(codes.values()) == {0}, agents.outputs()
        assert agents.outliving() == []
        return lines_of(agents), agents.events()


def lines_of(agents):
    """Of metrics.jsonl."""
    return [json.loads(line) for line in (agents.run / "metrics.jsonl").read_text().splitlines()]


def await_step(agents, step):
    """Until that step's line is written, or a generation goes on from there."""
    end = time.monotonic() + PATIENCE_S
    while agents.step() < step:
        assert time.monotonic() < end, agents.outputs()
        time.sleep(0.01)


def kill_rank_agent_and_leader(agents):
    await_step(agents, 6)
    (victim,) = [pid for rank, pid in agents.rank_pids().items() if rank == 1]
    agents.send_one(victim, signal.SIGKILL)
    await_step(agents, 14)
    follower = next(node for node in agents.training() if node != agents.leader())
    agents.send(follower, signal.SIGKILL)
    await_step(agents, 22)
    leader = agents.leader()
    agents.send(leader, signal.SIGKILL)
    agents.start(follower)
    agents.start(leader)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Of one rank, which loses nobody."""
    folder = tmp_path_factory.mktemp("undisturbed") / "one"
    return train(folder, 1, [])[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lost_ranks_agents_and_leaders_leave_no_trace_in_the_numbers(layout, undisturbed, tmp_path):
    settings = [f"layout.{axis}={size}" for axis, size in LAYOUTS[layout].items()]
    lines, events = train(tmp_path / layout, 4, settings, kill_rank_agent_and_leader)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in lines] == [line[name] for line in undisturbed]
    assert lines[-1]["eval_loss"] == undisturbed[-1]["eval_loss"]
    recovered = [event for event in events if event["event"] == "recovered"]
    assert len(recovered) >= 4, events
    # All of it from memory: there is no checkpoint on the disk.
    assert {event["source"] for event in recovered[1:]} <= {"live", "own", "buddy"}
    assert all(event["recomputed"] <= 1 for event in recovered), recovered
    assert [event["state"] for event in events if event["event"] == "end"] == ["finished"]


def test_a_run_that_is_told_to_stop_goes_on_with_the_same_numbers(undisturbed, tmp_path):
    folder = tmp_path / "stopped"
    folder.mkdir()
    job, _ = write_job(JOB, folder, [f"train.steps={STEPS}"])
    with Agents(2, 1, job, folder, ["layout.dp=2"], {"PACELINE_MEASURE": "off"}) as agents:
        for expected in ({0: 75, 1: 75}, {0: 0, 1: 0}):
            agents.start(0)
            agents.start(1)
            if expected[0] == 75:
                await_step(agents, 5)
                agents.send_one(agents.agent(1), signal.SIGTERM)
            assert agents.wait(PATIENCE_S) == expected, agents.outputs()
        lines = lines_of(agents)
    assert [line["loss"] for line in lines] == [line["loss"] for line in undisturbed]


def test_a_node_with_another_job_is_refused(tmp_path):
    job, _ = write_job(JOB, tmp_path, ["train.steps=100000"])
    with Agents(2, 1, job, tmp_path, ["elastic.wait_s=1"], {"PACELINE_MEASURE": "off"}) as agents:
        agents.start(0)
        await_step(agents, 1)
        other = Path(job).read_text().replace("global_batch = 8", "global_batch = 16")
        Path(job).write_text(other)
        agents.start(1)
        end = time.monotonic() + PATIENCE_S
        while agents.exit_code(1) is None and time.monotonic() < end:
            time.sleep(0.05)
        assert agents.exit_code(1) == 2, agents.outputs()
        assert "train.global_batch = 8, and train.global_batch = 16" in agents.outputs()
