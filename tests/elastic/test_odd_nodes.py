"""Nodes that are not as the others: one that comes and is lost again and again, ...

Each oddity is put into the process of one agent; everything else is as in `cluster`.
"""

import os
import signal
from typing import Any

from tests.elastic import cluster
from tests.elastic.cluster import Nodes
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
