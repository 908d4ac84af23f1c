"""Who is missing when a collective fails, and what the others are doing.

gloo says that it waited in vain, not for whom; and the rank it names is often one that waits
itself. So the rank whose collective failed asks all others: it writes "trouble" into the run's
store, and every rank answers from a thread of its own, whatever its main thread waits for, with the
line of Paceline it is in. Who doesn't answer is lost: its process is gone or stopped, or its link
is cut. A rank that can't reach the store has lost rank 0, which keeps it. Where all answer, the
answers tell who is late and where (reading data, in another collective).

It costs a thread that asks the store for a few bytes now and then, and nothing in a step. Part of
the time that a rank may wait for another is kept for it (`reserve_s`): by then the run has ended.

It can't interrupt a main thread: collectives must have time-outs of their own
(`comm.rendezvous.set_collective_timeout`). NCCL's watchdog ends a process before any exception is
seen; there torch's flight recorder is the place to look.
"""

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from paceline.comm import busy_clock
from paceline.comm.rendezvous import Ranks, reason_of
from paceline.comm.words import heard, say
from paceline.config.errors import RunError

T = TypeVar("T")

_PACKAGE = Path(__file__).parents[1]
# Counts the waits of others, so it is never where a rank waits.
_COUNTER = Path(busy_clock.__file__)
_PREFIX = "paceline/roll_call"
_TROUBLE = "trouble"
# Of the reserve: the time in which the others may fail later than the first one did.
_LISTENING = 0.7
# And where it is known who failed: in which the others' connections break as well.
_GOODBYE_S = 5.0
_PERIODS = 8
"""How often a rank looks for trouble within a reserve."""
_LOOK_S = 0.05
_MOST_NAMED = 8


@dataclass(frozen=True)
class PeerAnswer:
    """What a rank answers when another one's collective failed."""

    where: str
    """Which line of Paceline its main thread is in, or failed in."""
    error: str | None = None
    """Its own failure, where it isn't that it lost somebody."""


@dataclass(frozen=True)
class PeerAnswers:
    """What a rank heard."""

    answers: Mapping[int, PeerAnswer]
    hosts: Mapping[int, str]
    """Host of each rank, as far as they are known."""


def reserve_s(timeout_s: float) -> float:
    """How much of the time that a rank may wait for another is kept for asking the others."""
    return min(30.0, timeout_s / 5)


class PeerFailureDetector:
    """This rank's part in finding who is missing, for as long as the context lasts."""

    def __init__(self, ranks: Ranks, store: Store, timeout_s: float) -> None:
        """Begin to listen.

        Args:
            store: of the run; a client of its own is made of it.
            timeout_s: how long a rank waits for another one, asking the others included.
        """
        self.ranks = ranks
        self.reserve_s = reserve_s(timeout_s)
        said = PrefixStore(_PREFIX, store)
        say(said, f"host/{ranks.rank}", socket.gethostname())
        # Raises at once where the store is gone; a client that is made of one then would wait.
        said.check([f"host/{ranks.rank}"])
        self._store = PrefixStore(_PREFIX, store.clone())  # type: ignore[attr-defined]
        self._main = threading.get_ident()
        self._own: PeerAnswer | None = None
        self._peer_answers: PeerAnswers | None = None
        self._wake, self._closed, self._heard = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._listen, name="roll-call", daemon=True)
        self._thread.start()

    @staticmethod
    def of_this_run(ranks: Ranks, timeout_s: float) -> "PeerFailureDetector":
        """Over the store of the default process group."""
        return PeerFailureDetector(ranks, _get_default_store(), timeout_s)

    def __enter__(self) -> "PeerFailureDetector":
        return self

    def __exit__(self, *_failure: object) -> None:
        self._closed.set()
        self._wake.set()
        if self._own is None:  # else it may hang on a cut link, and the process ends without it
            self._thread.join(self.reserve_s)

    def tell(self, error: BaseException) -> None:
        """Let the others know of this rank's own failure before it is gone."""
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._report_own(PeerAnswer(_where_failed(error), text))
        self._heard.wait(min(1.0, self.reserve_s))

    def explain(self, error: BaseException) -> str:
        """Ask the other ranks where they are because a collective failed; takes `reserve_s` at
        most.

        Returns:
            who lost whom, one sentence or two.
        """
        deadline = time.monotonic() + self.reserve_s
        own = PeerAnswer(_where_failed(error))
        self._report_own(own)
        self._heard.wait(self.reserve_s)
        reason, roll = reason_of(error), self._peer_answers
        if self.ranks.is_first:  # may keep the store, which the others still ask
            is_known = roll is not None and any(answer.error for answer in roll.answers.values())
            rest_s = max(0.0, deadline - time.monotonic())
            time.sleep(min(rest_s, _GOODBYE_S) if is_known else rest_s)
        if roll is None:
            return _store_lost(self.ranks.rank, own, reason)
        return describe_loss(self.ranks.rank, self.ranks.world_size, own, reason, roll)

    def _report_own(self, own: PeerAnswer) -> None:
        self._own = own
        self._wake.set()

    def _listen(self) -> None:
        # The store is gone when rank 0 is, and asking it takes for ever when its link is cut.
        with suppress(RuntimeError):
            while not self._closed.is_set():
                self._wake.wait(self.reserve_s / _PERIODS)
                if self._own is not None:
                    self._call(self._own)
                    return
                if self._store.check([_TROUBLE]):
                    self._answer(PeerAnswer(_where(_stack_of(self._main))))
                    self._wake.wait()

    def _answer(self, answer: PeerAnswer) -> None:
        say(self._store, f"answer/{self.ranks.rank}", answer)

    def _call(self, own: PeerAnswer) -> None:
        self._answer(own)
        self._store.set(_TROUBLE, "")
        if own.error is None:
            end = time.monotonic() + _LISTENING * self.reserve_s
            answers = self._of_each("answer", PeerAnswer)
            while len(answers) < self.ranks.world_size and time.monotonic() < end:
                if any(answer.error for answer in answers.values()):
                    break  # nobody else is to blame
                time.sleep(_LOOK_S)
                answers = self._of_each("answer", PeerAnswer)
            self._peer_answers = PeerAnswers(answers, self._of_each("host", str))
        self._heard.set()

    def _of_each(self, key: str, kind: type[T]) -> dict[int, T]:
        """What ranks said; of one in whose place somebody else wrote, nothing."""
        said = {}
        for rank in range(self.ranks.world_size):
            if self._store.check([f"{key}/{rank}"]):
                with suppress(RunError):
                    said[rank] = heard(self._store, f"{key}/{rank}", kind)
        return said


def describe_loss(
    rank: int, world_size: int, own: PeerAnswer, reason: str, roll: PeerAnswers
) -> str:
    """Who lost whom, from what a rank heard."""
    failed = {r: answer.error for r, answer in roll.answers.items() if answer.error is not None}
    missing = sorted(set(range(world_size)) - set(roll.answers))
    begins = f"{_named([rank], roll.hosts)}, in {own.where}"
    if failed:
        first = min(failed)
        return f"{_named([first], roll.hosts)} failed ({failed[first]}) and took the run down."
    if missing:
        verb = "does" if len(missing) == 1 else "do"
        return (
            f"{begins}, lost {_named(missing, roll.hosts)}, which {verb} not answer ({reason}): "
            "look whether it runs and whether its link is up. Start the run again to go on from "
            "the last checkpoint."
        )
    others = _by_place(roll, rank)
    return (
        f"{begins}, waited in vain ({reason}), though every rank answers: {others}. If one is "
        "merely slow, raise comm.timeout_s; start the run again to go on from the last checkpoint."
    )


def _store_lost(rank: int, own: PeerAnswer, reason: str) -> str:
    keeper = os.environ.get("MASTER_ADDR", "its host")
    host = f"rank {rank} on {socket.gethostname()}"
    return (
        f"{host}, in {own.where}, lost rank 0 on {keeper}, which keeps the store of the run and "
        f"can't be reached any more ({reason}): look whether it runs and whether the links of both "
        "are up. Start the run again to go on from the last checkpoint."
    )


def _by_place(roll: PeerAnswers, rank: int) -> str:
    """What the other ranks are doing, those at the same place together."""
    places: dict[str, list[int]] = {}
    for other, answer in sorted(roll.answers.items()):
        if other != rank:
            places.setdefault(answer.where, []).append(other)
    return "; ".join(f"{_named(ranks, roll.hosts)} in {w}" for w, ranks in places.items())


def _named(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """ "rank 3 on node1", "ranks 4, 5 on node2"."""
    shown = ", ".join(str(rank) for rank in ranks[:_MOST_NAMED])
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    on = sorted({hosts[rank] for rank in ranks if rank in hosts})
    where = f" on {', '.join(on[:_MOST_NAMED])}" if on else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}{where}"


def _where_failed(error: BaseException) -> str:
    return _where(traceback.extract_tb(error.__traceback__))


def _stack_of(thread: int) -> list[traceback.FrameSummary]:
    frame = sys._current_frames().get(thread)
    return traceback.extract_stack(frame) if frame is not None else []


def _where(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line of Paceline, and what of torch it called: outermost frame first."""
    place, called = "", ""
    for frame in frames:
        file = Path(frame.filename)
        if file == _COUNTER:
            continue
        if file.is_relative_to(_PACKAGE):
            place, called = f"{file.parent.name}/{file.name}:{frame.lineno}", ""
        elif not called and not frame.name.startswith(("_", "wrapper")):  # torch's own layers
            called = frame.name
    return f"{called} of {place}" if called and place else place or called or "no known place"
