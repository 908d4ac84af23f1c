"""All cases: the operators at shapes that people train, in the order of the report."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Generator, Tensor

from paceline.bench.kernels.cases import KernelCase, Make, normal, whole_numbers
from paceline.comm.compress.codecs import codec_of
from paceline.config.comm import codec
from paceline.kernels import (
    activations,
    adamw,
    batch_norm,
    experts,
    loss,
    norm,
    quantize,
    rope,
)
from paceline.kernels.cost import KernelCost


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
    size = dtype.itemsize
    for rows, width in norm.SHAPES:
        shape, x, weight = f"{rows} x {width}", (rows, width), (width,)
        forward, backward = (
            cost(rows, width, size) for cost in (norm.forward_cost, norm.backward_cost)
        )
        make = _tensors(x, weight, dtype=dtype)
        yield KernelCase("norm", "rms_norm", shape, make, norm.rms_norm, forward, backward)
        make = _tensors(x, x, weight, dtype=dtype)
        added = norm.add_forward_cost(rows, width, size), norm.add_backward_cost(rows, width, size)
        yield KernelCase("norm", "add_rms_norm", shape, make, norm.add_rms_norm, *added)


def _pointwise(dtype: torch.dtype) -> Iterator[KernelCase]:
    size = dtype.itemsize
    for rows, width in activations.SHAPES:
        yield KernelCase(
            *("activations", "swiglu", f"{rows} x {width}"),
            _tensors((rows, width), (rows, width), dtype=dtype),
            activations.gated,
            activations.gated_forward_cost(rows, width, size),
            activations.gated_backward_cost(rows, width, size),
        )


def _rotary(dtype: torch.dtype) -> Iterator[KernelCase]:
    for tokens, heads, kv_heads, head_dim in rope.SHAPES:
        for has_norm in (False, True):
            sizes = tokens, heads, kv_heads, head_dim, dtype.itemsize
            yield KernelCase(
                "rope",
                "qk_norm_rope" if has_norm else "rope",
                f"{tokens} x {heads}+{kv_heads} x {head_dim}",
                partial(_queries, sizes[:4], dtype, has_norm),
                rope.rotate,
                rope.rotate_forward_cost(*sizes),
                rope.rotate_backward_cost(*sizes, has_norm),
            )


def _queries(
    sizes: tuple[int, ...], dtype: torch.dtype, has_norm: bool, generator: Generator
) -> tuple[Tensor, ...]:
    tokens, heads, kv_heads, head_dim = sizes
    q, k = (normal(generator, 1, tokens, n, head_dim, dtype=dtype) for n in (heads, kv_heads))
    angles = torch.rand((1, tokens, 1, head_dim), generator=generator, device=generator.device)
    weights = [normal(generator, head_dim, dtype=dtype) for _ in range(2 * has_norm)]
    return q, k, angles.cos(), angles.sin(), *weights


def _images(dtype: torch.dtype) -> Iterator[KernelCase]:
    for rows, channels in batch_norm.SHAPES:
        side = round((rows / 256) ** 0.5)
        yield KernelCase(
            *("batch_norm", "batch_norm_add_relu", f"256 x {channels} x {side} x {side}"),
            partial(_pictures, (256, channels, side, side), dtype),
            _normalised,
            batch_norm.forward_cost(rows, channels, dtype.itemsize),
            batch_norm.backward_cost(rows, channels, dtype.itemsize),
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
    return batch_norm.batch_norm_act(x, stream, weight, bias, None, None, True)


def _losses(dtype: torch.dtype) -> Iterator[KernelCase]:
    size = dtype.itemsize
    for tokens, vocab in loss.SHAPES[:2]:
        yield KernelCase(
            *("loss", "cross_entropy", f"{tokens} x {vocab}"),
            partial(_logits, tokens, vocab, dtype),
            loss.cross_entropy,
            loss.cross_entropy_forward_cost(tokens, vocab, size),
            loss.cross_entropy_backward_cost(tokens, vocab, size),
            is_used_once=True,
        )
    for tokens, width, vocab in loss.LINEAR_SHAPES:
        yield KernelCase(
            *("loss", "linear_cross_entropy", f"{tokens} x {width} x {vocab}"),
            partial(_hidden, tokens, width, vocab, dtype),
            loss.linear_cross_entropy,
            loss.linear_cross_entropy_forward_cost(tokens, width, vocab, size),
            loss.linear_cross_entropy_backward_cost(tokens, width, vocab, size),
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
    for tokens, width, columns, num_experts, copies in experts.SHAPES[:2]:
        shape = f"{tokens} x {width}, {copies} of {num_experts} experts"
        moved = tokens, width, copies, dtype.itemsize
        yield KernelCase(
            *("experts", "route_tokens", shape),
            partial(_routed, tokens, width, num_experts, copies, dtype),
            partial(_there_and_back, num_experts=num_experts),
            experts.route_forward_cost(*moved),
            experts.route_backward_cost(*moved),
        )
        rows = tokens * copies
        counted = rows, columns, width, num_experts, dtype.itemsize
        yield KernelCase(
            *("experts", "grouped_linear", f"{rows} x {columns} x {width}, {num_experts} experts"),
            partial(_rows_of_experts, rows, columns, width, num_experts, dtype),
            experts.grouped_linear,
            experts.grouped_linear_forward_cost(*counted),
            experts.grouped_linear_backward_cost(*counted),
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
    rows, _, order = experts.permute(x, chosen, num_experts)
    return experts.unpermute(rows, order, scores)


def _rows_of_experts(
    rows: int, columns: int, width: int, num: int, dtype: torch.dtype, generator: Generator
) -> tuple[Tensor, Tensor, Tensor]:
    counts = torch.bincount(whole_numbers(generator, num, rows), minlength=num)
    x = normal(generator, rows, width, dtype=dtype)
    return x, normal(generator, num, columns, width, dtype=dtype), counts


def _optimizers(dtype: torch.dtype) -> Iterator[KernelCase]:
    for number, rows, columns in adamw.SHAPES[:1]:
        yield KernelCase(
            *("adamw", "adamw", f"{number} x {rows} x {columns}"),
            partial(_state, number, rows, columns, dtype),
            _stepped,
            adamw.step_cost(number * rows * columns, 4, dtype.itemsize, 4),
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
    adamw.adamw_(
        params, grads, firsts, seconds, steps,
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
    )  # fmt: skip
    return [*params, *firsts, *seconds]


def _compression() -> Iterator[KernelCase]:
    """Gradients with their errors, in fp32: coded as they are sent, and decoded."""
    num_values = quantize.SHAPES[1]
    for name in ("int8", "fp8", "int4", "onebit"):
        encoding = quantize.encode_cost(name, num_values, 4, has_error=True)
        decoding = quantize.decode_cost(name, num_values, 4, num_ranks=1, add=False)
        yield KernelCase(
            *("quantize", f"{name}_with_error", f"{num_values}"),
            partial(_gradients, num_values),
            partial(_coded, name),
            KernelCost(encoding.bytes + decoding.bytes),
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
