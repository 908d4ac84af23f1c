"""Select, the specification: sort everything."""

import torch
from torch import Tensor


def largest(values: Tensor, k: int) -> Tensor:
    """Where the k largest magnitudes of (n,) stand, rising: (k,) int64.

    NaN counts as infinity; of equal magnitudes the first are taken.
    """
    magnitudes = values.abs().nan_to_num(torch.inf, torch.inf)
    order = magnitudes.argsort(descending=True, stable=True)
    return order[:k].sort().values


def at_least(values: Tensor, threshold: Tensor | float) -> Tensor:
    """Where magnitudes of (n,) reach a threshold, or are NaN: (m,) int64, rising."""
    return (values.abs() < threshold).logical_not_().nonzero().view(-1)
