"""Residuals: how far predictions of a kind were from published steps, for their intervals.

Of the 1,097 published steps of language models that `benchmarks/planner.py` predicts (24 sources),
four in five were nearer to the prediction than the share that stands here. Steps are like each
other by what made the most difference to their error: whether the stack's constants had been fitted
to steps of its own (six of each device and stack, which are not counted), and whether the network
has experts, whose kernels and exchanges differ most between systems.

Our own runtime before it was measured has the error of stacks like it, each by the others.

These are the steps that the planner was developed with, and of some systems its defaults were
derived from them: on systems that nobody has looked at, expect more than one in five outside.
"""

from paceline.config.catalogue.own_stack import error_of
from paceline.plan.points import Setting

# (experts, fitted) -> share.
_FOUR_IN_FIVE = {
    (False, False): 0.25,
    (False, True): 0.19,
    (True, False): 0.46,
    (True, True): 0.32,
}


def relative_error(setting: Setting) -> float:
    """Half the width of an interval that holds four of five steps, as a share of the prediction."""
    fitted = bool(setting.stack.constants) and setting.stack.origin.startswith("fitted")
    like = error_of(setting.stack) or 0.0
    return max(like, _FOUR_IN_FIVE[setting.model.experts is not None, fitted])
