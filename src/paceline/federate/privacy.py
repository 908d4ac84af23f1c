"""Differential privacy of clients: what one of them tells is bounded, and the sum is noisy.

How it works (https://arxiv.org/abs/1710.06963): a client's change on the grid has an L2 norm of at
most `clip`, and the server adds Gaussian noise of `noise * clip` to each number of the sum before
anybody gets the adapters. Whoever reads the adapters of all rounds can hardly tell whether a client
was there, with whatever data. How hardly is dp-accounting's arithmetic: epsilon at a delta, where a
client's change in every round is there or is zero (https://arxiv.org/abs/2103.00039). That a
round's clients are drawn does not count, for the server knows who they are. Rounds compose whatever
a client keeps between them, as each of its changes is bounded by itself.

What it is not: privacy from the server, which learns the exact sum (SecAgg+ hides its parts).
"""

import math
from importlib.util import find_spec

import numpy as np

from paceline.config.errors import InputError
from paceline.config.federate import Privacy
from paceline.federate.grid import Floats, OnGrid, half_of, on_grid

_LESS = 0.95


def epsilon_of(noise: float, delta: float, rounds: int) -> float:
    """Epsilon of so many rounds; 0.0 for none.

    Gaussian mechanisms of one sensitivity compose to one with `noise` over the root of their
    number, and of that one dp-accounting knows epsilon exactly (https://arxiv.org/abs/1805.06530).

    Args:
        noise: standard deviation of the sum's numbers over the clients' norm; above 0.
        delta: probability that epsilon doesn't hold.
        rounds: in which something was summed.
    """
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(noise / math.sqrt(rounds), delta)) if rounds else 0.0


def noise_for(asked: Privacy, clients: int, rounds: int) -> float:
    """The noise of all rounds: what is stated, or the least for the epsilon that is wanted.

    Raises:
        InputError: dp-accounting is not installed, or epsilon can't be met.
    """
    if find_spec("dp_accounting") is None:
        raise InputError(
            "[federate.privacy] needs dp-accounting, which is not installed: pip install "
            '"paceline[federate-dp]".'
        )
    from dp_accounting import get_sigma_gaussian

    if asked.delta >= 1 / clients:
        raise InputError(
            f"federate.privacy.delta = {asked.delta:g} lets one of {clients} clients be told apart "
            f"in full: give less than {1 / clients:g}."
        )
    least = float(get_sigma_gaussian(asked.epsilon, asked.delta)) * math.sqrt(rounds)
    if asked.noise == "auto":
        return least
    found = epsilon_of(asked.noise, asked.delta, rounds)
    if found > asked.epsilon * (1 + 1e-9):
        raise InputError(
            f"{rounds} rounds with federate.privacy.noise = {asked.noise:g} come to epsilon "
            f"{found:.3g}, and federate.privacy.epsilon is {asked.epsilon:g}: give a noise of at "
            f"least {math.ceil(least * 1000) / 1000:g}, or fewer rounds."
        )
    return asked.noise


def on_grid_within(
    change: Floats, limit: float, bits: int, clip: float, stream: np.random.Generator
) -> OnGrid:
    """As `on_grid`, of a change that is scaled until what is told has no norm above `clip`.

    Rounding makes a change longer. So it is rounded first and measured then, and what doesn't fit
    is tried again a little shorter. The error is that of rounding: what scaling took away is gone.
    """
    norm = float(np.linalg.norm(change))
    scaled = change * (clip / norm) if norm > clip else change
    step = limit / half_of(bits)
    while True:
        found = on_grid(scaled, limit, bits, stream)
        if step * math.sqrt(int(np.square(found.values).sum())) <= clip:
            return found
        scaled = scaled * _LESS


def noisy_mean(
    mean: Floats, clients: int, noise: float, clip: float, stream: np.random.Generator
) -> Floats:
    """A mean of changes whose sum has the noise.

    Args:
        mean: (n,) of what so many clients told.
        clients: of the mean.
        noise: times `clip` is the standard deviation of each number of the sum.
        clip: the norm of a client's change.
        stream: nobody but the server may know it.
    """
    return mean + stream.normal(scale=noise * clip / clients, size=mean.shape)
