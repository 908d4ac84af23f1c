"""Retriever: searches for many requests, in a thread beside the engine's.

How it works: queries wait in a queue. The thread takes some of them, encodes them together,
searches for them together, and hands each its chunks; meanwhile the engine makes texts of those
that came before. How many it takes follows from what a batch was measured to cost: a fixed part a
and a part b for each query. n waiting queries in batches of m are done after (a + b m)(n/m + 1) / 2
on average, which is least for m = sqrt(n a / b).
"""

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from paceline.config.errors import InputError
from paceline.config.serving import Retrieval
from paceline.serve.retrieval.encoder import Encoder, open_encoder
from paceline.serve.retrieval.folder import IndexFolder
from paceline.serve.retrieval.lists import Lists

MOST_WAITING = 1024
_MOST_QUERIES = 64
_FORGETS = 0.95
"""What a batch counts less with each that follows."""


@dataclass(frozen=True)
class Found:
    """A chunk that was found for a query."""

    chunk: int
    """Its number: chunks of a document follow one another."""
    document: str
    start: int
    stop: int
    """In characters of the document."""
    text: str
    score: float
    """Cosine of its vector and the query's."""


class BusyError(Exception):
    """Too many queries wait."""


class BatchSize:
    """How many of the waiting queries to take, as batches so far took their time."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, n, n n, t, n t

    def took(self, number: int, seconds: float) -> None:
        """A batch of so many took so long."""
        new = (1.0, number, number * number, seconds, number * seconds)
        self._sums = [_FORGETS * old + own for old, own in zip(self._sums, new, strict=True)]

    def of(self, num_waiting: int) -> int:
        """Of so many."""
        fixed, each = self.costs
        if each > 0:
            num_waiting = min(num_waiting, max(1, round((num_waiting * fixed / each) ** 0.5)))
        return min(num_waiting, _MOST_QUERIES)

    @property
    def costs(self) -> tuple[float, float]:
        """Seconds of a batch, and of each query in it: the line through what was measured; 0, 0
        while all had one size."""
        count, n, nn, t, nt = self._sums
        spread = count * nn - n * n
        if spread < 1e-6 * max(1.0, nn):
            return 0.0, 0.0
        each = max(0.0, (count * nt - n * t) / spread)
        return max(0.0, (t - each * n) / count), each


@dataclass(frozen=True)
class _Query:
    text: str
    k: int
    answer: "Future[list[Found]]"


class Retriever:
    """Finds chunks for queries.

    Args:
        probes: lists that a search looks at; None: as many as the index says.
        memory_bytes: for copies of the index's lists.
    """

    def __init__(
        self,
        folder: IndexFolder,
        encoder: Encoder,
        probes: int | None = None,
        memory_bytes: int = 0,
    ) -> None:
        self.folder, self._encoder = folder, encoder
        self._lists = Lists(folder, memory_bytes)
        self._probes = probes or folder.manifest.probes
        self._queries: queue.SimpleQueue[_Query | None] = queue.SimpleQueue()
        self._batch_size = BatchSize()
        self._thread = threading.Thread(target=self._run, name="retriever", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def end_thread(self) -> None:
        """Answer what waits, and end."""
        self._queries.put(None)
        self._thread.join()

    @property
    def num_waiting(self) -> int:
        """Queries that nobody works on yet."""
        return self._queries.qsize()

    def ask(self, text: str, k: int) -> "Future[list[Found]]":
        """The nearest chunks of a text, the nearest first; any thread may ask, and cancel.

        Raises:
            BusyError: too many wait.
        """
        if self.num_waiting >= MOST_WAITING:
            raise BusyError
        query = _Query(text, k, Future())
        self._queries.put(query)
        return query.answer

    def find(self, texts: Sequence[str], k: int) -> list[list[Found]]:
        """The nearest chunks of each text, by the thread that calls: nobody may ask meanwhile."""
        vectors = self._encoder.vectors(texts)
        hits = self._lists.search(vectors, k, self._probes)
        return [
            [
                Found(
                    hit.chunk, *self.folder.place(hit.chunk), self.folder.text(hit.chunk), hit.score
                )
                for hit in of_text
            ]
            for of_text in hits
        ]

    def _run(self) -> None:
        while (first := self._queries.get()) is not None:
            batch = [first]
            for _ in range(self._batch_size.of(1 + self._queries.qsize()) - 1):
                if (query := self._queries.get()) is None:
                    self._queries.put(None)
                    break
                batch.append(query)
            wanted = [query for query in batch if query.answer.set_running_or_notify_cancel()]
            if wanted:
                self._answer(wanted)

    def _answer(self, queries: list[_Query]) -> None:
        begun_s = time.perf_counter()
        try:
            found = self.find([q.text for q in queries], max(q.k for q in queries))
        except Exception as error:
            for query in queries:
                query.answer.set_exception(error)
            return
        self._batch_size.took(len(queries), time.perf_counter() - begun_s)
        for query, own in zip(queries, found, strict=True):
            query.answer.set_result(own[: query.k])


def open_retriever(settings: Retrieval) -> Retriever | None:
    """The retriever of a server's settings; None: it retrieves nothing.

    Raises:
        InputError: no such index, it is damaged, or the encoder is not the one that made it.
    """
    if settings.index is None:
        return None
    folder = IndexFolder(Path(settings.index))
    told = folder.manifest
    path = Path(settings.encoder or told.encoder)
    is_folder = (path / "config.json").is_file()
    encoder = open_encoder(path, None if is_folder else told.encoder_step)
    if encoder.fingerprint() != told.encoder_sum:
        raise InputError(
            f"{path} is not the encoder that made {folder.path}: give "
            "that one by retrieval.encoder, or make the index anew by paceline index."
        )
    probes = None if settings.probes == "auto" else settings.probes
    return Retriever(folder, encoder, probes, int(settings.memory_gb * 1e9))
