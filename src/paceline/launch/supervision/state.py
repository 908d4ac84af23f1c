"""What stands in the folder of a supervised job: what its supervisor is to do, and how it stands.

supervise.json    orders, written by who submits
supervisor.json   who the supervisor is, the state and the attempts; renewed while it lives
supervisor.log    what it had to say itself, where something went wrong
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from paceline.config import files
from paceline.launch.contract import Attempt, Observation
from paceline.launch.supervision.process import ProcessIdentity

ORDERS, STATE, LOG = "supervise.json", "supervisor.json", "supervisor.log"
RUNNING = "RUNNING"


@dataclass(frozen=True)
class Node:
    """A place where the start script runs."""

    name: str
    prefix: tuple[str, ...] = ()
    """Words before the command of a shell there; none: it is this machine."""


@dataclass(frozen=True)
class Hosts:
    """Nodes by name."""

    nodes: tuple[Node, ...]
    """Any of these, in the order in which they are taken."""
    is_exclusive: bool
    """Whether a node takes one job at a time."""


@dataclass(frozen=True)
class Bundles:
    """Nodes that a Ray cluster chooses."""

    address: str
    resources: dict[str, float]
    """That one node gives, by Ray's names."""
    most: int
    """Machines that there may be, where the site says so; 0: it doesn't."""


@dataclass(frozen=True)
class Orders:
    """What a supervisor is to do; see `contract.Request` for the names that are the same."""

    name: str
    places: Hosts | Bundles
    num_nodes: int
    devices_per_node: int
    min_nodes: int
    time_limit_s: int | None
    grace_s: int
    restarts: int
    after: tuple[str, ...]
    """Folders of jobs that must have finished."""
    at_most: int | None
    group: str


@dataclass(frozen=True)
class Supervised:
    """How a supervised job stands, as its supervisor last wrote."""

    supervisor: ProcessIdentity
    now: Observation
    attempts: tuple[Attempt, ...]


ORDERS_TYPE, STATE_TYPE = TypeAdapter(Orders), TypeAdapter(Supervised)
_CURE = "the job's records are damaged; look at its log, and launch it again"


def read_orders(folder: Path) -> Orders:
    """Those in a job's folder.

    Raises:
        InputError: they can't be read.
    """
    return files.read_json(folder / ORDERS, ORDERS_TYPE, "launch the job again")


def read_state(folder: Path) -> Supervised | None:
    """How a job stands; None: no supervisor ever wrote. One that is gone has lost its job.

    Raises:
        InputError: the record can't be read.
    """
    file = folder / STATE
    if not file.exists():
        return None
    found = files.read_json(file, STATE_TYPE, _CURE)
    who = found.supervisor
    if found.now.state not in ("queued", "running") or not who.is_here or who.is_alive:
        return found
    again = files.read_json(file, STATE_TYPE, _CURE)
    if again.now.state not in ("queued", "running"):
        return again  # it ended in between
    said = f"its supervisor (pid {who.pid} on {who.host}) is gone"
    now = replace(again.now, state="lost", reason=None, said=said, nodes=())
    attempts = tuple(_ended(again.attempts, file.stat().st_mtime))
    return replace(again, now=now, attempts=attempts)


def _ended(attempts: tuple[Attempt, ...], at: float) -> Iterator[Attempt]:
    """Attempts that nobody watches any more end when they were last seen."""
    for one in attempts:
        yield one if one.ended is not None else replace(one, ended=at, state="LOST")
