"""Logits and their loss: often the largest tensors of a step, on the last stage alone.

An upcast loss takes 12 bytes per logit at its worst and keeps 4 from forward to backward; over a
vocabulary that tp shares 14 and 2, of fewer logits, or as DTensor does it 16 and 4. A loss without
upcast copies (fused, or compiled as one) takes 4, a chunked one a part of that at a time.
"""

import numpy as np

from paceline.plan.points import Array, Points, Setting

_FP32 = 4
# How many parts a chunked loss works on one after the other (assumed; eight is common).
_CHUNKS = 8


def logits_bytes(setting: Setting, points: Points) -> tuple[Array, Array]:
    """Of one micro-batch: what waits from forward to backward, and the most there is: (n,) each.

    Upcast: log-probabilities are kept in fp32, and their backward pass has two gradients as large
    beside them. Over a vocabulary that tp shares the logits are kept as they are, and the forward
    pass has fp32 copies: scores, their distance to the largest, its exponential. DTensor's keeps
    log-probabilities there too; its backward pass has them, the one-hot gradient, the exponential,
    their sum (`torch.distributed.tensor.parallel.loss`).
    """
    value = points.value_bytes
    num = points.micro_batch * setting.seq_len / points.cp * setting.model.vocab_size / points.tp
    wide = np.maximum(value, _FP32)
    capped = value if setting.model.logit_cap is not None else 0  # what tanh gave
    if setting.stack.logits == "fp32":
        cast = np.where(value < _FP32, _FP32, 0)
        shared = points.tp > 1
        if setting.stack.shared_vocab_loss == "wide":
            return num * (wide + capped), num * (np.where(shared, 4, 3) * wide + capped)
        kept = np.where(shared, value, wide)
        peak = np.where(shared, value + cast + 2 * wide, 3 * wide)
    else:
        kept, peak = value * 1.0, value * 2.0
        if setting.stack.logits == "chunked":
            return kept * 0.0, num * 3 * wide / _CHUNKS
    return num * (kept + capped), num * (peak + capped)


def narrow_share(setting: Setting, points: Points) -> Array:
    """The 16-bit logits over the most that there is in a loss, where they are gone by then or
    taken by a gradient of another shape: (n,), 0 where they aren't."""
    value, stack = points.value_bytes, setting.stack
    peak = {"fp32": 3 * _FP32, "bf16": 2 * value}.get(stack.logits)
    if peak is None:
        return np.zeros(1)
    if stack.logits == "fp32" and stack.shared_vocab_loss == "wide":
        peak = np.where(points.tp > 1, 4, 3) * _FP32
    kept = (points.tp > 1) & (stack.logits == "fp32") & (stack.shared_vocab_loss == "narrow")
    return np.where((value < _FP32) & ~kept, value / peak, 0)
