"""Quantised weights: a network's matrices in 8 or 4 bits, put into it for each pass.

"int8": each row of a matrix has a scale, and so has each token: its inputs are rounded to 8 bits,
too, and the product is one of whole numbers, summed up without rounding. So no result depends on
its company, and reading takes a quarter of fp32's bytes. It needs a CPU with VNNI. Elsewhere
matrices are written out in each call, which is correct and slow.

"int4": groups of inputs have a scale, and tokens stay as they are (in bf16, the only type for
which torch has a quick product). With many rows it is slower than bf16's, as each number is
unpacked for every few rows. The head takes 8 bits.

What is not quantised: embeddings, norms, routers, stacked experts, and `kv_b_proj` of latent
attention, whose parts are multiplied with queries and results. `paceline.generate.prices` measures
what each form takes.

Papers: rows and tokens https://arxiv.org/abs/2211.10438 (SmoothQuant, without its smoothing).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.serving import WeightForm
from paceline.generate.packed import Product, products_in
from paceline.models.decoder import Decoder
from paceline.models.quantised import HEAD, QuantisedMatrix, matrices_of, quantised

_INT4_GROUPS = (32, 64, 128, 256)
_LEAST = torch.finfo(torch.float32).tiny


def quantised_matrices(
    decoder: Decoder, form: WeightForm, group_size: int
) -> Iterator[tuple[str, QuantisedMatrix]]:
    """The matrices of a network that have fewer bits in a form, with their modules' names.

    Args:
        group_size: weights that share a scale in 4 bits.
    """
    for name, weight in matrices_of(decoder):
        is_narrow = form == "int4" and name != HEAD
        yield name, quantised(weight, 4, group_size) if is_narrow else quantised(weight, 8)


class QuantisedWeights:
    """Of one network, as it was when they were made.

    Args:
        matrices: see `quantised_matrices`.
    """

    def __init__(self, decoder: Decoder, matrices: Iterable[tuple[str, QuantisedMatrix]]) -> None:
        self._decoder, self._inputs = decoder, _Inputs()
        self._linear: dict[nn.Module, Product] = {}
        self._project: Callable[[Tensor, Tensor], Tensor] = F.linear
        self.renew(matrices)

    def renew(self, matrices: Iterable[tuple[str, QuantisedMatrix]]) -> None:
        """Take all matrices anew, one in the place of the other."""
        modules = dict(self._decoder.named_modules())
        self.resident_bytes = 0
        """Of values and scales."""
        for name, matrix in matrices:
            self.resident_bytes += matrix.num_bytes
            if (module := modules.get(name)) is None:  # a tied head
                self._project = _projection(product_of(matrix, None, self._inputs))
            else:
                self._linear[module] = product_of(matrix, module.bias, self._inputs)

    def install(self) -> None:
        """Leave them in the network, whose own matrices may have no memory."""
        for module, product in self._linear.items():
            module.__dict__["forward"] = product

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Within the context the network's products are of quantised matrices."""
        with products_in(self._decoder, self._linear, self._project):
            try:
                yield
            finally:
                self._inputs.forget()


def _projection(product: Product) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, _weight: product(x)


class _Inputs:
    """Tokens in 8 bits; those of the last call are kept, as neighbouring products share them."""

    def __init__(self) -> None:
        self._of: Tensor | None = None

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Round each row by a scale of its own.

        Args:
            x: (..., in_features).

        Returns:
            (num_rows, in_features) uint8, where 128 is zero, and (num_rows, 1) scales in fp32.
        """
        if x is not self._of:
            rows = x.flatten(0, -2).float()
            scales = torch.linalg.vector_norm(rows, torch.inf, -1, keepdim=True)
            scales = scales.mul_(1 / 127).clamp_min_(_LEAST)
            # A half and the cut to whole numbers round: one operator less.
            self._rounded = rows.div(scales).add_(128.5).to(torch.uint8), scales
            self._of = x
        return self._rounded

    def forget(self) -> None:
        """Keep nothing beyond a pass."""
        self._of, self._rounded = None, (torch.empty(0), torch.empty(0))


def product_of(
    matrix: QuantisedMatrix, bias: Tensor | None, inputs: _Inputs | None = None
) -> Product:
    """The function of nn.Linear, the quickest that this device has.

    Args:
        inputs: rounds what products of the same tokens share; None: nobody else has them.
    """
    bias = None if bias is None else bias.detach()
    if has_int8_products(matrix.values.device) and matrix.bits == 8 and matrix.scales.shape[1] == 1:
        return _int8_product(matrix, bias, inputs or _Inputs())
    if _has_int4_product(matrix):
        return _int4_product(matrix, bias)
    return lambda x: F.linear(x, matrix.dequantised(x.dtype), bias)


def has_int8_products(device: torch.device) -> bool:
    """Whether a device multiplies whole numbers of 8 bits without cutting off sums."""
    return (
        device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch.cpu._is_vnni_supported()
    )


def _int8_product(matrix: QuantisedMatrix, bias: Tensor | None, inputs: _Inputs) -> Product:
    packed = torch.ops.onednn.qlinear_prepack(matrix.values, None)
    scales = matrix.scales[:, 0].contiguous()
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    multiply = torch.ops.onednn.qlinear_pointwise

    def product(x: Tensor) -> Tensor:
        rows, of_rows = inputs.rounded(x)
        out = multiply(
            rows, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        ).mul_(of_rows)
        out = out if bias is None else out.add_(bias)
        return out.to(x.dtype).unflatten(0, x.shape[:-1])

    return product


def _has_int4_product(matrix: QuantisedMatrix) -> bool:
    return (
        matrix.bits == 4
        and matrix.values.device.type == "cpu"
        and matrix.group_size in _INT4_GROUPS
        and matrix.values.shape[0] % 16 == 0
    )


def _int4_product(matrix: QuantisedMatrix, bias: Tensor | None) -> Product:
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(matrix.values.int() + 8, 1)
    scales = matrix.scales.T.bfloat16()  # (num_groups, out_features)
    scales_zeros = torch.stack((scales, torch.zeros_like(scales)), 2).contiguous()
    group_size, multiply = matrix.group_size, torch.ops.aten._weight_int4pack_mm_for_cpu

    def product(x: Tensor) -> Tensor:
        rows = x.flatten(0, -2).bfloat16()
        out = multiply(rows, packed, group_size, scales_zeros).to(x.dtype)
        out = out if bias is None else out.add_(bias)
        return out.unflatten(0, x.shape[:-1])

    return product
