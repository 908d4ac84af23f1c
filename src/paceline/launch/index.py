"""Index: what is known of all runs of a folder, in one SQLite file beside them.

It is made from the Run directories and holds nothing else: deleting it loses nothing. Each look
brings it up to date, and reads again only runs of which a file is another one than last time. Two
commands may do so at once (WAL; each run is written in one transaction). What is no index, or a
damaged one, is made anew. Where the folder can't be written, the index is in memory.

Its tables are there for whoever asks by SQL, too: `runs` has the fields of `RunFacts`, the others
those of `_TABLES` and the run that they belong to.
"""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from filelock import FileLock

from paceline.launch.run_facts import RunFacts, RunParts, fingerprint, read_run
from paceline.observe.locks import is_live
from paceline.observe.run import Run

INDEX_FILE = ".index.sqlite"
_VERSION = 1
_PATIENCE_S = 60.0
"""So long a command waits for another one that writes."""
_RUN = tuple(each.name for each in fields(RunFacts))
_TABLES: Mapping[str, tuple[str, ...]] = {
    "attempts": (
        *("number", "submitted", "started", "ended", "num_devices", "exit_code", "state"),
    ),
    "checkpoints": ("step", "bytes", "sha256", "time", "is_latest", "is_best"),
    "exports": ("step", "folder", "dtype", "time", "checkpoint"),
    "evaluations": ("step", "figure", "value"),
    "tags": ("tag",),
}
_MOST_INTEGER = 2**63 - 1


@dataclass(frozen=True)
class IndexedRun:
    """A run of the index."""

    facts: RunFacts
    is_live: bool
    """Whether somebody trains in it now."""
    tags: tuple[str, ...]
    num_checkpoints: int
    checkpoint_bytes: int

    @property
    def state(self) -> str:
        """As `RunFacts.state`, or running."""
        return "running" if self.is_live else self.facts.state


def indexed_runs(folder: Path) -> list[IndexedRun]:
    """The runs of a folder, by name, as they are now."""
    runs = {file.parent.name: Run(file.parent) for file in sorted(folder.glob("*/job.toml"))}

    def look(index: sqlite3.Connection) -> list[IndexedRun]:
        _refresh(index, runs)
        return _read(index, runs)

    return _with_index(folder, look)


def _with_index(
    folder: Path, look: Callable[[sqlite3.Connection], list[IndexedRun]]
) -> list[IndexedRun]:
    """Look into the index; into a new one where it is damaged."""
    file = folder / INDEX_FILE
    with suppress(OSError, _UnusableError):
        for _ in range(2):
            opened = _inode(file)
            try:
                with closing(_open(file)) as index:
                    return look(index)
            except sqlite3.DatabaseError as error:
                if error.sqlite_errorcode & 0xFF in _UNUSABLE:
                    raise _UnusableError from error
                _remove(file, opened)
            except (ValueError, TypeError):
                _remove(file, opened)
    with closing(_open(Path(":memory:"))) as index:
        return look(index)


class _UnusableError(Exception):
    """There can be no file: another command keeps it for too long, or the disk doesn't take it."""


_UNUSABLE = (
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN),
    *(sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR),
)


def _inode(file: Path) -> int | None:
    try:
        return file.stat().st_ino
    except OSError:
        return None


def _open(file: Path) -> sqlite3.Connection:
    index = sqlite3.connect(file, timeout=_PATIENCE_S, isolation_level=None)
    try:
        index.row_factory = sqlite3.Row
        index.execute("PRAGMA journal_mode = WAL")
        index.execute("PRAGMA synchronous = NORMAL")
        if index.execute("PRAGMA quick_check").fetchone()[0] != "ok":
            raise ValueError("damaged")
        _make_tables(index)
    except BaseException:
        index.close()
        raise
    return index


def _make_tables(index: sqlite3.Connection) -> None:
    if index.execute("PRAGMA user_version").fetchone()[0] == _VERSION:
        return
    with _Transaction(index):
        if index.execute("PRAGMA user_version").fetchone()[0] == _VERSION:
            return  # another command made them meanwhile
        for name in ("runs", *_TABLES):
            index.execute(f"DROP TABLE IF EXISTS {name}")
        index.execute(f"CREATE TABLE runs ({', '.join(_RUN)}, seen, PRIMARY KEY (name))")
        for name, columns in _TABLES.items():
            index.execute(f"CREATE TABLE {name} (run, {', '.join(columns)})")
            index.execute(f"CREATE INDEX of_{name} ON {name} (run)")
        index.execute(f"PRAGMA user_version = {_VERSION}")


class _Transaction:
    """All of it or nothing, and nobody else writes meanwhile."""

    def __init__(self, index: sqlite3.Connection) -> None:
        self._index = index

    def __enter__(self) -> None:
        self._index.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_failure: object) -> None:
        self._index.execute("COMMIT" if kind is None else "ROLLBACK")


def _remove(file: Path, opened: int | None) -> None:
    """A damaged index, unless another command has made a new one since it was opened."""
    with FileLock(f"{file}.lock", timeout=_PATIENCE_S):
        if _inode(file) != opened:
            return
        for each in (file, Path(f"{file}-wal"), Path(f"{file}-shm")):
            each.unlink(missing_ok=True)


# ---- what it holds -------------------------------------------------------------------------------


def _refresh(index: sqlite3.Connection, runs: Mapping[str, Run]) -> None:
    seen = {row["name"]: row["seen"] for row in index.execute("SELECT name, seen FROM runs")}
    for name in seen.keys() - runs.keys():
        with _Transaction(index):
            _forget(index, name)
    for name, run in runs.items():
        now = fingerprint(run)
        if seen.get(name) != now:
            parts = read_run(run)  # what is written meanwhile is read at the next look
            with _Transaction(index):
                _forget(index, name)
                _insert(index, parts, now)


def _forget(index: sqlite3.Connection, name: str) -> None:
    index.execute("DELETE FROM runs WHERE name = ?", (name,))
    for table in _TABLES:
        index.execute(f"DELETE FROM {table} WHERE run = ?", (name,))


def _insert(index: sqlite3.Connection, parts: RunParts, seen: str) -> None:
    facts = asdict(parts.facts) | {"settings": json.dumps(parts.facts.settings), "seen": seen}
    columns = (*_RUN, "seen")
    index.execute(
        f"INSERT INTO runs ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
        [_value(facts[name]) for name in columns],
    )
    for table, columns in _TABLES.items():
        marks = ", ".join("?" * (1 + len(columns)))
        index.executemany(
            f"INSERT INTO {table} (run, {', '.join(columns)}) VALUES ({marks})",
            (
                [parts.facts.name, *(_value(row.get(name)) for name in columns)]
                for row in parts.rows.get(table, ())
            ),
        )


def _value(value: Any) -> Any:
    """As SQLite takes it: integers have 64 bits there, and text no lone surrogates."""
    if isinstance(value, int) and abs(value) > _MOST_INTEGER:
        return float(value)
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _read(index: sqlite3.Connection, runs: Mapping[str, Run]) -> list[IndexedRun]:
    tags: defaultdict[str, list[str]] = defaultdict(list)
    for run, tag in index.execute("SELECT run, tag FROM tags ORDER BY tag"):
        tags[run].append(tag)
    counts = "SELECT run, count(*), sum(bytes) FROM checkpoints GROUP BY run"
    checkpoints = {run: (num, size) for run, num, size in index.execute(counts)}
    found = []
    for row in index.execute(f"SELECT {', '.join(_RUN)} FROM runs ORDER BY name"):
        if row["name"] not in runs:
            continue  # another command has seen it since
        facts = RunFacts(**{**dict(row), "settings": json.loads(row["settings"])})
        num, size = checkpoints.get(facts.name, (0, 0))
        live = is_live(runs[facts.name])
        found.append(IndexedRun(facts, live, tuple(tags[facts.name]), num, size))
    return found
