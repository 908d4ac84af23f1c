"""The norms of a decoder's residual stream, alone or with the sum before it."""

from torch import Tensor, nn

from paceline.comm.local_part import local_part
from paceline.config.model import Model
from paceline.kernels import norm


class RMSNorm(nn.RMSNorm):
    """RMS norm of the last dimension, by a kernel where one is chosen (`layout.kernels`).

    Args:
        plus_one: what is learnt is how much the weights differ from 1 (Gemma).
    """

    eps: float

    def __init__(self, width: int, eps: float, *, plus_one: bool = False) -> None:
        super().__init__(width, eps)
        self.plus_one = plus_one

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to (..., width), of x's type."""
        return norm.rms_norm(x, self.scale, self.eps)

    @property
    def scale(self) -> Tensor:
        """(width,), what normalised numbers are multiplied by; this rank's copy."""
        weight = local_part(self.weight)
        return 1 + weight if self.plus_one else weight


class AddNorm(RMSNorm):
    """RMS norm of the residual stream after a layer's output was added to it."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Add x to the stream (both (..., width)); return the sum's norm, and the sum."""
        if x.dtype != residual.dtype:  # autocast: the stream is wider than what layers return
            summed = residual + x
            return norm.rms_norm(summed, self.scale, self.eps), summed
        return norm.add_rms_norm(x, residual, self.scale, self.eps)


class AddLayerNorm(nn.LayerNorm):
    """Layer norm (https://arxiv.org/abs/1607.06450) of the stream after a layer's output was added
    to it."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Add x to the stream (both (..., width)); return the sum's norm, and the sum."""
        summed = residual + x
        return super().forward(summed), summed


def norm_of(model: Model) -> nn.Module:
    """A norm of a model's residual stream; layer norms are always torch's."""
    if model.norm == "layer":
        return nn.LayerNorm(model.hidden_size, model.norm_eps, bias=model.norm_bias)
    return rms_norm_of(model, model.hidden_size)


def rms_norm_of(model: Model, width: int) -> RMSNorm:
    """A norm of vectors of some width."""
    return RMSNorm(width, model.norm_eps, plus_one=model.norm == "rms_plus_one")


def add_norm_of(model: Model) -> nn.Module:
    """A norm of the sum of a layer's output and the stream."""
    if model.norm == "layer":
        return AddLayerNorm(model.hidden_size, model.norm_eps, bias=model.norm_bias)
    return AddNorm(model.hidden_size, model.norm_eps, plus_one=model.norm == "rms_plus_one")
