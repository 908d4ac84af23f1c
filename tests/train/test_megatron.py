"""Megatron's indexed data sets: by the bytes of its format, hostile ones, and as a source."""

import struct
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.config.errors import InputError
from paceline.train.data import prepare, prepare_corpus
from paceline.train.data.megatron import read_documents, write_documents
from paceline.train.data.tokens_command import tokens_command
from tests.train.test_data_prepare import END, all_tokens, make_data, numbered

DOCUMENTS = [[0, 1, 2, 3, 4], [], [65_499, 7], [8]]


def as_lists(documents):
    return [each.tolist() for each in documents]


def index_of(lengths, places, documents, code=8, count=None, version=1, mark=b"MMIDIDX\0\0"):
    """An .idx, by the description of the format."""
    count = len(lengths) if count is None else count
    return (
        mark
        + struct.pack("<QBQQ", version, code, count, len(documents))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(places)}q", *places)
        + struct.pack(f"<{len(documents)}q", *documents)
    )


@pytest.mark.parametrize(("vocab_size", "code", "kind"), [(65_499, 8, "H"), (65_500, 4, "i")])
def test_what_is_written_has_the_bytes_of_the_format(tmp_path, vocab_size, code, kind):
    counts = write_documents(tmp_path / "a", map(np.array, DOCUMENTS), vocab_size)
    size = struct.calcsize(kind)
    places = [0, 5 * size, 5 * size, 7 * size]
    assert counts == (4, 8)
    assert (tmp_path / "a.bin").read_bytes() == struct.pack(f"<8{kind}", *chain(*DOCUMENTS))
    assert (tmp_path / "a.idx").read_bytes() == index_of(
        [5, 0, 2, 1], places, [0, 1, 2, 3, 4], code
    )
    assert as_lists(read_documents(tmp_path / "a.idx")) == DOCUMENTS
    assert {path.name for path in tmp_path.iterdir()} == {"a.bin", "a.idx"}


def test_documents_of_several_sequences_in_any_place_are_read(tmp_path):
    (tmp_path / "a.bin").write_bytes(struct.pack("<6i", 1, 2, 3, 4, 5, 6))
    modes = b"\0" * 3  # of sequences, which may follow
    index = index_of([2, 1, 3], [16, 0, 4], [0, 2, 3], code=4)
    (tmp_path / "a.idx").write_bytes(index + modes)
    assert as_lists(read_documents(tmp_path / "a.idx")) == [[5, 6, 1], [2, 3, 4]]


def test_megatron_reads_what_is_written_and_the_other_way_round(tmp_path):
    indexed = pytest.importorskip(
        "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed"
    )
    write_documents(tmp_path / "a", map(np.array, DOCUMENTS), 65_499)
    dataset = indexed.IndexedDataset(str(tmp_path / "a"))
    assert as_lists(dataset[n] for n in range(len(dataset))) == DOCUMENTS
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "b.bin"), dtype=np.int32)
    for document in ([[1, 2], [3]], [[4, 5]]):
        for sequence in document:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(str(tmp_path / "b.idx"))
    assert as_lists(read_documents(tmp_path / "b.idx")) == [[1, 2, 3], [4, 5]]


GOOD = ([2, 1], [0, 4], [0, 1, 2])


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (b"", "shorter than a header"),
        (index_of(*GOOD, mark=b"MMIDIDX\0\1"), "doesn't begin with MMIDIDX"),
        (index_of(*GOOD, version=2), "version 1"),
        (index_of(*GOOD, code=6), "type 6, which is no whole number's"),
        (index_of(*GOOD, code=200), "type 200"),
        (index_of(*GOOD, count=2**64 - 1), "too short for 18446744073709551615 sequences"),
        (index_of(*GOOD)[:-1], "too short for 2 sequences"),
        (index_of([2, 1], [0, 4], []), "don't hold all"),
        (index_of([2, 1], [0, 4], [0, 1, 3]), "don't hold all"),
        (index_of([2, 1], [0, 4], [0, 2**62, 2]), "document 0 can't be"),
        (index_of([2, 1], [0, 4], [0, -1, 2]), "document 0 can't be"),
        (index_of([-1, 1], *GOOD[1:]), "sequence 0 is not within"),
        (index_of([2, 2], *GOOD[1:]), "sequence 1 is not within"),
        (index_of([2, 1], [0, -2], GOOD[2]), "sequence 1 is not within"),
        (index_of([2, 1], [0, 3], GOOD[2]), "sequence 1 is not within"),
        (index_of([2, 1], [0, 2**63 - 2], GOOD[2]), "sequence 1 is not within"),
    ],
)
def test_a_hostile_index_is_one_sentence(tmp_path, index, reason):
    (tmp_path / "a.bin").write_bytes(b"\0" * 6)
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(InputError, match=reason) as refused:
        list(read_documents(tmp_path / "a.idx"))
    assert "\n" not in str(refused.value)


@settings(deadline=None, max_examples=200)
@given(at=st.integers(0, 10**6), by=st.integers(1, 255), cut=st.integers(0, 10**6))
@example(at=0, by=1, cut=0)
def test_damage_anywhere_is_a_sentence_or_other_tokens(tmp_path_factory, at, by, cut):
    folder = tmp_path_factory.mktemp("x")
    write_documents(folder / "a", map(np.array, DOCUMENTS), 65_499)
    content = bytearray((folder / "a.idx").read_bytes())
    content[at % len(content)] ^= by
    (folder / "a.idx").write_bytes(content[: len(content) - cut % len(content)])
    found = []
    try:
        found = list(read_documents(folder / "a.idx"))
    except InputError as error:
        found = [str(error)]
        assert "\n" not in found[0]
    assert found


# --- as a source, and as what a command writes


def test_the_splits_of_a_source_are_written_whole_and_read_back(tmp_path, capsys):
    data = make_data(tmp_path, [*numbered(60), ""], eval_fraction=0.2)
    tokens_command(data, tmp_path / "out" / "corpus", None, as_json=False)
    prepared = prepare(data)
    splits = [read_documents(tmp_path / f"out/corpus-{split}.idx") for split in ("train", "eval")]
    train, held_out = (list(split) for split in splits)
    assert np.array_equal(np.concatenate([*train, *held_out]), all_tokens(prepared))
    assert sum(map(len, train)) == prepared.meta.train_tokens
    assert f"{prepared.meta.train_tokens:,} tokens of {len(train)} documents" in (
        capsys.readouterr().out
    )
    again = prepare(make_data(tmp_path, [], source=str(tmp_path / "out"), eval_fraction=0.2))
    documents = [each.tolist() for each in (*train, *held_out)]
    found = np.split(all_tokens(again), np.flatnonzero(all_tokens(again) == END) + 1)[:-1]
    # A document that the cut went through is two, of which the first had no end.
    ended = [each if each[-1] == END else [*each, END] for each in documents]
    assert sorted(as_lists(found)) == sorted(ended)
    assert again.meta.num_documents == len(documents)


def test_it_is_a_source_of_a_mixture(tmp_path):
    write_documents(tmp_path / "given", (np.full(40, n) for n in range(5)), 257)
    (tmp_path / "own.txt").write_text("some text of one's own " * 20)
    sources = [
        {"name": name, "source": str(tmp_path / place), "weight": 1.0}
        for name, place in (("given", "given.idx"), ("own", "own.txt"))
    ]
    data = make_data(tmp_path, [])
    data = type(data).model_validate({**data.model_dump(), "sources": sources})
    corpus = prepare_corpus(data)
    assert corpus.sources["given"].meta.num_documents == 5
    assert sorted({*all_tokens(corpus.sources["given"]).tolist()}) == [0, 1, 2, 3, 4, END]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"tokenizer": "bpe:300"}, "holds tokens, on which no BPE is trained"),
        ({"records": "chat"}, "is read as megatron, which has no rows"),
        ({"filter": "len(text) > 3"}, r"have no fields for data\.filter"),
        ({"dedup": {"method": "exact"}}, "holds tokens, and texts are needed here"),
        ({}, "document 1 has tokens that data.tokenizer hasn't, which knows those below 257"),
    ],
)
def test_what_a_source_of_tokens_cannot_be(tmp_path, changed, reason):
    write_documents(tmp_path / "a", iter([np.arange(9), np.array([300])]), 1000)
    data = make_data(tmp_path, [], source=str(tmp_path / "a.idx"), **changed)
    with pytest.raises(InputError, match=reason):
        prepare(data)


def test_without_its_tokens_an_index_is_refused(tmp_path):
    write_documents(tmp_path / "a", iter([np.arange(9)]), 1000)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(InputError, match=r"a\.bin can't be read"):
        list(read_documents(tmp_path / "a.idx"))
    with pytest.raises(InputError, match=r"a\.bin can't be read"):
        prepare(make_data(tmp_path, [], source=str(tmp_path / "a.idx")))


def test_tokens_that_change_are_read_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.train.data.cache._SETTLED_NS", 0)
    data = make_data(tmp_path, [], source=str(tmp_path / "a.idx"))
    found = []
    for token in (5, 6):
        write_documents(tmp_path / "a", iter([np.full(9, token)]), 257)
        found.append(all_tokens(prepare(data)).tolist())
    assert found == [[5] * 9 + [END], [6] * 9 + [END]]
