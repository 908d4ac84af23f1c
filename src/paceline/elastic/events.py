"""events.jsonl: what happened to an elastic run, one JSON object a line, in the Run directory.

The leader's agent appends, from a thread. A disk that is full or gone is no reason for a run to
stop: what can't be written is lost, and said once.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from paceline.observe.events import append_line, line_of
from paceline.observe.run import Run


class EventLog:
    """Takes events and never waits for the disk.

    Args:
        say: takes a sentence for a person.
    """

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._file, self._say = run.events_file, say
        self._has_failed = False
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        # Of a disk that never answers nobody waits, not even at the end of the process.
        self._writer = threading.Thread(target=self._write, name="events", daemon=True)
        self._writer.start()

    def add(self, event: str, generation: int, **fields: Any) -> None:
        """Append an event.

        Args:
            event: its name, as docs/elastic.md lists them.
            generation: the number of the one that it happened in; 0: before the first.
        """
        self._lines.put(line_of(event, generation, **fields))

    def close(self, limit_s: float = 5.0) -> None:
        """Write what is left, as far as the disk takes it in time."""
        self._lines.put(None)
        self._writer.join(limit_s)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            self._append(line)

    def _append(self, line: bytes) -> None:
        try:
            append_line(self._file, line)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._say(f"{self._file} can't be written ({error.strerror}); the run goes on.")
