"""Kernels: seconds of each part's own kernels for one micro-batch, without communication.

How it works: the operators of all parts (`paceline.plan.work`) are stacked into a few arrays,
and one call per kind of operator prices them (`paceline.plan.rates`).

Legend of shapes: n points.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from paceline.config.layout import PRECISIONS
from paceline.config.stack import constant
from paceline.plan.points import Array, Points, Setting
from paceline.plan.rates import attention_s, matmul_s, memory_s
from paceline.plan.work import LINEAR, PLAIN, WIDE, AttentionOp, MatmulOp, PartWork, rows_of_each

_FP8 = PRECISIONS.index("fp8")
# Products of 16-bit numbers whose rows aren't multiples of 16 bytes run at 30 to 40 % of the rate
# (seen on A100 with a vocabulary of 50,257; NVIDIA's guide to matrix products asks for multiples
# of 8, https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication).
_ALIGNED_NUMBERS = 8
_MISALIGNED_FACTOR = 2.6
# Kernels of a call of attention, forward and backward. Fused: a copy of what it reads, and itself;
# backward the products of rows before it and a cast behind. Else scores, softmax and values, and
# two products backward for each of forward.
_FUSED_CORE, _UNFUSED_CORE = (2, 3), (3, 5)


class Kernels(NamedTuple):
    """Seconds of one part by what computes, before passes are put together."""

    forward: Array
    """Products."""
    last: Array
    """Those that a recomputation leaves out."""
    alternate: Array
    """The second, the fourth and so on of them."""
    input_grad: Array
    weight_grad: Array
    cast_input_grad: Array
    """Of these two, those of products in the layout's own arithmetic, which casts their operands
    where it has 8 bits."""
    cast_weight_grad: Array
    core: Array
    """One call of attention, and the calls."""
    core_backward: Array
    calls: Array
    sweeps: Array
    sweeps_backward: Array
    num_products: Array
    num_trained: Array
    """Of these, those with a gradient of their matrix."""
    num_cores: Array
    """Kernels of attention forward."""
    num_kernels: Array
    """All others forward, and all but products backward."""
    num_kernels_backward: Array


def kernels_of(setting: Setting, points: Points, works: Sequence[PartWork]) -> list[Kernels]:
    """Seconds of the kernels of each part."""
    ahead_cores, back_cores = _UNFUSED_CORE if setting.attention == "unfused" else _FUSED_CORE
    products = _products_s(setting, points, works)
    sweeps = _sweeps_s(setting, works)
    made = []
    for number, work in enumerate(works):
        core, core_backward, calls = _cores_s(setting, points, work.cores)
        passes, cast, last, alternate = products[number]
        ahead, back = sweeps[number]
        made.append(
            Kernels(
                passes[0],
                last,
                alternate,
                passes[1],
                passes[2],
                cast[1],
                cast[2],
                core,
                core_backward,
                calls,
                ahead,
                back,
                _num(rows_of_each(setting, product)[1] for product in work.products),
                _num(rows_of_each(setting, p)[1] for p in work.products if p.trained),
                ahead_cores * calls,
                _num(s.kernels for s in work.sweeps if not s.backward),
                _num(s.kernels for s in work.sweeps if s.backward) + back_cores * calls,
            )
        )
    return made


def _num(counts: Iterable[Array]) -> Array:
    return sum(counts, np.zeros(1))


def _products_s(
    setting: Setting, points: Points, works: Sequence[PartWork]
) -> list[tuple[Array, ...]]:
    """Per part: forward, gradients of inputs and of weights, (3, n) of all products and of those in
    the layout's own arithmetic; what ends the block, and every other one, forward.
    """
    placed = [(at, product) for at, work in enumerate(works) for product in work.products]
    seconds: list[Array] = [np.zeros((3, 1))] * len(placed)
    for arithmetic in (LINEAR, PLAIN, WIDE):
        chosen = [at for at, (_, product) in enumerate(placed) if product.arithmetic == arithmetic]
        if chosen:
            rows = _distinct_s(setting, points, [placed[at][1] for at in chosen], arithmetic)
            for at, row in zip(chosen, rows, strict=True):
                seconds[at] = row
    sums: list[tuple[Array, ...]] = []
    for number in range(len(works)):
        own = [(p, seconds[at]) for at, (part, p) in enumerate(placed) if part == number]
        passes = sum((s for _, s in own), np.zeros((3, 1)))
        cast = sum((s for p, s in own if p.arithmetic == LINEAR), np.zeros((3, 1)))
        last = sum((s[0] for p, s in own if p.ends_block), np.zeros(1))
        alternate = sum((s[0] for _, s in own[1::2]), np.zeros(1))
        sums.append((passes, cast, last, alternate))
    return sums


def _distinct_s(
    setting: Setting, points: Points, products: list[MatmulOp], arithmetic: int
) -> list[Array]:
    """Of each product (3, n): forward and the two gradients; what is alike is priced once."""
    first = {id(product): product for product in products}
    distinct = list(first.values())
    rows = [rows_of_each(setting, product) for product in distinct]
    m, times = stacked([m for m, _ in rows]), stacked([times for _, times in rows])
    n, k = (stacked([getattr(p, name) for p in distinct]) for name in ("n", "k"))
    m, n, k = np.broadcast_arrays(m, n, k)
    shapes = np.stack((m, m, n)), np.stack((n, k, k)), np.stack((k, n, m))
    alone = _by_precision(setting, points, arithmetic, *shapes) * times  # (3, products, n)
    grouped = np.array([np.max(product.groups) > 1 for product in distinct])
    if grouped.any():
        alone = np.maximum(alone, _weights_s(setting, points, distinct))
    if arithmetic == LINEAR and np.any(points.precision == _FP8):
        readers = np.array([[product.readers] for product in distinct])
        trained = np.array([[product.trained] for product in distinct])
        casts = times * _casts_s(setting, points, (m, n, k), readers, trained, grouped[:, None])
        alone = alone + np.where(points.precision == _FP8, casts, 0.0)
    alone = alone * _misaligned(setting, points, n, k) * constant(setting.stack, "matmul_time")
    asked = np.array([(1.0, product.passed, product.trained) for product in distinct])
    alone = alone * asked.T[:, :, None]
    of = dict(zip(first, np.moveaxis(alone, 1, 0), strict=True))
    return [of[id(product)] for product in products]


def _misaligned(setting: Setting, points: Points, n: Array, k: Array) -> Array:
    """What a product with rows of an odd length takes over one whose rows start at 16 bytes.

    Tensor cores read 16 bytes at a time; a GPT-2 vocabulary of 50,257 is the usual case.
    """
    if setting.device.kind != "cuda":
        return np.ones(1)
    odd = (np.mod(n, _ALIGNED_NUMBERS) != 0) | (np.mod(k, _ALIGNED_NUMBERS) != 0)
    return np.where(odd & (points.value_bytes < 4), _MISALIGNED_FACTOR, 1.0)


def _by_precision(
    setting: Setting, points: Points, arithmetic: int, m: Array, n: Array, k: Array
) -> Array:
    """Seconds of products whose arithmetic differs from point to point."""
    device = setting.device
    names = [_arithmetic(PRECISIONS[index], arithmetic) for index in points.precision]
    seconds: Array = np.zeros(1)
    for name in set(names):
        here = matmul_s(device, name, m, n, k)
        is_here = np.array([other == name for other in names]) if len(set(names)) > 1 else None
        seconds = here if is_here is None else np.where(is_here, here, seconds)
    return seconds


def _arithmetic(precision: str, arithmetic: int) -> str:
    if arithmetic == WIDE:
        return "fp64" if precision == "fp64" else "fp32"
    return "bf16" if precision == "fp8" and arithmetic == PLAIN else precision


def _weights_s(setting: Setting, points: Points, products: list[MatmulOp]) -> Array:
    """Seconds to read the matrices of all experts once, which few rows each may not outweigh."""
    numbers = stacked(
        [np.where(np.asarray(p.groups) > 1, p.groups, 0) * p.n * p.k for p in products]
    )
    return memory_s(setting.device, numbers * points.value_bytes)


def _casts_s(
    setting: Setting,
    points: Points,
    sizes: tuple[Array, Array, Array],
    readers: Array,
    trained: Array,
    grouped: Array,
) -> Array:
    """Casting operands to fp8, by the bytes that it moves per number.

    Kernel by kernel, each operand is read for its largest magnitude, read again and written, and
    once more for the products of the backward pass (torchao). A compiler makes one pass of the last
    two, and only one of equal casts (torch._functorch.compile_utils.fx_graph_cse), so that what
    several products read is cast once. By hand, inputs and gradients are read once and written
    twice (TransformerEngine), or what wrote the inputs does that too, but for those of experts; the
    second time is for the gradient of the weights, and left out where they have none. Weights are
    cast once a step, which is `plan.price.step`'s to count.
    """
    m, n, k = sizes
    x, w, y = m * k / np.where(points.compile, readers, 1), n * k, m * n
    first, again = np.where(points.compile, 3.0, 5.0), np.where(points.compile, 2.0, 5.0)
    by_pass = (first * (x + w), first * y + again * w, again * x)
    fused = setting.stack.elementwise == "fused"
    if fused or setting.stack.keeps_fp8:
        written = 1 + trained  # along rows, and along columns for the product over the tokens
        by_pass = (np.where(fused & ~grouped, 0, 2) + written) * m * k, (2 + written) * y, 0 * x
    moved = np.stack(np.broadcast_arrays(*by_pass))
    if setting.stack.fuses_experts:
        moved = np.where(grouped, 0.0, moved)
    return memory_s(setting.device, np.maximum(moved, 1.0)) * (moved > 0)


def _cores_s(
    setting: Setting, points: Points, cores: tuple[AttentionOp, ...]
) -> tuple[Array, Array, Array]:
    """Seconds of a call of attention forward and backward, and the calls."""
    if not cores:
        return np.zeros(1), np.zeros(1), np.zeros(1)
    (core,) = cores
    device, attention = setting.device, setting.attention
    factor = constant(setting.stack, "attention_time")

    def seconds(backward: bool) -> Array:
        found: Array = np.zeros(1)
        for index in np.unique(points.precision):
            name = _arithmetic(PRECISIONS[index], PLAIN)
            here = attention_s(device, name, attention, *core[:6], backward=backward)
            found = np.where(points.precision == index, here, found)
        return found * factor

    return seconds(False), seconds(True), np.asarray(core.calls, float)


def _sweeps_s(setting: Setting, works: Sequence[PartWork]) -> list[tuple[Array, Array]]:
    """Per part: forward and backward."""
    placed = [(at, sweep) for at, work in enumerate(works) for sweep in work.sweeps]
    kernels = stacked([sweep.kernels for _, sweep in placed])
    num_bytes = stacked([sweep.num_bytes for _, sweep in placed])
    has_own = kernels > 0
    each = memory_s(setting.device, num_bytes / np.where(has_own, kernels, 1))
    inside = each - memory_s(setting.device, 0.0)
    seconds = np.where(has_own, each * kernels, inside) * constant(setting.stack, "memory_time")

    def total(part: int, backward: bool) -> Array:
        rows = [
            at
            for at, (number, sweep) in enumerate(placed)
            if number == part and sweep.backward == backward
        ]
        return seconds[rows].sum(0) if rows else np.zeros(1)

    return [(total(part, False), total(part, True)) for part in range(len(works))]


def stacked(columns: Sequence[Array | float]) -> Array:
    """Columns of length n or 1 as rows of one array."""
    return np.stack(np.broadcast_arrays(*map(np.atleast_1d, columns)))
