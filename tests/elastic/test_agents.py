"""Agents, their leader and their ranks, as real processes: whatever is lost, the run goes on."""

import os
import signal
import socket
import time
from contextlib import suppress

import pytest

from paceline.config.errors import EXIT_LEFT_OUT, InputError
from paceline.elastic.agent import num_coming
from tests.elastic.cluster import Behaviour, Nodes


def _kill_rank(nodes: Nodes, node: str) -> None:
    nodes.remember()
    os.kill(nodes.rank_pids(node)[0], signal.SIGKILL)


def test_whatever_is_lost_the_run_goes_on_and_takes_back_who_returns(tmp_path):
    with Nodes(tmp_path, 4) as nodes:
        nodes.start("a", "b", "c", "d")
        at = nodes.until_step(1, world=4, more=8)
        rank_0, other = nodes.names()[0], nodes.names()[2]
        for name in (other, rank_0):  # a rank, and the first one
            _kill_rank(nodes, name)
            at = nodes.until_step(at + 1, world=4, more=8)
            loss = nodes.events("lost")[-1]
            assert (loss["node"], loss["class"]) == (name, "dead")
            assert "ended by SIGKILL" in loss["sentence"]
            assert nodes.events("decision")[-1]["action"] == "replace"
        leader = nodes.newest()["leader"]
        member = next(name for name in nodes.names() if name != leader)
        nodes.kill_agent(member)
        at = nodes.until_step(at + 1, world=3, more=8)
        nodes.kill_agent(leader)
        at = nodes.until_step(at + 1, world=2, more=8)
        assert nodes.newest()["leader"] in nodes.names()
        assert not {leader, member} & set(nodes.names())
        nodes.start(member, leader)
        at = nodes.until_step(at + 1, world=4, more=8)
        # Two at once, the leader among them.
        leader = nodes.newest()["leader"]
        other = next(name for name in nodes.names() if name != leader)
        nodes.remember()
        nodes.agents[leader].kill()
        nodes.kill_agent(other)
        at = nodes.until_step(at + 1, world=2, more=8)
        # All agents but one.
        survivor, last = nodes.names()
        nodes.kill_agent(last)
        nodes.until_step(at + 1, world=1, more=8)
        assert nodes.newest()["leader"] == survivor
        nodes.assert_one_history()


def test_a_rank_whose_agent_is_gone_ends_at_once(tmp_path):
    with Nodes(tmp_path, 1, devices=2) as nodes:
        nodes.start("a")
        nodes.until_step(1, world=2)
        nodes.kill_agent("a")
        assert nodes.still_there(3.0) == []


def test_a_run_that_is_done_ends_everywhere(tmp_path):
    with Nodes(tmp_path, 2, behaviour=Behaviour(steps=20)) as nodes:
        nodes.start("a", "b")
        assert nodes.codes() == {"a": 0, "b": 0}
        assert nodes.events("end")[-1]["state"] == "finished"
        assert {line["step"] for line in nodes.steps()} == set(range(1, 21))
        assert not list((nodes.run.path / "agents").glob("*.json"))


def test_a_signal_at_one_agent_stops_all_with_a_checkpoint(tmp_path):
    with Nodes(tmp_path, 3) as nodes:
        nodes.start("a", "b", "c")
        nodes.until_step(1, world=3)
        os.kill(nodes.agents["c"].pid, signal.SIGTERM)
        assert nodes.codes() == {"a": 75, "b": 75, "c": 75}
        assert nodes.events("notice")[-1]["source"] == "SIGTERM"
        end = nodes.events("end")[-1]
        assert (end["state"], end["exit_code"]) == ("saved", 75)
    # Started again it goes on in a new generation.
    with Nodes(tmp_path, 3) as again:
        again.start("a", "b", "c")
        again.until_step(2, world=3)


def test_a_stopped_rank_is_found_and_replaced(tmp_path):
    with Nodes(tmp_path, 2) as nodes:
        nodes.start("a", "b")
        at = nodes.until_step(1, world=2, more=8)
        nodes.remember()
        os.kill(nodes.rank_pids("b")[0], signal.SIGSTOP)
        nodes.until_step(at + 1, world=2)
        loss = nodes.events("lost")[-1]
        assert (loss["class"], loss["node"]) == ("stopped", "b")
        assert "is stopped since" in loss["sentence"]
        nodes.assert_one_history()


def test_a_rank_that_hangs_before_a_collective_is_named_and_replaced(tmp_path):
    with Nodes(tmp_path, 3, behaviour=Behaviour(hang_at=12)) as nodes:
        nodes.start("a", "b", "c")
        nodes.until_step(2, world=3)
        loss = nodes.events("lost")[-1]
        assert (loss["class"], loss["rank"]) == ("stuck", 1)
        assert "in forward and backward of step 13" in loss["sentence"]
        assert "cluster.py:" in loss["sentence"]
        nodes.assert_one_history()


def test_a_rank_that_hangs_when_the_others_are_done_is_replaced(tmp_path):
    behaviour = Behaviour(steps=12, hang_at=12, first_limit_s=2.0)
    with Nodes(tmp_path, 2, behaviour=behaviour) as nodes:
        nodes.start("a", "b")
        nodes.until(lambda: not nodes.agents["a"].is_alive() and not nodes.agents["b"].is_alive())
        (loss,) = nodes.events("lost")
        assert (loss["class"], loss["rank"]) == ("stuck", 1)
        assert "while it saved a checkpoint" in loss["sentence"]
        assert nodes.events("end")[-1]["state"] == "finished"


@pytest.mark.parametrize("who", ["leader", "member"])
def test_an_agent_that_was_stopped_comes_back(tmp_path, who):
    with Nodes(tmp_path, 3) as nodes:
        nodes.start("a", "b", "c")
        at = nodes.until_step(1, world=3, more=8)
        leader = nodes.newest()["leader"]
        name = leader if who == "leader" else next(n for n in nodes.names() if n != leader)
        os.kill(nodes.agents[name].pid, signal.SIGSTOP)
        at = nodes.until_step(at + 1, world=2, more=8)
        loss = next(e for e in reversed(nodes.events("lost")) if e["node"] == name)
        assert loss["class"] == "vanished"
        os.kill(nodes.agents[name].pid, signal.SIGCONT)
        nodes.until_step(at + 1, world=3, more=8)
        assert nodes.agents[name].is_alive()
        # One that led says nothing of those who went on without it.
        assert [event for event in nodes.events("lost") if event["node"] != name] == []
        nodes.assert_one_history()


def test_a_second_agent_for_a_node_is_refused(tmp_path):
    with Nodes(tmp_path, 1) as nodes:
        nodes.start("a")
        nodes.until_step(1)
        first = nodes.agents["a"]
        nodes.start("a")
        second = nodes.agents["a"]
        second.join(30)
        assert second.exitcode == 2
        assert "another agent for the node a runs here" in nodes.said()
        assert first.is_alive()
        nodes.agents["first"] = first


def test_strangers_at_the_port_hold_up_nobody(tmp_path):
    with Nodes(tmp_path, 2) as nodes:
        nodes.start("a")
        file = nodes.run.path / "agents" / "a.json"
        nodes.until(file.exists)
        import json

        port = nodes.until(lambda: json.loads(file.read_text()).get("port"))
        strangers = []
        for at in range(100):
            stranger = socket.create_connection(("127.0.0.1", port))
            strangers.append(stranger)
            with suppress(OSError):  # of many the oldest are sent away
                stranger.sendall([b"", b"x" * 200_000, b'{"kind":"join"}\n'][at % 3])
        nodes.start("b")
        nodes.until_step(1, world=2, more=8)
        for stranger in strangers:
            stranger.close()
        assert nodes.events("refused") == []


def test_a_program_that_fails_again_and_again_ends_with_its_traceback(tmp_path):
    fails = Behaviour(fail_at=5)
    with Nodes(tmp_path, 2, behaviour=fails, elastic={"min_nodes": 2}) as nodes:
        nodes.start("a", "b")
        assert nodes.codes() == {"a": 1, "b": 1}
        assert "ValueError: the program is wrong" in nodes.said()
        assert "4 losses without a finished step between them" in nodes.said()
        assert nodes.events("end")[-1]["state"] == "failed"


def test_a_node_whose_ranks_die_again_and_again_is_left_out(tmp_path):
    with Nodes(tmp_path, 2, behaviour=Behaviour(fail_at=5)) as nodes:
        nodes.start("a", "b")
        bad = nodes.until(lambda: nodes.events("left_out"))[0]["node"]
        nodes.until_step(3, world=1)
        assert f"{bad} is left out" in nodes.said()
        if nodes.newest()["leader"] == bad:
            nodes.kill_agent(bad)  # it leads on, without ranks
            nodes.until_step(4, world=1)
        else:
            nodes.agents[bad].join(30)
            assert nodes.agents[bad].exitcode == EXIT_LEFT_OUT
        nodes.start(bad)
        nodes.agents[bad].join(30)
        assert nodes.agents[bad].exitcode == EXIT_LEFT_OUT, "it is not taken in again"
        assert nodes.events("refused")


def test_too_few_are_left_the_rest_saves_and_says_what_is_missing(tmp_path):
    with Nodes(tmp_path, 2, elastic={"min_nodes": 2, "wait_s": 2.0}) as nodes:
        nodes.start("a", "b")
        nodes.until_step(1, world=2, more=8)
        leader = nodes.newest()["leader"]
        member = next(name for name in nodes.names() if name != leader)
        nodes.kill_agent(member)
        codes = nodes.codes()
        assert codes[leader] == 75
        assert "1 nodes are here and 2 are needed" in nodes.said()
        assert nodes.events("saved"), "the rest made a checkpoint"


def test_a_return_within_the_wait_goes_on(tmp_path):
    with Nodes(tmp_path, 2, elastic={"min_nodes": 2, "wait_s": 30.0}) as nodes:
        nodes.start("a", "b")
        at = nodes.until_step(1, world=2, more=8)
        nodes.kill_agent("b")
        nodes.until(lambda: "waiting for" in nodes.said())
        time.sleep(0.2)
        nodes.start("b")
        nodes.until_step(at + 1, world=2, more=8)
        nodes.assert_one_history()


def test_a_start_that_has_fewer_nodes_waits_for_no_more(tmp_path):
    """Without being told, it would wait for the third for as long as no test lasts."""
    elastic = {"min_nodes": 1, "wait_s": 3600.0}
    with Nodes(tmp_path, 3, behaviour=Behaviour(num_coming=2), elastic=elastic) as nodes:
        nodes.start("a", "b")
        at = nodes.until_step(1, world=2, more=4)
        nodes.start("c")  # it is taken in all the same
        nodes.until_step(at + 1, world=3, more=4)


@pytest.mark.parametrize("given", ["0", "two", "-1"])
def test_a_number_of_nodes_that_is_none_is_refused(given, monkeypatch):
    monkeypatch.setenv("PACELINE_NUM_NODES", given)
    with pytest.raises(InputError, match="is no number of nodes"):
        num_coming()


def test_a_spare_takes_a_lost_nodes_place(tmp_path):
    with Nodes(tmp_path, 2, elastic={"max_nodes": 2, "spares": 1}) as nodes:
        nodes.start("a", "b", "c")
        at = nodes.until_step(1, world=2, more=8)
        spare = next(name for name in "abc" if name not in nodes.names())
        lost = nodes.names()[1]
        nodes.kill_agent(lost)
        nodes.until_step(at + 1, world=2, more=8)
        assert nodes.names()[1] == spare
        assert nodes.events("decision")[-1]["action"] == "spare"
