"""What the start script wrote on each node: when its command started and ended, and how."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from paceline.config.errors import EXIT_LEFT_OUT, EXIT_SAVED
from paceline.launch.contract import Attempt
from paceline.launch.start_script import NODE_FOLDER
from paceline.observe.run import read_lines


@dataclass(frozen=True)
class NodeRecord:
    """One time that the command ran on a node. Times are Unix seconds by the node's clock."""

    attempt: int
    node: str
    started: float
    ended: float | None
    """None: it runs, or was lost with its node."""
    exit_code: int | None


_RECORD = TypeAdapter(NodeRecord)
# Exit codes from here on are a shell's, of a command that a signal ended.
_KILLED = 128


def node_records(folder: Path) -> tuple[NodeRecord, ...]:
    """Those in a job's folder, by attempt and node; lines that hold none are left out.

    Raises:
        InputError: a file can't be read.
    """
    found: dict[tuple[int, str, float], NodeRecord] = {}
    for file in sorted((folder / NODE_FOLDER).glob("*.jsonl")):
        for line in read_lines(file, "record"):
            try:
                record = _RECORD.validate_json(line, strict=True)
            except ValidationError:
                continue
            found[record.attempt, record.node, record.started] = record
    return tuple(found[key] for key in sorted(found))


def recorded_attempts(
    records: Sequence[NodeRecord], devices_per_node: int, submitted: float
) -> Iterator[Attempt]:
    """Attempts as nodes recorded them, in the contract's words for how they ended.

    They lack what an engine does before and after the command.

    Args:
        records: by attempt and node, as `node_records` returns them.
        submitted: Unix time at which the first began to wait; each other one does so when the one
            before has ended.
    """
    groups = list(_groups(records))
    for group, after in pairwise([*groups, []]):
        started = min(each.started for each in group)
        ended = _end(group, min((each.started for each in after), default=None))
        nodes, code = tuple(each.node for each in group), exit_code_of(group)
        held = len(nodes) * devices_per_node
        words = {None: "lost", 0: "finished", EXIT_SAVED: "saved"}
        state = words.get(code, "failed")
        yield Attempt(group[0].attempt, submitted, started, ended, nodes, held, code, state)
        submitted = ended if ended is not None else started


def whole_attempts(
    folder: Path, num_nodes: int, devices_per_node: int, submitted: float
) -> tuple[Attempt, ...]:
    """`recorded_attempts` of a job that has all of its nodes or none: an attempt held them all,
    also those that were ended before they could say so.

    Raises:
        InputError: a record can't be read.
    """
    least = num_nodes * devices_per_node
    return tuple(
        replace(one, num_devices=max(one.num_devices, least))
        for one in recorded_attempts(node_records(folder), devices_per_node, submitted)
    )


def exit_code_of(group: Sequence[NodeRecord]) -> int | None:
    """Of an attempt: that of the first node that failed by itself, else 75, else the worst; None
    where no node ended. Nodes that the others left out count where there is no other."""
    ends = [(each.ended or 0.0, each.exit_code) for each in group if each.exit_code is not None]
    ends = [end for end in ends if end[1] != EXIT_LEFT_OUT] or ends
    failed = [code for _, code in sorted(ends) if code not in (0, EXIT_SAVED) and code < _KILLED]
    codes = {code for _, code in ends}
    if failed:
        return failed[0]
    return EXIT_SAVED if EXIT_SAVED in codes else max(codes, default=None)


def _groups(records: Sequence[NodeRecord]) -> Iterator[list[NodeRecord]]:
    """The records of each attempt. Kubernetes gives one that went back to its queue the same
    number: a node that starts again begins another."""
    group: list[NodeRecord] = []
    for one in sorted(records, key=lambda one: (one.attempt, one.started)):
        is_other = group and one.attempt != group[0].attempt
        if is_other or one.node in [each.node for each in group]:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _end(group: Sequence[NodeRecord], next_start: float | None) -> float | None:
    """When the last of its nodes ended; one that was lost did so before the next attempt."""
    ends = [each.ended for each in group if each.ended is not None]
    if len(ends) == len(group) or (ends and next_start is not None):
        return max(ends)
    return next_start
