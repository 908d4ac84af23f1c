"""Events: what happened to a run besides its steps, one JSON object a line of events.jsonl.

Rank 0 writes what happens in a step (spikes, audits), and how a run ends that has no agents; those
write the rest (`elastic.events`). Each line has "time" (Unix seconds), "event" and "generation", 0
where rank 0 writes it.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.observe.metrics import to_json
from paceline.observe.run import Run


def append_event(run: Run, event: str, **fields: Any) -> None:
    """Write an event at the end of a Run's events.jsonl, in one write. A full disk ends no run."""
    with suppress(OSError):
        append_line(run.events_file, line_of(event, 0, **fields))


def line_of(event: str, generation: int, **fields: Any) -> bytes:
    """A line of events.jsonl, of now."""
    known = {"time": time.time(), "event": event, "generation": generation}
    return to_json({**known, **fields}).encode() + b"\n"


def append_line(file: Path, line: bytes) -> None:
    """Write a line at the end of a file in one write, so that lines of two processes never mix.

    Raises:
        OSError: the disk is full or gone.
    """
    number = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if os.write(number, line) != len(line):
            os.write(number, b"\n")  # the disk is full; the next line begins anew
    finally:
        os.close(number)
