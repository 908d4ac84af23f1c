"""Tokens that are published in a folder or a store, and read by range (moto on loopback)."""

import json
import socket
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.errors import InputError
from paceline.config.job_sections import Data
from paceline.config.mixture_rules import mixture_problem
from paceline.train.data import (
    BatchShape,
    parts,
    prepare_corpus,
    publish,
    stored_tokens,
    train_batches,
)
from paceline.train.data.checksums import BLOCK_BYTES
from paceline.train.data.published import Manifest, read_published
from paceline.train.data.ranges import Ranges, _Descriptions
from paceline.train.data.stored_tokens import PLACE_BYTES, StoredTokens
from paceline.train.data.stores import store_of
from paceline.train.data.tokens_command import tokens_command
from tests.train.test_data_sources import write

SEQ_LEN, SEED, BATCH = 500, 3, 8


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Some 40 blocks of tokens, in several shards."""
    folder, draw = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    for number in range(6):
        content = draw.integers(ord(" "), ord("~") + 1, 200_000, np.uint8).tobytes().decode()
        write(folder / f"{number}.txt", content)
        for short in range(20):
            write(folder / f"{number}-{short}.txt", content[short * 50 : short * 90])
    return folder


def text_data(folder, cache, **settings):
    return Data.parse(
        {"source": str(folder), "tokenizer": "bytes", "cache_dir": str(cache)} | settings
    )


@pytest.fixture(scope="module")
def corpus(texts, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART_BYTES", 500_000)
        return prepare_corpus(text_data(texts, tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """A published folder; not to be changed."""
    place = tmp_path_factory.mktemp("published") / "tokens"
    publish.publish(corpus, str(place), lambda done, total: None)
    return place


def tokens_data(place, cache, **settings):
    settings = {"source": str(place), "tokenizer": "bytes", "format": "tokens", **settings}
    return Data.parse({**settings, "cache_dir": str(cache)})


def read(corpus, num_ranks=1, first=0, steps=12, **settings):
    """What each rank's steps hold."""
    found = []
    for rank in range(num_ranks):
        shape = BatchShape(BATCH, BATCH // num_ranks, SEQ_LEN, rank, num_ranks, **settings)
        data = corpus.for_samples(SEQ_LEN).train_split(BATCH)
        batches = train_batches(data, shape, SEED, first)
        found.append([next(batches) for _ in range(steps)])
    return [
        tensor.tolist()
        for steps in found
        for step in steps
        for micro_batch in step
        for tensor in micro_batch
        if tensor is not None
    ]


def blocks_file(corpus):
    return corpus.first.folder / "blocks.bin"


# --- the same order and the same tokens


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("first", [0, 10 * BATCH])
def test_a_published_folder_gives_what_the_text_gives(corpus, folder, tmp_path, num_ranks, first):
    found = prepare_corpus(tokens_data(folder, tmp_path))
    assert found.fingerprint == corpus.fingerprint
    assert found.facts() == corpus.facts()
    assert len(found.first.meta.shards) > 4
    ids = [
        each.for_samples(SEQ_LEN).train_split(BATCH).order(SEED, SEQ_LEN)(first, 2000)
        for each in (found, corpus)
    ]
    assert np.array_equal(*ids)
    for how in ({}, {"reset_at_documents": True}):
        assert read(found, num_ranks, first, **how) == read(corpus, num_ranks, first, **how)


def test_all_tokens_and_documents_are_the_same(corpus, folder, tmp_path):
    found = prepare_corpus(tokens_data(folder, tmp_path))
    for split in ("train", "eval", "all"):
        mine, own = (list(each.first.tokens(split).documents()) for each in (found, corpus))
        assert len(mine) == len(own)
        assert all(map(np.array_equal, mine, own))


def test_a_store_is_read_by_range(corpus, s3, tmp_path, monkeypatch):
    publish.publish(corpus, s3, lambda done, total: None)
    found, asked, original = prepare_corpus(tokens_data(s3, tmp_path)), [], Ranges.read

    def counted(self, name, begin, end):
        asked.append(end - begin)
        return original(self, name, begin, end)

    monkeypatch.setattr(Ranges, "read", counted)
    with monkeypatch.context() as patch:  # nothing ahead, which goes as far as time allows
        patch.setattr(StoredTokens, "is_advice_due", lambda self: False)
        patch.setattr(stored_tokens, "_MOST_BETWEEN", 0)
        assert read(found, steps=1) == read(corpus, steps=1)
    assert BLOCK_BYTES <= sum(asked) <= 2 * BATCH * BLOCK_BYTES
    assert sum(asked) < blocks_file(found).stat().st_size // 2
    assert read(found, 2, 5 * BATCH, steps=100) == read(corpus, 2, 5 * BATCH, steps=100)
    asked.clear()
    assert read(found, 2, 5 * BATCH, steps=100) == read(corpus, 2, 5 * BATCH, steps=100)
    assert not asked  # all was kept


def test_blocks_that_are_near_come_by_one_request(corpus, folder, tmp_path, monkeypatch):
    """Those between are kept, and never asked for again."""
    asked, original = [], Ranges.read

    def noted(self, name, begin, end):
        asked.append((begin // BLOCK_BYTES, end // BLOCK_BYTES))
        return original(self, name, begin, end)

    monkeypatch.setattr(stored_tokens, "_MOST_BETWEEN", 3)
    found, own = (
        each.first.tokens("train")._stream
        for each in (prepare_corpus(tokens_data(folder, tmp_path)), corpus)
    )
    monkeypatch.setattr(Ranges, "read", noted)
    for blocks, requests in (([0, 4, 9], [(0, 5), (9, 10)]), ([1, 2, 3], []), ([5], [(5, 6)])):
        starts = np.array(blocks) * (BLOCK_BYTES // 2)
        assert np.array_equal(found.rows(starts, 100), own.rows(starts, 100))
        assert sorted(asked) == requests
        asked.clear()


def test_descriptions_of_services_are_read_as_botocore_reads_them():
    loaders = pytest.importorskip("botocore.loaders")
    folder, own = Path(loaders.__file__).parent / "data", loaders.JSONFileLoader()
    for name in ("endpoints", "partitions", "s3/2006-03-01/service-2", "no-such-file"):
        path = str(folder / name)
        assert _Descriptions().exists(path) == own.exists(path)
        assert _Descriptions().load_file(path) == own.load_file(path)


def test_best_fit_packs_the_same(texts, folder, tmp_path):
    settings = {"packing": "best_fit"}
    own = prepare_corpus(text_data(texts, tmp_path, **settings))
    found = prepare_corpus(tokens_data(folder, tmp_path, **settings))
    assert read(found) == read(own)


def test_a_mixture_of_text_and_published_tokens_is_that_of_texts(texts, folder, tmp_path):
    other = write(tmp_path / "other.txt", "Something else. " * 3000)

    def mixed(first):
        sources = [
            {"name": "a", "weight": 2.0, **first},
            {"name": "b", "source": other, "weight": 1.0},
        ]
        return prepare_corpus(text_data("python-stdlib", tmp_path, sources=sources))

    text, tokens = {"source": str(texts)}, {"source": str(folder), "format": "tokens"}
    found, own = mixed(tokens), mixed(text)
    assert list(found.held_out()[0].gather(np.arange(2), 9).ravel()) == list(
        own.held_out()[0].gather(np.arange(2), 9).ravel()
    )
    assert read(found, steps=30) == read(own, steps=30)


def test_a_mixture_is_published_by_source_and_keeps_its_tokenizer(texts, tmp_path):
    other = write(tmp_path / "other.txt", "Something else. " * 3000)
    sources = [{"name": "a", "source": str(texts / "0.txt")}, {"name": "b", "source": other}]
    own = prepare_corpus(text_data("python-stdlib", tmp_path, sources=sources, tokenizer="bpe:300"))
    publish.publish(own, str(tmp_path / "out"), lambda done, total: None)
    published = [
        {"name": name, "source": str(tmp_path / "out" / name), "format": "tokens"} for name in "ab"
    ]
    data = text_data("python-stdlib", tmp_path / "c", sources=published, tokenizer="bpe:300")
    found = prepare_corpus(data)
    assert found.vocab_size == 300
    assert read(found, steps=30) == read(own, steps=30)
    # One of them with a text beside it, which is tokenised as that was.
    data = data.replace(sources=(data.sources[0], own.data.sources[1]))
    assert read(prepare_corpus(data), steps=30) == read(own, steps=30)


# --- what is kept


def test_data_larger_than_their_room_are_read_and_never_outgrow_it(corpus, folder, tmp_path):
    limit = 20 * PLACE_BYTES + 100_000
    found = prepare_corpus(tokens_data(folder, tmp_path, cache_gb=limit / 10**9))
    assert found.first.published.manifest.num_blocks > 30
    for _ in range(2):
        assert read(found, steps=150) == read(corpus, steps=150)
        taken = sum(path.stat().st_size for path in found.first.folder.iterdir())
        assert 16 * PLACE_BYTES < taken <= limit
    with pytest.raises(InputError, match=r"raise data\.cache_gb"):
        prepare_corpus(tokens_data(folder, tmp_path / "b", cache_gb=3 * PLACE_BYTES / 10**9))


def test_published_sources_of_a_job_share_the_room(folder, tmp_path):
    limit = 60 * PLACE_BYTES
    published = {"source": str(folder), "format": "tokens"}
    copy = tmp_path / "copy"
    copy.symlink_to(folder)
    sources = [{"name": "a", **published}, {"name": "b", **published, "source": str(copy)}]
    data = text_data("python-stdlib", tmp_path / "c", sources=sources, cache_gb=limit / 10**9)
    found = prepare_corpus(data)
    sizes = [(part.folder / "blocks.bin").stat().st_size for part in found.sources.values()]
    assert sizes[0] == sizes[1]
    assert 50 * PLACE_BYTES < sum(sizes) <= limit


def test_what_is_needed_soon_is_fetched_in_the_background(folder, tmp_path):
    """In any order, by few requests."""
    found = prepare_corpus(tokens_data(folder, tmp_path))
    rows, ids = found.first.tokens("train"), np.arange(0, 900, 90)[::-1]
    rows.will_need(ids, SEQ_LEN)
    stream = rows._stream
    futures = set(stream._ahead.values())
    for future in futures:
        future.result(timeout=600)
    assert len(futures) < 5 < len(stream._ahead)
    assert all(map(stream._has, stream._ahead))


def test_a_bit_that_flips_is_noticed_and_its_block_fetched_again(corpus, folder, tmp_path):
    found = prepare_corpus(tokens_data(folder, tmp_path))
    expected = read(corpus, steps=100)
    assert read(found, steps=100) == expected
    good = blocks_file(found).read_bytes()
    draw = np.random.default_rng(1)
    damaged = bytearray(good)
    for place in draw.integers(0, len(good), 300).tolist():  # numbers of blocks among them
        damaged[place] ^= 1 << (place % 8)
    blocks_file(found).write_bytes(damaged)
    assert read(found, steps=100) == expected
    assert len(good) == blocks_file(found).stat().st_size


def test_a_range_that_comes_damaged_is_asked_for_again(corpus, folder, tmp_path, monkeypatch):
    found, seen, original = prepare_corpus(tokens_data(folder, tmp_path)), set(), Ranges.read

    def flips(self, name, begin, end):
        content = bytearray(original(self, name, begin, end))
        if (name, begin) not in seen:
            seen.add((name, begin))
            content[-1] ^= 1
        return bytes(content)

    monkeypatch.setattr(Ranges, "read", flips)
    assert read(found, steps=2) == read(corpus, steps=2)
    assert seen


@pytest.mark.parametrize("how", ["flipped", "shorter", "absent"])
def test_a_shard_that_is_damaged_where_it_is_published_is_named(corpus, tmp_path, how):
    publish.publish(corpus, str(tmp_path / "out"), lambda done, total: None)
    found = prepare_corpus(tokens_data(tmp_path / "out", tmp_path))
    shard = tmp_path / "out" / "tokens-00001.bin"
    content = shard.read_bytes()
    shard.unlink()
    if how != "absent":
        shard.write_bytes(content[: len(content) // 2] if how == "shorter" else bytes(len(content)))
    with pytest.raises(InputError, match=r"tokens-00001\.bin is missing or damaged"):
        read(found, steps=100)


# --- a store that is away


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_store_that_is_away_is_one_sentence(monkeypatch, tmp_path):
    pytest.importorskip("botocore")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(InputError, match=r"not to be had for 0\.2 s .*raise data\.wait_s") as said:
        prepare_corpus(tokens_data("s3://bucket/x", tmp_path, wait_s=0.2))
    assert "\n" not in str(said.value)


def test_a_store_that_comes_back_was_waited_for(corpus, folder, tmp_path, monkeypatch):
    found = prepare_corpus(tokens_data(folder, tmp_path, wait_s=600.0))
    files, is_back = found.first.published.files._files, threading.Event()
    original, tries = type(files).read, []

    def away(self, name, begin, end):
        if not is_back.is_set():
            tries.append(name)
            if len(tries) > 40:
                is_back.set()
            raise ConnectionError("nobody is there")
        return original(self, name, begin, end)

    monkeypatch.setattr(type(files), "read", away)
    monkeypatch.setattr("paceline.train.data.ranges._LONGEST_WAIT_S", 0.01)
    assert read(found, steps=5) == read(corpus, steps=5)
    assert len(tries) > 40


def test_no_key_and_no_bucket_are_said_at_once(s3, tmp_path, monkeypatch):
    began = time.monotonic()
    with pytest.raises(InputError, match="holds no published tokens"):
        prepare_corpus(tokens_data("s3://none-here/x", tmp_path, wait_s=10**5))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(InputError, match="NoCredentials"):
        prepare_corpus(tokens_data(s3, tmp_path, wait_s=10**5))
    assert time.monotonic() - began < 10**4


# --- publishing


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_a_killed_publication_is_gone_on_with(corpus, tmp_path, request, monkeypatch, kind):
    place = str(tmp_path / "out") if kind == "folder" else request.getfixturevalue("s3")
    store, put = store_of(place)[0], []
    original = store.put_file

    def dies(here, there):
        if len(put) == 3:
            raise KeyboardInterrupt
        put.append(there)
        original(here, there)

    def counts(here, there):
        put.append(there)
        original(here, there)

    monkeypatch.setattr(publish, "_AT_ONCE", 1)
    with monkeypatch.context() as patch:
        patch.setattr(store, "put_file", dies)
        with pytest.raises(KeyboardInterrupt):
            publish.publish(corpus, place, lambda done, total: None)
    with pytest.raises(InputError, match="holds no published tokens"):
        read_published(tokens_data(place, tmp_path))
    first, told = list(put), []
    put.clear()
    with monkeypatch.context() as patch:
        patch.setattr(store, "put_file", counts)
        publish.publish(corpus, place, lambda *done: told.append(done))
        assert not set(first) & set(put)
        assert told == sorted(told)
        assert told[-1][0] == told[-1][1] > 0
        put.clear()
        publish.publish(corpus, place, lambda *done: None)
        assert not put
    assert read(prepare_corpus(tokens_data(place, tmp_path)), steps=2) == read(corpus, steps=2)


def test_a_shard_that_is_damaged_here_is_made_anew_before_it_is_published(texts, tmp_path):
    own = prepare_corpus(text_data(texts, tmp_path))
    shard = own.first.folder / "tokens-00000.bin"
    content = bytearray(shard.read_bytes())
    content[70_000] ^= 4
    shard.write_bytes(content)
    publish.publish(own, str(tmp_path / "out"), lambda done, total: None)
    content[70_000] ^= 4
    assert (tmp_path / "out" / shard.name).read_bytes() == content


def test_no_place_is_overwritten(corpus, folder, tmp_path):
    write(tmp_path / "own" / "thesis.txt", "years of work")
    other = prepare_corpus(text_data(write(tmp_path / "a.txt", "abc " * 90), tmp_path / "c"))
    for place, message in (
        (tmp_path / "own", "files that no publication left there"),
        (folder, "other published tokens"),
    ):
        with pytest.raises(InputError, match=message):
            publish.publish(other, str(place), lambda done, total: None)
    write(tmp_path / "half" / "publishing.json", '{"tokens": "x"}')
    with pytest.raises(InputError, match="unfinished publication of other tokens"):
        publish.publish(corpus, str(tmp_path / "half"), lambda done, total: None)


@pytest.mark.parametrize(
    ("settings", "megatron", "to", "message"),
    [
        ({}, None, None, "needs one place"),
        ({}, "x", "y", "needs one place"),
        ({}, None, "s3://k:v@b/x", "may hold a secret"),
        ({"format": "tokens", "source": "there"}, None, "out", "published already"),
        ({"records": "chat"}, None, "out", "says more than tokens"),
    ],
)
def test_what_cant_be_published_is_one_sentence(tmp_path, settings, megatron, to, message):
    data = Data.parse({"cache_dir": str(tmp_path), **settings})
    with pytest.raises(InputError, match=message):
        tokens_command(data, megatron, to, as_json=False)


def test_the_command_says_what_is_published(texts, tmp_path, capsys):
    data, place = text_data(texts, tmp_path), str(tmp_path / "out")
    tokens_command(data, None, place, as_json=False)
    assert f"{place}: 1,233,263 tokens" in capsys.readouterr().out
    tokens_command(data, None, place, as_json=True)
    assert json.loads(capsys.readouterr().out)["published"][place]["tokenizer"] == "bytes"


# --- what can't be read


def changed_manifest(folder, place, change):
    """A copy of a publication whose manifest is another, and sealed."""
    place.mkdir()
    for path in folder.iterdir():
        if path.name != "manifest.json":
            (place / path.name).symlink_to(path)
    manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    changed = change(manifest)
    text = changed if isinstance(changed, str) else changed.sealed().model_dump_json()
    (place / "manifest.json").write_text(text)
    return place


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": "bpe:512"}, 'published with data.tokenizer = "bytes".*"bpe:512"'),
        ({"eval_fraction": 0.2}, r"published with data.eval_fraction = 0\.01.* 0\.2"),
        ({"source": ["a", "b"]}, "one folder or URL, and data.source names 2"),
        ({"source": "none/here"}, "holds no published tokens"),
        ({"source": __file__}, "holds no published tokens"),
    ],
)
def test_what_a_job_says_otherwise_is_one_sentence(folder, tmp_path, settings, message):
    with pytest.raises(InputError, match=message):
        prepare_corpus(tokens_data(folder, tmp_path).replace(**settings))


def test_a_tokenizer_file_has_to_be_the_published_one(folder, texts, tmp_path):
    same = str(folder / "tokenizer.json")
    data = tokens_data(folder, tmp_path, tokenizer=same)
    assert prepare_corpus(data).vocab_size == 257
    other = prepare_corpus(text_data(texts / "0.txt", tmp_path, tokenizer="bpe:300"))
    with pytest.raises(InputError, match="with another tokenizer than"):
        prepare_corpus(data.replace(tokenizer=str(other.tokenizer_path)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.replace(meta=m.meta.replace(num_documents=3)), "manifest.json is missing or"),
        (lambda m: m.replace(meta=m.meta.replace(vocab_size=99)), "tokenizer.json is missing or"),
        (lambda m: m.replace(meta=m.meta.replace(vocab_size=10**6)), "manifest.json is missing or"),
        (lambda m: m.replace(files={}), "manifest.json is missing or damaged"),
        (
            lambda m: m.replace(
                files={name: each.replace(crc=zlib.crc32(b"x")) for name, each in m.files.items()}
            ),
            "tokenizer.json is missing or damaged",
        ),
        (
            lambda m: m.model_dump_json().replace('"version":1', '"version":2', 1),
            "version 2 of the format",
        ),
    ],
)
def test_a_manifest_that_isnt_so_is_one_sentence(folder, tmp_path, change, message):
    place = changed_manifest(folder, tmp_path / "out", change)
    with pytest.raises(InputError, match=message) as said:
        prepare_corpus(tokens_data(place, tmp_path / "c"))
    assert "\n" not in str(said.value)
    assert not list((tmp_path / "c" / "data").glob("*/meta.json"))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_flipped_bit_of_the_manifest_is_one_sentence(folder, tmp_path_factory, drawn):
    content = bytearray((folder / "manifest.json").read_bytes())
    content[drawn.draw(st.integers(0, len(content) - 1))] ^= 1 << drawn.draw(st.integers(0, 7))
    place = tmp_path_factory.mktemp("x")
    (place / "manifest.json").write_bytes(content)
    before = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    said = ""
    try:
        assert read_published(tokens_data(place, place)).manifest == before  # white space
    except InputError as error:
        said = str(error)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "tokens", "filter": "len(text) > 3"}, "filter has no effect"),
        ({"format": "tokens", "text_field": "body"}, "text_field has no effect"),
        ({"format": "tokens", "records": "chat"}, "says more than"),
        ({"wait_s": 3.0}, "data.wait_s = 3.0 is of format"),
        ({"eval_sets": [{"name": "a", "source": "b", "format": "tokens"}]}, None),
    ],
)
def test_settings_that_dont_agree(settings, message):
    problem = mixture_problem(Data.parse(settings))
    assert (problem is None) == (message is None)
    assert message is None or message in problem


def test_blocks_are_those_of_the_checksums(folder):
    manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    sizes = [path.stat().st_size for path in sorted(folder.glob("tokens-0*.bin"))]
    assert sizes == [size for size in manifest.shard_bytes if size]
    assert manifest.num_blocks == sum(-(-size // BLOCK_BYTES) for size in sizes)
