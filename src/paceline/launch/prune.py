"""Retention: which checkpoints of runs may go by a rule, and letting them go.

Never one that a live run has, the newest one, the best one, one whose weights were exported, or one
that the Job keeps for good (`checkpoint.keep_every`).
"""

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from paceline.config.errors import InputError
from paceline.config.files import parse_json, read_bytes
from paceline.launch.run_facts import folder_bytes
from paceline.launch.run_records import RunRecords
from paceline.observe.locks import is_live, kept_from_others
from paceline.observe.records import Count
from paceline.observe.run import MANIFEST, MOST_MANIFEST_BYTES, Run, complete_steps
from paceline.observe.stored import StoredCheckpoints, trouble_text
from paceline.observe.summary import number

T = TypeVar("T")


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


def removal_of(run: Run, rule: Rule, now: float, *, in_store: bool = False) -> Removal:
    """What a rule lets go of a run; changes nothing.

    Args:
        now: Unix time.
        in_store: of the copies in the store of `checkpoint.copy_to`, rather than on the disk.
    """
    if is_live(run):
        return Removal(run, (), 0, "it trains now")
    try:
        shelf, steps = _removable(run, rule, now, in_store=in_store)
        return Removal(run, steps, sum(map(shelf.num_bytes, steps)))
    except InputError as error:
        return Removal(run, (), 0, str(error).rstrip("."))


def remove(run: Run, rule: Rule, now: float, *, in_store: bool = False) -> Removal:
    """Let go what a rule lets go of a run, while nobody can begin to train there.

    Raises:
        OSError: something can't be deleted; each checkpoint is there whole, or not at all.
    """
    try:
        with kept_from_others(run):
            shelf, steps = _removable(run, rule, now, in_store=in_store)
            size = sum(map(shelf.num_bytes, steps))
            for step in steps:
                shelf.remove(step)
    except InputError as error:
        return Removal(run, (), 0, str(error).rstrip("."))
    return Removal(run, steps, size)


def _removable(
    run: Run, rule: Rule, now: float, *, in_store: bool
) -> tuple["_Shelf", tuple[int, ...]]:
    """Steps whose checkpoints may go, and where they lie.

    Raises:
        InputError: a file of the Run is damaged, so what has to stay isn't known; or its store
            can't be read.
    """
    records = RunRecords.of(run)
    shelf: _Shelf = _Stored.of(records) if in_store else _OnDisk(run)
    steps = shelf.steps()
    whole = [step for step in steps if shelf.is_whole(step)]
    kept = {*whole[-max(1, rule.keep_last) :], *steps[-1:], *_linked(run)}
    kept |= {record["step"] for record in run.exports()}
    if every := records.job.checkpoint.keep_every:
        kept |= {step for step in steps if step % every == 0}
    if rule.keep_best:
        kept |= _best(records, whole)
    going = [step for step in steps if step not in kept]
    if rule.older_than_s:  # of unknown age is none
        least = now - rule.older_than_s
        going = [step for step in going if (at := shelf.written(step)) is not None and at <= least]
    return shelf, tuple(going)


class _FileSize(TypedDict):
    size_bytes: Count


class _Files(TypedDict):
    files: dict[str, _FileSize]


class _ManifestFile(TypedDict):
    manifest: _Files


_MANIFEST = TypeAdapter(_ManifestFile)


class _Shelf(Protocol):
    """Where checkpoints of a run lie."""

    def steps(self) -> list[int]:
        """Of which there is anything, ascending."""

    def is_whole(self, step: int) -> bool:
        """Whether all of it is there, as far as names and sizes say; sums are not looked at."""

    def num_bytes(self, step: int) -> int:
        """That go with it."""

    def written(self, step: int) -> float | None:
        """Unix time of a checkpoint; None: nobody says."""

    def remove(self, step: int) -> None:
        """Let one go."""


@dataclass(frozen=True)
class _OnDisk:
    run: Run

    def steps(self) -> list[int]:
        return complete_steps(self.run.checkpoint_folder)

    def is_whole(self, step: int) -> bool:
        place = self._place(step)
        try:
            raw = read_bytes(place / MANIFEST, "it is lost", MOST_MANIFEST_BYTES)
            files = parse_json(raw, _MANIFEST)["manifest"]["files"]
            sizes = {name: (place / Path(name).name).stat().st_size for name in files}
        except (InputError, OSError, ValueError):
            return False
        return all(sizes[name] == entry["size_bytes"] for name, entry in files.items())

    def num_bytes(self, step: int) -> int:
        return folder_bytes(self._place(step))

    def written(self, step: int) -> float | None:
        return self._place(step).stat().st_mtime

    def remove(self, step: int) -> None:
        # As an unfinished one it isn't seen; the next start would sweep what is left of it.
        whole = self._place(step)
        partial = whole.with_name(f"{whole.name}.tmp")
        whole.rename(partial)
        shutil.rmtree(partial)
        for file in _tables(self.run, step):
            file.unlink(missing_ok=True)

    def _place(self, step: int) -> Path:
        return self.run.checkpoint_folder / f"step-{step}"


class _Stored:
    """Copies in a store. What its client raises becomes a sentence."""

    def __init__(self, store: StoredCheckpoints) -> None:
        self._store = store
        self._sizes: dict[int, int | None] = {}

    @classmethod
    def of(cls, records: RunRecords) -> "_Stored":
        """Those of a run.

        Raises:
            InputError: it has none, or their store can't be reached.
        """
        url = records.job.checkpoint.copy_to
        if url is None:
            raise InputError("it has no copies (checkpoint.copy_to)")
        return cls(StoredCheckpoints(url, records.run.path.name))

    def steps(self) -> list[int]:
        return self._asked(self._store.steps)

    def is_whole(self, step: int) -> bool:
        return self._size(step) is not None

    def num_bytes(self, step: int) -> int:
        return self._size(step) or 0

    def written(self, step: int) -> float | None:
        return self._asked(partial(self._store.written, step))

    def remove(self, step: int) -> None:
        self._asked(partial(self._store.remove, step))

    def _size(self, step: int) -> int | None:
        """As its manifest says; None: it has none, so it is half a copy."""
        if step not in self._sizes:
            raw = self._asked(partial(self._store.manifest, step))
            self._sizes[step] = None
            with suppress(ValueError):
                files = parse_json(raw or b"", _MANIFEST)["manifest"]["files"]
                self._sizes[step] = sum(entry["size_bytes"] for entry in files.values())
        return self._sizes[step]

    def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except Exception as error:
            raise InputError(
                f"its copies in {self._store.url} can't be read or removed ({trouble_text(error)})"
            ) from None


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


def _tables(run: Run, step: int) -> list[Path]:
    """A recommender's rows beside a checkpoint; what makes them count goes first."""
    files = (run.path / "tables").glob(f"part-*/step-{step}.*")
    return sorted(files, key=lambda file: file.suffix != ".json")
