"""AdamW's step for a list of tensors, in Triton: mostly one launch for all of them.

Every tensor is cut into blocks of 256 values within its rows, as 8-bit codes are (`eight_bit`);
tensors without codes count as one row. A program steps some blocks of one tensor. Two tables tell
it which: `chunks` has, per program, the tensor and its first block; `table` has, per tensor, the
addresses of everything that belongs to it. Both are kept from step to step.

An address from a table has no known alignment, and loads of unknown alignment are of one value
each. So the host looks: tensors whose addresses and rows are multiples of 16 bytes and values take
one launch, which is told so; what is left (biases of odd length) takes another.

bf16 is read and written as integers of 16 bits: rounding is integer arithmetic on fp32's bits.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.adamw.eight_bit import BLOCK, Coded, _levels
from paceline.kernels.adamw.reference import AdamWSettings, AdamWTensors, Moment
from paceline.kernels.launch import Kernel, Launch
from paceline.kernels.operator import Operator

# What the table says of a tensor.
_WORDS = 11
_ALIGNMENT = 16


@triton.jit
def _pointer(address, TYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE))
    if IS_ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _read(address, where, inside, IS_SHORT: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """fp32 numbers of fp32 or, if short, of bf16."""
    if IS_SHORT:
        short = tl.load(_pointer(address, tl.int16, IS_ALIGNED) + where, mask=inside, other=0)
        return (short.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return tl.load(_pointer(address, tl.float32, IS_ALIGNED) + where, mask=inside, other=0.0)


@triton.jit
def _one_minus_power(log_beta, count):
    """1 - beta^count, to fp32's precision also where the power is close to one."""
    x = log_beta * count
    series = 1 + x / 8
    series = 1 + x / 7 * series
    series = 1 + x / 6 * series
    series = 1 + x / 5 * series
    series = 1 + x / 4 * series
    series = 1 + x / 3 * series
    series = 1 + x / 2 * series
    return tl.where(x > -0.5, -x * series, 1 - tl.exp(x))


@triton.jit
def _decoded(codes, scales, levels, where, blocks, inside, known, IS_ALIGNED: tl.constexpr):
    code = tl.load(_pointer(codes, tl.uint8, IS_ALIGNED) + where, mask=inside, other=0)
    scale = tl.load(_pointer(scales, tl.float32, False) + blocks, mask=known, other=0.0)
    return tl.load(levels + code.to(tl.int32)) * scale[:, None]


@triton.jit
def _coded(x, IS_SIGNED: tl.constexpr):
    """Codes of rows of 256 numbers, and their scales.

    Of magnitudes in (10^-(d+1), 10^-d] the levels are evenly spaced, and 2^(7-d) in number, or half
    as many where there is a sign. Nothing is looked up; where a number is halfway between levels,
    to fp32's precision, the code may be the other one than `eight_bit` gives.
    """
    # As integers magnitudes have the same order, and NaN is the largest.
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale = tl.maximum(tl.max(bits, axis=1), 0x00800000).to(tl.float32, bitcast=True)
    share = bits.to(tl.float32, bitcast=True) * (1.0 / scale)[:, None]
    decade = tl.floor(-0.30102999566 * tl.log2(share))
    decade = tl.minimum(tl.maximum(decade, 0.0), 6.0)
    power = tl.exp2(3.32192809489 * decade)
    FINEST: tl.constexpr = 6 if IS_SIGNED else 7
    number = ((127 + FINEST - decade.to(tl.int32)) << 23).to(tl.float32, bitcast=True)
    step = tl.floor((share * power - 0.1) * (number * 1.1111111111) + 0.5)
    if IS_SIGNED:
        place = tl.where(share > 5e-7, tl.maximum(number - 1 + step, 1.0), 0.0)
        place = tl.minimum(place, 127.0)
        code = 127 + tl.where(x < 0, -place, place).to(tl.int32)
    else:
        # A second moment rounded to nothing would let the step explode.
        place = tl.where(x > 0, tl.maximum(number - 2 + step, 1.0), 0.0)
        code = tl.minimum(place, 254.0).to(tl.int32)
    return code.to(tl.uint8), scale


@triton.jit
def _step(
    table, chunks, levels, rate, found_inf,
    lr, rest1, rest2, log_beta1, log_beta2, eps, weight_decay,
    IS_SHORT: tl.constexpr, IS_GRAD_SHORT: tl.constexpr, HAS_MASTER: tl.constexpr,
    IS_CODED: tl.constexpr, IS_ALIGNED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    tensor = tl.load(chunks + 2 * chunk)
    first_block = tl.load(chunks + 2 * chunk + 1)
    entry = table + tensor.to(tl.int64) * 11
    param = tl.load(entry)
    grad = tl.load(entry + 1)
    first = tl.load(entry + 2)
    second = tl.load(entry + 3)
    count = tl.load(_pointer(tl.load(entry + 4), tl.float32, False)) + 1
    width = tl.load(entry + 8)
    blocks_per_row = tl.load(entry + 9).to(tl.int32)
    num_blocks = tl.load(entry + 10).to(tl.int32)
    keep = tl.load(found_inf) == 0
    lr = lr * tl.load(rate)
    if IS_ALIGNED:
        width = tl.multiple_of(width, 16)

    blocks = first_block + tl.arange(0, ROWS)
    known = blocks < num_blocks
    line = (blocks // blocks_per_row).to(tl.int64)
    begin = (blocks % blocks_per_row).to(tl.int64) * 256
    start = line * width + begin
    if IS_ALIGNED:
        start = tl.multiple_of(start, 16)
    columns = tl.arange(0, 256)
    where = start[:, None] + columns[None, :]
    inside = known[:, None] & (begin[:, None] + columns[None, :] < width)

    g = _read(grad, where, inside, IS_GRAD_SHORT, IS_ALIGNED)
    if HAS_MASTER:
        master = tl.load(entry + 5)
        x = _read(master, where, inside, False, IS_ALIGNED)
    else:
        x = _read(param, where, inside, IS_SHORT, IS_ALIGNED)
    if IS_CODED:
        first_scales = tl.load(entry + 6)
        second_scales = tl.load(entry + 7)
        m = _decoded(first, first_scales, levels, where, blocks, inside, known, IS_ALIGNED)
        v = _decoded(second, second_scales, levels + 256, where, blocks, inside, known, IS_ALIGNED)
        v = v * v
    else:
        m = _read(first, where, inside, False, IS_ALIGNED)
        v = _read(second, where, inside, False, IS_ALIGNED)

    m = m + rest1 * (g - m)
    v = v - rest2 * v + rest2 * g * g
    correction = _one_minus_power(log_beta1, count)
    root = 1 / tl.sqrt(_one_minus_power(log_beta2, count))
    change = lr / correction * (m / (tl.sqrt(v) * root + eps))
    x = x - lr * weight_decay * x - change

    # A step that is skipped writes no block. (A scalar mask would do on a GPU; the interpreter's
    # can't be combined with a block's.)
    known = blocks < tl.where(keep, num_blocks, 0)
    inside = inside & known[:, None]
    if IS_CODED:
        # What lies beyond a row's end must not count for the scale.
        m_code, m_scale = _coded(tl.where(inside, m, 0.0), True)
        v_code, v_scale = _coded(tl.where(inside, tl.sqrt(v), 0.0), False)
        tl.store(_pointer(first, tl.uint8, IS_ALIGNED) + where, m_code, mask=inside)
        tl.store(_pointer(second, tl.uint8, IS_ALIGNED) + where, v_code, mask=inside)
        tl.store(_pointer(first_scales, tl.float32, False) + blocks, m_scale, mask=known)
        tl.store(_pointer(second_scales, tl.float32, False) + blocks, v_scale, mask=known)
    else:
        tl.store(_pointer(first, tl.float32, IS_ALIGNED) + where, m, mask=inside)
        tl.store(_pointer(second, tl.float32, IS_ALIGNED) + where, v, mask=inside)
    if HAS_MASTER:
        tl.store(_pointer(master, tl.float32, IS_ALIGNED) + where, x, mask=inside)
    if IS_SHORT:
        bits = x.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        # Adding to the bits of NaN could carry into the sign.
        short = tl.where(x != x, 0x7FC0, bits >> 16).to(tl.int16)
        tl.store(_pointer(param, tl.int16, IS_ALIGNED) + where, short, mask=inside)
    else:
        tl.store(_pointer(param, tl.float32, IS_ALIGNED) + where, x, mask=inside)


_TAKES = (
    "table: *i64; chunks: *i32; levels rate found_inf: *fp32; "
    "lr rest1 rest2 log_beta1 log_beta2 eps weight_decay: fp32"
)


def _kernel(name: str, rows: int, warps: int, *, coded: Sequence[bool], aligned: bool) -> Kernel:
    """Of fp32; of bf16; of bf16 with masters."""
    variants = [
        {"IS_SHORT": short, "IS_GRAD_SHORT": short, "HAS_MASTER": master, "IS_CODED": is_coded,
         "IS_ALIGNED": aligned}
        for is_coded in coded
        for short, master in ((False, False), (True, False), (True, True))
    ]  # fmt: skip
    usual = Launch({"ROWS": rows}, warps)
    others = [Launch({"ROWS": rows}, warps) for rows in (4, 8, 16) for warps in (2, 4, 8)]
    return Kernel(name, _step, _TAKES, lambda _: usual, (2**26,), variants, lambda _: others)


# Of each tensor a thread has 16 values in flight; 8 where coding needs registers; 4 where each has
# an address of its own.
STEP = _kernel("adamw.step", 8, 4, coded=(False,), aligned=True)
CODED_STEP = _kernel("adamw.coded_step", 8, 8, coded=(True,), aligned=True)
UNALIGNED_STEP = _kernel("adamw.unaligned_step", 2, 4, coded=(False, True), aligned=False)
KERNELS = (STEP, CODED_STEP, UNALIGNED_STEP)


def step_(tensors: AdamWTensors, settings: AdamWSettings) -> None:
    """Step each parameter in place, see `adamw_`."""
    params, grads, firsts, seconds, steps, masters = tensors
    is_given = isinstance(settings.lr, Tensor)
    _operator(
        list(params),
        list(grads),
        *_parts(firsts),
        *_parts(seconds),
        list(steps),
        list(masters or ()),
        settings.lr if is_given else None,
        settings.found_inf,
        1.0 if is_given else float(settings.lr),
        *map(float, settings.betas),
        float(settings.eps),
        float(settings.weight_decay),
    )


def _parts(moments: Sequence[Moment]) -> tuple[list[Tensor], list[Tensor]]:
    """Numbers or codes, then their scales."""
    values = [each.codes if isinstance(each, Coded) else each for each in moments]
    return values, [each.scales for each in moments if isinstance(each, Coded)]


def _run(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    firsts: Sequence[Tensor],
    first_scales: Sequence[Tensor],
    seconds: Sequence[Tensor],
    second_scales: Sequence[Tensor],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor],
    rate: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    grads = [_laid_out_like(p, grad) for p, grad in zip(params, grads, strict=True)]
    columns = [params, grads, firsts, seconds, steps, masters, first_scales, second_scales]
    groups = _grouped(columns)
    device = params[0].device
    rates, skip = _scalar(rate, 1.0, device), _scalar(found_inf, 0.0, device)
    levels = _all_levels(device) if first_scales else skip
    logs = [math.log(beta) if beta else -math.inf for beta in (beta1, beta2)]
    numbers = lr, 1 - beta1, 1 - beta2, *logs, eps, weight_decay
    for kind, entries in groups.items():
        num_blocks = tuple(entry[_NUM_BLOCKS] for entry in entries)
        size = sum(num_blocks) * BLOCK
        kernel = (CODED_STEP if first_scales else STEP) if kind.is_aligned else UNALIGNED_STEP
        rows = kernel.at(size, params[0]).blocks["ROWS"]
        table, chunks = _table(tuple(entries), device), _chunks(num_blocks, rows, device)
        _keep_if_captured(table, chunks)
        kernel(
            (len(chunks.near),),
            size,
            params[0],
            table.near,
            chunks.near,
            levels,
            rates,
            skip,
            *numbers,
            IS_SHORT=kind.is_short,
            IS_GRAD_SHORT=kind.is_grad_short,
            HAS_MASTER=bool(masters),
            IS_CODED=bool(first_scales),
            IS_ALIGNED=kind.is_aligned,
        )
    torch._foreach_add_(list(steps), (skip == 0).to(torch.float32))
    torch.autograd.graph.increment_version(list(params))


class _Kind(NamedTuple):
    """What the tensors of one launch have in common."""

    is_short: bool
    is_grad_short: bool
    is_aligned: bool


_Entry = tuple[int, ...]
"""A tensor's words in the table: addresses of all that belongs to it, 0 for what it hasn't; the
width of a row; blocks of a row and in all."""
_NUM_BLOCKS = 10


def _grouped(columns: Sequence[Sequence[Tensor]]) -> dict[_Kind, list[_Entry]]:
    """Words of all tensors that aren't empty, by what one launch can do.

    Args:
        columns: parameters, and by kind what belongs to each: as many, or none.
    """
    params, grads, *_, scales = columns
    nothing = [0] * len(params)
    addresses = zip(
        *(list(map(Tensor.data_ptr, column)) or nothing for column in columns), strict=True
    )
    groups: dict[_Kind, list[_Entry]] = {}
    for place, (words, param, grad) in enumerate(zip(addresses, params, grads, strict=True)):
        num_values = width = param.numel()
        if not num_values:
            continue
        num_blocks = blocks_per_row = -(-num_values // BLOCK)
        if scales:
            num_blocks, blocks_per_row = scales[place].numel(), scales[place].shape[-1]
            width = num_values * blocks_per_row // num_blocks
        # Steps and scales, the fifth and the last two, are read one by one.
        all_bits = words[0] | words[1] | words[2] | words[3] | words[5] | width
        kind = _Kind(
            param.dtype == torch.bfloat16, grad.dtype == torch.bfloat16, not all_bits % _ALIGNMENT
        )
        entry = (*words, width, blocks_per_row, num_blocks)
        groups.setdefault(kind, []).append(entry)
    return groups


def _laid_out_like(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient, its values in the parameter's order in memory."""
    if grad.stride() == param.stride() or (grad.is_contiguous() and param.is_contiguous()):
        return grad
    return torch.empty_like(param, dtype=grad.dtype).copy_(grad)


class _Placed(NamedTuple):
    """A table on the device and, for copies under way and captured ones, on the host."""

    far: Tensor
    near: Tensor


_captured: list[_Placed] = []
"""Tables that CUDA graphs read, for as long as the process lives."""


def _keep_if_captured(*tables: _Placed) -> None:
    if tables[0].near.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured.extend(tables)


def _place(table: Tensor, device: torch.device) -> _Placed:
    if device.type != "cuda":
        return _Placed(table, table.to(device))
    far = table.pin_memory()
    return _Placed(far, far.to(device, non_blocking=True))


@lru_cache(maxsize=64)
def _table(entries: tuple[_Entry, ...], device: torch.device) -> _Placed:
    """The tensors' words: (tensors, words) int64."""
    table = torch.tensor(entries, dtype=torch.int64)
    assert table.shape[1] == _WORDS
    return _place(table, device)


@lru_cache(maxsize=64)
def _chunks(num_blocks: tuple[int, ...], rows: int, device: torch.device) -> _Placed:
    """Each program's tensor and first block: (programs, 2) int32."""
    programs = torch.tensor([-(-each // rows) for each in num_blocks])
    tensor = torch.arange(len(programs)).repeat_interleave(programs)
    begins = (programs.cumsum(0) - programs)[tensor]
    first = (torch.arange(len(tensor)) - begins) * rows
    return _place(torch.stack([tensor, first], dim=1).to(torch.int32), device)


@lru_cache
def _all_levels(device: torch.device) -> Tensor:
    """Levels with a sign, then those without: (512,) fp32, so that any byte finds something."""
    table = torch.zeros(2, 256)
    for row, signed in enumerate((True, False)):
        table[row, :255] = _levels(torch.device("cpu"), signed)
    return table.view(-1).to(device)


def _scalar(given: Tensor | None, default: float, device: torch.device) -> Tensor:
    """A number on the device, () fp32."""
    if given is None:
        return _constant(default, device)
    return given.to(device, torch.float32, non_blocking=True)


@lru_cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, device=device)


_operator = Operator(
    "adamw_",
    _run,
    lambda *arguments: None,
    mutates=(
        "params", "firsts", "first_scales", "seconds", "second_scales", "steps", "masters",
    ),
)  # fmt: skip
