"""Finding files, reading documents, making tokenizers (one process, small files in a folder)."""

import gzip
import json
import sys
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from paceline.config.errors import InputError
from paceline.config.job_sections import Data
from paceline.train.data import check_vocab, documents
from paceline.train.data.build import training_texts
from paceline.train.data.documents import read_pieces
from paceline.train.data.files import SourceFile, find_files, stdlib_files
from paceline.train.data.tokenizer import make_encoder, tokenizer_identity

TEXTS = ["first text", "zweiter Text: äöü", "", "four\nlines\n\nof text 🙂"]


def read_all(data):
    """Every document of a source, its pieces joined."""
    found, text = [], ""
    for file in find_files(data):
        for piece in read_pieces(file, data.text_field):
            text += piece.text
            if piece.ends_document:
                found.append(text)
                text = ""
    assert text == ""
    return found


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def jsonl(texts, key="text"):
    return "".join(json.dumps({key: text}) + "\n" for text in texts)


# --- which files


def test_the_stdlib_is_sorted_source_without_tests_and_packages():
    paths = stdlib_files()
    top = sysconfig.get_path("stdlib")
    names = [path.relative_to(top).as_posix() for path in paths]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests", "idlelib", "__pycache__"}
    for path in paths:
        path.read_text("utf-8")


def test_a_stdlib_without_sources_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"needs the \.py files"):
        stdlib_files(str(tmp_path))


def test_files_folders_and_globs_keep_their_order_and_come_once(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.jsonl", ".hidden", "sub/.git/x"):
        write(tmp_path / name, "x")
    names = (str(tmp_path / "b.txt"), str(tmp_path / "*.txt"), str(tmp_path))
    found = [(f.path.name, f.format) for f in find_files(Data(source=names))]
    assert found == [("b.txt", "text"), ("a.txt", "text"), ("c.jsonl", "jsonl")]


def test_the_suffix_tells_the_format_unless_it_is_given(tmp_path):
    formats = {"a.jsonl.gz": "jsonl", "a.PARQUET": "parquet", "a.py": "text", "README": "text"}
    for name, format in formats.items():
        path = write(tmp_path / name, "x")
        assert find_files(Data(source=path)) == [SourceFile(Path(path), format)]
    path = write(tmp_path / "a.json", "x")
    assert find_files(Data(source=path, format="jsonl"))[0].format == "jsonl"
    with pytest.raises(InputError, match=r"set data\.format"):
        find_files(Data(source=path))


@pytest.mark.parametrize(
    ("source", "message"),
    [("missing.txt", "names no file"), ("none/*.txt", "names no file"), ((), "is empty")],
)
def test_a_source_without_files_is_refused(source, message):
    with pytest.raises(InputError, match=message):
        find_files(Data(source=source))


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="a folder without files"):
        find_files(Data(source=str(tmp_path)))


# --- documents


def test_text_is_read_exactly_whatever_the_size_of_pieces(tmp_path, monkeypatch):
    content = "\ufeffone\r\ntwo\n\n" + "long" * 20 + "\nlast"
    path = write(tmp_path / "a.txt", content)
    for chars in (1, 5, 7, 1000):
        monkeypatch.setattr(documents, "PIECE_CHARS", chars)
        assert read_all(Data(source=path)) == [content[1:]]


def test_large_text_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_CHARS", 10)
    path = write(tmp_path / "a.txt", "line\n" * 20)
    pieces = list(read_pieces(SourceFile(Path(path), "text"), "text"))
    assert len(pieces) > 5
    assert all(piece.text.endswith("\n") and len(piece.text) < 20 for piece in pieces)
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].read_bytes == 100


def test_a_line_without_end_is_cut_too(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_CHARS", 10)
    path = write(tmp_path / "a.txt", "x" * 100)
    pieces = list(read_pieces(SourceFile(Path(path), "text"), "text"))
    assert [len(piece.text) for piece in pieces] == [10] * 10


def test_an_empty_file_is_an_empty_document(tmp_path):
    names = write(tmp_path / "a.txt", ""), write(tmp_path / "b.jsonl", "")
    assert read_all(Data(source=names)) == [""]


def test_json_lines(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl(TEXTS, "body") + "\n")
    assert read_all(Data(source=path, text_field="body")) == TEXTS


def test_gzip(tmp_path):
    line, text = gzip.compress(jsonl(TEXTS).encode()), gzip.compress(TEXTS[1].encode())
    names = write(tmp_path / "a.jsonl.gz", line), write(tmp_path / "b.txt.gz", text)
    assert read_all(Data(source=names)) == [*TEXTS, TEXTS[1]]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),  # polars writes it
        pa.dictionary(pa.int32(), pa.string()),  # a category of pandas
    ],
)
def test_parquet_and_both_arrow_formats(tmp_path, kind):
    table = pa.table({"n": [1, 2, 3, 4], "body": pa.array(TEXTS, kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    with pa.ipc.new_stream(tmp_path / "b.arrow", table.schema) as stream:
        stream.write_table(table)
    with pa.ipc.new_file(tmp_path / "c.arrow", table.schema) as file:
        file.write_table(table)
    assert read_all(Data(source=str(tmp_path), text_field="body")) == TEXTS * 3


def test_a_dataset_directory_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    train = datasets.Dataset.from_dict({"text": TEXTS})
    train.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict(train=train, test=train.select([0])).save_to_disk(tmp_path / "two")
    datasets.DatasetDict(dev=train).save_to_disk(tmp_path / "three")
    assert read_all(Data(source=str(tmp_path / "one"))) == TEXTS
    assert read_all(Data(source=str(tmp_path / "two"), format="arrow")) == TEXTS
    with pytest.raises(InputError, match='splits dev but not "train"'):
        find_files(Data(source=str(tmp_path / "three")))
    with pytest.raises(InputError, match=r"no state\.json"):
        find_files(Data(source=str(tmp_path), format="arrow"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"ab\xff", "is not UTF-8"),
        ("a.jsonl", b'{"text": "\xff"}', "is not UTF-8"),
        ("a.jsonl", jsonl(["x"]) + "{", "line 2 is not JSON"),
        ("a.jsonl", "[1]", "line 1 is not a JSON object"),
        ("a.jsonl", jsonl(["x"], "body"), 'line 1 has no key "text" but "body"'),
        ("a.jsonl", jsonl(["x", None]), 'line 2: "text" holds None'),
        ("a.jsonl", r'{"text": "\ud800"}', "line 1 holds half a surrogate"),
        ("a.jsonl", '{"text": ' + "[" * 200_000, "line 1 is not JSON"),
        ("a.jsonl", '{"text": ' + "1" * 5000 + "}", "line 1 is not JSON"),
        ("a.txt.gz", b"plain", "can't be read"),
        ("a.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:-9], "can't be read"),
        ("a.parquet", b"plain", "can't be read as parquet"),
        ("a.arrow", b"plain text", "can't be read as arrow"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(InputError, match=message) as caught:
        read_all(Data(source=path))
    assert str(caught.value).startswith(path)


def test_a_wrong_column_is_named(tmp_path):
    pq.write_table(pa.table({"n": [1], "body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match='no column "text" but "n", "body"'):
        read_all(Data(source=str(tmp_path)))
    with pytest.raises(InputError, match='"n" is int64, not string'):
        read_all(Data(source=str(tmp_path), text_field="n"))
    pq.write_table(pa.table({"body": ["x", None]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match='row 1: "body" holds None'):
        read_all(Data(source=str(tmp_path), text_field="body"))
    pq.write_table(pa.table([["x"], ["y"]], ["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(InputError, match='2 columns "text"'):
        read_all(Data(source=str(tmp_path)))


def test_offsets_of_a_damaged_arrow_file_are_not_followed(tmp_path):
    path = tmp_path / "a.arrow"
    table = pa.table({"text": TEXTS})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)
    offsets = table["text"].chunk(0).buffers()[1].to_pybytes()
    assert path.read_bytes().count(offsets) == 1
    path.write_bytes(path.read_bytes().replace(offsets, offsets[:-4] + b"\xff\xff\xff\x7f"))
    with pytest.raises(InputError, match="can't be read as arrow"):
        read_all(Data(source=str(path)))


def test_without_pyarrow_the_command_to_install_it_is_given(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", "x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r'pip install "paceline\[arrow\]"'):
        read_all(Data(source=path))


# --- tokenizers

STDLIB_TEXT = [path.read_text("utf-8") for path in stdlib_files()[:20]]


@pytest.fixture(scope="module")
def bpe():
    return make_encoder("bpe:500", STDLIB_TEXT)


@given(st.text())
def test_bpe_and_bytes_round_trip_any_text(text):
    for encoder in (make_encoder("bytes", []), make_encoder("bpe:300", ["some text"])):
        (ids,) = encoder.encode([text])
        assert encoder.tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text


def test_bytes_are_their_own_ids():
    encoder = make_encoder("bytes", [])
    text = "".join(map(chr, range(0x250))) + "🙂<|endoftext|>"
    (ids,) = encoder.encode([text])
    assert bytes(ids.tolist()) == text.encode()
    assert encoder.tokenizer.encode(text).ids == ids.tolist()
    assert (encoder.vocab_size, encoder.end_of_document) == (257, 256)


def test_bpe_is_trained_the_same_way_every_time(bpe):
    again = make_encoder("bpe:500", STDLIB_TEXT)
    assert bpe.vocab_size == 500
    assert again.tokenizer.to_str() == bpe.tokenizer.to_str()
    assert len(bpe.encode(STDLIB_TEXT[:1])[0]) < 0.6 * len(STDLIB_TEXT[0])


def test_text_never_becomes_the_end_of_a_document(bpe):
    for encoder in (bpe, make_encoder("bytes", [])):
        (ids,) = encoder.encode(["a<|endoftext|>b"])
        assert encoder.end_of_document not in ids


def test_a_bpe_is_trained_on_a_bounded_sample_of_each_file(tmp_path, monkeypatch):
    paths = write(tmp_path / "a.txt", "a" * 300), write(tmp_path / "b.txt", "b" * 100)
    monkeypatch.setattr(documents, "PIECE_CHARS", 50)
    texts = list(training_texts(find_files(Data(source=paths)), Data(), num_chars=100))
    assert texts == ["a" * 50, "a" * 25, "b" * 25]


def test_a_given_tokenizer_is_used_without_its_truncation(bpe, tmp_path):
    given = Tokenizer.from_str(bpe.tokenizer.to_str())
    given.enable_truncation(3)
    given.enable_padding(length=10**5)
    given.save(str(tmp_path / "tokenizer.json"))
    for spec in (str(tmp_path), str(tmp_path / "tokenizer.json")):
        encoder = make_encoder(spec, [])
        assert (
            encoder.encode(STDLIB_TEXT[:1])[0].tolist() == bpe.encode(STDLIB_TEXT[:1])[0].tolist()
        )
        assert encoder.end_of_document == bpe.end_of_document
        assert tokenizer_identity(spec) == tokenizer_identity(str(tmp_path))


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "t.json"))
    with pytest.raises(InputError, match="no token to end a document"):
        make_encoder(str(tmp_path / "t.json"), [])


@pytest.mark.parametrize("spec", ["bpe:", "bpe:256", "bpe:x", "bpe:-300"])
def test_a_wrong_size_of_bpe_is_refused(spec):
    with pytest.raises(InputError, match="at least 257"):
        tokenizer_identity(spec)


def test_a_wrong_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match="is no file"):
        tokenizer_identity("byte")
    path = write(tmp_path / "tokenizer.json", "{}")
    with pytest.raises(InputError, match=r"can't be read as a tokenizer\.json"):
        make_encoder(path, [])


def test_the_model_needs_a_row_for_every_token():
    check_vocab(257, 257)
    check_vocab(257, 320)
    with pytest.raises(InputError, match=r"256 is smaller than the tokenizer's 257"):
        check_vocab(257, 256)
