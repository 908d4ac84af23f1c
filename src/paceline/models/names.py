"""Which tensors of a Hugging Face directory make up which tensors of a `Decoder`.

Most parameters have one tensor each, under another name. The stacked weights of experts have one
per expert: expert e's is row `slot_of_expert[e]` of the stack. `slot_of_expert` itself is not
theirs to know.
"""

from collections.abc import Mapping
from typing import NamedTuple

from paceline.config.huggingface import model_type_of
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
)
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
}
_STACKS = (".experts.gate_proj", ".experts.up_proj", ".experts.down_proj")
_SLOTS = ".slot_of_expert"


class TensorSource(NamedTuple):
    """Where a tensor of theirs goes: a whole tensor of ours, or an expert's part of a stack."""

    name: str
    """In `Decoder.state_dict()`."""
    expert: int | None = None


def sources(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorSource]:
    """Their names of the tensors of a decoder or of a part of it, in its order.

    Returns:
        their name -> ours.

    Raises:
        InputError: transformers has no family for a network with these experts.
    """
    # All families of dense networks have the same names.
    model_type = "dense" if model.experts is None else model_type_of(model)
    found = {}
    for name, shape in shapes.items():
        if name.endswith(_STACKS):
            stack, kind = name.rsplit(".", 1)
            for expert in range(shape[0]):
                found[_theirs(f"{stack}.{expert}.{kind}.weight", model_type)] = TensorSource(
                    name, expert
                )
        elif not name.endswith(_SLOTS):
            found[_theirs(name, model_type)] = TensorSource(name)
    return found


def slots_name(stack: str) -> str:
    """The name of the `slot_of_expert` that says how a stack of experts' weights is sorted."""
    return stack.rsplit(".", 2)[0] + _SLOTS


def _theirs(name: str, model_type: str) -> str:
    for ours, theirs in (*_NAMES, *_OF_FAMILY.get(model_type, ())):
        if ours.startswith("."):
            name = name.replace(ours, theirs)
        elif name.startswith(ours):
            name = theirs + name.removeprefix(ours)
    return "model." + name if name.startswith("norm.") else name
