"""The network of a published run, from the dimensions in its line.

Tables give sizes, not switches. What they leave out follows from what they give: latent attention
from heads that don't make up the hidden size (its ranks are those of the published networks that
have it), the gate of the feed-forward layer from its width.
"""

import re

from paceline.config.errors import InputError
from paceline.config.layers import Experts, LatentAttention
from paceline.config.model import Model
from paceline.published.table import PublishedLine

# GPT-2's tokens, which tables of GPT runs don't mention; where tensor parallel shares them out,
# Megatron pads them to a multiple of 128 for each rank.
_GPT_VOCAB = 50257
# DeepSeek-V3's tokens choose four of eight groups of experts first, so that they visit few nodes
# (https://arxiv.org/abs/2412.19437, 2.1.2 and 4.2), DeepSeek-V2's three of eight
# (https://arxiv.org/abs/2405.04434, 2.2.2): by number of experts, choices and columns of a head.
_GROUPS = {
    (256, 8, 192): {"num_groups": 8, "groups_per_token": 4},
    (160, 6, 192): {"num_groups": 8, "groups_per_token": 3},
}


class UnpredictableError(Exception):
    """Why a run can't be predicted, in a word or two."""


def model_of(line: PublishedLine) -> tuple[Model, list[str]]:
    """The network of a line, and the names of what was inferred.

    Raises:
        UnpredictableError: where the line doesn't describe a decoder that Paceline knows.
    """
    words = f"{line.text('notes')} {line.text('compile_flash_flags')} {line.text('model')}".lower()
    if re.search(r"mamba|nemotron-?(h|3)", words):
        raise UnpredictableError("state-space layers")
    layers, hidden, heads = line.count("layers"), line.count("hidden"), line.count("heads")
    seq_len = line.count("seq")
    if not (layers and hidden and heads):
        raise UnpredictableError("no shapes")
    if not seq_len:
        raise UnpredictableError("no sequence length")
    inferred = [name for name in ("ffn", "vocab") if not line.count(name)]
    predicted_tokens = "mtp" in line.text("model").lower().replace("_", "-").split("-")
    if predicted_tokens:
        layers += 1  # the module of multi-token prediction is one more block
    sizes = {
        "vocab_size": line.count("vocab") or _padded_vocab(line.count("tp") or 1),
        "hidden_size": hidden,
        "ffn_size": line.count("ffn") or 4 * hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": line.count("kv_heads") or heads,
        "max_seq_len": seq_len,
    }
    switches: dict[str, object] = {
        "gated": bool(line.flag("gated_mlp")),
        "tie_embeddings": line.flag("tied_emb") is not False,
        "causal": "mlm" not in line.text("workload").lower(),
    }
    try:
        parts = {"experts": _experts(line, layers), **_heads(line, hidden, heads)}
        return Model.parse({**sizes, **switches, **parts}), inferred
    except InputError:
        raise UnpredictableError("odd shapes") from None


def _padded_vocab(tp: int) -> int:
    return _GPT_VOCAB if tp == 1 else -(-_GPT_VOCAB // (128 * tp)) * 128 * tp


def _heads(line: PublishedLine, hidden: int, heads: int) -> dict[str, object]:
    head_dim = line.count("head_dim")
    if head_dim is None:
        return {}
    # 128 numbers of a head's own and 64 rotated ones: DeepSeek-V2, -V3, Kimi K2, Moonlight.
    if line.count("experts") and head_dim == 192 and heads * head_dim != hidden:
        queries = 1536 if hidden >= 4096 else None
        latent = LatentAttention(q_rank=queries, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
        return {"latent": latent}
    return {"head_dim": head_dim}


def _experts(line: PublishedLine, layers: int) -> Experts | None:
    num_experts, topk = line.count("experts"), line.count("topk")
    if not num_experts:
        return None
    ffn = line.count("moe_ffn") or line.count("ffn")
    if not topk or not ffn:
        raise UnpredictableError("no shapes")
    dense = line.count("dense_layers") or 0
    return Experts.parse(
        {
            "num_experts": num_experts,
            "experts_per_token": topk,
            "ffn_size": ffn,
            "shared_ffn_size": line.count("shared_ffn") or 0,
            "dense_layers": tuple(range(min(dense, layers - 1))),
            **_GROUPS.get((num_experts, topk, line.count("head_dim") or 0), {}),
        }
    )
