"""Codecs: how fast this rank's device compresses what it sends, and reads what it receives.

Each codec encodes random values with error feedback and adds what it decodes, as a reduction of
gradients does, while all ranks do the same (`RankTimer`). Small sizes show what a call costs at
all, large ones the rate. Whether compression pays is decided by these seconds as much as by the
link's.
"""

from collections.abc import Callable

import torch

from paceline.bench.clock import Call, RankTimer
from paceline.comm.compress.codec import BlockCodec
from paceline.comm.compress.codecs import codec_of
from paceline.config.comm import codec
from paceline.config.curves import CodecCurve

NAMES = ("fp16", "bf16", "int8", "fp8", "int4", "quinary", "onebit", "topk:0.01", "topk:0.001")
"""What is measured: topk at the two shares that papers use."""
_SIZES = {"cpu": (4096, 65536, 1 << 20, 8 << 20), "cuda": (65536, 1 << 20, 8 << 20, 64 << 20)}
_QUICK_SIZES = {"cpu": (65536, 2 << 20), "cuda": (1 << 20, 16 << 20)}
# Operands of a call rotate through about so many values: more than a core's own caches hold.
_FOOTPRINT_VALUES = 1 << 20


def sizes_of(device_type: str, *, quick: bool) -> tuple[int, ...]:
    """The numbers of values that are measured on a kind of device."""
    return (_QUICK_SIZES if quick else _SIZES)[device_type]


def measure_codecs(
    clock: RankTimer, sizes: tuple[int, ...], source: str, say: Callable[[str], None]
) -> dict[str, CodecCurve]:
    """Measure every codec of NAMES; every rank must call it.

    Args:
        clock: measures.
        sizes: numbers of values, rising.
        source: where, when and by which command.
        say: called with what was done, once for each codec.
    """
    curves = {}
    for name in NAMES:
        pairs = [_seconds(clock, codec_of(codec(name)), size) for size in sizes]
        encode, decode = zip(*pairs, strict=True)
        curves[name] = CodecCurve(
            values=tuple(map(float, sizes)), encode=encode, decode=decode, source=source
        )
        say(name)
    return curves


def _seconds(clock: RankTimer, coder: BlockCodec, num_values: int) -> tuple[float, float]:
    """Seconds to encode so many values and to decode them."""
    copies = range(max(1, min(16, _FOOTPRINT_VALUES // num_values)))
    calls = [_calls(coder, num_values, clock.ranks.device) for _ in copies]
    encodes, decodes = zip(*calls, strict=True)
    return clock.seconds(*encodes), clock.seconds(*decodes)


def _calls(coder: BlockCodec, num_values: int, device: torch.device) -> tuple[Call, Call]:
    values = torch.randn(num_values, device=device)
    error, total = torch.zeros_like(values), torch.zeros_like(values)
    payload = torch.empty(coder.num_bytes(num_values), dtype=torch.uint8, device=device)
    coder.encode(values, payload)
    return (
        lambda: coder.encode_with_error(values, error, payload),
        lambda: coder.decode(payload, total, add=True),
    )
