"""A generation: who trains together, from one loss or return to the next, and as what.

Every start, loss and return makes a new one. Its number is claimed by making its file in the Run
directory, which only one process can do: so of two halves of a split network at most one goes on,
and the number never depends on a launcher's count of restarts. Its process groups meet under a
prefix of their own in a store of their own.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.config.errors import InputError
from paceline.config.job import Job


@dataclass(frozen=True)
class Node:
    """A machine of the run, as its agent tells of it."""

    name: str
    """Of the host, or PACELINE_NODE: one agent each."""
    incarnation: str
    """Of its agent: another one with every start."""
    address: str
    port: int
    """Where the agent listens."""
    num_devices: int


@dataclass(frozen=True)
class Generation:
    """Who trains together, and as what."""

    number: int
    """From 1."""
    leader: str
    """Name of the node whose agent claimed it and keeps its store."""
    nodes: tuple[Node, ...]
    """Those that train in order of rank, then spares."""
    num_active: int
    """So many of `nodes` train."""
    job: dict[str, Any]
    """The Job of these nodes, concrete, as `to_raw` gives it."""
    store: tuple[str, int]
    """Host and port where its ranks meet."""
    reason: str
    """Why the one before ended, a sentence; "start" for the first."""
    time: float
    """Unix time of the claim."""
    budget: dict[str, Any] = field(default_factory=dict)
    """What was used of `elastic.budget.Budget`."""
    helpers: tuple[tuple[str, int], ...] = ()
    """Processes (node, local rank) that no longer train and hand over what they hold of the
    state; they are numbered on from the ranks."""

    @property
    def active(self) -> tuple[Node, ...]:
        """The nodes that train."""
        return self.nodes[: self.num_active]

    @cached_property
    def num_ranks(self) -> int:
        """Those of the layout: the first so many devices of the active nodes, in order."""
        return self.concrete_job().layout.num_ranks

    @property
    def nodes_together(self) -> int:
        """Neighbours among `nodes` that step together: all, but under local updates those of a
        worker."""
        job = self.concrete_job()
        return -(-job.step_layout.num_ranks // job.cluster.devices_per_node)

    def concrete_job(self) -> Job:
        """The Job that its ranks run."""
        return Job.parse(self.job)

    def first_rank(self, node: str) -> int:
        """The number of a node's first rank."""
        before = 0
        for one in self.active:
            if one.name == node:
                return before
            before += one.num_devices
        raise KeyError(node)

    def ranks_of(self, node: str) -> range:
        """The ranks that a node holds; none of a spare, or of one that isn't in it."""
        if node not in {one.name for one in self.active}:
            return range(0)
        first = self.first_rank(node)
        count = next(one.num_devices for one in self.active if one.name == node)
        return range(min(first, self.num_ranks), min(first + count, self.num_ranks))

    def number_of(self, node: str, local_rank: int) -> int | None:
        """The rank that a process of a node is, or its number as a helper; None: neither."""
        ranks = self.ranks_of(node)
        if local_rank < len(ranks):
            return ranks[local_rank]
        one = (node, local_rank)
        return self.num_ranks + self.helpers.index(one) if one in self.helpers else None

    def place_of(self, number: int) -> tuple[str, int] | None:
        """Node and local rank of a rank, or of a helper by its number; None: it has no such."""
        for node in self.active:
            ranks = self.ranks_of(node.name)
            if number in ranks:
                return node.name, number - ranks.start
        at = number - self.num_ranks
        return self.helpers[at] if 0 <= at < len(self.helpers) else None

    def claim(self, folder: Path) -> bool:
        """Make its file; False: another process has claimed the number.

        Args:
            folder: of generations, in the Run directory; may not exist yet.
        """
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{self.number}-{self.leader}-{os.getpid()}"
        try:
            draft.write_text(json.dumps(asdict(self)))
            os.link(draft, folder / f"{self.number}.json")  # atomic, on NFS as well
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        return True


def newest_number(folder: Path) -> int:
    """Of the generations that were claimed; 0: none was."""
    numbers = [int(file.stem) for file in folder.glob("*.json") if file.stem.isdecimal()]
    return max(numbers, default=0)


def generation_of(raw: Mapping[str, Any]) -> Generation:
    """One from what `asdict` made of it, or a file or a message holds.

    Raises:
        ValueError, TypeError, KeyError: it holds something else.
    """
    nodes = tuple(Node(**node) for node in raw["nodes"])
    host, port = raw["store"]
    helpers = tuple((str(node), int(local)) for node, local in raw.get("helpers", ()))
    return Generation(
        **{**raw, "nodes": nodes, "store": (str(host), int(port)), "helpers": helpers}
    )


def read_generation(folder: Path, number: int) -> Generation:
    """One that was claimed.

    Raises:
        InputError: its file is damaged.
    """
    file = folder / f"{number}.json"
    try:
        return generation_of(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{file} is damaged ({error}): stop the run, remove the folder {folder} and start it "
            "again; it goes on from its newest checkpoint."
        ) from None
