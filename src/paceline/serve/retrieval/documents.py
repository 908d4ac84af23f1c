"""Documents: what is searched, and the chunks of it that prompts get."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from paceline.config.errors import InputError
from paceline.config.job_sections import Data
from paceline.train.data.documents import read_pieces
from paceline.train.data.files import find_files


@dataclass(frozen=True)
class Document:
    """A text, and what people call it."""

    name: str
    """Its path below the folder that was given; with its place, where a file has many."""
    text: str


@dataclass(frozen=True)
class Chunk:
    """A part of a document that is found as one."""

    start: int
    stop: int
    """In characters of the document."""


def read_documents(source: Path, text_field: str = "text") -> Iterator[Document]:
    """The documents of a file or folder, in a stated order; those without text are left out.

    Args:
        source: text files are a document each; JSON lines, Parquet and Arrow hold one in a line or
            row.
        text_field: its key there.

    Raises:
        InputError: there are none, or a file can't be read.
    """
    if not source.exists():
        raise InputError(f"{source} does not exist: give a file or folder of documents.")
    for file in find_files(Data(source=str(source))):
        path = Path(str(file.path)).resolve()
        below = path.relative_to(source.resolve()) if source.is_dir() else Path(path.name)
        parts: list[str] = []
        number = 0
        for piece in read_pieces(file, text_field):
            parts.append(piece.text)
            if piece.ends_document:
                number += 1
                text = "".join(parts)
                parts.clear()
                if text.strip():
                    name = f"{below}" if file.format == "text" else f"{below}:{number}"
                    yield Document(name, text)


def chunks_of(text: str, tokenizer: Tokenizer, size: int, overlap: int) -> list[Chunk]:
    """Cut a text by tokens.

    Args:
        size: tokens of a chunk; the last may have fewer.
        overlap: tokens that a chunk has in common with the one before.
    """
    places = tokenizer.encode(text, add_special_tokens=False).offsets
    stride = size - overlap
    firsts = range(0, max(len(places) - overlap, 1), stride) if places else ()
    return [
        Chunk(places[first][0], places[min(first + size, len(places)) - 1][1]) for first in firsts
    ]
