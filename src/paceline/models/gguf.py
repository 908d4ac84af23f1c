"""Weights as llama.cpp opens them: one file of GGUF, with the tokenizer in it.

What llama.cpp knows of our decoders are the shapes of Llama, Qwen2 (biases of queries, keys and
values) and Qwen3 (norms of queries and keys). Matrices are in fp32, bf16, or in groups of 32 with a
scale in fp16: Q8_0 (8 bits) and Q4_0 (4 bits); vectors are in fp32. Text is cut as GPT-2 cuts it,
into byte-level BPE, as tokenizers that are trained here do.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; written by the `gguf` package.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.model import Model

GgufForm = Literal["F32", "BF16", "Q8_0", "Q4_0"]
_GROUP = 32
_PARTS = {
    "attention_norm": "attn_norm",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "ffn.gate_proj": "ffn_gate",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
}
_AROUND = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
"""Kinds of tokens."""
_TOLD = frozenset(
    {
        *("family", "vocab_size", "hidden_size", "ffn_size", "num_layers", "num_heads"),
        *("num_kv_heads", "head_dim", "max_seq_len", "norm_eps", "rope_theta", "qkv_bias"),
        *("qk_norm", "tie_embeddings", "init_std", "activation"),
    }
)
"""What a file says of a network, or doesn't have to; all else has to be as it is by default."""


def architecture_of(model: Model) -> str:
    """What llama.cpp calls a network of this shape.

    Raises:
        InputError: no name is known for it.
    """
    fields = Model.model_fields
    other = [n for n in fields if n not in _TOLD and getattr(model, n) != fields[n].default]
    if model.activation != "silu":
        other.append("activation")
    if model.qkv_bias and model.qk_norm:
        other.append("qk_norm beside qkv_bias")
    if other:
        raise InputError(
            f"--format gguf is of networks like Llama, Qwen2 and Qwen3, and this one has its own "
            f"{other[0]}: export it as safetensors, and convert that by llama.cpp's own script."
        )
    return "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama"


def write_gguf(
    file: Path,
    model: Model,
    state: Mapping[str, Tensor],
    form: GgufForm,
    tokenizer: bytes,
    end_token: int | None,
) -> None:
    """Write a network.

    Args:
        state: its weights by our names, whole.
        form: of matrices.
        tokenizer: the contents of tokenizer.json.
        end_token: ends a text; None: there is none.

    Raises:
        InputError: the `gguf` package is missing, or such a network, matrix or tokenizer has no
            place in the file.
    """
    name = architecture_of(model)
    described = json.loads(tokenizer)
    told = _tokens(described, model.vocab_size)
    try:
        import gguf
    except ImportError:
        raise InputError(
            "--format gguf needs the package gguf: pip install 'paceline[gguf]'."
        ) from None
    writer = gguf.GGUFWriter(file, name)
    writer.add_vocab_size(model.vocab_size)
    writer.add_context_length(model.max_seq_len)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_layers)
    writer.add_feed_forward_length(model.ffn_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in told])
    writer.add_token_types([kind for _, kind in told])
    writer.add_token_merges(_merges(described))
    writer.add_add_bos_token(False)
    if end_token is not None:
        writer.add_eos_token_id(end_token)
        writer.add_bos_token_id(end_token)
    heads = {"q_proj": model.num_heads, "k_proj": model.num_kv_heads}
    for key, tensor in state.items():
        module, kind = key.rsplit(".", 1)
        own = tensor.float()
        if name == "llama" and (last := module.rsplit(".", 1)[-1]) in heads:
            own = _interleaved(own, heads[last])
        kept = gguf.GGMLQuantizationType[_form_of(key, own, form)]
        data = gguf.quantize(own.contiguous().numpy(), kept)
        writer.add_tensor(f"{_their_name(module)}.{kind}", data, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(file: Path, model: Model) -> dict[str, Tensor]:
    """The weights of a file of `write_gguf`, in fp32, by our names; numbers are those that stand
    there, whatever the form.

    Args:
        model: the network that was written.
    """
    import gguf

    heads = {"attn_q": model.num_heads, "attn_k": model.num_kv_heads}
    ours = {theirs: own for own, theirs in (_PARTS | _AROUND).items()}
    state = {}
    for found in gguf.GGUFReader(file).tensors:
        *layer, part, kind = found.name.split(".")
        tensor = torch.from_numpy(gguf.dequantize(found.data, found.tensor_type).copy())
        if architecture_of(model) == "llama" and part in heads:
            tensor = _in_halves(tensor, heads[part])
        place = f"blocks.{layer[1]}." if layer else ""
        state[f"{place}{ours[part]}.{kind}"] = tensor
    return state


def _their_name(module: str) -> str:
    if module in _AROUND:
        return _AROUND[module]
    _, layer, part = module.split(".", 2)
    return f"blk.{layer}.{_PARTS[part]}"


def _form_of(key: str, tensor: Tensor, form: GgufForm) -> GgufForm:
    if tensor.ndim < 2:
        return "F32"
    if form.startswith("Q") and tensor.shape[1] % _GROUP:
        raise InputError(
            f"{key} has rows of {tensor.shape[1]} weights, and GGUF gives a scale to {_GROUP}: "
            "leave --weights out."
        )
    return form


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows in the order of llama.cpp's Llama: the two that turn together stand side by side, where
    ours has the first halves of pairs before the second."""
    pairs = weight.unflatten(0, (heads, 2, -1))  # (heads, 2, head_dim / 2, ...)
    return pairs.transpose(1, 2).flatten(0, 2)


def _in_halves(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `_interleaved`."""
    pairs = weight.unflatten(0, (heads, -1, 2))  # (heads, head_dim / 2, 2, ...)
    return pairs.transpose(1, 2).flatten(0, 2)


def _tokens(tokenizer: dict[str, Any], vocab_size: int) -> list[tuple[str, int]]:
    """Each token's text and kind, by its number; those that no text has are unused.

    Raises:
        InputError: llama.cpp would cut texts otherwise.
    """
    model, before = tokenizer.get("model") or {}, tokenizer.get("pre_tokenizer") or {}
    is_known = (
        model.get("type") == "BPE"
        and tokenizer.get("normalizer") is None
        and before.get("type") == "ByteLevel"
        and (before.get("use_regex", True) or not model["merges"])  # single bytes stay single
        and not before.get("add_prefix_space")
        and not model.get("ignore_merges")
    )
    if not is_known:
        raise InputError(
            "--format gguf takes tokenizers of byte-level BPE that cut texts as GPT-2 does, and "
            "this one does not: export as safetensors, and convert that by llama.cpp's own script."
        )
    found = [(f"[unused {number}]", _UNUSED) for number in range(vocab_size)]
    for token, number in model["vocab"].items():
        found[number] = token, _NORMAL
    for added in tokenizer.get("added_tokens") or ():
        found[added["id"]] = added["content"], _CONTROL if added["special"] else _NORMAL
    return found


def _merges(tokenizer: dict[str, Any]) -> list[str]:
    """Pairs as one text each, in order; older files have them so."""
    merges = tokenizer["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
