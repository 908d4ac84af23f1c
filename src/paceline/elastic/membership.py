"""Who takes part in rounds of exchanges, when workers are lost and come between two of them.

How it works:

- All members attempt an exchange, in a process group of their own. Then each reports to the store
  how it went.
- The first worker keeps the store and gives a verdict: the members are those who reported in time.
  Who died, hangs or is cut off has not, and is out.
- Members wait for the verdict before they use what they got, so all use it or none does. If one of
  them failed, those who are left attempt the exchange again, in a new group.
- A worker that comes (or comes back, as a new process) asks at the store. The verdict on the last
  attempt of a round lets it in, and the members' next exchange hands it the state.
- A run begins like that too: the first worker is the only member, and lets in all that have come.

Who asks while it still counts as a member is a new process: the old one is not waited for. Who was
not started again is lost when the time-out is over. So the time-out has to cover how much later
than the others a worker may reach a round.

It costs two small messages per worker and attempt, and no process (torchft has a lighthouse, and
quorums by heartbeats). The price is that the first worker can't be lost: with it the store is gone,
and everybody ends. Groups are gloo's, of tensors in host memory.

Not here: what a round exchanges (`elastic.elastic_rounds`), and who starts a lost worker again
(`train.elastic_workers` on one machine).
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from paceline.comm.rendezvous import group_apart
from paceline.comm.words import await_all, heard, say
from paceline.config.errors import RunError

T = TypeVar("T")
GroupAction = Callable[[dist.ProcessGroup], T]

_LOOK_S = 0.02
# How often the first worker looks into its own store while the others wait for its verdict: at
# 20 ms a round took 40 ms longer (two exchanges, measured).
_LOOK_AT_OWN_S = 0.001
# A member may fail one time-out later than another, and the verdict waits for it.
_PATIENCE = 3
# How often an exchange is tried again though nobody was lost. Assumed.
_MOST_IN_VAIN = 3
_SIGN_OF_LIFE_S = 1.0
_STORE_LOST = (
    "the first worker, which keeps the store, has not {what} (worker {rank}): look whether it runs "
    "and whether the links are up, and start this worker again."
)


@dataclass(frozen=True)
class AttemptOutcome:
    """What the first worker says of an attempt."""

    is_good: bool
    """Whether what was exchanged may be used."""
    members: tuple[int, ...]
    """Who goes on, ascending."""
    joining: tuple[int, ...] = ()
    """Who goes on with them, and has to be told the state."""


@dataclass(frozen=True)
class Admission:
    """What the first worker says to one that it lets in."""

    attempt: int
    members: tuple[int, ...]


def decide_attempt(
    members: Sequence[int], reports: dict[int, bool], asking: Sequence[int], *, is_last: bool
) -> AttemptOutcome:
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
    return AttemptOutcome(is_good, left, joining)


class Membership:
    """One worker's place among those that meet; members call alike.

    Args:
        store: of the run, reached by all workers and kept by the first.
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
        self._num_workers = 1
        self._group: dist.ProcessGroup | None = None
        self._closed = threading.Event()
        if rank == 0:
            threading.Thread(target=self._show_life, name="sign-of-life", daemon=True).start()

    def open(self, num_workers: int, wait_s: float) -> None:
        """As the first worker: wait for the others, and let in those who came; `welcome` follows.

        Args:
            num_workers: of the run, this one among them; who comes later may join then.
            wait_s: how long to wait for all of them.

        Raises:
            RunError: too few came.
        """
        self._num_workers = num_workers
        end = time.monotonic() + wait_s
        with _kept_store():
            while len(self._asking()) < num_workers - 1 and time.monotonic() < end:
                time.sleep(_LOOK_S)
        self.exchange(lambda _group: None, is_last=True)

    def join(self, hand_over: GroupAction[T]) -> T:
        """Ask to come in, wait for the end of a round, and take the state that members have.

        Args:
            hand_over: takes it, as its counterpart in `welcome` gives it.

        Raises:
            RunError: the first worker shows no sign of life, or this worker was lost again.
        """
        limit_s, what = _PATIENCE * self._timeout_s, "let this worker in"
        ticket = self._ask(lambda: self._store.add(f"asking/{self.rank}", 1), limit_s, what)
        admitted = f"admitted/{self.rank}/{ticket}"
        last, seen = None, time.monotonic()
        while True:
            is_in, life = self._ask(
                lambda: (self._store.check([admitted]), self._count("life")), limit_s, what
            )
            if is_in:
                break
            if life != last:
                last, seen = life, time.monotonic()
            elif time.monotonic() - seen > limit_s:
                raise RunError(_STORE_LOST.format(what=what, rank=self.rank))
            time.sleep(_LOOK_S)
        told = self._wait(admitted, Admission, what)
        self._attempt, self.members = told.attempt, told.members
        return self.exchange(hand_over, is_last=False)

    def exchange(self, act: GroupAction[T], *, is_last: bool = True) -> T:
        """Carry out what a round exchanges, or a part of it.

        Args:
            act: exchanges something in a group and keeps what it got out of the way: where another
                member is lost meanwhile, it is called again. It does not keep the group.
            is_last: whether the round ends with it: then workers who asked are let in.

        Raises:
            RunError: too few members are left, this worker is not one of them, or it fails
                again and again.
        """
        num_in_vain = 0
        while True:
            result, failure, verdict = self._try(act, is_last=is_last)
            members = self.members
            self._follow(verdict)
            if verdict.is_good:
                assert result is not None
                return result[0]
            num_in_vain = num_in_vain + 1 if self.members == members else 0
            if num_in_vain > _MOST_IN_VAIN:
                raise RunError(
                    f"an exchange failed {num_in_vain} times though no worker was lost "
                    f"({failure or 'on another worker'}): look at the logs of all workers."
                )

    def welcome(self, hand_over: GroupAction[object]) -> None:
        """After each last `exchange`, when its result is in use: give the state to those who came.

        Args:
            hand_over: the counterpart of theirs in `join`; called again as in `exchange`.
        """
        if self._has_newcomers:
            self._has_newcomers = False
            self.exchange(hand_over, is_last=False)

    def close(self) -> None:
        """Leave when the run is over; the first worker stays until all members heard its verdict.

        What it waits for is one time-out at most.
        """
        with suppress(RuntimeError):  # its store may be gone already
            self._store.set(f"left/{self.rank}/{self._attempt}", "")
        if self.rank == 0:
            self._closed.set()
            await_all(self._store, f"left/{{}}/{self._attempt}", self.members, self._timeout_s)

    def _try(
        self, act: GroupAction[T], *, is_last: bool
    ) -> tuple[tuple[T] | None, str | None, AttemptOutcome]:
        result, failure = None, None
        try:
            result = (act(self._own_group()),)
        except RuntimeError as error:  # gloo's: somebody is lost, or will be when the group closes
            # Which is when nothing refers to it any more: the traceback does.
            failure, self._group = str(error), None
        report, attempt = "good" if result else "failed", f"attempt/{self._attempt}"
        if self.rank == 0:
            with _kept_store():
                self._store.set(f"{attempt}/0", report)
                reports = self._reports(attempt)
                verdict = decide_attempt(self.members, reports, self._asking(), is_last=is_last)
                self._admit(verdict)
                say(self._store, attempt, verdict)
            return result, failure, verdict
        what = "said how the round went"
        mine, limit_s = f"{attempt}/{self.rank}", _PATIENCE * self._timeout_s
        self._ask(lambda: self._store.set(mine, report), limit_s, what)
        return result, failure, self._wait(attempt, AttemptOutcome, what)

    def _follow(self, verdict: AttemptOutcome) -> None:
        """Go on with those who are left and those who come."""
        self._attempt += 1
        lost = sorted(set(self.members) - set(verdict.members))
        now = tuple(sorted({*verdict.members, *verdict.joining}))
        if self.rank in lost:
            raise RunError(
                f"worker {self.rank} was late for a round by more than {self._timeout_s:g} s and "
                "the others went on: start it again to join them."
            )
        left = "1 worker goes on" if len(now) == 1 else f"{len(now)} workers go on"
        for ranks, what in ((lost, "lost"), (verdict.joining, "taken in")):
            if ranks:
                self._say(f"{_named(ranks)} {what}: {left}.")
        if len(now) < self._min_workers:
            raise RunError(
                f"{len(now)} workers are fewer than the {self._min_workers} that a round needs: "
                "start the run again to go on from the last checkpoint."
            )
        self._has_newcomers |= bool(verdict.joining)
        if now != self.members or not verdict.is_good:
            self.members, self._group = now, None

    def _own_group(self) -> dist.ProcessGroup:
        """The members' group; a new one where they changed or the last exchange failed."""
        if self._group is None:
            store = PrefixStore(f"group/{self._attempt}", self._store)
            place, num = self.members.index(self.rank), len(self.members)
            self._group = group_apart(store, place, num, timedelta(seconds=self._timeout_s))
        return self._group

    def _reports(self, attempt: str) -> dict[int, bool]:
        """Who reported what, when all members have that are there still, or the time is over."""
        end = time.monotonic() + self._timeout_s
        while True:
            there = [r for r in self.members if self._store.check([f"{attempt}/{r}"])]
            is_over = time.monotonic() > end or {*there, *self._asking()} >= {*self.members}
            if is_over:
                return {r: self._store.get(f"{attempt}/{r}") == b"good" for r in there}
            time.sleep(_LOOK_AT_OWN_S)

    def _asking(self) -> list[int]:
        """Who asked to come in and was not answered, by a process that is there still or not."""
        asked = {rank: self._count(f"asking/{rank}") for rank in range(1, self._num_workers)}
        return [rank for rank, num in asked.items() if num > self._served.get(rank, 0)]

    def _count(self, key: str) -> int:
        """What `add` has made of a key. To add 0 would ask as well, and make a file longer."""
        return heard(self._store, key, int) if self._store.check([key]) else 0

    def _admit(self, verdict: AttemptOutcome) -> None:
        members = tuple(sorted({*verdict.members, *verdict.joining}))
        told = Admission(self._attempt + 1, members)
        for rank in verdict.joining:
            self._served[rank] = self._count(f"asking/{rank}")
            say(self._store, f"admitted/{rank}/{self._served[rank]}", told)

    def _show_life(self) -> None:
        """As long as this process lives; who waits to be let in can't tell a long round from a
        first worker that is gone."""
        with suppress(RuntimeError):
            while not self._closed.wait(_SIGN_OF_LIFE_S):
                self._store.add("life", 1)

    def _wait(self, key: str, kind: type[T], what: str) -> T:
        """What stands at a key, as soon as the first worker has written it."""
        limit_s = (_PATIENCE + 1) * self._timeout_s  # the store's own time-out comes first
        return self._ask(lambda: heard(self._store, key, kind), limit_s, what)

    def _ask(self, ask: Callable[[], T], limit_s: float, what: str) -> T:
        """The store's answer; its client may wait for ever where a link is cut.

        Raises:
            RunError: there is none in time.
        """
        answers: SimpleQueue[tuple[T] | RuntimeError | RunError] = SimpleQueue()

        def work() -> None:
            try:
                answers.put((ask(),))
            except (RuntimeError, RunError) as error:
                answers.put(error)

        threading.Thread(target=work, name="store", daemon=True).start()
        answer: tuple[T] | RuntimeError | RunError | None = None
        with suppress(Empty):
            answer = answers.get(timeout=limit_s)
        if isinstance(answer, tuple):
            return answer[0]
        if isinstance(answer, RunError):
            raise answer
        raise RunError(_STORE_LOST.format(what=what, rank=self.rank)) from answer


@contextmanager
def _kept_store() -> Iterator[None]:
    """As the first worker, whose store is in its own process: nobody of the run makes it fail."""
    try:
        yield
    except RuntimeError as error:
        raise RunError(
            "the store of the run fails, which the first worker keeps: somebody else reaches it "
            "(docs/security.md), or it is at a limit of this host; start the run again to go on "
            "from the last checkpoint."
        ) from error


def group_of_one() -> dist.ProcessGroup:
    """A group of this process and nobody else."""
    return group_apart(HashStore(), 0, 1, timedelta(seconds=1))


def _named(ranks: Sequence[int]) -> str:
    """ "worker 2 is", "workers 2, 3 are"."""
    listed = ", ".join(map(str, ranks))
    return f"workers {listed} are" if len(ranks) > 1 else f"worker {listed} is"
