"""Signals that ask a run to stop, heard at once, whatever the main thread is at.

Python calls a handler between two lines of the main thread, which may be minutes away: in a
compiler, in a collective, in a restore. The byte that its C handler writes (`signal.set_wakeup_fd`)
is read by a thread.

SIGINT and SIGTERM ask for a stop; where a run is to be started again (`Elastic.asks_again`) so does
SIGUSR1, the one that Slurm's --signal is usually given, and which else ends a process. What comes
before a command has read its Job, the kernel keeps (`paceline.cli`); what comes while
nobody listens, this module does.
"""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from paceline.config.elastic import Elastic
from paceline.config.errors import EXIT_SAVED, StoppedInTimeError

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_kept: list[str] = []
# For the main thread, to come out of native code and to close what it has opened.
_UNWIND_S = 1.0


def asking(elastic: Elastic) -> tuple[signal.Signals, ...]:
    """The signals that ask a run to stop."""
    return ALL if elastic.asks_again else ALL[:2]


@contextmanager
def blocked() -> Iterator[None]:
    """Keep signals from the calling thread, and from processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class SignalListener:
    """Hears signals in a thread of its own until it is closed."""

    def __init__(
        self,
        numbers: tuple[signal.Signals, ...],
        on_signal: Callable[[str], None],
        look: Callable[[], None] = lambda: None,
        look_s: float | None = None,
    ) -> None:
        """Listen, and let through what was blocked until now.

        Args:
            numbers: the signals.
            on_signal: is given a signal's name, in the thread and in the main thread.
            look: called in the thread after each signal, and every `look_s` seconds besides.
        """
        self._on_signal, self._look, self._look_s = on_signal, look, look_s
        self._ours, theirs = socket.socketpair()
        for end in (self._ours, theirs):
            end.setblocking(False)
        self._theirs, self._is_closed = theirs, False
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        self._fd_before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="stop-watch", daemon=True)
        self._thread.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        while _kept:
            on_signal(_kept.pop())

    def close(self) -> None:
        """Give signals back the meaning they had before."""
        if self._is_closed:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        self._is_closed = True
        self._theirs.send(b"\0")
        self._thread.join()
        self._ours.close()
        self._theirs.close()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._on_signal(signal.Signals(number).name)

    def _listen(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, ALL)  # the main thread's, which may wait in vain
        while not self._is_closed:
            ready, _, _ = select.select([self._ours], [], [], self._look_s)
            for number in self._ours.recv(64) if ready else b"":
                if number in self._before:
                    self._on_signal(signal.Signals(number).name)
            if not self._is_closed:
                self._look()


@contextmanager
def leaving_until_begun(
    elastic: Elastic, tell: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Around a run and all that comes before it begins: a signal that comes before ends this
    process with 75, for nothing was trained. Once its exit code is settled no signal changes it,
    not even while Python leaves.

    Args:
        tell: passes a signal's name on to the other ranks.

    Yields:
        what says that the run begins; from then on signals are kept for whoever listens next.

    Raises:
        StoppedInTimeError: a signal came.
    """
    if not elastic.asks_again:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ALL)
        try:
            yield lambda: None
        except StoppedInTimeError:  # as the stop file wanted it
            _ignore_from_now()
            raise
        return

    def leave(name: str) -> None:
        tell(name)
        if threading.current_thread() is threading.main_thread():
            print(f"{name} came before the run began: start it again.", flush=True)
            raise StoppedInTimeError
        time.sleep(_UNWIND_S)
        os._exit(EXIT_SAVED)

    # A command blocks it (`paceline.cli`); a script goes on after a run that was not cut.
    ends_with_run = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    before = {number: signal.signal(number, _keep) for number in ALL}
    listener = SignalListener(asking(elastic), leave)
    try:
        yield listener.close
    except StoppedInTimeError:
        ends_with_run = True
        raise
    finally:
        listener.close()
        if ends_with_run:
            _ignore_from_now()
        else:
            for number, handler in before.items():
                signal.signal(number, handler)


def _ignore_from_now() -> None:
    """Python gives signals with handlers their first meaning back as it leaves, but not these."""
    for number in ALL:
        signal.signal(number, signal.SIG_IGN)


def _keep(number: int, _frame: FrameType | None) -> None:
    _kept.append(signal.Signals(number).name)
