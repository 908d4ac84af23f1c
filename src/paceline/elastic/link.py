"""A rank's end of the socket to its agent (`elastic.agent`).

Two threads: one listens, so that a rank leaves a generation whatever its main thread waits for; one
says every half second where the main thread is. A rank whose agent is gone ends, with all that it
started.

Not here: how the main thread's collective is interrupted (`elastic.cut`), and what a rank does in a
generation (`train`).
"""

import json
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d as c10d

from paceline.comm import busy_clock
from paceline.elastic.generation import Generation, generation_of
from paceline.elastic.verdict import SECTIONS
from paceline.elastic.wire import MOST_BYTES, Message, decode, encode

AGENT = "PACELINE_AGENT"
"""The variable that tells a rank the path of its agent's socket."""

_BEAT_S = 0.5
# Until the main thread is out of a generation, groups that it still makes are cut as well.
_CUT_AGAIN_S = 0.1
# So long may it wait in a collective that is cut.
_CUT_LIMIT_S = 2.0
_STEPPED_S = 0.2
# Of a section's limit. The first time nothing is known: kernels are tuned, files are opened.
_TIMES, _FLOOR_S, _NUM_KEPT = 10.0, 5.0, 32
# Share of a section's limit from which a rank tells of its collectives; reading them takes time.
_SUSPICIOUS, _NUM_CALLS = 0.5, 8
# An agent that said that the run is over may go first.
_GOODBYE_S = 10.0
_OF_ALL = "default_pg"
_STANDARD = sysconfig.get_path("stdlib")


class RankLink:
    """The link of this process, which is a rank or waits to become one.

    Args:
        path: of the agent's socket; `AGENT` names it.
        on_leave: is called with the number of a generation that is over, on a thread of the link:
            it interrupts the collective that the main thread waits in. It is called again until
            the main thread asks for the next generation.
        on_stop: is called with the seconds in which this machine is gone (None: nobody hurries)
            when the run is to stop with a checkpoint; on a thread of the link, maybe repeatedly.
        first_limit_s: `elastic.first_limit_s`.
    """

    def __init__(
        self,
        path: str,
        on_leave: Callable[[int], None],
        on_stop: Callable[[float | None], None],
        *,
        first_limit_s: float,
    ) -> None:
        self._on_leave, self._on_stop = on_leave, on_stop
        self._first_limit_s = first_limit_s
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._cutting = threading.Lock()
        self._pending: tuple[Generation, int, int] | None = None
        self._number = 0
        """Of the generation that the main thread is in, or was in last."""
        self._leaving = 0
        """The number of one that is over while the main thread is in it; else 0."""
        self._is_over = False
        self._main = threading.main_thread().ident or 0
        self._step, self._section, self._since = 0, "idle", time.monotonic()
        self._left_at: float | None = None
        self._took: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_KEPT))
        self._last_stepped = float("-inf")
        self._wake = threading.Event()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._send({"kind": "hello", "pid": os.getpid(), "local_rank": local_rank})
        for work, name in ((self._listen, "agent-link"), (self._beat, "progress")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def next_generation(self) -> tuple[Generation, int, int] | None:
        """Leave the generation that this rank is in, if any, and wait for the next one.

        Returns:
            the generation, this process's rank and its local rank; None: the run is over, end.
        """
        self.enter("idle")
        # A cut that is under way ends first: it may not hit connections of the next generation.
        with self._cutting, self._changed:
            before, self._number = self._number, 0
            self._leaving, self._left_at = 0, None
        if before:
            self._send({"kind": "left", "generation": before, "step": self._step})
        with self._changed:
            self._changed.wait_for(lambda: self._pending is not None or self._is_over)
            if self._is_over:
                return None
            found, self._pending = self._pending, None
            assert found is not None
            self._number = found[0].number
            self._took.clear()
        self.enter("start")
        return found

    @property
    def must_leave(self) -> bool:
        """Whether the generation that this rank is in is over."""
        return bool(self._leaving)

    def tell(self, kind: str, **fields: Any) -> None:
        """Give the agent a message of this rank; its generation and step are added."""
        if kind == "stepped":
            now = time.monotonic()
            if now - self._last_stepped < _STEPPED_S:
                return
            self._last_stepped = now
        self._send({"kind": kind, "generation": self._number, "step": self._step, **fields})

    def enter(self, section: str) -> None:
        """Say that the main thread is in another section of the step, one of SECTIONS."""
        assert section in SECTIONS, section
        now = time.monotonic()
        if self._section != "idle":
            self._took[self._section].append(now - self._since)
        self._section, self._since = section, now

    def at(self, step: int) -> None:
        """Say how many steps are done."""
        self._step = step

    def _send(self, message: Message) -> None:
        with self._sending, suppress(OSError):  # whoever listens ends this process
            self._socket.sendall(encode(message))

    def _listen(self) -> None:
        with suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
            while (line := lines.readline(MOST_BYTES)).endswith(b"\n"):
                self._hear(decode(line))
        if self._is_over:
            time.sleep(_GOODBYE_S)
        end_with_all()

    def _hear(self, message: Message) -> None:
        match message["kind"]:
            case "generation":
                generation = generation_of(message["generation"])
                with self._changed:
                    self._pending = generation, message["rank"], message["local_rank"]
                    self._last_stepped = float("-inf")
                    self._changed.notify_all()
                    before = self._number
                if before and before < generation.number:
                    self._leave(before)
            case "leave":
                self._leave(message["generation"])
            case "stop":
                self._on_stop(message["within_s"])
            case "end":
                with self._changed:
                    self._is_over = True
                    self._changed.notify_all()

    def _leave(self, number: int) -> None:
        with self._changed:
            if self._pending is not None and self._pending[0].number <= number:
                self._pending = None
            if not 0 < self._number <= number or self._leaving:
                return
            self._leaving, self._left_at = self._number, time.monotonic()
        self._cut()
        self._wake.set()

    def _cut(self) -> None:
        with self._cutting:
            if number := self._leaving:
                self._on_leave(number)

    def _beat(self) -> None:
        while True:
            self._send(self._progress())
            if self._wake.wait(_CUT_AGAIN_S if self._leaving else _BEAT_S):
                self._wake.clear()
            self._cut()

    def _progress(self) -> Message:
        section, since = self._section, self._since
        place, is_waiting = _place_of(self._main)
        limit_s = self._limit_s(section)
        if (left_at := self._left_at) is not None:
            since = left_at  # it goes on, and must not
            limit_s = _CUT_LIMIT_S if is_waiting else limit_s
        since_s = time.monotonic() - since
        is_suspicious = limit_s is not None and since_s > _SUSPICIOUS * limit_s
        return {
            "kind": "progress",
            "generation": self._number,
            "step": self._step,
            "section": section,
            "since_s": round(since_s, 3),
            "limit_s": limit_s,
            "place": place,
            "is_waiting": is_waiting,
            "calls": collectives_begun() if is_suspicious else {},
        }

    def _limit_s(self, section: str) -> float | None:
        # Others reach a round when they do, and data arrives when it does.
        if section in ("idle", "round", "stream"):
            return None
        took = list(self._took[section])
        if section in ("start", "restore") or not took:
            return self._first_limit_s
        # A save may have to wait for the one before it, which took longer than the step saw of it.
        least_s = self._first_limit_s if section == "checkpoint" else _FLOOR_S
        return max(least_s, _TIMES * max(took))


def collectives_begun() -> dict[str, tuple[int, list[str]]]:
    """Of each process group of this generation: how many collectives this process has begun, and
    the names of the last of them, as torch's Flight Recorder keeps them anyway."""
    calls: list[dict[str, Any]] = []
    with suppress(RuntimeError, AttributeError, ValueError):
        calls = json.loads(c10d._dump_fr_trace_json()).get("entries", [])  # type: ignore[attr-defined]
    calls = [one for one in calls if not one["is_p2p"]]
    # Groups of earlier generations have the same names; they were made before all ranks' group.
    first = max((one["pg_id"] for one in calls if one["process_group"][1] == _OF_ALL), default=0)
    found: dict[str, tuple[int, list[str]]] = {}
    for one in sorted(calls, key=lambda one: one["record_id"]):
        if one["pg_id"] >= first:
            name = one["process_group"][0]
            names = found.get(name, (0, []))[1]
            names = [*names, one["profiling_name"].rpartition(":")[2]][-_NUM_CALLS:]
            found[name] = one["collective_seq_id"], names
    return found


def end_with_all() -> None:
    """End this process, and what it started where it has a session of its own."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _place_of(thread: int) -> tuple[str, bool]:
    """The innermost line of a thread that is neither torch's nor Python's own, and whether it
    waits in a collective, as far as Python sees it. No file is read."""
    frame = sys._current_frames().get(thread)
    place, innermost, is_waiting = "", "", False
    while frame is not None:
        file = frame.f_code.co_filename
        here = f"{Path(file).name}:{frame.f_lineno} ({frame.f_code.co_name})"
        innermost = innermost or here
        counts_wait = file == busy_clock.__file__
        if not (counts_wait or "site-packages" in file or file.startswith((_STANDARD, "<"))):
            place = here
            break
        is_waiting |= counts_wait or "torch/distributed/" in file
        frame = frame.f_back
    return place or innermost or "no known place", is_waiting
