"""Sources tokenised in parts: by several processes, after kill -9, and where a bit flipped."""

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from paceline.config.errors import InputError
from paceline.train.data import parts, prepare, prepare_corpus
from paceline.train.data.files import SourceFile, find_files
from tests.train.test_data_prepare import all_tokens, documents_of, make_data, numbered

TEXTS = [*numbered(200), "", "äöü 🙂"]


def with_cores(monkeypatch, cores, part_bytes=2000):
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
    monkeypatch.setattr("paceline.train.data.build.num_cores", lambda: cores)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_any_number_of_processes_writes_the_same(tmp_path, monkeypatch, tokenizer):
    data = make_data(tmp_path, TEXTS, tokenizer=tokenizer, eval_fraction=0.2)
    whole = prepare(data.replace(cache_dir=str(tmp_path / "whole")))
    with_cores(monkeypatch, 1)
    one = prepare(data.replace(cache_dir=str(tmp_path / "one")))
    with_cores(monkeypatch, 3)
    read = []
    three = prepare(data, lambda done, total: read.append(done))
    assert len(one.meta.shards) > 10
    assert files_of(one.folder) == files_of(three.folder)
    assert np.array_equal(all_tokens(whole), all_tokens(three))
    assert read == sorted(read)
    names = ["tokens-documents.bin", "tokenizer.json"]
    assert [files_of(whole.folder)[n] for n in names] == [files_of(one.folder)[n] for n in names]
    assert whole.meta.unigram_loss == one.meta.unigram_loss


def test_stretches_of_json_lines_hold_each_line_once(tmp_path, monkeypatch):
    data = make_data(tmp_path, TEXTS)
    (file,) = find_files(data)
    for size in (1, 7, 100, 1999, 10**6):
        monkeypatch.setattr(parts, "PART_BYTES", size)
        found = [
            piece.text
            for part in parts.parts_of([file])
            for each in part
            for piece in parts.read_pieces(each, "text")
        ]
        assert found == TEXTS


def test_files_share_parts_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 10)
    files = []
    for name, size in (("a", 4), ("b", 6), ("c", 1), ("d", 30), ("e", 2)):
        (tmp_path / name).write_bytes(b"x" * size)
        files.append(SourceFile(tmp_path / name, "text"))
    found = [[file.path.name for file in part] for part in parts.parts_of(files)]
    assert found == [["a", "b"], ["c"], ["d"], ["e"]]


def test_a_file_that_a_worker_cannot_use_is_one_sentence(tmp_path, monkeypatch):
    with_cores(monkeypatch, 2)
    data = make_data(tmp_path, TEXTS)
    with Path(data.source).open("a") as file:
        file.write("{")
    with pytest.raises(InputError, match=r"source\.jsonl byte \d+ is not JSON"):
        prepare(data)
    assert not [path for path in (tmp_path / "cache/data").iterdir() if path.is_dir()]


@pytest.mark.parametrize(("cores", "most_bytes"), [(1, 20_000), (2, 20_000), (1, 1000)])
def test_where_nothing_more_can_be_written_is_one_sentence(
    tmp_path, monkeypatch, cores, most_bytes
):
    """A file may have so many bytes: less than a part, or than the tokenizer."""
    with_cores(monkeypatch, cores, part_bytes=30_000)
    data = make_data(tmp_path, numbered(1500))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        with pytest.raises(InputError, match=r"can't be written \(File too large\): make room"):
            prepare_corpus(data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(documents_of(all_tokens(prepare(data)))) == sorted(numbered(1500))


KILLED = """
import sys, json
from paceline.config.job_sections import Data
from paceline.train.data import build, parts, prepare
parts.PART_BYTES, build.num_cores = 2000, lambda: 1
prepare(Data.parse(json.loads(sys.argv[1])))
"""


def test_what_a_killed_build_finished_is_kept(tmp_path, monkeypatch):
    data = make_data(tmp_path, numbered(3000), tokenizer="bpe:300")
    command = [
        sys.executable,
        "-c",
        KILLED,
        data.model_dump_json(include={"source", "tokenizer", "cache_dir"}),
    ]
    for number in (1, 20):
        killed = subprocess.Popen(command)
        while killed.poll() is None and len(finished(tmp_path)) < number:
            time.sleep(0.005)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    before = finished(tmp_path)
    assert len(before) >= 20
    with_cores(monkeypatch, 1)
    resumed = prepare(data)
    after = {path.name: path.stat().st_mtime_ns for path in resumed.folder.glob("part-*.json")}
    assert before.items() <= after.items()
    undisturbed = prepare(data.replace(cache_dir=str(tmp_path / "other")))
    assert files_of(resumed.folder) == files_of(undisturbed.folder)


def finished(folder):
    """The parts that a build has finished, with the time of each."""
    found = (folder / "cache/data").glob("*.partial/part-*.json")
    return {path.name: path.stat().st_mtime_ns for path in found}


# --- flipped bits


@pytest.fixture
def damaged(tmp_path, monkeypatch):
    """A source of several parts, its tokens, and the shard in which a bit flipped."""
    with_cores(monkeypatch, 1)
    prepared = prepare(make_data(tmp_path, TEXTS, eval_fraction=0.2))
    tokens, shard = all_tokens(prepared), prepared.folder / "tokens-00002.bin"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    return prepared, tokens, shard


def test_a_shard_in_which_a_bit_flipped_is_made_anew(damaged):
    prepared, tokens, shard = damaged
    others = {path.name: path.stat().st_ino for path in prepared.folder.glob("tokens-0*.bin")}
    others.pop(shard.name), others.pop(f"tokens-{2 + len(prepared.meta.shards) // 2:05d}.bin")
    dataset = prepared.dataset("train")
    count = dataset.num_samples(50)
    found = dataset.gather(np.arange(count), 50)[:, :-1].ravel()
    assert np.array_equal(found, tokens[: count * 50])
    assert np.array_equal(all_tokens(prepared), tokens)
    after = {path.name: path.stat().st_ino for path in prepared.folder.glob("tokens-0*.bin")}
    assert others.items() <= after.items()
    assert prepare(prepared.data).meta == prepared.meta


def test_of_two_that_find_a_damaged_shard_one_makes_it_anew(damaged):
    prepared, tokens, shard = damaged
    both = [prepared.dataset("train") for _ in range(2)]
    ids, made = np.arange(both[0].num_samples(50)), []
    for dataset in both:
        assert np.array_equal(dataset.gather(ids, 50)[:, :-1].ravel(), tokens[: len(ids) * 50])
        made.append(shard.stat().st_ino)
    assert made[0] == made[1]


def test_without_its_source_a_damaged_shard_is_one_sentence(damaged):
    prepared, _, _ = damaged
    source = Path(prepared.data.source)
    source.write_text(source.read_text() + json.dumps({"text": "more"}))
    dataset = prepared.dataset("train")
    with pytest.raises(InputError, match=r"no longer what it was made of"):
        dataset.gather(np.arange(dataset.num_samples(50)), 50)


def test_damage_of_conversations_is_noticed_and_mended_by_the_next_start(tmp_path):
    rows = [{"prompt": f"What is {n}? ", "completion": f"It is {n}."} for n in range(50)]
    source = tmp_path / "chat.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = make_data(tmp_path, [], source=str(source), records="chat", tokenizer="bytes")
    prepared = prepare(data)
    good = files_of(prepared.folder)
    shard = prepared.folder / "tokens-00000.bin"
    content = bytearray(shard.read_bytes())
    content[3] ^= 1
    shard.write_bytes(content)
    with pytest.raises(InputError, match="is damaged: start again, and it is made anew"):
        prepared.conversations("train").gather(np.arange(1), 40)
    assert files_of(prepare(data).folder) == good
