"""The live source of a Job, `data.stream`: what arrives while the run trains (docs/streams.md)."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from paceline.config.frozen import Count, FrozenConfig

UNIX = "unix:"
SOURCES = ("folder", "listen", "kafka")
"""Settings of `data.stream` that name where data comes from."""


class Stream(FrozenConfig):
    """Where texts arrive while the run trains. A process beside the first rank appends them, as
    tokens, to a log of segments, and training reads the log only."""

    folder: str | None = None
    """Folder in which files appear: a "*.jsonl" is read line by line as it grows, a "*.txt" is one
    text, taken when it has not changed for a second."""
    listen: str | None = None
    """Address at which texts are taken, a line each: "127.0.0.1:7077", or "unix:PATH". It has no
    password (docs/security.md)."""
    kafka: str | None = None
    """Brokers of Kafka, "host:9092", or several with commas between them."""
    topic: str | None = None
    """Topic that is read there, all partitions from the oldest message on."""
    kafka_config: str | None = None
    """File of more settings for Kafka's client, librdkafka's "name=value", a line each: how to log
    in, which the Job does not repeat."""
    lines: Literal["text", "jsonl"] = "text"
    """What a line at `listen` and a message of Kafka is: a text, or a JSON object with
    `data.text_field`."""
    log: str = "auto"
    """Folder of the log; "auto": streams/<name of the Job>. All nodes must see it."""
    segment_mb: Annotated[float, Field(gt=0, le=4096)] = 64.0
    """A segment of the log ends when it is as large, MB (10^6 bytes)."""
    fsync: bool = True
    """Whether what arrived is forced to the disk before it is trained on. If not, a crash of the
    machine (not of a process) may lose what a checkpoint has passed already."""
    keep_gb: Annotated[float, Field(gt=0, le=10**9)] | None = None
    """The most that the log may take, GB (10^9 bytes): its oldest segments go, but none that a
    checkpoint which is kept has not passed yet. None: all stay."""
    shuffle: Count = 1
    """Samples of a window that are shuffled among themselves; a step waits until its windows are
    whole. 1: the order of arrival."""
    wait_s: Count = 86_400
    """The longest that a step waits for data, seconds; then the run keeps a checkpoint and ends."""

    @property
    def is_on(self) -> bool:
        """Whether anything arrives."""
        return any(getattr(self, name) is not None for name in SOURCES)

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, address: str | None) -> str | None:
        if address is None or re.fullmatch(r"unix:.+", address):
            return address
        found = re.fullmatch(r"(?:[^\s:]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", address)
        if found is None or not 0 < int(found[1]) < 2**16:
            raise ValueError(
                f'{address!r} is no address: give "127.0.0.1:7077", or "unix:" and a path.'
            )
        return address


def problems(stream: Stream) -> Iterator[str]:
    """What settings of a stream demand of each other, a sentence each."""
    if not stream.is_on and stream != Stream():
        changed = next(name for name, value in stream if value != getattr(Stream(), name))
        yield (
            f"data.stream.{changed} has no effect without a source: give data.stream.folder, "
            "listen or kafka."
        )
    if (stream.kafka is None) != (stream.topic is None):
        given, missing = ("kafka", "topic") if stream.topic is None else ("topic", "kafka")
        yield f"data.stream.{given} needs data.stream.{missing} as well: give both."
    if stream.kafka_config is not None and stream.kafka is None:
        yield "data.stream.kafka_config has no effect without data.stream.kafka: leave it out."
    if stream.lines != Stream().lines and stream.listen is None and stream.kafka is None:
        yield (
            f'data.stream.lines = "{stream.lines}" is of lines at data.stream.listen and messages '
            "of Kafka, and neither is given: leave it out."
        )
