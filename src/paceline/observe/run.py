"""Run: the directory that is the contract between training and everything that reads it afterwards.

job.toml        the concrete Job, written before step 0
plan.json       why each "auto" became what it is
facts.json      what the run ran on and with: versions, device, ranks, parameters, data
metrics.jsonl   one object per step
cluster.toml    what its steps said about the machine, for the next plan
trace/          profiled windows: rank<k>-step<n>.json.gz (open in Perfetto)
memory/         memory over these windows: rank<k>-step<n>.json, and .pickle of torch's on CUDA
checkpoints/    step-<n>/ complete or absent, latest
tokenizer/      tokenizer.json, and what was given beside it: what an export carries
tensorboard/    report.html    log/rank<k>.log
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.job import Job, read_job


@dataclass(frozen=True)
class Run:
    """Paths and plain readers of one Run directory."""

    path: Path

    @property
    def metrics_file(self) -> Path:
        """One JSON object per step, in the order of the steps."""
        return self.path / "metrics.jsonl"

    @property
    def trace_folder(self) -> Path:
        """Traces of profiled windows."""
        return self.path / "trace"

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
    def report_file(self) -> Path:
        """The self-contained page."""
        return self.path / "report.html"

    @property
    def stop_file(self) -> Path:
        """While this file exists, the run stops after its step and keeps a checkpoint."""
        return self.path / "stop"

    @property
    def exists(self) -> bool:
        """Whether a Job was ever started here."""
        return (self.path / "job.toml").is_file()

    def job(self) -> Job:
        """The concrete Job of this Run."""
        return read_job(self.path / "job.toml")

    def plan(self) -> dict[str, Any]:
        """The plan.json, empty where there is none."""
        return _read_json(self.path / "plan.json")

    def facts(self) -> dict[str, Any]:
        """The facts.json, empty where there is none yet."""
        return _read_json(self.path / "facts.json")

    def metrics(self) -> list[dict[str, Any]]:
        """The steps so far. A last line that was cut off by a crash is left out."""
        steps = []
        lines = self.metrics_file.read_text().splitlines() if self.metrics_file.exists() else []
        for line in lines:
            try:
                steps.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return steps

    def last_checkpoint(self) -> tuple[int, float] | None:
        """Step and unix time of the newest checkpoint, None where there is none."""
        latest = self.checkpoint_folder / "latest"
        try:
            return int(latest.readlink().name.removeprefix("step-")), latest.stat().st_mtime
        except (OSError, ValueError):
            return None

    def write(self, name: str, text: str) -> Path:
        """Write a file of the Run so that a reader never sees half of it."""
        return write_whole(self.path / name, text)

    def write_json(self, name: str, value: Any) -> Path:
        """Write a JSON file of the Run."""
        return self.write(name, json.dumps(value, indent=2) + "\n")


def write_whole(file: Path, text: str) -> Path:
    """Write a text file complete or not at all: beside it, to the disk, then renamed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(file.name + f".tmp{os.getpid()}")
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


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}
