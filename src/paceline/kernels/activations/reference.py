"""The activation of feed-forward layers, the specification: plain torch, in any floating type.

Paper: SwiGLU https://arxiv.org/abs/2002.05202.
"""

import torch.nn.functional as F
from torch import Tensor


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element."""
    return F.silu(gate) * up
