"""The order of samples: a pure function of the seed and the running number of a sample in the run.

How it works: every epoch visits each sample once, in the order of a keyed permutation of 0 ..
num_samples - 1. The permutation is a Feistel network on the next power of two, walked along its
cycle until it lands inside the range (Black and Rogaway, 2002, "Ciphers with Arbitrary Finite
Domains", https://web.cs.ucdavis.edu/~rogaway/papers/subset.pdf). So any part of the order is
computed on its own: nothing is stored, a run resumes from one number, and the order is the same for
any number of ranks.

It is not cryptography: the round function only mixes well (the finaliser of splitmix64).
"""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.config.errors import InputError

Ids = NDArray[np.int64]
_Round = Callable[[Ids], Ids]
_NUM_ROUNDS = 6


def sample_ids(seed: int, first: int, count: int, num_samples: int) -> Ids:
    """Return which samples a run visits as its numbers first .. first + count - 1.

    Args:
        first: running number in the run; its epoch is first // num_samples.

    Returns:
        ids, each in 0 .. num_samples - 1, shape (count,).
    """
    parts = [
        permute(positions, num_samples, seed, epoch)
        for epoch, positions in epochs_of(first, count, num_samples)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def epochs_of(first: int, count: int, length: int) -> Iterator[tuple[int, Ids]]:
    """Cut running numbers first .. first + count - 1 into epochs and positions in them."""
    while count > 0:
        epoch, position = divmod(first, length)
        part = min(count, length - position)
        yield epoch, np.arange(position, position + part)
        first, count = first + part, count - part


def permute(positions: Ids, size: int, seed: int, epoch: int) -> Ids:
    """Map positions to their images under the epoch's permutation of 0 .. size - 1."""
    num_bits = max(1, (size - 1).bit_length())
    rounds = _rounds(num_bits, _round_keys(seed, epoch), len(positions))
    images = _feistel(positions, num_bits, rounds)
    # The network's domain is at most twice the range, so a walk has at most two steps on average.
    outside = np.flatnonzero(images >= size)
    while len(outside):
        images[outside] = moved = _feistel(images[outside], num_bits, rounds)
        outside = outside[moved >= size]
    return images


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(f"paceline {seed} {epoch}".encode(), digest_size=8 * _NUM_ROUNDS)
    return np.frombuffer(digest.digest(), "<u8").astype(np.uint64)


def _rounds(num_bits: int, keys: NDArray[np.uint64], count: int) -> list[_Round]:
    """What each round mixes of one half into the other: a look into a table, where that has fewer
    entries than numbers are permuted. The halves swap widths every round, of which there are an
    even number, so that an odd number of bits works too."""
    rounds: list[_Round] = []
    taken, given = (num_bits + 1) // 2, num_bits // 2
    for key in keys:
        mixed = partial(_mix, key=key, mask=np.uint64(2**given - 1))
        rounds.append(mixed(np.arange(2**taken)).take if 2**taken < count else mixed)
        taken, given = given, taken
    return rounds


def _feistel(values: Ids, num_bits: int, rounds: list[_Round]) -> Ids:
    """Permute 0 .. 2**num_bits - 1."""
    right_bits = (num_bits + 1) // 2
    left, right = values >> right_bits, values & (2**right_bits - 1)
    for mixed in rounds:
        left, right = right, left ^ mixed(right)
    return (left << right_bits) | right


def _mix(half: Ids, key: np.uint64, mask: np.uint64) -> Ids:
    values = half.view(np.uint64) ^ key
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((values ^ (values >> np.uint64(31))) & mask).view(np.int64)


def rank_share(
    ids: Ids, rank: int, num_ranks: int, *, micro_batch: int = 1, interleave: int = 1
) -> Ids:
    """Return the part of a global batch that one rank computes.

    Args:
        micro_batch: samples of a micro-batch.
        interleave: neighbouring ranks that take micro-batches in turns; 1: a part is contiguous.

    Raises:
        InputError: the batch can't be split evenly.
    """
    if len(ids) % num_ranks:
        raise InputError(
            f"train.global_batch = {len(ids)} can't be split over {num_ranks} ranks: "
            "make it a multiple."
        )
    share = len(ids) // num_ranks
    if interleave == 1:
        return ids[rank * share : (rank + 1) * share]
    numbers = micro_batch_numbers(rank, share // micro_batch, interleave)
    return ids.reshape(-1, micro_batch)[numbers].reshape(-1)


def micro_batch_numbers(rank: int, count: int, interleave: int = 1) -> list[int]:
    """Which micro-batches of a global batch are a rank's, if each has `count`."""
    group, place = divmod(rank, interleave)
    return [(group * count + index) * interleave + place for index in range(count)]
