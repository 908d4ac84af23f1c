"""Trace files in blocks: any size of block, gzipped, strung together, cut and damaged (pure)."""

import gzip
import json
import zlib

import numpy as np
import pytest

from paceline.config.errors import InputError
from paceline.observe.kineto import blocks
from paceline.observe.kineto.events import read_events
from paceline.observe.kineto.read import read_kineto

NUM_EVENTS = 200


def events():
    """Events with all that could mislead a reader that cuts text: braces in strings, nested lists
    of objects."""
    odd = [
        {"kwargs": '}, {"ph": "X"'},
        {"Concrete Inputs": ["}", "{", "},{"]},
        {"grids": [{"x": 1}, {"x": 2}]},
        {"Sequence number": "7"},
    ]
    for n in range(NUM_EVENTS):
        args = {"External id": n, **odd[n % len(odd)]}
        times = {"ts": 100.25 * n, "dur": 50.125}
        yield {"ph": "X", "cat": "cpu_op", "name": f"op {n % 9}", "pid": 1, "tid": 1, **times} | {
            "args": args
        }
        yield {"ph": "s", "id": n, "pid": 1, "tid": 1, "ts": 100 * n, "cat": "ac2g", "name": "a"}


def text(indent=None, **around):
    head = {"deviceProperties": [{"id": 0}, {"id": 1}], "distributedInfo": {"rank": 5}}
    tail = {"traceName": "x}, {", "baseTimeNanoseconds": 7_000_000, "more": [{"a": 1}, {"b": 2}]}
    return json.dumps(head | {"traceEvents": list(events())} | tail | around, indent=indent)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 3000)


def check(trace):
    assert len(trace.events) == NUM_EVENTS
    starts = 7_000_000 + 100_250 * np.arange(NUM_EVENTS)
    assert trace.events["start"].tolist() == starts.tolist()
    assert (trace.events["end"] - trace.events["start"] == 50_125).all()
    assert trace.events["external_id"].tolist() == list(range(NUM_EVENTS))
    assert trace.events["sequence"].tolist() == [-1, -1, -1, 7] * (NUM_EVENTS // 4)
    assert [trace.names[n] for n in trace.events["name"][:3]] == ["op 0", "op 1", "op 2"]
    assert trace.about["distributedInfo"] == {"rank": 5}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_blocks_hold_every_event_once(tmp_path, small_blocks, indent, pack):
    path = tmp_path / "t.json"
    path.write_bytes(pack(text(indent).encode()))
    assert len(list(blocks.TraceFile(path).blocks())) > 5
    check(read_events(path))


def test_gzip_files_may_be_strung_together(tmp_path, small_blocks):
    path, whole = tmp_path / "t.json.gz", text().encode()
    middle = len(whole) // 2
    path.write_bytes(gzip.compress(whole[:middle]) + gzip.compress(whole[middle:]) + b"\0" * 9)
    check(read_events(path))


def test_a_bare_list_of_events_is_a_trace(tmp_path, small_blocks):
    path = tmp_path / "t.json"
    path.write_text(" " + json.dumps(list(events())))
    assert len(read_events(path).events) == NUM_EVENTS


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("block_bytes", [3000, 100_000])
def test_of_a_file_that_was_cut_the_complete_events_are_read(
    tmp_path, monkeypatch, share, pack, block_bytes
):
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", block_bytes)
    path, whole = tmp_path / "rank5.json", pack(text().encode())
    path.write_bytes(whole[: int(share * len(whole))])
    trace = read_events(path)
    assert trace.is_cut
    assert 0 < len(trace.events) < NUM_EVENTS
    if pack is bytes:
        assert len(trace.events) == pytest.approx(share * NUM_EVENTS, abs=3)


def test_damage_is_refused_in_a_sentence(tmp_path, small_blocks):
    whole = text().encode()
    packed = gzip.compress(whole)
    middle = len(packed) // 2
    wrong_sum = zlib.crc32(whole) ^ 1
    damaged = {
        "middle.json": whole.replace(b'"tid": 1, "ts": 5012.5', b'"tid": 1, "ts"; 5012.5', 1),
        "binary.json": bytes(range(128, 256)) * 40,
        "number.json": whole.replace(b'"dur": 50.125', b'"dur": "long"'),
        "middle.gz": packed[:middle] + b"\xff" * 40 + packed[middle + 40 :],
        "sum.gz": packed[:-8] + wrong_sum.to_bytes(4, "little") + packed[-4:],
        "header.json": whole.replace(b'{"id": 0}', b'{"id": 0]', 1),
        "nothing.json": b"",
    }
    for name, data in damaged.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match="record it again"):
            read_kineto(tmp_path / name)
    for name, data in {"other.json": b'{"a": 1}', "three.json": b"3"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match="no list traceEvents"):
            read_kineto(tmp_path / name)
    with pytest.raises(InputError, match="does not exist"):
        read_kineto(tmp_path / "absent.json")
    with pytest.raises(InputError, match="can't be read"):
        read_kineto(tmp_path)
