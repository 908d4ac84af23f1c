"""Follow: the newest lines of a metrics.jsonl that grows, without reading it again and again.

Each look reads what was appended since the last one. A run that goes on from an earlier state drops
the lines after it, by cutting the file or by putting a new one in place; then its end is read anew.
Of a long file only the end is ever read.
"""

import os
from collections import deque
from pathlib import Path
from typing import IO, Any

from paceline.config.files import opened
from paceline.observe.run import parse_line

_MOST_LINES = 600
# A line is a few hundred bytes, with the figures of 64 ranks three thousand.
_END_BYTES = 2_000_000


class FollowedFile:
    """The end of one file, as far as it is written."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._identity: tuple[int, int] | None = None
        self._position = 0
        self._rest = b""
        self._last = b""
        """The last whole line that was read, and what follows it."""
        self.lines: deque[dict[str, Any]] = deque(maxlen=_MOST_LINES)
        """The newest steps, oldest first."""
        self.num_damaged = 0
        """Lines that were left out because they hold no step."""

    def look(self) -> bool:
        """Read what is new; returns whether anything was.

        Raises:
            InputError: the file can't be read.
        """
        if not os.path.lexists(self._file):
            self._forget(None, 0)
            return False
        with opened(self._file, "move it away: the run writes its next steps anew") as file:
            return self._read(file)

    def _read(self, file: IO[bytes]) -> bool:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        if identity != self._identity or not self._goes_on(file):
            self._forget(identity, max(0, status.st_size - _END_BYTES))
        file.seek(self._position)
        begins_within = bool(self._position) and not self.lines and not self._rest
        fresh = file.read(_END_BYTES)
        data, self._position = self._rest + fresh, file.tell()
        if fresh:
            before_last = data.rfind(b"\n", 0, max(0, data.rfind(b"\n")))
            self._last = data[before_last + 1 :]
        *whole, self._rest = data.split(b"\n")
        self._rest = self._rest[-_END_BYTES:]
        parsed = [parse_line(line) for line in whole]
        steps = [step for step in parsed if step is not None]
        # The first line of all may be the end of one.
        self.num_damaged += parsed[begins_within:].count(None)
        self.lines.extend(steps)
        return bool(steps)

    def _goes_on(self, file: IO[bytes]) -> bool:
        """Whether the last line still stands there: one that was written anew has another time."""
        file.seek(self._position - len(self._last))
        return file.read(len(self._last)) == self._last

    def _forget(self, identity: tuple[int, int] | None, position: int) -> None:
        self._identity, self._position, self._rest = identity, position, b""
        self._last = b""
        self.lines.clear()
        self.num_damaged = 0
