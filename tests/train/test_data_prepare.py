"""Tokenising once, and reading windows of the tokens (one process; then two ranks at once)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from paceline.config.errors import InputError
from paceline.config.job_sections import Data
from paceline.train.data import build, cache, open_prepared, parts, prepare
from paceline.train.data.build import unigram_entropy, unigram_loss
from paceline.train.data.parts import is_held_out
from tests.ranks import run_ranks

END = 256


def make_data(folder, texts, name="source.jsonl", **settings):
    """A source of documents in a folder, which is the cache as well; bytes as tokens."""
    path = folder / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Data(
        **{"source": str(path), "tokenizer": "bytes", "cache_dir": str(folder / "cache")} | settings
    )


def numbered(count, length=50):
    return [f"{n} " * (length // len(f"{n} ")) for n in range(count)]


def all_tokens(prepared):
    """The whole stream, by an independent reader of the files."""
    paths = sorted(prepared.folder.glob("tokens-0*.bin"))
    return np.concatenate([np.fromfile(path, prepared.meta.dtype) for path in paths]).astype(int)


def documents_of(tokens):
    """Cut tokens after each end of a document and decode the bytes between."""
    ends = np.flatnonzero(tokens == END)
    assert ends[-1] == len(tokens) - 1
    return [bytes(part[part != END].tolist()).decode() for part in np.split(tokens, ends + 1)[:-1]]


@pytest.fixture
def builds(monkeypatch):
    """Count the builds of this process."""
    count = []
    original = build.build

    def counted(*args):
        count.append(1)
        return original(*args)

    monkeypatch.setitem(cache._BUILDERS, "text", counted)
    return count


# --- figures


def test_unigram_figures_are_those_of_the_definition():
    train, held_out = np.array([6, 2, 0]), np.array([1, 0, 3])
    shares = np.array([7, 3, 1]) / 11
    assert unigram_loss(train, held_out) == pytest.approx(-np.log(shares)[[0, 2, 2, 2]].mean())
    assert unigram_entropy(train) == pytest.approx(-0.75 * np.log(0.75) - 0.25 * np.log(0.25))
    assert unigram_entropy(np.full(8, 5)) == pytest.approx(np.log(8))


# --- what is written


def test_every_document_is_kept_with_its_end(tmp_path):
    texts = [*numbered(300), "", "äöü 🙂", "<|endoftext|>"]
    prepared = prepare(make_data(tmp_path, texts, eval_fraction=0.1))
    meta, kept = prepared.meta, [text for text in texts if text]
    assert sorted(documents_of(all_tokens(prepared))) == sorted(kept)
    assert (meta.num_documents, meta.num_empty_documents) == (302, 1)
    assert meta.text_bytes == sum(len(text.encode()) for text in kept)
    assert meta.train_tokens + meta.eval_tokens == meta.text_bytes + 302
    assert Tokenizer.from_file(str(prepared.tokenizer_path)).decode([104, 105]) == "hi"


def test_documents_move_to_the_held_out_end_by_their_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_READ_AT_ONCE", 100)
    texts = numbered(300) * 2
    prepared = prepare(make_data(tmp_path, texts, eval_fraction=0.2))
    moved = [text for text in texts if is_held_out(text.encode(), 0.2)]
    assert 60 < len(moved) < 180
    stayed = [text for text in texts if text not in moved]
    assert documents_of(all_tokens(prepared)) == stayed + moved
    starts = np.fromfile(prepared.folder / "tokens-documents.bin", "<i8")
    ends = np.flatnonzero(all_tokens(prepared) == END)
    assert starts.tolist() == [0, *(ends[:-1] + 1)]


def test_the_held_out_share_is_exact_and_its_loss_that_of_a_unigram_model(tmp_path):
    prepared = prepare(make_data(tmp_path, numbered(300), eval_fraction=0.2))
    tokens, meta = all_tokens(prepared), prepared.meta
    assert meta.eval_tokens == int(0.2 * len(tokens))
    train, held_out = np.split(tokens, [meta.train_tokens])
    counts = np.bincount(train, minlength=257)
    assert meta.unigram_entropy == pytest.approx(unigram_entropy(counts))
    assert meta.unigram_loss == pytest.approx(
        -np.log((counts + 1) / (len(train) + 257))[held_out].mean()
    )


@pytest.mark.parametrize("texts", [["x"], ["one document " * 50]])
def test_a_single_document_has_a_held_out_tail(tmp_path, texts):
    prepared = prepare(make_data(tmp_path, texts))
    assert documents_of(all_tokens(prepared)) == texts
    assert prepared.meta.eval_tokens == max(1, int(0.01 * (len(texts[0]) + 1)))


def test_small_data_has_a_sample_to_train_on_and_one_held_out(tmp_path):
    prepared = prepare(make_data(tmp_path, numbered(40), eval_fraction=0.01))
    tokens = all_tokens(prepared)
    assert prepared.meta.eval_tokens < 65
    cut = prepared.for_samples(64)
    assert cut.dataset("eval").num_samples(64) == 1
    assert cut.dataset("eval").gather(np.array([0]), 64).tolist() == [tokens[-65:].tolist()]
    assert cut.meta.train_tokens == len(tokens) - 65
    train = np.bincount(tokens[:-65], minlength=257)
    held_out = np.bincount(tokens[-65:], minlength=257)
    assert cut.meta.unigram_loss == pytest.approx(unigram_loss(train, held_out))
    assert cut.meta.fingerprint == prepared.meta.fingerprint
    longest = len(tokens) // 2 - 1
    halves = prepared.for_samples(longest)
    assert [halves.dataset(name).num_samples(longest) for name in ("train", "eval")] == [1, 1]
    with pytest.raises(InputError, match=f"use at most {longest}, or more data"):
        prepared.for_samples(longest + 1)
    assert prepared.for_samples(prepared.meta.eval_tokens - 1) is prepared


def test_pieces_of_a_large_text_are_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.train.data.documents.PIECE_CHARS", 100)
    monkeypatch.setattr(parts, "_BATCH_CHARS", 250)
    texts = [f"line {n} of {name}\n" * n for name in "abc" for n in (1, 90)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    data = make_data(tmp_path, [], source=str(tmp_path / "*.txt"), eval_fraction=0.4)
    prepared = prepare(data)
    assert sorted(documents_of(all_tokens(prepared))) == sorted(texts)
    assert prepared.meta.num_documents == 6


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 70_000, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(tmp_path / "words.json"))
    data = make_data(tmp_path, ["a b", "b"], tokenizer=str(tmp_path / "words.json"))
    prepared = prepare(data)
    end = tokenizer.token_to_id("</s>")
    assert (prepared.meta.dtype, prepared.meta.end_of_document) == ("uint32", end)
    assert all_tokens(prepared).tolist() == [0, 70_000, end, 70_000, end]


def test_the_standard_library_is_tokenised_the_same_way_twice(tmp_path):
    part = str(Path(json.__file__).parent / "*.py")
    for source, tokenizer in (("python-stdlib", "bytes"), (part, "bpe:300")):
        one, other = (
            prepare(Data(source=source, tokenizer=tokenizer, cache_dir=str(tmp_path / name)))
            for name in "ab"
        )
        assert one.meta == other.meta
        assert 0 < one.meta.unigram_loss < np.log(one.meta.vocab_size)
        assert (one.meta.num_documents > 300) == (source == "python-stdlib")


# --- once


def test_progress_reaches_the_size_of_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_BATCH_CHARS", 500)
    seen = []
    names = tuple(make_data(tmp_path, numbered(100), name=name).source for name in "ab")
    data = make_data(tmp_path, [], source=names, format="jsonl")
    prepare(data, lambda done, total: seen.append((done, total)))
    size = sum(Path(name).stat().st_size for name in names)
    assert seen[0] == (0, size)
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)
    assert len({done for done, _ in seen}) > 5
    prepare(data, pytest.fail)


def test_a_second_start_reads_nothing(tmp_path, monkeypatch, builds):
    monkeypatch.setattr("paceline.train.data.cache._SETTLED_NS", 0)
    data = make_data(tmp_path, numbered(10))
    first = prepare(data)
    monkeypatch.setattr("paceline.train.data.cache._file_hash", pytest.fail)
    assert prepare(data) == first
    assert len(builds) == 1


def test_a_file_that_changed_a_moment_ago_is_hashed_again(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.train.data.cache._SETTLED_NS", 10**12)
    prepare(make_data(tmp_path, numbered(10)))
    assert not list(tmp_path.glob("cache/data/*.source"))


def test_whatever_tokens_depend_on_makes_another_folder(tmp_path, builds):
    texts = numbered(10)
    folders = {
        prepare(make_data(tmp_path, texts)).folder,
        prepare(make_data(tmp_path, [*texts, "more"])).folder,
        prepare(make_data(tmp_path, texts, tokenizer="bpe:260")).folder,
        prepare(make_data(tmp_path, texts, eval_fraction=0.3)).folder,
        prepare(make_data(tmp_path, texts, format="text")).folder,
    }
    assert len(folders) == len(builds) == 5


def test_how_each_file_is_read_makes_another_folder(tmp_path):
    names = tuple(make_data(tmp_path, ["x"], name=name).source for name in ("a.txt", "b.jsonl"))
    data = make_data(tmp_path, ["y"], source=names)
    assert prepare(data).folder != prepare(data.replace(format="jsonl")).folder


def test_the_same_contents_elsewhere_are_not_tokenised_again(tmp_path, builds):
    prepare(make_data(tmp_path, numbered(10)))
    prepare(make_data(tmp_path, numbered(10), name="copy.jsonl"))
    assert len(builds) == 1


class CrashError(Exception):
    pass


def test_a_failed_build_is_absent(tmp_path):
    def crash(done, total):
        if done:
            raise CrashError

    data = make_data(tmp_path, numbered(10))
    with pytest.raises(CrashError):
        prepare(data, crash)
    assert not list((tmp_path / "cache/data").glob("*/meta.json"))
    assert prepare(data).meta.num_documents == 10


def test_what_a_killed_build_left_is_replaced(tmp_path):
    data = make_data(tmp_path, numbered(10))
    key = prepare(make_data(tmp_path, numbered(10), cache_dir=str(tmp_path / "other"))).meta.key
    leftover = tmp_path / "cache/data" / f"{key}.partial"
    leftover.mkdir(parents=True)
    (leftover / "tokens-00000.bin").write_bytes(b"half a shard")
    prepared = prepare(data)
    assert len(documents_of(all_tokens(prepared))) == 10
    assert not leftover.exists()


def test_a_source_that_changes_meanwhile_is_refused(tmp_path):
    data = make_data(tmp_path, numbered(10))

    def change(done, total):
        if done:
            make_data(tmp_path, numbered(11))

    with pytest.raises(InputError, match="changed while it was tokenised"):
        prepare(data, change)


def test_a_file_that_is_listed_but_missing_is_named(tmp_path):
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    with pytest.raises(InputError, match=r"data-0\.arrow can't be read \(No such file"):
        prepare(make_data(tmp_path, ["x"], source=str(tmp_path)))


@pytest.mark.parametrize("texts", [[], ["", ""]])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_a_source_without_text_is_refused(tmp_path, texts, tokenizer):
    with pytest.raises(InputError, match="no text at all"):
        prepare(make_data(tmp_path, texts, tokenizer=tokenizer))


def test_a_cache_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"set data\.cache_dir"):
        prepare(make_data(tmp_path, ["x"], cache_dir=str(tmp_path / "file")))


def _prepare_together(rank, world_size, data):
    calls = []
    dist.barrier()
    prepared = prepare(data, lambda done, total: calls.append(done))
    return len(calls), prepared.meta


def test_two_jobs_at_once_build_once(tmp_path):
    data = make_data(tmp_path, numbered(2000), tokenizer="bpe:1000")
    (calls, meta), (other_calls, other_meta) = run_ranks(_prepare_together, 2, data)
    assert meta == other_meta
    assert min(calls, other_calls) == 0 < max(calls, other_calls)


# --- reading


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Twenty shards; documents of 1 to 60 tokens."""
    original, parts.PART_BYTES = parts.PART_BYTES, 800
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(40, 120, n))) for n in rng.integers(1, 60, 330)]
    folder = tmp_path_factory.mktemp("read")
    try:
        return prepare(make_data(folder, texts, eval_fraction=0.2))
    finally:
        parts.PART_BYTES = original


def test_shards_have_a_bounded_size(prepared):
    sizes = [path.stat().st_size for path in sorted(prepared.folder.glob("tokens-0*.bin"))]
    assert sizes == [2 * size for size in prepared.meta.shards]
    assert len([size for size in sizes if size]) > 25
    assert max(sizes) <= 2 * 800


@settings(deadline=None)
@given(st.integers(1, 700), st.sampled_from(["train", "eval"]))
def test_samples_are_consecutive_windows_of_the_split(prepared, seq_len, split):
    meta, dataset = prepared.meta, prepared.dataset(split)
    parts = np.split(all_tokens(prepared), [meta.train_tokens])
    tokens = parts[0] if split == "train" else parts[1]
    count = dataset.num_samples(seq_len)
    assert count == (len(tokens) - 1) // seq_len
    samples = dataset.gather(np.arange(count), seq_len)
    dataset.will_need(np.arange(count), seq_len)
    assert samples.shape == (count, seq_len + 1)
    assert samples.dtype == meta.dtype
    assert np.array_equal(samples[:, :-1].ravel(), tokens[: count * seq_len])
    assert np.array_equal(samples[:, 1:].ravel(), tokens[1 : count * seq_len + 1])


@settings(deadline=None)
@given(st.integers(1, 700), st.sampled_from(["train", "eval"]))
def test_document_ids_count_the_ends_before(prepared, seq_len, split):
    dataset = prepared.dataset(split)
    numbers = np.cumsum(all_tokens(prepared) == END)
    numbers = np.split(np.concatenate([[0], numbers[:-1]]), [prepared.meta.train_tokens])
    ids = np.arange(dataset.num_samples(seq_len))
    expected = (numbers[0] if split == "train" else numbers[1])[: len(ids) * seq_len]
    assert np.array_equal(dataset.document_ids(ids, seq_len).ravel(), expected)
    assert np.array_equal(dataset.document_ids(ids[-1:], seq_len).ravel(), expected[-seq_len:])


def test_a_sequence_longer_than_the_data_is_refused(prepared):
    for split in ("train", "eval"):
        dataset = prepared.dataset(split)
        longest = dataset.num_tokens - 1
        assert dataset.num_samples(longest) == 1
        with pytest.raises(InputError, match=f'"{split}" split .* use at most {longest}'):
            dataset.num_samples(longest + 1)


def test_a_sample_out_of_range_is_refused(prepared):
    dataset = prepared.dataset("train")
    count = dataset.num_samples(10)
    for wrong in (-1, count):
        with pytest.raises(IndexError, match=f"of {count} samples"):
            dataset.gather(np.array([0, wrong]), 10)


def test_a_damaged_folder_is_refused(tmp_path):
    prepared = prepare(make_data(tmp_path, numbered(10)))
    with (prepared.folder / "tokens-00000.bin").open("ab") as file:
        file.write(b"xx")
    with pytest.raises(InputError, match="missing or damaged"):
        prepared.tokens("train")
    (prepared.folder / "tokens-documents.bin").unlink()
    with pytest.raises(InputError, match="missing or damaged"):
        prepared.tokens("train")
    (prepared.folder / "meta.json").write_text('{"format_version": 0}')
    with pytest.raises(InputError, match="not written by this version"):
        open_prepared(prepared.folder)
    with pytest.raises(InputError, match="holds no tokenised data"):
        open_prepared(tmp_path)
