"""Namespaces and links: thin functions over `ip` (iproute2) and `tc`.

Rates hold for what is longer than the token bucket: a payload below 256 KiB passes at once, from
about 1 MiB on the rate is true. There is no latency: the kernels this was written on have no netem.
Counters are those of the interface. Segments that the kernel sends as one (GSO) count one header,
so they are the payload and about 0.1 % of it, not the 4 % that headers take on a cable.
"""

import json
import os
import re
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from paceline.config.errors import InputError

BURST_BYTES = 256 * 1024
"""Of the token bucket: smaller ones cut the rate short at 1 Gbit/s and above."""
# A switch's queue: longer ones fill up with minutes of gradients, shorter ones drop at 50 Mbit/s.
_QUEUE_MS = 200
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_NAME = re.compile(r"netlab-(\d+)-\w+")


@dataclass(frozen=True)
class Traffic:
    """What a host's link has carried."""

    sent_bytes: int
    received_bytes: int

    def __sub__(self, before: "Traffic") -> "Traffic":
        return Traffic(
            self.sent_bytes - before.sent_bytes, self.received_bytes - before.received_bytes
        )


def read_rate(text: str) -> float | None:
    """Bits per second of "200mbit" or "1gbit"; None for "none", an unshaped link.

    Raises:
        InputError: it is neither.
    """
    if text == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    if found is None or float(found[1]) == 0:
        raise InputError(f'--rate {text} is no rate: write 50mbit, 1gbit, or "none" for no limit.')
    return float(found[1]) * _UNITS[found[2]]


def rate_text(rate_bits_per_s: float | None) -> str:
    """A rate for tables: "200 Mbit/s"."""
    if rate_bits_per_s is None:
        return "unshaped"
    size, unit = (1e9, "Gbit/s") if rate_bits_per_s >= 1e9 else (1e6, "Mbit/s")
    return f"{rate_bits_per_s / size:g} {unit}"


def ip(*arguments: str, inside: str | None = None) -> str:
    """Run `ip`, inside a namespace where one is named, and return what it printed."""
    return _run("ip", *(("-n", inside) if inside else ()), *arguments)


def shape(inside: str, device: str, rate_bits_per_s: float | None) -> None:
    """Limit what leaves an interface; None: no limit."""
    with suppress(WireError):  # there may be none yet
        _run("tc", "-n", inside, "qdisc", "del", "dev", device, "root")
    if rate_bits_per_s is None:
        return
    bucket = ("rate", f"{rate_bits_per_s:.0f}bit", "burst", f"{BURST_BYTES}b")
    tbf = ("root", "tbf", *bucket, "latency", f"{_QUEUE_MS}ms")
    _run("tc", "-n", inside, "qdisc", "add", "dev", device, *tbf)


def traffic(inside: str, device: str) -> Traffic:
    """The counters of an interface."""
    (link,) = json.loads(ip("-s", "-j", "link", "show", "dev", device, inside=inside))
    stats: dict[str, Any] = link["stats64"]
    return Traffic(stats["tx"]["bytes"], stats["rx"]["bytes"])


def namespaces() -> dict[str, int]:
    """The namespaces of all laboratories: name -> pid of the process that made it."""
    listed = json.loads(ip("-j", "netns", "list") or "[]")
    found = (_NAME.fullmatch(entry["name"]) for entry in listed)
    return {match[0]: int(match[1]) for match in found if match}


def remove(name: str) -> None:
    """Kill what runs in a namespace of a laboratory, and delete it with its interfaces."""
    kill_inside(name)
    with suppress(WireError):  # somebody else swept it
        ip("netns", "del", name)


def kill_inside(name: str) -> None:
    """Kill what runs in a namespace of a laboratory."""
    with suppress(WireError):
        for pid in ip("netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def abandoned() -> list[str]:
    """Namespaces whose maker was killed before it could remove them."""
    return [name for name, pid in namespaces().items() if not psutil.pid_exists(pid)]


class WireError(Exception):
    """`ip` or `tc` refused: the text is its own."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise WireError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
