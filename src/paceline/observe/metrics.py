"""Metrics: what the training loop writes down after each step.

One line of metrics.jsonl per step is the record of the run; TensorBoard's event file and the
Prometheus endpoint show the same numbers to other tools while the run goes on. Rank 0 calls
`record` once a step. Everything happens on the calling thread (about 0.1 ms with all three open),
because a writer thread would compete with the training thread for the interpreter anyway.

A resumed run repeats the steps after its checkpoint, so the lines after it are dropped first:
there is one object per step, whatever happened in between. TensorBoard's files are append-only; a
session-start event tells it from which step on older events are void.

Lines are flushed to the operating system, not to the disk: a killed process loses nothing, a power
cut may lose the last seconds. This module does not compute any figure: the loop does.

The event file is written with TensorBoard's own record and event classes. `torch.utils.tensorboard`
would do, but importing it takes seconds and loads TensorFlow where that is installed.
"""

import errno
import json
import math
import os
import socket
import time
from io import RawIOBase
from pathlib import Path
from typing import Any

from paceline.config import files
from paceline.config.job_sections import Observe
from paceline.observe.endpoint import Endpoint
from paceline.observe.run import Run, parse_line, read_end, read_lines, write_atomic

Line = dict[str, Any]

_SCALARS = (
    *("loss", "eval_loss", "eval_perplexity", "eval_accuracy", "eval_auc", "eval_best_auc"),
    *("lr", "grad_norm", "step_time_s", "mfu"),
)
_NAMED = ("terms", "figures", "eval_figures")
"""Numbers by name: a tag each, as "terms/matmul"."""


class Metrics:
    """The writers of one run, on rank 0: metrics.jsonl, TensorBoard, Prometheus."""

    def __init__(self, run: Run, settings: Observe, unit: str, resume_step: int) -> None:
        """Open the writers, and forget what came after the step that the run resumes from.

        Args:
            run: the Run directory; it is made where it does not exist.
            settings: which of the writers are wanted.
            unit: what the run counts, "tokens" or "samples".
            resume_step: last step (counted from 1) whose state was restored; 0 for a new run.

        Raises:
            InputError: the port of the Prometheus endpoint can't be opened.
        """
        # First, because it is the one that can fail for a reason the person can mend.
        self._endpoint = Endpoint(run, settings) if settings.prometheus_port else None
        self.taken_back = truncate_after(run.metrics_file, resume_step)
        """The lines that were forgotten."""
        run.path.mkdir(parents=True, exist_ok=True)
        self._lines = run.metrics_file.open("ab", buffering=0)
        self._waiting = b""
        self._events = (
            _EventFile(run.tensorboard_folder, unit, resume_step) if settings.tensorboard else None
        )

    def record(self, line: Line) -> str | None:
        """Write down one step. A full disk does not end the run.

        Numbers that are not finite become null in metrics.jsonl, so that every JSON reader takes
        it; TensorBoard and Prometheus have their own notion of NaN and get it as it is.

        Returns:
            what can't be written and why, None where all is on its way to the disk. Lines of
            metrics.jsonl wait in memory until there is room again; TensorBoard's file ends.
        """
        if self._endpoint:
            self._endpoint.update(line)
        self._waiting += (to_json(line) + "\n").encode()
        try:
            append_atomic(self._lines, self._waiting)
            self._waiting = b""
            if self._events:
                self._events.write(line)
        except OSError as error:
            if not self._waiting:
                self._events = None
            name = "metrics.jsonl" if self._waiting else "TensorBoard's file"
            return f"{name} can't be written ({error.strerror})"
        return None

    def close(self) -> None:
        """Close files and port; closing twice does no harm."""
        self._lines.close()
        if self._events:
            self._events.close()
        if self._endpoint:
            self._endpoint.close()


def numbers_of(line: Line, unit: str) -> dict[str, float]:
    """What a step's line says in numbers, by name: "loss", "terms/matmul".

    Args:
        line: of metrics.jsonl.
        unit: what the run counts, "tokens" or "samples".
    """
    numbers = {key: line.get(key) for key in (*_SCALARS, f"{unit}_per_s", "memory_bytes")}
    for key in _NAMED:
        numbers |= {f"{key}/{name}": value for name, value in line.get(key, {}).items()}
    return {name: number for name, number in numbers.items() if number is not None}


def append_atomic(file: RawIOBase, data: bytes) -> None:
    """Append all of the data to an unbuffered file, or none of it.

    Raises:
        OSError: the disk is full or gone; the file is as it was.
    """
    end = file.seek(0, os.SEEK_END)
    try:
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        file.truncate(end)
        raise


def to_json(line: Line) -> str:
    """One line of strict JSON; numbers that are not finite become null."""
    try:
        return json.dumps(line, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(line), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def truncate_after(file: Path, step: int) -> list[Line]:
    """Leave in a metrics.jsonl one whole line per step up to `step`; a missing file stays missing.

    What a crash cut off goes too. Where its end is in order that end alone is looked at, and cut;
    else the file is replaced atomically, and only where it changes.

    Returns:
        the lines of later steps, which are no longer there.
    """
    if not file.exists():
        return []
    if (found := _end_in_order(file, step)) is not None:
        end, later = found
        if end < file.stat().st_size:
            os.truncate(file, end)
        return later
    changes, kept, taken_back = False, {}, []
    for raw in read_lines(file):
        line = parse_line(raw)
        changes |= line is None or line["step"] > step or line["step"] in kept
        changes |= not raw.endswith(b"\n")
        if line is not None and line["step"] <= step:
            kept[line["step"]] = raw.decode().rstrip("\r\n") + "\n"
        elif line is not None:
            taken_back.append(line)
    if changes:
        write_atomic(file, "".join(kept.values()))
    return taken_back


def drop_from(file: Path, key: str, first: int) -> None:
    """Cut off a samples.jsonl or rollouts.jsonl where its lines begin that are made anew, and what
    a crash cut off; a missing file stays missing.

    Args:
        file: its lines are in the order of their numbers. A damaged one in between stays, as
            readers leave it out.
        key: of a line's number.
        first: the first number that is made anew.

    Raises:
        InputError: it can't be read.
    """
    if not os.path.lexists(file):
        return
    end = 0
    with files.opened(file, "move it away: the run begins a new one") as source:
        for raw in source:
            number = _number(raw, key)
            if not raw.endswith(b"\n") or (number is not None and number >= first):
                break
            end += len(raw)
    if end < file.stat().st_size:
        os.truncate(file, end)


def _number(raw: bytes, key: str) -> int | None:
    """What stands under a key of a line; None: no whole number does, or the line is damaged."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    number = line.get(key) if isinstance(line, dict) else None
    return number if isinstance(number, int) else None


def _end_in_order(file: Path, step: int) -> tuple[int, list[Line]] | None:
    """Where in a file the lines up to a step end, and the later ones, by its last lines; None:
    these aren't one whole line for each step, or begin after that one."""
    end, raws = read_end(file)
    lines = [line for raw in raws if (line := parse_line(raw)) is not None]
    steps = [line["step"] for line in lines]
    is_whole = bool(lines) and len(lines) == len(raws) and raws[-1].endswith(b"\n")
    if not is_whole or steps[0] == 0 or (end and steps[0] > step):
        return None
    if steps != [*range(steps[0], steps[0] + len(steps))]:
        return None
    kept = sum(len(raw) for raw, at in zip(raws, steps, strict=True) if at <= step)
    return end + kept, [line for line in lines if line["step"] > step]


class _EventFile:
    """TensorBoard scalars: one event per step that holds all of its numbers."""

    def __init__(self, folder: Path, unit: str, resume_step: int) -> None:
        # Here and not above: a run without TensorBoard does not pay for the import.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        self._unit = unit
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._records = RecordWriter((folder / name).open("wb"))
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        started = SessionLog(status=SessionLog.START)
        # Voids what older files hold of this step and later ones.
        self._append(Event(wall_time=time.time(), step=resume_step + 1, session_log=started))

    def write(self, line: Line) -> None:
        numbers = numbers_of(line, self._unit)
        values = [
            self._summary.Value(tag=tag, simple_value=number) for tag, number in numbers.items()
        ]
        wall_time = line.get("time", time.time())
        summary = self._summary(value=values)
        self._append(self._event(wall_time=wall_time, step=line["step"], summary=summary))

    def _append(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        self._records.close()
