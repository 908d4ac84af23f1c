"""The network laboratory: what it reads (pure), then what it builds and leaves behind (needs root,
iproute2 and network namespaces; plain programs, no torch)."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from benchmarks.netlab import Laboratory, Traffic, rate_text, read_rate, why_not
from benchmarks.netlab.laboratory import sweep
from benchmarks.netlab.ranks import share_of_cores
from benchmarks.netlab.wires import namespaces
from paceline.config.errors import InputError

ROOT = Path(__file__).parents[1]
laboratory = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
pytestmark = pytest.mark.usefixtures("networks_alone")

# Rank 1 says when it began to send to rank 0, which says when it had it all: a clock that they
# share, and a time that whoever waits for a turn makes longer, never shorter.
STREAM = """
import os, socket, time
rank = int(os.environ["RANK"])
if rank == 0:
    server = socket.create_server(("", 5000))
    peer, _ = server.accept()
    while peer.recv(1 << 16):
        pass
    print(time.perf_counter())
else:
    while True:
        try:
            peer = socket.create_connection(("host0", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    print(time.perf_counter())
    peer.sendall(bytes({size}))
"""
SIZE = 6 << 20
PATIENCE_S = 400.0
"""Other tests, and other guests of the machine, may hold the cores for so long."""


def _stream(lab: Laboratory, size: int = SIZE) -> float:
    """Bits per second from host1 to host0: at most what the link lets through."""
    program = STREAM.format(size=size)
    first, second = lab.run([sys.executable, "-c", program], timeout_s=30)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    return size * 8 / (float(first.output) - float(second.output))


def _fastest(lab: Laboratory, enough: float, size: int = SIZE) -> float:
    """The fastest of a few streams, of more while none is fast enough."""
    deadline, streams = time.monotonic() + PATIENCE_S, [_stream(lab, size) for _ in range(3)]
    while max(streams) < enough and time.monotonic() < deadline:
        streams.append(_stream(lab, size))
    return max(streams)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(pids: Iterable[int]) -> bool:
    """Whether all of them end: a process that was killed takes its time to be gone."""
    deadline = time.monotonic() + 5
    while living := [pid for pid in pids if _lives(pid)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
        pids = living
    return True


@pytest.mark.parametrize(
    ("text", "rate"), [("200mbit", 200e6), ("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("none", None)]
)
def test_rates_are_read(text, rate):
    assert read_rate(text) == rate


@pytest.mark.parametrize("text", ["200", "fast", "0mbit", "-1mbit"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(InputError, match="is no rate: write 50mbit"):
        read_rate(text)


def test_rates_are_written():
    assert [rate_text(r) for r in (50e6, 1e9, None)] == ["50 Mbit/s", "1 Gbit/s", "unshaped"]


@pytest.mark.parametrize("num_cores", [1, 2, 3, 8])
@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_hosts_share_the_cores_fairly(num_hosts, num_cores):
    shares = [share_of_cores(range(num_cores), host, num_hosts) for host in range(num_hosts)]
    assert all(shares)
    held = [core for share in shares for core in share]
    assert max(map(held.count, held)) == max(1, -(-num_hosts // num_cores))


def test_traffic_is_counted_from_a_mark():
    assert Traffic(10, 7) - Traffic(4, 5) == Traffic(6, 2)


def test_without_the_programs_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None if name == "tc" else name)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert why_not() == "the network laboratory needs iproute2: apt-get install iproute2."
    with pytest.raises(InputError, match="apt-get install iproute2"):
        Laboratory(2)


@laboratory
def test_a_laboratory_has_hosts_that_know_each_other_and_leaves_nothing(tmp_path):
    links = psutil.net_if_addrs().keys()
    with Laboratory(3) as lab:
        program = "hostname; getent hosts host2; echo $RANK $WORLD_SIZE $LOCAL_RANK; pwd"
        ranks = lab.run(["sh", "-c", program], ranks_per_host=2, timeout_s=20, folder=tmp_path)
        assert [rank.code for rank in ranks] == [0] * 6
        lines = [rank.output.split("\n") for rank in ranks]
        assert [line[0] for line in lines] == ["host0", "host0", "host1", "host1", "host2", "host2"]
        assert lines[3] == ["host1", "10.77.0.3       host2", "3 6 1", str(tmp_path), ""]
        mine = [name for name, pid in namespaces().items() if pid == os.getpid()]
        assert len(mine) == 4
        assert psutil.net_if_addrs().keys() == links, "the root namespace stays as it is"
    assert os.getpid() not in namespaces().values()
    assert not list(Path("/etc/netns").glob(f"netlab-{os.getpid()}-*"))


@laboratory
def test_a_link_has_the_rate_that_was_asked_for_and_counts():
    with Laboratory(2, 100e6) as lab:
        before = lab.traffic(1)
        _stream(lab)
        sent = lab.traffic(1) - before
        assert sent.sent_bytes == pytest.approx(SIZE, rel=0.02)
        assert sent.received_bytes < 0.05 * SIZE
        assert lab.traffic(0).received_bytes == pytest.approx(SIZE, rel=0.02)
        assert 90e6 < _fastest(lab, 90e6) < 110e6
        lab.set_rate(300e6, host=1)  # the other host's link is the slower one now
        assert 90e6 < _fastest(lab, 90e6) < 110e6
        lab.set_rate(300e6)
        assert 270e6 < _fastest(lab, 270e6, 16 << 20) < 330e6
        lab.set_rate(None)
        assert _fastest(lab, 1e9, 64 << 20) > 1e9


@laboratory
def test_a_cut_link_carries_nothing_until_it_is_mended():
    with Laboratory(2, 100e6) as lab:
        program = STREAM.format(size=SIZE)
        with lab.start([sys.executable, "-c", program]) as ranks:
            while lab.traffic(0).received_bytes < 2 << 20:
                time.sleep(0.005)
            lab.cut(1)
            time.sleep(0.1)  # what the switch still held
            before = lab.traffic(0)
            time.sleep(0.4)
            assert (lab.traffic(0) - before).received_bytes < 1000
            assert ranks.are_running
            lab.mend(1)
            assert [rank.code for rank in ranks.wait(20)] == [0, 0]


@laboratory
def test_ranks_that_hang_are_killed_with_their_children():
    with Laboratory(1) as lab:
        (rank,) = lab.run(["sh", "-c", "echo $$; sleep 60 & echo $!; wait"], timeout_s=0.5)
        assert rank.code == -signal.SIGKILL
        assert _end(int(pid) for pid in rank.output.split())


# Jobs that a shell has put into the background ignore SIGINT, and so would this one under them.
BUSY = """
import signal, subprocess, sys
from benchmarks.netlab import Laboratory
signal.signal(signal.SIGINT, signal.default_int_handler)
with Laboratory(2) as lab:
    ranks = lab.start(["sh", "-c", "sleep 60"])
    print("up", flush=True)
    ranks.wait(60)
"""


def _busy_laboratory() -> subprocess.Popen:
    command = [sys.executable, "-c", BUSY]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def _inside(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@laboratory
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_laboratory_leaves_nothing(number):
    with _busy_laboratory() as process:
        ranks = _inside(process.pid)
        process.send_signal(number)
        process.wait(20)
    assert ranks
    assert process.pid not in namespaces().values()
    assert _end(rank.pid for rank in ranks)


@laboratory
def test_ranks_that_have_yet_to_enter_their_host_are_killed_too(monkeypatch):
    """They are not in the namespace that is emptied on the way out."""
    monkeypatch.setattr("benchmarks.netlab.ranks.entering", lambda *_: ["env"])  # so they never do
    with Laboratory(1) as lab:
        ranks = lab.start(["sleep", "60"])
        assert ranks.are_running
    with ranks:
        assert not ranks.are_running


@laboratory
def test_what_a_killed_laboratory_left_is_swept_up_by_the_next():
    with _busy_laboratory() as process:
        ranks = _inside(process.pid)
        process.kill()
    assert process.pid in namespaces().values()
    assert any(_lives(rank.pid) for rank in ranks)
    with Laboratory(1) as lab:
        assert process.pid not in namespaces().values()
        assert list(namespaces().values()).count(os.getpid()) == 2, "its own stays"
        assert sweep() == []
        assert lab.traffic(0).sent_bytes == 0
    assert _end(rank.pid for rank in ranks)


@laboratory
def test_the_command_runs_a_program_and_says_what_crossed_the_links():
    program = "test $RANK = 0 && echo hello || exit 3"
    command = [sys.executable, "-m", "benchmarks.netlab", "--rate", "1gbit", "--", "sh", "-c"]
    done = subprocess.run(
        [*command, program], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "hello\n"
    assert done.returncode == 3
    assert "rank 1 on host1 ended with 3" in done.stderr
    assert "host1: 0 bytes sent" in done.stderr
