"""Read the log of a stream by running numbers of tokens, while another process appends to it.

Sample i is tokens i * seq_len .. (i + 1) * seq_len of the log, the last of which is a target only:
a pure function of its number, as of data that is whole. Records are read whole and verified; those
read last are kept, for samples are smaller.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config import files
from paceline.config.errors import InputError
from paceline.train.data.stream.log import (
    INDEX_ENTRY,
    WAY_OUT,
    Head,
    Record,
    Segment,
    read_log_meta,
    read_record,
    segments,
)

_KEPT_RECORDS, _KEPT_INDEXES = 64, 4


class LogReader:
    """The tokens of a log, by samples of one length.

    Args:
        folder: of a log.

    Raises:
        InputError: there is none, or it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.meta = read_log_meta(folder)
        self.folder, self._head = folder, Head(folder)
        self._known = 0
        """Tokens that may be read, as seen last."""
        self._segments: list[Segment] = []
        self._indexes: OrderedDict[Path, _Index] = OrderedDict()
        self._records: OrderedDict[tuple[Path, int], Record] = OrderedDict()

    def num_tokens(self) -> int:
        """That may be read by now."""
        return self._head.read()

    def num_samples(self, seq_len: int) -> int:
        """Whole ones that may be read by now."""
        return max(0, self.num_tokens() - 1) // seq_len

    def gather(self, sample_ids: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
        """Read samples.

        Args:
            sample_ids: each below `num_samples`.

        Returns:
            tokens, int64, shape (num_samples, seq_len + 1): inputs [:, :-1] and targets [:, 1:].

        Raises:
            InputError: the log is damaged there, or its oldest segments were removed.
        """
        rows = np.empty((len(sample_ids), seq_len + 1), np.int64)
        for start, row in zip((sample_ids * seq_len).tolist(), rows, strict=True):
            for record in self._records_of(start, start + seq_len + 1):
                begin = max(start, record.first_token)
                part = record.tokens[begin - record.first_token :][: start + len(row) - begin]
                row[begin - start : begin - start + len(part)] = part
        return rows

    def document_ids(self, sample_ids: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
        """Tell to which document each input token belongs, counted within its sample.

        Returns:
            numbers that do not decrease along a row, shape (num_samples, seq_len).
        """
        rows = np.zeros((len(sample_ids), seq_len), np.int64)
        for start, row in zip((sample_ids * seq_len).tolist(), rows, strict=True):
            for record in self._records_of(start, start + seq_len):
                starts = record.document_starts - start
                row[starts[(starts > 0) & (starts < seq_len)]] = 1
        return np.cumsum(rows, axis=1)

    def counted(self, _sample_ids: NDArray[np.int64], _seq_len: int) -> None:
        """The loss counts every token."""

    def sources_of(self, _sample_ids: NDArray[np.int64], _seq_len: int) -> None:
        """There is one."""

    def arrived(self, start: int, end: int) -> float:
        """When the oldest of tokens start .. end - 1 arrived, unix time."""
        found = self._segments_of(start, end)
        return min(min(self._index(segment).arrived(start, end)) for segment in found)

    def _records_of(self, start: int, end: int) -> Iterator[Record]:
        """Those that hold tokens start .. end - 1."""
        for segment in self._segments_of(start, end):
            for place in self._index(segment).places(start, end):
                record = self._record(segment, place)
                following = record.first_token + len(record.tokens)
                if not record.first_token <= start < following:
                    raise _damaged_index(segment)
                start = following
                yield record
        if start < end:
            raise _damaged_index(segment)

    def _segments_of(self, start: int, end: int) -> list[Segment]:
        """Those that hold tokens start .. end - 1, which may be read."""
        if end > self._known:
            self._known = self._head.read()
            self._segments = segments(self.folder)
        firsts = [segment.first_token for segment in self._segments]
        begin = bisect_right(firsts, start) - 1
        if begin < 0 or end > self._known:
            raise InputError(
                f"{self.folder} has no tokens {start} to {end - 1}: its segments begin with "
                f"{firsts[0] if firsts else 'none'} and end before {self._known}. Name the "
                "data.stream.log that this run began with, or start over with a new one."
            )
        return self._segments[begin : bisect_left(firsts, end)]

    def _index(self, segment: Segment) -> "_Index":
        index = self._indexes.pop(segment.path, None) or _Index(segment.index)
        self._indexes[segment.path] = index
        if len(self._indexes) > _KEPT_INDEXES:
            self._indexes.popitem(last=False)
        index.refresh(self._known)
        return index

    def _record(self, segment: Segment, place: int) -> Record:
        key = segment.path, place
        record = self._records.pop(key, None)
        if record is None:
            with files.opened(segment.path, WAY_OUT) as file:
                file.seek(place)
                record = read_record(file, self.meta.dtype)
            if record is None:
                raise InputError(f"{segment.path} is damaged at byte {place}: {WAY_OUT}.")
        self._records[key] = record
        if len(self._records) > _KEPT_RECORDS:
            self._records.popitem(last=False)
        return record


def _damaged_index(segment: Segment) -> InputError:
    return InputError(
        f"{segment.index} is damaged: remove it, and start paceline stream, which makes it again."
    )


class _Index:
    """What an index says of the records that may be read; it grows with its segment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokens, self._places, self._arrived = array("Q"), array("Q"), array("d")

    def refresh(self, head: int) -> None:
        """Read what was added; an entry at `head` or beyond may still be cut off."""
        with files.opened(self._path, "start paceline stream, which makes it again") as file:
            file.seek(len(self._tokens) * INDEX_ENTRY.itemsize)
            data = file.read()
        added = np.frombuffer(data, INDEX_ENTRY, len(data) // INDEX_ENTRY.itemsize)
        added = added[added["token"] < head]
        self._tokens.frombytes(added["token"].tobytes())
        self._places.frombytes(added["place"].tobytes())
        self._arrived.frombytes(added["arrived"].tobytes())

    def places(self, start: int, end: int) -> array:
        """Of the records that hold tokens start .. end - 1 of this segment."""
        return self._places[self._span(start, end)]

    def arrived(self, start: int, end: int) -> array:
        """When they did."""
        return self._arrived[self._span(start, end)]

    def _span(self, start: int, end: int) -> slice:
        return slice(max(0, bisect_right(self._tokens, start) - 1), bisect_left(self._tokens, end))
