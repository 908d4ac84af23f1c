"""Retention: which checkpoints of runs may go by a rule, and letting them go.

Never one that a live run has, the newest one, the best one, one whose weights were exported, or one
that the Job keeps for good (`checkpoint.keep_every`).
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from paceline.config.errors import InputError
from paceline.config.files import parse_json, read_bytes
from paceline.launch.run_facts import folder_bytes
from paceline.launch.run_records import RunRecords
from paceline.observe.locks import is_live, kept_from_others
from paceline.observe.records import Count
from paceline.observe.run import Run, complete_steps
from paceline.observe.summary import number


@dataclass(frozen=True)
class Rule:
    """Which checkpoints stay besides those that always do."""

    keep_last: int = 1
    """So many of the newest ones of each run."""
    keep_best: bool = False
    """That of the best evaluation, of those that are there."""
    older_than_s: float = 0.0
    """None that is younger goes."""


@dataclass(frozen=True)
class Removal:
    """What may go of a run."""

    run: Run
    steps: tuple[int, ...]
    bytes: int
    why_not: str = ""
    """Why nothing may, as a sentence; "": something may, or nothing needs to."""


def removal_of(run: Run, rule: Rule, now: float) -> Removal:
    """What a rule lets go of a run; changes nothing.

    Args:
        now: Unix time.
    """
    if is_live(run):
        return Removal(run, (), 0, "it trains now")
    try:
        steps = _removable(run, rule, now)
    except InputError as error:
        return Removal(run, (), 0, str(error).rstrip("."))
    return Removal(run, steps, sum(folder_bytes(place) for place in _places(run, steps)))


def remove(run: Run, rule: Rule, now: float) -> Removal:
    """Let go what a rule lets go of a run, while nobody can begin to train there.

    Raises:
        OSError: something can't be deleted; each checkpoint is there whole, or not at all.
    """
    try:
        with kept_from_others(run):
            steps = _removable(run, rule, now)
            size = sum(folder_bytes(place) for place in _places(run, steps))
            for step in steps:
                # As an unfinished one it isn't seen; the next start would sweep what is left of it.
                whole = run.checkpoint_folder / f"step-{step}"
                partial = whole.with_name(f"{whole.name}.tmp")
                whole.rename(partial)
                shutil.rmtree(partial)
                for file in _tables(run, step):
                    file.unlink(missing_ok=True)
    except InputError as error:
        return Removal(run, (), 0, str(error).rstrip("."))
    return Removal(run, steps, size)


def _removable(run: Run, rule: Rule, now: float) -> tuple[int, ...]:
    """Steps whose checkpoints may go.

    Raises:
        InputError: a file of the Run is damaged: what has to stay isn't known.
    """
    records, steps = RunRecords.of(run), complete_steps(run.checkpoint_folder)
    whole = [step for step in steps if _is_whole(run.checkpoint_folder / f"step-{step}")]
    kept = {*whole[-max(1, rule.keep_last) :], *steps[-1:], *_linked(run)}
    kept |= {record["step"] for record in run.exports()}
    if every := records.job.checkpoint.keep_every:
        kept |= {step for step in steps if step % every == 0}
    if rule.keep_best:
        kept |= _best(records, whole)
    return tuple(
        step
        for step in steps
        if step not in kept and now - _written(run, step) >= rule.older_than_s
    )


class _FileSize(TypedDict):
    size_bytes: Count


class _Files(TypedDict):
    files: dict[str, _FileSize]


class _ManifestFile(TypedDict):
    manifest: _Files


_MANIFEST = TypeAdapter(_ManifestFile)
_MOST_MANIFEST_BYTES = 1 << 30


def _is_whole(checkpoint: Path) -> bool:
    """Whether its files have the sizes that its manifest says; their sums are not looked at."""
    try:
        raw = read_bytes(checkpoint / "manifest.json", "it is lost", _MOST_MANIFEST_BYTES)
        files = parse_json(raw, _MANIFEST)["manifest"]["files"]
        sizes = {name: (checkpoint / Path(name).name).stat().st_size for name in files}
    except (InputError, OSError, ValueError):
        return False
    return all(sizes[name] == entry["size_bytes"] for name, entry in files.items())


def _linked(run: Run) -> set[int]:
    names = {f"step-{step}": step for step in complete_steps(run.checkpoint_folder)}
    found = set()
    for link in ("latest", "best"):
        try:
            found.add(names[(run.checkpoint_folder / link).readlink().name])
        except (OSError, KeyError):
            continue
    return found


def _best(records: RunRecords, steps: Sequence[int]) -> set[int]:
    settings = records.job.checkpoint
    name, sign = settings.best or "eval_loss", -1 if settings.best_is == "most" else 1
    values: dict[int, float] = {}
    for line in records.lines:
        given = line.get("eval_figures")
        figures = {**line, **(given if isinstance(given, dict) else {})}
        if line["step"] in steps and (value := number(figures.get(name))) is not None:
            values[line["step"]] = sign * value
    return {min(values, key=lambda step: values[step])} if values else set()


def _written(run: Run, step: int) -> float:
    """Unix time of a checkpoint."""
    return (run.checkpoint_folder / f"step-{step}").stat().st_mtime


def _places(run: Run, steps: Sequence[int]) -> list[Path]:
    return [run.checkpoint_folder / f"step-{step}" for step in steps]


def _tables(run: Run, step: int) -> list[Path]:
    """A recommender's rows beside a checkpoint; what makes them count goes first."""
    files = (run.path / "tables").glob(f"part-*/step-{step}.*")
    return sorted(files, key=lambda file: file.suffix != ".json")
