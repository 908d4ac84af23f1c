"""Record: where a server's time went, second by second, beside what was planned for its steps.

A file of JSON lines: first what was served, then a line for each second in which something was
done. It holds no text and no token. `paceline serve --record` writes it, `paceline explain` reads
it back, checked.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from paceline.config.errors import InputError
from paceline.config.files import opened, parse_json
from paceline.config.frozen import Count, CountOrNone, FrozenConfig

RECORD_FILE = "serving.jsonl"
_MOST_LINE_BYTES = 1 << 16
Seconds = Annotated[float, Field(ge=0, le=1e9)]


class RecordHead(FrozenConfig):
    """What was served."""

    name: str
    max_sequences: Count
    max_tokens: Count
    blocks: Count
    planned: str | None
    """From what the planned times come; None: the network was not measured."""


class PlannedTerms(FrozenConfig):
    """What was planned for steps, by term; see `plan.serving.costs.Terms`."""

    host: Seconds = 0.0
    weights: Seconds = 0.0
    products: Seconds = 0.0
    attention: Seconds = 0.0
    exchange: Seconds = 0.0


class RecordSecond(FrozenConfig):
    """A second, or several of them added up."""

    second: CountOrNone
    """Since the server began."""
    steps: CountOrNone = 0
    idle_s: Seconds = 0.0
    """Before steps, while nobody wanted anything."""
    gap_s: Seconds = 0.0
    """Between steps, while somebody did: orders were obeyed, and texts handed out."""
    host_s: Seconds = 0.0
    """Of steps, beside their passes."""
    pass_s: Seconds = 0.0
    planned: PlannedTerms = PlannedTerms()
    prompt_tokens: CountOrNone = 0
    text_tokens: CountOrNone = 0
    rows: CountOrNone = 0
    """Tokens of all passes."""
    running: CountOrNone = 0
    """Texts under way, summed over steps."""
    most_waiting: CountOrNone = 0
    least_free: CountOrNone | None = None
    """Blocks; None: not looked at."""
    preemptions: CountOrNone = 0
    first_tokens: CountOrNone = 0
    ttft_s: Seconds = 0.0
    """Of the texts whose first token came, summed."""
    queue_s: Seconds = 0.0
    """Of that, until something of them was computed."""

    def __add__(self, other: "RecordSecond") -> "RecordSecond":
        mine, theirs = self.model_dump(), other.model_dump()
        summed = {name: mine[name] + theirs[name] for name in mine if name not in _NOT_SUMMED}
        free = [each.least_free for each in (self, other) if each.least_free is not None]
        planned = {
            name: mine["planned"][name] + theirs["planned"][name] for name in mine["planned"]
        }
        return RecordSecond(
            **summed,
            second=self.second,
            most_waiting=max(self.most_waiting, other.most_waiting),
            least_free=min(free, default=None),
            planned=PlannedTerms(**planned),
        )


_NOT_SUMMED = {"second", "most_waiting", "least_free", "planned"}
_SECOND = TypeAdapter(RecordSecond)


class Record(FrozenConfig):
    """A server's record, added up."""

    head: RecordHead
    total: RecordSecond


def read_record(file: Path) -> Record:
    """What `paceline serve --record` wrote; a last line that is not whole is left out.

    Raises:
        InputError: there is none, or it is damaged.
    """
    cure = "give the folder of `paceline serve --record`"
    head, total = None, RecordSecond(second=0)
    with opened(file, cure) as source:
        number = 0
        while line := source.readline(_MOST_LINE_BYTES):
            number += 1
            if not line.endswith(b"\n"):
                break
            try:
                if head is None:
                    head = parse_json(line, TypeAdapter(RecordHead))
                else:
                    total += parse_json(line, _SECOND)
            except ValueError as error:
                raise InputError(f"{file}, line {number}, {error}: {cure}.") from None
    if head is None:
        raise InputError(f"{file} is empty: {cure}.")
    return Record(head=head, total=total)
