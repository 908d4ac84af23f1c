"""The ranks of a program on a laboratory's hosts: started as torchrun would, and waited for."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Gives the process a host name of its own before it becomes the program.
_NAMED = 'echo "$1" > /proc/sys/kernel/hostname; shift; exec "$@"'
_PORT = 29500  # free: nobody else is in these namespaces


@dataclass(frozen=True)
class Place:
    """Where a rank runs, and as what."""

    host: int
    rank: int
    cores: tuple[int, ...]
    environment: dict[str, str]


@dataclass(frozen=True)
class Finished:
    """How a rank ended."""

    rank: int
    host: int
    code: int
    """Exit code; the negative number of a signal that killed it."""
    output: str
    """What it wrote to stdout and stderr, unless it was shown."""
    lived_s: float


def place_of(
    rank: int, num_hosts: int, ranks_per_host: int, first_address: str, device: str
) -> Place:
    """What a launcher would tell a rank."""
    host, local_rank = divmod(rank, ranks_per_host)
    environment = {
        "RANK": rank,
        "WORLD_SIZE": num_hosts * ranks_per_host,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": ranks_per_host,
        "MASTER_ADDR": first_address,
        "MASTER_PORT": _PORT,
        "GLOO_SOCKET_IFNAME": device,
        "NCCL_SOCKET_IFNAME": device,
    }
    cores = share_of_cores(sorted(os.sched_getaffinity(0)), host, num_hosts)
    return Place(host, rank, cores, {key: str(value) for key, value in environment.items()})


def share_of_cores(cores: Sequence[int], host: int, num_hosts: int) -> tuple[int, ...]:
    """A host's own cores where there are enough; otherwise hosts take turns."""
    each = len(cores) // num_hosts
    if each == 0:
        return (cores[host % len(cores)],)
    return tuple(cores[host * each : (host + 1) * each])


class StartedRanks:
    """The processes of one start, killed with the context."""

    def __init__(
        self,
        command: Sequence[str],
        places: Sequence[tuple[str, Place]],
        settings: Mapping[str, str],
        folder: Path | None,
        *,
        show_first: bool,
    ) -> None:
        """Start a rank at each place; a place comes with the name of its host's namespace."""
        self._places = [place for _, place in places]
        self._outputs = [tempfile.TemporaryFile("w+", errors="replace") for _ in places]  # noqa: SIM115
        self._began = time.monotonic()
        self._ended_s: dict[int, float] = {}
        self._processes = [
            subprocess.Popen(
                [*entering(namespace, place), *command],
                stdin=subprocess.DEVNULL,
                stdout=None if show_first and place.rank == 0 else output,
                stderr=None if show_first and place.rank == 0 else subprocess.STDOUT,
                env={**os.environ, **place.environment, **settings},
                cwd=folder,
                start_new_session=True,  # as torchrun's workers: their own share of the cores
            )
            for (namespace, place), output in zip(places, self._outputs, strict=True)
        ]

    def __enter__(self) -> "StartedRanks":
        return self

    def __exit__(self, *_failure: object) -> None:
        self.kill()
        for output in self._outputs:
            output.close()

    @property
    def are_running(self) -> bool:
        """Whether no rank has ended yet."""
        return all(process.poll() is None for process in self._processes)

    def wait(self, timeout_s: float) -> list[Finished]:
        """Wait for every rank; those that still run after `timeout_s` are killed."""
        deadline = time.monotonic() + timeout_s
        while len(self._ended_s) < len(self._processes) and time.monotonic() < deadline:
            self._look()
            time.sleep(0.02)
        self.kill()
        self._look()
        return [self._finished(number) for number in range(len(self._places))]

    def kill(self, rank: int | None = None) -> None:
        """Kill a rank with what it started, or all of them."""
        for place, process in zip(self._places, self._processes, strict=True):
            if rank in (None, place.rank) and process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _look(self) -> None:
        for place, process in zip(self._places, self._processes, strict=True):
            if process.poll() is not None:
                self._ended_s.setdefault(place.rank, time.monotonic() - self._began)

    def _finished(self, number: int) -> Finished:
        place, output = self._places[number], self._outputs[number]
        output.seek(0)
        code = self._processes[number].returncode
        return Finished(place.rank, place.host, code, output.read(), self._ended_s[place.rank])


def entering(namespace: str, place: Place) -> list[str]:
    """The words before a command that put it on a host: each becomes the next, none stays."""
    named = ("unshare", "--uts", "sh", "-c", _NAMED, "sh", f"host{place.host}")
    cores = ",".join(map(str, place.cores))
    return ["ip", "netns", "exec", namespace, *named, "taskset", "-c", cores]
