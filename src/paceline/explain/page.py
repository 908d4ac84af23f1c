"""Page: an explanation as HTML: in the report of a Run, or a page of its own for a trace.

The frame is that of all pages (`paceline.observe.page`); parts.html beside this file lays out what
is said here as text, lengths and colours. Nothing is worked out that the terminal doesn't show too,
but for the lanes of one step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from paceline.config.errors import InputError
from paceline.explain.explain import Explanation, explain_subject
from paceline.explain.finding import Finding
from paceline.explain.lanes import CELLS, Lanes, read_lanes
from paceline.explain.rules import SHOWN
from paceline.explain.subject import Subject, only_axis
from paceline.explain.traffic import Flow
from paceline.explain.waterfall import Waterfall, WaterfallRow
from paceline.explain.what_if import limit_bytes, memory_terms
from paceline.observe import report
from paceline.observe.account import Account
from paceline.observe.page import Card, render_page
from paceline.observe.recorded import trace_files
from paceline.observe.run import Run
from paceline.observe.summary import bytes_text, colour, in_order, number, step_time_text
from paceline.observe.terms import TERMS

_MOST_KERNELS = 12
_MOST_RANKS = 16
_MOST_STEPS_OF_PATH = 12
_MOST_NAME = 60
_STANDS_OUT = 0.02
"""Part of the step that a term is beside the plan."""
_PACKAGE = "paceline.explain"


def write_report(run: Run, say: Callable[[str], None]) -> Path:
    """Write report.html into the Run directory, with an explanation where steps were profiled.

    Args:
        run: what it is about.
        say: is told why there is no explanation, where a trace is damaged.

    Returns:
        the path of the page.
    """
    text = None
    if any(run.trace_folder.glob("rank*.json*")):
        try:
            subject = Subject.of(run.path)
            text = render(subject, explain_subject(subject))
        except InputError as error:
            say(f"The report does without an explanation: {error}")
    return run.write("report.html", text or report.render(run))


def render(subject: Subject, why: Explanation, at: Path | None = None) -> str:
    """The page as text: of a Run its report and the explanation, of a trace the latter alone.

    Args:
        at: where that of a trace will stand, where it is known.
    """
    told = shown(subject, why)
    if subject.folder is not None:
        return report.render(
            Run(subject.folder),
            _PACKAGE,
            "explained.html",
            verdict=f"{why.headline.rstrip('.')}.",
            next_=next_of(why),
            why=told,
        )
    return render_page(
        _PACKAGE,
        "trace.html",
        name=Path(subject.name).name,
        subtitle=_subtitle(subject),
        next_=next_of(why),
        lede=f"{sentence(why.headline)}.",
        cards=_cards(subject, why),
        charts={},
        at=at,
        why=told,
    )


def next_of(why: Explanation) -> str:
    """What to do now: what is unexplained is recorded first, where it is more than any cause."""
    worth = next((each for each in why.findings if each.gain >= SHOWN), None)
    left = next(iter(why.unexplained), None)
    if left is not None and (worth is None or left.share > worth.gain):
        return f"find what {left.term} is. {left.to_record}"
    if why.next_command is not None and (worth is None or worth.changes):
        return f"`{why.next_command}`"
    if worth is not None:
        return f"mend {worth.name}. {worth.advice}"
    return "nothing of this step. `paceline explain --against` compares it with another one."


def shown(subject: Subject, why: Explanation) -> SimpleNamespace:
    """What the templates draw of an explanation."""
    account = subject.account
    return SimpleNamespace(
        fall=None if why.waterfall is None else waterfall_of(why.waterfall),
        notes=why.notes,
        unexplained=[each.sentence for each in why.unexplained],
        out_of_memory=[] if why.out_of_memory is None else why.out_of_memory.sentences,
        findings=[finding(each) for each in why.findings if each.gain >= SHOWN],
        lanes=_lanes(_read_lanes(subject)),
        ranks=None if account is None or len(account.ranks) < 2 else _ranks(account),
        flows=[_flow(flow) for flow in why.flows],
        kernels=[] if account is None else list(_kernels(account)),
        kernels_title="Operators" if account is None or not account.is_device else "Kernels",
        kernels_note="" if account is None or account.is_device else ", each its own time alone",
        memory=list(_memory(subject)),
        memory_note=_memory_note(subject),
    )


def finding(each: Finding) -> Mapping[str, Any]:
    """A finding as text."""
    return {
        **each.to_json(),
        "title": each.title.rstrip("."),
        "gain": f"{step_time_text(each.gain_s)} a step, {each.gain:.1%}",
    }


def sentence(text: str) -> str:
    """Begun with a capital, without its full stop."""
    return text[:1].upper() + text[1:].rstrip(".")


# ---- the waterfall ------------------------------------------------------------------------------


def waterfall_of(fall: Waterfall) -> dict[str, Any]:
    """What the template draws of it: bars, the figures beside them, and a note."""
    return {
        "note": _waterfall_note(fall),
        "bars": list(_bars(fall)),
        "heads": ("ms", "share") if fall.predicted_s is None else ("ms", "planned", "beyond"),
        "total": ("whole step", *_figures(fall.step_s, fall.predicted_s, fall.step_s)),
    }


def _bars(fall: Waterfall) -> Iterator[SimpleNamespace]:
    """A bar for each term where the one before it ends, the predicted one below it likewise."""
    whole_s = max(fall.step_s, fall.predicted_s or 0.0) or 1.0
    if fall.ideal_s is not None:
        figures = _figures(fall.ideal_s, None, fall.step_s)[: 1 if fall.predicted_s else 2]
        yield bar("at the peak", "var(--muted)", (0.0, fall.ideal_s), whole_s, figures)
    at_s = planned_at_s = 0.0
    for row in fall.rows:
        below = None
        if row.predicted_s:
            below = (percent(planned_at_s, whole_s), percent(row.predicted_s, whole_s))
            planned_at_s += row.predicted_s
        figures = _figures(row.measured_s, row.predicted_s, fall.step_s)
        yield bar(
            row.term,
            colour(row.term),
            (at_s, row.measured_s),
            whole_s,
            figures,
            below=below,
            mood=_mood(row, fall.step_s),
        )
        at_s += row.measured_s


def bar(
    name: str,
    paint: str,
    ends: tuple[float, float],
    whole_s: float,
    figures: Sequence[str],
    *,
    below: tuple[str, str] | None = None,
    mood: str = "",
) -> SimpleNamespace:
    """A row of the macro `bars`.

    Args:
        name: at its left.
        paint: its colour.
        ends: where it begins and how long it is, seconds.
        whole_s: that the whole width stands for.
        figures: at its right.
        below: the thin bar: where it begins and how long it is, per cent.
        mood: "over" or "under": how the last figure is coloured.
    """
    left, width = (percent(part, whole_s) for part in ends)
    return SimpleNamespace(
        name=name, colour=paint, left=left, width=width, figures=figures, below=below, mood=mood
    )


def _figures(measured_s: float, planned_s: float | None, step_s: float) -> tuple[str, ...]:
    if planned_s is None:
        return milliseconds(measured_s), f"{measured_s / step_s:.1%}"
    beyond_s = measured_s - planned_s
    return milliseconds(measured_s), milliseconds(planned_s), f"{beyond_s * 1e3:+,.1f}"


def _mood(row: WaterfallRow, step_s: float) -> str:
    """What stands out: more than a fiftieth of the step beside the plan."""
    if row.predicted_s is None:
        return ""
    beyond = (row.measured_s - row.predicted_s) / step_s
    return "over" if beyond > _STANDS_OUT else "under" if beyond < -_STANDS_OUT else ""


def _waterfall_note(fall: Waterfall) -> str:
    told = ["Milliseconds per step."]
    if fall.ideal_s is not None and fall.below_peak_s is not None:
        told.append(
            f"At the devices' peak the model's FLOPs would take {step_time_text(fall.ideal_s)}, "
            f"{fall.ideal_s / fall.step_s:.1%} of the step (MFU); products and attention take "
            f"{step_time_text(max(0.0, fall.below_peak_s))} more than that."
        )
    if fall.interval_s is not None:
        low, high = fall.interval_s
        told.append(
            f"The thin bars are the plan, which expected {step_time_text(low)} to "
            f"{step_time_text(high)}."
        )
    return " ".join(told)


def percent(part: float, whole: float) -> str:
    """For a style sheet: 12.34."""
    return f"{100 * part / whole:.2f}"


def milliseconds(seconds: float) -> str:
    """To a tenth, small ones to three digits."""
    value = seconds * 1e3
    return f"{value:,.1f}" if abs(value) >= 10 or value == 0 else f"{value:.3g}"


# ---- ranks and lanes ----------------------------------------------------------------------------


def _read_lanes(subject: Subject) -> Lanes | None:
    if subject.account is None:
        return None
    where = Path(subject.name) if subject.folder is None else Run(subject.folder).trace_folder
    axis = None if subject.job is None else only_axis(subject.job)
    return read_lanes(trace_files(where), subject.account, axis)


def _lanes(found: Lanes | None) -> dict[str, Any] | None:
    if found is None or not found.lanes:
        return None
    ranks: dict[int, list[tuple[str, list[tuple[str, str, str, str]]]]] = {}
    for lane in found.lanes:
        strips = [
            (
                f"{strip.start * CELLS:.0f}",
                f"{strip.width * CELLS:.0f}",
                colour(strip.term),
                f"{strip.term}: {milliseconds(strip.width * found.length_s)} ms at "
                f"{milliseconds(strip.start * found.length_s)}",
            )
            for strip in lane.strips
        ]
        ranks.setdefault(lane.rank, []).append((lane.stream, strips))
    some = f" {len(ranks)} of {found.num_ranks} ranks." if len(ranks) < found.num_ranks else ""
    return {
        "step": found.step,
        "cells": CELLS,
        "length": step_time_text(found.length_s),
        "ranks": list(ranks.items()),
        "legend": _legend(found.terms),
        "note": "A strip has the colour of what takes most of it; the traces themselves open in "
        f"Perfetto.{some}",
    }


def _legend(terms: Sequence[str]) -> list[tuple[str, str]]:
    return [(term, colour(term)) for term in terms]


def _present(account: Account) -> list[str]:
    sums = account.terms_ns.sum(axis=0)
    whole = sums.sum() or 1
    return in_order(term for term, ns in zip(TERMS, sums, strict=True) if ns > 0.001 * whole)


def _ranks(account: Account) -> dict[str, Any]:
    return {
        "note": _ranks_note(account),
        "rows": list(_rank_rows(account)),
        "legend": _legend(_present(account)),
        "path": list(_path(account)),
    }


def _rank_rows(account: Account) -> Iterator[tuple[int, list[tuple[str, float, str]], str]]:
    """Rank, its terms as parts of the longest rank's step, its step."""
    longest = max(account.step_s(rank) for rank in account.ranks) or 1.0
    for rank in account.ranks[:_MOST_RANKS]:
        parts = [
            (term, account.terms_ns[account.steps["rank"] == rank][:, TERMS.index(term)].mean())
            for term in _present(account)
        ]
        whole = sum(ns for _, ns in parts) or 1.0
        share = account.step_s(rank) / longest
        yield (
            rank,
            [(term, float(share * ns / whole), colour(term)) for term, ns in parts],
            step_time_text(account.step_s(rank)),
        )


def _ranks_note(account: Account) -> str:
    lengths = [account.step_s(rank) for rank in account.ranks]
    number = len(account.steps) // len(lengths)
    told = (
        f"Mean of {number} profiled step{'s' if number > 1 else ''}. The longest rank's step is "
        f"{max(lengths) / min(lengths) - 1:.1%} above the shortest."
    )
    if len(lengths) > _MOST_RANKS:
        told += f" The first {_MOST_RANKS} of {len(lengths)} ranks."
    doubt = [clock.uncertainty_ns for clock in account.clocks.values()]
    if doubt and max(doubt) >= 1000:
        told += f" Clocks agree within {max(doubt) / 1e3:,.0f} µs."
    return told


def _path(account: Account) -> Iterator[tuple[str, ...]]:
    """Rank, term, time and share of the critical path, the most first."""
    rows = account.path
    if not len(rows):
        return
    num_steps = len(np.unique(rows["step"]))
    pairs = np.stack([rows["rank"], rows["term"]], axis=1).astype(np.int64)
    kinds, which = np.unique(pairs, axis=0, return_inverse=True)
    sums = np.bincount(which.reshape(-1), rows["duration_ns"])
    for at in np.argsort(-sums, kind="stable")[:_MOST_STEPS_OF_PATH]:
        rank, term = kinds[at].tolist()
        share = f"{sums[at] / sums.sum():.1%}"
        yield str(rank), TERMS[term], milliseconds(sums[at] / num_steps / 1e9), share


# ---- tables -------------------------------------------------------------------------------------


def _flow(flow: Flow) -> tuple[str, ...]:
    rate = flow.bus_bytes_per_s
    return (
        flow.axis or "unknown",
        flow.op,
        str(flow.num_ranks or "?"),
        f"{flow.num_calls:,.1f}",
        bytes_text(flow.bytes) if flow.bytes else "–",
        milliseconds(flow.total_s),
        milliseconds(flow.exposed_s),
        "–" if rate is None else f"{bytes_text(rate)}/s",
    )


def _kernels(account: Account) -> Iterator[tuple[str, ...]]:
    """Name, operator, term, calls, time and share of the kernels with the most time."""
    rows = account.kernels
    if not len(rows):
        return
    keys = np.stack([rows["name"], rows["op"], rows["term"]], axis=1).astype(np.int64)
    kinds, which = np.unique(keys, axis=0, return_inverse=True)
    which = which.reshape(-1)
    sums, counts = np.bincount(which, rows["total_ns"]), np.bincount(which, rows["count"])
    steps = len(account.steps)
    for at in np.argsort(-sums, kind="stable")[:_MOST_KERNELS]:
        name, op, term = kinds[at].tolist()
        yield (
            _short(account.names[name]),
            "" if op in (-1, name) else _short(account.names[op]),
            TERMS[term],
            f"{counts[at] / steps:,.1f}",
            milliseconds(sums[at] / steps / 1e9),
            f"{sums[at] / sums.sum():.1%}",
        )


def _short(name: str) -> str:
    """A kernel's name can be a page of template arguments."""
    name = name.removeprefix("void ")
    return name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 1]}…"


def _memory(subject: Subject) -> Iterator[tuple[str, ...]]:
    """Predicted bytes by term; what was measured is one figure, and stands in the note."""
    terms = None if subject.job is None else memory_terms(subject.job)
    if not terms:
        return
    whole = sum(terms.values())
    for term, size in terms.items():
        if size > 0.001 * whole:
            yield term, bytes_text(size), f"{size / whole:.1%}"
    yield "whole", bytes_text(whole), ""


def _memory_note(subject: Subject) -> str:
    measured = [each for line in subject.lines for each in _memories(line)]
    limit = None if subject.job is None else limit_bytes(subject.job)
    told = [f"Measured: a peak of {bytes_text(max(measured))}."] if measured else []
    if limit is not None:
        told.append(f"A layout may use {bytes_text(limit)}.")
    return " ".join(told)


def _memories(line: Mapping[str, Any]) -> list[float]:
    """Peaks of every rank, where the line has them."""
    ranks = (line.get("ranks") or {}).get("memory_bytes") or [line.get("memory_bytes")]
    return [value for each in ranks if (value := number(each)) is not None]


# ---- a trace's own head -------------------------------------------------------------------------


def _subtitle(subject: Subject) -> list[str]:
    if subject.account is None:
        raise InputError(f"{subject.name} has no profiled steps: give a trace or a run.")
    ranks, steps = subject.account.ranks, np.unique(subject.account.steps["step"])
    return [
        f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} recorded",
        f"{len(steps)} step{'s' if len(steps) > 1 else ''}",
        "kernels of a device" if subject.account.is_device else "operators of a CPU",
    ]


def _cards(subject: Subject, why: Explanation) -> list[Card]:
    assert why.waterfall is not None
    shares = {row.term: row.measured_s / subject.step_s for row in why.waterfall.rows}
    exposed = sum(share for term, share in shares.items() if term.startswith("exposed_comm"))
    total = sum(flow.total_s for flow in why.flows)
    hidden = 1 - sum(flow.exposed_s for flow in why.flows) / total if total else None
    worth = [each for each in why.findings if each.gain >= SHOWN]
    return [
        ("Step", step_time_text(subject.step_s), "median"),
        ("Exposed communication", f"{exposed:.1%}", "of the step"),
        ("Overlapped", "–" if hidden is None else f"{hidden:.1%}", "of all communication"),
        ("Waiting for the host", f"{shares.get('host_gap', 0.0):.1%}", "of the step"),
        ("Findings", str(len(worth)), worth[0].name if worth else "no cause above 1 %"),
    ]
