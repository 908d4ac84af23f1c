"""Softmax over the last dimension, of rows of any width.

A row of up to 16384 values stays in registers: it is read once. A wider one is read twice, first
for its largest value and the sum of exponentials (in one sweep, which rescales the sum whenever a
larger value turns up), then, from its end, where a cache still has it, to be written. Where there
are fewer wide rows than processors, several programs share a row, in two launches: each finds
maximum and sum of its part, then each puts all parts' together and writes its own.

Backward, the same with one sum along the row in place of maximum and sum.

Paper of the one-sweep sum: https://arxiv.org/abs/1805.02867.
"""

from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import switch
from paceline.kernels.cost import Cost
from paceline.kernels.softmax import reference

SHAPES = ((16384, 8192), (16384, 131072), (4096, 262144), (32, 131072))
"""Rows and width: attention written out, vocabularies, one step of decoding."""


def softmax(x: Tensor) -> Tensor:
    """exp(x) over the sum of exp(x), row by row.

    Args:
        x: (..., width). A row of nothing but -inf, or with +inf or NaN, becomes NaN, as in torch.

    Returns:
        (..., width), contiguous, of x's type.

    Raises:
        InputError: x has no dimension.
    """
    if x.ndim == 0:
        raise InputError(
            "x is a single number; softmax is over the last dimension: give x one, of any length."
        )
    if not switch.takes("softmax", x):
        return reference.softmax(x)
    from paceline.kernels.softmax import kernel

    return kernel.softmax(x)


def forward_cost(rows: int, width: int, item_size: int) -> Cost:
    """Read x, write the result."""
    return Cost(2 * rows * width * item_size)


def backward_cost(rows: int, width: int, item_size: int) -> Cost:
    """Read the gradient and the result, write the gradient of x."""
    return Cost(3 * rows * width * item_size)
