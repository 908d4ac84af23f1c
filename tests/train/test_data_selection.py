"""Which documents of a source are kept (one process, small files)."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from paceline.config.errors import InputError
from paceline.config.job_sections import Data
from paceline.train.data import prepare, prepare_corpus
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
