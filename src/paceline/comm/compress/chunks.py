"""Chunks: a long buffer in pieces that stay in a core's cache while several operators pass.

Why: on a CPU an operator over a long buffer waits for memory. Of 20.6 million values, on a Xeon
core that copies them in 12 ms, int8's encoder with error feedback takes 305 ms as whole tensors and
37 in chunks; plain C without a look at NaN 20, `torch.compile` 30 without that look and 77 with it,
after 6 to 18 s of compiling in every process. So no compiler is needed.

How long a chunk should be is the core's to say: short ones fit a small cache, and long ones call
fewer operators. On that Xeon (2 MiB of L2) 64 K to 128 K values are best; on an AMD core (1 MiB,
but a quick L3 of 32 MiB) int4's encoder takes 18 ms for 12.2 million values in chunks of 128 K, 14
in 256 K, 11 in 512 K. So a process tries, once.

Noise of stochastic rounding is drawn chunk after chunk; on a CPU the stream is the same however it
is cut.
"""

import time
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from paceline.config.comm import BLOCK

_CPU_CHUNKS = (1 << 17, 1 << 18, 1 << 19)
_ACCELERATOR_CHUNK = 1 << 24
"""It has no such cache, but scratch memory to be bounded (assumed)."""
_TRIED_VALUES = 1 << 21
"""A bucket of 8 MiB."""
_NUM_TRIALS = 5


def chunk_values(device: torch.device) -> int:
    """How many values are worked on at a time: a multiple of every block.

    Ranks may differ in it: no result may depend on it.
    """
    return _fastest_on_this_core() if device.type == "cpu" else _ACCELERATOR_CHUNK


@cache
@torch.no_grad()
def _fastest_on_this_core() -> int:
    """Of some lengths the one in which a buffer is passed over soonest; takes 70 ms."""
    values, error = torch.ones(_TRIED_VALUES), torch.zeros(_TRIED_VALUES)
    return min(_CPU_CHUNKS, key=lambda chunk: _least_s(chunk, values, error))


def _least_s(chunk: int, values: Tensor, error: Tensor) -> float:
    """Seconds of the quickest of some trials."""
    scratch, found = torch.empty(chunk), []
    for _ in range(_NUM_TRIALS):
        began = time.perf_counter()
        for part, left in zip(values.split(chunk), error.split(chunk), strict=True):
            _pass_over(part, left, scratch)
        found.append(time.perf_counter() - began)
    return min(found)


def _pass_over(values: Tensor, error: Tensor, scratch: Tensor) -> None:
    """About what coding does to a chunk: the passes, and as many small operators."""
    x, levels = error.add_(values).view(-1, BLOCK), scratch.view(-1, BLOCK)
    scales = torch.abs(x, out=levels).amax(dim=1, keepdim=True).div_(7).clamp_(min=1.0)
    torch.mul(x, scales.clone().reciprocal_().clamp_(min=0.0), out=levels)
    low, high = levels.round_().to(torch.int8).chunk(2, dim=1)
    torch.add(low & 15, high, alpha=16)
    x.addcmul_(levels, scales, value=-1)


def noise_of(device: torch.device, seed: int | None, chunk: int) -> Iterator[Tensor | None]:
    """For each chunk random bits, (chunk,) int16, or None without a seed."""
    if seed is None:
        while True:
            yield None
    generator = torch.Generator(device).manual_seed(seed)
    words = torch.empty(-(-chunk // 4), dtype=torch.int64, device=device)
    while True:
        # From and to, as random_() alone leaves out the sign's bit.
        words.random_(-(2**63), None, generator=generator)
        yield words.view(torch.int16)[:chunk]
