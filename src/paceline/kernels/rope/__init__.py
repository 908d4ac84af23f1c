"""Rotary positions of queries or keys, with the norm before them, in one pass.

A separate norm and rotation read and write queries and keys four times or more; here they are read
once and written once. Backward likewise, and the norm's scale is computed anew instead of kept.
Arithmetic is in fp32 whatever the tensors' type.
"""

from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import switch
from paceline.kernels.rope import reference


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Normalise each head (where there is a weight), then turn its pairs.

    Pair (i, i + head_dim/2) of each head turns by the angle of its position.

    Args:
        x: (batch, seq, heads, head_dim); a view into a larger product is read where it lies.
        cos: (1 or batch, seq, 1, head_dim), of any floating type; has no gradient.
        sin: of cos's shape, the first half negated; has no gradient.
        weight: (head_dim,), of the RMS norm before the rotation; None: there is none.
        eps: of the norm, added to the mean square.

    Returns:
        what x becomes, contiguous, of its type.

    Raises:
        InputError: shapes don't fit.
    """
    _check(x, cos, sin, weight)
    if not switch.takes("rope", x):
        return reference.rotate(x, cos, sin, weight, eps)
    from paceline.kernels.rope import kernel

    return kernel.rotate(x, cos, sin, weight, eps)


def _check(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None) -> None:
    if x.ndim != 4 or x.shape[3] % 2:
        raise InputError(
            f"Heads {tuple(x.shape)} were given, but (batch, seq, heads, an even head_dim) is "
            "required; reshape them."
        )
    batch, seq_len, _, width = x.shape
    if sin.shape != cos.shape or cos.shape not in (
        (1, seq_len, 1, width),
        (batch, seq_len, 1, width),
    ):
        raise InputError(
            f"Tables of shapes {tuple(cos.shape)} and {tuple(sin.shape)} were given, but both must "
            f"be (1 or {batch}, {seq_len}, 1, {width}); take the rows of these positions, with "
            "both halves."
        )
    if weight is not None and weight.shape != (width,):
        raise InputError(
            f"A norm weight of shape {tuple(weight.shape)} was given for heads of {width}; give "
            f"({width},), or none."
        )
