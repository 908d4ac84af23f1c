"""Difference: what differs between two Runs or traces, settings and terms."""

from dataclasses import dataclass

from rich.console import Console

from paceline.config.errors import InputError
from paceline.config.job import Job, differing, to_raw
from paceline.explain.explain import Explanation
from paceline.observe.terms import in_order
from paceline.render.figures import time_text
from paceline.render.table import Table, heading


@dataclass(frozen=True)
class Difference:
    """One explanation less another."""

    settings: tuple[tuple[str, str, str], ...]
    """Name, value in the other, value in this one."""
    terms_s: tuple[tuple[str, float, float], ...]
    """Term, seconds in the other, seconds in this one."""
    step_s: tuple[float, float]


def difference(one: Explanation, other: Explanation) -> Difference:
    """What this one has that the other hasn't.

    Raises:
        InputError: one of them has no finished step.
    """
    if one.waterfall is None or other.waterfall is None:
        without = one if one.waterfall is None else other
        raise InputError(f"{without.name} has no finished step: there is nothing to compare.")
    before = {row.term: row.measured_s for row in other.waterfall.rows}
    now = {row.term: row.measured_s for row in one.waterfall.rows}
    terms = tuple(
        (term, before.get(term, 0.0), now.get(term, 0.0)) for term in in_order({**before, **now})
    )
    return Difference(
        tuple(_settings(one.job, other.job)), terms, (other.waterfall.step_s, one.waterfall.step_s)
    )


def show_difference(one: Explanation, other: Explanation, console: Console) -> None:
    """Print what differs."""
    found = difference(one, other)
    console.print(heading(f"against {other.name}"))
    for name, was, value in found.settings:
        console.print(f"  {name} = {value}  [dim](there {was})")
    rows = [
        (term, time_text(was_s), time_text(now_s), _signed(now_s - was_s))
        for term, was_s, now_s in (*found.terms_s, ("the step", *found.step_s))
    ]
    console.print(Table(("a step", "there", "here", "difference"), rows))


def _settings(one: Job | None, other: Job | None) -> list[tuple[str, str, str]]:
    if one is None or other is None:
        return []
    found = differing(to_raw(other), to_raw(one))
    return [(name, str(was), str(value)) for name, was, value in found]


def _signed(seconds: float) -> str:
    return ("-" if seconds < 0 else "+") + time_text(abs(seconds))
