"""Heads that guess: what follows the next token, from a decoder's last state.

How it works: a decoder's state at token t predicts token t + 1. Head 1 turns that state and token
t + 1 into a state that predicts t + 2 by the decoder's own output matrix; head 2 goes on from there
with token t + 2, and so on. The decoder isn't a part of the module: it is neither trained nor kept.

Papers: heads https://arxiv.org/abs/2401.10774 (Medusa), that see the tokens between
https://arxiv.org/abs/2402.05109 (Hydra); the norm of both inputs https://arxiv.org/abs/2412.19437
(DeepSeek-V3, section 2.2).
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.heads import Heads
from paceline.kernels.loss import linear_cross_entropy
from paceline.models.decoder import Decoder
from paceline.models.norm import RMSNorm


class _Head(nn.Module):
    """From a state and the token after it to the state of that token."""

    def __init__(self, hidden: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden, norm_eps)
        self.up_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Map two (..., hidden) to (..., hidden)."""
        both = torch.cat((state, self.norm(embedded)), dim=-1)
        return state + self.down_proj(F.silu(self.up_proj(both)))


class GuessHeads(nn.Module):
    """The heads of a decoder.

    Args:
        trunk: the decoder; not a submodule.
    """

    trunk: Decoder

    def __init__(self, model: Heads, trunk: Decoder) -> None:
        super().__init__()
        self.model = model
        self.heads = nn.ModuleList(
            _Head(model.trunk.hidden_size, model.trunk.norm_eps) for _ in range(model.num_heads)
        )
        self.set_trunk(trunk)

    def set_trunk(self, trunk: Decoder) -> None:
        """Guess for another decoder of the same shapes, or for one that lies elsewhere."""
        self.__dict__["trunk"] = trunk

    def forward(self, tokens: Tensor, targets: Tensor, document_ids: Tensor | None) -> Tensor:
        """The mean over heads of their mean loss in nats, ().

        Args:
            tokens: (batch, seq). targets: (batch, seq), the token after each.
            document_ids: (batch, seq) as in `Decoder.forward`.
        """
        with torch.no_grad():
            state = self.trunk(tokens, document_ids, returns_states=True)  # (batch, seq, hidden)
        losses = []
        for number in range(1, len(self.heads) + 1):
            state = self.next_state(number, state[:, :-1], tokens[:, number:])
            wanted = targets[:, number:]
            if document_ids is not None:
                is_same = document_ids[:, number:] == document_ids[:, :-number]
                wanted = torch.where(is_same, wanted, -100)
            losses.append(linear_cross_entropy(state, self._output, wanted))
        return torch.stack(losses).mean()

    def next_state(self, number: int, state: Tensor, tokens: Tensor) -> Tensor:
        """What a head makes of a state and the token after it.

        Args:
            number: of the head, from 1. state: (..., hidden). tokens: (...).

        Returns:
            (..., hidden)
        """
        assert self.trunk.embed is not None
        embedded = self.trunk.embed(tokens).to(state.dtype)
        return cast(Tensor, self.heads[number - 1](state, embedded))

    def logits(self, state: Tensor) -> Tensor:
        """(..., vocab) of (..., hidden), in fp32."""
        return F.linear(state, self._output).float()

    @property
    def _output(self) -> Tensor:
        """(vocab, hidden)"""
        layer = self.trunk.embed if self.trunk.head is None else self.trunk.head
        assert layer is not None
        return layer.weight

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Each head gives its state as it is, and learns what to add."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            elif name.endswith("down_proj.weight"):
                parameter.zero_()
            else:
                values = torch.empty(parameter.shape, device=generator.device)
                parameter.copy_(values.normal_(std=parameter.shape[1] ** -0.5, generator=generator))
