"""Recorder: writes where a server's time goes, a line a second; see `plan.serving.record`."""

from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from paceline.config.errors import InputError
from paceline.generate.engine import Engine
from paceline.generate.sequence import Sequence
from paceline.generate.work import Step, WorkCounter
from paceline.plan.serving.costs import StepCosts, Terms
from paceline.plan.serving.measured import (
    MeasuredServing,
    form_of,
    measured_file,
    read_measured,
)
from paceline.plan.serving.record import RECORD_FILE, PlannedTerms, RecordHead, RecordSecond


class Recorder:
    """Of one engine, in whose thread it is told of steps.

    Args:
        folder: gets the record.
        served: the folder of the network, where `paceline bench serve` may have measured it.

    Raises:
        InputError: the folder has a record already, or can't be written.
    """

    def __init__(self, folder: Path, name: str, served: Path, engine: Engine) -> None:
        self._engine, self._begun_s = engine, 0.0
        model, size = engine.decoder.model, engine.serving.block_size
        form = form_of(
            str(next(engine.decoder.parameters()).dtype), engine.weight_form, engine.key_form
        )
        measured = _measured_of(measured_file(served, form))
        is_same = measured is not None and measured.model == model
        self._costs: StepCosts | None = measured.costs() if measured and is_same else None
        self._count = WorkCounter(model, size)
        self._ended_s: float | None = None
        self._was_idle = True
        self._preemptions = 0
        self._second = 0
        self._sums: defaultdict[str, Any] = defaultdict(int)
        self._terms = Terms()
        self._least_free: int | None = None
        self._seen: dict[Sequence, float] = {}
        """When something of a text was first computed, until its first token."""
        head = RecordHead(
            name=name,
            max_sequences=engine.serving.max_sequences,
            max_tokens=engine.most_tokens,
            blocks=engine.numbers()["blocks"],
            planned=measured.source if measured and is_same else None,
        )
        self._file: TextIO | None = _opened(folder)
        self._write(head.model_dump_json())
        engine.tell_step = self.step

    def step(self, step: Step) -> None:
        """A step was done."""
        if self._ended_s is None:
            self._begun_s = self._ended_s = step.begun_s
        if (second := int(step.ended_s - self._begun_s)) != self._second:
            self._end_second(second)
        sums, numbers, work = self._sums, self._engine.numbers(), self._count(step.chunks)
        sums["idle_s" if self._was_idle else "gap_s"] += step.begun_s - self._ended_s
        sums["steps"] += 1
        sums["host_s"] += step.host_s
        sums["pass_s"] += step.pass_s
        sums["rows"] += work.rows
        sums["prompt_tokens"] += work.in_parts
        sums["text_tokens"] += work.choices
        sums["running"] += len(step.chunks)
        sums["preemptions"] += numbers["preemptions"] - self._preemptions
        sums["most_waiting"] = max(sums["most_waiting"], numbers["waiting"])
        free = numbers["blocks_free"]
        self._least_free = free if self._least_free is None else min(free, self._least_free)
        if self._costs is not None:
            self._terms += self._costs.terms(work)
        for chunk in step.chunks:
            if chunk.start < chunk.sequence.num_prompt:
                self._seen.setdefault(chunk.sequence, step.begun_s)
        self._ended_s, self._preemptions = step.ended_s, numbers["preemptions"]
        self._was_idle = self._engine.is_idle

    def first_token(self, sequence: Sequence, asked_s: float, now_s: float) -> None:
        """A text's first token came.

        Args:
            asked_s: when it was asked for, by `time.perf_counter`.
        """
        self._sums["first_tokens"] += 1
        self._sums["ttft_s"] += now_s - asked_s
        self._sums["queue_s"] += max(0.0, self._seen.pop(sequence, asked_s) - asked_s)

    def close(self) -> None:
        """Write what is left."""
        self._end_second(self._second)
        if self._file is not None:
            self._file.close()

    def _end_second(self, next_second: int) -> None:
        if self._sums:
            planned = PlannedTerms(**self._terms._asdict())
            line = RecordSecond(
                second=self._second, planned=planned, least_free=self._least_free, **self._sums
            )
            self._write(line.model_dump_json())
        self._second, self._terms, self._least_free = next_second, Terms(), None
        self._sums.clear()
        self._seen = {text: at for text, at in self._seen.items() if text.end is None}

    def _write(self, line: str) -> None:
        """A full disk ends the record, not the server."""
        if self._file is None:
            return
        try:
            self._file.write(f"{line}\n")
            self._file.flush()
        except OSError:
            with suppress(OSError):
                self._file.close()
            self._file = None


def _measured_of(file: Path) -> MeasuredServing | None:
    """What was measured, where it can be read: a server does not fail for want of it."""
    with suppress(InputError):
        return read_measured(file)
    return None


def _opened(folder: Path) -> TextIO:
    file = folder / RECORD_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return file.open("x", encoding="utf-8")
    except FileExistsError:
        raise InputError(f"{file} is there already: give --record another folder.") from None
    except OSError as error:
        raise InputError(
            f"{file} can't be written ({error.strerror}): give --record another folder."
        ) from None
