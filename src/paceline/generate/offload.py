"""Offload: blocks of keys and values that leave the device's memory, and come back where that pays.

How it works: a block whose text is known by a name goes to the tiers (`tiers`) when its place is
taken. A sequence that is admitted, a new prompt or one that was preempted, finds names there after
those on the device. It fetches as many blocks as make the time to its next token shortest: fetching
takes what reads took lately, and computing what passes took lately, which grows with the length of
a text. What isn't fetched is computed. A block that can't be worth a read isn't kept at all.

Why a rule: for 8k tokens of an 8B network a reload takes a tenth of the prefill, for a 0.6B network
as long, and with small networks recompute can always win.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.serving import Serving
from paceline.generate.paged import Memory
from paceline.generate.tiers import Rate, Read, Tier, Tiers

NOTHING_KEPT = dict.fromkeys(
    (
        "blocks_host", "blocks_disk", "blocks_fetched", "blocks_recomputed", "blocks_damaged",
        "blocks_dropped", "tier_bytes_in", "tier_bytes_out",
    ),
    0,
)  # fmt: skip
"""`Offload.numbers` of an engine without one."""
_SHARE_OF_FREE_MEMORY = 0.125
_KEPT = 0.99
"""Of earlier passes, at each new one."""


class PassCosts:
    """Seconds that passes took lately, as a + b tokens + c pairs: a pair is a token and one that it
    sees. Least squares of relative errors, so that short passes count as much as long ones.

    Args:
        most_tokens: of a pass.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._products, self._sums = np.zeros((3, 3)), np.zeros(3)

    def add(self, seconds: float, spans: Sequence[tuple[int, int]]) -> None:
        """A pass took so long for tokens start to stop - 1 of each sequence."""
        start, stop = np.array(spans).T
        terms = np.array([1, (stop - start).sum(), _pairs(start, stop).sum()]) / seconds
        self._products = _KEPT * self._products + np.outer(terms, terms)
        self._sums = _KEPT * self._sums + terms

    def seconds(self, start: int, stop: int) -> float:
        """What computing a sequence's tokens start to stop - 1 adds to its last pass."""
        terms = (stop - start) / self._most_tokens, stop - start, _pairs(start, stop)
        return float(np.dot(self._factors(), terms))

    def _factors(self) -> NDArray[np.float64]:
        """a, b and c; a term whose factor would be negative is left out."""
        kept, factors = [0, 1, 2], np.zeros(3)
        scale = np.sqrt(np.diag(self._products))
        while kept and scale.all():
            products = self._products[np.ix_(kept, kept)] / np.outer(scale[kept], scale[kept])
            found = np.linalg.lstsq(products, self._sums[kept] / scale[kept], rcond=1e-6)[0]
            if found.min() >= 0:
                factors[kept] = found / scale[kept]
                break
            kept.pop(int(found.argmin()))
        return factors


def _pairs(start: Any, stop: Any) -> Any:
    return (stop * stop - start * start) / 2


def num_worth_fetching(fetch_s: Sequence[float], compute_s: Callable[[int], float]) -> int:
    """How many blocks to fetch so that a sequence is ready soonest.

    Args:
        fetch_s: of each block that could be, in order.
        compute_s: of the rest, after so many blocks.
    """
    fetched_s = itertools.accumulate(fetch_s, initial=0.0)
    totals = [seconds + compute_s(count) for count, seconds in enumerate(fetched_s)]
    return min(range(len(totals)), key=totals.__getitem__)


class Offload:
    """Of one engine.

    Args:
        memory: of its blocks.
        longest: tokens of the longest text.
        most_tokens: of a pass.
    """

    def __init__(self, memory: Memory, tiers: Tiers, longest: int, most_tokens: int) -> None:
        self._memory, self._longest, self.tiers = memory, longest, tiers
        self._size = memory.block_size
        self.passes = PassCosts(most_tokens)
        self._placing = Rate()
        self.num_fetched = self.num_computed = 0
        """Blocks that were kept: those that came back, and those that computing was cheaper for."""

    def keep(self, block: int, name: bytes) -> None:
        """The place of a named block is taken."""
        computed_s = self.passes.seconds(self._longest - self._size, self._longest)
        if self._fetch_s("host") <= computed_s and not self.tiers.touch(name):
            self.tiers.put(name, self._memory.read(block))

    def fetch(self, names: Sequence[bytes], start: int, stop: int) -> "_Fetch | None":
        """See `scheduler.Elsewhere`."""
        found = list(itertools.takewhile(bool, map(self.tiers.tier_of, names)))
        count = num_worth_fetching(
            [self._fetch_s(tier) for tier in found if tier],
            lambda count: self.passes.seconds(start + count * self._size, stop),
        )
        self.num_computed += len(found) - count
        return _Fetch(self, self.tiers.get(names[:count])) if count else None

    def forget_all(self) -> None:
        """See `scheduler.Elsewhere`."""
        self.tiers.forget_all()

    def place(self, block: int, data: Tensor) -> None:
        """Put what was fetched into a block."""
        begun_s = time.perf_counter()
        self._memory.write(block, data)
        self._placing.add(time.perf_counter() - begun_s, data.numel())
        self.num_fetched += 1

    def numbers(self) -> dict[str, int]:
        """Blocks by tier, and what became of them, by name."""
        numbers = self.tiers.numbers()
        return {
            "blocks_host": numbers["host"],
            "blocks_disk": numbers["disk"],
            "blocks_fetched": self.num_fetched,
            "blocks_recomputed": self.num_computed,
            "blocks_damaged": numbers["damaged"],
            "blocks_dropped": numbers["dropped"],
            "tier_bytes_in": numbers["bytes_in"],
            "tier_bytes_out": numbers["bytes_out"],
        }

    def _fetch_s(self, tier: Tier) -> float:
        """Seconds of a block."""
        num_bytes = self._memory.block_bytes
        return self.tiers.seconds(tier, num_bytes) + self._placing.seconds(num_bytes)


class _Fetch:
    """See `sequence.Fetch`."""

    def __init__(self, offload: Offload, read: Read) -> None:
        self._offload, self._read = offload, read
        self.wait, self.close = read.wait, read.close

    @property
    def is_done(self) -> bool:
        return self._read.is_done

    def place(self, blocks: Sequence[int]) -> int:
        data = self._read.data
        for block, each in zip(blocks, data, strict=False):
            self._offload.place(block, each)
        self.close()
        return len(data)


def offload_of(serving: Serving, memory: Memory, longest: int, most_tokens: int) -> Offload | None:
    """What the settings ask for; None: blocks are kept on the device alone.

    Raises:
        InputError: settings that contradict each other, or a folder that can't be used.
    """
    host_bytes = _host_bytes(serving, memory)
    if serving.disk_gb and not (host_bytes and serving.disk_folder):
        lacks = "serve.disk_folder says where" if host_bytes else "serve.host_gb isn't 0"
        raise InputError(f"serve.disk_gb = {serving.disk_gb} has an effect only where {lacks}.")
    if serving.host_gb not in ("auto", 0) and not serving.share_prefixes:
        raise InputError(
            f"serve.host_gb = {serving.host_gb} keeps blocks that requests share, and "
            "serve.share_prefixes is false: leave one of them out."
        )
    if not host_bytes or not serving.share_prefixes:
        return None
    folder = Path(serving.disk_folder) if serving.disk_gb else None
    tiers = Tiers(host_bytes, int(serving.disk_gb * 1e9), folder, memory.keys.device)
    return Offload(memory, tiers, longest, most_tokens)


def _host_bytes(serving: Serving, memory: Memory) -> int:
    if serving.host_gb != "auto":
        return int(serving.host_gb * 1e9)
    on_device = memory.block_bytes * memory.num_blocks
    return min(on_device, int(_SHARE_OF_FREE_MEMORY * psutil.virtual_memory().available))
