"""Facts of a Run as the index keeps them: one record of the run, and lists of what it has."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from paceline.config.errors import InputError
from paceline.config.files import read_json
from paceline.config.job import to_raw
from paceline.launch.attempts import ATTEMPT_FILES
from paceline.launch.cost import cost_of
from paceline.launch.run_records import Line, RunRecords
from paceline.observe.run import Run, complete_steps
from paceline.observe.summary import number, typical

Row = Mapping[str, Any]

TAGS_FILE = "tags.json"
_FILES = (
    *("job.toml", "plan.json", "facts.json", "metrics.jsonl", "events.jsonl"),
    *("exports.jsonl", TAGS_FILE),
)
_TAGS = TypeAdapter(list[str])


@dataclass(frozen=True)
class RunFacts:
    """A run, flat. What isn't known is None."""

    name: str
    """Of its directory."""
    state: str
    """new: no step was done. finished; saved: stopped with a checkpoint; stopped: neither was said.
    damaged: see `damage`."""
    started: float | None = None
    """Unix time of its first submission; `changed`: the newest moment that it tells of."""
    changed: float | None = None
    steps: int = 0
    """That were kept."""
    planned_steps: int = 0
    unit: str = ""
    units: int = 0
    """Tokens or samples of kept steps."""
    loss: float | None = None
    """Of the last step."""
    eval_loss: float | None = None
    """Of the last evaluation; `best_eval_loss`: the least one."""
    best_eval_loss: float | None = None
    step_s: float | None = None
    """Median."""
    params: int | None = None
    device: str | None = None
    devices: int = 0
    """Ranks of the layout."""
    layout: str = ""
    device_s: float = 0.0
    """Device-seconds that were held."""
    usd: float | None = None
    goodput: float | None = None
    code_commit: str | None = None
    """Of the folder that it was started in."""
    data_key: str | None = None
    """What names the data by its contents."""
    parent: str | None = None
    """The run whose weights it started from, and the step of their checkpoint."""
    parent_step: int | None = None
    damage: str | None = None
    """Which file can't be read, as a sentence."""
    settings: Row = field(default_factory=dict)
    """Of its Job, as plain data."""


@dataclass(frozen=True)
class RunParts:
    """What a run has, as rows for tables of the index, by the table's name."""

    facts: RunFacts
    rows: Mapping[str, Sequence[Row]]


def fingerprint(run: Run) -> str:
    """Another one as soon as a file of the Run is."""
    places = [run.path / name for name in _FILES]
    places += [*sorted(run.path.glob(ATTEMPT_FILES)), run.checkpoint_folder]
    told = [str(place.name) + _stamp(place) for place in places]
    links = (run.checkpoint_folder / name for name in ("latest", "best"))
    return " ".join([*told, *(_target(link) for link in links)])


def _stamp(place: Path) -> str:
    try:
        status = place.stat()
    except OSError:
        return ""
    return f":{status.st_mtime_ns}:{status.st_size}:{status.st_ino}"


def _target(link: Path) -> str:
    try:
        return link.readlink().name
    except OSError:
        return ""


def read_run(run: Run) -> RunParts:
    """What a Run directory says of itself; of a damaged one, what is damaged."""
    rows: dict[str, Sequence[Row]] = {"checkpoints": list(_checkpoints(run))}
    try:
        rows["tags"] = [{"tag": tag} for tag in tags_of(run)]
        rows["exports"] = run.exports()
        records = RunRecords.of(run)
        cost = cost_of(records)
    except InputError as error:
        return RunParts(RunFacts(run.path.name, "damaged", damage=str(error)), rows)
    rows["attempts"] = [
        {
            "number": each.attempt.number,
            "submitted": each.attempt.submitted,
            "started": each.attempt.started,
            "ended": each.attempt.ended,
            "num_devices": each.attempt.num_devices,
            "exit_code": each.attempt.exit_code,
            "state": each.attempt.state,
        }
        for each in cost.ledger.attempts
    ]
    rows["evaluations"] = list(_evaluations(records.lines))
    job, facts = records.job, records.facts
    parent = facts.get("parent") or {}
    losses = [number(line.get("eval_loss")) for line in records.lines]
    evaluated = [loss for loss in losses if loss is not None]
    begins = [each.begin_us for each in cost.ledger.attempts]
    ends = [each.end_us for each in cost.ledger.attempts]
    return RunParts(
        RunFacts(
            name=run.path.name,
            state=_state(records),
            started=min(begins) / 1e6 if begins else None,
            changed=max(ends) / 1e6 if ends else None,
            steps=records.num_steps,
            planned_steps=job.train.steps,
            unit=records.unit,
            units=records.num_units,
            loss=number(records.lines[-1].get("loss")) if records.lines else None,
            eval_loss=evaluated[-1] if evaluated else None,
            best_eval_loss=min(evaluated, default=None),
            step_s=typical(records.lines, "step_time_s"),
            params=facts.get("num_params"),
            device=facts.get("device"),
            devices=job.layout.num_ranks,
            layout=job.layout.summary,
            device_s=cost.ledger.held_us / 1e6,
            usd=cost.usd,
            goodput=cost.ledger.goodput,
            code_commit=facts.get("commit"),
            data_key=facts.get("data_key"),
            parent=parent.get("run"),
            parent_step=parent.get("step"),
            settings=to_raw(job),
        ),
        rows,
    )


def _state(records: RunRecords) -> str:
    """As its last start says; whether somebody trains in it now isn't looked at."""
    last = next((one for one in reversed(records.events) if one["event"] in ("start", "end")), None)
    if last is not None and last["event"] == "end":
        return str(last.get("state") or "finished")
    if records.num_steps >= records.job.train.steps:
        return "finished"
    return "stopped" if records.num_steps else "new"


def _checkpoints(run: Run) -> Iterator[Row]:
    links = {name: _target(run.checkpoint_folder / name) for name in ("latest", "best")}
    for step in complete_steps(run.checkpoint_folder):
        folder = run.checkpoint_folder / f"step-{step}"
        try:
            written = (folder / "manifest.json").stat().st_mtime
        except OSError:
            written = None
        yield {
            "step": step,
            "bytes": folder_bytes(folder),
            "sha256": run.checkpoint_sum(step),
            "time": written,
            "is_latest": links["latest"] == folder.name,
            "is_best": links["best"] == folder.name,
        }


def folder_bytes(folder: Path) -> int:
    """Of all files in a folder; what vanishes meanwhile has none."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except OSError:
                continue
    return total


def _evaluations(lines: Sequence[Line]) -> Iterator[Row]:
    for line in lines:
        own = {name: line[name] for name in line if name.startswith("eval_") and name != "eval_s"}
        given = line.get("eval_figures")
        figures = own | (given if isinstance(given, dict) else {})
        for name, value in figures.items():
            if (known := number(value)) is not None:
                yield {"step": line["step"], "figure": name, "value": known}


def tags_of(run: Run) -> list[str]:
    """The words that a person gave a run.

    Raises:
        InputError: tags.json is damaged.
    """
    file = run.path / TAGS_FILE
    if not os.path.lexists(file):
        return []
    tags: list[str] = read_json(file, _TAGS, "remove it, and give the tags again")
    return sorted(set(tags))
