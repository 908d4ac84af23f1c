"""Cross-entropy: in place, together with the layer before it, or over a shared vocabulary.

Logits are the largest tensor of a small model. Torch goes over them about five times in the loss;
here they are read, read again while they lie in the L2, and their gradient is written, all in
forward: the backward pass only scales it, and not even that where what comes from above is 1. The
number of targets that count stays on the device: nothing waits for it, and CUDA graphs can record
all this.

Logits of fp16 run in plain torch: divided by the number of tokens, their gradients would underflow.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import switch
from paceline.kernels.loss import reference
from paceline.kernels.loss.reference import IGNORED as IGNORED
from paceline.kernels.loss.reference import token_losses as token_losses


def cross_entropy(logits: Tensor, targets: Tensor, inplace: bool = False) -> Tensor:
    """Mean negative log-likelihood in nats over the targets that count.

    Args:
        logits: (..., vocab).
        targets: (...) token ids, integers; IGNORED leaves a token out of the mean.
        inplace: the logits are given up: where they ask for a gradient, it is written over them
            during this call, and they must not be used again, by a second loss neither. Saves as
            much memory as they take. (Plain torch and a compiler don't make use of it.)

    Returns:
        () fp32 (fp64 for fp64 logits); NaN where no target counts.

    Raises:
        InputError: shapes or types don't fit, or a leaf that asks for a gradient is to be given up.
    """
    _check(logits, targets)
    _check_given_up(logits, inplace)
    if not _takes(logits, logits.dtype):
        return reference.cross_entropy(logits, targets)
    from paceline.kernels.loss import kernel

    return kernel.cross_entropy(logits, targets, inplace)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int | None = None
) -> Tensor:
    """Cross-entropy of the logits hidden @ weight.T, of which it holds a chunk of tokens at a time.

    Gradients are made in forward and kept: the logits aren't computed twice. Products are computed
    in autocast's type, and the weight's gradient is summed over the chunks in fp32.

    Args:
        hidden: (..., width).
        weight: (vocab, width), may be the embedding's.
        targets: (...) token ids, integers.
        chunk_rows: tokens of a chunk; None: at least 4096, and so many that the logits take about
            2 GiB.

    Returns:
        () fp32 (fp64 for fp64 hidden states); NaN where no target counts. Backward can go through
        it once, for it scales the gradients in place.

    Raises:
        InputError: shapes or types don't fit.
    """
    _check(hidden, targets)
    dtype = _product_type(hidden, weight)
    if chunk_rows is not None and chunk_rows < 1:
        raise InputError(
            f"chunk_rows = {chunk_rows} was given, but it must be 1 or more; leave it out."
        )
    if not _takes(hidden, dtype):
        return reference.linear_cross_entropy(hidden, weight, targets)
    from paceline.kernels.loss import linear

    return linear.linear_cross_entropy(hidden, weight, targets, chunk_rows, dtype)


def cross_entropy_parallel(
    logits: Tensor, targets: Tensor, first_row: int, group: dist.ProcessGroup, inplace: bool = False
) -> Tensor:
    """`cross_entropy` of logits whose vocabulary the ranks of a group share out.

    Three numbers a token go between the ranks: the largest logit of each, its sum of exponentials,
    and the target's logit where it has that (https://arxiv.org/abs/1909.08053, section 3).

    Args:
        logits: (..., own_vocab), this rank's columns.
        targets: (...) ids in the whole vocabulary, the same on every rank.
        first_row: the id of this rank's first column.
        group: the ranks; all of them call this.
        inplace: see `cross_entropy`.

    Returns:
        () the same on every rank. The gradient is that of one rank's loss, not of their sum.

    Raises:
        InputError: see `cross_entropy`.
    """
    _check(logits, targets)
    _check_given_up(logits, inplace)
    arguments = logits, targets, first_row, group
    if not _takes(logits, logits.dtype):
        return reference.cross_entropy_parallel(*arguments)
    from paceline.kernels.loss import kernel

    return kernel.cross_entropy_parallel(*arguments, inplace)


def _takes(x: Tensor, dtype: torch.dtype) -> bool:
    return dtype != torch.float16 and switch.takes("loss", x)


def _check(x: Tensor, targets: Tensor) -> None:
    if (
        not x.ndim
        or x.shape[:-1] != targets.shape
        or targets.dtype not in (torch.int64, torch.int32)
    ):
        raise InputError(
            f"Targets {tuple(targets.shape)} of {targets.dtype} were given for {tuple(x.shape)}, "
            f"but {tuple(x.shape[:-1])} of int64 or int32 is required; give one id for each row."
        )


def _check_given_up(logits: Tensor, inplace: bool) -> None:
    if not inplace or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    base = logits if logits._base is None else logits._base
    if base.requires_grad and base.is_leaf:
        raise InputError(
            "inplace = True was given for logits that are a leaf, whose values autograd must leave "
            "alone; leave inplace out."
        )


def _product_type(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The type that the product is computed in."""
    kind = hidden.device.type
    is_cast = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise InputError(
            f"A weight {tuple(weight.shape)} was given for hidden states {tuple(hidden.shape)}, "
            f"but (vocab, {hidden.shape[-1]}) is required; transpose it or take another."
        )
    if weight.dtype != hidden.dtype and not is_cast:
        raise InputError(
            f"A weight of {weight.dtype} was given for hidden states of {hidden.dtype}, but both "
            "must be of one type; convert one, or use autocast."
        )
    return torch.get_autocast_dtype(kind) if is_cast else hidden.dtype
