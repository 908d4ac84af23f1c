"""AdamW's step for a whole list of parameters.

How it works: torch's fused step needs a launch for every few dozen tensors, and a pass of its own
for every conversion around it: gradients into the master's type, moments from codes and back, the
rounded copy. Here all of it is one pass over memory, and mostly one launch: a table holds where
each tensor lies, and each program looks up its piece. The table is made anew when a tensor moved.

The step's number, the learning rate and whether to skip may be on the device, so a step needs
nothing from the host and can be part of a CUDA graph. (Call it once before capturing, so that the
table is there.)

Not here: schedules, groups, where states wait between steps (`train/optim`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import switch
from paceline.kernels.adamw import reference
from paceline.kernels.adamw.eight_bit import Coded
from paceline.kernels.adamw.reference import AdamWSettings, AdamWTensors, Moment

__all__ = ["Coded", "Moment", "adamw_"]

_WIDE = torch.float32
_TYPES = {_WIDE, torch.bfloat16}
"""Of parameters and gradients that the kernel takes."""


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Moment],
    exp_avg_sqs: Sequence[Moment],
    steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    found_inf: Tensor | None = None,
    masters: Sequence[Tensor] | None = None,
) -> None:
    """Take a step of AdamW with each parameter, in place.

    Args:
        params: fp32 or bf16, of any shapes (kernels; the reference takes any floating type).
        grads: one per parameter, of its shape, of either type.
        exp_avgs: first moments, of the parameters' shapes in fp32, or all of them as 8-bit codes.
        exp_avg_sqs: second moments, likewise; codes are of their roots.
        steps: () fp32 each, none twice, how many steps have been taken; counted up.
        lr: learning rate; or () on the parameters' device.
        betas: how much of the moments stays.
        eps: added to the root of the second moment.
        weight_decay: decoupled, in units of the learning rate.
        found_inf: () fp32; the step changes nothing where it isn't 0, not even the counts.
        masters: fp32 parameters that step in place of those in bf16, which become rounded copies.

    Raises:
        InputError: lists or tensors that don't belong together.
    """
    settings = AdamWSettings(lr, betas, eps, weight_decay, found_inf)
    tensors = AdamWTensors(params, grads, exp_avgs, exp_avg_sqs, steps, masters)
    _check(tensors, betas)
    if not params:
        return
    if not _suit(tensors):
        reference.step_(tensors, settings)
        return
    from paceline.kernels.adamw import kernel

    kernel.step_(tensors, settings)


def _suit(tensors: AdamWTensors) -> bool:
    """Whether the kernel takes all of these: types, devices, and values in one order in memory."""
    params, grads, firsts, seconds, steps, masters = tensors
    moments = [*firsts, *seconds]
    numbers = [each for each in moments if isinstance(each, Tensor)]
    codes = [each.codes for each in moments if isinstance(each, Coded)]
    scales = [each.scales for each in moments if isinstance(each, Coded)]
    wide = [*numbers, *scales, *steps, *(masters or ())]
    # Sets, for a model has hundreds of tensors and the device may be waiting.
    if len({x.device for x in (*params, *grads, *codes, *wide)}) > 1:
        return False
    if {x.dtype for x in (*params, *grads)} - _TYPES or {x.dtype for x in wide} - {_WIDE}:
        return False
    if not switch.takes("adamw", params[0]):
        return False
    if all(x.is_contiguous() for x in (*params, *codes, *wide)):
        return True
    belongs = zip(params, firsts, seconds, masters or params, strict=True)
    return not codes and all(_is_laid_out_alike(*each) for each in belongs)


def _is_laid_out_alike(param: Tensor, *others: Moment) -> bool:
    """Whether values fill a range of memory, in whatever order, and others in the same one."""
    order = sorted(range(param.ndim), key=param.stride, reverse=True)
    return param.permute(order).is_contiguous() and all(
        isinstance(other, Tensor) and other.stride() == param.stride() for other in others
    )


def _check(tensors: AdamWTensors, betas: tuple[float, float]) -> None:
    """Refuse what doesn't belong together."""
    params, grads, firsts, seconds, steps, masters = tensors
    lists: dict[str, Sequence[Moment]] = {
        "grads": grads, "exp_avgs": firsts, "exp_avg_sqs": seconds, "steps": steps,
    }  # fmt: skip
    if masters is not None:
        lists["masters"] = masters
    wanted = [param.shape for param in params]
    for name, each in lists.items():
        if len(each) != len(params):
            raise InputError(
                f"adamw_ was given {len(params)} params and {len(each)} {name}: "
                f"give one for each parameter."
            )
        shapes = [_shape(x) for x in each]
        if name == "steps" or shapes == wanted:
            continue
        index = [a == b for a, b in zip(shapes, wanted, strict=True)].index(False)
        raise InputError(
            f"{name}[{index}] has the shape {tuple(shapes[index])} and its parameter "
            f"{tuple(wanted[index])}: they must be equal."
        )
    if len({isinstance(moment, Tensor) for moment in (*firsts, *seconds)}) > 1:
        raise InputError(
            "adamw_ was given moments as numbers and others as codes: call it for each kind."
        )
    if not all(0 <= beta < 1 for beta in betas):
        raise InputError(f"betas {betas} must be at least 0 and below 1.")


def _shape(x: Moment) -> torch.Size:
    return x.shape if isinstance(x, Tensor) else x.codes.shape
