"""Residuals: how far predictions of a kind were from published steps, for their intervals.

Of the 1,097 published steps of language models that `benchmarks/planner.py` predicts (24 sources),
four in five were nearer to the prediction than the share that stands here. Steps are like each
other by what made the most difference to their error: whether the stack's constants had been fitted
to steps of its own (six of each device and stack, which are not counted), and whether the network
has experts, whose kernels and exchanges differ most between systems.

Our own runtime before it was measured has the error of stacks like it, each by the others.

These are the steps that the planner was developed with, and of some systems its defaults were
derived from them: on systems that nobody has looked at, expect more than one in five outside.

A machine that was only looked at for a second (`machine.cpu_speed`) has no residuals, and a wide
interval.
"""

from paceline.config.catalogue.own_stack import error_of
from paceline.config.device import Device
from paceline.plan.points import Setting

# (experts, fitted) -> share.
_FOUR_IN_FIVE = {
    (False, False): 0.25,
    (False, True): 0.19,
    (True, False): 0.46,
    (True, True): 0.32,
}
# Assumed: attention, links and the host's own time are not measured there at all.
QUICK = 1.0


def of_device(device: Device, error: float) -> float:
    """The error of a prediction on a device, where `error` is that on one that is well known."""
    is_quick = device.curves is not None and device.curves.is_quick
    return max(error, QUICK) if is_quick else error


def relative_error(setting: Setting) -> float:
    """Half the width of an interval that holds four of five steps, as a share of the prediction."""
    fitted = bool(setting.stack.constants) and setting.stack.origin.startswith("fitted")
    like = error_of(setting.stack) or 0.0
    error = max(like, _FOUR_IN_FIVE[setting.model.experts is not None, fitted])
    return error if fitted else of_device(setting.device, error)
