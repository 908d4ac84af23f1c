"""Nodes that are not as the others: that come and are lost again and again, whose bytes change on
their way, whose clock jumps, whose store is slow, whose disk is full, that sleep, that are slow.

Each oddity is put into the process of one agent; everything else is as in `cluster`.
"""

import itertools
import os
import resource
import signal
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from paceline.config.errors import EXIT_LEFT_OUT
from paceline.config.hardware import Cluster
from paceline.elastic.agent import _began_s
from tests.elastic import cluster
from tests.elastic.cluster import Behaviour, Nodes
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
        assert nodes.agents["b"].exitcode == EXIT_LEFT_OUT
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
        assert nodes.agents["b"].exitcode == EXIT_LEFT_OUT
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


# ---- clocks, stores, disks -----------------------------------------------------------------------


def _jump(hours: float) -> None:
    """Let the clock of this process be another one from its fiftieth look on."""
    real, looks = time.time, itertools.count()
    time.time = lambda: real() + (3600 * hours if next(looks) > 50 else 0)
    boot_time = psutil._pslinux.boot_time
    # What the kernel tells of processes and of the host moves with its clock.
    psutil._pslinux.boot_time = lambda: boot_time() + 3600 * hours


def test_a_process_began_when_it_did_whatever_the_clock_says(monkeypatch):
    before = _began_s(psutil.Process())
    boot_time = psutil._pslinux.boot_time
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_time() + 3600)
    assert abs(_began_s(psutil.Process()) - before) <= 2


@pytest.mark.parametrize("hours", [1, -1])
def test_a_clock_that_jumps_by_an_hour_changes_nothing(hours, tmp_path):
    with Nodes(tmp_path, 2) as nodes:
        nodes.start("a")
        _start_odd(nodes, "b", _jump, hours)
        at = nodes.until_step(1, world=2, more=8)
        assert at == 1
        for name in ("b", "a"):
            nodes.remember()
            os.kill(nodes.rank_pids(name)[0], signal.SIGKILL)
            at = nodes.until_step(at + 1, world=2, more=8)
        assert at == 3
        nodes.kill_agent(nodes.newest()["leader"])
        nodes.until_step(4, world=1, more=8)
        assert [loss["class"] for loss in nodes.events("lost")] == ["dead"] * 3
        nodes.assert_one_history()


def _slow_store(delay_s: float) -> None:
    """Let all that this process's stores answer come so much later."""
    from paceline.elastic import leader

    def hold(host: str, _port: int) -> Any:
        store = hold_store(host, 0)
        server = socket.create_server((host, 0))
        threading.Thread(target=_relay_all, args=(server, host, store.port), daemon=True).start()
        return SimpleNamespace(port=server.getsockname()[1], store=store, server=server)

    hold_store, leader.hold_store = leader.hold_store, hold

    def _relay_all(server: socket.socket, host: str, port: int) -> None:
        while True:
            asking, store = server.accept()[0], socket.create_connection((host, port))
            for pair, wait_s in (((asking, store), 0.0), ((store, asking), delay_s)):
                threading.Thread(target=_relay, args=(*pair, wait_s), daemon=True).start()

    def _relay(source: socket.socket, sink: socket.socket, wait_s: float) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(wait_s)
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def test_a_store_that_answers_slowly_costs_time_and_nobody(tmp_path):
    with Nodes(tmp_path, 2) as nodes:
        for name in ("a", "b"):
            _start_odd(nodes, name, _slow_store, 0.2)
        at = nodes.until_step(1, world=2, more=8)
        nodes.remember()
        os.kill(nodes.rank_pids(nodes.names()[1])[0], signal.SIGKILL)
        assert nodes.until_step(at + 1, world=2, more=8) == at + 1
        assert [loss["class"] for loss in nodes.events("lost")] == ["dead"]
        nodes.assert_one_history()


def _full_from(generation: int) -> None:
    """Let the disk take no byte of a generation from this one on."""
    from paceline.elastic.generation import Generation

    claim = Generation.claim

    def limited(self: Generation, folder: Path) -> bool:
        most = 0 if self.number >= generation else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        try:
            return claim(self, folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

    Generation.claim = limited  # type: ignore[method-assign]


def test_a_full_disk_ends_the_run_with_what_to_do_and_it_can_be_started_again(tmp_path):
    with Nodes(tmp_path, 2) as nodes:
        for name in ("a", "b"):
            _start_odd(nodes, name, _full_from, 2)
        nodes.until_step(1, world=2, more=8)
        nodes.remember()
        os.kill(nodes.rank_pids(nodes.names()[1])[0], signal.SIGKILL)
        assert nodes.codes() == {"a": 75, "b": 75}
        assert "can't be written (File too large): make room, start it again." in nodes.said()
        assert [file.name for file in (nodes.run.path / "generations").iterdir()] == ["1.json"]
    with Nodes(tmp_path, 2) as again:
        again.start("a", "b")
        again.until_step(2, world=2)


def test_an_old_agent_that_wakes_after_the_end_of_the_run_ends_as_it_did(tmp_path):
    with Nodes(tmp_path, 3, behaviour=Behaviour(steps=200), elastic={"wait_s": 3.0}) as nodes:
        nodes.start("a", "b", "c")
        nodes.until_step(1, world=3, more=8)
        old = next(name for name in nodes.names() if name != nodes.newest()["leader"])
        os.kill(nodes.agents[old].pid, signal.SIGSTOP)
        others = {"a", "b", "c"} - {old}
        nodes.until(lambda: not any(nodes.agents[name].is_alive() for name in others))
        claimed = len(nodes.generations())
        os.kill(nodes.agents[old].pid, signal.SIGCONT)
        assert nodes.codes() == {"a": 0, "b": 0, "c": 0}
        assert len(nodes.generations()) == claimed
        assert f"the run went on without {old}, and has ended." in nodes.said()
        nodes.assert_one_history()


# ---- slow nodes ----------------------------------------------------------------------------------


def _say_slow() -> None:
    """Let a rank of this node say that it is slow, once."""
    from paceline.elastic.local_ranks import LocalRanks

    hear, has_said = LocalRanks._hear, []

    def heard(self: LocalRanks, one: Any, message: Any) -> None:
        hear(self, one, message)
        if message["kind"] == "stepped" and not has_said:
            has_said.append(True)
            hear(self, one, {**message, "kind": "slow", "text": "this rank is slow."})

    LocalRanks._hear = heard  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("elastic", "names"),
    [({"spares": 1}, "abc"), ({"replace_slow": True}, "ab")],
    ids=["nobody asked for that", "there is no spare"],
)
def test_a_slow_rank_is_reported_and_stays(elastic, names, tmp_path):
    with Nodes(tmp_path, 2, elastic=elastic) as nodes:
        for name in names:
            _start_odd(nodes, name, _say_slow)
        nodes.until_step(1, world=2)
        nodes.until(lambda: len(nodes.events("lost")) == 2)
        before = len(nodes.steps())
        nodes.until(lambda: len(nodes.steps()) > before + 20)
        assert {loss["class"] for loss in nodes.events("lost")} == {"slow"}
        assert nodes.events("left_out") == []
        assert len(nodes.generations()) == 1


def _be_cut_off(folder: Path, sees_stale_files: bool) -> None:
    """While a file is there, this agent and the others don't hear each other. Before it leads, the
    others claim; with stale files it sees that, and takes their leader for gone."""
    from paceline.elastic import agent

    cut = folder / "cut"
    dial = agent.dial

    async def dial_while_whole(*given: Any) -> Any:
        if cut.exists():
            raise TimeoutError
        channel = await dial(*given)
        receive = channel.receive

        async def receive_while_whole() -> Any:
            message = await receive()
            return None if cut.exists() else message

        channel.receive = receive_while_whole  # type: ignore[method-assign]
        return channel

    def look_before_the_others_claim(self: Any) -> int:
        while agent.newest_number(self._generations) == self._number:
            time.sleep(0.01)
        return agent.newest_number(self._generations) if sees_stale_files else self._number

    agent.dial = dial_while_whole
    agent.Agent._newest_is_over = look_before_the_others_claim  # type: ignore[method-assign]


@pytest.mark.parametrize("sees_stale_files", [False, True])
def test_of_two_sides_that_lead_one_ends(tmp_path, sees_stale_files):
    """One who looked before the others claimed had claimed the number after theirs, and both sides
    trained until the end."""
    ends = "a" if sees_stale_files else "b"
    with Nodes(tmp_path, 2, elastic={"wait_s": 1.0}) as nodes:
        nodes.start("a")
        nodes.until_step(1, world=1)
        _start_odd(nodes, "b", _be_cut_off, tmp_path, sees_stale_files)
        at = nodes.until_step(1, world=2)
        (tmp_path / "cut").touch()
        nodes.until(lambda: nodes.newest()["number"] > at and "leads no more" in nodes.said())
        assert f"{ends} leads no more: generation" in nodes.said()
        (tmp_path / "cut").unlink()
        nodes.until_step(at + 1, world=2, more=2)
        if not sees_stale_files:
            assert {one["leader"] for one in nodes.generations()} == {"a"}
            nodes.assert_one_history()
