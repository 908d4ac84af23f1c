"""Activations of feed-forward layers: gated (SwiGLU, GeGLU) and squared ReLU.

One pass forward (read both halves, write the product), one backward, which computes the activation
anew instead of keeping it. Arithmetic is in fp32 whatever the tensors' type.
"""

from typing import Literal

from torch import Tensor

from paceline.kernels import switch
from paceline.kernels.activations import reference
from paceline.kernels.cost import Cost

Activation = Literal["silu", "gelu"]

SHAPES = ((8192, 4096), (8192, 14336), (8192, 32768))
"""Tokens and width of feed-forward layers that people train."""


def gated(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up, element by element.

    Args:
        gate: (..., width), any strides but that of the last dimension must be 1.
        up: of gate's shape and type.
        activation: "silu" (SwiGLU), or "gelu" in its tanh form (GeGLU).
    """
    if not switch.takes("activations", gate):
        return reference.gated(gate, up, activation)
    from paceline.kernels.activations import kernel

    return kernel.gated(gate, up, activation)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0) squared, of any shape."""
    if not switch.takes("activations", x):
        return reference.squared_relu(x)
    from paceline.kernels.activations import kernel

    return kernel.squared_relu(x)


def gated_forward_cost(rows: int, width: int, item_size: int) -> Cost:
    """Read gate and up, write the product."""
    return Cost(3 * rows * width * item_size)


def gated_backward_cost(rows: int, width: int, item_size: int) -> Cost:
    """Read the gradient, gate and up, write two gradients."""
    return Cost(5 * rows * width * item_size)


def squared_relu_forward_cost(rows: int, width: int, item_size: int) -> Cost:
    """Read x, write the result."""
    return Cost(2 * rows * width * item_size)


def squared_relu_backward_cost(rows: int, width: int, item_size: int) -> Cost:
    """Read the gradient and x, write the gradient of x."""
    return Cost(3 * rows * width * item_size)
