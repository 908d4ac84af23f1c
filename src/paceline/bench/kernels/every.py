"""All cases: the operators at shapes that people train, in the order of the report.

A cost is the least that any implementation must do: each tensor read or written once.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Generator, Tensor

from paceline.bench.kernels.cases import KernelCase, KernelCost, Make, normal, whole_numbers
from paceline.comm.compress.codecs import codec_of
from paceline.config.comm import BLOCK, codec
from paceline.kernels.activations import gated
from paceline.kernels.adamw import adamw_
from paceline.kernels.batch_norm import batch_norm_act
from paceline.kernels.experts import grouped_linear, permute, unpermute
from paceline.kernels.loss import cross_entropy, linear_cross_entropy
from paceline.kernels.norm import add_rms_norm, rms_norm
from paceline.kernels.rope import rotate

Shapes = tuple[tuple[int, ...], ...]
SHAPES: dict[str, Shapes] = {
    # Rows and width: the streams of models of 8, 70 and 405 billion, and heads' queries.
    "norm": ((8192, 4096), (8192, 8192), (4096, 16384), (8192 * 32, 128)),
    # Tokens and width of feed-forward layers.
    "activations": ((8192, 4096), (8192, 14336), (8192, 32768)),
    # Tokens, heads of queries, heads of keys, and width of a head.
    "rope": ((4096, 32, 8, 128), (16384, 32, 8, 128), (16384, 32, 4, 64)),
    # Images, channels and side of a ResNet-50.
    "batch_norm": ((256, 64, 112), (256, 256, 56), (256, 1024, 14), (256, 2048, 7)),
    # Tokens and vocabulary; with the layer before, also the width of the hidden states.
    "cross_entropy": ((8192, 32000), (8192, 131072)),
    "linear_cross_entropy": ((8192, 4096, 131072), (16384, 2048, 128256), (8192, 2048, 50257)),
    # Tokens, width, inner width, experts and copies.
    "experts": ((8192, 2048, 768, 128, 8), (8192, 4096, 14336, 8, 2)),
    # So many matrices of such rows and columns.
    "adamw": ((16, 2048, 2048),),
    # Values in a bucket of gradients.
    "quantize": ((2**24,),),
}
_CODE_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5, "onebit": 0.125}


def cases(dtype: torch.dtype = torch.bfloat16) -> Iterator[KernelCase]:
    """All of them.

    Args:
        dtype: of the tensors; weights of norms and statistics are fp32 where training has them so.
    """
    groups = (_norms, _pointwise, _rotary, _images, _losses, _experts, _optimizers)
    for group in groups:
        yield from group(dtype)
    yield from _compression()


def _tensors(*shapes: tuple[int, ...], dtype: torch.dtype) -> Make:
    return lambda generator: tuple(normal(generator, *shape, dtype=dtype) for shape in shapes)


def _norms(dtype: torch.dtype) -> Iterator[KernelCase]:
    for rows, width in SHAPES["norm"]:
        shape, x, weight = f"{rows} x {width}", (rows, width), (width,)
        once = rows * width * dtype.itemsize
        make = _tensors(x, weight, dtype=dtype)
        costs = KernelCost(2 * once), KernelCost(3 * once)
        yield KernelCase("norm", "rms_norm", shape, make, rms_norm, *costs)
        make = _tensors(x, x, weight, dtype=dtype)
        # Backward, the one gradient that is written is both inputs'.
        costs = KernelCost(4 * once), KernelCost(4 * once)
        yield KernelCase("norm", "add_rms_norm", shape, make, add_rms_norm, *costs)


def _pointwise(dtype: torch.dtype) -> Iterator[KernelCase]:
    for rows, width in SHAPES["activations"]:
        once = rows * width * dtype.itemsize
        yield KernelCase(
            *("activations", "swiglu", f"{rows} x {width}"),
            _tensors((rows, width), (rows, width), dtype=dtype),
            gated,
            KernelCost(3 * once),
            KernelCost(5 * once),
        )


def _rotary(dtype: torch.dtype) -> Iterator[KernelCase]:
    for sizes in SHAPES["rope"]:
        tokens, heads, kv_heads, head_dim = sizes
        once = tokens * (heads + kv_heads) * head_dim * dtype.itemsize
        tables = 2 * tokens * head_dim * 4
        for has_norm in (False, True):
            yield KernelCase(
                "rope",
                "qk_norm_rope" if has_norm else "rope",
                f"{tokens} x {heads}+{kv_heads} x {head_dim}",
                partial(_queries, sizes, dtype, has_norm),
                _rotated,
                KernelCost(2 * once + tables),
                KernelCost((2 + has_norm) * once + tables),
            )


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor
) -> tuple[Tensor, Tensor]:
    q_weight, k_weight = weights or (None, None)
    return rotate(q, cos, sin, q_weight), rotate(k, cos, sin, k_weight)


def _queries(
    sizes: tuple[int, ...], dtype: torch.dtype, has_norm: bool, generator: Generator
) -> tuple[Tensor, ...]:
    tokens, heads, kv_heads, head_dim = sizes
    q, k = (normal(generator, 1, tokens, n, head_dim, dtype=dtype) for n in (heads, kv_heads))
    angles = torch.rand((1, tokens, 1, head_dim), generator=generator, device=generator.device)
    weights = [normal(generator, head_dim, dtype=dtype) for _ in range(2 * has_norm)]
    return q, k, angles.cos(), angles.sin(), *weights


def _images(dtype: torch.dtype) -> Iterator[KernelCase]:
    for images, channels, side in SHAPES["batch_norm"]:
        values = images * channels * side**2
        # Statistics first, so x is read twice each way; and of each value a bit for ReLU.
        forward = 4 * values * dtype.itemsize + values // 8
        backward = 6 * values * dtype.itemsize + 2 * values // 8
        yield KernelCase(
            *("batch_norm", "batch_norm_add_relu", f"{images} x {channels} x {side} x {side}"),
            partial(_pictures, (images, channels, side, side), dtype),
            _normalised,
            KernelCost(forward),
            KernelCost(backward),
        )


def _pictures(
    shape: tuple[int, ...], dtype: torch.dtype, generator: Generator
) -> tuple[Tensor, ...]:
    x, stream = (normal(generator, *shape, dtype=dtype, grad=False) for _ in range(2))
    layout = torch.channels_last
    weights = (normal(generator, shape[1], dtype=torch.float32) for _ in range(2))
    x, stream = (each.contiguous(memory_format=layout).requires_grad_() for each in (x, stream))
    return x, stream, *weights


def _normalised(x: Tensor, stream: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return batch_norm_act(x, stream, weight, bias, None, None, True)


def _losses(dtype: torch.dtype) -> Iterator[KernelCase]:
    """Gradients are made forward; backward reads the factor from above, which is 1."""
    size, backward = dtype.itemsize, KernelCost(4)
    for tokens, vocab in SHAPES["cross_entropy"]:
        yield KernelCase(
            *("loss", "cross_entropy", f"{tokens} x {vocab}"),
            partial(_logits, tokens, vocab, dtype),
            cross_entropy,
            KernelCost(2 * tokens * vocab * size),
            backward,
            is_used_once=True,
        )
    for tokens, width, vocab in SHAPES["linear_cross_entropy"]:
        yield KernelCase(
            *("loss", "linear_cross_entropy", f"{tokens} x {width} x {vocab}"),
            partial(_hidden, tokens, width, vocab, dtype),
            linear_cross_entropy,
            KernelCost(2 * (tokens + vocab) * width * size, 6 * tokens * width * vocab),
            backward,
            is_used_once=True,
        )


def _logits(
    tokens: int, vocab: int, dtype: torch.dtype, generator: Generator
) -> tuple[Tensor, Tensor]:
    return normal(generator, tokens, vocab, dtype=dtype), whole_numbers(generator, vocab, tokens)


def _hidden(
    tokens: int, width: int, vocab: int, dtype: torch.dtype, generator: Generator
) -> tuple[Tensor, Tensor, Tensor]:
    weight = normal(generator, vocab, width, dtype=torch.float32, grad=False) / width**0.5
    hidden = normal(generator, tokens, width, dtype=dtype)
    return hidden, weight.to(dtype).requires_grad_(), whole_numbers(generator, vocab, tokens)


def _experts(dtype: torch.dtype) -> Iterator[KernelCase]:
    for tokens, width, columns, num_experts, copies in SHAPES["experts"]:
        once = tokens * width * dtype.itemsize
        yield KernelCase(
            *("experts", "route_tokens", f"{tokens} x {width}, {copies} of {num_experts} experts"),
            partial(_routed, tokens, width, num_experts, copies, dtype),
            partial(_there_and_back, num_experts=num_experts),
            KernelCost(2 * (1 + copies) * once),
            # Copies are read once more, for the gradients of their weights.
            KernelCost((2 + 3 * copies) * once),
        )
        rows = tokens * copies
        values = rows * width + num_experts * columns * width + rows * columns
        flops = 2 * rows * columns * width
        yield KernelCase(
            *("experts", "grouped_linear", f"{rows} x {columns} x {width}, {num_experts} experts"),
            partial(_rows_of_experts, rows, columns, width, num_experts, dtype),
            grouped_linear,
            KernelCost(values * dtype.itemsize, flops),
            KernelCost(2 * values * dtype.itemsize, 2 * flops),
        )


def _routed(
    tokens: int, width: int, num: int, copies: int, dtype: torch.dtype, generator: Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the experts that each chose, and the scores of these."""
    scores = torch.rand((tokens, num), generator=generator, device=generator.device)
    best = scores.topk(copies, dim=-1)
    x = normal(generator, tokens, width, dtype=dtype)
    return x, best.indices, best.values.requires_grad_()


def _there_and_back(x: Tensor, chosen: Tensor, scores: Tensor, num_experts: int) -> Tensor:
    rows, _, order = permute(x, chosen, num_experts)
    return unpermute(rows, order, scores)


def _rows_of_experts(
    rows: int, columns: int, width: int, num: int, dtype: torch.dtype, generator: Generator
) -> tuple[Tensor, Tensor, Tensor]:
    counts = torch.bincount(whole_numbers(generator, num, rows), minlength=num)
    x = normal(generator, rows, width, dtype=dtype)
    return x, normal(generator, num, columns, width, dtype=dtype), counts


def _optimizers(dtype: torch.dtype) -> Iterator[KernelCase]:
    for number, rows, columns in SHAPES["adamw"]:
        # Of fp32 parameters and moments: all is read and written, but the gradient only read.
        bytes_each = 6 * 4 + dtype.itemsize
        yield KernelCase(
            *("adamw", "adamw", f"{number} x {rows} x {columns}"),
            partial(_state, number, rows, columns, dtype),
            _stepped,
            KernelCost(number * rows * columns * bytes_each),
        )


def _state(
    number: int, rows: int, columns: int, dtype: torch.dtype, generator: Generator
) -> tuple[Tensor, ...]:
    """Parameters, gradients, moments, step counts."""
    kinds = torch.float32, dtype, torch.float32, torch.float32
    made = [
        normal(generator, rows, columns, dtype=kind, grad=False)
        for kind in kinds
        for _ in range(number)
    ]
    squares = [each.square_() for each in made[3 * number :]]
    steps = [torch.ones((), device=generator.device) for _ in range(number)]
    return *made[: 3 * number], *squares, *steps


def _stepped(*state: Tensor) -> list[Tensor]:
    number = len(state) // 5
    lists = [list(state[first : first + number]) for first in range(0, len(state), number)]
    params, grads, firsts, seconds, steps = lists
    adamw_(
        params, grads, firsts, seconds, steps,
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
    )  # fmt: skip
    return [*params, *firsts, *seconds]


def _compression() -> Iterator[KernelCase]:
    """Gradients with their errors, in fp32: coded as they are sent, and decoded."""
    for (num_values,) in SHAPES["quantize"]:
        for name, code_bytes in _CODE_BYTES.items():
            # Values and errors read, errors and decoded values written, codes and scales both.
            bytes_each = 4 + 8 + 4 + 2 * (code_bytes + 4 / BLOCK)
            yield KernelCase(
                *("quantize", f"{name}_with_error", f"{num_values}"),
                partial(_gradients, num_values),
                partial(_coded, name),
                KernelCost(round(num_values * bytes_each)),
            )


def _gradients(num_values: int, generator: Generator) -> tuple[Tensor, Tensor]:
    values = normal(generator, num_values, dtype=torch.float32, grad=False)
    return values, normal(generator, num_values, dtype=torch.float32, grad=False) / 100


def _coded(name: str, values: Tensor, error: Tensor) -> list[Tensor]:
    """What arrives, and the error that stays."""
    coder = codec_of(codec(name))
    payload = torch.zeros(coder.num_bytes(len(values)), dtype=torch.uint8, device=values.device)
    coder.encode_with_error(values, error, payload)
    arrived = torch.empty_like(values)
    coder.decode(payload, arrived)
    return [arrived, error]
