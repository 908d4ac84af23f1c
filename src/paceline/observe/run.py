"""Run: the directory that is the contract between training and everything that reads it afterwards.

job.toml        the Job, written before step 0
plan.json       why each "auto" became what it is
facts.json      what the run ran on and with: versions, device, ranks, parameters, data
metrics.jsonl   one object per step
events.jsonl    what happened besides: stops, losses, spikes, audits
cluster.toml    what its steps said about the machine, for the next plan
trace/          profiled windows: rank<k>-step<n>.json.gz (open in Perfetto)
memory/         memory over these windows: rank<k>-step<n>.json, and .pickle of torch's on CUDA
checkpoints/    step-<n>/ complete or absent, latest
tokenizer/      tokenizer.json, and what was given beside it: what an export carries
trackers.json   what trackers call the run
tensorboard/    report.html    log/rank<k>.log
launch/         <k>/: how it was launched on a site, and what its nodes wrote
energy/         what each node of each start took (`observe.energy`)
exports.jsonl   one object per export of its weights
tasks.jsonl     one object per task that `paceline evaluate` gave its network
tags.json       words that a person gave it
"""

import glob
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from pydantic import TypeAdapter, ValidationError

from paceline.config import files
from paceline.config.job import Job, decided, read_job
from paceline.observe.records import DOCTOR, EVENT, EXPORT, FACTS, LINE, PLAN, SAMPLE, TASK

# A line with the figures of 64 ranks takes three thousand bytes.
_MOST_LINE_BYTES = 1 << 20
# Of a file of which only the last lines are asked for.
_END_BYTES = 1 << 18
_MANIFEST_SUM = re.compile(rb'\{"sha256":"([0-9a-f]{64})"')
STEP_DIRECTORY = re.compile(r"step-(\d+)")
MANIFEST = "manifest.json"
"""In a checkpoint's directory: what it consists of."""
MOST_MANIFEST_BYTES = 1 << 30
"""Ranks times tensors: one of 1,000 ranks takes some 100 MB."""


class Records(NamedTuple):
    """What a metrics.jsonl or an events.jsonl holds."""

    lines: list[dict[str, Any]]
    """One a step or event, see `records.StepRecord` and `records.Event`."""
    damage: str | None
    """Which lines are left out because they hold none, as a sentence; None: none."""


LAUNCH = "PACELINE_LAUNCH"
"""The variable that tells a command its launch's folder."""


@dataclass(frozen=True)
class Run:
    """Paths and plain readers of one Run directory."""

    path: Path

    @property
    def metrics_file(self) -> Path:
        """One JSON object per step, in the order of the steps."""
        return self.path / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        """One JSON object per event: losses, stops, spikes, audits (`observe.events`)."""
        return self.path / "events.jsonl"

    @property
    def samples_file(self) -> Path:
        """One JSON object per evaluation: how the network went on from prompts."""
        return self.path / "samples.jsonl"

    @property
    def rollouts_file(self) -> Path:
        """One JSON object per step that made completions: those of its first prompt, and their
        rewards."""
        return self.path / "rollouts.jsonl"

    @property
    def exports_file(self) -> Path:
        """One JSON object per export of its weights."""
        return self.path / "exports.jsonl"

    @property
    def tasks_file(self) -> Path:
        """One JSON object per task that its network was evaluated on."""
        return self.path / "tasks.jsonl"

    @property
    def trace_folder(self) -> Path:
        """Traces of profiled windows."""
        return self.path / "trace"

    @property
    def has_windows(self) -> bool:
        """Whether steps were recorded, also where their lines have no terms."""
        return any(self.trace_folder.glob("rank*.json*"))

    @property
    def memory_folder(self) -> Path:
        """Memory over profiled windows."""
        return self.path / "memory"

    @property
    def checkpoint_folder(self) -> Path:
        """Complete checkpoints and nothing else."""
        return self.path / "checkpoints"

    @property
    def tensorboard_folder(self) -> Path:
        """Event files for TensorBoard."""
        return self.path / "tensorboard"

    @property
    def log_folder(self) -> Path:
        """What each rank wrote to its standard error, and the run's own messages."""
        return self.path / "log"

    @property
    def tokenizer_folder(self) -> Path:
        """What says how tokens are read and written, of a language model."""
        return self.path / "tokenizer"

    @property
    def launch_folder(self) -> Path:
        """How it was launched, a folder each time (`paceline.launch.records`)."""
        return self.path / "launch"

    def note_launch(self) -> None:
        """Link the launch that started this process, where it has the name of a script and not
        that of the Run which the script made."""
        folder = Path(os.environ.get(LAUNCH, ""))
        if not folder.is_absolute() or not folder.is_dir():
            return
        with suppress(OSError):  # a file system without links: the run trains all the same
            self.launch_folder.mkdir(exist_ok=True)
            known = [*self.launch_folder.iterdir()]
            if folder.resolve() in [one.resolve() for one in known]:
                return
            number = 1 + max((int(one.name) for one in known if one.name.isdecimal()), default=0)
            target = os.path.relpath(folder, self.launch_folder.resolve())
            (self.launch_folder / str(number)).symlink_to(target)

    @property
    def report_file(self) -> Path:
        """The self-contained page."""
        return self.path / "report.html"

    @property
    def stop_file(self) -> Path:
        """While this file exists, the run stops after its step and keeps a checkpoint. A number in
        it is the seconds within which this machine goes away."""
        return self.path / "stop"

    @property
    def exists(self) -> bool:
        """Whether a Job was ever started here."""
        return (self.path / "job.toml").is_file()

    def job(self) -> Job:
        """The Job of this Run.

        Raises:
            InputError: job.toml is damaged, or no plan made it; so do all readers here.
        """
        return decided(read_job(self.path / "job.toml"))

    def plan(self) -> dict[str, Any]:
        """The plan.json, empty where there is none; see `records.PlanFile`."""
        return self._read("plan.json", PLAN)

    def facts(self) -> dict[str, Any]:
        """The facts.json, empty where there is none yet; see `records.FactsFile`."""
        return self._read("facts.json", FACTS)

    def doctor(self) -> dict[str, Any]:
        """The doctor.json, empty where there is none; see `records.DoctorFile`."""
        return self._read("doctor.json", DOCTOR)

    def steps(self) -> Records:
        """The steps so far. Lines that hold none are left out; a last one that was cut off by a
        crash, or is being written, is no damage."""
        return _records(self.metrics_file, LINE, "step")

    def events(self) -> Records:
        """What happened so far, none where the run is not elastic; else as `steps`."""
        return _records(self.events_file, EVENT, "event")

    def exports(self) -> list[dict[str, Any]]:
        """Exports of its weights so far, see `records.ExportRecord`; damaged lines are left out."""
        return _records(self.exports_file, EXPORT, "export").lines

    def samples(self) -> list[dict[str, Any]]:
        """Texts so far, see `records.SampleRecord`; damaged lines are left out."""
        return _records(self.samples_file, SAMPLE, "sample").lines

    def tasks(self) -> list[dict[str, Any]]:
        """Tasks so far, see `records.TaskRecord`; damaged lines are left out."""
        return _records(self.tasks_file, TASK, "task").lines

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `steps` alone."""
        return self.steps().lines

    def newest_steps(self) -> list[dict[str, Any]]:
        """The last of `metrics`, in a time that doesn't depend on how many there are."""
        lines = [parse_line(raw) for raw in read_end(self.metrics_file)[1]]
        return [line for line in lines if line is not None] or self.metrics()

    def step(self, number: int) -> dict[str, Any] | None:
        """The line of a step, None where there is none; one of the newest is found at once."""
        for read in (self.newest_steps, self.metrics):
            for line in read():
                if line["step"] == number:
                    return line
        return None

    def has_evaluation(self, number: int) -> bool:
        """Whether the line of a step has the figures of an evaluation."""
        return "eval_loss" in (self.step(number) or {})

    def _read(self, name: str, kind: TypeAdapter[Any]) -> dict[str, Any]:
        file = self.path / name
        if not os.path.lexists(file):
            return {}
        return dict(files.read_json(file, kind, "put back a copy of it, or remove it"))

    def last_checkpoint(self) -> tuple[int, float] | None:
        """Step and unix time of the newest checkpoint, None where there is none."""
        latest = self.checkpoint_folder / "latest"
        try:
            return int(latest.readlink().name.removeprefix("step-")), latest.stat().st_mtime
        except (OSError, ValueError):
            return None

    def checkpoint_sum(self, step: int) -> str | None:
        """The sum of a checkpoint's manifest, which has those of all its files, as it says itself.
        None: there is none that can be read."""
        try:
            with (self.checkpoint_folder / f"step-{step}" / MANIFEST).open("rb") as file:
                found = _MANIFEST_SUM.match(file.read(96))
        except OSError:
            return None
        return None if found is None else found[1].decode()

    def write(self, name: str, text: str) -> Path:
        """Write a file of the Run so that a reader never sees half of it."""
        return write_atomic(self.path / name, text)

    def write_json(self, name: str, value: Any) -> Path:
        """Write a JSON file of the Run."""
        return self.write(name, json.dumps(value, indent=2) + "\n")


def run_named(name: str | Path, runs: Path) -> Run:
    """The run that a person means: by its directory, or by its name in the folder of runs."""
    there = Run(Path(name))
    is_path = len(there.path.parts) > 1 or there.exists or there.launch_folder.is_dir()
    return there if is_path else Run(runs / name)


def complete_steps(directory: Path) -> list[int]:
    """Return the steps whose directory is there, ascending; unfinished ones have another name."""
    if not directory.is_dir():
        return []
    matches = [STEP_DIRECTORY.fullmatch(path.name) for path in directory.iterdir()]
    return sorted(int(match[1]) for match in matches if match)


def cache_home() -> Path:
    """For what can be made again: $XDG_CACHE_HOME/paceline or ~/.cache/paceline."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def write_atomic(file: Path, text: str) -> Path:
    """Write a text file complete or not at all: beside it, to the disk, then renamed. What a
    process of this host was killed over, the next one removes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    begin = f"{file.name}.{socket.gethostname()}.tmp"
    for left in file.parent.glob(f"{glob.escape(begin)}*"):
        pid = left.name.removeprefix(begin)
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            left.unlink(missing_ok=True)
    draft = file.with_name(f"{begin}{os.getpid()}")
    try:
        with draft.open("w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
    return file


def json_lines(values: Iterable[dict[str, Any]]) -> str:
    """One compact JSON object per line."""
    return "".join(json.dumps(value) + "\n" for value in values)


def read_lines(file: Path, kind: str = "step") -> Iterator[bytes]:
    """The lines of a file with their ends, none where there is no file; of a line without end its
    beginning, with an end.

    Args:
        file: of the Run.
        kind: what a line of it holds.

    Raises:
        InputError: it can't be read.
    """
    if not os.path.lexists(file):
        return
    with files.opened(file, f"move it away: the run writes its next {kind}s anew") as source:
        while line := source.readline(_MOST_LINE_BYTES):
            if len(line) == _MOST_LINE_BYTES:
                while not line.endswith(b"\n") and (rest := source.readline(_MOST_LINE_BYTES)):
                    line = line[:64] + rest[-1:]
                line = line[:64] + b"\n"
            yield line


def read_end(file: Path) -> tuple[int, list[bytes]]:
    """The last lines of a file of the Run with their ends, and where in it the first of them
    begins; none where the file is missing, or its last line is longer than what is read.

    Raises:
        InputError: it can't be read.
    """
    if not os.path.lexists(file):
        return 0, []
    with files.opened(file, "move it away: the run writes its next steps anew") as source:
        start = max(0, source.seek(0, os.SEEK_END) - _END_BYTES)
        source.seek(start)
        lines = source.read(_END_BYTES).splitlines(keepends=True)
    if start:  # the first one is the end of a line
        start += len(lines.pop(0))
    return start, lines


def parse_line(raw: bytes, kind: TypeAdapter[Any] = LINE) -> dict[str, Any] | None:
    """A step of metrics.jsonl, or another kind of record; None where the line holds none."""
    try:
        return dict(kind.validate_json(raw))
    except ValidationError:
        return None


def _records(file: Path, kind: TypeAdapter[Any], noun: str) -> Records:
    lines, damaged = [], []
    for number, raw in enumerate(read_lines(file, noun), 1):
        line = parse_line(raw, kind)
        if line is not None:
            lines.append(line)
        elif raw.endswith(b"\n"):
            damaged.append(number)
    return Records(lines, _damage(file, damaged, noun) if damaged else None)


def _damage(file: Path, numbers: list[int], noun: str) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    lines = f"line {shown} holds" if len(numbers) == 1 else f"{len(numbers)} lines ({shown}) hold"
    return f"{file}: {lines} no {noun} and {'is' if len(numbers) == 1 else 'are'} left out."
