"""The network of a Mamba-2: embedding, blocks of one state space layer each, norm, head.

A layer keeps a state (head_dim x state_size) for each head: every token lets it decay by
exp(step x a), writes to it, and reads from it, with a step, writer and reader that follow from the
token. `scan` computes all tokens of a sequence without keeping every state, by SSD's chunks: pairs
of tokens within a chunk as attention would, and between chunks the state that one hands on. Where
documents are packed, states and convolutions begin anew with each of them.

All operators are torch's, and the scan is in fp32 whatever the layer's type is. Names of parameters
are ours; `THEIRS` has those of transformers.

Paper: https://arxiv.org/abs/2405.21060, listing 1.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.errors import InputError
from paceline.config.mamba import Mamba2
from paceline.kernels.loss import linear_cross_entropy
from paceline.models.decoder import document_starts
from paceline.models.norm import RMSNorm
from paceline.models.shares import Streams, assign
from paceline.models.weights import check_shapes, opened, tensor_files

THEIRS = (
    ("embed.", "backbone.embeddings."),
    ("blocks.", "backbone.layers."),
    (".conv_weight", ".conv1d.weight"),
    (".conv_bias", ".conv1d.bias"),
    (".gated_norm.", ".norm."),
    (".step_bias", ".dt_bias"),
    (".decay_log", ".A_log"),
    (".skip", ".D"),
    ("head.", "lm_head."),
)
"""Parts of a parameter's name: ours, transformers'. The last norm has a name of its own."""


def scan(
    x: Tensor,
    steps: Tensor,
    decay: Tensor,
    writers: Tensor,
    readers: Tensor,
    chunk_size: int,
    starts: Tensor | None = None,
) -> Tensor:
    """What every token reads of its heads' states (SSD in chunks).

    Args:
        x: (batch, seq, heads, head_dim), what is written.
        steps: (batch, seq, heads), above 0.
        decay: (heads,), below 0: a state decays by exp(step x decay).
        writers: (batch, seq, groups, state).
        readers: as writers.
        chunk_size: tokens of a chunk.
        starts: (batch, seq), where each token's document begins; None: there is one.

    Returns:
        (batch, seq, heads, head_dim)
    """
    batch, seq_len, heads, head_dim = x.shape
    groups, size = writers.shape[2], min(chunk_size, seq_len)
    padding = -seq_len % size

    def chunks(values: Tensor, *inner: int) -> Tensor:
        padded = F.pad(values, (0, 0) * (values.ndim - 2) + (0, padding))
        return padded.reshape(batch, -1, size, *inner)

    # Dimensions: batch, chunk, token (l reads, s writes), group, head of it, head_dim (p), state.
    of_heads = (groups, heads // groups)
    logs = chunks(steps * decay, *of_heads).cumsum(2)
    written = chunks(x * steps[..., None], *of_heads, head_dim)
    writers, readers = (chunks(each, groups, writers.shape[-1]) for each in (writers, readers))
    num_chunks = logs.shape[1]
    begins = torch.arange(num_chunks, device=x.device)[:, None] * size
    if starts is None:
        starts = x.new_zeros((batch, seq_len), dtype=torch.int64)
    filled = torch.cat([starts, starts[:, -1:].expand(-1, padding)], 1)
    starts = filled.reshape(batch, num_chunks, size)
    sees = (starts[..., :, None] == starts[..., None, :]).tril()[:, :, None, None]
    is_of_last = starts == starts[..., -1:]
    goes_on = (starts < begins)[..., None, None]  # the document of the chunk before

    by_token = logs.permute(0, 1, 3, 4, 2)
    between = (by_token[..., :, None] - by_token[..., None, :]).masked_fill(~sees, -math.inf)
    weights = torch.einsum("bclgn,bcsgn->bcgls", readers, writers)[:, :, :, None] * between.exp()
    out = torch.einsum("bcgrls,bcsgrp->bclgrp", weights, written)
    if num_chunks > 1:
        left = (logs[:, :, -1:] - logs).exp() * is_of_last[..., None, None]
        given = torch.einsum("bcsgn,bcsgrp->bcgrpn", writers, written * left[..., None])
        kept = logs[:, :, -1].exp() * goes_on[:, :, -1]
        state, states = torch.zeros_like(given[:, 0]), []
        for chunk in range(num_chunks):
            states.append(state)
            state = state * kept[:, chunk, ..., None, None] + given[:, chunk]
        read = torch.einsum("bclgn,bcgrpn->bclgrp", readers, torch.stack(states, 1))
        out = out + read * (logs.exp() * goes_on)[..., None]
    return out.reshape(batch, -1, heads, head_dim)[:, :seq_len]


class Mixer(nn.Module):
    """A state space layer."""

    def __init__(self, model: Mamba2) -> None:
        super().__init__()
        self.model = model
        self.in_proj = nn.Linear(model.hidden_size, model.in_size, model.bias)
        self.conv_weight = nn.Parameter(torch.empty(model.conv_size, model.conv_width))
        self.conv_bias = nn.Parameter(torch.empty(model.conv_size)) if model.conv_bias else None
        self.step_bias = nn.Parameter(torch.empty(model.num_heads))
        self.decay_log = nn.Parameter(torch.empty(model.num_heads))
        self.skip = nn.Parameter(torch.empty(model.num_heads))
        self.gated_norm = nn.RMSNorm(model.inner_size, model.norm_eps)
        self.out_proj = nn.Linear(model.inner_size, model.hidden_size, model.bias)

    def forward(self, x: Tensor, starts: Tensor | None) -> Tensor:
        """Map (batch, seq, hidden) to (batch, seq, hidden).

        Args:
            starts: (batch, seq), where each token's document begins; None: there is one.
        """
        model = self.model
        inner, states = model.inner_size, model.num_groups * model.state_size
        gates, mixed, steps = self.in_proj(x).split([inner, model.conv_size, model.num_heads], -1)
        mixed = F.silu(self._convolved(mixed, starts))
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(mixed.dtype, torch.float32)
            values, writers, readers = mixed.to(wide).split([inner, states, states], -1)
            values = values.unflatten(-1, (model.num_heads, model.head_dim))
            out = scan(
                values,
                F.softplus(steps.to(wide) + self.step_bias),
                -self.decay_log.to(wide).exp(),
                writers.unflatten(-1, (model.num_groups, model.state_size)),
                readers.unflatten(-1, (model.num_groups, model.state_size)),
                model.chunk_size,
                starts,
            )
            out = out + values * self.skip.to(wide)[:, None]
            normed = self._normed(out.flatten(-2) * F.silu(gates.to(wide)))
        return self.out_proj(normed.to(x.dtype))

    def _convolved(self, x: Tensor, starts: Tensor | None) -> Tensor:
        """Of each number a weighted sum over a token and those before it in its document."""
        width, seq_len = self.model.conv_width, x.shape[1]
        padded = F.pad(x, (0, 0, width - 1, 0))
        places = torch.arange(seq_len, device=x.device)
        out = torch.zeros_like(x) if self.conv_bias is None else self.conv_bias.to(x.dtype)
        for tap, weights in enumerate(self.conv_weight.to(x.dtype).unbind(1)):
            before = width - 1 - tap
            part = padded[:, tap : tap + seq_len]
            if starts is not None and before:
                part = part * (places - before >= starts)[..., None]
            out = out + part * weights
        return out

    def _normed(self, x: Tensor) -> Tensor:
        """RMS norm of each group of heads."""
        of_groups = x.unflatten(-1, (self.model.num_groups, -1))
        normed = F.rms_norm(of_groups, of_groups.shape[-1:], eps=self.model.norm_eps)
        return normed.flatten(-2) * self.gated_norm.weight


class MambaBlock(nn.Module):
    """A norm and a state space layer, added to the residual stream."""

    def __init__(self, model: Mamba2) -> None:
        super().__init__()
        self.norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.mixer = Mixer(model)

    def forward(self, x: Tensor, starts: Tensor | None) -> Tensor:
        """Map (batch, seq, hidden) to (batch, seq, hidden)."""
        return x + self.mixer(self.norm(x), starts)


class Mamba(nn.Module):
    """The network of a Mamba-2."""

    def __init__(self, model: Mamba2) -> None:
        super().__init__()
        self.model = model
        self.embed = nn.Embedding(model.vocab_size, model.hidden_size)
        self.blocks = nn.ModuleList(MambaBlock(model) for _ in range(model.num_layers))
        self.norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.head = (
            None
            if model.tie_embeddings
            else nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        )

    def forward(
        self, tokens: Tensor, document_ids: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Predict each next token, or say how well it does.

        Args:
            tokens: (batch, seq) ids.
            document_ids: (batch, seq), where several documents are packed into a sequence.
            targets: (batch, seq) the tokens to predict; -100 leaves one out.

        Returns:
            (batch, seq, vocab) logits, or with targets their mean loss in nats.
        """
        starts = None if document_ids is None else document_starts(document_ids)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, starts)
        x = self.norm(x)
        weight = self.embed.weight if self.head is None else self.head.weight
        if targets is not None:
            return linear_cross_entropy(x, weight, targets)
        return F.linear(x, weight) if self.head is None else self.head(x)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Fill all parameters, also of a sharded module: matrices normal with `init_std`, those
        that write to the stream divided by the root of num_layers; decays 1, 2, ...; steps uniform
        in their logarithms.

        Args:
            generator: give every rank one with the same seed.
        """
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        streams = Streams(seed, generator.device)
        for name, parameter in self.state_dict(keep_vars=True).items():
            assign(parameter, self._initial(name, parameter.shape, streams.of(name)))

    def _initial(self, name: str, shape: torch.Size, stream: torch.Generator) -> Tensor:
        model, full = self.model, torch.empty(shape, device=stream.device)
        if name.endswith("decay_log"):
            return torch.arange(1.0, model.num_heads + 1, device=stream.device).log()
        if name.endswith("step_bias"):
            low, high = math.log(model.min_step), math.log(model.max_step)
            steps = full.uniform_(low, high, generator=stream).exp()
            return steps + torch.log(-torch.expm1(-steps))  # what softplus makes these of
        if name.endswith("conv_weight"):
            bound = model.conv_width**-0.5
            return full.uniform_(-bound, bound, generator=stream)
        if len(shape) == 1:
            return full.fill_(0.0 if name.endswith("bias") else 1.0)
        depth = math.sqrt(model.num_layers) if name.endswith("out_proj.weight") else 1.0
        return full.normal_(std=model.init_std / depth, generator=stream)


# ---- weights of transformers --------------------------------------------------------------------


def their_name(name: str) -> str:
    """What transformers calls a parameter."""
    if name == "norm.weight":
        return "backbone.norm_f.weight"
    for ours, theirs in THEIRS:
        name = name.replace(ours, theirs)
    return name


def exported(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors by the names and in the shapes of transformers."""
    return {their_name(name): _as_theirs(name, tensor) for name, tensor in state.items()}


def check_mamba(model: Mamba2, directory: str | Path) -> dict[str, Path]:
    """Look whether a directory holds the tensors of a network; the file of each.

    Raises:
        InputError: no safetensors there, a damaged file, or a tensor that is missing, unexpected
            or of another shape.
    """
    files = tensor_files(Path(directory))
    found: dict[str, tuple[int, ...]] = {}
    for path in dict.fromkeys(files.values()):
        with opened(path) as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in set(file.keys())}
    with torch.device("meta"):
        wanted = exported(Mamba(model).state_dict())
    check_shapes({name: tuple(t.shape) for name, t in wanted.items()}, found, str(directory))
    if missing := wanted.keys() - files.keys():
        raise InputError(f"{directory} names no file of {min(missing)}: fetch its index again.")
    return files


def load_mamba(network: Mamba, directory: str | Path) -> None:
    """Copy the weights of a directory into a network, which may be sharded.

    Raises:
        InputError: as `check_mamba`.
    """
    files = check_mamba(network.model, directory)
    for name, parameter in network.state_dict(keep_vars=True).items():
        theirs = their_name(name)
        with opened(files[theirs]) as file:
            assign(parameter, file.get_tensor(theirs).reshape(parameter.shape))


def _as_theirs(name: str, tensor: Tensor) -> Tensor:
    return tensor[:, None] if name.endswith("conv_weight") else tensor
