"""Activations of feed-forward layers, the specification: plain torch, in any floating type.

Papers: SwiGLU and GeGLU https://arxiv.org/abs/2002.05202, squared ReLU
https://arxiv.org/abs/2109.08668.
"""

import torch.nn.functional as F
from torch import Tensor


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, element by element; "silu" or "gelu" (in its tanh form)."""
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh") * up


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0) squared."""
    return F.relu(x).square()
