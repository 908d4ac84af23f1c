"""The feed-forward layer of experts: router, experts, and the way of the tokens between them.

How it works: the router scores every expert for every token, in fp32 at least, and each token takes
the best few (`choose`). The copies of the tokens are sorted by expert, every expert works on its
rows, and the outputs go back and are added up with the scores as weights. Nothing is dropped: an
expert works on as many rows as chose it. The weights of all experts of a layer are stacked. Where
torch has a grouped GEMM (bf16 on CUDA; the host needn't know how many rows an expert has) their
products are one, else a loop.

Who holds an expert is open in two ways. `slot_of_expert` says where in the stacked weights an
expert lies, so that experts can be moved without a change to what is computed; and the rows go to
the experts through `exchange` (`LocalDispatcher` by default), which expert parallelism replaces; it
may also bring copies of a few experts (`copied`), whose rows then stay.

Three ways to even out the load are here: `balance_loss`, whose gradient is added without changing
the output; `updated_bias`, for the bias of the choice; and `expert_load`, the counts that the bias
and the placement of experts follow.

It is single-device code: it knows nothing of ranks.

Papers: experts https://arxiv.org/abs/2101.03961 (Switch), dropless https://arxiv.org/abs/2211.15841
(MegaBlocks), groups, bias and the loss per sequence https://arxiv.org/abs/2412.19437 (DeepSeek-V3).
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.local_part import local_part
from paceline.config.layers import Experts as Shape
from paceline.kernels.activations import gated
from paceline.kernels.experts import grouped_linear, permute, unpermute
from paceline.kernels.experts.reference import occurrences
from paceline.models.feedforward import FeedForward, clamped

Stacks = Mapping[str, Tensor]
"""What is held of experts, by the name of the parameter: (experts, ...) each."""
Compute = Callable[..., Any]
"""`Experts.forward`: of rows and counts; or of other rows besides, whose outputs it gives too."""
CopiedRows = tuple[Tensor, Tensor, Callable[[Stacks], tuple[Stacks, Callable[[], Stacks]]]]
"""Rows of experts whose weights every rank gets a copy of: (num_rows, hidden), those of the first
copy first; how many each has, (num_copied,) int64; and what maps the stacks that a rank holds to
those to use instead, and to a function that waits for the stacks of copies."""


class TokenDispatcher(Protocol):
    """Takes rows to the ranks that hold their experts, and back."""

    def __call__(self, rows: Tensor, counts: Tensor, experts: Compute) -> Tensor:
        """Put every row through its expert.

        Args:
            rows: (num_copies, hidden), sorted by slot; behind them those of copied experts.
            counts: (num_slots + num_copied,) int64, how many rows each of these has.
            experts: see `Experts.forward`. Every rank must call it, also without rows: its
                gradients are part of a collective.

        Returns:
            (num_copies, hidden), the outputs in the order of `rows`.
        """


class LocalDispatcher:
    """The exchange of a rank that holds all experts."""

    def __call__(self, rows: Tensor, counts: Tensor, experts: Compute) -> Tensor:
        """Compute; see `TokenDispatcher`."""
        found: Tensor = experts(rows, counts)
        return found


class Router(nn.Module):
    """Scores the experts and chooses a few for each token."""

    bias: Tensor | None  # (num_experts,)

    def __init__(self, hidden_size: int, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.num_experts, hidden_size))
        bias = nn.Parameter(torch.zeros(shape.num_experts)) if shape.bias else None
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Choose experts, in fp32 at least: the order of close scores must not be rounded away.

        Args:
            x: (tokens, hidden).
            bias: (num_experts,), added to the scores for the choice.

        Returns:
            the weights and the indices of the chosen experts, (tokens, experts_per_token) each, and
            the scores of all: (tokens, num_experts).
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            added = None if self.bias is None else self.bias.to(wide)
            logits = F.linear(x.to(wide), self.weight.to(wide), added)
        scores = logits.softmax(-1) if self.shape.scores == "softmax" else logits.sigmoid()
        chosen = choose(scores.detach(), bias, self.shape)
        weights = scores.gather(-1, chosen)
        if self.shape.normalise:
            # Sigmoids may all be zero; beside any other sum so small a number vanishes.
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.shape.scaling, chosen, scores


class Experts(nn.Module):
    """The stacked weights of a layer's experts, or of some of them."""

    gate_bias: Tensor | None  # (experts, ffn, 1); so a row of any stack belongs to an expert
    up_bias: Tensor | None  # likewise
    down_bias: Tensor | None  # (experts, hidden, 1)

    def __init__(self, hidden_size: int, shape: Shape) -> None:
        super().__init__()
        num, ffn_size = shape.num_experts, shape.ffn_size
        self.gate_proj = nn.Parameter(torch.empty(num, ffn_size, hidden_size))
        self.up_proj = nn.Parameter(torch.empty(num, ffn_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num, hidden_size, ffn_size))
        self.limit = shape.gate_limit
        for name, width in (("gate", ffn_size), ("up", ffn_size), ("down", hidden_size)):
            bias = nn.Parameter(torch.zeros(num, width, 1)) if shape.bias else None
            self.register_parameter(f"{name}_bias", bias)

    def forward(
        self, rows: Tensor, counts: Tensor, others: CopiedRows | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Put rows through the experts whose weights this rank holds.

        Args:
            rows: (num_rows, hidden), those of the first expert first.
            counts: (num_local_experts,) int64, rows of each; their sum is num_rows.
            others: rows of experts that this rank gets copies of.

        Returns:
            (num_rows, hidden), and the same of the other rows where there are any
        """
        own: Stacks = {name: local_part(held) for name, held in self.named_parameters()}
        if others is None:
            return self._through(rows, counts, own)
        other_rows, other_counts, copied = others
        own, wait = copied(own)
        outputs = self._through(rows, counts, own)  # copies are on their way meanwhile
        stacks = wait()
        del wait  # it has the message
        return outputs, self._through(other_rows, other_counts, stacks)

    def _through(self, rows: Tensor, counts: Tensor, stacks: Stacks) -> Tensor:
        gate, up = self.gate_up(rows, counts, stacks)
        inner = gated(gate, up) if self.limit is None else clamped(gate, up, self.limit)
        return self.down(inner, counts, stacks)

    def gate_up(self, rows: Tensor, counts: Tensor, stacks: Stacks) -> tuple[Tensor, Tensor]:
        """The first products: (num_rows, hidden) to twice (num_rows, ffn)."""
        return _product("gate", rows, counts, stacks), _product("up", rows, counts, stacks)

    def down(self, inner: Tensor, counts: Tensor, stacks: Stacks) -> Tensor:
        """The last product: (num_rows, ffn) to (num_rows, hidden)."""
        return _product("down", inner, counts, stacks)


def _product(name: str, rows: Tensor, counts: Tensor, stacks: Stacks) -> Tensor:
    found = grouped_linear(rows, stacks[f"{name}_proj"], counts)
    bias = stacks.get(f"{name}_bias")
    if bias is None:
        return found
    by_row = bias.squeeze(-1).to(found.dtype)
    return found + by_row.repeat_interleave(counts, dim=0, output_size=len(found))


class ExpertLayer(nn.Module):
    """Routed experts, and the shared ones that every token passes.

    A training run sets three attributes, if it has to: `exchange`; `copied`, the experts that
    `exchange` finds copies of (copies,) int64; and `mean_over_sequence`, which averages numbers per
    sequence over the ranks that share the tokens of the sequences.
    """

    slot_of_expert: Tensor  # (num_experts,) int64: where in the stacked weights an expert lies
    choice_bias: Tensor | None  # (num_experts,) fp32
    expert_load: Tensor  # (num_experts,) fp32: token copies since the last reset, in training
    balance_scale: Tensor  # () fp64: what the gradient of the balance loss is multiplied by

    def __init__(self, hidden_size: int, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.exchange: TokenDispatcher = LocalDispatcher()
        self.copied: Tensor | None = None
        self.mean_over_sequence: Callable[[Tensor], Tensor] = _unchanged
        self.router = Router(hidden_size, shape)
        self.experts = Experts(hidden_size, shape)
        has_shared = shape.shared_ffn_size > 0
        self.shared = FeedForward(hidden_size, shape.shared_ffn_size) if has_shared else None
        self.shared_gate = nn.Linear(hidden_size, 1, bias=False) if shape.shared_gate else None
        num = shape.num_experts
        self.register_buffer("slot_of_expert", torch.arange(num))
        self.register_buffer("choice_bias", torch.zeros(num) if shape.choice_bias else None)
        self.register_buffer("expert_load", torch.zeros(num), persistent=False)
        scale = torch.ones((), dtype=torch.float64)
        self.register_buffer("balance_scale", scale, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to (batch, seq, hidden)."""
        tokens = x.flatten(0, 1)
        weights, chosen, scores = self.router(tokens, self.choice_bias)
        if self.training and torch.is_grad_enabled():
            self._count(chosen)
            if self.shape.balance_loss:
                loss = self._balance_loss(scores, chosen, x.shape[0])
                weights = _AddLoss.apply(weights, loss, self.balance_scale)
        routed = self._routed(tokens, weights, chosen)
        return (routed if self.shared is None else routed + self._shared(tokens)).view_as(x)

    def _routed(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        places, num_places = self.slot_of_expert, self.shape.num_experts
        if self.copied is not None:  # their rows are behind those of all slots
            behind = torch.arange(len(self.copied), device=places.device) + num_places
            places, num_places = places.index_copy(0, self.copied, behind), num_places + len(behind)
        rows, counts, order = permute(tokens, places[chosen], num_places)
        return unpermute(self.exchange(rows, counts, self.experts), order, weights)

    def _shared(self, tokens: Tensor) -> Tensor:
        assert self.shared is not None
        output = self.shared(tokens)
        return output if self.shared_gate is None else self.shared_gate(tokens).sigmoid() * output

    @torch.no_grad()
    def _count(self, chosen: Tensor) -> None:
        self.expert_load += occurrences(chosen.flatten(), self.shape.num_experts)

    def _balance_loss(self, scores: Tensor, chosen: Tensor, batch: int) -> Tensor:
        per_sequence = scores.unflatten(0, (batch, -1)), chosen.unflatten(0, (batch, -1))
        return self.shape.balance_loss * balance_loss(*per_sequence, self.mean_over_sequence)

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Give the buffers their first values; needed after `to_empty`."""
        self.slot_of_expert.copy_(torch.arange(self.shape.num_experts))
        self.expert_load.zero_()
        self.balance_scale.fill_(1)
        if self.choice_bias is not None:
            self.choice_bias.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ExpertLayer":
        """Move the layer, and convert its parameters only.

        A bias near one in bf16 wouldn't feel its updates, nor a count above 256 another token.
        """
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            assert moved is not None
            if moved.dtype != buffer.dtype:
                self._buffers[name] = (
                    torch.empty_like(moved, dtype=buffer.dtype)
                    if buffer.is_meta
                    else buffer.to(moved.device)
                )
        return self


def choose(scores: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
    """Choose each token's experts: the best of the best groups.

    Args:
        scores: (tokens, num_experts).
        bias: (num_experts,), added to the scores.
        shape: how many groups and experts a token takes.

    Returns:
        (tokens, experts_per_token) int64, in no particular order.
    """
    if bias is not None:
        scores = scores + bias
    if shape.num_groups > 1:
        grouped = scores.unflatten(-1, (shape.num_groups, -1))
        compared = 1 if shape.scores == "softmax" else 2
        of_group = grouped.topk(compared, dim=-1).values.sum(-1)  # (tokens, num_groups)
        groups = of_group.topk(shape.groups_per_token, dim=-1, sorted=False).indices
        left_out = torch.ones_like(of_group, dtype=torch.bool).scatter_(-1, groups, False)
        scores = grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)
    return scores.topk(shape.experts_per_token, dim=-1, sorted=False).indices


def balance_loss(
    scores: Tensor, chosen: Tensor, mean_over_sequence: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """How unevenly the tokens of a sequence use the experts, mean over the sequences.

    Per sequence it is the sum over experts of (share of the choices x num_experts) x (mean score,
    where each token's scores sum to one): 1 when all experts are used alike. It doesn't depend on
    how sequences are put into batches (DeepSeek-V3, equations 17 to 20).

    Args:
        scores: (batch, seq, num_experts).
        chosen: (batch, seq, experts_per_token).
        mean_over_sequence: averages (batch, num_experts) numbers over the ranks that share the
            sequences, each with as many tokens. The gradient is then that of this rank's tokens,
            times the number of those ranks: it is right once gradients are averaged over ranks.

    Returns:
        ()
    """
    num_experts = scores.shape[-1]
    counts = occurrences(chosen.flatten(1), num_experts)  # (batch, num_experts)
    shares = counts.to(scores.dtype) * (num_experts / (chosen.shape[1] * chosen.shape[2]))
    if mean_over_sequence is not None:
        shares = mean_over_sequence(shares)
    mean_scores = (scores / (scores.sum(-1, keepdim=True) + 1e-20)).mean(1)
    return (shares * mean_scores).sum(-1).mean()


def updated_bias(bias: Tensor, load: Tensor, speed: float) -> Tensor:
    """Return the bias of the choice for the next step, by the loads of this one.

    Args:
        bias: (num_experts,).
        load: (num_experts,), token copies of each expert on all ranks, in any unit.
        speed: what an expert below the mean load gains and one above it loses.

    Source: https://arxiv.org/abs/2408.15664, algorithm 1.
    """
    return bias + speed * torch.sign(load.mean() - load)


def expert_layers(module: nn.Module) -> dict[str, ExpertLayer]:
    """All layers of experts in a module, by name."""
    return {name: m for name, m in module.named_modules() if isinstance(m, ExpertLayer)}


class _AddLoss(torch.autograd.Function):
    """Hands a tensor on; backward adds the gradient of `scale` times a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        """Return x."""
        ctx.save_for_backward(scale.to(loss.dtype))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """The loss counts `scale` in what is differentiated."""
        (scale,) = ctx.saved_tensors
        return grad, scale, None


def _unchanged(x: Tensor) -> Tensor:
    return x
