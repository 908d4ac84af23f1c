"""What arithmetic in 8 bits changes besides its products: casts, and what is gathered.

Pure functions: seconds of a block's products, bytes on the wire of the data axes.
"""

import numpy as np
import pytest

from paceline.config.stack import Stack
from paceline.plan.block_kinds import block_kinds_of
from paceline.plan.points import Points
from paceline.plan.price.data_axes import wire_bytes
from paceline.plan.price.kernels import kernels_of
from paceline.plan.rates import KERNEL_S, matmul_s, memory_s
from paceline.plan.work import LINEAR, MatmulOp, MemoryOp, PartWork, block_work
from paceline.plan.work.lists import like
from tests.plan.planned import MODEL, layout, setting

STACK = Stack(gather_dtype="fp8")


def products_s(readers: bool, **axes: object) -> float:
    """Forward seconds of a block's products; `readers`: whether equal casts are known as such."""
    one = setting()
    points = Points.of([layout(**axes)], one)
    work = block_work(one, points, block_kinds_of(MODEL)[0])
    if not readers:
        alone = tuple(product._replace(readers=1) for product in work.products)
        work = type(work)(products=alone, cores=work.cores, sweeps=work.sweeps)
    (kernels,) = kernels_of(one, points, [work])
    return float(np.max(kernels.forward))


def test_a_compiler_casts_what_several_products_read_once() -> None:
    assert products_s(True, precision="fp8", compile=True) < products_s(
        False, precision="fp8", compile=True
    )
    # Kernel by kernel each product casts for itself; 16 bits need no cast.
    for axes in ({"precision": "fp8"}, {"compile": True}):
        assert products_s(True, **axes) == products_s(False, **axes)


def test_casting_by_hand_takes_fewer_passes() -> None:
    """TransformerEngine's operands are read once; a norm that writes them saves even that."""

    def seconds(**features: object) -> float:
        one = setting(stack=Stack.parse(features, "stack"))
        points = Points.of([layout(precision="fp8")], one)
        work = block_work(setting(), points, block_kinds_of(MODEL)[0])
        (kernels,) = kernels_of(one, points, [work])
        return float(np.max(kernels.forward + kernels.input_grad + kernels.weight_grad))

    by_norm, by_hand = seconds(elementwise="fused"), seconds(keeps_fp8=True)
    assert by_norm < by_hand < seconds()


@pytest.mark.parametrize(("features", "read"), [({"elementwise": "fused"}, 0), ({}, 2)])
def test_frozen_matrices_have_no_copies_for_their_own_gradients(features, read) -> None:
    """A byte for each number of the input less, and one for each of the output's gradient."""
    one = setting(stack=Stack.parse({"keeps_fp8": True, **features}, "stack"))
    points = Points.of([layout(precision="fp8")], one)
    m, n, k = 4096, 1024, 2048
    whole = MatmulOp(*map(like, (m, n, k)), LINEAR)
    none = (MemoryOp(like(0), like(0), False),)
    parts = [PartWork((each,), sweeps=none) for each in (whole, whole._replace(trained=False))]
    trained, frozen = kernels_of(one, points, parts)
    product_s, byte_s = matmul_s(one.device, "fp8", m, n, k), memory_s(one.device, 1) - KERNEL_S
    assert frozen.forward - product_s == pytest.approx(KERNEL_S + (read + 1) * m * k * byte_s)
    assert trained.forward - frozen.forward == pytest.approx(m * k * byte_s)
    assert trained.input_grad - frozen.input_grad == pytest.approx(m * n * byte_s)
    assert frozen.weight_grad == 0


@pytest.mark.parametrize(("precision", "num_bytes"), [("fp8", 1), ("bf16", 2), ("fp32", 4)])
def test_shards_of_eight_bits_are_gathered_in_one_byte(precision: str, num_bytes: int) -> None:
    """Sixteen-bit values become one byte on the way; gradients stay as they were."""
    one = setting(stack=STACK)
    points = Points.of([layout(fsdp=8, precision=precision)], one)
    gathered, reduced = wire_bytes(one, points)
    assert (gathered[0], reduced[0]) == (num_bytes, 4)
