"""The process that appends what arrives to the log: `paceline stream`, or beside the first rank.

It takes what all sources have, makes tokens of it and appends one record; what a source is told
comes after. Whenever it is killed, the next one goes on where the log ends.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from paceline.config.stream import Stream
from paceline.render.figures import bytes_text
from paceline.train.data.stream.kafka import KafkaSource
from paceline.train.data.stream.log import LogWriter, Record, segments
from paceline.train.data.stream.prepare import PreparedStream
from paceline.train.data.stream.retention import remove_passed
from paceline.train.data.stream.sockets import SocketSource
from paceline.train.data.stream.sources import FolderSource, Parser, Source, Text

_TAKEN_BYTES = 2**20
"""Of text, of each source at a time."""
_LOOK_S = 0.02
_CLEAN_S, _TELL_S = 10.0, 10.0

Say = Callable[[str], None]


class Ingester:
    """Reads the sources of a stream into its log.

    Args:
        prepared: the log.
        stream: names the sources.
        text_field: `data.text_field`.
        say: tells a person.

    Raises:
        InputError: another process writes the log, it is damaged, or a source can't be opened.
    """

    def __init__(self, prepared: PreparedStream, stream: Stream, text_field: str, say: Say) -> None:
        self._folder, self._stream, self._say = prepared.folder, stream, say
        self._encoder = prepared.encoder()
        self._writer = LogWriter(prepared.folder, stream.segment_mb * 1e6, fsync=stream.fsync)
        self._sources: list[Source] = []
        self._num_documents = 0
        self._told = self._cleaned = time.monotonic()
        try:
            self._sources += self._opened(text_field)
        except BaseException:
            self.close()
            raise

    def _opened(self, text_field: str) -> Sequence[Source]:
        stream, before = self._stream, dict(self._writer.positions)
        found: list[Source] = []
        by_line = Parser(text_field if stream.lines == "jsonl" else None, self._say)
        if stream.folder is not None:
            parsers = Parser(text_field, self._say), Parser(None, self._say)
            folder = Path(stream.folder).expanduser()
            found.append(FolderSource(folder, *parsers, before, self._say))
        if stream.listen is not None:
            found.append(SocketSource(stream.listen, by_line, before))
            self._say(f"listening at {stream.listen}")
        if stream.kafka is not None:
            found.append(KafkaSource(stream, by_line, before, self._say))
        return found

    def run(self, wants_stop: Callable[[], bool], *, once: bool) -> None:
        """Append until somebody wants it to stop.

        Args:
            once: stop as well when nothing is left to take.

        Raises:
            InputError: a source can't go on.
        """
        while not wants_stop():
            if not self.step():
                if once:
                    break
                time.sleep(_LOOK_S)
            self._now_and_then()
        self._tell()

    def step(self) -> bool:
        """Append what has arrived; whether anything had."""
        taken = [text for source in self._sources for text in source.take(_TAKEN_BYTES)]
        if taken:
            self._writer.append(self._record(taken))
        for source in self._sources:
            source.committed()
        return bool(taken)

    def close(self) -> None:
        """Let go of sources and log."""
        for source in self._sources:
            source.close()
        self._writer.close()

    def _record(self, taken: Sequence[Text]) -> Record:
        texts = [one for one in taken if one.text]
        encoded = self._encoder.encode([one.text or "" for one in texts])
        ends = np.cumsum([len(tokens) + 1 for tokens in encoded], dtype=np.int64)
        end, first = self._encoder.end_of_document, self._writer.num_tokens
        tokens = [np.append(one, end).astype(self._writer.meta.dtype) for one in encoded]
        self._num_documents += len(texts)
        return Record(
            first_token=first,
            arrived=min((one.arrived for one in texts), default=time.time()),
            tokens=np.concatenate([np.empty(0, self._writer.meta.dtype), *tokens]),
            document_starts=first + np.append([0], ends[:-1]) if texts else ends,
            positions={one.source: one.position for one in taken},
        )

    def _now_and_then(self) -> None:
        now = time.monotonic()
        if self._stream.keep_gb is not None and now - self._cleaned > _CLEAN_S:
            self._cleaned = now
            remove_passed(self._folder, self._stream.keep_gb, self._say)
        if now - self._told > _TELL_S:
            self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        if self._num_documents:
            size = bytes_text(sum(segment.num_bytes for segment in segments(self._folder)))
            self._say(
                f"{self._num_documents:,} texts more; the log has {self._writer.num_tokens:,} "
                f"tokens and takes {size}"
            )
            self._num_documents = 0
