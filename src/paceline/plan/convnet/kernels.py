"""Seconds of a convolutional network's kernels, forward and backward, and how many are launched.

Columns: c convolutions, n points; see the package's docstring for how each kind is priced.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from paceline.config.device import Device
from paceline.config.stack import Stack, constant
from paceline.config.vision import ConvNet
from paceline.plan.points import Array
from paceline.plan.rates import matmul_s, memory_s, peak_flops

VALUE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
# Grouped convolutions on tensor cores multiply tiles of so many channels, mostly by zeros where a
# group is narrower (cuDNN's grouped kernels for channels-last images).
_TILE_CHANNELS = 16
# Channels at which a product's outer or inner side is so narrow that it runs at half the rate: the
# operands of tensor cores' tiles are used too few times, or the loop is over too soon. Assumed.
_HALF_RATE_SIDE, _HALF_RATE_SIDE_SCALAR = 48, 8
# Direct kernels (one channel per group) reach about this share of the fp32 peak: assumed.
_DIRECT_SHARE = 0.25
# Bandwidth of the second-level cache over that of memory: 2,155 over 900 GB/s on V100
# (https://arxiv.org/abs/1804.06826); assumed of the others too.
_CACHE_OVER_MEMORY = 2.4
# Kernels that the host launches for a convolution with its norm: forward and backward.
_CONV_KERNELS, _ACTIVATION_KERNELS, _SQUEEZE_KERNELS = 2 + 4, 2, 8 + 14


class ConvolutionTable(NamedTuple):
    """A network's convolutions as columns (c, 1)."""

    in_channels: Array
    out_channels: Array
    kernel: Array
    groups: Array
    out_pixels: Array
    in_elements: Array
    out_elements: Array
    weights: Array
    params: Array
    activates: Array
    adds: Array
    squeezes: Array
    pools: Array
    first: Array
    silu: Array
    skips: Array


@lru_cache(maxsize=64)
def table_of(network: ConvNet) -> ConvolutionTable:
    """A network's convolutions as columns."""
    convs = network.convolutions
    columns = (
        [conv.in_channels for conv in convs],
        [conv.out_channels for conv in convs],
        [conv.kernel for conv in convs],
        [conv.groups for conv in convs],
        [conv.out_side**2 for conv in convs],
        [conv.in_elements for conv in convs],
        [conv.out_elements for conv in convs],
        [conv.num_weights for conv in convs],
        [conv.num_params for conv in convs],
        [conv.activation != "none" for conv in convs],
        [conv.adds for conv in convs],
        [conv.squeeze > 0 for conv in convs],
        [conv.pooled for conv in convs],
        [index == 0 for index in range(len(convs))],
        [conv.activation == "silu" for conv in convs],
        [conv.skips for conv in convs],
    )
    return ConvolutionTable(*(np.array(column, float)[:, None] for column in columns))


def num_launches(network: ConvNet, stack: Stack) -> float:
    """Kernels that the host launches for one micro-batch, forward and backward."""
    if stack.launch == "graph":
        return 1.0
    table = table_of(network)
    eager = stack.elementwise == "eager"
    each = _CONV_KERNELS + (_ACTIVATION_KERNELS * (table.activates + table.adds) if eager else 0)
    return float(np.sum(each + _SQUEEZE_KERNELS * table.squeezes))


def forward_backward_s(
    network: ConvNet, device: Device, stack: Stack, precision: str, batch: Array
) -> tuple[Array, Array]:
    """Seconds of convolutions and of sweeps, (2, c, n) each: forward and backward."""
    table, batch = table_of(network), np.atleast_1d(batch).astype(float)
    value = VALUE_BYTES[precision]
    forward = _product_s(device, stack, precision, table, batch, value)
    towards_input = _product_s(device, stack, precision, _turned(table), batch, value)
    conv = np.stack([forward, forward + towards_input * (1 - table.first)])
    head = matmul_s(device, precision, batch, network.num_classes, network.num_features)
    conv[:, -1] += head * np.array([[1.0], [2.0]])
    conv = conv * constant(stack, "matmul_time")
    passes = _passes(table, stack.elementwise == "fused")
    if transposes_images(device, stack, precision):
        # Input and output around each product are read and written once more.
        moved = 2 * (table.in_elements + table.out_elements)
        passes = passes + np.stack([moved, moved * (2 - table.first)])
    seconds = memory_s(device, passes * batch * value) * constant(stack, "memory_time")
    return conv, seconds


def _turned(table: ConvolutionTable) -> ConvolutionTable:
    """The product towards the input: its channels change places; as many pixels go in as out."""
    return table._replace(
        in_channels=table.out_channels,
        out_channels=table.in_channels,
    )


def _product_s(
    device: Device, stack: Stack, precision: str, table: ConvolutionTable, batch: Array, value: int
) -> Array:
    """Seconds (c, n) of the products, each at least as long as its tensors take.

    A kernel of 3 x 3 finds most pixels that it reads again in a cache, so that the explicit product
    of the same shape, which reads nine times as much, is no measure. Its compact equal is: the cube
    of the same FLOPs, which is not bound by memory; narrow sides cost besides. The gradient of the
    weights has a very long inner side, which is split over the chip: it is taken as fast as the
    forward product.
    """
    group_in, group_out = table.in_channels / table.groups, table.out_channels / table.groups
    direct = group_in == 1
    cores = _has_tensor_cores(precision)
    packed = np.minimum(np.ceil((_TILE_CHANNELS if cores else 1) / group_in), table.groups)
    rows = batch * table.out_pixels * table.groups / packed
    outer, inner = group_out * packed, group_in * packed * table.kernel**2
    half = _HALF_RATE_SIDE if cores else _HALF_RATE_SIDE_SCALAR
    narrow = (1 + half / outer) * (1 + half / inner)
    cube = np.cbrt(rows * outer * inner)
    products = matmul_s(device, precision, cube, cube, cube) * narrow
    # A direct kernel shares no tiles: each tap reads its pixel again, from the chip's second cache.
    reads = np.where(direct, np.maximum(1, table.kernel**2 / _CACHE_OVER_MEMORY), 1)
    moved = (table.in_elements * reads + table.out_elements) * batch + table.weights
    floor = memory_s(device, moved * value)
    alone = np.where(direct, _direct_s(device, table, batch) + floor, 0.0)
    return np.where(direct, alone, np.maximum(products * constant(stack, "conv_time"), floor))


def _direct_s(device: Device, table: ConvolutionTable, batch: Array) -> Array:
    """A convolution of single channels has no product: scalar arithmetic beside its traffic."""
    flops = 2 * table.weights * table.out_pixels * batch
    return flops / (_DIRECT_SHARE * _scalar_peak(device))


def _scalar_peak(device: Device) -> float:
    return float(peak_flops(device, "fp32"))


def _has_tensor_cores(precision: str) -> bool:
    return precision in ("tf32", "bf16", "fp16")


def transposes_images(device: Device, stack: Stack, precision: str) -> bool:
    """Whether images lie otherwise in memory than tensor cores read them."""
    if device.kind == "cpu" or not _has_tensor_cores(precision):
        return False
    return not stack.channels_last if stack.channels_last is not None else precision == "tf32"


def _passes(table: ConvolutionTable, fused: bool) -> Array:
    """Numbers of one image that the sweeps around each convolution read and write, (2, c, 1).

    A norm reads its input for the statistics, then again, and writes; its gradient reads input and
    gradient twice and writes. Eager activations and sums are kernels of their own; fused ones ride
    along. Residuals meet in a sum backward as well. Squeeze-and-excitation reads for the summary,
    reads and writes for the scaling; backward it multiplies twice, one product is written only to
    be summed up, and the summary's gradient is added.
    """
    out = table.out_elements
    alone = 0.0 if fused else 1.0
    forward = 3 + 2 * table.activates * alone + table.adds * (1 + 2 * alone) + 3 * table.squeezes
    squeezes = (6 + 4 * alone) * table.squeezes
    backward = 5 + 3 * table.activates * alone + 3 * table.adds + squeezes
    # The maximum reads the stem's output and writes a quarter; its gradient the other way round.
    pool = 1.25 * table.pools
    return np.stack([(forward + pool) * out, (backward + 2 * pool) * out])
