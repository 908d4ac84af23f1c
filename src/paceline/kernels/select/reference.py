"""Select, the specification: sort everything; add one rank after the other."""

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


def first_at_least(values: Tensor, threshold: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first `most` of them: positions, values, and how many there would be, see the package."""
    where = at_least(values, threshold)
    kept = where[:most]
    positions = torch.full((most,), len(values), dtype=torch.int64, device=values.device)
    positions[: len(kept)] = kept
    found = values.new_zeros(most)
    found[: len(kept)] = values[kept]
    return positions, found, torch.tensor(len(where), device=values.device)


def scatter_add_(values: Tensor, positions: Tensor, sent: Tensor) -> None:
    """Add what each rank sent (ranks, k) where it belongs in values (n,), in place."""
    for where, some in zip(positions, sent, strict=True):
        values.index_add_(0, where, some.to(values.dtype))
