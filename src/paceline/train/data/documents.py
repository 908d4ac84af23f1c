"""Read the documents of a file as a stream of text, or its rows, in bounded memory.

How it works: every reader yields pieces. A document of a file of rows is one piece. A text file is
one document, cut after a line end about every 2**20 characters (a longer line is cut inside);
pieces are tokenised one by one, so no token reaches over a cut. Empty documents are yielded as an
empty piece: the caller counts and drops them. All but Parquet and Arrow may be compressed as a
whole, by gzip (".gz") or zstd (".zst", ".zstd", read by pyarrow).

It is not a cleaner: no text is normalised. Rows that a filter leaves out are yielded as pieces that
aren't kept, for the caller to count. A byte-order mark is dropped.
"""

import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import IO, Any, BinaryIO, NamedTuple, cast

from paceline.config.errors import InputError
from paceline.config.row_filter import RowFilter, row_filter
from paceline.observe.stored import trouble_text
from paceline.train.data.files import SourceFile
from paceline.train.data.record_files import (
    Record,
    mds_records,
    object_of,
    webdataset_records,
)
from paceline.train.data.stores import StoredFile

PIECE_CHARS = 2**20
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Piece:
    """A stretch of one document."""

    text: str
    ends_document: bool
    read_bytes: int
    """Bytes of the file on disk that were read so far (columnar files: in proportion to rows)."""
    is_kept: bool = True
    """False: the filter leaves this document out."""


class Row(NamedTuple):
    """A row of a file of records."""

    where: str
    """For sentences: file and line, or row."""
    values: dict[str, Any]
    """By key or column."""
    read_bytes: int
    """As of a `Piece`."""


def read_pieces(file: SourceFile, text_field: str, filtered: str | None = None) -> Iterator[Piece]:
    """Yield the documents of a file, in pieces.

    Args:
        text_field: key (JSON lines) or column (Parquet, Arrow) of a document's text.
        filtered: `data.filter`.

    Raises:
        InputError: the file can't be read, is not UTF-8, or has no such key or column; or the
            filter can't be applied to it.
    """
    keep = row_filter(filtered) if filtered is not None else None
    with _reading(file):
        if file.format == "megatron":
            raise InputError(f"{file.path} holds tokens, and texts are needed here: name others.")
        if file.format != "text":
            pieces = _column_pieces if file.format in _BATCHES else _row_pieces
            yield from pieces(file, text_field, keep)
        elif keep is None:
            yield from _text_pieces(file)
        else:
            raise InputError(
                f"{file.path} is read as text, which has no rows for data.filter to choose among: "
                "leave it out, or set data.format."
            )


def read_rows(file: SourceFile, names: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a file of records.

    Args:
        names: of the columns that are read, where a file has them (of Parquet and Arrow; all are
            of other formats).

    Raises:
        InputError: the file can't be read, is not UTF-8, or holds text without rows.
    """
    with _reading(file):
        if file.format in ("text", "megatron"):
            raise InputError(
                f"{file.path} is read as {file.format}, which has no rows: give JSON lines, "
                "Parquet or Arrow, or set data.format."
            )
        if file.format not in _BATCHES:
            yield from _rows(file)
            return
        row, size_bytes = 0, file.size_bytes
        with _reading_columns(file):
            for batch, share in _BATCHES[file.format](file, names, None):
                for values in batch.to_pylist():
                    kept = {name: values[name] for name in names if name in values}
                    yield Row(f"{file.path} row {row}", kept, int(share * size_bytes))
                    row += 1


@contextmanager
def _reading(file: SourceFile) -> Iterator[None]:
    path = file.path
    try:
        yield
    except InputError:
        raise
    except UnicodeDecodeError:
        raise InputError(
            f"{path} is not UTF-8 text: convert it, or name the files to read by a glob."
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{path} can't be read ({reason}): replace or leave out the file."
        ) from None
    except Exception as error:
        if not isinstance(path, StoredFile):
            raise
        # Stores' clients raise anything.
        raise InputError(f"{path} can't be read ({trouble_text(error)}): start again.") from None


@contextmanager
def _opened(file: SourceFile) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file as it is (whose position is the progress) and its decompressed stream."""
    with file.open() as raw:
        if file.compression == "gzip":
            with gzip.GzipFile(fileobj=raw) as stream:
                yield raw, cast(IO[bytes], stream)
        elif file.compression == "zstd":
            pyarrow = _pyarrow(file)
            with pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd") as stream:
                yield raw, cast(IO[bytes], io.BufferedReader(stream))
        else:
            yield raw, raw


def _text_pieces(file: SourceFile) -> Iterator[Piece]:
    with (
        _opened(file) as (raw, stream),
        # newline="" keeps line ends as they are.
        io.TextIOWrapper(cast(BinaryIO, stream), encoding="utf-8-sig", newline="") as decoded,
    ):
        texts = _cut_at_lines(decoded)
        text = next(texts, "")
        for following in texts:
            yield Piece(text, False, raw.tell())
            text = following
        yield Piece(text, True, raw.tell())


def _cut_at_lines(stream: io.TextIOWrapper) -> Iterator[str]:
    rest = ""
    while chunk := stream.read(PIECE_CHARS):
        lines, end, rest = (rest + chunk).rpartition("\n")
        if end:
            yield lines + end
        else:
            yield rest
            rest = ""
    if rest:
        yield rest


def _keeps(keep: RowFilter | None, row: dict[str, Any], where: str) -> bool:
    try:
        return keep is None or keep.keeps(row)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def _row_pieces(file: SourceFile, text_field: str, keep: RowFilter | None) -> Iterator[Piece]:
    for where, row, read_bytes in _rows(file):
        is_kept = _keeps(keep, row, where)
        if is_kept and text_field not in row:
            raise InputError(
                f'{where} has no key "{text_field}" but {_quoted(list(row))}: set data.text_field.'
            )
        text = _checked(row[text_field], text_field, where) if is_kept else ""
        yield Piece(text, True, read_bytes, is_kept)


def _rows(file: SourceFile) -> Iterator[Row]:
    if file.span is not None:
        yield from _rows_within(file, *file.span)
        return
    with _opened(file) as (raw, stream):
        for where, values in _RECORDS[file.format](stream, file.path):
            yield Row(where, values, raw.tell())


def _rows_within(file: SourceFile, begin: int, end: int) -> Iterator[Row]:
    with file.open() as raw:
        if begin:
            raw.seek(begin - 1)
            raw.readline()  # that began before
        at = raw.tell()
        while at < end and (line := raw.readline()):
            where = f"{file.path} byte {at}"
            at += len(line)
            if not line.isspace():
                yield Row(where, object_of(line, where), at - begin)


def _jsonl_records(stream: IO[bytes], path: object) -> Iterator[Record]:
    for number, line in enumerate(stream, 1):
        if not line.isspace():
            where = f"{path} line {number}"
            yield Record(where, object_of(line, where))


_RECORDS = {"jsonl": _jsonl_records, "webdataset": webdataset_records, "mds": mds_records}


def _checked(text: Any, text_field: str, where: str) -> str:
    if not isinstance(text, str):
        raise InputError(
            f'{where}: "{text_field}" holds {text!r:.40} instead of a text: correct or remove it, '
            "or leave such rows out by data.filter."
        )
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON may spell half of a surrogate pair, which no encoding can.
        raise InputError(f"{where} holds half a surrogate pair: correct or remove it.") from None
    return text


def _column_pieces(file: SourceFile, text_field: str, keep: RowFilter | None) -> Iterator[Piece]:
    size_bytes, row = file.size_bytes, 0
    names = list(dict.fromkeys([text_field, *(keep.fields if keep is not None else ())]))
    with _reading_columns(file):
        for batch, share in _BATCHES[file.format](file, names, text_field):
            for values in batch.to_pylist():
                where = f"{file.path} row {row}"
                is_kept = _keeps(keep, values, where)
                text = _checked(values[text_field], text_field, where) if is_kept else ""
                yield Piece(text, True, int(share * size_bytes), is_kept)
                row += 1


@contextmanager
def _reading_columns(file: SourceFile) -> Iterator[None]:
    pyarrow = _pyarrow(file)
    try:
        yield
    except pyarrow.ArrowException as error:
        raise InputError(
            f"{file.path} can't be read as {file.format} ({str(error).splitlines()[0]}): "
            "replace it or set data.format."
        ) from None


def _pyarrow(file: SourceFile) -> ModuleType:
    try:
        import pyarrow
    except ImportError:
        raise InputError(
            f'{file.path} needs pyarrow to be read: pip install "paceline[arrow]".'
        ) from None
    return pyarrow


def _parquet_batches(
    file: SourceFile, names: Sequence[str], text_field: str | None
) -> Iterator[tuple[Any, float]]:
    """Yield columns in batches of rows, each with the share of the file that ends with it."""
    import pyarrow.parquet as pq

    with file.open() as raw, pq.ParquetFile(raw) as parquet:
        _check_column(parquet.schema_arrow, text_field, file)
        done, total = 0, parquet.metadata.num_rows
        known = [name for name in names if name in parquet.schema_arrow.names]
        for batch in parquet.iter_batches(_ROWS_AT_ONCE, columns=known):
            done += batch.num_rows
            yield batch, done / total


def _arrow_batches(
    file: SourceFile, names: Sequence[str], text_field: str | None
) -> Iterator[tuple[Any, float]]:
    import pyarrow as pa

    stored = isinstance(file.path, StoredFile)
    with pa.PythonFile(file.open(), "r") if stored else pa.memory_map(str(file.path)) as source:
        try:
            batches = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:  # the other of Arrow's two file formats
            source.seek(0)
            reader = pa.ipc.open_file(source)
            schema = reader.schema
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            schema = batches.schema
        _check_column(schema, text_field, file)
        known = [name for name in names if name in schema.names]
        for batch in batches:
            batch.validate(full=True)  # offsets of a damaged file would be read out of bounds
            yield batch.select(known), source.tell() / source.size()


_BATCHES = {"parquet": _parquet_batches, "arrow": _arrow_batches}


def _check_column(schema: Any, text_field: str | None, file: SourceFile) -> None:
    import pyarrow as pa

    if text_field is None:
        return
    if (count := schema.names.count(text_field)) != 1:
        raise InputError(
            f'{file.path} has {count or "no"} column{"s" if count else ""} "{text_field}" but '
            f"{_quoted(schema.names)}: set data.text_field."
        )
    kind = schema.field(text_field).type
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    if values not in (pa.string(), pa.large_string(), pa.string_view()):
        raise InputError(
            f'{file.path}: column "{text_field}" is {kind}, not string: set data.text_field '
            "or convert it."
        )


def _quoted(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "none at all"
