"""Quantised matrices: weights in 8 or 4 bits, with scales.

A weight is a whole number times a scale; numbers are symmetric around zero. With 8 bits a row of
the matrix has one scale, with 4 bits each group of neighbouring inputs of a row has its own.
Products are elsewhere (`paceline.generate.quantised`).

Papers: rows https://arxiv.org/abs/2208.07339 (LLM.int8), groups https://arxiv.org/abs/2210.17323.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from paceline.models.decoder import Decoder

Bits = Literal[8, 4]
LARGEST = {8: 127, 4: 7}
"""The largest whole number."""
HEAD = "head"
_WRITTEN_OUT_ELSEWHERE = "kv_b_proj"
_AT_ONCE = 1 << 20
"""Weights that are rounded at a time: meanwhile they take 8 bytes each."""


def matrices_of(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The matrices that can be quantised, with their modules' names; a tied head's is that of the
    embedding. `kv_b_proj` of latent attention is multiplied in parts."""
    for name, module in decoder.named_modules():
        if type(module) is nn.Linear and not name.endswith(_WRITTEN_OUT_ELSEWHERE):
            yield name, module.weight.detach()
    if decoder.head is None and decoder.embed is not None:
        yield HEAD, decoder.embed.weight.detach()


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix that is stored in fewer bits."""

    values: Tensor
    """(out_features, in_features) int8; with 4 bits -8 to 7."""
    scales: Tensor
    """(out_features, num_groups) fp32; a group is in_features / num_groups neighbours."""
    bits: Bits

    @property
    def group_size(self) -> int:
        """Weights that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def num_bytes(self) -> int:
        """Of values and scales, as products read them."""
        return self.values.numel() * self.bits // 8 + self.scales.nbytes

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(out_features, in_features), computed in fp32."""
        grouped = self.values.unflatten(1, (-1, self.group_size)).float()
        return (grouped * self.scales[..., None]).flatten(1).to(dtype)


def quantised(
    weight: Tensor,
    bits: Bits,
    group_size: int | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> QuantisedMatrix:
    """Round each weight to the nearest whole multiple of its scale.

    Args:
        weight: (out_features, in_features).
        group_size: weights that share a scale; None: a row. Where it doesn't divide in_features,
            the largest of its halves that does is taken.
        scale_dtype: scales are numbers of this type.

    Returns:
        a matrix that differs from the given one by at most half a scale anywhere.
    """
    rows, columns = weight.shape
    size = group_of(columns, group_size)
    values = torch.empty(rows, columns, dtype=torch.int8, device=weight.device)
    scales = torch.empty(rows, columns // size, dtype=torch.float32, device=weight.device)
    at_once = max(1, _AT_ONCE // columns)
    for start in range(0, rows, at_once):
        part = slice(start, start + at_once)
        grouped = weight.detach()[part].float().unflatten(1, (-1, size))
        scales[part] = scales_of(grouped.abs().amax(-1), bits).to(scale_dtype)
        values[part] = (grouped / scales[part][..., None]).round_().flatten(1)
    return QuantisedMatrix(values, scales, bits)


def scales_of(largest: Tensor, bits: Bits) -> Tensor:
    """The scales of groups whose largest weights these are; of nothing but zeros any scale fits."""
    return (largest / LARGEST[bits]).clamp_min_(torch.finfo(torch.float32).tiny)


def group_of(in_features: int, group_size: int | None) -> int:
    """Weights of a row that share a scale."""
    size = group_size or in_features
    while in_features % size:
        size //= 2
    return size
