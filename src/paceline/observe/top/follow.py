"""Follow: the newest lines of a metrics.jsonl that grows, without reading it again and again.

Each look reads what was appended since the last one. A run that goes on from a checkpoint drops the
lines after it by putting a new file in place; then the end of that one is read anew. Of a long file
only the end is ever read.
"""

import json
import os
from collections import deque
from pathlib import Path
from typing import Any

_MOST_LINES = 600
# A line is a few hundred bytes, with the figures of 64 ranks three thousand.
_END_BYTES = 2_000_000


class Follow:
    """The end of one file, as far as it is written."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._identity: tuple[int, int] | None = None
        self._position = 0
        self._rest = b""
        self.lines: deque[dict[str, Any]] = deque(maxlen=_MOST_LINES)
        """The newest steps, oldest first."""

    def look(self) -> bool:
        """Read what is new; returns whether anything was."""
        try:
            with self._file.open("rb") as file:
                return self._read(file)
        except FileNotFoundError:
            self._forget(None, 0)
            return False

    def _read(self, file: Any) -> bool:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        if identity != self._identity or status.st_size < self._position:
            self._forget(identity, max(0, status.st_size - _END_BYTES))
        file.seek(self._position)
        data = self._rest + file.read()
        self._position = file.tell()
        *whole, self._rest = data.split(b"\n")
        steps = [step for step in map(_parsed, whole) if step is not None]
        self.lines.extend(steps)
        return bool(steps)

    def _forget(self, identity: tuple[int, int] | None, position: int) -> None:
        self._identity, self._position, self._rest = identity, position, b""
        self.lines.clear()


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A step, None for what is no whole line: the first one when reading begins in its middle."""
    try:
        step = json.loads(line)
    except ValueError:
        return None
    return step if isinstance(step, dict) and "step" in step else None
