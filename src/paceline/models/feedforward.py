"""The dense feed-forward layer, alone or beside experts."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.kernels.activations import gated

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


_SHARPNESS = 1.702


def clamped(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """SwiGLU of limited inputs as gpt-oss has it (https://arxiv.org/abs/2508.10925)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(_SHARPNESS * gate))


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)), see https://arxiv.org/abs/2002.05202; down(act(up(x))) without a
    gate. SwiGLU, which is silu with a gate, has a kernel."""

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        activation: str = "silu",
        *,
        has_gate: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(hidden_size, ffn_size, bias=bias) if has_gate else None
        self.up_proj = nn.Linear(hidden_size, ffn_size, bias=bias)
        self.down_proj = nn.Linear(ffn_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., hidden) to (..., hidden)."""
        if self.gate_proj is None:
            return self.down_proj(ACTIVATIONS[self.activation](self.up_proj(x)))
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.activation == "silu":
            return self.down_proj(gated(gate, up))
        return self.down_proj(ACTIVATIONS[self.activation](gate) * up)
