"""A decoder as a graph without state: keys and values of earlier tokens come in, and go out longer.

So runtimes of others call it, which hold no caches of ours: ONNX Runtime, ExecuTorch. Batch, number
of tokens and number of earlier ones are free. A tied head gets a matrix of its own, because these
runtimes store products and look-ups in different forms.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.errors import InputError
from paceline.config.model import Model
from paceline.models.attention import PLAIN, Scores
from paceline.models.decoder import Decoder
from paceline.models.quantised import quantised

NAMES = ("tokens", "keys", "values")
"""Of what comes in: (batch, seq) int64, and twice (layers, batch, kv_heads, earlier, head_dim)."""
RESULTS = ("logits", "new_keys", "new_values")
"""Of what goes out: (batch, seq, vocab), and keys and values with those of these tokens."""


class _GivenKeys:
    """The core of attention that puts earlier keys and values before those of the tokens."""

    def begin(self, keys: Tensor, values: Tensor) -> None:
        """Start a pass with (layers, batch, kv_heads, earlier, head_dim) each."""
        self._keys, self._values = keys, values
        self.kept: list[tuple[Tensor, Tensor]] = []

    def mask(
        self, seq_len: int, window: int | None, documents: Tensor | None, device: torch.device
    ) -> Tensor:
        """(seq, earlier + seq) of visible pairs."""
        earlier = self._keys.shape[3]
        places = torch.arange(seq_len, device=device) + earlier
        distance = places[:, None] - torch.arange(earlier + seq_len, device=device)
        visible = distance >= 0
        return visible if window is None else visible & (distance < window)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, scores: Scores = PLAIN
    ) -> Tensor:
        layer = len(self.kept)
        k, v = torch.cat((self._keys[layer], k), 2), torch.cat((self._values[layer], v), 2)
        self.kept.append((k, v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=q.shape[-1] ** -0.5)


class _NarrowEmbedding(nn.Module):
    """An embedding of 8 bits, with a scale for each token."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        matrix = quantised(weight, 8)
        self.rows = nn.Buffer(matrix.values)
        self.scales = nn.Buffer(matrix.scales)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, scales = (F.embedding(tokens, each) for each in (self.rows, self.scales))
        return rows.float() * scales


class CachedStep(nn.Module):
    """A decoder's pass over tokens that follow others.

    Args:
        decoder: gets another core of attention.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder, self._core = decoder.eval(), _GivenKeys()
        decoder.set_attend(self._core)

    def forward(self, tokens: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """See `NAMES` and `RESULTS`."""
        self._core.begin(keys, values)
        positions = torch.arange(tokens.shape[1], device=tokens.device) + keys.shape[3]
        logits = self.decoder(tokens, positions=positions)
        return logits, *(torch.stack(each) for each in zip(*self._core.kept, strict=True))


def check_graph(model: Model, form: str) -> None:
    """See that a decoder can be written as a graph.

    Raises:
        InputError: it has layers that no such graph has.
    """
    own = {
        "experts": model.experts is not None,
        "latent": model.latent is not None,
        "causal": not model.causal,
        "score_cap": model.score_cap is not None,
        "sinks": model.sinks,
    }
    if odd := [name for name, is_so in own.items() if is_so]:
        raise InputError(
            f"--format {form} is of causal decoders with plain attention and no experts, and this "
            f"one has its own {odd[0]}: export it as safetensors."
        )


def step_of(model: Model, state: Mapping[str, Tensor], *, is_narrow: bool) -> CachedStep:
    """A network's pass, in fp32.

    Args:
        state: its weights by our names, whole.
        is_narrow: give the embedding 8 bits.
    """
    weights = {name: tensor.float() for name, tensor in state.items()}
    if model.tie_embeddings:
        weights["head.weight"] = weights["embed.weight"].clone()
        if model.head_bias:
            weights["head.bias"] = weights.pop("head_bias.bias")
    decoder = Decoder(model.replace(tie_embeddings=False))
    decoder.load_state_dict(weights)
    if is_narrow:
        decoder.add_module("embed", _NarrowEmbedding(weights["embed.weight"]))
    return CachedStep(decoder).requires_grad_(False)


def no_keys(model: Model, batch: int = 1, earlier: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values of a text that begins; or as many zeros."""
    shape = (model.num_layers, batch, model.num_kv_heads, earlier, model.head_dim)
    return torch.zeros(shape), torch.zeros(shape)


def exported_step(
    step: CachedStep, model: Model, *, free_batch: bool
) -> "torch.export.ExportedProgram":
    """The graph of a pass, with free sizes.

    Args:
        free_batch: whether the batch is free, too; else it is one.
    """
    most, batch = model.max_seq_len, 2 if free_batch else 1
    seq, earlier = torch.export.Dim("seq", max=most), torch.export.Dim("earlier", max=most)
    each = {3: earlier, **({1: torch.export.Dim("batch")} if free_batch else {})}
    tokens = {1: seq, **({0: torch.export.Dim("batch")} if free_batch else {})}
    given = (torch.zeros(batch, 3, dtype=torch.int64), *no_keys(model, batch, 2))
    # Not strict, it takes the number of tokens of this example for the only one.
    return torch.export.export(step, given, dynamic_shapes=(tokens, each, each), strict=True)


@contextmanager
def quiet_export() -> Iterator[None]:
    """Keep what exporters tell of their own work from a person's terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
