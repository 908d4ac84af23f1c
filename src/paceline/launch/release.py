"""Giving back what is held for nothing: a run that is over while its job goes on, and nodes that
have had no rank for long.

Nothing here runs by itself: `paceline jobs --release-idle` looks and acts once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config.errors import InputError
from paceline.launch.contract import Observation, Shrinks
from paceline.launch.node_records import node_records
from paceline.launch.records import Launch
from paceline.launch.run_records import RunRecords
from paceline.observe.run import Run
from paceline.render.figures import duration_text

_AGAIN = "saved"
"""The end of a start that its engine follows with another."""


@dataclass(frozen=True)
class Idle:
    """What is held for nothing."""

    nodes: tuple[str, ...]
    """Of them alone; none: of the whole job."""
    since: float
    """Unix time."""


def idle_of(
    records: RunRecords, held: Mapping[str, float], least_s: float, now: float
) -> Idle | None:
    """What a job holds for nothing, for so long at least; None: nothing that is known.

    Args:
        held: its nodes, and since when (Unix time) their commands run.
    """
    turns = [one for one in records.events if one["event"] in ("start", "generation", "end")]
    if turns and turns[-1]["event"] == "end":
        end = turns[-1]
        is_long = now - end["time"] >= least_s
        return Idle((), end["time"]) if is_long and end.get("state") != _AGAIN else None
    if records.found is None:
        return None
    newest = records.found.all[-1]
    if not newest.nodes or not held.keys() >= set(newest.nodes):
        return None  # of an earlier attempt: this one has yet to begin
    without = [name for name in held if name not in newest.nodes]
    spares = records.job.elastic.spares
    since = {name: max(held[name], newest.began_s) for name in without}
    # The first ones stay as the spares that the Job asks for.
    idle = tuple(name for name in sorted(without)[spares:] if now - since[name] >= least_s)
    return Idle(idle, max(since[name] for name in idle)) if idle else None


def release_idle(launch: Launch, seen: Observation, least_s: float, now: float) -> str | None:
    """Give back what a launch holds for nothing.

    Returns:
        what was done, or why it can't be, as a sentence; None: nothing is idle.

    Raises:
        InputError: the engine refuses it, or a file of the run is damaged.
    """
    if seen.state != "running" or not Run(launch.run).exists:
        return None
    starts = {one.node: one.started for one in node_records(launch.job.folder)}
    held = {name: starts.get(name, now) for name in seen.nodes}
    idle = idle_of(RunRecords.of(Run(launch.run)), held, least_s, now)
    if idle is None:
        return None
    name, length = launch.run.name, duration_text(now - idle.since)
    if not idle.nodes:
        launch.engine.signal(launch.job, "stop")
        return f"{name} ended {length} ago and its job went on: it is stopped."
    nodes = ", ".join(idle.nodes)
    what = f"{nodes} of {name}: no rank for {length}"
    engine = launch.engine
    if not isinstance(engine, Shrinks):
        return (
            f"{what}. Engine {engine.name} takes back whole jobs alone: `paceline stop {name}`, "
            "and launch it with fewer --nodes."
        )
    try:
        engine.shrink(launch.job, launch.record.request, idle.nodes)
    except InputError as error:
        return f"{what}. It stays: {error}"
    return f"{what}. It is given back."
