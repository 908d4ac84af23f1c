"""How a run is asked to stop, and how it does so in time.

A signal, a file named "stop" in the Run, an agent's word and the end of Slurm's time are one path.
Every process of a run that is told asks for the same stop, for a signal may reach one of them or
all at once: the launcher makes the file, a rank says so in the exchange of its step, and a rank
that was told by anything else makes the file, for those that are in no step. Processes that help a
rank (`comm.forkserver_process`, servers, data workers) ignore signals. The file also lets a person
stop a run on a machine they have no shell on, and a script pass on a cloud's notice.

Where this machine goes away at a known moment (`elastic.save_within_s`, or a number in the file)
the run is to be started again, and nothing may hold it: a rank that has done no step since its
start, be it in a restore or a compiler, ends at once, for its state is that of the last checkpoint;
and one that is not done in time says what is lost. Until then every checkpoint is made that can be
made: one that isn't whole is never seen, so to try costs nothing.
"""

import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
from torch.utils.data._utils import signal_handling

from paceline.config.elastic import Elastic
from paceline.config.errors import EXIT_SAVED
from paceline.elastic.signals import ALL, SignalListener, asking, blocked
from paceline.observe.events import append_event
from paceline.observe.run import Run

# Between looks at the file, which may be on a disk that thousands of ranks share.
_LOOK_S = 0.5
# Kept of the time that there is, for the way out: at most so many seconds, and such a part.
_MARGIN_S, _MARGIN_SHARE = 0.5, 0.1
# All ranks reach a step's exchange, or those that did hear within this that another one has left.
_EXCHANGE_S = 5.0
_SLURM_END = "SLURM_JOB_END_TIME"


@dataclass(frozen=True)
class Notice:
    """That a run is to stop."""

    source: str
    """Who says so: a signal's name, "the stop file", ..."""
    seen: float
    """On this process's monotonic clock."""
    within_s: float | None
    """So long after that this machine goes away; None: nobody knows."""

    @property
    def is_over(self) -> bool:
        """Whether the time is, but for what the way out takes."""
        if self.within_s is None:
            return False
        margin_s = min(_MARGIN_S, _MARGIN_SHARE * self.within_s)
        return time.monotonic() - self.seen > self.within_s - margin_s


class StopRequest:
    """Whether this rank was asked to stop; watches that it does."""

    def __init__(self, run: Run, elastic: Elastic) -> None:
        """Listen to signals and look at the Run's stop file, until closed."""
        self.speaks = False
        """Whether this rank does for the run, as the first one does."""
        self.is_copying = False
        """Whether the last checkpoint is written, and only its copy in a store is waited for."""
        self.notice: Notice | None = None
        self._run, self._elastic = run, elastic
        self._done: int | None = None
        """Steps, once one was done here."""
        self._in_first_exchange, self._is_finished, self._is_told = False, False, False
        self._saved: int | None = None
        self._leaving = threading.Lock()
        self._end = _end_of_slurm(elastic)
        _spare_data_workers()
        self._listener = SignalListener(asking(elastic), self.ask, self._watch, _LOOK_S)

    def close(self) -> None:
        """Give signals back the meaning they had before."""
        self._listener.close()

    def __bool__(self) -> bool:
        self._look()
        return self.notice is not None

    @property
    def asks_again(self) -> bool:
        """Whether a run that stops now is to be started again: it exits with 75."""
        known_end = self.notice is not None and self.notice.within_s is not None
        return self._elastic.asks_again or known_end

    def ask(self, source: str, within_s: float | None = None) -> None:
        """Ask for a stop, from any thread; what comes after the first is the same wish.

        Args:
            source: who asks.
            within_s: after which this machine goes away; None: `elastic.save_within_s`.
        """
        if self.notice is None:
            within_s = self._elastic.save_within_s if within_s is None else within_s
            self.notice = Notice(source, time.monotonic(), within_s)

    def in_exchange(self) -> bool:
        """Whether to stop, asked where a rank enters the exchange of its step.

        Whoever leaves at once does so before that, or not at all: then no rank has done the step.
        """
        with self._leaving:
            self._in_first_exchange = self._done is None
        return bool(self)

    def stepped(self, done: int) -> None:
        """Note that so many steps are done, one of them by this process."""
        self._done = done

    def saved(self, done: int, *, is_finished: bool) -> None:
        """Note that a checkpoint of the last step is written, and whether nothing is left to do."""
        if self.notice is not None and self.asks_again:
            self._tell(self.notice)  # the run may be over before the listener looks again
        with self._leaving:
            self._saved, self._is_finished = done, is_finished

    def _look(self) -> None:
        """At the file and the clock."""
        if self.notice is not None:
            return
        with suppress(OSError):
            text, _, reason = self._run.stop_file.read_text(errors="replace").strip().partition(" ")
            self.ask(reason.strip() or "the stop file", _seconds(text))
        if self._end is not None and time.time() > self._end:
            self.ask("the end of Slurm's time")

    def _watch(self) -> None:
        """In the listener's thread."""
        self._look()
        if self.notice is None or not self.asks_again:
            return
        self._tell(self.notice)
        waited_s = time.monotonic() - self.notice.seen
        with self._leaving:
            if self._is_finished:
                return
            if self._done is None:
                if not self._in_first_exchange or waited_s > _EXCHANGE_S:
                    self._leave(
                        f"{self.notice.source}: nothing was trained since the start, and nothing "
                        "has to be saved; start it again."
                    )
            elif self.notice.is_over:
                self._leave(self._lost(self._done, self.notice))

    def _tell(self, notice: Notice) -> None:
        """Those that are in no step, once."""
        if self._is_told:
            return
        self._is_told = True
        ask_by_file(self._run, notice.source, notice.within_s)
        if self.speaks and not self._elastic.is_on:  # else an agent says so
            told = {"within_s": notice.within_s, "source": notice.source}
            append_event(self._run, "notice", node=platform.node(), **told)

    def _lost(self, done: int, notice: Notice) -> str:
        if self.is_copying:
            return (
                f"stopped after step {done}, checkpoint kept on the disk, its copy in the store of "
                "checkpoint.copy_to not complete; start it again."
            )
        if self._saved is not None:
            return f"stopped after step {self._saved}, checkpoint kept; start it again."
        newest = self._run.last_checkpoint()
        kept = "there is no checkpoint" if newest is None else f"the newest is step-{newest[0]}"
        return (
            f"{notice.source}: the {notice.within_s:g} s until this machine goes away are over, "
            f"and the checkpoint of step {done} is not written: {kept}, and what came after it is "
            "trained again. Give notice earlier (elastic.save_within_s), or use a faster disk."
        )

    def _leave(self, sentence: str) -> None:
        """End this process, from a thread, whatever the others are at."""
        if self.speaks:
            if not self._elastic.is_on:
                end = {"state": "saved", "exit_code": EXIT_SAVED, "sentence": sentence}
                append_event(self._run, "end", **end)
            print(sentence)
        print(sentence, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_SAVED)


@contextmanager
def term_as_interrupt() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, also in what ends by showing what it has found so far."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ask_by_file(run: Run, source: str, within_s: float | None) -> None:
    """Ask all processes of a run to stop, unless somebody has, or there is no Run yet.

    Args:
        within_s: after which this machine goes away; None: nobody knows.
    """
    with suppress(OSError), run.stop_file.open("x") as file, suppress(OSError):
        file.write("" if within_s is None else f"{within_s} {source}\n")  # a full disk: a name


def _seconds(text: str) -> float | None:
    """What a stop file begins with, where that is a number of seconds."""
    with suppress(ValueError):
        return value if 0 < (value := float(text)) < float("inf") else None
    return None


def _end_of_slurm(elastic: Elastic) -> float | None:
    """When a job of Slurm has to begin to stop, unix time; None: nobody asks, or none is known."""
    known = os.environ.get(_SLURM_END, "")
    if elastic.save_within_s is None or not known.isdecimal():
        return None
    return int(known) - elastic.save_within_s


def _spare_data_workers() -> None:
    """Let the worker processes of torch's DataLoaders, forked from now on, ignore signals that ask
    for a stop: they end with their loader. torch gives them handlers of its own, under which
    SIGTERM kills one, and that ends the rank."""
    give_handlers = signal_handling._set_worker_signal_handlers  # type: ignore[attr-defined]
    if getattr(give_handlers, "spares_workers", False):
        return

    def spared() -> None:
        give_handlers()
        for number in ALL:
            signal.signal(number, signal.SIG_IGN)

    spared.spares_workers = True  # type: ignore[attr-defined]
    signal_handling._set_worker_signal_handlers = spared  # type: ignore[attr-defined]


def shield_compile_workers() -> None:
    """The same for the processes in which torch's compiler compiles, and what these start: a rank
    whose compiler is gone can't take the step after which it would stop.

    They inherit a mask that blocks the signals: unlike a handler, any thread may set it, and this
    process loses no signal meanwhile.
    """
    from torch._inductor.compile_worker.subproc_pool import SubprocPool  # takes a second

    start = SubprocPool.__init__
    if getattr(start, "spares_workers", False):
        return

    def spared(pool: SubprocPool, *arguments: Any, **settings: Any) -> None:
        with blocked():
            start(pool, *arguments, **settings)

    spared.spares_workers = True  # type: ignore[attr-defined]
    SubprocPool.__init__ = spared  # type: ignore[method-assign, assignment]


def exit_with_parent(launcher_pid: int) -> None:
    """Make this process end when its launcher is gone, even by kill -9.

    A rank that outlives its launcher would hold its device and write into a Run that a new start
    may already own. Neither the parent's id nor a closed pipe tells: the parent is
    multiprocessing's fork server, which lives as long as its children, and a killed launcher may
    stay a zombie.
    """
    launcher = psutil.Process(launcher_pid)

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):  # gone between the two questions
            while launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.5)
        if os.getpgrp() == os.getpid():  # with all that was started from here
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
