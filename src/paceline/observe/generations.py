"""Generations: what interruptions cost a run, from its events and the lines of its steps.

Every second of a start goes into exactly one class, so that the classes of a generation add up to
its length. What is known by two moments is their difference: the end of the last step that was
kept, the loss noticed, the next generation claimed. What only a rank knows (connect, build,
restore) is as it says, as far as there is room. Moments are of the leader's clock and of rank 0's;
where they contradict each other no class is negative.

A start is from the first decision or claim until the run's end. Where that isn't written (all of
it was killed) it is the newest moment known, and steps that the next start recomputed are added
with their typical time. Between two starts there is no run.

- Goodput: seconds of steps that were kept over the seconds of all starts. Google calls it runtime
  goodput: https://cloud.google.com/blog/products/ai-machine-learning/goodput-metric-as-measure-of-ml-productivity
- Effective training time ratio: the same seconds over those from the first start to the newest
  moment, the time between starts included. Source: arXiv 2410.21680 (productive runtime over
  available wallclock time, in which that in the queue is).

All functions are pure; `GenerationsSoFar` reads a Run that goes on.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from paceline.observe.run import Records, Run
from paceline.observe.summary import number
from paceline.render.figures import plural, share_text

Event = Mapping[str, Any]

LOSS_CLASSES = (
    *("dead", "vanished", "stopped", "stuck", "wrong_collective"),
    *("waiting_for_data", "slow", "refused"),
)
PHASES = ("notice", "decide", "waiting", "start", "connect", "build", "restore")
"""Of a recovery, in their order. Waiting: for nodes, while there are too few."""
CLASSES = ("kept", "between", "recomputed", *PHASES)
"""Of a start's seconds. Kept: in steps that were kept. Between: between steps, as evaluations and
checkpoints are. Recomputed: in steps that were lost, the one under way among them."""


@dataclass
class KeptSteps:
    """The steps of one generation that are in metrics.jsonl."""

    first: int
    last: int
    began_s: float
    """Unix time at which the first one began; `ended_s`: at which the last one ended."""
    ended_s: float
    num: int = 0
    seconds: float = 0.0
    """Sum of their times."""


@dataclass(frozen=True)
class Loss:
    """What was lost, or found to hold up the others."""

    time_s: float
    """Unix time, noticed."""
    generation: int
    kind: str
    """Its class: dead, vanished, stopped, stuck, and so on."""
    node: str | None
    rank: int | None
    sentence: str
    is_report: bool
    """Whether nothing followed: a rank that is merely slow."""


@dataclass(frozen=True)
class Generation:
    """One of a run, as it was seen."""

    number: int
    start: int
    """Of which start of the run it is, from 1."""
    began_s: float
    """Unix time of its claim; of the first one of a start, of the start."""
    ended_s: float
    """When the next one was claimed, or the start ended."""
    nodes: tuple[str, ...]
    """Those that train."""
    spares: tuple[str, ...]
    num_ranks: int | None
    layout: str
    reason: str
    """Why the one before ended."""
    steps: KeptSteps | None
    """None: none of its steps was kept."""
    seconds: Mapping[str, float]
    """By class, those that took time, in the order of CLASSES; they add up to its length."""
    recovery_s: Mapping[str, float]
    """By phase: from the loss before it until it had its state; empty for the first of a start."""
    source: str | None
    """Of its state: start, live, buddy or disk."""
    recomputed: int
    """Steps that it did again."""
    back_s: float | None
    """From the loss noticed to its first finished step."""
    losses: tuple[Loss, ...]

    @property
    def who(self) -> str:
        """Who trains in which layout, in words."""
        ranks = "" if self.num_ranks is None else plural(self.num_ranks, "rank")
        spares = plural(len(self.spares), "spare") if self.spares else ""
        nodes = plural(len(self.nodes), "node")
        return ", ".join(filter(None, [nodes, spares, ranks, self.layout]))


@dataclass(frozen=True)
class Generations:
    """Those of a run, oldest first; at least one."""

    all: tuple[Generation, ...]

    @property
    def newest(self) -> Generation:
        """The one that trains, or was the last to."""
        return self.all[-1]

    @cached_property
    def losses(self) -> tuple[Loss, ...]:
        """In their order, without mere reports."""
        return tuple(loss for one in self.all for loss in one.losses if not loss.is_report)

    @property
    def num_losses(self) -> Mapping[str, int]:
        """By class, the most frequent first."""
        return dict(Counter(loss.kind for loss in self.losses).most_common())

    @property
    def last_loss(self) -> Loss | None:
        """None: there was none."""
        return self.losses[-1] if self.losses else None

    @property
    def summary(self) -> str:
        """How many interruptions of which class there were, and the goodput."""
        kinds = ", ".join(
            f"{num} {kind.replace('_', ' ')}" for kind, num in self.num_losses.items()
        )
        told = f"{len(self.losses)} ({kinds})" if kinds else "none"
        return told + ("" if self.goodput is None else f", goodput {share_text(self.goodput)}")

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Of all starts by class."""
        return {
            name: sum(one.seconds[name] for one in self.all if name in one.seconds)
            for name in CLASSES
            if any(name in one.seconds for one in self.all)
        }

    @property
    def run_s(self) -> float:
        """Seconds of all starts."""
        return sum(self.seconds.values())

    @property
    def wall_s(self) -> float:
        """Seconds from the first start to the newest moment, those between starts included."""
        return max(self.run_s, self.newest.ended_s - self.all[0].began_s)

    @property
    def goodput(self) -> float | None:
        """Kept seconds over `run_s`, 0 to 1; None: nothing has happened yet."""
        return self.seconds.get("kept", 0.0) / self.run_s if self.run_s else None

    @property
    def effective_ratio(self) -> float | None:
        """Effective training time ratio: kept seconds over `wall_s`, 0 to 1."""
        return self.seconds.get("kept", 0.0) / self.wall_s if self.wall_s else None

    @property
    def recomputed(self) -> int:
        """Steps that were done again."""
        return sum(one.recomputed for one in self.all)

    @property
    def last_recovery(self) -> Generation | None:
        """The newest one that took over from another of its start; None: none did."""
        return next((one for one in reversed(self.all) if one.recovery_s), None)


def kept_steps(lines: Iterable[Mapping[str, Any]]) -> dict[int, KeptSteps]:
    """Steps by the number of their generation; lines without one are left out."""
    kept: dict[int, KeptSteps] = {}
    for line in lines:
        add_step(kept, line)
    return kept


def add_step(kept: dict[int, KeptSteps], line: Mapping[str, Any]) -> None:
    """Count one more step."""
    generation, ended_s = line.get("generation"), number(line.get("time"))
    if generation is None or ended_s is None:
        return
    step, seconds = line["step"], max(0.0, number(line.get("step_time_s")) or 0.0)
    one = kept.setdefault(generation, KeptSteps(step, step, ended_s - seconds, ended_s))
    one.last, one.ended_s = step, max(one.ended_s, ended_s)
    one.num, one.seconds = one.num + 1, one.seconds + seconds


def generations(events: Sequence[Event], kept: Mapping[int, KeptSteps]) -> Generations | None:
    """What happened to a run.

    Args:
        events: as `Run.events` gives them.
        kept: of the lines of metrics.jsonl, by generation.

    Returns:
        None where no event is a generation: the run is not elastic.
    """
    starts = _starts(events)
    if not starts:
        return None
    # A number that was claimed twice was forgotten in between: its steps are the newest one's.
    newest = {claim["generation"]: claim for start in starts for claim in start.claims}
    found: list[Generation] = []
    for at, (start, after) in enumerate(zip(starts, [*starts[1:], None], strict=True), 1):
        own = [
            claim["generation"] for claim in start.claims if newest[claim["generation"]] is claim
        ]
        steps = {number: kept[number] for number in own if number in kept}
        found += _of_start(at, start, after, steps)
    return Generations(tuple(found))


def generations_of(run: Run) -> Generations | None:
    """What happened to a Run so far; None: it is not elastic.

    Raises:
        InputError: its files can't be read.
    """
    events = run.events().lines
    return generations(events, kept_steps(run.metrics())) if events else None


class GenerationsSoFar:
    """Those of a Run that goes on, without reading all of its steps at every look."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._kept: dict[int, KeptSteps] = {}
        self._at: tuple[int | None, int] = (None, 0)
        self._written: tuple[int, int] | None = None
        self._events = Records([], None)

    def take(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Take the newest steps, oldest first; those that were taken before don't count again."""
        if not lines or "generation" not in lines[-1]:
            return
        generation, done = self._at
        fresh = [line for line in lines if line["step"] > done]
        goes_on = lines[-1]["generation"] == generation and lines[-1]["step"] >= done
        if not goes_on or (fresh and fresh[0]["step"] != done + 1):
            # Steps were taken back, or not all were seen.
            first = lines[0]["step"]
            fresh = [line for line in self._run.metrics() if line["step"] < first] + [*lines]
            self._kept = {}
        for line in fresh:
            add_step(self._kept, line)
        self._at = lines[-1]["generation"], lines[-1]["step"]

    def look(self) -> Generations | None:
        """What happened so far; None: the run is not elastic."""
        try:
            status = self._run.events_file.stat()
        except OSError:
            return None
        written = status.st_ino, status.st_size
        if written != self._written:
            self._events, self._written = self._run.events(), written
        return generations(self._events.lines, self._kept)

    @property
    def damage(self) -> str | None:
        """Which lines of events.jsonl were left out at the last look, as a sentence."""
        return self._events.damage


# ---- starts --------------------------------------------------------------------------------------

_ACTS = ("decision", "generation")


class _Start:
    """The events from a start of the run to the next one."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._named: defaultdict[tuple[str, int | None], list[Event]] = defaultdict(list)
        self.claims: list[Event] = []
        self.end: Event | None = None

    def add(self, event: Event) -> None:
        self.events.append(event)
        self._named[event["event"], event.get("generation")].append(event)
        if event["event"] == "generation":
            self.claims.append(event)
        elif event["event"] == "end" and "generation" in event:  # rank 0 tells of its own without
            self.end = event

    def named(self, name: str, generation: int) -> list[Event]:
        """Events of a name that happened in a generation."""
        return self._named.get((name, generation), [])

    def recovery(self, generation: int) -> Event:
        """The event that it had its state; without one an empty one."""
        return next(iter(self.named("recovered", generation)), {})

    @property
    def has_failed(self) -> bool:
        return self.end is not None and self.end.get("state") == "failed"

    @property
    def waits(self) -> bool:
        """Whether it begins with a wait for nodes."""
        first = next(event for event in self.events if event["event"] in _ACTS)
        return first.get("action") == "wait"

    @property
    def began_s(self) -> float:
        """Its first decision or claim."""
        return next(float(event["time"]) for event in self.events if event["event"] in _ACTS)


def _starts(events: Sequence[Event]) -> list[_Start]:
    """Cut events where the run was started again: after its end, or before a first generation.
    What never came to a generation is left out."""
    found = [_Start()]
    for event in events:
        begins = event["event"] in _ACTS and (
            event.get("generation") == 0 or "start" in (event.get("reason"), event.get("action"))
        )
        if found[-1].end is not None or (begins and found[-1].claims):
            found.append(_Start())
        found[-1].add(event)
    return [start for start in found if start.claims]


def _of_start(
    number_: int, start: _Start, after: _Start | None, steps: Mapping[int, KeptSteps]
) -> list[Generation]:
    ended_s = _end_of(start, after, steps)
    is_over = start.has_failed or (start.end is None and after is not None)
    spans: list[_Span] = []
    for at, claim in enumerate(start.claims):
        next_ = start.claims[at + 1] if at + 1 < len(start.claims) else None
        until_s = ended_s if next_ is None else next_["time"]
        own = steps.get(claim["generation"])
        spans.append(_Span(start, claim, next_, own, until_s, is_first=at == 0, is_over=is_over))
    befores = [None, *spans[:-1]]
    return [span.generation(number_, before) for span, before in zip(spans, befores, strict=True)]


def _end_of(start: _Start, after: _Start | None, steps: Mapping[int, KeptSteps]) -> float:
    """When a start ended, or the newest moment that is known of it."""
    if start.end is not None:
        return float(start.end["time"])
    # What is decided about nodes after the last sign of life is the next start's.
    others = () if after is None else ("decision", "admitted", "refused")
    moments = [float(event["time"]) for event in start.events if event["event"] not in others]
    moments += [one.ended_s for one in steps.values()]
    if after is not None and steps:
        again = after.recovery(after.claims[0]["generation"]).get("recomputed") or 0
        newest = max(steps.values(), key=lambda one: one.last)
        moments.append(newest.ended_s + again * newest.seconds / newest.num)
        moments = [min(moment, after.began_s) for moment in moments]
    return max(moments)


# ---- one generation's seconds -------------------------------------------------------------------

# Less than this is what Unix times are rounded by.
_LEAST_S = 1e-5


class _Rest:
    """Seconds that are given out class by class, and never more than there are."""

    def __init__(self, seconds: float) -> None:
        self.left = max(0.0, seconds)
        self.given: dict[str, float] = {}

    def give(self, name: str, seconds: float) -> float:
        """So much to this class, as far as it is there."""
        given = min(self.left, max(0.0, seconds))
        self.left -= given
        if given > _LEAST_S:
            self.given[name] = self.given.get(name, 0.0) + given
        return given

    def take(self, other: "_Rest") -> None:
        """Give out what another one has."""
        for name, seconds in other.given.items():
            self.give(name, seconds)


def _in_order(names: Sequence[str], *parts: _Rest) -> dict[str, float]:
    """What was given out, in the order of these names and none besides."""
    given = {name: seconds for part in parts for name, seconds in part.given.items()}
    return {name: given[name] for name in names if name in given}


class _Span:
    """One generation's part of a start: what was before its steps (`head`), after them (`tail`)
    and in all (`whole`), by class."""

    def __init__(
        self,
        start: _Start,
        claim: Event,
        next_: Event | None,
        steps: KeptSteps | None,
        until_s: float,
        *,
        is_first: bool,
        is_over: bool,
    ) -> None:
        """Work out what its time went into.

        Args:
            start: that it belongs to.
            claim: the event that it begins with.
            next_: the claim of the one that took over; None: it was the last of its start.
            steps: of it that were kept.
            until_s: Unix time of its end.
            is_first: of its start.
            is_over: the start ended before its time.
        """
        self.start, self.claim, self.next, self.steps = start, claim, next_, steps
        self.number, self.claimed_s = claim["generation"], float(claim["time"])
        self.began_s = start.began_s if is_first else self.claimed_s
        self.until_s = max(self.began_s, until_s)
        self.after_s = self.claimed_s if steps is None else steps.ended_s
        replaced_s = self.after_s if next_ is not None else math.inf
        self.losses = tuple(_loss(event, replaced_s) for event in self._named("lost"))
        late = any(loss.time_s >= self.after_s and not loss.is_report for loss in self.losses)
        self.is_cut = next_ is not None or is_over or late
        self.head, self.tail = self._head(), self._tail()
        self.whole = self._whole(is_first=is_first)

    def generation(self, start: int, before: "_Span | None") -> Generation:
        """What it was.

        Args:
            start: of which start of the run it is.
            before: the one that it took over from; None: it is the first of its start.
        """
        claim, recovery = self.claim, self.start.recovery(self.number)
        first_step: Event = next(iter(self._named("first_step")), {})
        nodes, num = claim["nodes"], claim.get("num_active", len(claim["nodes"]))
        return Generation(
            number=self.number,
            start=start,
            began_s=self.began_s,
            ended_s=self.until_s,
            nodes=tuple(nodes[:num]),
            spares=tuple(nodes[num:]),
            num_ranks=claim.get("num_ranks"),
            layout=claim.get("layout") or "",
            reason=claim.get("reason") or "",
            steps=self.steps,
            seconds=_in_order(CLASSES, self.whole),
            recovery_s={} if before is None else _in_order(PHASES, before.tail, self.head),
            source=recovery.get("source"),
            recomputed=recovery.get("recomputed") or 0,
            back_s=None if before is None else first_step.get("seconds"),
            losses=self.losses,
        )

    def _named(self, name: str) -> list[Event]:
        return self.start.named(name, self.number)

    def _head(self) -> _Rest:
        """From its claim until all ranks had their state; they say how long each phase took."""
        recovery = self.start.recovery(self.number)
        told = recovery.get("seconds") or {}
        head = _Rest(recovery.get("time", self.claimed_s) - self.claimed_s)
        for phase in ("connect", "build", "restore"):
            head.give(phase, told.get(phase) or 0.0)
        head.give("start", head.left)
        return head

    def _tail(self) -> _Rest:
        """From the end of its last step that was kept to the next claim, where it was cut off."""
        tail = _Rest(self.until_s - self.after_s if self.is_cut else 0.0)
        decisions = self._since(self._named("decision"))
        # What was noticed before the last step's end had no part in it.
        acts = [*self._since([*self._named("lost"), *self._named("admitted")]), *decisions]
        noticed_s = min((event["time"] for event in acts), default=self.until_s)
        waits = [event["time"] for event in decisions if event["action"] == "wait"]
        waiting_s = self.until_s - min(waits, default=self.until_s)
        told = self.start.recovery(self.next["generation"]).get("seconds") if self.next else {}
        tail.give("waiting", waiting_s)
        tail.give("decide", self.until_s - noticed_s - waiting_s)
        tail.give("notice", (told or {}).get("notice") or 0.0)
        tail.give("recomputed", tail.left)
        return tail

    def _since(self, events: Sequence[Event]) -> list[Event]:
        return [event for event in events if event["time"] >= self.after_s]

    def _whole(self, *, is_first: bool) -> _Rest:
        whole = _Rest(self.until_s - self.began_s)
        kept_s = whole.give("kept", 0.0 if self.steps is None else self.steps.seconds)
        if is_first and self.start.waits:
            whole.give("waiting", self.claimed_s - self.began_s)
        whole.take(self.head)
        whole.take(self.tail)
        if is_first:  # whatever else is before its first step
            first_s = self.until_s if self.steps is None else self.steps.began_s
            gone_s = sum(whole.given.values()) - kept_s - sum(self.tail.given.values())
            whole.give("start", first_s - self.began_s - gone_s)
        whole.give("between", whole.left)
        return whole


def _loss(event: Event, replaced_s: float) -> Loss:
    """Args: when its generation made its last step, where another one took over; else never."""
    return Loss(
        time_s=float(event["time"]),
        generation=event["generation"],
        kind=event["class"],
        node=event.get("node"),
        rank=event.get("rank"),
        sentence=event.get("sentence") or f"{event.get('node') or 'a node'}: {event['class']}",
        is_report=event["class"] == "slow" and event["time"] < replaced_s,
    )
