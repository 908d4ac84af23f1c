"""A synthetic click log whose best possible AUC is known.

A sample is a pure function of (seed, index): hashes of both are its random numbers. So any rank
makes any sample, a run resumes from one number, and no sample comes twice. Ids follow a power law
(the smaller, the more frequent), as those of real logs do. Clicks follow a planted rule: the logit
is linear in the dense features, plus an effect of each id, plus dot products of hidden vectors of
the ids of neighbouring tables, which only a model that multiplies rows can learn. The click is
drawn with the probability of that logit, which the log keeps: ranking by it is the best that any
model can do, and its AUC is the ceiling.

Not here: real logs, several ids per feature.

Sources: inverse of the power law's distribution function, as in Devroye 1986, section X.6
(continuous, cut to whole numbers); normal numbers by Box and Muller, 1958.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.recommender import Clicks, Dlrm
from paceline.recommender.parameter_server.consistent_hash import mix

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

# Shares of the logit's variance; a rule with all three parts needs all of DLRM.
_DENSE_SHARE, _ROW_SHARE, _PAIR_SHARE = 0.3, 0.5, 0.2
# Width of the hidden vectors of ids.
_HIDDEN = 2


class ClickBatch(NamedTuple):
    """Samples of a click log."""

    dense: NDArray[np.float32]
    """(batch, num_dense), standard normal."""
    ids: Indices
    """(batch, tables), numbered within their table."""
    clicked: NDArray[np.float32]
    """(batch,), 0 or 1."""
    probability: NDArray[np.float32]
    """(batch,), with which it was drawn."""


def samples(model: Dlrm, clicks: Clicks, seed: int, indices: Indices) -> ClickBatch:
    """The samples with these indices."""
    draws = _Draws(seed)
    dense = draws.normal("dense", indices, model.num_dense)
    ids = _ids(model, clicks, draws.uniform("ids", indices, len(model.tables)))
    probability = 1 / (1 + np.exp(-_logits(clicks, draws, dense, ids)))
    clicked = draws.uniform("clicks", indices, 1)[:, 0] < probability
    return ClickBatch(
        dense.astype(np.float32), ids, clicked.astype(np.float32), probability.astype(np.float32)
    )


def _ids(model: Dlrm, clicks: Clicks, uniform: Floats) -> Indices:
    """Ids by a power law, cut to each table's length."""
    ends = np.asarray(model.tables, np.float64) + 1
    exponent = 1 - clicks.power
    if abs(exponent) < 1e-9:
        drawn = ends**uniform
    else:
        drawn = (1 + uniform * (ends**exponent - 1)) ** (1 / exponent)
    return np.minimum(drawn.astype(np.int64), np.asarray(model.tables)) - 1


def _logits(clicks: Clicks, draws: "_Draws", dense: Floats, ids: Indices) -> Floats:
    """The planted rule; over all samples and rules it has the deviation that was asked for."""
    num_dense, num_tables = dense.shape[1], ids.shape[1]
    weights = draws.normal("weights", np.zeros(1, np.int64), num_dense)[0]
    of_dense = dense @ weights / np.sqrt(num_dense)
    effects, hidden = _of_ids(draws, ids)
    of_rows = effects.sum(axis=1) / np.sqrt(num_tables)
    logit = np.sqrt(_DENSE_SHARE) * of_dense + np.sqrt(_ROW_SHARE) * of_rows
    if num_tables > 1:
        products = (hidden[:, 1:] * hidden[:, :-1]).sum(axis=2) / np.sqrt(_HIDDEN)
        logit = logit + np.sqrt(_PAIR_SHARE / (num_tables - 1)) * products.sum(axis=1)
    return clicks.bias + clicks.signal * logit


def _of_ids(draws: "_Draws", ids: Indices) -> tuple[Floats, Floats]:
    """Effect (batch, tables) and hidden vector (batch, tables, 2) of each id."""
    keys = (np.arange(ids.shape[1], dtype=np.int64) << 40) | ids
    distinct, inverse = np.unique(keys, return_inverse=True)
    traits = draws.normal("rows", distinct, 1 + _HIDDEN)[inverse.reshape(ids.shape)]
    return traits[..., 0], traits[..., 1:]


class _Draws:
    """Random numbers that are functions of a seed, a purpose and an index."""

    _PURPOSES = ("dense", "ids", "clicks", "weights", "rows")

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def uniform(self, purpose: str, indices: Indices, width: int) -> Floats:
        """Numbers above 0 and below 1, shape (len(indices), width)."""
        start = mix(np.asarray([self._seed, self._PURPOSES.index(purpose)], np.uint64))
        row = mix(indices.astype(np.uint64) ^ mix(start[:1]) ^ start[1:])
        bits = mix(row[:, None] ^ mix(np.arange(width, dtype=np.uint64))[None, :])
        return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53

    def normal(self, purpose: str, indices: Indices, width: int) -> Floats:
        """Standard normal numbers, shape (len(indices), width)."""
        even = width + width % 2
        uniform = self.uniform(purpose, indices, even)
        radius = np.sqrt(-2 * np.log(uniform[:, 0::2]))
        angle = 2 * np.pi * uniform[:, 1::2]
        both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=2)
        return both.reshape(len(indices), even)[:, :width]


def auc(scores: NDArray[np.floating], clicked: NDArray[np.floating]) -> float | None:
    """Area under the ROC curve: the chance that a click scores above a non-click, ties half.

    None where there are no clicks or nothing else.
    """
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[inverse]  # mean rank of each score, from 1
    num_clicks = float(clicked.sum())
    num_others = len(clicked) - num_clicks
    if not num_clicks or not num_others:
        return None
    above = float((ranks * clicked).sum()) - num_clicks * (num_clicks + 1) / 2
    return above / (num_clicks * num_others)
