"""Hosts as network namespaces, joined by a bridge that stands in a namespace of its own.

How it works: each host is a namespace with one interface, eth0, whose other end is a port of the
bridge. `tc tbf` shapes both ends, so both directions of a link. A host has its own name, which
resolves on all of them, and its share of the machine's cores. The machine's own network is neither
used nor touched; nothing that is sent leaves these namespaces.

Everything is brought down on the way out, whatever way that is: return, exception, Ctrl-C, SIGTERM,
SIGHUP. After a kill -9 the next laboratory sweeps up what it finds (the names carry the maker's
pid). It needs root, `ip`, `tc` (iproute2), `unshare` and `taskset` (util-linux).

It is no model of latency, loss or reordering; and hosts share the machine's memory and disk.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from benchmarks.netlab.ranks import Finished, StartedRanks, entering, place_of
from benchmarks.netlab.wires import (
    Traffic,
    abandoned,
    ip,
    kill_inside,
    remove,
    shape,
    traffic,
)
from paceline.config.errors import InputError

DEVICE = "eth0"
_HOSTS_FILES = Path("/etc/netns")
_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "taskset": "util-linux"}
_TBF = ("tbf", "rate", "1mbit", "burst", "16kb", "latency", "1ms")
_PROBE = ("unshare", "--net", "--uts", "tc", "qdisc", "add", "dev", "lo", "root", *_TBF)
_MOST_HOSTS = 250  # of one /24


def why_not() -> str | None:
    """Why there can be no laboratory here, one sentence; None where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "the network laboratory needs root on Linux: start it as root."
    missing = sorted({package for name, package in _PROGRAMS.items() if not shutil.which(name)})
    if missing:
        packages = " and ".join(missing)
        return f"the network laboratory needs {packages}: apt-get install {' '.join(missing)}."
    refused = subprocess.run(_PROBE, capture_output=True, text=True, timeout=30, check=False)
    if refused.returncode != 0:
        return (
            "the network laboratory needs network namespaces and the queue tbf, which this kernel "
            f"or container refuses ({refused.stderr.strip()}): run it on a machine of your own."
        )
    return None


class Laboratory:
    """Some hosts and the links between them, for as long as the context lasts."""

    def __init__(self, num_hosts: int, rate_bits_per_s: float | None = None) -> None:
        """Describe it; nothing exists before the context is entered.

        Args:
            num_hosts: at least 1.
            rate_bits_per_s: of every link, each way; None: as fast as the machine copies.

        Raises:
            InputError: there can be no laboratory here, or not with so many hosts.
        """
        if problem := why_not():
            raise InputError(problem)
        if not 1 <= num_hosts <= _MOST_HOSTS:
            raise InputError(f"{num_hosts} hosts were asked for: take 1 to {_MOST_HOSTS}.")
        self.num_hosts = num_hosts
        self._rate = rate_bits_per_s
        self._started: list[StartedRanks] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Laboratory":
        sweep()
        self._catch_signals()
        try:
            self._bring_up()
        except BaseException:
            self._bring_down()
            raise
        return self

    def __exit__(self, *_failure: object) -> None:
        self._bring_down()

    def start(
        self,
        command: Sequence[Any],
        *,
        ranks_per_host: int = 1,
        settings: Mapping[str, str] | None = None,
        folder: Path | None = None,
        show_first: bool = False,
        only_on: int | None = None,
    ) -> StartedRanks:
        """Start a program on all hosts, as torchrun would, and don't wait.

        Args:
            command: program and arguments, the same for every rank.
            ranks_per_host: processes on each host.
            settings: environment variables besides this process's own.
            folder: to start in; None: this process's own.
            show_first: let rank 0 write where this process does.
            only_on: the one host whose ranks are started (again), as those of all; None: each.
        """
        places = [
            place_of(rank, self.num_hosts, ranks_per_host, self.address(0), DEVICE)
            for rank in range(self.num_hosts * ranks_per_host)
            if only_on in (None, rank // ranks_per_host)
        ]
        ranks = StartedRanks(
            [str(part) for part in command],
            [(_name(f"host{place.host}"), place) for place in places],
            settings or {},
            folder,
            show_first=show_first,
        )
        self._started.append(ranks)
        return ranks

    def entering(self, host: int) -> list[str]:
        """The words before a command that put it on a host; whoever starts it ends it."""
        place = place_of(host, self.num_hosts, 1, self.address(0), DEVICE)
        return entering(_name(f"host{host}"), place)

    def run(self, command: Sequence[Any], *, timeout_s: float, **how: Any) -> list[Finished]:
        """Start a program on all hosts and wait for all its ranks; `how` is that of `start`."""
        with self.start(command, **how) as ranks:
            return ranks.wait(timeout_s)

    def address(self, host: int) -> str:
        """Of a host's interface."""
        return f"10.77.0.{host + 1}"

    def traffic(self, host: int) -> Traffic:
        """What a host's link has carried since it is up."""
        return traffic(_name(f"host{host}"), DEVICE)

    def set_rate(self, rate_bits_per_s: float | None, host: int | None = None) -> None:
        """Give a host's link another rate, each way; None as host: all of them."""
        for each in range(self.num_hosts) if host is None else (host,):
            shape(_name(f"host{each}"), DEVICE, rate_bits_per_s)
            shape(_name("switch"), f"port{each}", rate_bits_per_s)

    def cut(self, host: int) -> None:
        """Take a host's interface down: what is on its way is lost, connections stay open."""
        ip("link", "set", DEVICE, "down", inside=_name(f"host{host}"))

    def mend(self, host: int) -> None:
        """Bring the interface up again."""
        ip("link", "set", DEVICE, "up", inside=_name(f"host{host}"))

    def clear(self) -> None:
        """Kill everything that runs on the hosts, whoever started it, and bring their links up."""
        for host in range(self.num_hosts):
            kill_inside(_name(f"host{host}"))
            self.mend(host)

    def _bring_up(self) -> None:
        switch = _name("switch")
        ip("netns", "add", switch)
        ip("link", "add", "bridge", "type", "bridge", inside=switch)
        ip("link", "set", "bridge", "addrgenmode", "none", "up", inside=switch)
        for host in range(self.num_hosts):
            self._plug_in(host, switch)
        self.set_rate(self._rate)

    def _plug_in(self, host: int, switch: str) -> None:
        name, port = _name(f"host{host}"), f"port{host}"
        ip("netns", "add", name)
        ends = ("link", "add", DEVICE, "type", "veth", "peer", "name", port, "netns", switch)
        ip(*ends, inside=name)
        # No IPv6: its neighbour discovery would stand in the counters.
        ip("link", "set", port, "addrgenmode", "none", "master", "bridge", "up", inside=switch)
        ip("link", "set", "lo", "up", inside=name)
        ip("address", "add", f"{self.address(host)}/24", "dev", DEVICE, inside=name)
        ip("link", "set", DEVICE, "addrgenmode", "none", "up", inside=name)
        hosts = [f"{self.address(each)} host{each}\n" for each in range(self.num_hosts)]
        folder = _HOSTS_FILES / name  # `ip netns exec` puts its files over those of /etc
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        (folder / "nsswitch.conf").write_text("hosts: files\n")  # no waiting for a name server

    def _bring_down(self) -> None:
        for number in self._before:  # nothing may interrupt it
            signal.signal(number, signal.SIG_IGN)
        for ranks in self._started:  # also those that have yet to enter their namespace
            ranks.kill()
        self._started = []
        for name in [*(f"host{host}" for host in range(self.num_hosts)), "switch"]:
            _forget(_name(name))
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _catch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows no other thread to
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, _leave_in_order)
        self._before[signal.SIGINT] = signal.getsignal(signal.SIGINT)


def sweep() -> list[str]:
    """Remove what laboratories left that were killed, and return the names of it."""
    names = abandoned()
    for name in names:
        _forget(name)
    return names


def _forget(name: str) -> None:
    remove(name)
    shutil.rmtree(_HOSTS_FILES / name, ignore_errors=True)


def _name(what: str) -> str:
    return f"netlab-{os.getpid()}-{what}"


def _leave_in_order(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
