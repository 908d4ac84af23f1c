"""Where the nodes of a supervised job come from: a list of hosts, or a placement group of Ray's."""

import asyncio
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Protocol

from paceline.launch.contract import Observation
from paceline.launch.supervision.relay import BUSY, ProcessRelay, Relay
from paceline.launch.supervision.state import Hosts, Node, Orders

# Loaded where it is asked for alone: Ray is an extra.
_RAY = "paceline.launch.engines.ray.placement"


class Places(Protocol):
    """Gives a supervisor its nodes."""

    longest_wait_s: float
    """Between two looks for nodes."""

    async def reach(
        self, num: int, taken: Collection[str], attempt: int
    ) -> tuple[list[Relay], Observation]:
        """Get nodes ready, at most so many. Where it is cancelled, it lets them go again.

        Args:
            num: how many are wanted; they start together, or not at all.
            taken: names of those that the job has.
            attempt: its number.

        Returns:
            nodes that wait for START, and why there are no more.
        """


def places_of(orders: Orders, folder: Path) -> Places:
    """Those of a job.

    Args:
        folder: of the job.

    Raises:
        InputError: they can't be reached at all.
    """
    if isinstance(orders.places, Hosts):
        return HostList(orders.places, folder, orders.grace_s)
    made: Places = import_module(_RAY).PlacementGroups(orders, orders.places, folder)
    return made


class HostList:
    """The first hosts of a list that are ready."""

    longest_wait_s = 15.0

    def __init__(self, hosts: Hosts, folder: Path, grace_s: int) -> None:
        self._hosts, self._folder, self._grace_s = hosts, folder, grace_s

    async def reach(
        self, num: int, taken: Collection[str], attempt: int
    ) -> tuple[list[Relay], Observation]:
        """See `Places`."""
        asked = [node for node in self._hosts.nodes if node.name not in taken]
        opening = [asyncio.ensure_future(self._open(node, attempt)) for node in asked]
        try:
            opened = await asyncio.gather(*opening)
        except asyncio.CancelledError:
            relays = [one.result() for one in opening if one.done() and not one.cancelled()]
            await asyncio.gather(*(relay.close() for relay in relays))
            raise
        ready = [relay for relay in opened if relay.is_ready][:num]
        others = [relay for relay in opened if relay not in ready]
        await asyncio.gather(*(relay.close() for relay in others))
        missing = [relay for relay in others if not relay.is_ready]
        said = "; ".join(f"{relay.name}: {relay.said}" for relay in missing)
        is_busy = any(relay.said == BUSY for relay in missing)
        why = Observation("queued", "resources" if is_busy else "node_down", said=said)
        return list(ready), why

    async def _open(self, node: Node, attempt: int) -> ProcessRelay:
        return await ProcessRelay.open(
            node, self._folder, attempt, self._grace_s, is_exclusive=self._hosts.is_exclusive
        )
