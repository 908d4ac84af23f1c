"""Which documents of a source are kept (one process, small files)."""

import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from paceline.config.errors import InputError
from paceline.config.job_sections import Data
from paceline.train.data import parts, prepare, prepare_corpus
from paceline.train.data.duplicates import duplicates_of
from tests.train.test_data_prepare import all_tokens, documents_of

ROWS = [
    {"text": f"text {n} {'long ' * (n % 7)}", "language": ("en", "de")[n % 2], "meta": {"rank": n}}
    for n in range(60)
]


def source_of(folder, rows, kind="jsonl"):
    """A file of rows; the cache stands beside it, and bytes are tokens."""
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Data(source=str(path), tokenizer="bytes", cache_dir=str(folder / "cache"))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_are_kept_by_the_filter_and_the_others_counted(tmp_path, kind):
    filtered = 'len(text) > 20 and language == "en" and meta.rank < 50'
    data = source_of(tmp_path, ROWS, kind).replace(filter=filtered)
    kept = [
        row["text"]
        for row in ROWS
        if len(row["text"]) > 20 and row["language"] == "en" and row["meta"]["rank"] < 50
    ]
    prepared = prepare(data)
    assert 5 < len(kept) < 40
    assert sorted(documents_of(all_tokens(prepared))) == sorted(kept)
    assert prepared.meta.num_documents == len(kept)
    assert prepared.meta.num_filtered_out == 60 - len(kept)
    corpus = prepare_corpus(data)
    assert corpus.facts()["num_filtered_out"] == 60 - len(kept)
    assert list(corpus.left_out()) == [
        f"{len(kept)} documents of this data are kept, {60 - len(kept)} left out by the filter"
    ]


def test_another_filter_is_other_data(tmp_path):
    plain = source_of(tmp_path, ROWS)
    data = [plain.replace(filter=each) for each in (None, "meta.rank < 50", "meta.rank < 40")]
    assert len({prepare(each).meta.fingerprint for each in data}) == 3
    assert "num_filtered_out" not in prepare_corpus(plain).facts()


def test_a_mixture_filters_each_source_and_its_tokenizer_sees_what_is_kept(tmp_path):
    odd = [
        {"text": "qqqq qqqq " * 9, "ok": False},
        *({"text": r["text"], "ok": True} for r in ROWS),
    ]
    data = source_of(tmp_path, odd)
    mixture = {
        "tokenizer": "bpe:300",
        "cache_dir": data.cache_dir,
        "sources": [
            {"name": "a", "source": data.source, "filter": "ok"},
            {"name": "b", "source": data.source, "filter": "ok and len(text) > 20"},
        ],
    }
    corpus = prepare_corpus(Data.parse(mixture))
    facts = corpus.facts()
    left_out = [facts["sources"][name]["num_filtered_out"] for name in "ab"]
    assert left_out[0] == 1 < left_out[1]
    assert facts["num_filtered_out"] == sum(left_out)
    assert "qq" not in Tokenizer.from_file(str(corpus.tokenizer_path)).get_vocab()


def test_a_filter_that_does_not_fit_the_rows_is_one_sentence(tmp_path):
    data = source_of(tmp_path, ROWS)
    with pytest.raises(InputError, match=r'rows\.jsonl line 1: there is no "lang" for the filter'):
        prepare(data.replace(filter="lang == 'en'"))
    with pytest.raises(InputError, match="no text at all: name other files or another filter"):
        prepare(data.replace(filter="language == 'fr'"))
    with pytest.raises(InputError, match=r"which has no rows for data\.filter"):
        prepare(data.replace(format="text", filter="language == 'fr'"))
    columns = source_of(tmp_path, ROWS, "parquet")
    with pytest.raises(InputError, match=r'rows\.parquet row 0: there is no "lang" for the filter'):
        prepare(columns.replace(filter="lang == 'en'"))


def test_rows_without_a_text_can_be_left_out(tmp_path):
    rows = [{"text": "one"}, {"other": 1}, {"text": None}, {"text": "two"}]
    data = source_of(tmp_path, rows)
    with pytest.raises(InputError, match='line 2 has no key "text"'):
        prepare(data)
    data = data.replace(filter="get(text, None) is not None")
    assert sorted(documents_of(all_tokens(prepare(data)))) == ["one", "two"]


# --- duplicates


def test_of_equal_documents_the_first_is_kept(tmp_path):
    texts = ["One  two", "b", "one two\n", "b", "c", "ﬁve", "five", "one three", "c "]
    data = source_of(tmp_path, [{"text": text} for text in texts])
    data = data.replace(dedup={"method": "exact"})
    prepared = prepare(data)
    assert sorted(documents_of(all_tokens(prepared))) == ["One  two", "b", "c", "one three", "ﬁve"]
    assert (prepared.meta.num_documents, prepared.meta.num_duplicates) == (5, 4)
    assert prepare_corpus(data).facts()["num_duplicates"] == 4
    assert prepare(data.replace(dedup={})).meta.key != prepared.meta.key


def words(random, count):
    return [f"w{number}" for number in random.integers(0, 10**6, count)]


def near_rows():
    """Documents of 100 words, some of which share all but their last: similarity known."""
    random, rows, is_near = np.random.default_rng(0), [], []
    for _ in range(20):
        base = words(random, 104)
        for shared in (104, 103, 52):  # of 100 stretches: all, 99 (0.98), 48 (0.32)
            rows.append({"text": " ".join(base[:shared] + words(random, 104 - shared))})
            is_near.append(shared == 103)
    return rows, is_near


def test_near_duplicates_are_left_out_and_half_alike_ones_kept(tmp_path):
    rows, is_near = near_rows()
    data = source_of(tmp_path, rows).replace(dedup={"method": "near", "threshold": 0.7})
    prepared = prepare(data)
    kept = [row["text"] for row, gone in zip(rows, is_near, strict=True) if not gone]
    assert sorted(documents_of(all_tokens(prepared))) == sorted(kept)
    assert prepared.meta.num_duplicates == 20
    low = data.replace(dedup={"method": "near", "threshold": 0.1, "permutations": 256})
    assert prepare(low).meta.num_duplicates == 40


def test_short_documents_are_near_only_where_they_are_equal(tmp_path):
    data = source_of(tmp_path, [{"text": text} for text in ("a b", "A  b", "a c", "a b c", "a")])
    assert prepare(data.replace(dedup={"method": "near"})).meta.num_documents == 4


@pytest.mark.parametrize("method", ["exact", "near"])
def test_duplicates_do_not_depend_on_processes_or_parts(tmp_path, monkeypatch, method):
    rows, _ = near_rows()
    data = source_of(tmp_path, rows + rows[::2]).replace(
        filter="len(text) > 3", dedup={"method": method}
    )
    whole = prepare(data)
    monkeypatch.setattr(parts, "PART_BYTES", 3000)
    for cores in (1, 2):
        monkeypatch.setattr("paceline.train.data.build.num_cores", lambda: cores)  # noqa: B023
        cut = prepare(data.replace(cache_dir=str(tmp_path / f"{cores}")))
        assert len(cut.meta.shards) > 10
        assert np.array_equal(all_tokens(cut), all_tokens(whole))
        assert cut.meta.num_duplicates == whole.meta.num_duplicates >= 30


def test_long_texts_of_several_pieces_are_compared_whole(tmp_path):
    lines = [f"{n} " * 40 + "\n" for n in range(9000)]
    for name, text in {"a": lines, "b": [*lines[:-1], "end\n"], "c": lines}.items():
        (tmp_path / f"{name}.txt").write_text("".join(text))
    assert sum(map(len, lines)) > 2**20
    data = Data(source=str(tmp_path / "*.txt"), tokenizer="bytes", cache_dir=str(tmp_path / "c"))
    exact = prepare(data.replace(dedup={"method": "exact"})).meta
    near = prepare(data.replace(dedup={"method": "near"})).meta
    assert [(m.num_documents, m.num_duplicates) for m in (exact, near)] == [(2, 1), (1, 2)]


def test_a_damaged_list_of_duplicates_is_one_sentence(tmp_path):
    (tmp_path / "duplicates.npz").write_bytes(b"PK\x03\x04 no zip")
    with pytest.raises(InputError, match=r"duplicates\.npz is damaged"):
        duplicates_of(tmp_path, 0)


def test_near_without_its_library_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    data = source_of(tmp_path, ROWS).replace(dedup={"method": "near"})
    with pytest.raises(InputError, match=r'pip install "paceline\[dedup\]"'):
        prepare(data)
