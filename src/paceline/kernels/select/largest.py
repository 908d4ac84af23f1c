"""Select the largest magnitudes without sorting: a threshold from a sample, one pass, an exact end.

How it works: a sample says which magnitude a few more than k values exceed. One pass collects all
that do, and among these few the k largest are found exactly. Where the sample misled and too few
exceed it, it is asked again for a lower threshold; where that lets too many pass, it only takes
longer. So the result is that of sorting in all cases. 1 % of 20 million values on a Xeon core:
`torch.topk` 384 ms, this 25.

On a CPU numpy compares, collects and partitions: torch's comparison into bool takes five times as
long there, and `nonzero` four times.

After: sampled thresholds as in Deep Gradient Compression, https://arxiv.org/abs/1712.01887.
"""

import math

import numpy as np
import torch
from torch import Tensor

from paceline.kernels import switch

# Sampled values; fewer than these are sorted at once. More make the threshold no sharper than the
# margin, fewer miss it often.
_SAMPLE = 1 << 16
# Standard deviations by which more values are asked for than needed: one time in 700 too few come.
_MARGIN = 3.0
# Values of a pass that stay in a core's cache (comm/compress/chunks has the measurement).
_CHUNK = 1 << 17


def largest(values: Tensor, k: int) -> Tensor:
    """Where the k largest magnitudes of (n,) stand, rising: (k,) int64.

    NaN counts as infinity; of equal magnitudes the first are taken.
    """
    if len(values) <= _SAMPLE:
        return _exactly(values, torch.arange(len(values), device=values.device), k)
    sample = _magnitudes(values[:: len(values) // _SAMPLE])
    expected = k / len(values) * len(sample)
    wanted = math.ceil(expected + _MARGIN * math.sqrt(expected) + 1)
    while wanted < len(sample):
        positions = _at_least(values, _kth_largest(sample, wanted))
        if len(positions) >= k:
            return _exactly(values.index_select(0, positions), positions, k)
        wanted *= 2
    return _exactly(values, torch.arange(len(values), device=values.device), k)


def _magnitudes(values: Tensor) -> Tensor:
    return values.abs().nan_to_num_(torch.inf, torch.inf)


def _exactly(values: Tensor, positions: Tensor, k: int) -> Tensor:
    """The positions (m,), rising, of the k largest of m candidates."""
    if k == len(values):
        return positions
    magnitudes = _magnitudes(values)
    threshold = _kth_largest(magnitudes, k)
    chosen = magnitudes > threshold
    equal = magnitudes == threshold
    chosen |= equal & (equal.cumsum(0) <= k - chosen.sum())
    return positions.masked_select(chosen)


def _kth_largest(magnitudes: Tensor, k: int) -> float:
    """torch's own is quadratic on a CPU for some orders of values: 2 s for 300,000 of two kinds."""
    place = len(magnitudes) - k
    if magnitudes.device.type != "cpu":
        return float(magnitudes.kthvalue(place + 1).values)
    dtype = torch.promote_types(magnitudes.dtype, torch.float32)
    return float(np.partition(magnitudes.to(dtype).numpy(), place)[place])


def _at_least(values: Tensor, threshold: float) -> Tensor:
    """Where magnitudes reach a threshold, or are NaN: (m,) int64, rising."""
    if switch.takes("select", values) and values.is_contiguous():
        from paceline.kernels.select import kernel

        return kernel.at_least(values, threshold)
    if values.device.type != "cpu":
        return (values.abs() < threshold).logical_not_().nonzero().view(-1)
    scratch = values.new_empty(_CHUNK, dtype=torch.promote_types(values.dtype, torch.float32))
    below = np.empty(_CHUNK, np.bool_)
    found = []
    for begin in range(0, len(values), _CHUNK):
        part = values[begin : begin + _CHUNK]
        magnitudes = torch.abs(part.to(scratch.dtype), out=scratch[: len(part)]).numpy()
        mask = np.less(magnitudes, threshold, out=below[: len(part)])
        found.append(np.flatnonzero(np.logical_not(mask, out=mask)) + begin)
    return torch.from_numpy(np.concatenate(found))
