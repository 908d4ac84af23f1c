"""Team: the ranks that trials run on, each trial's trial round in processes of its own.

Processes that only live for a trial round may run out of memory, die or hang, and whoever started
them is there to say so and to go on. On one machine this process starts all of them. Where a
launcher (torchrun, srun) gave this process a place among others, each of these starts the one rank
of its place. The first one leads and says through the launcher's store what to do next; the others
follow. Whoever's rank fails says so there, and all end theirs within a second.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from paceline.bench.measure import BenchRequest as Measurements
from paceline.bench.measure import measure
from paceline.bench.rank_pool import TellProgress, Work, started, store_in
from paceline.comm.rendezvous import Ranks, store_of_run
from paceline.comm.words import await_all, heard, say
from paceline.config.errors import InputError, RunError
from paceline.tune.trial_round import RoundRequest, run_trial_round

Order = tuple[str, Any, bool]
"""A piece of work as plain data: the function's name, what it wishes, and whether rank 0 is alone
with it."""
_LOOK_S = 0.1
_STORE_WAIT_S = 300.0
_GOODBYE_S = 10.0
# What one place can ask of another, by name: where a store would carry pickles, whoever reaches it
# could have any code run.
_WORKS: Mapping[str, Callable[[Any], Work]] = {
    run_trial_round.__name__: lambda request: partial(
        run_trial_round, RoundRequest.of_plain(request)
    ),
    measure.__name__: lambda request: partial(measure, Measurements.of_plain(request)),
}


class Team(Protocol):
    """What can carry out work on ranks."""

    def run(self, work: Work, hear: TellProgress, silence_s: float, *, alone: bool = False) -> Any:
        """Call `work(ranks, tell)` on every rank and return what rank 0 returned.

        Args:
            work: picklable; on places that a launcher gave, one of those they know.
            hear: called with rank 0's news.
            silence_s: without news for so long the ranks are ended.
            alone: on rank 0 only, which has then nobody to exchange with.

        Raises:
            InputError: a rank found wrong input.
            RunError: a rank failed or hung (`bench.rank_pool.SilentError`); all have ended.
        """
        ...

    def close(self) -> None:
        """Let those go who wait for work."""
        ...


class LocalTeam:
    """All ranks on this machine."""

    def __init__(self, num_ranks: int, device_type: str) -> None:
        self._num_ranks, self._device_type = num_ranks, device_type

    def run(self, work: Work, hear: TellProgress, silence_s: float, *, alone: bool = False) -> Any:
        """See `Team.run`."""
        n = self._num_ranks
        places = [Ranks(rank, n, rank, n, self._device_type) for rank in range(n)]
        with tempfile.TemporaryDirectory() as folder:
            meet_at = partial(store_in, folder, n)
            chosen = [_alone(places[0])] if alone else places
            return started(chosen, meet_at, work, hear, silence_s=silence_s)

    def close(self) -> None:
        """Nobody waits."""


def _alone(place: Ranks) -> Ranks:
    """The first rank by itself, with its share of the host's cores and no more."""
    return Ranks(0, 1, 0, place.local_world_size, place.device_type)


class GivenTeam:
    """Ranks on the places that a launcher gave; this process has one of them."""

    def __init__(
        self,
        place: Ranks,
        store: Store,
        address: tuple[str, int],
        works: Mapping[str, Callable[[Any], Work]] = _WORKS,
    ) -> None:
        """Take a place.

        Args:
            place: of this process.
            store: where those of all places leave word for each other.
            address: host and port of that store, for the ranks they start.
            works: what can be done, by the name of the function: made of what it wishes.
        """
        self._place, self._address, self._works = place, address, works
        self._store = PrefixStore("paceline/tune", store)
        self._number = 0

    @classmethod
    def met(cls, place: Ranks) -> "GivenTeam":
        """Meet the others at the launcher's store.

        Raises:
            RunError: it can't be reached.
        """
        store = store_of_run(place, _STORE_WAIT_S)
        return cls(place, store, (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))

    def run(self, work: Work, hear: TellProgress, silence_s: float, *, alone: bool = False) -> Any:
        """See `Team.run`; the first place calls it, the others `follow`."""
        with self._in_reach():
            say(self._store, f"work/{self._number}", _order_of(work, alone=alone))
            return self._take_part(work, hear, silence_s, alone=alone)

    def follow(self) -> None:
        """Do what the first place says, until it closes the team.

        Raises:
            RunError: the first place is gone.
        """
        with self._in_reach():
            while (order := self._next_order()) is not None:
                work, alone = self._work_of(order)
                with suppress(RunError, InputError):  # the first place has heard of it
                    self._take_part(work, _hear_nothing, None, alone=alone)
            say(self._store, f"gone/{self._place.rank}", True)

    def close(self) -> None:
        """Let the others go, and keep the store until they have gone."""
        if not self._place.is_first:
            return
        with suppress(DistError):
            say(self._store, f"work/{self._number}", None)
        await_all(self._store, "gone/{}", range(1, self._place.world_size), _GOODBYE_S)

    @contextmanager
    def _in_reach(self) -> Iterator[None]:
        try:
            yield
        except DistError as error:
            raise RunError(
                f"rank {self._place.rank} lost the store of the run, which the first one keeps, or "
                "its launcher: that one says why; start all of them again to go on."
            ) from error

    def _next_order(self) -> Order | None:
        """The next piece of work; None: there is none any more."""
        key = f"work/{self._number}"
        while not self._store.check([key]):
            time.sleep(_LOOK_S)
        return heard(self._store, key, Order | None)  # type: ignore[arg-type]

    def _work_of(self, order: Order) -> tuple[Work, bool]:
        name, request, alone = order
        try:
            return self._works[name](request), alone
        except (LookupError, TypeError, ValueError, InputError):
            raise RunError(
                "the store of the run holds an order that the first rank didn't give: somebody "
                "else reaches it (docs/security.md); start all of them again to go on."
            ) from None

    def _take_part(
        self, work: Work, hear: TellProgress, silence_s: float | None, *, alone: bool
    ) -> Any:
        number, self._number = self._number, self._number + 1
        failed = f"failed/{number}"
        place = _alone(self._place) if alone else self._place
        if alone and not self._place.is_first:
            return None
        try:
            return started(
                [place],
                partial(_client, *self._address, f"paceline/tune/heat-{number}"),
                work,
                hear,
                environment=dict(os.environ),
                silence_s=silence_s,
                is_over=lambda: self._store.check([failed]),
            )
        except BaseException:
            self._store.set(failed, "")
            raise


def _order_of(work: Work, *, alone: bool) -> Order:
    if isinstance(work, partial):
        return work.func.__name__, work.args[0].plain(), alone
    return work.__name__, None, alone


def _client(host: str, port: int, prefix: str) -> Store:
    timeout = timedelta(seconds=_STORE_WAIT_S)
    return PrefixStore(prefix, TCPStore(host, port, is_master=False, timeout=timeout))


def _hear_nothing(_news: object) -> None:
    """Only the first rank tells."""


def team_of(given: Ranks | None, num_ranks: int, device_type: str) -> LocalTeam | GivenTeam:
    """Where trials run: on the places that a launcher gave, or on this machine."""
    return LocalTeam(num_ranks, device_type) if given is None else GivenTeam.met(given)
