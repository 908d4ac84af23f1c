"""The activation of feed-forward layers: SwiGLU.

One pass forward (read both halves, write the product), one backward, which computes the activation
anew instead of keeping it. Arithmetic is in fp32 whatever the tensors' type.
"""

from torch import Tensor

from paceline.kernels import switch
from paceline.kernels.activations import reference


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element.

    Args:
        gate: (..., width), any strides but that of the last dimension must be 1.
        up: of gate's shape and type.
    """
    if not switch.takes("activations", gate):
        return reference.gated(gate, up)
    from paceline.kernels.activations import kernel

    return kernel.gated(gate, up)
