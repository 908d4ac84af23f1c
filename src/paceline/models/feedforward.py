"""The dense feed-forward layer, alone or beside experts."""

from torch import Tensor, nn

from paceline.kernels.activations import gated


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), see https://arxiv.org/abs/2002.05202."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.down_proj = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., hidden) to (..., hidden)."""
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
