"""What the start script wrote on each node: when its command started and ended, and how."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

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
