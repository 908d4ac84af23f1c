"""What this rank holds of a tensor that ranks may share.

torch.distributed.tensor takes as long to import as half of torch, so it is asked only about what
isn't a plain tensor.
"""

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_shared(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor, of which each rank holds a part."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: all of it, unless it is a DTensor."""
    return tensor.to_local() if is_shared(tensor) else tensor
