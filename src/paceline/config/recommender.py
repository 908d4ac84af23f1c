"""A recommender as configs: DLRM's shapes, its click log, and how rows of tables are updated.

In DLRM (https://arxiv.org/abs/1906.00091) a bottom MLP maps the dense features to a vector as wide
as a row. Each categorical feature picks one row of its table. The dot products of all pairs of
these vectors, beside the bottom's output, go through a top MLP to the logit of a click. Nearly all
parameters are in the tables, of which a step touches a few rows: they are not data-parallel, but
held once, by servers or by the ranks (`paceline.config.comm.EmbeddingComm`).

The click log is synthetic: nobody's data, any length, and its best possible AUC is known
(`paceline.recommender.click_log`).
"""

from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from paceline.config.comm import Comm
from paceline.config.family import ModelFamily
from paceline.config.frozen import FrozenConfig, Width

Widths = Annotated[tuple[Width, ...], Field(strict=False, max_length=10_000)]


class Dlrm(ModelFamily):
    """A deep learning recommendation model (https://arxiv.org/abs/1906.00091)."""

    has_tables: ClassVar[bool] = True

    family: Literal["dlrm"]
    tables: Annotated[Widths, Field(min_length=1)]
    """Rows of each table: one table per categorical feature, each sample picks one row of each."""
    dim: Width
    """Width of a row, and of the bottom MLP's output."""
    num_dense: Width
    """Dense features of a sample."""
    bottom: Widths = (64,)
    """Widths of the bottom MLP's hidden layers."""
    top: Widths = (64, 32)
    """Widths of the top MLP's hidden layers; one logit follows."""

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return sum(self.tables)

    @property
    def num_interactions(self) -> int:
        """Dot products of pairs among the rows of a sample and the bottom MLP's output."""
        return (len(self.tables) + 1) * len(self.tables) // 2

    @property
    def bottom_widths(self) -> tuple[int, ...]:
        """All widths of the bottom MLP, input to output."""
        return (self.num_dense, *self.bottom, self.dim)

    @property
    def top_widths(self) -> tuple[int, ...]:
        """All widths of the top MLP, input to output."""
        return (self.dim + self.num_interactions, *self.top, 1)

    @property
    def num_dense_params(self) -> int:
        """Parameters of both MLPs, which every replica has."""
        return sum(
            (inputs + 1) * outputs
            for widths in (self.bottom_widths, self.top_widths)
            for inputs, outputs in pairwise(widths)
        )

    @property
    def num_params(self) -> int:
        """All parameters, those of the tables included."""
        return self.num_dense_params + self.num_rows * self.dim

    @property
    def train_flops_per_sample(self) -> int:
        """2 per multiply-add of the MLPs and the dot products, backward twice the forward."""
        products = self.num_dense_params + self.num_interactions * self.dim
        return 6 * products

    def train_flops_per_unit(self, seq_len: int) -> int:
        """See `train_flops_per_sample`."""
        return self.train_flops_per_sample

    def why_only_planned(self, comm: Comm) -> str | None:
        """Workers that step by themselves have a whole network each."""
        if comm.local.method == "none":
            return None
        return (
            f'comm.local.method = "{comm.local.method}" needs a whole network on every rank, '
            'and a recommender\'s tables are shared out: set it to "none".'
        )


class Clicks(FrozenConfig):
    """A synthetic click log: power-law ids, and clicks by a planted rule that is known."""

    power: float = Field(1.2, gt=0, le=100)
    """Exponent of the ids' power law: id k of a table comes with a frequency of about
    (k + 1)^-power."""
    signal: float = Field(1.5, gt=0, le=1e6)
    """Standard deviation of the planted logit: the larger, the higher the best possible AUC."""
    bias: float = Field(-1.0, ge=-1e6, le=1e6)
    """Mean of the planted logit: the lower, the fewer clicks."""


class RowOptim(FrozenConfig):
    """How rows of tables are updated, by whoever holds them. Only rows of the batch change."""

    kind: Literal["adagrad", "adam"] = "adagrad"
    """adagrad keeps one number per row, the sum of mean squared gradients; adam one second moment
    per row, a first moment per value, and counts each row's own updates."""
    lr: float = Field(0.05, gt=0, le=1e3)
    """Peak learning rate; it follows optim.schedule."""
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.999)
    """Of adam."""
    eps: float = Field(1e-8, gt=0, le=1e3)
