"""Split: which client has which rows of the data.

Non-IID parts as in https://arxiv.org/abs/1909.06335: of each label (here: source) clients have
shares that are drawn from a Dirichlet distribution.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray


def clients_of_rows(
    sources: NDArray[np.int64],
    clients: int,
    split: Literal["even", "dirichlet", "source"],
    alpha: float,
    seed: int,
) -> NDArray[np.int64]:
    """The client that has each row: (rows,).

    Args:
        sources: (rows,) the source that each is of, from 0.
        clients: how many there are.
        split: see `config.federate.Federate`.
        alpha: of "dirichlet".
        seed: of all that is drawn.
    """
    if split == "source":
        return sources % clients
    stream = np.random.default_rng(seed)
    found = np.empty(len(sources), np.int64)
    for source in np.unique(sources):
        rows = stream.permutation(np.flatnonzero(sources == source))
        shares = np.full(clients, 1 / clients)
        if split == "dirichlet":
            shares = stream.dirichlet(np.full(clients, alpha))
        ends = np.rint(np.cumsum(shares) * len(rows)).astype(np.int64)
        found[rows] = np.searchsorted(ends, np.arange(len(rows)), side="right").clip(
            max=clients - 1
        )
    return found
