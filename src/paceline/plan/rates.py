"""Rates: how long a device takes for one kernel, by the sizes of its work.

How it works. A device's curve holds the share of its peak that matrix products of a grid of sizes
reach. Between the grid's points the logarithm of the share is interpolated in the logarithms of
(m, n, k); beyond the largest sizes it stays. No product is faster than the peak, or than its
operands can pass through memory. On a GPU a product smaller than the grid takes as long as the
grid's smallest, since the hardware pads it to a tile.

Where a device's kernels keep to one tile (`MatmulCurve.tile`), the result is cut into tiles and
every processor takes one at a time: the last wave takes as long as a full one, however few tiles it
has. Most of the ratio of whole waves to the work is taken out of the grid and put back at the asked
sizes. It helps on Ampere, Ada and Blackwell's workstation parts; the data centre parts from Hopper
on have kernels that adapt, and there the plain interpolation misses less. On shapes that a grid
leaves out, sides multiples of 64, it misses by 2 to 5 % (median; 9 to 18 % for the worst tenth), as
`tools/derive_curves.py --check` prints.

Fused attention counts the visible share of the square. Its rate depends on the keys that a query
sees; and with samples x heads x blocks of queries too few for the device's processors, on the
longest block.

What it is not: a model of power and temperature, which move the same product by 7 % (median) and up
to 30 % between the frameworks of the tables, or of several kernels at a time.

All functions broadcast numpy arrays, take scalars, and return seconds as float arrays.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.config.catalogue.curves import KnownCurves, catalogue_curves
from paceline.config.curves import DeviceCurves
from paceline.config.device import Device
from paceline.config.errors import InputError
from paceline.config.figure import Figure
from paceline.plan.grids import attention_grid, memory_grid, product_grid

Array = npt.NDArray[np.float64]
Sizes = npt.ArrayLike

# Start and end of a kernel that only moves data, and the part of the bandwidth it sees: corrections
# that aiconfigurator-core's systems/*.yaml give for all its GPUs.
KERNEL_S = 3e-6
MEMORY_SHARE = 0.8
# Queries that one processor works on at a time in fused attention.
ATTENTION_BLOCK = 128
# Backward attention: five products of the square where forward has two.
BACKWARD_WORK = 2.5
# The first FlashAttention takes about twice as long as the second, with either head size and mask,
# on A100 and H100 (arXiv:2307.08691, section 4.1: 25 to 40 % of A100's peak against 50 to 73 %).
FLASH1_TIME = 2.0
# Bytes of a product's operands and of its result.
_OPERAND_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5}
_RESULT_BYTES = _OPERAND_BYTES | {"fp8": 2, "fp4": 2}
# Whose curve stands in for an arithmetic that was not measured, the first that was.
_STAND_INS = {"fp16": ("bf16",), "bf16": ("fp16",), "fp8": ("bf16", "fp16"), "fp4": ("fp8", "bf16")}
_ANY = ("tf32", "bf16", "fp16", "fp32")


def peak_flops(device: Device, precision: str) -> float:
    """Dense peak of matrix products in FLOP/s.

    Raises:
        InputError: it is not known.
    """
    figure = device.peak(precision)
    if figure is None and precision == "tf32":
        figure = device.peak("fp32")
    if figure is None:
        raise InputError(
            f"the {precision} peak of {device.name} is not known: measure it with `paceline bench` "
            f"or give cluster.device.peak_flops.{precision}."
        )
    return figure.value


def matmul_s(device: Device, precision: str, m: Sizes, n: Sizes, k: Sizes) -> Array:
    """Seconds of the product (m, k) x (k, n).

    Never less for more work where the curve has no tile. Where it has one, a product that fills its
    waves can beat one that is a little smaller (seen: by up to 17 %).

    Raises:
        InputError: the device's peak is not known, or nothing was measured of anything like it.
    """
    sizes = _floats(m), _floats(n), _floats(k)
    seconds = _products(_DeviceKey(device), precision)
    if all(size.size == 1 for size in sizes):
        one = seconds.of_one(*(size.item() for size in sizes))
        return np.full(np.broadcast_shapes(*(size.shape for size in sizes)), one)
    return seconds.of_many(*sizes)


def attention_s(
    device: Device,
    precision: str,
    backend: str,
    batch: Sizes,
    heads: Sizes,
    q_len: Sizes,
    kv_len: Sizes,
    head_dim: Sizes,
    visible: Sizes,
    backward: bool = False,
) -> Array:
    """Seconds of attention over batch x heads squares of q_len x kv_len.

    Args:
        device: what it runs on.
        precision: of the other products; where those are of 8 bits or less, attention is bf16.
        backend: "flash", "flash3" or "unfused" (see `config.curves.DeviceCurves`), or "flash1":
            `FLASH1_TIME` times the seconds of "flash"; a fused one that was not measured costs its
            products.
        batch: samples.
        heads: of queries, on this rank.
        q_len: queries of a sample.
        kv_len: keys of a sample.
        head_dim: columns of a head.
        visible: share of the square that the mask leaves: 0.5 causal, 1 all.
        backward: the backward pass alone, which starts from queries, keys and values.

    Raises:
        InputError: as `matmul_s`.
    """
    precision = "bf16" if precision in ("fp8", "fp4") else precision
    squares = _floats(batch) * _floats(heads)
    q_len, kv_len = _floats(q_len), _floats(kv_len)
    head_dim, visible = _floats(head_dim), _floats(visible)
    curve = _attention_curve(_DeviceKey(device), backend, precision)
    if curve is None:
        products = _attention_products_s(
            device, precision, squares, q_len, kv_len, head_dim, backward
        )
        if backend != "unfused":
            return products * visible
        return products + _softmax_s(device, precision, squares, q_len, kv_len, backward)
    # A kernel that computes the whole square gains nothing by a mask; its curve counts half.
    seen = np.full_like(visible, 0.5) if backend == "unfused" else visible
    forward_flops = 4 * squares * q_len * kv_len * head_dim * seen
    share = curve.share(2 * seen * kv_len, head_dim, backward)
    flops = forward_flops * (BACKWARD_WORK if backward else 1)
    seconds = flops / (peak_flops(device, precision) * share)
    if curve.processors is not None:
        blocks = squares * np.ceil(q_len / ATTENTION_BLOCK)
        seconds = KERNEL_S + seconds * wave_quantization(
            blocks, curve.processors, np.minimum(2.0, 1 / np.maximum(seen, 1e-9))
        )
    return seconds


def memory_s(device: Device, num_bytes: Sizes) -> Array:
    """Seconds of one kernel that reads and writes so many bytes in all.

    Raises:
        InputError: the device's memory bandwidth is not known.
    """
    return _memory(_DeviceKey(device))(_floats(num_bytes))


def origins(device: Device) -> dict[str, str]:
    """Where each rate of a device comes from: sentences that begin measured, cited or assumed."""
    found = {f"peak.{key}": _cited(figure) for key, figure in device.peak_flops.items()}
    if device.memory_bytes_per_s is not None:
        found["memory_bandwidth"] = _cited(device.memory_bytes_per_s)
    if device.streamed_bytes_per_s is not None:
        found["streamed_weights"] = _cited(device.streamed_bytes_per_s)
        found["streaming"] = "assumed: hidden behind products; the store steps at the same pace"
    found["memory"] = (
        f"assumed: {KERNEL_S * 1e6:g} us, and bytes over {MEMORY_SHARE:.0%} of the bandwidth"
    )
    found["attention.unfused"] = "assumed: its products, and the softmax by the bytes it moves"
    known = _known(_DeviceKey(device))
    if known is None:
        return found
    for kind, curves in (("matmul", known.curves.matmul), ("attention", known.curves.attention)):
        for key, curve in curves.items():
            found[f"{kind}.{key}"] = "; ".join(filter(None, (known.assumed, curve.source)))
    if known.curves.memory is not None:
        found["memory"] = known.curves.memory.source
    return found


def _cited(figure: Figure) -> str:
    return f"{figure.origin}: {figure.source}"


def wave_quantization(blocks: Array, processors: int, longest: Sizes = 2.0) -> Array:
    """How much longer `blocks` pieces of work take than on processors that are all busy.

    Args:
        blocks: pieces, each done by one processor.
        processors: of the device.
        longest: the longest piece over their mean.

    With few pieces the longest one decides, with many their sum: the root of the sum of squares
    of the two joins the cases, and is never less for more pieces.
    """
    return np.sqrt(1 + (np.asarray(longest) * processors / np.maximum(blocks, 1)) ** 2)


# Curves, prepared once per device


class _DeviceKey:
    """A device as a key of caches: itself, not its value, which would take long to compare."""

    __slots__ = ("device",)

    def __init__(self, device: Device) -> None:
        self.device = device

    def __hash__(self) -> int:
        return id(self.device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DeviceKey) and other.device is self.device


@functools.lru_cache(maxsize=64)
def _known(key: _DeviceKey) -> KnownCurves | None:
    device = key.device
    if device.curves is not None:
        return KnownCurves(device.curves, 1.0, "")
    return catalogue_curves(device.name)


def _curves(key: _DeviceKey) -> KnownCurves:
    known = _known(key)
    if known is None:
        raise InputError(
            f"nothing is known of how fast {key.device.name} really is: measure it with "
            "`paceline bench`, or plan with a device of the catalogue."
        )
    return known


class _Products(NamedTuple):
    """Seconds of a product on a device by (m, n, k)."""

    of_many: Callable[[Any, Any, Any], Any]
    of_one: Callable[[float, float, float], float]
    """The same, of numbers, remembered: one layout asks for few shapes many times."""


@functools.lru_cache(maxsize=256)
def _products(key: _DeviceKey, precision: str) -> _Products:
    device = key.device
    peak = peak_flops(device, precision)
    curves, scale, _ = _curves(key)
    measured = _stand_in(precision, curves)
    measured_peak = _peak_of(device, (measured, *_STAND_INS.get(measured, ()), precision))
    grid = product_grid(curves.matmul[measured], measured_peak, curves.num_processors, scale)
    # A slower arithmetic takes longer to compute, and no longer to start or to end.
    best = min(1.0, scale * max(curves.matmul[measured].share))
    slower_s = max(0.0, 1 / peak - 1 / measured_peak) / best
    faster = min(1.0, measured_peak / peak)
    operand, result = _OPERAND_BYTES[precision], _RESULT_BYTES[precision]
    memory = device.memory_bytes_per_s
    byte_s = 0.0 if memory is None else 1 / memory.value

    def seconds(m: Any, n: Any, k: Any) -> Any:
        flops = 2 * m * n * k
        moved = (operand * k * (m + n) + result * m * n) * byte_s
        time = grid(m, n, k) * faster + flops * slower_s
        return np.maximum(np.maximum(time, moved), flops / peak)

    @functools.lru_cache(maxsize=2**14)
    def of_one(m: float, n: float, k: float) -> float:
        return float(seconds(np.float64(m), np.float64(n), np.float64(k)))

    return _Products(seconds, of_one)


def _peak_of(device: Device, precisions: Sequence[str]) -> float:
    """The first of these peaks that is known."""
    known = (device.peak(precision) for precision in precisions)
    return next(figure.value for figure in known if figure is not None)


def _stand_in(precision: str, curves: DeviceCurves) -> str:
    for name in (precision, *_STAND_INS.get(precision, ()), *_ANY, *curves.matmul):
        if name in curves.matmul:
            return name
    raise InputError(
        "a device's measured curves have no matrix products: measure them with `paceline bench`."
    )


class _Attention(NamedTuple):
    """A fused kernel of a device."""

    share: Callable[[Array, Array, bool], Array]
    """Of the peak, by keys that count as a causal sequence's, columns of a head, and direction."""
    processors: int | None


@functools.lru_cache(maxsize=256)
def _attention_curve(key: _DeviceKey, backend: str, precision: str) -> _Attention | None:
    """None: priced as its products."""
    curves, scale, _ = _curves(key)
    name = backend
    if backend not in curves.attention and backend != "unfused":
        name = "flash"
        scale = scale / FLASH1_TIME if backend == "flash1" else scale
    if name not in curves.attention:
        return None
    curve = curves.attention.get(f"{name}.{precision}", curves.attention[name])
    forward, backward = attention_grid(curve, True, scale), attention_grid(curve, False, scale)

    def share(keys: Array, head_dim: Array, is_backward: bool) -> Array:
        read = backward if is_backward else forward
        return np.exp(read(np.log(np.maximum(keys, 1e-9)), np.log(head_dim)))

    return _Attention(share, curves.num_processors)


def _attention_products_s(
    device: Device,
    precision: str,
    squares: Array,
    q_len: Array,
    kv_len: Array,
    head_dim: Array,
    backward: bool,
) -> Array:
    """The batched products of unmasked attention, each as one tall product of as many tiles."""
    rows = squares * q_len
    scores = matmul_s(device, precision, rows, kv_len, head_dim)
    values = matmul_s(device, precision, rows, head_dim, kv_len)
    if not backward:
        return scores + values
    return scores + values + 2 * matmul_s(device, precision, squares * kv_len, head_dim, q_len)


def _softmax_s(
    device: Device, precision: str, squares: Array, q_len: Array, kv_len: Array, backward: bool
) -> Array:
    """Reading the scores and writing their softmax; backward reads two of that size."""
    passes = 3 if backward else 2
    return memory_s(device, passes * _RESULT_BYTES[precision] * squares * q_len * kv_len)


@functools.lru_cache(maxsize=64)
def _memory(key: _DeviceKey) -> Callable[[Array], Array]:
    device = key.device
    known = _known(key)
    if known is not None and known.curves.memory is not None:
        return memory_grid(known.curves.memory)
    if device.memory_bytes_per_s is None:
        raise InputError(
            f"the memory bandwidth of {device.name} is not known: measure it with `paceline bench` "
            "or give cluster.device.memory_bytes_per_s."
        )
    byte_s = 1 / (MEMORY_SHARE * device.memory_bytes_per_s.value)
    return lambda num_bytes: KERNEL_S + num_bytes * byte_s


def _floats(sizes: Sizes) -> Array:
    return np.asarray(sizes, float)
