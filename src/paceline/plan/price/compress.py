"""Compress: what the mean of replicas' gradients takes in each form that a Job can ask for.

How it works, as `comm.compress` does it: a codec's payloads cross in an all-to-all, are decoded and
added, coded again and gathered; two ranks gather their payloads at once. So a buffer of n values
costs the wire its coded size twice over, but for the rank's own share, and each rank one coding of
n values and nearly two decodings. What is scattered to shards, or gathered from them, crosses once.
PowerSGD sums up two thin factors of every matrix instead. The kernels of compression take time of
the device that computes; a codec that was measured (`paceline bench`) has its own curve, another
one is a number of passes over memory.

When it pays: where (1 - 1 / ratio) x bytes / bandwidth, less what was hidden beside the backward
pass, is more than the codec's seconds (https://arxiv.org/abs/2103.00543 finds few such places among
data centres).

Not here: what compression does to the loss.

Legend of shapes: n points.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from paceline.config.comm import Codec, coded_bits
from paceline.config.device import Device
from paceline.config.stack import Stack, constant
from paceline.plan.points import Array
from paceline.plan.rates import memory_s
from paceline.plan.work import PartWork

_FP32_BYTES = 4
# Bytes that coding and decoding move for each value where nothing was measured: eager kernels over
# fp32 values in chunks that stay in a cache. Assumed.
_CODING_BYTES = {
    "fp16": 22, "bf16": 22, "int8": 40, "fp8": 36, "int4": 48, "quinary": 60, "onebit": 44,
    "topk": 60,
}  # fmt: skip
_DECODING_BYTES = {
    "fp16": 14, "bf16": 14, "int8": 20, "fp8": 20, "int4": 26, "quinary": 60, "onebit": 30,
    "topk": 8,
}  # fmt: skip
# Of the units of quinary (comm/compress/scaled.py): values and errors divided (16), multiplied
# (16), the mean read (4).
_UNIT_BYTES = 36
# Passes of PowerSGD over errors and gradients (comm/compress/low_rank.py): added up (12), read for
# P and for Q (8), rebuilt (4), the error left (12).
_LOW_RANK_BYTES = 36


# How often a buffer crosses a rank's link, but for the rank's own share of it.
_CROSSINGS = {"all_reduce": 2, "all_to_all": 1, "all_gather": 1}


def wire_ops(codec: Codec, num_ranks: ArrayLike) -> tuple[tuple[str, Array], ...]:
    """The collectives of a mean in this form, and how often each carries what `bits_per_value`
    says: (n,) each."""
    one = np.ones(1)
    if codec.kind == "none":
        return (("all_reduce", one),)
    if codec.kind == "powersgd":
        return (("all_reduce", one), ("all_reduce", one))
    is_pair = np.asarray(num_ranks) == 2
    return (("all_to_all", np.where(is_pair, 0, one)), ("all_gather", np.where(is_pair, 2, one)))


def bits_per_value(codec: Codec, works: Sequence[PartWork], value_bytes: Array) -> Array:
    """Of a buffer as `wire_ops` carry it: (n,).

    Args:
        codec: in which form.
        works: whose matrices PowerSGD makes thin.
        value_bytes: of a value that isn't compressed.
    """
    if codec.kind == "none":
        return 8 * value_bytes
    if codec.kind == "powersgd":
        # P and Q are about as long as each other. (Bounds ask for parts without their products.)
        thin = codec.argument * _sides(works) / np.maximum(_values(works), 1)
        return 8 * _FP32_BYTES / 2 * thin
    return np.full(1, coded_bits(codec))


def codec_s(device: Device, codec: Codec, num_values: Array, num_ranks: Array) -> Array:
    """Seconds of a rank's coding and decoding for the mean of so many values: (n,)."""
    if codec.kind == "none":
        return np.zeros(1)
    if codec.kind == "powersgd":
        return memory_s(device, num_values * _LOW_RANK_BYTES)
    own_sum = np.where(num_ranks == 2, 0, 1 / np.maximum(num_ranks, 1))  # is never decoded
    decoded = num_values * (2 - own_sum)
    scaled: Array | int = 0
    if codec.kind == "quinary":
        scaled = memory_s(device, num_values * _UNIT_BYTES)
    return scaled + _coding_s(device, codec, num_values, decoded)


def scattering_s(device: Device, codec: Codec, num_values: Array, num_ranks: Array) -> Array:
    """The same where each rank keeps its own part of a sum of so many values, which it never codes
    (`comm.compress.shards`)."""
    others = num_values * (1 - 1 / np.maximum(num_ranks, 1))
    return _coding_s(device, codec, others, others)


def gathering_s(device: Device, codec: Codec, num_values: Array, num_ranks: Array) -> Array:
    """The same where each rank codes its part of so many values, and decodes all parts, its own
    too."""
    coded = num_values / np.maximum(num_ranks, 1)
    return np.where(num_ranks > 1, _coding_s(device, codec, coded, num_values), 0.0)


def _coding_s(device: Device, codec: Codec, coded: Array, decoded: Array) -> Array:
    """Seconds for coding so many values and decoding so many: (n,)."""
    if codec.kind == "none":
        return np.zeros(1)
    curve = device.codecs.get(str(codec))
    if curve is None:
        coding = memory_s(device, coded * _CODING_BYTES[codec.kind])
        return coding + memory_s(device, decoded * _DECODING_BYTES[codec.kind])
    encode, decode = (
        np.interp(values, curve.values, seconds) * np.maximum(values / curve.values[-1], 1)
        for values, seconds in ((coded, curve.encode), (decoded, curve.decode))
    )
    return encode + decode


def sent_bytes(codec: Codec, num_bytes: Array, num_ranks: Array) -> Array:
    """What a rank sends for the mean of a buffer whose form takes so many bytes: (n,)."""
    crossings = sum(_CROSSINGS[op] * often for op, often in wire_ops(codec, num_ranks))
    num_ranks = np.maximum(num_ranks, 1)
    return num_bytes * crossings * (num_ranks - 1) / num_ranks


def waiting_share(device: Device, stack: Stack, num_sent: Array, seconds: Array) -> Array:
    """Part of an exchange's seconds in which its device could compute: (n,), 0 to 1.

    On a CPU whoever sends works: only what a link is slower than a socket can be hidden.

    Args:
        num_sent: bytes that a rank sends.
        seconds: that the exchange takes.
    """
    if not device.is_cpu:
        return np.ones(1)
    busy_s = num_sent / (constant(stack, "socket_gb_per_s") * 1e9)
    return np.clip(1 - busy_s / np.maximum(seconds, 1e-12), 0.0, 1.0)


def _sides(works: Sequence[PartWork]) -> Array:
    """Rows and columns of all weights of the parts, added up."""
    return sum(
        (np.asarray(p.groups * (p.n + p.k)) for work in works for p in work.products if p.trained),
        np.zeros(1),
    )


def _values(works: Sequence[PartWork]) -> Array:
    return sum(
        (np.asarray(p.groups * p.n * p.k) for work in works for p in work.products if p.trained),
        np.zeros(1),
    )
