"""Rotary positions of queries and keys, with the norms before them, in one pass.

Separate norms and rotations read and write queries and keys four times or more; here they are read
once and written once, both in the same launch. Backward likewise, and the norm's scale is computed
anew instead of kept. Arithmetic is in fp32 whatever the tensors' type.
"""

from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import switch
from paceline.kernels.cost import KernelCost
from paceline.kernels.rope import reference

SHAPES = ((4096, 32, 8, 128), (16384, 32, 8, 128), (16384, 32, 4, 64))
"""Tokens, heads of queries, heads of keys, and width of a head, of decoders that people train."""


def rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Normalise each head of queries and keys (where there are weights), then turn its pairs.

    The last rope_dim numbers of each head are turned: pair (i, i + rope_dim/2) of them by the angle
    of its position. What comes before them is normalised only (as in DeepSeek-V2).

    Args:
        q: (batch, seq, heads, head_dim); views into a larger product are read where they lie.
        k: (batch, seq, kv_heads, its own head_dim), of q's type.
        cos: (1 or batch, seq, 1, rope_dim), of any floating type; has no gradient.
        sin: of cos's shape, the first half negated; has no gradient.
        q_weight: (head_dim,), of the RMS norm before the rotation; None: there is none.
        k_weight: likewise of k; both or none.
        eps: of the norms, added to the mean square.

    Returns:
        what q and k become, contiguous, of their type.

    Raises:
        InputError: shapes or types don't fit.
    """
    _check(q, k, cos, sin)
    _check_weights(q, k, q_weight, k_weight)
    if not switch.takes("rope", q):
        return reference.rotate(q, k, cos, sin, q_weight, k_weight, eps)
    from paceline.kernels.rope import kernel

    return kernel.rotate(q, k, cos, sin, q_weight, k_weight, eps)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.dtype != k.dtype:
        raise InputError(
            f"Queries {tuple(q.shape)} of {q.dtype} and keys {tuple(k.shape)} of {k.dtype} were "
            "given, but both must be (batch, seq, heads, head_dim) of the same batch, seq and "
            "type; reshape or convert them."
        )
    batch, seq_len = q.shape[:2]
    rope_dim = cos.shape[-1] if cos.ndim else 0
    fits = cos.shape in ((1, seq_len, 1, rope_dim), (batch, seq_len, 1, rope_dim))
    narrow = min(q.shape[-1], k.shape[-1])
    if not fits or sin.shape != cos.shape or rope_dim % 2 or not 0 < rope_dim <= narrow:
        raise InputError(
            f"Tables of shapes {tuple(cos.shape)} and {tuple(sin.shape)} were given, but for heads "
            f"of {narrow} both must be (1 or {batch}, {seq_len}, 1, even and at most {narrow}); "
            "take the rows of these positions, with both halves."
        )


def _check_weights(q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None) -> None:
    given = [weight if weight is None else tuple(weight.shape) for weight in (q_weight, k_weight)]
    if given not in ([None, None], [(q.shape[-1],), (k.shape[-1],)]):
        raise InputError(
            f"Norm weights of shapes {given[0]} and {given[1]} were given, but queries and keys "
            f"take ({q.shape[-1]},) and ({k.shape[-1]},), or None both; give both or none."
        )


def rotate_forward_cost(
    tokens: int, heads: int, kv_heads: int, head_dim: int, item_size: int
) -> KernelCost:
    """Read queries, keys and both tables (fp32, one sequence), write queries and keys."""
    values = tokens * (heads + kv_heads) * head_dim
    return KernelCost(2 * values * item_size + 2 * tokens * head_dim * 4)


def rotate_backward_cost(
    tokens: int, heads: int, kv_heads: int, head_dim: int, item_size: int, has_norm: bool = False
) -> KernelCost:
    """Read two gradients and the tables, with norms also queries and keys; write two gradients."""
    values = tokens * (heads + kv_heads) * head_dim
    return KernelCost((3 if has_norm else 2) * values * item_size + 2 * tokens * head_dim * 4)
