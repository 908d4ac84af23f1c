"""Build: an index from documents.

How it works: documents are cut into chunks, chunks become vectors part by part, and k-means puts
the vectors into lists of neighbours. All is written beside the folder that is wanted (`.partial`)
and renamed when it is whole. A build that was interrupted goes on with the parts it has, if
documents, cuts and encoder are the same.

How many lists a search looks at is settled here: the fewest (1, 2, 4, ...) with which the ten
nearest chunks of some chunks are found as a search through everything finds them.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.config.errors import InputError
from paceline.config.files import to_disk
from paceline.serve.retrieval.documents import chunks_of, read_documents
from paceline.serve.retrieval.encoder import Encoder, Vectors
from paceline.serve.retrieval.folder import (
    CENTROIDS,
    CHUNKS,
    DOCUMENTS,
    FILES,
    LISTS,
    MANIFEST,
    SIZES,
    TEXTS,
    IndexFolder,
    Manifest,
    Numbers,
    sum_of,
)
from paceline.serve.retrieval.lists import Lists, faiss_module

_PART_CHUNKS = 1024
_FEWEST_CHUNKS = 2048
"""Below it all are one list, and a search is exact."""
_MOST_LISTS = 65536
_TRAINED_ON = 64
"""Vectors for each list that k-means looks at, as many as there are."""
_WANTED_RECALL, _NEAREST, _ASKED = 0.95, 10, 256
_KEY = "key"


@dataclass(frozen=True)
class Cut:
    """How documents are cut, in tokens of the encoder."""

    tokens: int
    overlap: int


def build_index(
    documents: Path,
    encoder: Encoder,
    encoder_path: Path,
    out: Path,
    cut: Cut,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Make an index.

    Args:
        out: must not exist.
        told: the chunks that are encoded so far, and how many there are.

    Raises:
        InputError: no documents, a cut that can't be made, or a folder that exists.
    """
    if not cut.overlap < cut.tokens <= encoder.longest:
        raise InputError(
            f"Chunks of {cut.tokens} tokens with {cut.overlap} in common can't be made: they need "
            f"more than these, and at most the encoder's {encoder.longest}."
        )
    faiss_module()  # before hours of encoding
    if out.exists():
        raise InputError(f"{out} exists: give another folder, or remove it.")
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        num_documents, chunks = _write_texts(documents, encoder, cut, partial)
    except InputError:
        shutil.rmtree(partial)
        raise
    fingerprint = encoder.fingerprint()
    _keep_parts_of(_key(partial, fingerprint), partial)
    vectors = _vectors(chunks, encoder, partial, told)
    num_lists = _write_lists(vectors, partial)
    manifest = Manifest(
        format_version=1,
        encoder=str(encoder_path.resolve()),
        encoder_step=encoder.step,
        encoder_sum=fingerprint,
        width=encoder.width,
        chunk_tokens=cut.tokens,
        overlap=cut.overlap,
        num_documents=num_documents,
        num_chunks=len(chunks),
        num_lists=num_lists,
        probes=1,
        recall=1.0,
        files={name: sum_of(partial / name) for name in FILES},
    )
    _write_manifest(manifest, partial)
    probes, recall = settled_probes(IndexFolder(partial), vectors)
    manifest = manifest.replace(probes=probes, recall=recall)
    _write_manifest(manifest, partial)
    for file in partial.iterdir():
        if file.name not in (*FILES, MANIFEST):
            file.unlink()
        else:
            to_disk(file)
    os.rename(partial, out)  # noqa: PTH104
    to_disk(out.parent)
    return manifest


def settled_probes(folder: IndexFolder, vectors: Vectors) -> tuple[int, float]:
    """How many lists are to be searched, and the recall that this gave.

    Args:
        vectors: of all chunks, (num_chunks, width).
    """
    lists, num_lists = Lists(folder), len(folder.sizes)
    draw = np.random.default_rng(0)
    asked = draw.choice(len(vectors), min(_ASKED, len(vectors)), replace=False)
    wanted = nearest(vectors[asked], vectors, _NEAREST)
    probes = 1
    while True:
        found = lists.search(vectors[asked], _NEAREST, probes)
        recall = recall_of(wanted, [[hit.chunk for hit in hits] for hits in found])
        if recall >= _WANTED_RECALL or probes >= num_lists:
            return probes, recall
        probes = min(2 * probes, num_lists)


def nearest(queries: Vectors, vectors: Vectors, k: int) -> Numbers:
    """The nearest vectors of each query by looking at all: (num_queries, k)."""
    return np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :k]


def recall_of(wanted: Numbers, found: list[list[int]]) -> float:
    """What part of the wanted ones was found."""
    hits = sum(len(set(w.tolist()) & set(f)) for w, f in zip(wanted, found, strict=True))
    return hits / max(1, wanted.size)


def _write_texts(
    documents: Path, encoder: Encoder, cut: Cut, partial: Path
) -> tuple[int, list[str]]:
    """Write texts, names and places of chunks; the number of documents, and each chunk's text."""
    names: list[str] = []
    rows: list[tuple[int, int, int, int, int]] = []
    texts: list[str] = []
    with (partial / TEXTS).open("wb") as file:
        for document in read_documents(documents):
            text, begun = document.text, file.tell()
            at, first = 0, begun
            for chunk in chunks_of(text, encoder.tokenizer, cut.tokens, cut.overlap):
                first += len(text[at : chunk.start].encode())
                at, own = chunk.start, text[chunk.start : chunk.stop]
                rows.append((len(names), at, chunk.stop, first, first + len(own.encode())))
                texts.append(own)
            file.write(text.encode())
            names.append(document.name)
    if not rows:
        raise InputError(f"{documents} has no document with text: give some.")
    (partial / DOCUMENTS).write_text(json.dumps(names))
    np.array(rows, "<i8").tofile(partial / CHUNKS)
    return len(names), texts


def _key(partial: Path, fingerprint: str) -> str:
    """Names what vectors are of: texts, cuts and encoder."""
    sums = [sum_of(partial / name).sha256 for name in (TEXTS, CHUNKS)]
    return hashlib.sha256(json.dumps([fingerprint, *sums]).encode()).hexdigest()


def _keep_parts_of(key: str, partial: Path) -> None:
    """Forget the parts of an earlier build that was of something else."""
    file = partial / _KEY
    if not file.is_file() or file.read_text() != key:
        for part in partial.glob("part-*"):
            part.unlink()
        file.write_text(key)


def _vectors(
    texts: list[str], encoder: Encoder, partial: Path, told: Callable[[int, int], None]
) -> Vectors:
    """The vectors of all chunks; parts that an earlier build has written are read."""
    shape = (len(texts), encoder.width)
    vectors = np.empty(shape, np.float32)
    for first in range(0, len(texts), _PART_CHUNKS):
        part = vectors[first : first + _PART_CHUNKS]
        file = partial / f"part-{first:09d}.bin"
        if file.is_file() and file.stat().st_size == part.nbytes:
            part[:] = np.fromfile(file, "<f4").reshape(part.shape)
        else:
            part[:] = encoder.vectors(texts[first : first + _PART_CHUNKS])
            aside = file.with_suffix(".aside")
            part.astype("<f4").tofile(aside)
            aside.replace(file)
        told(first + len(part), len(texts))
    return vectors


def _write_lists(vectors: Vectors, partial: Path) -> int:
    """Put vectors into lists and write them; how many lists."""
    faiss, (number, width) = faiss_module(), vectors.shape
    num_lists = 1
    if number >= _FEWEST_CHUNKS:
        num_lists = min(round(4 * number**0.5), number // 39, _MOST_LISTS)  # faiss' advice
    if num_lists == 1:
        middles = vectors.mean(0, keepdims=True)
        list_of = np.zeros(number, np.int64)
    else:
        draw = np.random.default_rng(0)
        most = min(number, _TRAINED_ON * num_lists)
        sample = vectors[draw.choice(number, most, replace=False)]
        means = faiss.Kmeans(width, num_lists, niter=10, seed=1234, spherical=True)
        means.train(sample)
        middles = means.centroids
        list_of = means.index.search(vectors, 1)[1][:, 0]
    order = np.argsort(list_of, kind="stable")
    sizes = np.bincount(list_of, minlength=num_lists)
    with (partial / LISTS).open("wb") as file:
        for numbers in np.split(order, np.cumsum(sizes)[:-1]):
            vectors[numbers].astype("<f4").tofile(file)
            numbers.astype("<i8").tofile(file)
    middles.astype("<f4").tofile(partial / CENTROIDS)
    sizes.astype("<i8").tofile(partial / SIZES)
    return num_lists


def _write_manifest(manifest: Manifest, partial: Path) -> None:
    (partial / MANIFEST).write_text(json.dumps(manifest.model_dump(), indent=2) + "\n")
