"""Select: a few of many values, and the positions where they stood; and add them up again."""

from torch import Tensor

from paceline.kernels import switch
from paceline.kernels.cost import Cost
from paceline.kernels.select import reference

SHAPES = (2**20, 2**24, 2**28)
"""Values in buckets of gradients."""
_POSITION = 8


def first_at_least(values: Tensor, threshold: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first values whose magnitudes reach a threshold, or are NaN. Nobody waits for the device.

    Args:
        values: (n,).
        threshold: () fp32, on the values' device.
        most: how many there is room for.

    Returns:
        positions (most,) int64, rising, n where there are no more; the values there (most,), zero
        where there are no more; how many reach the threshold, () int64, be there room or not.
    """
    if not switch.takes("select", values):
        return reference.first_at_least(values, threshold, most)
    from paceline.kernels.select import kernel

    return kernel.first_at_least(values.contiguous(), threshold, most)


def scatter_add_(values: Tensor, positions: Tensor, sent: Tensor) -> None:
    """Add what ranks sent, one after the other, so that the sum has the same bits every time.

    Args:
        values: (n,) fp32, bf16 or fp16 (the reference takes any), in place.
        positions: (ranks, k) int64, in each row rising, none twice, all below n.
        sent: (ranks, k), floating point.
    """
    if not switch.takes("select", values) or not values.is_contiguous():
        reference.scatter_add_(values, positions, sent)
        return
    from paceline.kernels.select import kernel

    kernel.scatter_add_(values, positions, sent)


def first_at_least_cost(num_values: int, most: int, item_size: int) -> Cost:
    """Values are read twice, once to count; what is found is written."""
    return Cost(2 * num_values * item_size + most * (_POSITION + item_size))


def scatter_add_cost(num_ranks: int, k: int, item_size: int, sent_size: int) -> Cost:
    """Positions and values are read, and what they are added to is read and written."""
    return Cost(num_ranks * k * (_POSITION + sent_size + 2 * item_size))
