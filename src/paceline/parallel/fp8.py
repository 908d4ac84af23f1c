"""Products in 8-bit floating point: the linear layers of a network's blocks compute in fp8.

How it works: torchao swaps a linear layer for one that casts the operands of its three products
(output, gradient of the input, gradient of the weight) to fp8 when it needs them. Each is scaled by
its largest magnitude: e4m3 forward, e5m2 for gradients, sums in fp32. Parameters, their gradients
and everything between the products stay as they are, so names, checkpoints and the optimizer see
no difference.

Embedding and head are left alone, being no blocks, and so is a layer with a side that is no
multiple of 16, which fp8 hardware can't multiply (routers, gates of one column). Experts are no
linear layers and stay in bf16.

With tensor parallelism a rank scales its own part of a weight, which is a little more precise than
one scale for the whole. Where a pipeline schedule splits the backward pass in two, both halves
compute both gradients, because torchao's product is one node of the graph.

On a CPU the casts are done and the products computed in fp32 (`emulate`): exact in what fp8 rounds,
and slow.

Paper: https://arxiv.org/abs/2209.05433; torchao: https://github.com/pytorch/ao (BSD-3-Clause).
"""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import nn

from paceline.config.errors import InputError
from paceline.config.feasible import FP8_MULTIPLE
from paceline.parallel.blocks import blocks_of


def to_fp8(module: nn.Module, *, emulate: bool) -> None:
    """Let the linear layers of a module's blocks compute in fp8, in place.

    Call it before `tensor_parallel`, which spreads the layers' parameters.

    Args:
        module: a network, or one stage of it; on any device, meta too.
        emulate: compute what fp8 hardware would, without it.

    Raises:
        InputError: torchao is missing, or no layer fits.
    """
    float8 = _torchao()
    config = float8.Float8LinearConfig(emulate=emulate)
    num_swapped = 0
    for placed in blocks_of(module):
        for holder, name, layer in list(_linear_layers(placed.block)):
            holder.register_module(name, float8.convert_to_float8_training(layer, config=config))
            num_swapped += 1
    if not num_swapped:
        raise InputError(
            f'layout.precision = "fp8" has nothing to work on: no block of '
            f"{type(module).__name__} has a linear layer with sides that are multiples of "
            f'{FP8_MULTIPLE}; set it to "bf16" or change the sizes.'
        )


def _linear_layers(block: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The layers to swap, as (parent, name in it, layer)."""
    for holder in block.modules():
        for name, child in holder.named_children():
            if type(child) is nn.Linear and _fits(child):
                yield holder, name, child


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % FP8_MULTIPLE == 0 and layer.out_features % FP8_MULTIPLE == 0


def _torchao() -> ModuleType:
    try:
        with _quiet():
            return importlib.import_module("torchao.float8")
    except ImportError:
        raise InputError(
            'layout.precision = "fp8" needs torchao, which is not installed: '
            "pip install 'paceline[fp8]', or set layout.precision = \"bf16\"."
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torchao's warnings about kernels that are not for this machine."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
