"""Ledger: every device-second of every attempt in exactly one class, from submission to end.

Times are whole microseconds, so the classes of an attempt add up to its devices times its length,
to the last one, whatever is told of it. An attempt is queued until it has machines. From then on it
holds them, and each span of its run says what they did; spans may lie anywhere, overlap and claim
more devices than are held, and still nothing counts twice. What no span tells of is a start before
the first one, and held for nothing after it.

All functions are pure; `launch.cost` makes spans from a Run.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from paceline.launch.contract import Attempt

CLASSES = (
    *("queued", "starting", "data_wait", "compute", "exposed_comm", "checkpoint_stall"),
    *("lost_work", "restart", "hang", "idle_held", "preempted"),
)
"""In the order in which they are shown."""
IDLE_S = 60.0
"""Devices that are held for nothing so long are named."""


_MOST_S = 1e12
"""Beyond it no file can lead: 30,000 years."""


def microseconds(seconds: float) -> int:
    """A time of files and engines as the ledger counts it."""
    return round(1e6 * max(-_MOST_S, min(_MOST_S, seconds)))


class Span(NamedTuple):
    """What some devices did for a while."""

    kind: str
    """One of CLASSES, but not queued."""
    begin_us: int
    """Unix time."""
    end_us: int
    num_devices: int
    in_step: bool = False
    """Whether it is a part of a step that was kept."""


@dataclass(frozen=True)
class IdleHeld:
    """Devices that were held and did nothing for `IDLE_S` or longer."""

    attempt: Attempt
    begin_us: int
    end_us: int
    num_devices: int
    is_now: bool
    """Whether they still are."""

    @property
    def device_us(self) -> int:
        """Devices times time."""
        return self.num_devices * (self.end_us - self.begin_us)


@dataclass(frozen=True)
class AttemptLedger:
    """Where the device time of an attempt went."""

    attempt: Attempt
    begin_us: int
    """Submitted."""
    start_us: int
    """Held from then on; `end_us` where it never had machines."""
    end_us: int
    """Until it ended, or until now."""
    device_us: Mapping[str, int]
    """Device time by class, in the order of CLASSES; those that took none are left out."""
    kept_us: int
    """Of it in steps that were kept."""
    kept_wall_us: int
    """The time of these steps, whatever the number of devices."""
    idle: tuple[IdleHeld, ...]

    @property
    def total_us(self) -> int:
        """Device time from submission to end."""
        return self.attempt.num_devices * (self.end_us - self.begin_us)

    @property
    def held_us(self) -> int:
        """Device time that is paid for."""
        return self.attempt.num_devices * (self.end_us - self.start_us)


@dataclass(frozen=True)
class Ledger:
    """Of all attempts of a run, or of several runs."""

    attempts: tuple[AttemptLedger, ...]

    @cached_property
    def device_us(self) -> Mapping[str, int]:
        """Device time by class, in the order of CLASSES."""
        return _in_order(_summed(each.device_us for each in self.attempts))

    @property
    def total_us(self) -> int:
        """Device time from submissions to ends: the sum of all classes."""
        return sum(each.total_us for each in self.attempts)

    @property
    def held_us(self) -> int:
        """Device time that is paid for: all but what is queued."""
        return sum(each.held_us for each in self.attempts)

    @property
    def goodput(self) -> float | None:
        """Device time of steps that were kept over what was held, 0 to 1; None: nothing was."""
        kept_us = sum(each.kept_us for each in self.attempts)
        return kept_us / self.held_us if self.held_us else None

    @property
    def effective_ratio(self) -> float | None:
        """Effective training time ratio: time of kept steps over that from the first submission to
        the last end, queues included. Source: arXiv 2410.21680. None: there is no attempt."""
        if not self.attempts:
            return None
        ends_us = max(each.end_us for each in self.attempts)
        wall_us = ends_us - min(each.begin_us for each in self.attempts)
        return sum(each.kept_wall_us for each in self.attempts) / wall_us if wall_us else None

    @property
    def idle(self) -> tuple[IdleHeld, ...]:
        """Held for nothing, the longest first."""
        found = [idle for each in self.attempts for idle in each.idle]
        return tuple(sorted(found, key=lambda idle: -idle.device_us))


def ledger(attempts: Sequence[Attempt], spans: Iterable[Span], now: float) -> Ledger:
    """Account for all attempts of one run.

    Args:
        attempts: in any order; several may have one number, and they may overlap.
        spans: of their devices. Where attempts overlap, the earlier one's devices are used first;
            of spans that overlap, the earlier one counts.
        now: Unix time until which an attempt without an end is counted.
    """
    now_us = microseconds(now)
    windows = sorted((_Window(each, now_us) for each in attempts), key=lambda one: one.order)
    cuts = sorted({at for one in windows for at in (one.start_us, one.end_us)})
    holders = {
        begin: [one for one in windows if one.start_us <= begin and end <= one.end_us]
        for begin, end in pairwise(cuts)
    }
    for span, place in _pieces(spans, cuts):
        left = span.num_devices
        for window in holders[place]:
            given = min(left, window.attempt.num_devices)
            if given > 0:
                is_whole = given == span.num_devices
                window.pieces.append(span if is_whole else span._replace(num_devices=given))
            left -= given
    closed: list[AttemptLedger] = []
    has_trained = False
    for window in windows:
        closed.append(window.close("restart" if has_trained else "starting", now_us))
        has_trained |= bool(window.pieces)
    return Ledger(tuple(closed))


class _Window:
    """An attempt while its time is given out."""

    def __init__(self, attempt: Attempt, now_us: int) -> None:
        self.attempt = attempt
        known = [
            microseconds(each) for each in (attempt.started, attempt.ended) if each is not None
        ]
        self.begin_us = min([microseconds(attempt.submitted), *known])
        end_us = now_us if attempt.ended is None else microseconds(attempt.ended)
        start_us = end_us if attempt.started is None else microseconds(attempt.started)
        self.end_us = max(self.begin_us, end_us, start_us)
        self.start_us = self.end_us if attempt.started is None else start_us
        self.pieces: list[Span] = []

    @property
    def order(self) -> tuple[int, int, int]:
        return self.start_us, self.begin_us, self.attempt.number

    def close(self, before_first: str, now_us: int) -> AttemptLedger:
        """Give the rest to its classes.

        Args:
            before_first: the class of what is before the first piece.
        """
        attempt, whole = self.attempt, self.attempt.num_devices
        device_us = Counter({"queued": whole * (self.start_us - self.begin_us)})
        kept_us = kept_wall_us = 0
        busy = []
        for piece in self._whole(before_first):
            length_us = piece.end_us - piece.begin_us
            device_us[piece.kind] += piece.num_devices * length_us
            device_us["idle_held"] += (whole - piece.num_devices) * length_us
            kept_us += piece.in_step * piece.num_devices * length_us
            kept_wall_us += piece.in_step * length_us
            num_busy = 0 if piece.kind == "idle_held" else piece.num_devices
            busy.append((piece.begin_us, piece.end_us, whole - num_busy))
        is_open = attempt.ended is None and self.end_us == now_us
        return AttemptLedger(
            attempt,
            self.begin_us,
            self.start_us,
            self.end_us,
            _in_order(device_us),
            kept_us,
            kept_wall_us,
            tuple(
                IdleHeld(attempt, begin, end, num, is_now=is_open and end == self.end_us)
                for begin, end, num in _stretches(busy, self.end_us)
                if end - begin >= microseconds(IDLE_S)
            ),
        )

    def _whole(self, before_first: str) -> Iterator[Span]:
        """All of the time that it held machines: its pieces, and what is between them."""
        # Of machines that an engine took away, what is left at the end.
        after_last = "preempted" if "PREEMPT" in self.attempt.state.upper() else "idle_held"
        at_us, kind = self.start_us, before_first
        for piece in self.pieces:
            yield Span(kind, at_us, piece.begin_us, self.attempt.num_devices)
            yield piece
            at_us, kind = piece.end_us, "idle_held"
        if self.pieces:
            kind = after_last
        yield Span(kind, at_us, self.end_us, self.attempt.num_devices)


def _stretches(idle: Iterable[tuple[int, int, int]], end_us: int) -> Iterator[tuple[int, int, int]]:
    """Begin, end and number of devices of stretches in which so many did nothing all the time.

    Together they are all that was idle: where one of four is idle for an hour and the others for a
    minute of it, there are two stretches.

    Args:
        idle: begin, end and number of idle devices, without gaps.
        end_us: of the last one.
    """
    layers: list[tuple[int, int, int]] = []
    """Of those idle now: since when, and from which to which number of them."""
    num_idle = 0
    for begin, end, num in [*idle, (end_us, end_us + 1, 0)]:
        if begin == end:
            continue
        while num < num_idle:
            since, low, high = layers.pop()
            num_idle = max(low, num)
            yield since, begin, high - num_idle
            if num_idle > low:
                layers.append((since, low, num_idle))
        if num > num_idle:
            layers.append((begin, num_idle, num))
            num_idle = num


def _pieces(spans: Iterable[Span], cuts: Sequence[int]) -> Iterator[tuple[Span, int]]:
    """Spans in order without their overlaps, cut where an attempt begins or ends; with the cut
    before each. What lies outside all attempts is left out."""
    done_us = cuts[0] if cuts else 0
    for span in sorted(spans, key=lambda one: one.begin_us):
        begin_us = max(span.begin_us, done_us)
        while cuts and begin_us < min(span.end_us, cuts[-1]):
            at = bisect_left(cuts, begin_us + 1)
            end_us = min(span.end_us, cuts[at])
            is_whole = begin_us == span.begin_us and end_us == span.end_us
            yield (
                span if is_whole else span._replace(begin_us=begin_us, end_us=end_us),
                cuts[at - 1],
            )
            begin_us = end_us
        done_us = max(done_us, begin_us)


def _summed(parts: Iterable[Mapping[str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for part in parts:
        found.update(part)
    return found


def _in_order(device_us: Mapping[str, int]) -> dict[str, int]:
    return {name: device_us[name] for name in CLASSES if device_us.get(name)}
