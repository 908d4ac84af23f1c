"""RunRecords: what a Run directory holds that bills and the index are made from, read once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.config.outputs import shown_path
from paceline.observe.generations import Event, Generations, generations, kept_steps
from paceline.observe.run import Run

Line = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecords:
    """The files of a Run, as far as they can be read."""

    run: Run
    job: Job
    lines: Sequence[Line]
    """Of metrics.jsonl."""
    events: Sequence[Event]
    """Of events.jsonl."""
    facts: Mapping[str, Any]
    """The facts.json."""
    found: Generations | None
    """None: it is not elastic."""

    @classmethod
    def of(cls, run: Run) -> "RunRecords":
        """Read a Run.

        Raises:
            InputError: it is none, or a file of it is damaged; names it.
        """
        if not run.exists:
            raise InputError(
                f"{shown_path(run.path)} is not a run: give the directory of one, such as "
                "runs/demo."
            )
        lines, events = run.metrics(), run.events().lines
        found = generations(events, kept_steps(lines)) if events else None
        return cls(run, _job(run), lines, events, run.facts(), found)

    def named(self, event: str) -> list[Event]:
        """The events of a name, in their order."""
        return [one for one in self.events if one["event"] == event]

    @property
    def unit(self) -> str:
        """What it counts: tokens or samples."""
        return str(self.facts.get("unit") or self.job.model.unit)

    @property
    def num_steps(self) -> int:
        """That were kept."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def num_units(self) -> int:
        """Of kept steps."""
        return (self.lines[-1].get(self.unit) if self.lines else None) or 0


def _job(run: Run) -> Job:
    try:
        return run.job()
    except InputError as error:  # which may name a setting alone
        file = shown_path(run.path / "job.toml")
        raise InputError(str(error) if file in str(error) else f"{file}: {error}") from None
