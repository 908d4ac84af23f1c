"""The ranks of one node, as its agent keeps them: one process for each device, always.

A process that ends is started again at once, so that it is warm when the next generation needs it;
one that has no place in a generation waits. Its end is noticed by its socket and by the kernel,
without polling. A process that has not said anything for a while is stopped (SIGSTOP, a debugger, a
dead disk under its pages) and killed.

Not here: what follows from a loss (`elastic.leader`).
"""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from paceline.config.errors import EXIT_SAVED
from paceline.elastic.generation import Generation
from paceline.elastic.wire import MOST_BYTES, Channel, Message, StreamChannel, until_cancelled


@dataclass(frozen=True)
class Place:
    """What a process is told that becomes a rank."""

    node: str
    local_rank: int
    agent: str
    """Path of the agent's socket, for `elastic.link.RankLink`."""


class RankHandle(Protocol):
    """A process that the agent started."""

    @property
    def pid(self) -> int:
        """Of the process."""

    @property
    def exitcode(self) -> int | None:
        """None while it runs; the negative number of a signal that killed it."""

    def kill(self) -> None:
        """End it, and whatever it started."""


StartRank = Callable[[Place], RankHandle]

# A process that runs may hold Python's lock for long: only one that the kernel shows as stopped is
# judged at once.
_SILENT_S, _SILENT_THOUGH_RUNNING_S = 2.0, 20.0
_EXIT_CODE_S, _LOOK_S = 0.05, 0.002
_OWN_END_S = 5.0
# A program imports what it needs before it connects. Assumed.
_CONNECT_S = 300.0
_LONGEST_PATH = 90
# Of a process that ends before it has ever belonged to a generation.
_MOST_VAIN_STARTS = 3


@dataclass
class _Rank:
    """One of them, whichever process it is now."""

    local_rank: int
    handle: RankHandle
    started: float
    channel: Channel | None = None
    heard: float = 0.0
    progress: Message = field(default_factory=dict)
    rank: int | None = None
    """In the generation that it was told of."""
    failure: Message | None = None
    is_done: bool = False
    cause: tuple[str, str] = ("dead", "")
    """For which it is killed: class, sentence."""
    num_vain: int = 0


class LocalRanks:
    """The processes of a node.

    Args:
        node: name of the node.
        count: of its devices.
        start_rank: starts a process, in a session of its own.
        tell: takes messages for the leader.
        give_up: takes a sentence when processes end again and again before they begin.
    """

    def __init__(
        self,
        node: str,
        count: int,
        start_rank: StartRank,
        tell: Callable[[Message], None],
        give_up: Callable[[str], None],
        silent_s: float,
    ) -> None:
        self._node, self._start_rank, self._tell = node, start_rank, tell
        self._give_up, self._silent_s = give_up, max(_SILENT_S, silent_s)
        parent = tempfile.gettempdir()
        parent = "/tmp" if len(parent) > _LONGEST_PATH - 30 else parent
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-agent-", dir=parent)
        self._path = str(Path(self._folder.name) / "ranks")
        self._count = count
        self._ranks: list[_Rank] = []
        self._generation: Generation | None = None
        """The one they train in; None: they left it."""
        self._is_ending = False
        self._stop: Message | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Start all of them."""
        self._server = await asyncio.start_unix_server(
            until_cancelled(self._accept), self._path, limit=MOST_BYTES
        )
        for local_rank in range(self._count):
            self._ranks.append(_Rank(local_rank, self._started(local_rank), time.monotonic()))
            self._watch(self._ranks[-1])

    def enter(self, generation: Generation) -> None:
        """Give each its place in a generation; those without one wait."""
        self._generation, self._stop = generation, None
        for one in self._ranks:
            one.rank = generation.number_of(self._node, one.local_rank)
            one.is_done = False
            self._place(one)

    def leave(self, number: int) -> None:
        """Let them come out of generations up to this one."""
        if self._generation is not None and self._generation.number <= number:
            self._generation = None
        self._send_all({"kind": "leave", "generation": number})

    def stop(self, within_s: float | None) -> None:
        """Let them stop with a checkpoint."""
        self._stop = {"kind": "stop", "within_s": within_s}
        self._send_all(self._stop)

    def kill(self, local_rank: int, cause: str, sentence: str) -> None:
        """End one that holds up the others; it is reported and started again."""
        one = self._ranks[local_rank]
        one.cause = cause, sentence
        one.handle.kill()

    def progress(self) -> list[Message]:
        """What each that is in a generation last said of itself, and how long ago; look for those
        that are silent."""
        now, found = time.monotonic(), []
        for one in self._ranks:
            if one.channel is None:
                if now - one.started > _CONNECT_S and not self._is_ending:
                    self.kill(one.local_rank, "stuck", f"{_name(one)} on {self._node} never began.")
                continue
            silent_s = now - one.heard
            if silent_s > self._silent_s and not self._is_ending:
                self._judge_silent(one, silent_s)
            if one.rank is not None and one.progress:
                found.append({**one.progress, "rank": one.rank, "ago_s": silent_s})
        return found

    def forgive(self) -> None:
        """Take all as heard now: it was this process that did not run."""
        for one in self._ranks:
            one.heard = time.monotonic()

    async def end(self, grace_s: float) -> None:
        """End all, after so long that they may end by themselves."""
        self._is_ending = True
        self._send_all({"kind": "end"})
        until = time.monotonic() + grace_s
        while any(one.handle.exitcode is None for one in self._ranks) and time.monotonic() < until:
            await asyncio.sleep(0.01)
        self.kill_all()
        if self._server is not None:
            self._server.close()
        self._folder.cleanup()

    def kill_all(self) -> None:
        """End all at once."""
        self._is_ending = True
        for one in self._ranks:
            one.handle.kill()

    def _started(self, local_rank: int) -> RankHandle:
        return self._start_rank(Place(self._node, local_rank, self._path))

    def _watch(self, one: _Rank) -> None:
        """Notice the end of its process, also before it has connected."""
        handle, loop = one.handle, asyncio.get_running_loop()
        try:
            number = os.pidfd_open(handle.pid)
        except (AttributeError, OSError):  # not Linux, or gone already
            self._spawn(self._poll(one, handle))
            return

        def ended() -> None:
            loop.remove_reader(number)
            os.close(number)
            self._spawn(self._gone(one, handle))

        loop.add_reader(number, ended)

    async def _poll(self, one: _Rank, handle: RankHandle) -> None:
        while handle.exitcode is None:
            await asyncio.sleep(0.1)
        await self._gone(one, handle)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = StreamChannel(reader, writer)
        hello = await channel.receive()
        local_rank = hello.get("local_rank") if hello is not None else None
        known = (one for one in self._ranks if one.local_rank == local_rank)
        one = next(known, None)
        if one is None or one.channel is not None:
            channel.close()
            return
        handle, one.channel, one.heard = one.handle, channel, time.monotonic()
        self._place(one)
        while (message := await channel.receive()) is not None:
            one.heard = time.monotonic()
            self._hear(one, message)
        await self._gone(one, handle)

    def _place(self, one: _Rank) -> None:
        if self._generation is None or one.rank is None or one.channel is None:
            return
        raw = asdict(self._generation)
        place = {"rank": one.rank, "local_rank": one.local_rank}
        one.channel.send({"kind": "generation", "generation": raw, **place})
        if self._stop is not None:
            one.channel.send(self._stop)

    def _hear(self, one: _Rank, message: Message) -> None:
        kind = message["kind"]
        if kind == "progress":
            one.progress = message
            return
        if kind == "failed":
            one.failure = message
            self._spawn(self._await_own_end(one, one.handle))
        elif kind == "done":
            one.is_done = True
        elif kind == "handed_over":
            one.rank = None
        elif kind == "joined":
            one.num_vain = 0
        self._tell({"kind": "rank", "rank": one.rank, "message": message})

    async def _await_own_end(self, one: _Rank, handle: RankHandle) -> None:
        """One that failed ends by itself, or is ended."""
        await asyncio.sleep(_OWN_END_S)
        if one.handle is handle:
            handle.kill()

    def _judge_silent(self, one: _Rank, silent_s: float) -> None:
        with suppress(psutil.Error):
            is_stopped = psutil.Process(one.handle.pid).status() in (
                psutil.STATUS_STOPPED,
                psutil.STATUS_TRACING_STOP,
            )
            if is_stopped or silent_s > _SILENT_THOUGH_RUNNING_S:
                how = "is stopped" if is_stopped else "runs, but says nothing"
                who = f"{_name(one)} on {self._node} (pid {one.handle.pid})"
                place = one.progress.get("place", "its start")
                text = f"{who} {how} since {silent_s:.1f} s, last seen in {place}."
                self.kill(one.local_rank, "stopped", text)

    async def _gone(self, one: _Rank, handle: RankHandle) -> None:
        """Report the end of a process, end what it started, and start another one."""
        until = time.monotonic() + _EXIT_CODE_S
        while handle.exitcode is None and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)
        if self._ranks[one.local_rank] is not one or self._is_ending:
            return  # noticed both ways
        if one.channel is not None:
            one.channel.close(at_once=True)
        code = handle.exitcode
        handle.kill()  # closed its socket, but runs; or left others behind
        cause, sentence = one.cause
        sentence = sentence or f"{_name(one)} on {self._node} (pid {handle.pid}) {_how(one, code)}."
        failure = (one.failure or {}).get("failure")
        lost = {"rank": one.rank, "cause": cause, "sentence": sentence, "failure": failure}
        step = (one.failure or one.progress).get("step", 0)
        number = self._generation.number if self._generation is not None else 0
        if one.is_done and code == 0:
            return
        if code == EXIT_SAVED and self._stop is not None and one.rank is not None:
            # It left before its first step, as all were asked to: nothing is lost.
            done = {"kind": "done", "generation": number, "step": step, "asks_again": True}
            self._tell({"kind": "rank", "rank": one.rank, "message": done})
            return
        is_vain = one.rank is None
        num_vain = one.num_vain + 1 if is_vain else 0
        if num_vain >= _MOST_VAIN_STARTS:
            self._give_up(f"{sentence} It did so {num_vain} times before it began.")
            return
        outside = code is None or -code in (signal.SIGKILL, signal.SIGTERM)
        self._tell(
            {"kind": "lost_rank", **lost, "generation": number, "step": step, "outside": outside}
        )
        new = _Rank(one.local_rank, self._started(one.local_rank), time.monotonic())
        new.num_vain = num_vain
        self._ranks[one.local_rank] = new
        one.channel = None
        self._watch(new)

    def _send_all(self, message: Message) -> None:
        for one in self._ranks:
            if one.channel is not None:
                one.channel.send(message)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def exit_text(code: int) -> str:
    """ "by SIGKILL", "with 1"."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with {code}"


def _name(one: _Rank) -> str:
    return f"rank {one.rank}" if one.rank is not None else f"waiting rank {one.local_rank}"


def _how(one: _Rank, code: int | None) -> str:
    if one.failure is not None:
        text = str(one.failure.get("failure", {}).get("text", "")).rstrip()
        return f"failed ({text.rpartition(chr(10))[2]})"
    return "closed its link" if code is None else f"ended {exit_text(code)}"
