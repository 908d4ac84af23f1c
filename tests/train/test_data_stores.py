"""Sources in stores, tar files and shards of MDS (moto and http.server on loopback)."""

import functools
import gzip
import http.server
import io
import json
import re
import struct
import sys
import tarfile
import threading
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.errors import InputError
from paceline.config.job_sections import Data
from paceline.train.data import prepare
from paceline.train.data.documents import read_pieces, read_rows
from paceline.train.data.files import find_files
from tests.train.test_data_prepare import all_tokens, documents_of, numbered
from tests.train.test_data_sources import TEXTS, jsonl, read_all, write


def tar_of(files):
    """A tar of files, each (name, content)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def mds_of(rows, columns):
    """A shard after the format's description: columns are (name, encoding, fixed size or None)."""
    names, encodings, sizes = map(list, zip(*columns, strict=True))
    about = {"column_names": names, "column_encodings": encodings, "column_sizes": sizes}
    header = json.dumps({**about, "format": "mds", "version": 2}).encode()
    samples = []
    for row in rows:
        lengths = [len(v) for v, size in zip(row, sizes, strict=True) if size is None]
        samples.append(struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(row))
    at = 4 * (len(rows) + 2) + len(header)
    ends = [at]
    for sample in samples:
        ends.append(ends[-1] + len(sample))
    return struct.pack(f"<{len(rows) + 2}I", len(rows), *ends) + header + b"".join(samples)


MDS = mds_of(
    [(bytes(8), text.encode(), b"{}") for text in TEXTS],
    [("n", "int", 8), ("text", "str", None), ("more", "json", None)],
)
TAR = tar_of(
    [
        ("a/0.json", json.dumps({"text": TEXTS[0]}).encode()),
        ("a/0.seg.jpg", b"\xff\xd8"),
        ("a/1.jpg", b"\xff\xd8"),
        ("a/1.txt", TEXTS[1].encode()),
        ("a/2.txt", b""),
        ("a/3.txt", b"only where the object has no text"),
        ("a/3.json", json.dumps({"text": TEXTS[3]}).encode()),
    ]
)


# --- formats


def test_webdataset_and_mds(tmp_path):
    for name, content in (("a.tar", TAR), ("b.tar.gz", gzip.compress(TAR)), ("c.mds", MDS)):
        assert read_all(Data(source=write(tmp_path / name, content))) == TEXTS
        assert len(list(read_rows(find_files(Data(source=str(tmp_path / name)))[0], ()))) == 4


def test_zstd(tmp_path):
    for name, content in (
        ("a.jsonl.zst", jsonl(TEXTS)),
        ("b.txt.zst", TEXTS[1]),
        ("c.mds.zstd", MDS),
    ):
        with pa.CompressedOutputStream(str(tmp_path / name), "zstd") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
    assert read_all(Data(source=str(tmp_path / "a.jsonl.zst"))) == TEXTS
    assert read_all(Data(source=str(tmp_path / "b.txt.zst"))) == [TEXTS[1]]
    assert read_all(Data(source=str(tmp_path))) == TEXTS  # a folder of shards
    cut = (tmp_path / "a.jsonl.zst").read_bytes()[:-9]
    with pytest.raises(InputError, match="can't be read"):
        read_all(Data(source=write(tmp_path / "cut.jsonl.zst", cut)))


def test_a_shard_of_the_library_itself(tmp_path):
    streaming = pytest.importorskip("streaming", reason="mosaicml-streaming is not installed")
    columns = {"text": "str", "n": "int", "tokens": "ndarray:int32"}
    with streaming.MDSWriter(out=str(tmp_path), columns=columns, size_limit=200) as writer:
        for n, text in enumerate(TEXTS):
            writer.write({"text": text, "n": n, "tokens": np.arange(n + 1, dtype="i4")})
    assert len(list(tmp_path.glob("*.mds"))) > 1
    assert read_all(Data(source=str(tmp_path))) == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tar", b"", "can't be read as a tar"),
        ("a.tar", b"plain" * 500, "can't be read as a tar"),
        ("a.tar", TAR[:1600], "can't be read as a tar"),
        ("a.tar", TAR[:1024] + b"\x01" * 512 + TAR[1536:], "can't be read as a tar"),
        ("a.tar", tar_of([("0.json", b"[1]")]), "not a JSON object"),
        ("a.tar", tar_of([("0.txt", b"\xff")]), "not UTF-8"),
        ("a.tar", tar_of([("0.json", b'{"n": 1}')]), 'sample 0 has no key "text" but "n"'),
        ("a.mds", b"", "is damaged"),
        ("a.mds", b"\xff" * 4, "is damaged"),
        ("a.mds", MDS[:-1], "is damaged"),
        ("a.mds", MDS.replace(b"column_names", b"column_nam3s"), "is damaged"),
        ("a.mds", mds_of([(b"\x80",)], [("text", "pkl", None)]), 'no key "text" but none'),
    ],
)
def test_a_damaged_shard_is_named(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(InputError, match=message) as caught:
        read_all(Data(source=path))
    assert str(caught.value).startswith(path)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["tar", "mds"]), st.data())
def test_damage_is_one_sentence_or_harmless(tmp_path_factory, kind, drawn):
    content = bytearray(TAR if kind == "tar" else MDS)
    content[drawn.draw(st.integers(0, len(content) - 1))] ^= drawn.draw(st.integers(1, 255))
    path = write(tmp_path_factory.mktemp("x") / f"a.{kind}", bytes(content))
    said = ""
    try:
        read_all(Data(source=path))
    except InputError as error:
        said = str(error)
    assert "\n" not in said


# --- folders as the Hub lays them out


def test_a_folder_of_the_hub_means_its_train_files(tmp_path):
    write(tmp_path / "README.md", "---\nlicense: mit\n---")
    for name, text in (
        ("train-00000-of-00002", "a"),
        ("train-00001-of-00002", "b"),
        ("test-00000", "c"),
    ):
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": [text]}), tmp_path / "data" / f"{name}.parquet")
    assert read_all(Data(source=str(tmp_path))) == ["a", "b"]
    write(tmp_path / "validation/x.jsonl", jsonl(["d"]))
    write(tmp_path / "more.jsonl", jsonl(["e"]))
    assert read_all(Data(source=str(tmp_path))) == ["a", "b", "e"]
    for path in [tmp_path / "more.jsonl", *tmp_path.glob("data/train*")]:
        path.unlink()
    with pytest.raises(InputError, match='has the splits test, validation but not "train"'):
        find_files(Data(source=str(tmp_path)))


# --- stores


@pytest.fixture
def bucket(s3):
    """A prefix of a bucket with one file of each kind."""
    files = fsspec.filesystem("s3")
    table = pa.table({"text": TEXTS})
    with files.open(f"{s3}/c.parquet", "wb") as file:
        pq.write_table(table, file)
    with files.open(f"{s3}/d.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    with files.open(f"{s3}/e.arrow", "wb") as file, pa.ipc.new_file(file, table.schema) as stream:
        stream.write_table(table)
    for name, content in (
        ("a.jsonl.gz", gzip.compress(jsonl(TEXTS).encode())),
        ("b.tar", TAR),
        (".hidden", b"\xff"),
        ("f/g.txt", TEXTS[1].encode()),
    ):
        files.pipe(f"{s3}/{name}", content)
    return s3


def test_every_format_is_read_from_a_store(bucket):
    assert read_all(Data(source=bucket)) == TEXTS * 5 + [TEXTS[1]]
    assert read_all(Data(source=f"{bucket}/*.arrow")) == TEXTS * 2
    assert read_all(Data(source=(f"{bucket}/f/g.txt", f"{bucket}/b.tar"))) == [TEXTS[1], *TEXTS]


def test_a_store_is_tokenised_once_and_again_when_it_changed(bucket, tmp_path, monkeypatch):
    source = f"{bucket}/f/*.jsonl"
    files = fsspec.filesystem("s3")
    files.pipe(f"{bucket}/f/a.jsonl", jsonl(numbered(40)).encode())
    data = Data(source=source, tokenizer="bytes", cache_dir=str(tmp_path))
    first = prepare(data)
    assert sorted(documents_of(all_tokens(first))) == sorted(numbered(40))
    with monkeypatch.context() as patch:
        patch.setattr("paceline.train.data.stores.StoredFile.open", pytest.fail)
        assert prepare(data) == first
    files.pipe(f"{bucket}/f/a.jsonl", jsonl(numbered(41)).encode())
    assert prepare(data).meta.num_documents == 41


def test_a_store_that_says_no_is_one_sentence(s3):
    for source, message in (
        (f"{s3}/none", "names no file, prefix or glob"),
        (f"{s3}/none/*.txt", "names no file, prefix or glob"),
        ("s3://no-such-bucket-here/x.txt", "names no file|can't be listed"),
        ("nothing://x/y", "can't be used"),
    ):
        with pytest.raises(InputError, match=message):
            find_files(Data(source=source))


def test_what_is_gone_when_it_is_read_is_named(bucket):
    (file,) = find_files(Data(source=f"{bucket}/f/g.txt"))
    fsspec.filesystem("s3").rm(f"{bucket}/f/g.txt")
    with pytest.raises(InputError, match=r"g\.txt can't be read"):
        list(read_pieces(file, "text"))


def test_http(tmp_path):
    pytest.importorskip("aiohttp")
    write(tmp_path / "a.jsonl", jsonl(TEXTS))
    write(tmp_path / "b.txt.gz", gzip.compress(TEXTS[1].encode()))
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert read_all(Data(source=f"{url}/a.jsonl")) == TEXTS
        assert read_all(Data(source=f"{url}/b.txt.gz")) == [TEXTS[1]]
        listed = Data(source=f"{url}/", tokenizer="bytes", cache_dir=str(tmp_path / ".cache"))
        texts = sorted([*TEXTS, TEXTS[1]])
        for source in (f"{url}/", f"{url}/*.*"):
            assert sorted(read_all(Data(source=source))) == texts
        assert prepare(listed).meta.num_documents == len([text for text in texts if text])
        with pytest.raises(InputError, match="names no file"):
            find_files(Data(source=f"{url}/none.jsonl"))
        with pytest.raises(InputError, match=r"forbidden\.jsonl can't be read .*403"):
            find_files(Data(source=f"{url}/forbidden.jsonl"))
        (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
        with pytest.raises(InputError, match=r"gone\.jsonl can't be read .*404"):
            find_files(Data(source=f"{url}/"))
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(InputError, match=r"nobody answers|can't be listed"):
        find_files(Data(source=f"{url}/a.jsonl"))


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Says no ETag, but when a file changed; links that sort its pages."""

    def list_directory(self, path):
        names = [each.name for each in Path(path).glob("[!.]*")]
        page = "".join(f'<a href="{name}">{name}</a>' for name in ["?C=N;O=D", *names]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        return io.BytesIO(page)

    def send_head(self):
        if "forbidden" in self.path:
            return self.send_error(403)
        return super().send_head()

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("url", ["s3://k:v@b/x", "https://h/x?sig=1", "zip://x::s3://b/y"])
def test_a_url_that_may_hold_a_secret_is_refused_without_telling_it(url):
    with pytest.raises(InputError, match="may hold a secret") as caught:
        Data.parse({"source": [url]})
    assert not re.search("k:v|sig", str(caught.value))


def test_without_what_reaches_a_store_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(InputError, match=r'pip install "paceline\[gcs\]"'):
        find_files(Data(source="gs://bucket/x.txt"))
