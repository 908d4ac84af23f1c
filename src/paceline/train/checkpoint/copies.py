"""Copying checkpoints to a store, beside training.

A thread copies one checkpoint at a time. The newest that is offered meanwhile waits, and takes the
place of one that waited before; so a slow store gets fewer checkpoints, and no step waits for it.
A copy that fails is tried again a few times, then said, and the run goes on: the next checkpoint is
another attempt.

Not here: what a copy is (`store`).
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from paceline.observe.stored import trouble_text
from paceline.train.checkpoint.files import DamagedError
from paceline.train.checkpoint.store import WAITS_S, CheckpointStore

# A thread that is to end looks so often; a request of a store that hangs is left alone then.
_PATIENCE_S = 2.0


class _GivenUpError(Exception):
    """The copy is to end where it is."""


class CheckpointCopies:
    """The copies of one run's checkpoints, on the rank that completes them.

    Args:
        store: where they go.
        directory: where checkpoints are on the disk.
        to_remove: of the steps in the store (ascending) those to remove, once the newest is there.
        waits_s: after failed attempts.
    """

    def __init__(
        self,
        store: CheckpointStore,
        directory: Path,
        to_remove: Callable[[list[int], int], list[int]],
        waits_s: tuple[float, ...] = WAITS_S,
    ) -> None:
        self._store, self._directory, self._to_remove = store, directory, to_remove
        self._waits_s = waits_s
        self._changed = threading.Condition()
        self._under_way: int | None = None
        self._waiting: int | None = None
        self._old: int | None = None
        """The newest that was offered as one that an earlier start may have copied."""
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._sentences: list[str] = []
        self._cpu_s = 0.0

    def offer(self, step: int, *, is_new: bool = True) -> None:
        """Copy this checkpoint as soon as the one under way is done; returns at once.

        Args:
            step: its step.
            is_new: it was just saved; else an earlier start may have copied it.
        """
        with self._changed:
            self._waiting, self._old = step, self._old if is_new else step
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
                self._thread.start()

    def needed(self) -> set[int]:
        """The steps whose checkpoints must stay on the disk for now."""
        with self._changed:
            return {step for step in (self._under_way, self._waiting) if step is not None}

    def take_sentences(self) -> list[str]:
        """What is to be said of copies since the last call."""
        with self._changed:
            taken, self._sentences = self._sentences, []
        return taken

    def take_cpu_s(self) -> float:
        """Seconds of processor time of the copying thread since the last call."""
        with self._changed:
            taken, self._cpu_s = self._cpu_s, 0.0
        return taken

    def finish(self) -> None:
        """Wait until nothing is left to copy."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def close(self) -> None:
        """Give up what is left to copy; in the store it is absent."""
        self._closing.set()
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None, _PATIENCE_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                step, self._waiting = self._waiting, None
                self._under_way = step
                if step is None or self._closing.is_set():
                    self._thread = None
                    self._changed.notify_all()
                    return
            began_s = time.thread_time()
            sentence = self._copy(step)
            with self._changed:
                self._cpu_s += time.thread_time() - began_s
                self._sentences += [sentence] if sentence else []

    def _copy(self, step: int) -> str:
        """Copy a checkpoint and tidy up; returns what a person is told, "": nothing."""
        began_s = time.perf_counter()
        try:
            is_new = step != self._old
            sent = self._attempts(
                lambda: self._store.put(self._path(step), step, self._go_on, is_new=is_new)
            )
        except _GivenUpError:
            return ""
        except Exception as error:
            if self._waiting is not None:
                return ""  # a newer one takes its place
            why = str(error) if isinstance(error, DamagedError) else trouble_text(error)
            return (
                f"checkpoint step-{step} was not copied to {self._store.url} ({why}); the run goes "
                "on, and copies the next one, or this one when it is started again."
            )
        if not sent:
            return ""
        took = f"{sent / 1e6:.1f} MB in {time.perf_counter() - began_s:.1f} s"
        return f"checkpoint step-{step} is copied to {self._store.url}, {took}{self._tidy(step)}."

    def _attempts(self, attempt: Callable[[], int]) -> int:
        for wait_s in self._waits_s:
            try:
                return attempt()
            except (_GivenUpError, DamagedError):
                raise
            except Exception:
                if self._waiting is not None:
                    raise
                self._closing.wait(wait_s)
                self._go_on()
        return attempt()

    def _go_on(self) -> None:
        if self._closing.is_set():
            raise _GivenUpError

    def _tidy(self, newest: int) -> str:
        """Remove from the store what isn't kept, and half copies; returns what went wrong."""
        try:
            steps = self._store.steps()
            whole = [step for step in steps if self._store.manifest(step) is not None]
            stale = self._to_remove(whole, newest)
            for step in (*stale, *(step for step in steps if step not in whole)):
                self._store.remove(step)
        except Exception as error:
            return f", but tidying up there failed ({trouble_text(error)})"
        return ""

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step}"
