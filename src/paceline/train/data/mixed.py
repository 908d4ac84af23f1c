"""MixedDataset: the samples of several sources as one set, in the order of a mixture."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.train.data.batches import Samples
from paceline.train.data.mixture import MixtureOrder
from paceline.train.data.order import Ids

Read = Callable[[Samples, Ids], NDArray[np.integer]]


@dataclass(frozen=True)
class MixedDataset:
    """One split of several sources; it has the interface of `TokenDataset`.

    Samples are numbered as in `MixtureOrder`: those of the first source, then those of the second.
    """

    parts: Sequence[Samples]
    mixture: Callable[[int, Sequence[int]], MixtureOrder]
    """Maps a seed and each source's number of samples to their order."""

    def num_samples(self, seq_len: int) -> int:
        """Of all sources."""
        return sum(self._sizes(seq_len))

    def order(self, seed: int, seq_len: int) -> Callable[[int, int], Ids]:
        """Maps a running number and a count to samples; fewer where the mixture ends."""
        return self.mixture(seed, self._sizes(seq_len)).ids

    def sources_of(self, sample_ids: Ids, seq_len: int) -> Ids:
        """The number of each sample's source."""
        return np.searchsorted(np.cumsum(self._sizes(seq_len)), sample_ids, "right")

    def gather(self, sample_ids: Ids, seq_len: int) -> NDArray[np.int64]:
        """As `TokenDataset.gather`."""
        return self._read(
            lambda part, own: part.gather(own, seq_len), sample_ids, seq_len, seq_len + 1
        )

    def counted(self, sample_ids: Ids, seq_len: int) -> NDArray[np.bool_] | None:
        """As `TokenDataset.counted`, or `PackedRows`'; sources are packed alike."""
        counted = np.empty((len(sample_ids), seq_len), bool)
        for part, places, own in self._by_source(sample_ids, seq_len):
            some = part.counted(own, seq_len)
            if some is None:
                return None
            counted[places] = some
        return counted

    def document_ids(self, sample_ids: Ids, seq_len: int) -> NDArray[np.int64]:
        """As `TokenDataset.document_ids`."""
        return self._read(
            lambda part, own: part.document_ids(own, seq_len), sample_ids, seq_len, seq_len
        )

    def will_need(self, sample_ids: Ids, seq_len: int) -> None:
        """As `TokenDataset.will_need`."""
        for part, _, own in self._by_source(sample_ids, seq_len):
            part.will_need(own, seq_len)

    def _read(self, read: Read, sample_ids: Ids, seq_len: int, width: int) -> NDArray[np.int64]:
        rows = np.empty((len(sample_ids), width), np.int64)
        for part, places, own in self._by_source(sample_ids, seq_len):
            rows[places] = read(part, own)
        return rows

    def _by_source(self, sample_ids: Ids, seq_len: int) -> Iterator[tuple[Samples, Ids, Ids]]:
        """Each source that has samples here, their places here, and their ids in it."""
        offsets = np.cumsum([0, *self._sizes(seq_len)])
        sources = self.sources_of(sample_ids, seq_len)
        for source in np.unique(sources):
            places = np.flatnonzero(sources == source)
            yield self.parts[source], places, sample_ids[places] - offsets[source]

    def _sizes(self, seq_len: int) -> list[int]:
        return [part.num_samples(seq_len) for part in self.parts]
