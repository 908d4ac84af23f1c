"""The log of a stream: what is appended is read, whatever becomes of its writer or its files.

Pure files in this process; whole runs are in test_stream_runs.py.
"""

import os
import random
import zlib
from pathlib import Path

import numpy as np
import pytest

from paceline.config.errors import InputError
from paceline.train.data.stream.log import (
    Head,
    LogMeta,
    LogWriter,
    Record,
    create_log,
    read_log_meta,
    read_record,
    segments,
)
from paceline.train.data.stream.reader import LogReader

SEGMENT_BYTES = 400


@pytest.fixture
def folder(tmp_path) -> Path:
    """An empty log."""
    sizes = {"vocab_size": 257, "end_of_document": 256}
    meta = LogMeta(id="a" * 32, tokenizer="bytes", tokenizer_sha256="b" * 64, **sizes)
    create_log(tmp_path / "log", meta, b"{}")
    return tmp_path / "log"


def written(folder: Path) -> LogWriter:
    return LogWriter(folder, SEGMENT_BYTES, fsync=False)


def fill(folder: Path, count: int, writer: LogWriter | None = None) -> list[int]:
    """Append records of documents of 1 to 9 tokens; all tokens of the log."""
    writer = writer or written(folder)
    with writer:
        for _ in range(count):
            writer.append(record(writer))
        return tokens_of(writer.num_tokens)


def record(writer: LogWriter) -> Record:
    """The one that always comes at this place: lengths and tokens follow from the position."""
    first = writer.num_tokens
    lengths = [1 + (first + at) % 9 for at in range(3)]
    starts = first + np.cumsum([0, *lengths[:-1]])
    tokens = np.array(tokens_of(first + sum(lengths))[first:], writer.meta.dtype)
    return Record(first, 1000.0 + first, tokens, starts, {"source": first + sum(lengths)})


def tokens_of(count: int) -> list[int]:
    return [zlib.crc32(str(at).encode()) % 257 for at in range(count)]


def all_of(folder: Path, seq_len: int = 4) -> list[int]:
    reader = LogReader(folder)
    rows = reader.gather(np.arange(reader.num_samples(seq_len)), seq_len)
    return [*rows[:, :-1].flatten().tolist(), int(rows[-1, -1])]


def test_what_is_appended_is_read_across_records_and_segments(folder):
    tokens = fill(folder, 60)
    assert len(segments(folder)) > 3
    for seq_len in (1, 4, 50):
        found = all_of(folder, seq_len)
        assert found == tokens[: len(found)]
        assert len(tokens) - len(found) < seq_len
    reader = LogReader(folder)
    assert reader.arrived(0, 1) == 1000.0
    last = len(tokens) - 1
    assert last - 30 < reader.arrived(last, last + 1) - 1000.0 <= last


def test_samples_anywhere_are_read_without_what_is_before(folder, monkeypatch):
    fill(folder, 300)
    reader = LogReader(folder)
    count = reader.num_samples(4)
    read = []
    monkeypatch.setattr(
        "paceline.train.data.stream.reader.read_record",
        lambda file, dtype: read.append(found := read_record(file, dtype)) or found,
    )
    for number in (0, count // 2, count - 1):
        read.clear()
        LogReader(folder).gather(np.array([number]), 4)
        assert 1 <= len(read) <= 3
        assert read[0].first_token <= number * 4


def test_documents_are_told_apart_within_a_sample(folder):
    fill(folder, 20)
    starts = {0}
    with written(folder) as writer:
        total = writer.num_tokens
    at = 0
    while at < total:
        lengths = [1 + (at + n) % 9 for n in range(3)]
        for length in lengths:
            starts.add(at)
            at += length
    reader = LogReader(folder)
    ids = reader.document_ids(np.arange(reader.num_samples(7)), 7)
    for sample, row in enumerate(ids.tolist()):
        for place in range(1, 7):
            assert (row[place] > row[place - 1]) == (sample * 7 + place in starts)


def test_a_reader_follows_a_writer(folder):
    reader = LogReader(folder)
    assert reader.num_samples(4) == 0
    with written(folder) as writer:
        for _ in range(40):
            writer.append(record(writer))
            count = reader.num_samples(4)
            rows = reader.gather(np.arange(max(0, count - 3), count), 4)
            expected = tokens_of(4 * count + 1)[4 * max(0, count - 3) :]
            assert rows[:, :-1].flatten().tolist() == expected[:-1]


def test_a_torn_end_is_cut_and_written_again(folder):
    """Cut at every byte behind the head: what was published stays, and the rest comes again."""
    with written(folder) as writer:
        for _ in range(3):
            writer.append(record(writer))
        published = writer.num_tokens
        segment = segments(folder)[-1]
        whole = segment.path.stat().st_size
        writer.append(record(writer))
        longer = segment.path.read_bytes()
    assert len(segments(folder)) == 1
    for size in range(whole, len(longer)):
        segment.path.write_bytes(longer[:size])
        Head(folder).write(published)
        tokens = fill(folder, 1)
        assert all_of(folder, 1) == tokens
        assert segment.path.read_bytes() == longer


def test_a_writer_goes_on_after_a_segment_that_has_only_begun(folder):
    fill(folder, 9)
    last = segments(folder)[-1]
    with written(folder) as writer:
        torn = folder / f"{writer.num_tokens:020d}.segment"
        positions = writer.positions
    torn.write_bytes(last.path.read_bytes()[:30])
    with written(folder) as writer:
        assert writer.positions == positions
    assert not torn.exists()


def test_positions_come_back_from_the_last_segment_alone(folder):
    fill(folder, 30)
    for segment in segments(folder)[:-1]:
        segment.path.unlink()
    with written(folder) as writer:
        assert writer.positions == {"source": writer.num_tokens}


def test_two_processes_never_write_one_log(folder):
    with written(folder), pytest.raises(InputError, match="another process"):
        written(folder)


@pytest.mark.parametrize("seed", range(20))
def test_damage_is_one_sentence_or_has_no_effect(folder, seed):
    """A changed byte anywhere: the log says so, or what is read is what was written."""
    tokens = fill(folder, 30)
    pick = random.Random(seed)
    path = pick.choice([*sorted(folder.glob("*[0-9].*")), folder / "head", folder / "log.json"])
    data = bytearray(path.read_bytes())
    at = pick.randrange(len(data))
    data[at] ^= 1 << pick.randrange(8)
    path.write_bytes(data)
    found, sentence = tokens, ""
    try:
        found = all_of(folder, 3)
        with written(folder) as writer:
            assert writer.num_tokens == len(tokens)
    except InputError as error:
        sentence = str(error)
    assert sentence.count(". ") <= 1
    assert found == tokens[: len(found)]
    assert len(tokens) - len(found) < 3


@pytest.mark.parametrize("damage", ["removed", "cut", "changed"])
def test_what_may_have_been_trained_on_is_never_cut(folder, damage):
    fill(folder, 30)
    last = segments(folder)[-1].path
    size = last.stat().st_size
    if damage == "removed":
        last.unlink()
    elif damage == "cut":
        os.truncate(last, size - 1)
    else:
        with last.open("r+b") as file:
            file.seek(size - 1)
            file.write(b"\xff")
    before = {path: path.read_bytes() for path in folder.glob("*.segment")}
    with pytest.raises(InputError, match="that may have been trained on"):
        written(folder)
    assert {path: path.read_bytes() for path in folder.glob("*.segment")} == before


def test_a_lost_index_is_made_again(folder):
    tokens = fill(folder, 30)
    for segment in segments(folder):
        segment.index.unlink()
    with pytest.raises(InputError, match="start paceline stream"):
        all_of(folder)
    written(folder).close()
    assert all_of(folder, 1) == tokens


def test_a_folder_without_a_log_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_log_meta(tmp_path)
