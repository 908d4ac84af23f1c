"""The norms of a decoder's residual stream, alone or with the sum before it."""

from torch import Tensor, nn

from paceline.config.model import Model
from paceline.kernels import norm


class RMSNorm(nn.RMSNorm):
    """RMS norm of the last dimension, by a kernel where one is chosen (`layout.kernels`)."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to (..., width), of x's type."""
        return norm.rms_norm(x, self.weight, self.eps)


class AddNorm(RMSNorm):
    """RMS norm of the residual stream after a layer's output was added to it."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Add x to the stream (both (..., width)); return the sum's norm, and the sum."""
        if x.dtype != residual.dtype:  # autocast: the stream is wider than what layers return
            summed = residual + x
            return norm.rms_norm(summed, self.weight, self.eps), summed
        return norm.add_rms_norm(x, residual, self.weight, self.eps)


class AddLayerNorm(nn.LayerNorm):
    """Layer norm (https://arxiv.org/abs/1607.06450) of the stream after a layer's output was added
    to it."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Add x to the stream (both (..., width)); return the sum's norm, and the sum."""
        summed = residual + x
        return super().forward(summed), summed


def norm_of(model: Model) -> nn.Module:
    """A norm of a model's residual stream; layer norms are always torch's."""
    kind = RMSNorm if model.norm == "rms" else nn.LayerNorm
    return kind(model.hidden_size, model.norm_eps)


def add_norm_of(model: Model) -> nn.Module:
    """A norm of the sum of a layer's output and the stream."""
    kind = AddNorm if model.norm == "rms" else AddLayerNorm
    return kind(model.hidden_size, model.norm_eps)
