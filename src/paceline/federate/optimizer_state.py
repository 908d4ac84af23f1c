"""An optimizer's state as named tensors, for a file."""

from collections.abc import Mapping

from torch import Tensor, nn

from paceline.train.optim import AdamW
from paceline.train.optimizers import RuledOptimizer

Optimizer = AdamW | RuledOptimizer


def state_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """What it has of each parameter, by the parameter's place and its own name.

    But for masters of 16-bit parameters: whoever takes the state has parameters of its own.
    """
    return {
        f"{place}.{name}": each
        for place, p in enumerate(_parameters(optimizer))
        for name, each in optimizer.saved_state(p).items()
        if name != "master"
    }


def take_state(optimizer: Optimizer, state: Mapping[str, Tensor]) -> None:
    """Put what `state_of` gave in the place of what it has; nothing: it begins anew."""
    optimizer.state.clear()
    parameters = _parameters(optimizer)
    for key, each in state.items():
        place, _, name = key.partition(".")
        optimizer.state[parameters[int(place)]][name] = each


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
