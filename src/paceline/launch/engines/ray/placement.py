"""A job's placement group: so many bundles on as many machines, all or none.

It waits in Ray's queue until all of it is there. Where a machine is lost, Ray finds another one for
its bundle as soon as there is one, and the job takes that. It is given back when the job's command
has ended on all nodes; with the supervisor's process it goes in any case.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from paceline.launch.contract import Observation
from paceline.launch.engines.ray import node
from paceline.launch.engines.ray.connection import connect
from paceline.launch.supervision.relay import Relay, relay_command
from paceline.launch.supervision.state import Bundles, Orders

_WAIT_S, _LOOK_S = 5.0, 0.1
_GONE_S = 10.0


class PlacementGroups:
    """See `supervision.places.Places`: one group for each attempt.

    Raises:
        InputError: the cluster can't be reached.
    """

    longest_wait_s = 0.25  # `reach` waits itself

    def __init__(self, orders: Orders, bundles: Bundles, folder: Path) -> None:
        self._orders, self._bundles, self._folder = orders, bundles, folder
        self._ray = connect(bundles.address)
        self._ray.cloudpickle.register_pickle_by_value(node)
        self._group: Any = None
        self._used: dict[int, RayRelay] = {}
        """By the number of a bundle."""

    async def reach(
        self, num: int, taken: Collection[str], attempt: int
    ) -> tuple[list[Relay], Observation]:
        """See `Places`."""
        from ray.util.placement_group import placement_group

        if self._group is None:
            self._group = placement_group(
                [dict(self._bundles.resources) for _ in range(num)],
                strategy="STRICT_SPREAD",
                name=f"paceline {self._orders.name}",
            )
        if not await self._is_placed():
            return [], Observation("queued", "resources", said=self._why())
        free = [at for at in range(len(self._group.bundle_specs)) if at not in self._used][:num]
        opened = [self._relay(at, attempt) for at in free]
        try:
            await asyncio.gather(*(relay.until_ready() for relay in opened))
        except asyncio.CancelledError:
            await asyncio.gather(*(relay.close() for relay in opened))
            raise
        missing = [relay for relay in opened if not relay.is_ready]
        await asyncio.gather(*(relay.close() for relay in missing))
        said = "; ".join(f"{relay.name}: {relay.said}" for relay in missing)
        ready: list[Relay] = [relay for relay in opened if relay.is_ready]
        return ready, Observation("queued", "node_down", said=said)

    async def _is_placed(self) -> bool:
        """Whether all bundles have their machines, after a moment at most."""
        from ray.util.placement_group import placement_group_table

        until = time.monotonic() + _WAIT_S
        while placement_group_table(self._group)["state"] != "CREATED":
            if time.monotonic() > until:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    def _why(self) -> str:
        free = self._ray.available_resources()
        wanted = ", ".join(f"{key} {value:g}" for key, value in self._bundles.resources.items())
        have = ", ".join(f"{key} {free.get(key, 0.0):g}" for key in self._bundles.resources)
        return f"{self._orders.num_nodes} nodes of {wanted} are wanted; free in all: {have}"

    def _relay(self, at: int, attempt: int) -> "RayRelay":
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        others = dict(self._bundles.resources)
        actor = (
            self._ray.remote(node.NodeActor)
            .options(
                num_cpus=others.pop("CPU", 0.0),
                num_gpus=others.pop("GPU", 0.0),
                resources=others,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=at
                ),
            )
            .remote()
        )

        def words(name: str) -> list[str]:
            grace_s = self._orders.grace_s
            return relay_command(self._folder, attempt, name, grace_s, is_exclusive=False)

        relay = RayRelay(at, self._ray, actor, words, partial(self._let_go, at))
        self._used[at] = relay
        return relay

    def _let_go(self, at: int) -> None:
        self._used.pop(at, None)
        if not self._used:
            self._give_back()

    def _give_back(self) -> None:
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            with suppress(self._ray.exceptions.RayError):
                remove_placement_group(self._group)
            self._group = None


class RayRelay(Relay):
    """Of an actor.

    Args:
        at: the number of its bundle.
        words: the relay's command, given the node's name.
        on_close: is called when it is let go.
    """

    def __init__(
        self,
        at: int,
        ray: Any,
        actor: Any,
        words: Callable[[str], list[str]],
        on_close: Callable[[], None],
    ) -> None:
        self._at, self._ray, self._actor = at, ray, actor
        self._words, self._on_close = words, on_close
        self._is_open = self._is_closed = False
        super().__init__(f"bundle-{at}")

    def tell(self, word: str) -> None:
        """See `Relay`."""
        self._actor.tell.remote(word)

    async def close(self) -> None:
        """See `Relay`."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(self._ray.exceptions.RayError, TimeoutError):
            await asyncio.wait_for(self._actor.close.remote(), _GONE_S)
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor)
        self._on_close()

    async def _line(self) -> str | None:
        try:
            if not self._is_open:
                self.name = f"{await self._actor.host.remote()}-{self._at}"
                await self._actor.open.remote(self._words(self.name))
                self._is_open = True
            line: str | None = await self._actor.line.remote()
        except self._ray.exceptions.RayError as error:
            self.said = str(error).strip().partition("\n")[0]
            return None
        return line
