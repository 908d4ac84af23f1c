"""Which tensors of a Hugging Face directory make up which tensors of a `Decoder`.

Most parameters have one tensor each, under another name. The stacked weights of experts have one
per expert: expert e's is row `slot_of_expert[e]` of the stack. `slot_of_expert` itself is not
theirs to know. GPT-2, GPT-NeoX and ModernBERT store queries, keys and values as one (`Join`),
gpt-oss all experts of a layer (`StackJoin`).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.config.huggingface import is_like_llama, model_type_of
from paceline.config.model import Model

# Parts of a parameter's name: ours, theirs. The order matters only in that a whole prefix is one.
_NAMES = (
    ("embed.", "model.embed_tokens."),
    ("blocks.", "model.layers."),
    (".attention_norm.", ".input_layernorm."),
    (".attention.", ".self_attn."),
    (".q_a_norm.", ".q_a_layernorm."),
    (".kv_a_proj.", ".kv_a_proj_with_mqa."),
    (".kv_a_norm.", ".kv_a_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".ffn.", ".mlp."),
    (".mlp.router.", ".mlp.gate."),
    (".mlp.choice_bias", ".mlp.gate.e_score_correction_bias"),
    ("head.", "lm_head."),
    ("norm.", "model.norm."),
)
# Families that call nearly everything otherwise.
_NAMES_OF = {
    "gpt2": (
        ("embed.", "transformer.wte."),
        ("position_embed.", "transformer.wpe."),
        ("blocks.", "transformer.h."),
        (".attention_norm.", ".ln_1."),
        (".attention.q_proj.", ".attn.c_attn."),
        (".attention.o_proj.", ".attn.c_proj."),
        (".ffn_norm.", ".ln_2."),
        (".ffn.up_proj.", ".mlp.c_fc."),
        (".ffn.down_proj.", ".mlp.c_proj."),
        ("head.", "lm_head."),
        ("norm.", "transformer.ln_f."),
    ),
    "gpt_neox": (
        ("embed.", "gpt_neox.embed_in."),
        ("blocks.", "gpt_neox.layers."),
        (".attention_norm.", ".input_layernorm."),
        (".attention.q_proj.", ".attention.query_key_value."),
        (".attention.o_proj.", ".attention.dense."),
        (".ffn_norm.", ".post_attention_layernorm."),
        (".ffn.up_proj.", ".mlp.dense_h_to_4h."),
        (".ffn.down_proj.", ".mlp.dense_4h_to_h."),
        ("head.", "embed_out."),
        ("norm.", "gpt_neox.final_layer_norm."),
    ),
    "bert": (
        ("head.", "cls.predictions.decoder."),
        ("embed.", "bert.embeddings.word_embeddings."),
        ("position_embed.", "bert.embeddings.position_embeddings."),
        ("type_embed.", "bert.embeddings.token_type_embeddings."),
        ("embed_norm.", "bert.embeddings.LayerNorm."),
        ("blocks.", "bert.encoder.layer."),
        (".attention_norm.", ".attention.output.LayerNorm."),
        (".attention.q_proj.", ".attention.self.query."),
        (".attention.k_proj.", ".attention.self.key."),
        (".attention.v_proj.", ".attention.self.value."),
        (".attention.o_proj.", ".attention.output.dense."),
        (".ffn_norm.", ".output.LayerNorm."),
        (".ffn.up_proj.", ".intermediate.dense."),
        (".ffn.down_proj.", ".output.dense."),
        ("head_layer.proj.", "cls.predictions.transform.dense."),
        ("head_layer.norm.", "cls.predictions.transform.LayerNorm."),
        ("head_bias.", "cls.predictions."),
    ),
    "modernbert": (
        ("head.", "decoder."),
        ("head_bias.", "decoder."),
        ("embed.", "model.embeddings.tok_embeddings."),
        ("embed_norm.", "model.embeddings.norm."),
        ("blocks.", "model.layers."),
        (".attention_norm.", ".attn_norm."),
        (".attention.q_proj.", ".attn.Wqkv."),
        (".attention.o_proj.", ".attn.Wo."),
        (".ffn_norm.", ".mlp_norm."),
        (".ffn.gate_proj.", ".mlp.Wi."),
        (".ffn.down_proj.", ".mlp.Wo."),
        ("head_layer.proj.", "head.dense."),
        ("head_layer.norm.", "head.norm."),
        ("norm.", "model.final_norm."),
    ),
}
# What a family calls otherwise.
_OF_FAMILY = {
    "mixtral": (
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".down_proj.", ".w2."),
        (".up_proj.", ".w3."),
    ),
    "qwen2_moe": (
        (".mlp.shared_gate.", ".mlp.shared_expert_gate."),
        (".shared.", ".shared_expert."),
    ),
    "deepseek_v2": ((".shared.", ".shared_experts."),),
    "deepseek_v3": ((".shared.", ".shared_experts."),),
    **dict.fromkeys(
        ("gemma2", "gemma3_text"),
        (
            (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
            (".attention_out_norm.", ".post_attention_layernorm."),
            (".ffn_out_norm.", ".post_feedforward_layernorm."),
        ),
    ),
    "gpt_oss": (
        (".mlp.gate.", ".mlp.router."),
        (".sinks.weight", ".sinks"),
        (".gate_proj", ".gate_up_proj"),
        (".gate_bias", ".gate_up_proj_bias"),
        (".down_bias", ".down_proj_bias"),
    ),
    "phi": (
        (".o_proj.", ".dense."),
        (".up_proj.", ".fc1."),
        (".down_proj.", ".fc2."),
        ("model.norm.", "model.final_layernorm."),
    ),
}
_STACKS = (".experts.gate_proj", ".experts.up_proj", ".experts.down_proj")
_SLOTS = ".slot_of_expert"
# What is a part of the tensor that the queries', or the gate's, is in.
_KEYS_VALUES = tuple(f".{each}_proj.{part}" for each in "kv" for part in ("weight", "bias"))
_JOINED = {
    "gpt2": _KEYS_VALUES,
    "gpt_neox": _KEYS_VALUES,
    "modernbert": (*_KEYS_VALUES, ".up_proj.weight"),
}


class Join(NamedTuple):
    """How a tensor of theirs holds tensors of ours that have equal shapes."""

    names: tuple[str, ...]
    """In `Decoder.state_dict()`, in their order."""
    num_heads: int | None = None
    """Rows are sorted by heads first, of so many, and by ours within a head; None: by ours."""
    is_transposed: bool = False

    def joined(self, ours: Sequence[Tensor]) -> Tensor:
        """Their tensor."""
        if self.num_heads is None or len(ours) == 1:
            whole = torch.cat(tuple(ours))
        else:
            by_head = [each.unflatten(0, (self.num_heads, -1)) for each in ours]
            whole = torch.cat(by_head, 1).flatten(0, 1)
        return whole.mT if self.is_transposed and whole.ndim == 2 else whole

    def parted(self, theirs: Tensor) -> list[Tensor]:
        """Ours."""
        whole = theirs.mT if self.is_transposed and theirs.ndim == 2 else theirs
        if self.num_heads is None or len(self.names) == 1:
            return list(whole.chunk(len(self.names)))
        by_head = whole.unflatten(0, (self.num_heads, -1)).chunk(len(self.names), 1)
        return [each.flatten(0, 1) for each in by_head]

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Of their tensor, where each of ours has this one."""
        whole = (len(self.names) * ours[0], *ours[1:])
        return whole[::-1] if self.is_transposed else whole


class StackJoin(NamedTuple):
    """How a tensor of theirs holds stacks of ours: expert by expert, columns of ours in turns.

    Ours are (experts, out, in), of biases (experts, out, 1); theirs (experts, in, names x out), of
    biases (experts, names x out).
    """

    names: tuple[str, ...]
    """In `Decoder.state_dict()`."""

    def joined(self, ours: Sequence[Tensor]) -> Tensor:
        """Their tensor; in ours, experts are in order."""
        columns = torch.stack(tuple(ours), 2).flatten(1, 2).mT
        return columns.squeeze(1) if ours[0].shape[2] == 1 else columns

    def parted(self, theirs: Tensor) -> list[Tensor]:
        """An expert's rows of ours, of an expert's part of theirs."""
        rows = theirs.mT if theirs.ndim == 2 else theirs[:, None]
        return list(rows.unflatten(0, (-1, len(self.names))).unbind(1))

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Of their tensor, where each of ours has this one."""
        num, out, width = ours
        wide = len(self.names) * out
        return (num, wide) if width == 1 else (num, width, wide)


class TensorSource(NamedTuple):
    """Where a tensor of theirs goes: a whole tensor of ours, an expert's part of a stack, or
    several."""

    name: str
    """In `Decoder.state_dict()`; the first of several."""
    expert: int | None = None
    join: Join | StackJoin | None = None
    """None: the tensor is theirs as it is."""


def sources(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorSource]:
    """Their names of the tensors of a decoder or of a part of it, in its order.

    Returns:
        their name -> ours.

    Raises:
        InputError: transformers has no family for a network with these experts.
    """
    # All families of dense networks like Llama have the same names.
    is_dense = model.experts is None and is_like_llama(model)
    model_type = "dense" if is_dense else model_type_of(model)
    found = {}
    for name, shape in shapes.items():
        if model_type == "gpt_oss" and ".experts." in name:
            if ".up_" not in name:
                both = (name, name.replace(".gate_", ".up_"))
                stacks = StackJoin(both if ".gate_" in name else both[:1])
                found[_theirs(name, model_type)] = TensorSource(name, join=stacks)
        elif name.endswith(_STACKS):
            stack, kind = name.rsplit(".", 1)
            for expert in range(shape[0]):
                found[_theirs(f"{stack}.{expert}.{kind}.weight", model_type)] = TensorSource(
                    name, expert
                )
        elif not name.endswith((_SLOTS, *_JOINED.get(model_type, ()))):
            join = _join(name, model, model_type)
            found[_theirs(name, model_type)] = TensorSource(name, join=join)
    return found


def _join(name: str, model: Model, model_type: str) -> Join | None:
    is_transposed = model_type == "gpt2" and name.endswith("_proj.weight")
    if ".q_proj." in name and model_type in _JOINED:
        names = tuple(name.replace(".q_proj.", f".{each}_proj.") for each in "qkv")
        num_heads = model.num_heads if model_type == "gpt_neox" else None
        return Join(names, num_heads, is_transposed)
    if model_type == "modernbert" and ".gate_proj." in name:
        return Join((name, name.replace(".gate_", ".up_")))
    return Join((name,), None, is_transposed) if is_transposed else None


def slots_name(stack: str) -> str:
    """The name of the `slot_of_expert` that says how a stack of experts' weights is sorted."""
    return stack.rsplit(".", 2)[0] + _SLOTS


def their_name(model: Model, name: str) -> str:
    """Their name of a tensor of ours that is one by itself."""
    return next(iter(sources(model, {name: ()})))


def as_stored(
    wanted: Mapping[str, TensorSource], stored: Collection[str]
) -> dict[str, TensorSource]:
    """Tensors under the names that files have: GPT-2's, as it was published, have no prefix, and
    BERT's norms have gamma and beta."""
    prefix = "transformer." if "wte.weight" in stored else ""
    named = {name.removeprefix(prefix): source for name, source in wanted.items()}
    if "bert.embeddings.LayerNorm.gamma" not in stored:
        return named
    first = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for now, then in first.items():
        named = {name.replace(now, then): source for name, source in named.items()}
    return named


def _theirs(name: str, model_type: str) -> str:
    table = _NAMES_OF.get(model_type, (*_NAMES, *_OF_FAMILY.get(model_type, ())))
    for ours, theirs in table:
        if ours.startswith("."):
            name = name.replace(ours, theirs)
        elif name.startswith(ours):
            name = theirs + name.removeprefix(ours)
    return name
