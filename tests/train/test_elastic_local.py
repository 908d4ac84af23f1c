"""Elastic runs of workers that step each for itself (DiLoCo): nobody is lost, any worker is lost
and one comes back, too few are left; and the same of workers of several nodes."""

import signal
import time

import pytest

from benchmarks.elastic.agents import Agents
from benchmarks.elastic.jobs import write_job
from tests.command_line import metrics, paceline, ranks
from tests.train.test_elastic_runs import JOB, await_step, lines_of

EVERY, STEPS = 5, 60
LOCAL = ("comm.local.method=diloco", f"comm.local.every={EVERY}")
SETTINGS = (*LOCAL, "train.global_batch=12", f"train.steps={STEPS}")
SHARDS = ("layout.dp=2", "layout.fsdp=2", "layout.zero=3")
COLUMNS = ("layout.dp=2", "layout.tp=2")
PATIENCE_S = 400.0


def _job(folder, *settings):
    folder.mkdir(exist_ok=True)
    text = JOB.replace("exact = true\ncopy_every = 1\n", "")
    return write_job(text, folder, [*SETTINGS, *settings])[0]


def _train(folder, strike):
    """The lines of a run of three nodes' steps, and its events."""
    job = _job(folder)
    with Agents(3, 1, job, folder, [], {"PACELINE_MEASURE": "off"}) as agents:
        for node in range(3):
            agents.start(node)
        strike(agents)
        assert set(agents.wait(PATIENCE_S).values()) == {0}, agents.outputs()
        assert agents.outliving() == []
        return lines_of(agents), agents.events()


def _kill_rank(agents, rank):
    (victim,) = [pid for number, pid in agents.rank_pids().items() if number == rank]
    agents.send_one(victim, signal.SIGKILL)


def _kill_a_rank_the_first_and_a_machine(agents):
    await_step(agents, 12)
    _kill_rank(agents, 1)
    await_step(agents, 25)
    _kill_rank(agents, 0)
    await_step(agents, 40)
    leader = agents.leader()
    agents.send(leader, signal.SIGKILL)
    agents.start(leader)


def _on_one_machine(folder, least, num_ranks=3, *settings):
    """The lines of a run on one machine, which loses nobody."""
    job, name = _job(folder, "elastic.min_nodes=1"), f"least-{least}"
    given = (f"elastic.min_nodes={least}", f"name={name}", *settings)
    sets = [f"--set={each}" for each in given]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # as the agents have it
        done = paceline("train", str(job), *sets, *ranks(num_ranks), folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics(folder, name)


@pytest.fixture(scope="module")
def fixed(tmp_path_factory):
    """Of workers of which none may be lost."""
    return _on_one_machine(tmp_path_factory.mktemp("fixed"), 0)


@pytest.mark.parametrize("layout", [(), SHARDS], ids=["one rank", "shards"])
def test_where_nobody_is_lost_a_run_is_that_of_fixed_workers(layout, fixed, tmp_path):
    if layout:
        fixed = _on_one_machine(tmp_path, 0, 4, *layout)
    elastic = _on_one_machine(tmp_path, 1, 4 if layout else 3, *layout)
    assert len(elastic) == STEPS
    for figure in ("loss", "grad_norm"):
        assert [line[figure] for line in elastic] == [line[figure] for line in fixed]
    assert elastic[-1]["eval_loss"] == fixed[-1]["eval_loss"]


def test_any_worker_may_be_lost_and_the_run_ends_with_all_its_rounds(fixed, tmp_path):
    lines, events = _train(tmp_path / "struck", _kill_a_rank_the_first_and_a_machine)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    recovered = [event for event in events if event["event"] == "recovered"][1:]
    assert len(recovered) >= 3, events
    assert {event["source"] for event in recovered} == {"own"}  # nothing is read from the disk
    for event in recovered:
        assert event["step"] % EVERY == 0, "they go on from a round"
        assert event["recomputed"] <= EVERY
    first = recovered[0]["step"]
    losses = [line["loss"] for line in lines]
    without = [line["loss"] for line in fixed]
    assert losses[:first] == without[:first]
    # Who came in has another worker's moments: of the 1.6 that was learnt that moves a hundredth.
    learnt = without[0] - without[-1]
    assert lines[-1]["eval_loss"] == pytest.approx(fixed[-1]["eval_loss"], abs=learnt / 50)
    assert [event["state"] for event in events if event["event"] == "end"] == ["finished"]


def test_too_few_workers_save_at_a_round_and_go_on_when_they_are_back(tmp_path):
    job = _job(tmp_path, "train.steps=20000", "checkpoint.every=10000", "optim.schedule=constant")
    settings = ["elastic.min_nodes=2", "elastic.wait_s=15"]
    with Agents(2, 1, job, tmp_path, settings, {"PACELINE_MEASURE": "off"}) as agents:
        agents.start(0)
        agents.start(1)
        await_step(agents, 12)
        agents.send(1, signal.SIGKILL)
        assert agents.wait(PATIENCE_S)[0] == 75, agents.outputs()
        (saved,) = (agents.run / "checkpoints").glob("step-*")
        step = int(saved.name.removeprefix("step-"))
        assert step % EVERY == 0
        assert lines_of(agents)[-1]["step"] == step
        agents.start(0)
        agents.start(1)
        await_step(agents, step + 2 * EVERY)
        agents.send_one(agents.agent(1), signal.SIGTERM)
        assert agents.wait(PATIENCE_S) == {0: 75, 1: 75}, agents.outputs()
        steps = [line["step"] for line in lines_of(agents)]
        assert steps == list(range(1, len(steps) + 1))
        assert steps[-1] % EVERY == 0, "they stop where they meet"


@pytest.mark.parametrize("layout", [SHARDS, COLUMNS], ids=["shards", "columns"])
def test_a_worker_of_several_nodes_is_lost_as_one_and_comes_back_as_one(layout, tmp_path):
    job = _job(tmp_path, "train.steps=20000", "optim.schedule=constant")
    with Agents(4, 1, job, tmp_path, layout, {"PACELINE_MEASURE": "off"}) as agents:
        for node in range(4):
            agents.start(node)
        await_step(agents, 12)
        _kill_rank(agents, 3)
        await_step(agents, 25)
        agents.send(1, signal.SIGKILL)
        _await_events(agents, "recovered", 3)
        await_step(agents, lines_of(agents)[-1]["step"] + 2 * EVERY)
        agents.start(1)
        _await_events(agents, "recovered", 4)
        await_step(agents, lines_of(agents)[-1]["step"] + 2 * EVERY)
        agents.send_one(agents.agent(0), signal.SIGTERM)
        assert set(agents.wait(PATIENCE_S).values()) == {75}, agents.outputs()
        lines, events = lines_of(agents), agents.events()
    begun = [event for event in events if event["event"] == "generation"]
    assert [event["num_active"] for event in begun] == [4, 4, 2, 4], begun
    assert begun[2]["nodes"][:2] == begun[1]["nodes"][2:], "the other worker stays what it is"
    recovered = [event for event in events if event["event"] == "recovered"][1:]
    assert {event["source"] for event in recovered} == {"own"}  # nothing is read from the disk
    assert all(event["step"] % EVERY == 0 for event in recovered), "they go on from a round"
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1


def _await_events(agents, kind, count):
    until = time.monotonic() + PATIENCE_S
    while sum(event["event"] == kind for event in agents.events()) < count:
        assert time.monotonic() < until, agents.outputs()
        time.sleep(0.1)
