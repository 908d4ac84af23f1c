"""Attempts of a Run: as the engines of its launches count them, else as its own files tell.

What an engine says is kept in the folder of the launch, for engines forget: attempts.jsonl, one
Attempt a line by its field names. A start by hand is an attempt that had its machines at once. Its
devices are those of the ranks; of an elastic run, those of all nodes that were ever in that start,
from its first moment on.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby, pairwise
from math import inf
from typing import Annotated, Required

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from paceline.config.errors import InputError
from paceline.launch.contract import Attempt
from paceline.launch.records import Engines, launches_of
from paceline.launch.run_records import RunRecords
from paceline.observe.generations import Event, Generation, Generations
from paceline.observe.locks import is_live
from paceline.observe.records import Count, Moment
from paceline.observe.run import Run, json_lines, parse_line, read_lines, write_atomic

_ATTEMPTS = "attempts.jsonl"
ATTEMPT_FILES = f"launch/*/{_ATTEMPTS}"


@with_config(ConfigDict(extra="allow", strict=True, allow_inf_nan=False))
class _Record(TypedDict, total=False):
    number: Required[Count]
    submitted: Required[Moment]
    started: Required[Moment | None]
    ended: Required[Moment | None]
    nodes: Required[list[str]]
    num_devices: Required[Annotated[Count, Field(ge=1)]]
    exit_code: int | None
    state: str


_RECORD = TypeAdapter(_Record)


def ask_engines(run: Run, engines: Engines) -> list[str]:
    """Ask the engines of a Run's launches for their attempts, and keep what they say.

    Returns:
        a sentence for each that can't say: what it said before still counts.

    Raises:
        InputError: a record of a launch is damaged.
    """
    told = []
    for launch in launches_of(run.path):
        try:
            attempts = engines.ask(launch, lambda one: one.engine.usage(one.job))
        except InputError as error:
            told.append(f"launch {launch.number} of {run.path.name}: {error}")
            continue
        if attempts:
            lines = json_lines(asdict(one) for one in attempts)
            with suppress(OSError):  # of somebody else's run
                write_atomic(launch.job.folder / _ATTEMPTS, lines)
    return told


def attempts_of(records: RunRecords) -> tuple[Attempt, ...]:
    """The attempts of a Run, the oldest first: of its launches, as far as `ask_engines` has asked,
    and of starts by hand.

    Raises:
        InputError: a file of the Run can't be read.
    """
    launched, found = launched_attempts(records.run), records.found
    by_hand = _of_starts(records) if found is None else _of_generations(records, found)
    apart = [one for one in by_hand if not any(_overlap(one, other) for other in launched)]
    return tuple(sorted([*launched, *apart], key=lambda one: one.submitted))


def _overlap(one: Attempt, other: Attempt) -> bool:
    """Whether both had machines at a time."""
    return _held_until(one) > (other.started or inf) and one.submitted < _held_until(other)


def _held_until(one: Attempt) -> float:
    return inf if one.ended is None else one.ended


def launched_attempts(run: Run) -> tuple[Attempt, ...]:
    """Those of a Run's launches, as far as `ask_engines` has asked, the oldest first; a line that
    can't be read is left out."""
    attempts = {}
    for file in sorted(run.path.glob(ATTEMPT_FILES)):
        for raw in read_lines(file, "attempt"):
            if (line := parse_line(raw, _RECORD)) is not None:
                one = Attempt(
                    number=line["number"],
                    submitted=line["submitted"],
                    started=line["started"],
                    ended=line["ended"],
                    nodes=tuple(line["nodes"]),
                    num_devices=line["num_devices"],
                    exit_code=line.get("exit_code"),
                    state=line.get("state") or "",
                )
                attempts[file, one.number, one.submitted, one.nodes] = one
    return tuple(sorted(attempts.values(), key=lambda one: one.submitted))


def _of_generations(records: RunRecords, found: Generations) -> tuple[Attempt, ...]:
    ends = {event["time"]: event for event in records.named("end")}
    starts = [list(group) for _, group in groupby(found.all, key=lambda one: one.start)]
    return tuple(
        _hand_made(
            number,
            began=start[0].began_s,
            ended=start[-1].ended_s,
            nodes=_nodes(start),
            num_devices=records.job.cluster.devices_per_node * max(1, len(_nodes(start))),
            end=ends.get(start[-1].ended_s),
            is_live=number == len(starts) and is_live(records.run),
        )
        for number, start in enumerate(starts, 1)
    )


def _nodes(start: Sequence[Generation]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for one in start for name in (*one.nodes, *one.spares)))


def _of_starts(records: RunRecords) -> tuple[Attempt, ...]:
    facts, ends = records.facts, records.named("end")
    moments = [(line["time"], line) for line in records.lines if line.get("time")]
    host = (facts["host"],) if isinstance(facts.get("host"), str) else ()
    starts = [(event["began"], event["num_devices"]) for event in records.named("start")]
    if not starts:  # earlier versions told of none
        begins = [time - (line.get("step_time_s") or 0.0) for time, line in moments[:1]]
        begins += [facts["started"]] if "started" in facts else []
        ranks = facts.get("num_ranks") or records.job.layout.num_ranks
        starts = [(min(begins), ranks)] if begins else []
    told = [time for time, _ in moments]
    told += [
        event["ended" if event["event"] == "taken_back" else "time"] for event in records.events
    ]
    attempts = []
    for number, ((began, devices), (until, _)) in enumerate(pairwise([*starts, (inf, 0)]), 1):
        end = next((event for event in ends if began <= event["time"] < until), None)
        last = max((time for time in told if began <= time < until), default=began)
        attempts.append(
            _hand_made(
                number,
                began=began,
                ended=end["time"] if end else last,
                nodes=host,
                num_devices=devices,
                end=end,
                is_live=until == inf and end is None and is_live(records.run),
            )
        )
    return tuple(attempts)


def _hand_made(
    number: int,
    *,
    began: float,
    ended: float,
    nodes: tuple[str, ...],
    num_devices: int,
    end: Event | None,
    is_live: bool,
) -> Attempt:
    state = "lost" if end is None else str(end.get("state") or "finished")
    return Attempt(
        number=number,
        submitted=began,
        started=began,
        ended=None if is_live else ended,
        nodes=nodes,
        num_devices=num_devices,
        exit_code=None if end is None else end.get("exit_code"),
        state="running" if is_live else state,
    )
