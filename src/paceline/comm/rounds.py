"""Who takes part in rounds of exchanges, when workers are lost and come between two of them.

How it works: an exchange is attempted by all members, in a process group of their own. Then each
reports to the store how it went, and the first worker, which keeps the store, gives a verdict: the
members are those who reported, and where one of them failed the exchange is attempted again, in a
new group of these. Who died, hangs or is cut off has not reported in time and is out; as members
wait for the verdict before they use what they got, all use it or none does. A worker that comes (or
comes back, as a new process) asks at the store, and is let in by the verdict on the last attempt of
a round; the first thing the new members do together is to hand it the state.

The membership is simple where torchft's is not (a lighthouse of its own, quorums by heartbeats): it
costs two small messages per worker and attempt and no process, and the price is that the first
worker can't be lost: with it the store is gone, and everybody ends. Groups are gloo's, of tensors
in host memory.

`paceline train` does not use it yet: there a lost worker ends the run.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.config.errors import RunError

T = TypeVar("T")
Exchange = Callable[[dist.ProcessGroup], T]

_LOOK_S = 0.02
# A member may fail one time-out later than another, and the verdict waits for it.
_PATIENCE = 3


@dataclass(frozen=True)
class Verdict:
    """What the first worker says of an attempt."""

    is_good: bool
    """Whether what was exchanged may be used."""
    members: tuple[int, ...]
    """Who goes on, ascending."""
    joining: tuple[int, ...] = ()
    """Who goes on with them, and has to be told the state."""


def judge(
    members: Sequence[int], reports: dict[int, bool], asking: Sequence[int], *, is_last: bool
) -> Verdict:
    """Decide on an attempt.

    Args:
        members: who should have taken part.
        reports: of those who reported, whether their exchange went well.
        asking: who wants to come in.
        is_last: whether a round ends with this attempt, if it is good.
    """
    left = tuple(rank for rank in members if rank in reports)
    is_good = all(reports[rank] for rank in left)
    joining = tuple(rank for rank in asking if rank not in left) if is_good and is_last else ()
    return Verdict(is_good, left, joining)


class Membership:
    """One worker's place among those that meet; members call alike.

    Args:
        store: of the run, reached by all workers and kept by the first.
        rank: of this worker.
        timeout_s: how long an exchange may take, and how long a member may be late for it.
        min_workers: with fewer members the run ends.
        say: takes a sentence for a person about who was lost and who came.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        timeout_s: float,
        min_workers: int,
        say: Callable[[str], None],
    ) -> None:
        self._store = PrefixStore("paceline/rounds", store)
        self._store.set_timeout(timedelta(seconds=_PATIENCE * timeout_s))
        self.rank, self._timeout_s, self._min_workers = rank, timeout_s, min_workers
        self._say = say
        self._attempt = 0
        self._served: dict[int, int] = {}
        self._has_newcomers = False
        self.members: tuple[int, ...] = (0,)
        self._group: dist.ProcessGroup | None = None

    def join(self, hand_over: Exchange[T]) -> T:
        """Ask to come in, wait for the end of a round, and take the state that members have.

        Args:
            hand_over: takes it, as its counterpart in `exchange` gives it.

        Raises:
            RunError: nobody let it in in time, or it was lost again.
        """
        ticket = self._store.add(f"asking/{self.rank}", 1)
        admitted = self._wait(f"admitted/{self.rank}/{ticket}", "let this worker in")
        self._attempt, self.members = admitted["attempt"], tuple(admitted["members"])
        return self._exchange(hand_over, is_last=False)

    def exchange(self, act: Exchange[T]) -> T:
        """Carry out what a round exchanges.

        Args:
            act: exchanges something in a group and keeps what it got out of the way: where another
                member is lost meanwhile, it is called again.

        Raises:
            RunError: too few members are left, or this worker is not one of them.
        """
        return self._exchange(act, is_last=True)

    def welcome(self, hand_over: Exchange[object]) -> None:
        """After each `exchange`, when its result is in use: give the state to those who came.

        Args:
            hand_over: the counterpart of theirs in `join`; called again as in `exchange`.
        """
        if self._has_newcomers:
            self._has_newcomers = False
            self._exchange(hand_over, is_last=False)

    def _exchange(self, act: Exchange[T], *, is_last: bool) -> T:
        while True:
            result, verdict = self._try(act, is_last=is_last)
            self._follow(verdict)
            if verdict.is_good:
                assert result is not None
                return result[0]

    def _try(self, act: Exchange[T], *, is_last: bool) -> tuple[tuple[T] | None, Verdict]:
        result: tuple[T] | None = None
        try:
            result = (act(self._own_group()),)
        except RuntimeError:  # gloo's: somebody is lost, or will be when the group is closed
            self._group = None
        attempt = f"attempt/{self._attempt}"
        self._store.set(f"{attempt}/{self.rank}", "good" if result else "failed")
        if self.rank == 0:
            verdict = judge(self.members, self._reports(attempt), self._asking(), is_last=is_last)
            self._admit(verdict)
            self._store.set(attempt, json.dumps(asdict(verdict)))
            return result, verdict
        heard = self._wait(attempt, "said how the round went")
        members, joining = tuple(heard["members"]), tuple(heard["joining"])
        return result, Verdict(heard["is_good"], members, joining)

    def _follow(self, verdict: Verdict) -> None:
        """Go on with those who are left and those who come."""
        self._attempt += 1
        lost = sorted(set(self.members) - set(verdict.members))
        now = tuple(sorted({*verdict.members, *verdict.joining}))
        if self.rank in lost:
            raise RunError(
                f"worker {self.rank} was late for a round by more than {self._timeout_s:g} s and "
                "the others went on: start it again to join them."
            )
        for ranks, what in ((lost, "lost"), (verdict.joining, "taken in")):
            if ranks:
                self._say(f"{_named(ranks)} {what}: {len(now)} workers go on.")
        if len(now) < self._min_workers:
            raise RunError(
                f"{len(now)} workers are fewer than the {self._min_workers} that a round needs: "
                "start the run again to go on from the last checkpoint."
            )
        self._has_newcomers |= bool(verdict.joining)
        if now != self.members:
            self.members, self._group = now, None

    def _own_group(self) -> dist.ProcessGroup:
        """The members' group; a new one where they changed or the last exchange failed."""
        if self._group is None:
            store = PrefixStore(f"group/{self._attempt}", self._store)
            place, num = self.members.index(self.rank), len(self.members)
            self._group = _gloo(store, place, num, timedelta(seconds=self._timeout_s))
        return self._group

    def _reports(self, attempt: str) -> dict[int, bool]:
        """Who reported what, when all members have or the time is over."""
        end = time.monotonic() + self._timeout_s
        while True:
            there = [r for r in self.members if self._store.check([f"{attempt}/{r}"])]
            if len(there) == len(self.members) or time.monotonic() > end:
                return {r: self._store.get(f"{attempt}/{r}") == b"good" for r in there}
            time.sleep(_LOOK_S)

    def _asking(self) -> list[int]:
        """Who asked to come in and was not answered, by a process that is there still or not."""
        keys = self._known_askers()
        asked = {rank: self._store.add(f"asking/{rank}", 0) for rank in keys}
        return [rank for rank, num in asked.items() if num > self._served.get(rank, 0)]

    def _known_askers(self) -> list[int]:
        num = self._store.add("num_workers", 0)
        return [rank for rank in range(1, num) if self._store.check([f"asking/{rank}"])]

    def open(self, num_workers: int) -> None:
        """As the first worker: let up to so many come in."""
        self._store.add("num_workers", num_workers)

    def _admit(self, verdict: Verdict) -> None:
        members = sorted({*verdict.members, *verdict.joining})
        told = json.dumps({"attempt": self._attempt + 1, "members": members})
        for rank in verdict.joining:
            self._served[rank] = self._store.add(f"asking/{rank}", 0)
            self._store.set(f"admitted/{rank}/{self._served[rank]}", told)

    def _wait(self, key: str, what: str) -> dict[str, Any]:
        try:
            return json.loads(self._store.get(key))
        except RuntimeError as error:
            raise RunError(
                f"the first worker, which keeps the store, has not {what} (worker {self.rank}): "
                "look whether it runs and whether the links are up, and start this worker again."
            ) from error


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A group that stands by itself: no default group has to know of it."""
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


def _named(ranks: Sequence[int]) -> str:
    """ "worker 2 is", "workers 2, 3 are"."""
    listed = ", ".join(map(str, ranks))
    return f"workers {listed} are" if len(ranks) > 1 else f"worker {listed} is"
