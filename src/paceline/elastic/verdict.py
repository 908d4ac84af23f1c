"""Who holds up the others: a verdict from what all ranks say of themselves.

A rank says which section of its step it is in, since when, how long that took lately, where in the
code it is, and how many collectives of each group it has begun. Where one is longer in a section
than it may be, the culprit is who has begun fewer collectives than the others, or another one than
they, and else who does not wait in one. Ranks that are held up are often late a moment before their
culprit is: then nobody is judged yet.

This is pure: the agent asks the ranks (`elastic.link`), the leader calls it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.elastic.decision import LossClass

Section = str
# In the order of a step.
SECTIONS = (
    *("start", "restore", "data", "stream", "forward_backward", "agree", "update"),
    *("round", "evaluation", "checkpoint", "idle"),
)
_NAMED = {
    "start": "at its start",
    "restore": "while it restored its state",
    "data": "while it read its data",
    "stream": "while it waited for what is to arrive",
    "forward_backward": "in forward and backward",
    "agree": "in the exchange at the end of its step",
    "update": "in the optimizer",
    "round": "in a round of local updates",
    "evaluation": "in an evaluation",
    "checkpoint": "while it saved a checkpoint",
    "idle": "between two generations",
}


@dataclass(frozen=True)
class Progress:
    """Where a rank is, as it says itself."""

    rank: int
    host: str
    generation: int
    step: int
    section: Section
    since_s: float
    limit_s: float | None
    """How long it may be in this section; None: as long as it likes."""
    place: str
    """In the code: "file.py:12 (function)"."""
    is_waiting: bool
    """Whether its stack stands in a collective, as far as Python sees it."""
    calls: Mapping[str, tuple[int, Sequence[str]]] = field(default_factory=dict)
    """Of each process group that it made collectives in: how many it has begun, and the names of
    the last of them. Empty: nobody counted."""

    @property
    def is_late(self) -> bool:
        """Whether it is longer in its section than it may be."""
        return self.limit_s is not None and self.since_s > self.limit_s


@dataclass(frozen=True)
class Verdict:
    """Who holds up the others."""

    rank: int | None
    """None: every rank waits, and for no other one: what is between them fails."""
    cause: LossClass
    sentence: str


def judge(reports: Sequence[Progress], generation: int, age_s: float) -> Verdict | None:
    """Find the culprit; None where no rank is late.

    Args:
        reports: the newest of each rank of the generation.
        generation: its number; a rank that is still in an earlier one has not come out of it.
        age_s: of the generation. What a rank said of an earlier one it may have said before it had
            to leave: it is late since this one began at the earliest.
    """
    reports = [
        replace(one, since_s=min(one.since_s, age_s)) if one.generation < generation else one
        for one in reports
    ]
    late = [one for one in reports if one.is_late]
    if not late:
        return None
    behind = [one for one in late if one.generation < generation]
    if behind:
        return _verdict(behind[0], "stuck", "and has not left a generation that is over")
    if any(one.generation < generation for one in reports):
        return None  # others wait for one that is on its way
    suspects = _suspects(reports)
    return _by_calls(reports, suspects) or _by_place(reports, suspects)


def _suspects(reports: Sequence[Progress]) -> list[Progress]:
    """Who is late, does not wait as far as Python sees it, and has begun no collective that another
    such rank has not: else it may wait for that one."""
    acting = [one for one in reports if not one.is_waiting]
    late = [one for one in acting if one.is_late]
    found = [one for one in late if not any(_is_ahead(one, other) for other in acting)]
    if not found and len(late) == len(acting):
        return late  # each waits for another one
    return found


def _is_ahead(one: Progress, other: Progress) -> bool:
    return any(one.calls[name][0] > other.calls[name][0] for name in one.calls.keys() & other.calls)


def _by_calls(reports: Sequence[Progress], suspects: Sequence[Progress]) -> Verdict | None:
    """The rank that has begun another collective of some group than the others, or fewer."""
    groups = sorted({name for one in reports for name in one.calls})
    return next(filter(None, (_by_group(reports, suspects, group) for group in groups)), None)


def _by_group(
    reports: Sequence[Progress], suspects: Sequence[Progress], group: str
) -> Verdict | None:
    members = [one for one in reports if group in one.calls]
    counts = [one.calls[group][0] for one in members]
    # Who began another one may have gone on to the next: what it sent was taken by the network.
    names = {one.rank: _call(one, group, min(counts)) for one in members}
    usual = Counter(filter(None, names.values())).most_common(1)
    for one in members:
        if (own := names[one.rank]) and own != usual[0][0] and one.is_late:
            what = f"in {own} where others are in {usual[0][0]} (group {group})"
            return _verdict(one, "wrong_collective", what)
    behind = [one for one in suspects if group in one.calls and one.calls[group][0] < max(counts)]
    if not behind:
        return None
    first = min(behind, key=lambda one: one.calls[group][0])
    ahead = members[counts.index(max(counts))]
    number = first.calls[group][0] + 1
    name = _call(ahead, group, number) or "collective"
    what = f"before {name} number {number} of group {group}, which others have begun"
    return _verdict(first, _cause(first), what)


def _call(one: Progress, group: str, number: int) -> str:
    """The name of a collective that a rank has begun; "": it is not known any more."""
    count, names = one.calls[group]
    at = len(names) - 1 - (count - number)
    return names[at] if at >= 0 else ""


def _by_place(reports: Sequence[Progress], suspects: Sequence[Progress]) -> Verdict | None:
    """Who is late and does not wait in a collective."""
    acting = [one for one in reports if not one.is_waiting]
    if suspects:
        # Of several, one that has not come as far as others.
        first = min(suspects, key=lambda one: (*_come_to(one), -one.since_s))
        on_its_way = (one for one in acting if one.limit_s is not None and not one.is_late)
        if any(_come_to(one) <= _come_to(first) for one in on_its_way):
            return None  # the suspect may wait for it in C++, unseen; it goes on, or is late soon
        return _verdict(first, _cause(first), "before the collective that others wait for")
    if acting:
        return None  # it is within its own limit, and may be on its way
    longest = max((one for one in reports if one.is_late), key=lambda one: one.since_s)
    return Verdict(
        None,
        "stuck",
        f"every rank waits in a collective, rank {longest.rank} on {longest.host} since "
        f"{longest.since_s:.1f} s in {longest.place}: the links between them fail.",
    )


def _come_to(one: Progress) -> tuple[int, int]:
    """How far a rank has come: steps done, and the section's place in a step."""
    return one.step, SECTIONS.index(one.section) if one.section in SECTIONS else 0


def _cause(one: Progress) -> LossClass:
    return "waiting_for_data" if one.section == "data" else "stuck"


def _verdict(one: Progress, cause: LossClass, what: str) -> Verdict:
    return Verdict(
        one.rank,
        cause,
        f"rank {one.rank} on {one.host} is stuck {_NAMED.get(one.section, one.section)} of step "
        f"{one.step + 1} since {one.since_s:.1f} s (at most {one.limit_s:.1f} s), in {one.place}, "
        f"{what}.",
    )
