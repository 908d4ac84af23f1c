"""Packed weights: a copy of a network's matrices in the order in which a CPU's products read them.

torch's products read a matrix as it lies and put it in order anew in each call. With few rows that
is half of their time: 40 matrices of 1408 x 512 that no cache holds take 0.34 ms each at 8 rows and
0.16 ms packed, in bf16 0.17 and 0.10 ms (measured on two EPYC cores, torch 2.13). The price is a
second copy of the weights.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.decoder import Decoder

Product = Callable[[Tensor], Tensor]


@contextmanager
def products_in(
    decoder: Decoder,
    linear: Mapping[Any, Product],
    project: Callable[[Tensor, Tensor], Tensor],
) -> Iterator[None]:
    """Within the context a network computes with other products.

    Args:
        linear: of its nn.Linear.
        project: of states and the head's matrix to logits.
    """
    for module, product in linear.items():
        module.__dict__["forward"] = product
    before, decoder.project = decoder.project, project
    try:
        yield
    finally:
        decoder.project = before
        for module in linear:
            del module.__dict__["forward"]


def can_pack(decoder: Decoder) -> bool:
    """Whether this CPU has products of packed matrices, and the network lies there in one piece."""
    weights = [module.weight for module in decoder.modules() if type(module) is nn.Linear]
    return torch.backends.mkldnn.is_available() and all(
        type(weight) is nn.Parameter and weight.device.type == "cpu" and _packs(weight.dtype)
        for weight in weights
    )


def _packs(dtype: torch.dtype) -> bool:
    """Whether this CPU has products of packed matrices of a type; of bf16 not without AVX-512 or
    AVX-NE-CONVERT, where oneDNN refuses to pack them."""
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


class PackedWeights:
    """Of one network, as it was when they were packed."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._linear: dict[nn.Module, Product] = {}
        self._matrices: dict[nn.Module, Tensor] = {}
        self.renew()

    def renew(self) -> None:
        """Pack the network's weights as they are now, one in the place of the other."""
        for module in self._decoder.modules():
            if type(module) is nn.Linear:
                self._linear[module] = _product(self._packed(module), module.bias)
        self._project = self._packed_head()

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Within the context the network's products are of packed matrices."""
        with products_in(self._decoder, self._linear, self._project):
            yield

    def _packed_head(self) -> Callable[[Tensor, Tensor], Tensor]:
        embed = self._decoder.embed
        if embed is None or self._decoder.head is not None:
            return F.linear
        product = _product(self._packed(embed), None)
        return lambda x, weight: product(x)

    def _packed(self, module: nn.Linear | nn.Embedding) -> Tensor:
        packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach())
        if module not in self._matrices:
            self._matrices[module] = packed
            return packed
        # The C library would seldom find room for it where the old one was freed.
        return self._matrices[module].copy_(packed)


def _product(packed: Tensor, bias: Tensor | None) -> Product:
    """The function of nn.Linear.

    Args:
        packed: its matrix. bias: (out_features,).
    """
    bias = None if bias is None else bias.detach()
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
