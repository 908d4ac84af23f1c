"""Verdict: what a check says of a machine."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.doctor.facts import MachineFacts

Status = Literal["problem", "warning", "ok", "not checked"]


@dataclass(frozen=True)
class Verdict:
    """What was seen, and what to do about it."""

    status: Status
    seen: str
    fix: str = ""
    """Of a problem or a warning."""


Judge = Callable[[MachineFacts], Verdict]


@dataclass(frozen=True)
class Check:
    """A row of the table of checks."""

    name: str
    looks_at: str
    why: str
    judge: Judge


class Checks(list[Check]):
    """Rows of the table, in the order in which they are shown."""

    def add(self, name: str, looks_at: str, why: str) -> Callable[[Judge], Judge]:
        """A decorator that makes a function one of them."""

        def added(judge: Judge) -> Judge:
            self.append(Check(name, looks_at, why, judge))
            return judge

        return added


def ok(seen: str) -> Verdict:
    """Nothing to do."""
    return Verdict("ok", seen)


def warning(seen: str, fix: str) -> Verdict:
    """It may cost time, or will under some jobs."""
    return Verdict("warning", seen, fix)


def problem(seen: str, fix: str) -> Verdict:
    """It costs much of the speed, or the job."""
    return Verdict("problem", seen, fix)


def unknown(why: str) -> Verdict:
    """It could not be looked at."""
    return Verdict("not checked", why)


NO_GPU = unknown("no accelerator was seen")


def listed(items: Iterable[object], of: str = "device") -> str:
    """The first few of some numbers for a sentence: "devices 0, 3"."""
    numbers = [str(item) for item in items]
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"{of}{'s' if len(numbers) > 1 else ''} {', '.join(numbers[:8])}{more}"
