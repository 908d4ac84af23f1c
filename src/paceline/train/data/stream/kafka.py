"""Messages of a topic of Kafka, by librdkafka's client (extra "kafka").

The log has the next offset of each partition, so brokers need not know it: no group commits
anything, and no transaction is needed for exactly once.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import files
from paceline.config.errors import InputError
from paceline.config.stream import Stream
from paceline.train.data.stream.log import Positions
from paceline.train.data.stream.sources import MOST_TEXT_BYTES, Parser, Text

if TYPE_CHECKING:
    from confluent_kafka import Consumer

_MOST_MESSAGES = 1024
_PARTITIONS_S, _ANSWER_S = 60.0, 10.0


class KafkaSource:
    """Reads all partitions of a topic.

    Args:
        stream: names brokers and topic.
        parser: of messages.
        positions: what the log has.
        say: tells a person.

    Raises:
        InputError: the client isn't installed or refuses a setting.
    """

    def __init__(
        self, stream: Stream, parser: Parser, positions: Positions, say: Callable[[str], None]
    ) -> None:
        require_kafka()
        import confluent_kafka

        self._kafka: Any = confluent_kafka
        assert stream.topic is not None
        self._topic, self._parser, self._say = stream.topic, parser, say
        self._prefix = f"kafka/{stream.topic}/"
        self._positions = {
            int(name.removeprefix(self._prefix)): position
            for name, position in positions.items()
            if name.startswith(self._prefix)
        }
        self._assigned: set[int] = set()
        self._look_again, self._trouble = 0.0, ""
        settings = {
            **_more_settings(stream.kafka_config),
            "bootstrap.servers": stream.kafka,
            "group.id": "paceline",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "fetch.message.max.bytes": MOST_TEXT_BYTES,
            "error_cb": lambda error: self._tell(error.str()),
        }
        try:
            self._consumer: Consumer = confluent_kafka.Consumer(settings)
        except confluent_kafka.KafkaException as error:
            raise InputError(
                f"Kafka's client refuses its settings ({error.args[0].str()}): correct "
                "data.stream.kafka or data.stream.kafka_config."
            ) from None

    def take(self, most_bytes: int) -> list[Text]:
        """As `Source`.

        Raises:
            InputError: a broker no longer has the message that comes next.
        """
        if time.monotonic() >= self._look_again:
            self._assign()
        found: list[Text] = []
        while self._assigned and most_bytes > 0:
            messages = self._consumer.consume(_MOST_MESSAGES, timeout=0)
            if not messages:
                break
            for message in messages:
                if (error := message.error()) is not None:
                    self._judge(error, message.partition())
                    continue
                found.append(self._text(message))
                most_bytes -= len(message.value() or b"")
        return found

    def committed(self) -> None:
        """As `Source`."""

    def close(self) -> None:
        """As `Source`."""
        self._consumer.close()

    def _assign(self) -> None:
        """Read partitions that are new as well."""
        self._look_again = time.monotonic() + _PARTITIONS_S
        try:
            topics = self._consumer.list_topics(self._topic, timeout=_ANSWER_S).topics
        except self._kafka.KafkaException as error:
            self._tell(error.args[0].str())
            self._look_again = time.monotonic() + 1.0
            return
        found = set(topics[self._topic].partitions)
        if not found:
            self._tell(f"topic {self._topic} has no partitions")
            self._look_again = time.monotonic() + 1.0
        if new := found - self._assigned:
            oldest = self._kafka.OFFSET_BEGINNING
            self._consumer.incremental_assign(
                [
                    self._kafka.TopicPartition(self._topic, one, self._positions.get(one, oldest))
                    for one in sorted(new)
                ]
            )
            self._assigned |= new

    def _text(self, message: Any) -> Text:
        stamp_kind, stamp_ms = message.timestamp()
        arrived = time.time()
        if stamp_kind != self._kafka.TIMESTAMP_NOT_AVAILABLE:
            arrived = min(arrived, stamp_ms / 1000)
        partition, offset = message.partition(), message.offset()
        where = f"message {offset} of partition {partition}"
        value = message.value()
        text = self._parser.text_of(value, where) if value else None
        self._positions[partition] = offset + 1
        return Text(text, arrived, f"{self._prefix}{partition}", offset + 1)

    def _judge(self, error: Any, partition: int | None) -> None:
        if partition is not None and error.name() in ("OFFSET_OUT_OF_RANGE", "_AUTO_OFFSET_RESET"):
            raise InputError(
                f"Kafka no longer has message {self._positions.get(partition)} of partition "
                f"{partition} of {self._topic}, which comes next in the log: it was removed before "
                "it was read. Keep messages for longer, and name another data.stream.log."
            )
        self._tell(error.str())

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self._say(f"Kafka: {trouble}; it is tried again.")


def require_kafka() -> None:
    """Find Kafka's client.

    Raises:
        InputError: it isn't installed.
    """
    try:
        import confluent_kafka  # noqa: F401
    except ImportError:
        raise InputError(
            'data.stream.kafka needs Kafka\'s client: pip install "paceline[kafka]".'
        ) from None


def _more_settings(file: str | None) -> dict[str, str]:
    if file is None:
        return {}
    text = files.read_text(Path(file).expanduser(), "correct data.stream.kafka_config")
    lines = [line.strip() for line in text.splitlines()]
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name.strip(): value.strip() for name, _, value in pairs}
