"""Page: an explanation as HTML: in the report of a Run, or a page of its own for a trace.

Nothing is worked out that the terminal doesn't show too, but for the lanes of one step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
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
from paceline.observe.recorded import trace_files
from paceline.observe.run import Run
from paceline.observe.summary import number
from paceline.observe.terms import TERMS, colour, in_order
from paceline.render.figures import bytes_text, milliseconds, plural, share_text, time_text
from paceline.render.page import Card, Page
from paceline.render.parts import (
    Article,
    Legend,
    Note,
    Section,
    Step,
    Steps,
    Strips,
    Subsection,
    Swatch,
    Whole,
    Wholes,
)
from paceline.render.table import Bullets, Table

_MOST_KERNELS = 12
_MOST_RANKS = 16
_MOST_STEPS_OF_PATH = 12
_MOST_NAME = 60
_STANDS_OUT = 0.02
"""Part of the step that a term is beside the plan."""


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
    if subject.folder is not None:
        verdict = f"{why.headline.rstrip('.')}."
        run = Run(subject.folder)
        return report.render(run, sections(subject, why), verdict=verdict, next_=next_of(why))
    headline = why.headline[:1].upper() + why.headline[1:].rstrip(".")
    page = Page(
        name=Path(subject.name).name,
        next=next_of(why),
        subtitle=_subtitle(subject),
        lede=f"{headline}.",
        cards=_cards(subject, why),
        parts=sections(subject, why),
        at=at,
    )
    return page.html()


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


def sections(subject: Subject, why: Explanation) -> list[Section]:
    """What there is to say of an explanation."""
    memory = () if why.out_of_memory is None else why.out_of_memory.sentences
    found = [Section("Out of memory", Bullets(memory))]
    if why.waterfall is not None:
        note, notes = _waterfall_note(why.waterfall), map(Note, why.notes)
        bars = waterfall_bars(why.waterfall)
        found.append(Section("Why the step takes as long", bars, *notes, note=note))
    found += [_what_to_change(why), _lanes(subject)]
    account = subject.account
    if account is not None and len(account.ranks) > 1:
        found.append(_ranks(account))
    found.append(
        Section(
            "Communication",
            Table(_FLOW, [_flow(flow) for flow in why.flows], words=(0, 1)),
            note="Per step and rank. Exposed: nothing else ran beside it. Bus bandwidth as "
            "nccl-tests count it, without the time that early ranks wait for the last.",
        )
    )
    if account is not None:
        found.append(_kernels(account))
    return [*found, _memory(subject)]


def _what_to_change(why: Explanation) -> Section:
    worth = [article(each) for each in why.findings if each.gain >= SHOWN]
    note = (
        "The largest gain first; a gain is what the step would be shorter by if this alone were "
        "mended."
        if worth
        else "No rule found a cause that costs more than 1 % of the step."
    )
    left = [Note(each.sentence, warns=True) for each in why.unexplained]
    return Section("What to change", *left, Note(note), *worth)


def article(each: Finding) -> Article:
    """A finding with all there is to say of it."""
    return Article(
        title=each.title.rstrip("."),
        aside=f"{time_text(each.gain_s)} a step, {each.gain:.1%}",
        tag=f"{each.name} · confidence {each.confidence}",
        sentences=[one.sentence for one in each.evidence],
        advice=each.advice,
        code="\n".join(f"--set {text}" for text in each.changes),
    )


# ---- the waterfall ------------------------------------------------------------------------------


def waterfall_bars(fall: Waterfall) -> Steps:
    """A bar for each term where the one before it ends, the predicted one below it likewise."""
    whole_s = max(fall.step_s, fall.predicted_s or 0.0) or 1.0
    rows = []
    if fall.ideal_s is not None:
        figures = _figures(fall.ideal_s, None, fall.step_s)[: 1 if fall.predicted_s else 2]
        peak = Swatch("at the peak", "var(--muted)")
        rows.append(Step(peak, 0.0, fall.ideal_s / whole_s, figures))
    at_s = planned_at_s = 0.0
    for row in fall.rows:
        below = None
        if row.predicted_s:
            below = planned_at_s / whole_s, row.predicted_s / whole_s
            planned_at_s += row.predicted_s
        rows.append(
            Step(
                Swatch(row.term, colour(row.term)),
                at_s / whole_s,
                row.measured_s / whole_s,
                _figures(row.measured_s, row.predicted_s, fall.step_s),
                below,
                _mood(row, fall.step_s),
            )
        )
        at_s += row.measured_s
    heads = ("ms", "share") if fall.predicted_s is None else ("ms", "planned", "beyond")
    total = _figures(fall.step_s, fall.predicted_s, fall.step_s)
    return Steps(heads, rows, ("whole step", *total))


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
            f"At the devices' peak the model's FLOPs would take {time_text(fall.ideal_s)}, "
            f"{fall.ideal_s / fall.step_s:.1%} of the step (MFU); products and attention take "
            f"{time_text(max(0.0, fall.below_peak_s))} more than that."
        )
    if fall.interval_s is not None:
        low, high = fall.interval_s
        told.append(
            f"The thin bars are the plan, which expected {time_text(low)} to {time_text(high)}."
        )
    return " ".join(told)


# ---- ranks and lanes ----------------------------------------------------------------------------


def _lanes(subject: Subject) -> Section:
    found = _read_lanes(subject)
    title = "One step"
    if found is None:
        return Section(title)
    groups: dict[str, list[tuple[str, list[tuple[int, int, str, str]]]]] = {}
    for lane in found.lanes:
        strips = [
            (
                round(strip.start * CELLS),
                round(strip.width * CELLS),
                colour(strip.term),
                f"{strip.term}: {milliseconds(strip.width * found.length_s)} ms at "
                f"{milliseconds(strip.start * found.length_s)}",
            )
            for strip in lane.strips
        ]
        groups.setdefault(f"rank {lane.rank}", []).append((lane.stream, strips))
    some = f" {len(groups)} of {found.num_ranks} ranks." if len(groups) < found.num_ranks else ""
    return Section(
        title,
        Strips(list(groups.items()), CELLS, time_text(found.length_s)),
        _legend(found.terms),
        note=f"Step {found.step}, the one of median length. A strip has the colour of what takes "
        f"most of it; the traces themselves open in Perfetto.{some}",
    )


def _read_lanes(subject: Subject) -> Lanes | None:
    if subject.account is None:
        return None
    where = Path(subject.name) if subject.folder is None else Run(subject.folder).trace_folder
    axis = None if subject.job is None else only_axis(subject.job)
    return read_lanes(trace_files(where), subject.account, axis)


def _legend(terms: Sequence[str]) -> Legend:
    return Legend([Swatch(term, colour(term)) for term in terms])


def _ranks(account: Account) -> Section:
    sums = account.terms_ns.sum(axis=0)
    shown = [term for term, ns in zip(TERMS, sums, strict=True) if ns > 0.001 * (sums.sum() or 1)]
    terms = in_order(shown)
    return Section(
        "Rank by rank",
        Wholes(list(_rank_rows(account, terms))),
        _legend(terms),
        Subsection(
            "The critical path",
            Table(("rank", "term", "ms per step", "share"), list(_path(account)), words=(0, 1)),
            note="What a step's length is made of when one follows who waited for whom, from its "
            "end to its start.",
        ),
        note=_ranks_note(account),
    )


def _rank_rows(account: Account, terms: Sequence[str]) -> Iterator[tuple[str, Whole, str]]:
    """Rank, its terms as parts of the longest rank's step, its step."""
    longest = max(account.step_s(rank) for rank in account.ranks) or 1.0
    for rank in account.ranks[:_MOST_RANKS]:
        means = account.terms_ns[account.steps["rank"] == rank].mean(axis=0)
        parts = {term: float(means[TERMS.index(term)]) for term in terms}
        whole = sum(parts.values()) or 1.0
        share = account.step_s(rank) / longest
        shares = [(Swatch(term, colour(term)), share * ns / whole) for term, ns in parts.items()]
        yield f"rank {rank}", Whole(shares), time_text(account.step_s(rank))


def _ranks_note(account: Account) -> str:
    lengths = [account.step_s(rank) for rank in account.ranks]
    number = len(account.steps) // len(lengths)
    told = (
        f"Mean of {plural(number, 'profiled step')}. The longest rank's step is "
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
    num_steps = len(np.unique(rows["step"]))
    kinds, (sums,) = _grouped(rows, ("rank", "term"), "duration_ns")
    for at in np.argsort(-sums, kind="stable")[:_MOST_STEPS_OF_PATH]:
        rank, term = kinds[at].tolist()
        share = share_text(sums[at] / sums.sum())
        yield str(rank), TERMS[term], milliseconds(sums[at] / num_steps / 1e9), share


def _grouped(rows: Any, by: Sequence[str], *values: str) -> tuple[Any, list[Any]]:
    """The kinds of rows (kinds, columns), and of each kind the sum of every value."""
    keys = np.stack([rows[name] for name in by], axis=1).astype(np.int64)
    kinds, which = np.unique(keys, axis=0, return_inverse=True)
    which = which.reshape(-1)
    return kinds, [np.bincount(which, rows[name], len(kinds)) for name in values]


# ---- tables -------------------------------------------------------------------------------------

_FLOW = ("axis", "collective", "ranks", "calls", "bytes", "ms", "of it exposed", "bus bandwidth")


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


def _kernels(account: Account) -> Section:
    """Name, operator, term, calls, time and share of the kernels with the most time."""
    kinds, (sums, counts) = _grouped(account.kernels, ("name", "op", "term"), "total_ns", "count")
    steps, rows = len(account.steps), []
    for at in np.argsort(-sums, kind="stable")[:_MOST_KERNELS]:
        name, op, term = kinds[at].tolist()
        rows.append(
            (
                _short(account.names[name]),
                "" if op in (-1, name) else _short(account.names[op]),
                TERMS[term],
                f"{counts[at] / steps:,.1f}",
                milliseconds(sums[at] / steps / 1e9),
                share_text(sums[at] / sums.sum()),
            )
        )
    alone = "" if account.is_device else ", each its own time alone"
    return Section(
        "Kernels" if account.is_device else "Operators",
        Table(("name", "launched by", "term", "calls", "ms", "share"), rows, words=(0, 1, 2)),
        note=f"The {len(rows)} with the most time, per step and rank{alone}.",
    )


def _short(name: str) -> str:
    """A kernel's name can be a page of template arguments."""
    name = name.removeprefix("void ")
    return name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 1]}…"


def _memory(subject: Subject) -> Section:
    """Predicted bytes by term; what was measured is one figure, and stands in the note."""
    terms = (None if subject.job is None else memory_terms(subject.job)) or {}
    whole = sum(terms.values())
    rows = [
        (term, bytes_text(num), share_text(num / whole))
        for term, num in terms.items()
        if num > 0.001 * whole
    ]
    if rows:
        rows.append(("whole", bytes_text(whole), ""))
    measured = [each for line in subject.lines for each in _memories(line)]
    limit = None if subject.job is None else limit_bytes(subject.job)
    told = [f"Measured: a peak of {bytes_text(max(measured))}."] if measured else []
    if limit is not None:
        told.append(f"A layout may use {bytes_text(limit)}.")
    table = Table(("term", "predicted", "share"), rows)
    return Section("Memory of the heaviest rank", table, note=" ".join(told))


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
        f"{plural(len(ranks), 'rank')} recorded",
        plural(len(steps), "step"),
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
        ("Step", time_text(subject.step_s), "median"),
        ("Exposed communication", f"{exposed:.1%}", "of the step"),
        ("Overlapped", "–" if hidden is None else f"{hidden:.1%}", "of all communication"),
        ("Waiting for the host", f"{shares.get('host_gap', 0.0):.1%}", "of the step"),
        ("Findings", str(len(worth)), worth[0].name if worth else "no cause above 1 %"),
    ]
