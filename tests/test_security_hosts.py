"""A run on two hosts, attacked by whoever reaches their network: no code is run, and the run goes
on or ends in one sentence.

The hosts are two addresses of this machine, and where there can be a laboratory (root, iproute2)
two namespaces, with the attacker on a third. What is open there stands in docs/security.md.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.netlab import Laboratory, why_not
from tests.command_line import COMMAND, Started, environment, metrics, write_tiny_job
from tests.test_security import ENDLESS, PATIENCE_S, REPOSITORY, WORKERS, attack, free_port

STORE_HOST = "127.0.0.2"
"""An address of the loopback interface beside the usual one."""
RUNS = {
    "ranks": ("comm.timeout_s=20",),
    "workers": (*WORKERS, "comm.timeout_s=20", "checkpoint.every=4000"),
}


def _program(kind: str) -> list[str]:
    return ["train", "job.toml", ENDLESS, *(f"--set={each}" for each in RUNS[kind])]


def _until_it_trains(folder: Path, has_ended) -> None:
    while len(metrics(folder)) < 3:
        assert not has_ended()
        time.sleep(0.02)


def _listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports on which anybody listens on the host of a process (IPv4)."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    found = set()
    for _, local, _, state, *_ in map(str.split, lines):
        address, port = local.split(":")
        if state == "0A":
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def _own(pid: int) -> set[tuple[str, int]]:
    """The same, of a process itself and not of its host."""
    sockets = psutil.Process(pid).net_connections("inet")
    return {tuple(one.laddr) for one in sockets if one.status == psutil.CONN_LISTEN}


def _assert_unharmed(folder: Path, codes: list[int], outputs: list[str], told: str) -> None:
    assert not (folder / "canary").exists(), told
    for code, output in zip(codes, outputs, strict=True):
        assert code in (0, 1), output
        assert "Traceback" not in output, output
        if code:
            assert output.strip().splitlines()[-1].endswith("."), output
    logs = [file.read_text() for file in (folder / "runs/tiny/log").glob("rank*.log")]
    assert "unpickl" not in "".join(logs).lower()


@contextmanager
def _two_tasks(folder: Path, kind: str) -> Iterator[list[Started]]:
    place = {"MASTER_ADDR": STORE_HOST, "MASTER_PORT": str(free_port())}
    place |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    place |= {"GLOO_SOCKET_IFNAME": "lo"}
    program = [COMMAND, *_program(kind)]
    tasks = [Started(program, folder, 1, {**place, "RANK": str(rank)}) for rank in range(2)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has more than one loopback address")
@pytest.mark.parametrize("kind", RUNS)
def test_the_store_of_two_hosts_listens_at_its_address_and_runs_nobodys_code(kind, tmp_path):
    write_tiny_job(tmp_path)
    with _two_tasks(tmp_path, kind) as tasks:
        _until_it_trains(tmp_path, lambda: any(task.poll() is not None for task in tasks))
        first, second = (_own(task.pid) for task in tasks)
        stores = {end for end in first if end[0] == STORE_HOST}
        assert len(stores) == 1, "the first rank keeps it, at the address it was told"
        assert {address for address, _ in (first | second) - stores} <= {"127.0.0.1"}
        told = attack(tmp_path / "canary", [f"{host}:{port}" for host, port in first | second])
        assert f"{STORE_HOST} {next(iter(stores))[1]} planted ['" in told
        for task in tasks:
            if task.poll() is None:
                os.kill(task.pid, signal.SIGTERM)
        outputs = [task.communicate(PATIENCE_S)[0] for task in tasks]
    _assert_unharmed(tmp_path, [task.returncode for task in tasks], outputs, told)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.usefixtures("networks_alone")
def test_a_third_host_on_the_network_of_a_run_has_no_code_run(tmp_path):
    write_tiny_job(tmp_path)
    program = [sys.executable, "-m", "paceline", *_program("workers")]
    settings = {**environment(tmp_path), "WORLD_SIZE": "2"}
    with Laboratory(3) as lab, ExitStack() as stack:
        both = [
            stack.enter_context(
                lab.start(program, settings=settings, folder=tmp_path, only_on=host)
            )
            for host in (0, 1)
        ]
        _until_it_trains(tmp_path, lambda: not all(each.are_running for each in both))
        pids = [
            child.pid
            for child in psutil.Process().children(recursive=True)
            if "paceline" in child.cmdline() and "train" in child.cmdline()
        ]
        listening = set().union(*map(_listening, pids))
        assert {address for address, _ in listening} <= {lab.address(0), lab.address(1)}
        ends = [f"{host}:{port}" for host, port in listening]
        attacker = [sys.executable, "-m", "tests.attacker", tmp_path / "canary", *ends]
        (attacked,) = lab.run(attacker, timeout_s=PATIENCE_S, folder=REPOSITORY, only_on=2)
        assert attacked.code == 0, attacked.output
        assert " planted ['" in attacked.output
        (tmp_path / "runs/tiny/stop").touch()
        ended = [rank for each in both for rank in each.wait(PATIENCE_S)]
    codes, outputs = [rank.code for rank in ended], [rank.output for rank in ended]
    _assert_unharmed(tmp_path, codes, outputs, attacked.output)
