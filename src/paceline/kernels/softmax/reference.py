"""Softmax over the last dimension, the specification: plain torch, in any floating type."""

import torch.nn.functional as F
from torch import Tensor


def softmax(x: Tensor) -> Tensor:
    """exp(x), each over its row's sum."""
    return F.softmax(x, dim=-1)
