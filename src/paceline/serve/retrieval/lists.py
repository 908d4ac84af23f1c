"""Lists: vectors in lists of neighbours, of which a search looks at some (IVF, by faiss).

How it works: each list lies in one piece of a file that is mapped, so lists that nobody asks for
take no memory, and faiss reads those of a batch ahead by threads of its own. Under a budget of
memory the lists that searches looked at most are copied there; what is mapped is the kernel's to
keep or drop. A small index is one list: then a search is exact.

Paper: https://arxiv.org/abs/2401.08281 (faiss).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.config.errors import InputError
from paceline.serve.retrieval.encoder import Vectors
from paceline.serve.retrieval.folder import IndexFolder, Numbers

_PLACED_EVERY = 256
"""Queries after which it is looked anew which lists belong into memory."""


def faiss_module() -> Any:
    """faiss.

    Raises:
        InputError: it is not installed.
    """
    try:
        import faiss
    except ImportError:
        raise InputError("Retrieval needs faiss: pip install 'paceline[retrieval]'.") from None
    return faiss


@dataclass(frozen=True)
class Hit:
    """A chunk that was found."""

    chunk: int
    score: float
    """Cosine of its vector and the query's."""


class Lists:
    """Searches an index.

    Args:
        memory_bytes: for copies of lists.

    Raises:
        InputError: faiss is not installed.
    """

    def __init__(self, folder: IndexFolder, memory_bytes: int = 0) -> None:
        self._faiss = faiss = faiss_module()
        self._num_chunks, width = len(folder), folder.manifest.width
        self._budget, self._list_bytes = memory_bytes, folder.sizes * (4 * width + 8)
        num_lists = len(folder.sizes)
        # These objects keep no references to each other; they must live as long as the index.
        self._middles = faiss.IndexFlatIP(width)
        self._middles.add(np.ascontiguousarray(folder.centroids))
        self._mapped = faiss.OnDiskInvertedLists(num_lists, 4 * width, str(folder.lists_file))
        self._mapped.read_only = True
        self._mapped.totsize = folder.lists_file.stat().st_size
        self._mapped.do_mmap()
        sizes = folder.sizes.astype(np.uint64)
        self._mapped.set_all_lists_sizes(faiss.swig_ptr(sizes))
        self._index = faiss.IndexIVFFlat(
            self._middles, width, num_lists, faiss.METRIC_INNER_PRODUCT
        )
        self._index.is_trained = True
        self._index.ntotal = self._num_chunks
        self._index.replace_invlists(self._mapped, False)
        self._hot: Any = None
        self._probes_of: Numbers = np.zeros(num_lists, np.int64)
        self._num_until_placed = _PLACED_EVERY

    @property
    def in_memory_bytes(self) -> int:
        """Of copies of lists."""
        return 0 if self._hot is None else int(self._list_bytes[self._hot_lists].sum())

    def search(self, vectors: Vectors, k: int, probes: int) -> list[list[Hit]]:
        """The nearest chunks of each query, the nearest first.

        Args:
            vectors: (num_queries, width).
            k: so many, fewer where the lists have fewer.
            probes: lists that are looked at, the nearest ones.
        """
        probes = min(probes, len(self._probes_of))
        similarity, lists = self._middles.search(vectors, probes)
        self._index.nprobe = probes
        scores, chunks = self._index.search_preassigned(vectors, k, lists, similarity)
        if self._budget:
            self._see(lists)
        return [
            # A file that somebody else wrote may name chunks that there aren't.
            [Hit(int(c), float(s)) for c, s in zip(*row, strict=True) if 0 <= c < self._num_chunks]
            for row in zip(chunks, scores, strict=True)
        ]

    def _see(self, lists: Numbers) -> None:
        np.add.at(self._probes_of, lists.ravel(), 1)
        self._num_until_placed -= len(lists)
        if self._num_until_placed <= 0:
            self._num_until_placed = _PLACED_EVERY
            self._place()
            self._probes_of //= 2  # what was asked lately counts more

    def _place(self) -> None:
        """Copy the lists into memory that were looked at most, as many as the budget holds. A look
        saves as many bytes as it costs memory, so their sizes don't matter."""
        order = np.argsort(-self._probes_of, kind="stable")
        order = order[self._probes_of[order] > 0]
        hot = order[np.cumsum(self._list_bytes[order]) <= self._budget]
        faiss, mapped = self._faiss, self._mapped
        self._index.replace_invlists(mapped, False)
        self._hot = None  # before the new ones, which the budget is for
        copies = faiss.ArrayInvertedLists(mapped.nlist, mapped.code_size)
        for number in hot.tolist():
            size = mapped.list_size(number)
            copies.add_entries(number, size, mapped.get_ids(number), mapped.get_codes(number))
        both = faiss.MaskedInvertedLists(copies, mapped)
        self._hot, self._hot_lists = (copies, both), hot
        self._index.replace_invlists(both, False)
