"""Small networks of every kind, and what a text is without an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.config.heads import Heads
from paceline.config.layers import Experts, LatentAttention
from paceline.config.model import Model
from paceline.config.sampling import Sampling
from paceline.generate.choice import Place, choose
from paceline.generate.narrow_keys import narrowed, widened
from paceline.generate.sequence import Sequence
from paceline.models.attention import LatentAttention as Latent
from paceline.models.attention import Sdpa
from paceline.models.decoder import Decoder
from paceline.models.heads import GuessHeads

VOCAB = 61
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "ffn_size": 48,
    "num_layers": 3,
    "num_heads": 4,
    "max_seq_len": 96,
}
_GPT: dict[str, Any] = {"norm": "layer", "bias": True, "gated": False}
MODELS = {
    "grouped": Model(**_SHAPE, num_kv_heads=2, qk_norm=True),
    "window": Model(**_SHAPE, sliding_window=7, full_layers=(1,), qkv_bias=True),
    "gpt2": Model(**_SHAPE, **_GPT, positions="learned", tie_embeddings=True),
    "phi": Model(**_SHAPE, **_GPT, residual="parallel_shared", rotary_share=0.5, head_bias=True),
    "gemma2": Model(
        **_SHAPE,
        num_kv_heads=2,
        norm="rms_plus_one",
        post_norms=True,
        sliding_window=7,
        full_layers=(1,),
        score_width=12,
        score_cap=2.0,
        logit_cap=5.0,
        scale_embeddings=True,
        activation="gelu_tanh",
        tie_embeddings=True,
    ),
    "gemma3": Model(
        **_SHAPE,
        norm="rms_plus_one",
        post_norms=True,
        qk_norm=True,
        sliding_window=7,
        full_layers=(1,),
        window_rope_theta=100.0,
        score_width=12,
        scale_embeddings=True,
        activation="gelu_tanh",
    ),
    "latent": Model(
        **_SHAPE, latent=LatentAttention(q_rank=12, kv_rank=16, nope_dim=8, rope_dim=8, v_dim=16)
    ),
    "gpt_oss": Model(
        **_SHAPE,
        num_kv_heads=2,
        bias=True,
        sinks=True,
        sliding_window=7,
        full_layers=(1,),
        experts=Experts(
            num_experts=6,
            experts_per_token=2,
            ffn_size=16,
            bias=True,
            gate_limit=0.5,
            dense_layers=(0,),
        ),
    ),
    "experts": Model(
        **_SHAPE,
        tie_embeddings=True,
        experts=Experts(num_experts=6, experts_per_token=2, ffn_size=16, dense_layers=(0,)),
    ),
}


def built(model: Model, dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
    """A network whose weights are large enough for texts that vary."""
    decoder = Decoder(model)
    decoder.init_weights(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
        for name, parameter in decoder.named_parameters():
            if "sinks" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(seed))
    return decoder.to(dtype)


def heads_of(decoder: Decoder, num_heads: int = 3) -> GuessHeads:
    """Heads that weren't trained, and guess something."""
    model = Heads(family="heads", of="nowhere", step=0, trunk=decoder.model, num_heads=num_heads)
    heads = GuessHeads(model, decoder)
    heads.init_weights(torch.Generator().manual_seed(0))
    return heads.to(next(decoder.parameters()).dtype)


def alone(
    decoder: Decoder, prompt: list[int], sampling: Sampling, end: int | None = None
) -> list[int]:
    """The tokens that a request gets without an engine: the whole text anew for each of them."""
    most = min(len(prompt) + sampling.max_tokens, decoder.model.max_seq_len)
    sequence = Sequence([*prompt], sampling, sampling.seed or 0, len(prompt), most)
    while len(sequence.tokens) < most:
        with torch.inference_mode():
            logits = decoder(torch.tensor([sequence.tokens]))[:, -1].float()
        (token,) = choose(logits, [Place(sequence)])
        sequence.tokens.append(token)
        if token == end and not sampling.ignore_end:
            break
    return sequence.made


def prompt(length: int, seed: int) -> list[int]:
    """A prompt that repeats itself here and there."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB // 4, (length,), generator=draw).tolist()


class _RoundedSdpa(Sdpa):
    """Torch's attention over keys and values that are rounded to 8 bits."""

    def __call__(self, q, k, v, mask, *changes):
        is_part = v.shape[-1] < k.shape[-1]
        k = widened(narrowed(k), k.shape[-1], k.dtype)
        v = k[..., : v.shape[-1]] if is_part else widened(narrowed(v), v.shape[-1], v.dtype)
        return super().__call__(q, k, v, mask, *changes)


@contextmanager
def with_rounded_keys(decoder: Decoder) -> Iterator[None]:
    """Within the context a plain network attends to what an engine with serve.kv = "int8" keeps."""
    before, latent = decoder.attend, [m for m in decoder.modules() if isinstance(m, Latent)]
    decoder.set_attend(_RoundedSdpa())
    for attention in latent:
        attention.is_absorbed = True
    try:
        yield
    finally:
        decoder.set_attend(before)
        for attention in latent:
            attention.is_absorbed = False
