"""The stages of a pipeline that live on one rank, as one module."""

from torch import nn


class StageModules(nn.ModuleList):
    """Holds the stages of a rank, whose layers keep the names they have in the whole network.

    `named_parameters` prefixes them with the place of the stage among the rank's own, which
    means nothing to another layout: `training_state` drops it.
    """
