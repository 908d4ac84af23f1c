"""Subject: everything that is known of what is to be explained, measured and expected.

A Run has all of it; a trace of somebody else's has an account and nothing more. Rules take a
Subject and look at what they need; what isn't there makes them silent, not wrong.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.explain.profiled_steps import ProfiledSteps
from paceline.explain.traffic import CollectiveTraffic
from paceline.explain.windows import read_windows
from paceline.observe.account import Account
from paceline.observe.caveats import TraceDevice
from paceline.observe.generations import Generations, generations, kept_steps
from paceline.observe.meetings import match
from paceline.observe.recorded import read_account
from paceline.observe.run import Run
from paceline.observe.summary import number

Line = Mapping[str, Any]

_MOST_LOG_BYTES = 4 << 20


class PlannedStep(NamedTuple):
    """What the plan expected of a step."""

    step_s: float
    interval_s: tuple[float, float]
    time_s: Mapping[str, float]
    """By term."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A Run or a trace, ready to be looked at."""

    name: str
    """For people: the path."""
    account: Account | None
    """Of profiled steps; None where a Run has no window."""
    job: Job | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    """The Run's plan.json."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The Run's facts.json."""
    lines: Sequence[Line] = ()
    """The Run's metrics.jsonl."""
    folder: Path | None = None
    """The Run's directory."""
    damage: str | None = None
    """Which lines of metrics.jsonl and events.jsonl are left out, and why."""

    @classmethod
    def of(cls, path: Path) -> "Subject":
        """Read a Run directory, a trace, or a folder of traces.

        Raises:
            InputError: nothing there is one of these, or a trace is damaged.
        """
        run = Run(path)
        if not run.exists:
            return cls(str(path), read_account(path))
        job, plan, facts = run.job(), run.plan(), run.facts()
        lines, damage = run.steps()
        damage = " ".join(filter(None, [damage, run.events().damage])) or None
        account = read_windows(run.trace_folder, only_axis(job))
        return cls(str(path), account, job, plan, facts, lines, path, damage)

    @cached_property
    def measured(self) -> ProfiledSteps:
        """The profiled steps, rank by rank.

        Raises:
            InputError: there are none.
        """
        if self.account is None:
            raise InputError(
                f"{self.name} has no profiled steps: train it with --set observe.profile_every=50, "
                "which records a few steps now and then."
            )
        return ProfiledSteps.of(self.account)

    @cached_property
    def ranks_belong_together(self) -> bool:
        """Whether all recorded ranks are one job's: a Run's are; of traces those whose collectives
        are the same ones, each rank with some other."""
        if self.account is None or self.job is not None:
            return True
        meetings = match(self.account.collectives, self.account.names)
        return set(self.account.ranks) == set(meetings["rank"].tolist())

    @property
    def worker(self) -> Literal["device", "host"]:
        """Who computed in the profiled steps, and so says what was computed and for how long."""
        return "device" if self.account is not None and self.account.is_device else "host"

    @cached_property
    def devices(self) -> tuple[TraceDevice, ...]:
        """The kinds of devices that traces describe, of some ranks or all."""
        return () if self.account is None else tuple(set(self.account.devices.values()))

    def all_recorded(self, where: npt.NDArray[np.bool_]) -> bool:
        """Whether all ranks of some collectives were recorded: else the wait for a late rank is
        part of them, unseen."""
        if self.account is None:
            return False
        if self.job is not None:
            return len(self.account.ranks) >= self.job.layout.num_ranks
        return 0 < self.traffic.rows["group_size"][where].max(initial=0) <= len(self.account.ranks)

    @cached_property
    def traffic(self) -> CollectiveTraffic:
        """The collectives of the profiled steps, by what they do."""
        assert self.account is not None
        return CollectiveTraffic.of(self.account)

    @cached_property
    def steady(self) -> list[Line]:
        """Lines of metrics.jsonl without the profiled steps, those after a window (ranks wait for
        the one that accounts for it), and the first ones, which allocate and compile."""
        kept = [
            line
            for before, line in zip([{}, *self.lines], self.lines, strict=False)
            if number(line.get("step_time_s")) and not _profiled(before) and not _profiled(line)
        ]
        return _without_first(kept)

    @cached_property
    def step_s(self) -> float:
        """Median seconds of the steady, not profiled steps; of the profiled ones without a Run.

        Raises:
            InputError: no step was finished.
        """
        if self.steady:
            return median(float(line["step_time_s"]) for line in self.steady)
        if self.account is None:
            raise InputError(f"{self.name} has no finished step: train it for a few steps first.")
        return self.measured.step_s

    @cached_property
    def between_s(self) -> list[float]:
        """Seconds between steady steps, where neither an evaluation nor a window lay between."""
        steady = {id(line) for line in self.steady}
        return [
            float(line["between_s"])
            for before, line in zip(self.lines, self.lines[1:], strict=False)
            if id(line) in steady and "between_s" in line and "eval_s" not in before
        ]

    @cached_property
    def mean_step_s(self) -> float:
        """Mean seconds from one steady step to the next, with all that doesn't happen in each."""
        if not self.steady:
            return self.step_s
        between = [number(line.get("between_s")) or 0.0 for line in self.steady]
        steps = [float(line["step_time_s"]) for line in self.steady]
        return (sum(steps) + sum(between)) / len(steps)

    @cached_property
    def pace(self) -> float:
        """How much of the seconds of profiled work the same work takes when nobody looks.

        Recording costs a few microseconds for each operator; waits are not longer for it.
        """
        waits_s = self.measured.waits_s
        work_s = self.measured.step_s - waits_s
        return min(1.1, max(0.2, (self.step_s - waits_s) / work_s)) if work_s > 0 else 1.0

    def work_s(self, *terms: str) -> float:
        """Mean seconds of some terms in a profiled step, as long as they take when nobody looks."""
        return 0.0 if self.account is None else self.measured.mean_s(*terms) * self.pace

    @cached_property
    def cores_are_taken(self) -> bool:
        """Whether ranks compute on all cores of the host: work beside them then holds them up."""
        if self.job is not None and not self.job.cluster.device.is_cpu:
            return False
        if self.account is not None and self.account.is_device:
            return False
        cores = self.facts.get("num_cores")
        return cores is None or self.threads_of_host >= cores

    @property
    def threads_of_host(self) -> int:
        """How many threads the ranks of rank 0's host compute with."""
        return int(self.facts.get("threads_per_rank", 1)) * self.ranks_of_host

    @cached_property
    def ranks_of_host(self) -> int:
        """How many ranks share rank 0's host."""
        ranks = self.facts.get("num_ranks", 1)
        if self.job is not None:
            ranks = min(ranks, self.job.cluster.devices_per_node)
        return int(self.facts.get("num_ranks_of_host", ranks))

    @cached_property
    def logs(self) -> Mapping[str, str]:
        """What the ranks wrote: the end of each file of the Run's log/, by its name."""
        if self.folder is None:
            return {}
        files = sorted((self.folder / "log").glob("*"))
        return {file.name: _tail(file) for file in files if file.is_file()}

    @cached_property
    def doctor(self) -> Mapping[str, Any]:
        """The Run's doctor.json, which `paceline doctor --run` keeps; empty without it."""
        return {} if self.folder is None else Run(self.folder).doctor()

    @cached_property
    def generations(self) -> Generations | None:
        """Who trained together, from one loss or return to the next; None: it isn't elastic."""
        events = [] if self.folder is None else Run(self.folder).events().lines
        return generations(events, kept_steps(self.lines)) if events else None

    @cached_property
    def planned(self) -> PlannedStep | None:
        """What plan.json expects of the Run's own layout; None where nothing was predicted."""
        layouts = self.plan.get("layouts") or ()
        if not layouts:
            return None
        one = layouts[0]
        return PlannedStep(one["step_s"], tuple(one["interval_s"]), one["time_s"])

    def rank_of_log(self, name: str) -> int | None:
        """The rank whose log has this name."""
        found = re.fullmatch(r"rank(\d+)\.log", name)
        return None if found is None else int(found[1])

    def mean_s(self, key: str) -> float:
        """Mean of a line's seconds over the steady steps: a term, or a key of the line itself."""
        return _mean_s(self.steady, key)

    def background_s(self, key: str) -> float:
        """The same of what goes on beside steps, and is told by whichever is the next: over all but
        the first, those around windows too."""
        return _mean_s(_without_first(self.lines), key)


def only_axis(job: Job) -> str | None:
    """The axis of collectives that don't tell theirs; None where it could be one of several."""
    used = [axis for axis in ("dp", "fsdp", "tp", "pp", "cp") if getattr(job.layout, axis) != 1]
    return (used or ["dp"])[0] if len(used) < 2 else None


def _without_first(lines: Sequence[Line]) -> list[Line]:
    """Lines but for the first ones, whose steps allocate and compile."""
    return [*lines[min(3, len(lines) // 4) :]]


def _mean_s(lines: Sequence[Line], key: str) -> float:
    """Mean of a term of some lines, or of a key of the lines themselves; 0 where none has it."""
    values = [number({**line, **(line.get("terms") or {})}.get(key)) for line in lines]
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else 0.0


def _profiled(line: Line) -> bool:
    return bool(line.get("profiled"))


def _tail(file: Path) -> str:
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - _MOST_LOG_BYTES))
        return log.read().decode(errors="replace")
