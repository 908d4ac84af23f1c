"""What arrives in folders, at sockets and from Kafka gets into the log once, in this process.

Kafka's brokers are those that librdkafka brings for tests; skipped where its client is missing.
"""

import json
import os
import socket
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.train.checkpoint.files import FORMAT_VERSION, Manifest, encode_manifest
from paceline.train.data.stream import sources
from paceline.train.data.stream.ingest import Ingester
from paceline.train.data.stream.log import segments
from paceline.train.data.stream.prepare import PreparedStream, prepare_stream
from paceline.train.data.stream.reader import LogReader
from paceline.train.data.stream.retention import Reader, register, remove_passed
from tests.small_job import write_small_job

LONG_AGO = 1_000_000_000


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "incoming").mkdir()
    return tmp_path


def a_job(**stream: object):
    """A Job with these settings of its stream; without a held-out text."""
    file = write_small_job(Path())
    settings = [f"data.stream.{name}={json.dumps(value)}" for name, value in stream.items()]
    return read_job(file, ['data.source="python-stdlib"', *settings])


@contextmanager
def ingesting(job, said: list[str] | None = None):
    ingester = Ingester(
        prepare_stream(job), job.data.stream, "text", (said if said is not None else []).append
    )
    try:
        yield ingester
    finally:
        ingester.close()


def take_all(ingester: Ingester) -> None:
    """Until nothing has come for a while."""
    last = time.monotonic()
    while time.monotonic() - last < 0.3:
        if ingester.step():
            last = time.monotonic()
        time.sleep(0.01)


def texts_of(prepared: PreparedStream) -> list[str]:
    """The documents of a log."""
    reader = LogReader(prepared.folder)
    tokens = reader.gather(np.arange(reader.num_samples(1)), 1)
    all_tokens = [*tokens[:, 0].tolist(), *tokens[-1:, 1].tolist()]
    joined = "".join(chr(token) if token < 256 else "\0" for token in all_tokens)
    assert not joined or joined.endswith("\0")
    return joined.split("\0")[:-1]


def put(folder: Path, name: str, text: str) -> None:
    """A file that was written long ago."""
    path = folder / "incoming" / name
    path.write_text(text)
    os.utime(path, (LONG_AGO, LONG_AGO))


def row(text: str) -> str:
    return json.dumps({"text": text}) + "\n"


def test_files_are_taken_once_lines_as_they_come_and_texts_whole(folder):
    job = a_job(folder="incoming")
    put(folder, "a.jsonl", row("one") + row("two") + '{"text": "thr')
    put(folder, "b.txt", "a whole text\nof lines")
    put(folder, ".hidden.txt", "no")
    put(folder, "c.csv", "no")
    with ingesting(job) as ingester:
        take_all(ingester)
    assert texts_of(prepare_stream(job)) == ["one", "two", "a whole text\nof lines"]
    with (folder / "incoming" / "a.jsonl").open("a") as file:
        file.write('ee"}\n')
    (folder / "incoming" / "fresh.txt").write_text("may still be written")
    with ingesting(job) as ingester:
        ingester.step()
    found = texts_of(prepare_stream(job))
    assert found == ["one", "two", "a whole text\nof lines", "three"]
    arrived = LogReader(prepare_stream(job).folder).arrived(0, 1)
    assert arrived == LONG_AGO


def test_what_is_no_text_is_passed_over_and_said(folder):
    said: list[str] = []
    job = a_job(folder="incoming")
    bad = ["{", "[]", '{"text": 3}', '{"text": "\\ud800"}', ""]
    put(folder, "a.jsonl", row("one") + "".join(f"{line}\n" for line in bad) + row("6"))
    (folder / "incoming" / "b.txt").write_bytes(b"\xff\xfe")
    os.utime(folder / "incoming" / "b.txt", (LONG_AGO, LONG_AGO))
    with ingesting(job, said) as ingester:
        take_all(ingester)
    assert texts_of(prepare_stream(job)) == ["one", "6"]
    assert len(said) == 2
    assert 'it is no JSON object with a text "text"' in said[0]
    assert "it is not UTF-8" in said[1]


def test_a_file_that_shrank_is_said_and_left_out(folder):
    said: list[str] = []
    job = a_job(folder="incoming")
    put(folder, "a.jsonl", row("one") + row("two"))
    with ingesting(job, said) as ingester:
        take_all(ingester)
        put(folder, "a.jsonl", row("1"))
        take_all(ingester)
    assert texts_of(prepare_stream(job)) == ["one", "two"]
    assert len(said) == 1
    assert "has become shorter" in said[0]


def test_a_file_that_goes_while_the_folder_is_looked_through_ends_nothing(folder, monkeypatch):
    job = a_job(folder="incoming")
    put(folder, "a.jsonl", row("gone"))
    put(folder, "b.jsonl", row("one"))
    seen = list(os.scandir(folder / "incoming"))
    (folder / "incoming" / "a.jsonl").unlink()
    monkeypatch.setattr(sources, "os", SimpleNamespace(scandir=lambda _: seen))
    with ingesting(job, []) as ingester:
        take_all(ingester)
    assert texts_of(prepare_stream(job)) == ["one"]


class Client:
    """Sends lines to the Unix socket s.sock."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.connect("s.sock")
        self.answers = self.socket.makefile("rb")

    def send(self, *lines: str) -> None:
        self.socket.sendall("".join(f"{line}\n" for line in lines).encode())

    def close(self) -> None:
        self.answers.close()
        self.socket.close()


@pytest.fixture
def connect():
    """Makes clients, which are closed in the end."""
    made: list[Client] = []

    def make() -> Client:
        made.append(Client())
        return made[-1]

    yield make
    for client in made:
        client.close()


def test_a_client_that_says_its_name_sends_each_line_once(folder, connect):
    job = a_job(listen="unix:s.sock")
    with ingesting(job) as ingester:
        client = connect()
        client.send("PACELINE crawler")
        take_all(ingester)
        assert client.answers.readline() == b"0\n"
        client.send("one", "two")
        take_all(ingester)
        assert client.answers.readline() == b"2\n"
        client.send("three")
        # It is killed before it takes the third line.
    with ingesting(job) as ingester:
        client = connect()
        client.send("PACELINE crawler")
        take_all(ingester)
        assert client.answers.readline() == b"2\n"
        client.send("three", "four")
        other = connect()
        other.send("from somebody", "without a name")
        take_all(ingester)
        assert client.answers.readline() == b"4\n"
    found = texts_of(prepare_stream(job))
    assert sorted(found) == ["four", "from somebody", "one", "three", "two", "without a name"]
    assert not Path("s.sock").exists()


def test_a_client_that_comes_again_takes_the_place_of_its_old_connection(folder, connect):
    job = a_job(listen="unix:s.sock", lines="jsonl")
    with ingesting(job) as ingester:
        old, new = connect(), connect()
        old.send("PACELINE one", row("a").strip())
        take_all(ingester)
        new.send("PACELINE one")
        take_all(ingester)
        assert new.answers.readline() == b"1\n"
        assert old.answers.readline() == b"1\n"
        assert old.answers.readline() == b"", "it is closed"
        new.send(row("c").strip())
        take_all(ingester)
    assert texts_of(prepare_stream(job)) == ["a", "c"]


def test_an_address_that_is_taken_is_one_sentence(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        job = a_job(listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(InputError, match="can't be listened at"), ingesting(job):
            pass


def test_a_missing_folder_is_one_sentence(folder):
    with pytest.raises(InputError, match="is no folder"):
        prepare_stream(a_job(folder="nowhere"))


def test_segments_go_when_every_checkpoint_of_every_run_has_passed_them(folder):
    job = a_job(folder="incoming", segment_mb=0.001)
    with ingesting(job) as ingester:
        for number in range(100):
            put(folder, f"{number:03d}.jsonl", row("x" * 99))
            take_one(ingester)
    prepared, said = prepare_stream(job), []
    before = segments(prepared.folder)
    keep_gb = 0.5 * sum(segment.num_bytes for segment in before) / 1e9
    remove_passed(prepared.folder, keep_gb, said.append)
    assert segments(prepared.folder) == before, "no run has said what it passed"
    for name, steps in (("far", (90, 95)), ("near", (40, 70))):
        register(prepared.folder, run_with_checkpoints(folder / name, steps))
    remove_passed(prepared.folder, keep_gb, said.append)
    after = segments(prepared.folder)
    # The oldest checkpoint has consumed 40 samples of 100 tokens.
    assert after[0].first_token <= 4000 < after[1].first_token
    assert before[-len(after) :] == after
    assert "were removed" in said[0]
    reader = LogReader(prepared.folder)
    assert reader.gather(np.array([40]), 100).shape == (1, 101)
    with pytest.raises(InputError, match="its segments begin with"):
        reader.gather(np.array([0]), 100)


def take_one(ingester: Ingester) -> None:
    while not ingester.step():
        time.sleep(0.01)


def run_with_checkpoints(folder: Path, samples) -> Reader:
    """The directory of a run, as far as it is looked at."""
    folder.mkdir()
    (folder / "job.toml").touch()
    for step, count in enumerate(samples):
        kept = folder / "checkpoints" / f"step-{step}"
        kept.mkdir(parents=True)
        nothing = {"values": {}, "files": {}, "tensors": {}}
        manifest = Manifest(format=FORMAT_VERSION, step=step, facts={"samples": count}, **nothing)
        (kept / "manifest.json").write_bytes(encode_manifest(manifest))
    return Reader(run=str(folder), seq_len=100, window=1)


class Broker:
    """One that librdkafka brings for tests, with its producer."""

    def __init__(self) -> None:
        kafka = pytest.importorskip("confluent_kafka", reason="pip install 'paceline[kafka]'")
        settings = {"test.mock.num.brokers": 1, "bootstrap.servers": "none:1"}
        self._producer = kafka.Producer(settings)
        (broker,) = self._producer.list_topics(timeout=20).brokers.values()
        self.address = f"{broker.host}:{broker.port}"

    def produce(self, *texts: str) -> None:
        for text in texts:
            self._producer.produce("texts", text.encode(), partition=0)
        assert self._producer.flush(20) == 0


def test_a_message_that_is_gone_is_one_sentence(folder):
    first, emptied = Broker(), Broker()
    first.produce("one", "two", "three")
    with ingesting(a_job(kafka=first.address, topic="texts")) as ingester:
        take_one(ingester)
        take_all(ingester)
    emptied.produce("other")
    sentence = "Kafka no longer has message 3 of partition 0 of texts"
    job = a_job(kafka=emptied.address, topic="texts")
    with ingesting(job) as ingester, pytest.raises(InputError, match=sentence):
        take_one(ingester)


def test_messages_of_kafka_are_taken_once(folder):
    broker = Broker()
    produce, job = broker.produce, a_job(kafka=broker.address, topic="texts")
    produce("one", "two")
    with ingesting(job) as ingester:
        take_one(ingester)
        take_all(ingester)
    assert texts_of(prepare_stream(job)) == ["one", "two"]
    produce("three")
    with ingesting(job) as ingester:
        take_one(ingester)
        take_all(ingester)
    assert texts_of(prepare_stream(job)) == ["one", "two", "three"]
