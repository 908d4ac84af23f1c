"""Nodes that are not as the others: one that comes and is lost again and again, ...

Each oddity is put into the process of one agent; everything else is as in `cluster`.
"""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config.hardware import Cluster
from tests.elastic import cluster
from tests.elastic.cluster import Nodes
from tests.parallel.training import CPU
from tests.ranks import WARM


def _start_odd(nodes: Nodes, name: str, oddity: Any, *args: Any) -> None:
    """Start an agent in whose process a function was called before."""
    own = (name, nodes.folder, nodes.num_nodes, nodes.devices, nodes.behaviour, nodes.elastic)
    agent = WARM.Process(target=_odd_agent, args=(oddity, args, own))
    agent.start()
    nodes.agents[name] = agent


def _odd_agent(oddity: Any, args: tuple[Any, ...], own: tuple[Any, ...]) -> None:
    oddity(*args)
    cluster._agent_main(*own)


def _end_when_taken_in() -> None:
    from paceline.elastic.local_ranks import LocalRanks

    LocalRanks.enter = lambda *_given: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


def test_a_node_that_comes_and_dies_again_and_again_is_left_out(tmp_path):
    with Nodes(tmp_path, 2, elastic={"restarts": 1, "wait_s": 1.0}) as nodes:
        nodes.start("a")
        at = nodes.until_step(1, world=1)
        for _ in range(2):
            _start_odd(nodes, "b", _end_when_taken_in)
            nodes.agents["b"].join(30)
            assert nodes.agents["b"].exitcode == -signal.SIGKILL
            at = nodes.until_step(at + 2, world=1, more=2)
        (left_out,) = nodes.events("left_out")
        assert left_out["node"] == "b"
        assert "lost 2 times with no step finished with it" in left_out["why"]
        nodes.start("b")
        nodes.agents["b"].join(30)
        assert nodes.agents["b"].exitcode == 1
        assert nodes.agents["a"].is_alive()
        nodes.assert_one_history()


# ---- the transfer with a member, before a machine is taken in ------------------------------------


def _check_link(folder: Path) -> None:
    """Let an agent check its link, as one does that joins a run, and note what came back."""
    from paceline.elastic import agent
    from paceline.elastic.check_node import check_transfer

    def check(_node: Any, transfer: Any) -> str | None:
        def noted(block: bytes) -> bytes:
            back = transfer(block)
            (folder / "came back").write_text(str(len(back)))
            return back

        return check_transfer(Cluster(device=CPU, devices_per_node=1, num_nodes=2), noted)

    agent.run_agent = partial(agent.run_agent, check=check)


def _change_parts() -> None:
    from paceline.elastic.wire import StreamChannel

    send = StreamChannel.send

    def changed(self: Any, message: Any) -> None:
        if message["kind"] == "part":
            message = {**message, "data": "AAAA" + message["data"][4:]}
        send(self, message)

    StreamChannel.send = changed  # type: ignore[method-assign]


def _end_at_a_part() -> None:
    from paceline.elastic.wire import StreamChannel

    send = StreamChannel.send

    def ending(self: Any, message: Any) -> None:
        if message["kind"] == "part":
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, message)

    StreamChannel.send = ending  # type: ignore[method-assign]


def test_a_machine_that_comes_sends_some_bytes_to_a_member_and_back(tmp_path):
    with Nodes(tmp_path, 2, elastic={"wait_s": 1.0}) as nodes:
        nodes.start("a")
        nodes.until_step(1, world=1)
        _start_odd(nodes, "b", _check_link, tmp_path)
        nodes.until_step(2, world=2)
        assert (tmp_path / "came back").read_text() == str(8 << 20)


def test_a_machine_whose_bytes_come_back_changed_is_refused(tmp_path):
    with Nodes(tmp_path, 2, elastic={"wait_s": 1.0}) as nodes:
        _start_odd(nodes, "a", _change_parts)
        nodes.until_step(1, world=1)
        _start_odd(nodes, "b", _check_link, tmp_path)
        nodes.agents["b"].join(30)
        assert nodes.agents["b"].exitcode == 1
        assert "came back from a neighbour with other bits" in nodes.events("refused")[0]["check"]
        assert nodes.agents["a"].is_alive()


def test_a_member_that_leaves_during_the_transfer_is_no_refusal(tmp_path):
    with Nodes(tmp_path, 3, elastic={"wait_s": 1.0}) as nodes:
        nodes.start("a")
        nodes.until_step(1, world=1)
        _start_odd(nodes, "c", _end_at_a_part)
        nodes.until_step(2, world=2)  # a leads: the other one is asked
        _start_odd(nodes, "b", _check_link, tmp_path)
        nodes.until(lambda: {"a", "b"} == set(nodes.names()))
        assert nodes.agents["c"].exitcode == -signal.SIGKILL
        assert nodes.events("refused") == []
