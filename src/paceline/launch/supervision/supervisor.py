"""The process that keeps a job: waits for its turn, starts all nodes or none, starts again.

    python -m paceline.launch.supervision.supervisor FOLDER

It leaves the terminal, says "ready", and begins when it hears "go"; who submits has written the
job's id by then. SIGTERM ends the job for good, SIGUSR1 asks it to save. Every wait is bounded or
ends with a signal.
"""

import asyncio
import hashlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from filelock import FileLock, Timeout

from paceline.config.errors import EXIT_LEFT_OUT, EXIT_SAVED
from paceline.launch.contract import Attempt, Observation
from paceline.launch.supervision.places import Places, places_of
from paceline.launch.supervision.process import ProcessIdentity
from paceline.launch.supervision.relay import Relay
from paceline.launch.supervision.state import (
    RUNNING,
    STATE,
    STATE_TYPE,
    Orders,
    Supervised,
    read_orders,
    read_state,
)
from paceline.observe.run import cache_home, write_atomic

T = TypeVar("T")
Cause = Literal["stop", "lost", "failed", "saved", "limit"]
"""Why the supervisor ends an attempt: the first reason counts. saved: a node is done for this time,
and those that don't follow by themselves are told to."""

_SIGN_OF_LIFE_S = 5.0
_LOOK_S = 0.2
# Between attempts, and at first between looks for nodes: twice as long each time.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 15.0
# Nodes that save do so together, but for what each of them closes.
_TOGETHER_S = 5.0
_KILLED_BY_TERM = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    state: str
    """In the words of `Attempt.state`."""
    exit_code: int | None
    is_again: bool = False
    """Whether the job is to be started again."""


class Supervisor:
    """See the module."""

    def __init__(self, folder: Path, orders: Orders, places: Places) -> None:
        self._folder, self._orders, self._places = folder, orders, places
        self._me = ProcessIdentity.of_this()
        self._attempts: list[Attempt] = []
        self._now = Observation("queued", "starting")
        self._stopping = asyncio.Event()
        self._restarts = orders.restarts
        self._live: dict[str, Relay] = {}
        self._cause: Cause | None = None
        self._is_saved = False
        """Whether a node of this attempt is done for this time."""
        self._code = 0
        """Of the command that failed first."""
        self._slot: FileLock | None = None
        self._replacing = asyncio.Lock()

    def begin(self) -> None:
        """Hear signals, and write that the job waits."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_stop)
        loop.add_signal_handler(signal.SIGUSR1, self._tell_all, "USR1")
        self._attempts.append(self._new_attempt())
        self._note(self._now)

    async def run(self) -> None:
        """Keep the job until it is over."""
        living = asyncio.ensure_future(self._live_on())
        try:
            if await self._turn():
                await self._run_attempts()
        finally:
            living.cancel()
            if self._slot is not None:
                self._slot.release()

    # ---- records ----

    def _note(self, now: Observation, **changes: object) -> None:
        """Write how the job stands, and what changes of its newest attempt."""
        self._now = replace(now, attempt=len(self._attempts))
        if changes:
            self._attempts[-1] = replace(self._attempts[-1], **changes)  # type: ignore[arg-type]
        state = Supervised(self._me, self._now, tuple(self._attempts))
        text = STATE_TYPE.dump_json(state, indent=1).decode()
        write_atomic(self._folder / STATE, f"{text}\n")

    def _new_attempt(self) -> Attempt:
        return Attempt(
            number=len(self._attempts) + 1,
            submitted=time.time(),
            started=None,
            ended=None,
            nodes=(),
            num_devices=self._orders.num_nodes * self._orders.devices_per_node,
            exit_code=None,
            state="PENDING",
        )

    def _end(self, now: Observation, state: str, exit_code: int | None = None) -> None:
        """The job is over."""
        ended = time.time()
        self._note(replace(now, exit_code=exit_code), ended=ended, exit_code=exit_code, state=state)

    async def _live_on(self) -> None:
        while True:
            await asyncio.sleep(_SIGN_OF_LIFE_S)
            with suppress(OSError):
                os.utime(self._folder / STATE)

    # ---- signals ----

    def _on_stop(self) -> None:
        self._stopping.set()
        self._end_all("stop")

    def _tell_all(self, word: str) -> None:
        for relay in self._live.values():
            relay.tell(word)

    def _end_all(self, cause: Cause) -> None:
        """SIGTERM now, and SIGKILL after the grace to those who are left."""
        if self._cause is not None:
            return
        self._cause = cause
        self._tell_all("TERM")
        asyncio.get_running_loop().call_later(
            self._orders.grace_s, self._kill, tuple(self._live.values())
        )

    def _kill(self, relays: Sequence[Relay]) -> None:
        for relay in relays:
            if relay in self._live.values():
                relay.tell("KILL")

    async def _unless_stopped(self, wanted: Awaitable[T]) -> T | None:
        """What is waited for; None where the job is stopped before."""
        task, stop = asyncio.ensure_future(wanted), asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        is_done = task.done()
        for each in (task, stop):
            each.cancel()
        await asyncio.wait((task, stop))
        return task.result() if is_done else None

    # ---- the turn ----

    async def _turn(self) -> bool:
        """Wait for the jobs before this one, and for a place among those of its group."""
        while not self._stopping.is_set():
            waits, broken = self._before()
            if broken is not None:
                self._end(Observation("cancelled", said=broken), "CANCELLED")
                return False
            if waits is None and self._has_slot():
                return True
            reason = Observation("queued", "dependency" if waits else "limit", said=waits or "")
            if reason != replace(self._now, attempt=1):
                self._note(reason)
            await self._unless_stopped(asyncio.sleep(_LOOK_S))
        self._end(Observation("cancelled"), "CANCELLED")
        return False

    def _before(self) -> tuple[str | None, str | None]:
        """What this job still waits for, and what it will never see."""
        for name in self._orders.after:
            found = read_state(Path(name))
            state = "lost" if found is None else found.now.state
            if state in ("queued", "running"):
                return f"{name} is {state}", None
            if state != "finished":
                return None, f"{name}, which had to finish before, is {state}"
        return None, None

    def _has_slot(self) -> bool:
        """Take one of the places of the group; the lock goes with this process."""
        if self._orders.at_most is None:
            return True
        name = hashlib.sha256(self._orders.group.encode()).hexdigest()[:16]
        folder = cache_home() / "launch" / name
        folder.mkdir(parents=True, exist_ok=True)
        for at in range(self._orders.at_most):
            lock = FileLock(folder / f"{at}.lock", timeout=0)
            with suppress(Timeout):
                lock.acquire()
                self._slot = lock
                return True
        return False

    # ---- attempts ----

    async def _run_attempts(self) -> None:
        while True:
            gang = await self._gang(self._orders.num_nodes)
            if gang is None:
                self._end(Observation("cancelled"), "CANCELLED")
                return
            outcome = await self._attempt(gang)
            if self._is_over(outcome):
                return
            number = len(self._attempts)
            wait_s = min(_FIRST_WAIT_S * 2 ** (number - 1), _LONGEST_WAIT_S)
            self._end(Observation("queued", "requeued"), outcome.state, outcome.exit_code)
            self._restarts -= 1
            self._attempts.append(self._new_attempt())
            self._note(Observation("queued", "requeued"))
            await self._unless_stopped(asyncio.sleep(wait_s))

    def _is_over(self, outcome: Outcome) -> bool:
        """Write the end, where nobody starts the job again."""
        if outcome.is_again and self._restarts > 0 and not self._stopping.is_set():
            return False
        code = outcome.exit_code
        now = {
            "COMPLETED": Observation("finished"),
            "SAVED": Observation("saved", said="no restarts are left"),
            "LOST": Observation("lost", said="a node was lost and no restarts are left"),
            "TIMEOUT": Observation("failed", said="it ran into its time limit"),
            "FAILED": Observation("failed"),
            "CANCELLED": Observation("cancelled"),
        }[outcome.state]
        self._end(now, outcome.state, code)
        return True

    async def _gang(self, num: int) -> list[Relay] | None:
        """All nodes, started together; None: the job was stopped before there were enough."""
        wait_s = _FIRST_WAIT_S
        while not self._stopping.is_set():
            found = await self._reach(num)
            if found is None:
                return None
            ready, why = found
            if len(ready) == num and not self._stopping.is_set():
                for relay in ready:
                    relay.tell("START")
                return ready
            await asyncio.gather(*(relay.close() for relay in ready))
            if not self._live:
                self._note(why)
            await self._unless_stopped(asyncio.sleep(wait_s))
            wait_s = min(2 * wait_s, self._places.longest_wait_s)
        return None

    async def _reach(self, num: int) -> tuple[list[Relay], Observation] | None:
        """Nodes that are ready, and why there are no more; None: stopped meanwhile."""
        return await self._unless_stopped(
            self._places.reach(num, tuple(self._live), len(self._attempts))
        )

    async def _attempt(self, gang: Sequence[Relay]) -> Outcome:
        self._live = {relay.name: relay for relay in gang}
        self._cause = "stop" if self._stopping.is_set() else None
        self._is_saved = False
        names = tuple(self._live)
        self._note(
            Observation("running", nodes=names), started=time.time(), nodes=names, state=RUNNING
        )
        limit = self._orders.time_limit_s
        timer = limit and asyncio.get_running_loop().call_later(limit, self._end_all, "limit")
        codes = await asyncio.gather(*(self._seat(relay) for relay in gang))
        if timer:
            timer.cancel()
        return self._outcome(codes)

    async def _seat(self, relay: Relay) -> int | None:
        """One place of the gang: its command's exit code; None: lost for good."""
        while True:
            code = await relay.ended()
            del self._live[relay.name]
            if self._live and self._cause is None:
                self._note(Observation("running", nodes=tuple(self._live)))
            if code is not None:
                self._on_end(code)
                return code
            is_over = self._is_saved or self._cause is not None
            if is_over or not self._is_enough or self._restarts <= 0:
                self._end_all("lost")
                return None
            self._restarts -= 1
            async with self._replacing:
                new = await self._replacement()
            if new is None:
                return None
            relay = new

    @property
    def _is_enough(self) -> bool:
        """Whether the nodes that are left may go on."""
        return 0 < self._orders.min_nodes <= len(self._live)

    def _on_end(self, code: int) -> None:
        """A command has ended: the others don't go on without it, unless they left it out."""
        if code == EXIT_LEFT_OUT and self._is_enough:
            return
        if code == EXIT_SAVED and self._live and not self._is_saved:
            self._is_saved = True
            asyncio.get_running_loop().call_later(
                _TOGETHER_S, self._end_attempt, self._attempts[-1]
            )
        elif code not in (0, EXIT_SAVED) and self._cause is None:
            self._code = code
            self._end_all("failed")

    def _end_attempt(self, saved: Attempt) -> None:
        if saved.number == len(self._attempts) and self._live:
            self._end_all("saved")

    async def _replacement(self) -> Relay | None:
        """A node in the place of a lost one, while the others go on; None: they have ended."""
        wait_s = _FIRST_WAIT_S
        while self._live and self._cause is None and not self._is_saved:
            found = await self._reach(1)
            ready = [] if found is None else found[0]
            if ready and self._live and self._cause is None and not self._is_saved:
                self._live[ready[0].name] = ready[0]
                ready[0].tell("START")
                nodes = tuple(self._live)
                seen = dict.fromkeys((*self._attempts[-1].nodes, *nodes))
                self._note(Observation("running", nodes=nodes), nodes=tuple(seen))
                return ready[0]
            await asyncio.gather(*(relay.close() for relay in ready))
            await self._unless_stopped(asyncio.sleep(wait_s))
            wait_s = min(2 * wait_s, self._places.longest_wait_s)
        return None

    def _outcome(self, codes: Sequence[int | None]) -> Outcome:
        known = [code for code in codes if code not in (None, EXIT_LEFT_OUT)]
        worst = next((code for code in known if code not in (0, EXIT_SAVED)), None)
        if self._cause == "stop":
            return Outcome("CANCELLED", worst if worst is not None else max(known, default=None))
        if self._cause == "failed":
            return Outcome("FAILED", self._code)
        if self._cause == "lost":
            return Outcome("LOST", None, is_again=True)
        if self._cause == "limit" and (worst is not None or not known):
            return Outcome("TIMEOUT", worst if worst is not None else _KILLED_BY_TERM)
        if self._cause == "saved" or EXIT_SAVED in known:
            return Outcome("SAVED", EXIT_SAVED, is_again=True)
        return Outcome("COMPLETED", 0)


def main(folder: Path) -> None:
    """Be the supervisor of the job of a folder, away from whoever started this."""
    orders = read_orders(folder)
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)

    async def keep() -> None:
        supervisor = Supervisor(folder, orders, places_of(orders, folder))
        supervisor.begin()
        print("ready", flush=True)
        if sys.stdin.readline() != "go\n":
            return
        # Who submitted may go: nothing here reads or writes there any more.
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        os.dup2(nowhere, 1)
        await supervisor.run()

    asyncio.run(keep())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
