"""Journal: the folder of a tuning, from which it goes on.

asked.toml     the Job as it was given
cluster.toml   the machine, where it had to be measured first
trials.jsonl   one object per trial, decision or reference, in the order of time
failures.log   what ranks said that failed, in full
heats/<n>/     the fastest of each trial round as a Run with a trace: `paceline explain` reads it
job.toml       the fastest Job so far
tune.html      the page
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from paceline.config.errors import InputError
from paceline.config.files import parse_json
from paceline.config.job import Job, decided, read_job, to_toml
from paceline.observe.run import json_lines, read_lines, write_atomic
from paceline.tune.trial import Decision, Reference, Trial, TuningState

Entry = Trial | Decision | Reference


class _Kind(TypedDict):
    kind: Literal["trial", "decision", "reference"]


_KIND = TypeAdapter(_Kind)
_KINDS: Mapping[str, TypeAdapter[Entry]] = {
    "trial": TypeAdapter(Trial),
    "decision": TypeAdapter(Decision),
    "reference": TypeAdapter(Reference),
}


def _entry(line: bytes) -> Entry:
    """What a line of trials.jsonl holds.

    Raises:
        ValueError: it holds no such thing.
    """
    return parse_json(line, _KINDS[parse_json(line, _KIND)["kind"]])


@dataclass
class FolderJournal:
    """A journal in a folder."""

    folder: Path
    _known: TuningState = field(init=False)
    _entries: list[Entry] = field(default_factory=list, init=False)

    @property
    def cluster_file(self) -> Path:
        """The machine, as it was measured before the first trial."""
        return self.folder / "cluster.toml"

    def open(self, given: Job) -> None:
        """Begin with a Job, or go on where an earlier start of it was left.

        Raises:
            InputError: the folder is of another Job.
        """
        asked = self.folder / "asked.toml"
        if asked.exists() and decided(read_job(asked)) != given:
            raise InputError(
                f"--out {self.folder} has the trials of another Job: give another folder, or "
                f"delete {asked.parent} to start over."
            )
        write_atomic(asked, to_toml(given))
        self._entries = list(self._read())
        self._known = TuningState(given)
        for entry in self._entries:
            self._take(entry)

    @property
    def known(self) -> TuningState:
        """See `loop.Journal.known`."""
        return self._known

    def add(self, *entries: Entry) -> None:
        """See `loop.Journal.add`."""
        self._entries += entries
        lines = json_lines(entry.to_json() for entry in self._entries)
        write_atomic(self.folder / "trials.jsonl", lines)
        for entry in entries:
            self._take(entry)
        best = self._known.best
        if best is not None:
            write_atomic(self.folder / "job.toml", to_toml(best.job(self._known.given)))

    def run_folder(self, number: int) -> Path | None:
        """See `loop.Journal.run_folder`."""
        return self.folder / "heats" / str(number)

    def newest_run(self) -> Path | None:
        """See `loop.Journal.newest_run`."""
        folders = (self.run_folder(number) for number in reversed(range(self._known.num_rounds)))
        return next((one for one in folders if one and (one / "job.toml").exists()), None)

    def _take(self, entry: Entry) -> None:
        known = self._known
        if isinstance(entry, Trial):
            self._known = replace(known, trials=(*known.trials, entry))
        elif isinstance(entry, Decision):
            self._known = replace(known, decisions=(*known.decisions, entry))
        else:
            self._known = replace(known, reference=entry)

    def _read(self) -> Iterator[Entry]:
        file, num_trials = self.folder / "trials.jsonl", 0
        for number, line in enumerate(read_lines(file), 1):
            try:
                entry = _entry(line)
                if isinstance(entry, Decision) and entry.best >= num_trials:
                    raise ValueError(f"is of trial {entry.best}, which is not before it")
                num_trials += isinstance(entry, Trial)
                yield entry
            except ValueError as error:
                raise InputError(
                    f"{file}: line {number} {error}: put back a copy of the file, or remove "
                    f"{self.folder} to start over."
                ) from None
