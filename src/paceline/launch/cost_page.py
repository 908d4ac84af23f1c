"""Page: what runs cost and where their device time went, as one self-contained HTML file."""

from collections.abc import Sequence
from pathlib import Path

from paceline.launch.cost import RunCost
from paceline.launch.cost_show import (
    ATTEMPT_HEADS,
    ATTEMPT_WORDS,
    CLASS_COLOURS,
    CLASS_NAMES,
    MOST_ATTEMPTS,
    attempt_row,
    class_rows,
    device_time_text,
    got_rows,
    headline,
    idle_sentences,
    usd_text,
)
from paceline.launch.ledger import Ledger
from paceline.render.figures import plural, share_text
from paceline.render.page import Card, Page
from paceline.render.parts import Legend, Section, Subsection, Swatch, Whole, Wholes
from paceline.render.table import Bullets, Pairs, Table

_EVERY_SECOND = (
    "Every device-second from submission to end is in one class; the classes add up exactly."
)


def render(costs: Sequence[RunCost], at: Path) -> str:
    """The page as text: complete HTML without references to anything outside it.

    Args:
        costs: of at least one run.
        at: where it will stand.
    """
    if len(costs) == 1:
        return _of_run(costs[0], at)
    names = ", ".join(one.name for one in costs)
    rows = [
        (one.name, _whole(one.ledger), f"{device_time_text(one.ledger.held_us)}, {_usd(one)}")
        for one in costs
    ]
    page = Page(
        name=f"Cost of {plural(len(costs), 'run')}",
        next="`paceline cost RUN --html cost.html` shows one of them closely.",
        subtitle=[names if len(names) < 200 else f"{names[:200]}..."],
        lede=_EVERY_SECOND,
        parts=(
            Section("Where device time went", Wholes(rows), _legend(costs)),
            *(Section(one.name, *_parts(one)) for one in costs),
        ),
        at=at,
    )
    return page.html()


def _of_run(one: RunCost, at: Path) -> str:
    page = Page(
        name=f"Cost of {one.name}",
        next=f"`paceline explain {one.run.path}` says what would cost less.",
        subtitle=[str(one.run.path), plural(len(one.ledger.attempts), "attempt")],
        lede=f"{headline(one)} {_EVERY_SECOND}",
        cards=_cards(one),
        parts=(Section("Where device time went", *_parts(one)),),
        at=at,
    )
    return page.html()


def _cards(one: RunCost) -> list[Card]:
    found = one.ledger
    held, unit = device_time_text(found.held_us).split()
    cards = [("Held", held, f"{unit}, paid for")]
    if one.usd is not None and one.price is not None:
        cards.insert(0, ("Cost", usd_text(one.usd), f"{one.price.usd:g} USD a device-hour"))
        cards.append(("A kept step", usd_text(one.per(one.num_steps)), f"of {one.num_steps:,}"))
    if found.goodput is not None:
        cards.append(("Goodput", share_text(found.goodput), "in steps that were kept"))
    if one.planned_us is not None:
        planned, unit = device_time_text(one.planned_us).split()
        usd = "" if one.planned_usd is None else f", {usd_text(one.planned_usd)}"
        cards.append(("Planned", planned, f"{unit}{usd}"))
    return cards


def _parts(one: RunCost) -> tuple[Whole | Legend | Table | Subsection, ...]:
    found = one.ledger
    rows = [
        (Swatch(CLASS_NAMES[name], CLASS_COLOURS[name]), *figures)
        for name, *figures in class_rows(one)
    ]
    usd = "–" if one.usd is None else usd_text(one.usd)
    foot = ("all", device_time_text(found.total_us), "100.0%", usd)
    shown = found.attempts[-MOST_ATTEMPTS:]
    bars = [
        (str(each.attempt.number), _whole(Ledger((each,))), device_time_text(each.total_us))
        for each in shown
    ]
    return (
        _whole(found),
        _legend([one]),
        Table(("class", "device time", "share", "cost"), rows, foot=foot),
        Subsection("Held for nothing", Bullets(idle_sentences(one))),
        Subsection(
            "Attempts",
            Wholes(bars),
            Table(ATTEMPT_HEADS, [attempt_row(each, one.price) for each in shown], ATTEMPT_WORDS),
        ),
        Subsection("What was got for it", Pairs(got_rows(one))),
    )


def _usd(one: RunCost) -> str:
    return "no price" if one.usd is None else usd_text(one.usd)


def _whole(found: Ledger) -> Whole:
    return Whole(
        [
            (Swatch(CLASS_NAMES[name], CLASS_COLOURS[name]), us / found.total_us)
            for name, us in found.device_us.items()
        ]
    )


def _legend(costs: Sequence[RunCost]) -> Legend:
    there = {name for one in costs for name in one.ledger.device_us}
    return Legend(
        [
            Swatch(CLASS_NAMES[name], colour)
            for name, colour in CLASS_COLOURS.items()
            if name in there
        ]
    )
