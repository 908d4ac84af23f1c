"""Grids: measured curves as functions of any sizes, by interpolation in logarithms.

Between points the logarithm of a value is linear in the logarithms of the sizes; what holds beyond
them is said by each function. Where a GPU's kernels keep to one tile, the waves of tiles that its
processors take one after another come in between the points.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.config.curves import AttentionCurve, MatmulCurve, MemoryCurve

Array = npt.NDArray[np.float64]

# Power of the ratio of whole waves to the work that rows between a grid's points show: libraries
# cut some products into smaller tiles. 0.7 has the least errors on all devices with a tile.
WAVE_SHARE = 0.7


def product_grid(
    curve: MatmulCurve, peak: float, processors: int | None, scale: float = 1.0
) -> Callable[[Array, Array, Array], Array]:
    """Interpolate a curve: seconds of (m, k) x (k, n) at a peak, with no other bound.

    Args:
        curve: shares of the peak.
        peak: FLOP/s.
        processors: of a GPU, which pads small products to the grid's smallest; None: not.
        scale: on the shares.
    """
    axes = [np.log(np.array(axis, float)) for axis in (curve.m, curve.n, curve.k)]
    shape = tuple(map(len, axes))
    share = np.minimum(np.array(curve.share, float) * scale, 1.0).reshape(shape)
    table = -np.log(share) - np.log(peak / 2)  # log seconds of one multiplication
    waves = _no_waves
    if curve.tile is not None and processors is not None:
        waves = functools.partial(_waves, rows=curve.tile[0], columns=curve.tile[1], at=processors)
        table -= np.log(waves(np.array(curve.m)[:, None], np.array(curve.n)[None, :]))[..., None]
    read = _interpolate(axes, table)
    least = [curve.m[0], curve.n[0], curve.k[0]] if processors is not None else [1e-9] * 3

    def seconds(m: Array, n: Array, k: Array) -> Array:
        m, n, k = (np.maximum(size, low) for size, low in zip((m, n, k), least, strict=True))
        return np.exp(read(np.log(m), np.log(n), np.log(k))) * (m * n * k) * waves(m, n)

    return seconds


def _no_waves(m: Array, n: Array) -> Array:
    return np.array(1.0)


def _waves(m: Array, n: Array, rows: int, columns: int, at: int) -> Array:
    """Whole waves of tiles over the work: 1 where all processors are busy to the end."""
    whole = np.ceil(np.ceil(m / rows) * np.ceil(n / columns) / at)
    return (whole * (rows * columns * at) / (m * n)) ** WAVE_SHARE


def _interpolate(axes: list[Array], table: Array) -> Callable[..., Array]:
    """A function of as many coordinates as axes; linear between points, constant beyond them."""
    strides = [int(np.prod(table.shape[axis + 1 :])) for axis in range(table.ndim)]
    flat = table.ravel()
    steps = [stride if size > 1 else 0 for stride, size in zip(strides, table.shape, strict=True)]
    counts = [np.arange(len(axis), dtype=float) for axis in axes]

    def read(*coordinates: Array) -> Any:
        corners: list[tuple[Any, Any]] = [(0, 1.0)]
        for x, axis, count, stride, step in zip(
            coordinates, axes, counts, strides, steps, strict=True
        ):
            position = np.interp(x, axis, count)
            low = np.minimum(position.astype(int), max(len(axis) - 2, 0))
            part = position - low
            start = low * stride
            corners = [(at + start, weight * (1 - part)) for at, weight in corners] + [
                (at + start + step, weight * part) for at, weight in corners
            ]
        return sum(flat[at] * weight for at, weight in corners)

    return read


def attention_grid(curve: AttentionCurve, forward: bool, scale: float) -> Callable[..., Array]:
    """A fused kernel's log share of the peak, by log keys of a causal sequence and head size."""
    axes = [np.log(np.array(axis, float)) for axis in (curve.seq_len, curve.head_dim)]
    share = np.array(curve.forward if forward else curve.backward, float) * scale
    return _interpolate(axes, np.log(np.minimum(share, 1.0)).reshape(tuple(map(len, axes))))


def memory_grid(curve: MemoryCurve) -> Callable[[Array], Array]:
    """Seconds by bytes: at least those of the smallest measured, at most the largest's rate."""
    sizes = np.array(curve.bytes, float)
    read = _interpolate([np.log(sizes)], np.log(np.array(curve.seconds, float)))

    def seconds(num_bytes: Array) -> Array:
        within = read(np.log(np.maximum(num_bytes, 1e-9)))
        return np.exp(within) * np.maximum(1.0, num_bytes / sizes[-1])

    return seconds
