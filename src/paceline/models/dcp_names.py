"""Under which names, and in which form, others keep a decoder's parameters in torch's DCP.

paceline     our names, alone or after "model."
torchtitan   Llama's. Rows of queries and keys are sorted for rotary positions that turn pairs of
             neighbours. Releases up to 0.2 have other names for projections and head than 0.3,
             whose names are written.
megatron     Megatron-Core's GPTModel, format torch_dist. A parameter of all layers is one tensor,
             layers first. Queries, keys and values are one: for each group the queries that share a
             key, the key, the value. Gate and up projection are one, the gate first. The vocabulary
             may have further rows, which are left out.

Sources: torchtitan 0.3, models/llama3/state_dict_adapter.py; Megatron-Core 0.16,
models/gpt/gpt_layer_specs.py (sharded_state_dict_keys_map) and transformer/attention.py
(get_query_key_value_tensors). Known of dense networks alone.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.huggingface import is_like_llama
from paceline.config.model import Model

Form = Literal["torchtitan", "megatron"]
Shapes = Mapping[str, tuple[int, ...]]

# Parts of a parameter's name: ours, torchtitan's.
_TITAN = (
    ("embed.", "tok_embeddings."),
    ("blocks.", "layers."),
    (".attention.o_proj.", ".attention.wo."),
    (".ffn.gate_proj.", ".feed_forward.w1."),
    (".ffn.down_proj.", ".feed_forward.w2."),
    (".ffn.up_proj.", ".feed_forward.w3."),
)
_TITAN_NEW = (
    (".attention.q_proj.", ".attention.qkv_linear.wq."),
    (".attention.k_proj.", ".attention.qkv_linear.wk."),
    (".attention.v_proj.", ".attention.qkv_linear.wv."),
    ("head.", "lm_head."),
)
_TITAN_OLD = (
    (".attention.q_proj.", ".attention.wq."),
    (".attention.k_proj.", ".attention.wk."),
    (".attention.v_proj.", ".attention.wv."),
    ("head.", "output."),
)
_MEGATRON = {
    "embed.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "head.weight": "output_layer.weight",
}
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_LAYERS = "decoder.layers."
_LINEAR = (
    *("self_attention.linear_qkv", "self_attention.linear_proj"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)
_QKV, _FC1 = "self_attention.linear_qkv.", "mlp.linear_fc1.weight"
# Of a block: ours, Megatron's behind _LAYERS.
_MEGATRON_BLOCK = {
    "attention_norm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "attention.q_norm.weight": "self_attention.q_layernorm.weight",
    "attention.k_norm.weight": "self_attention.k_layernorm.weight",
    "attention.o_proj.weight": "self_attention.linear_proj.weight",
    "ffn_norm.weight": "mlp.linear_fc1.layer_norm_weight",
    "ffn.down_proj.weight": "mlp.linear_fc2.weight",
}
_FUSED = ("attention.q_proj.", "attention.k_proj.", "attention.v_proj.")


MEGATRON_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What metadata.json of Megatron-Core's format says."""


class Place(NamedTuple):
    """Where a tensor of ours is in a folder of DCP's."""

    name: str
    layer: int | None = None
    """Of a tensor of all layers; None: it is one of its own."""
    take: Callable[[Tensor], Tensor] | None = None
    """From it, or from that layer's part of it; None: it is all of it."""


class Places(NamedTuple):
    """Where all tensors of ours are."""

    of: dict[str, Place]
    """By our name."""
    shapes: dict[str, tuple[int, ...]]
    """Of their tensors, by their name."""


def places(model: Model, shapes: Shapes, there: Shapes) -> Places | None:
    """Where a decoder's tensors are in a folder.

    Args:
        shapes: of ours.
        there: of all tensors in the folder.

    Returns:
        None: it has nobody's names that are known.

    Raises:
        InputError: its names are known, of networks of another kind.
    """
    first, *_ = shapes
    for prefix in ("model.", ""):
        if prefix + first in there:
            named = {name: Place(prefix + name) for name in shapes}
            return Places(named, {prefix + name: tuple(shape) for name, shape in shapes.items()})
    if _titan_name(first, ()) in there:
        must_be_dense(model, "torchtitan")
        is_new = not any(name.endswith(".attention.wq.weight") for name in there)
        return _of_titan(model, shapes, _TITAN_NEW if is_new else _TITAN_OLD)
    if _MEGATRON[first] in there:
        must_be_dense(model, "megatron")
        return _of_megatron(model, shapes, there)
    return None


def state_as(form: Form, model: Model, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A decoder's whole tensors in another form.

    Raises:
        InputError: it has no names for a network of this kind.
    """
    must_be_dense(model, form)
    if form == "megatron":
        return _megatron_state(model, state)
    found = {}
    for name, tensor in state.items():
        heads = _rotated_heads(model, name)
        theirs = _titan_name(name, _TITAN_NEW)
        found[theirs] = tensor if heads is None else neighbours(tensor, heads)
    if model.tie_embeddings:
        found["lm_head.weight"] = found["tok_embeddings.weight"]
    return found


def must_be_dense(model: Model, form: Form) -> None:
    """Refuse networks for which the form's names are not known.

    Raises:
        InputError: it is one of them.
    """
    wrong = {
        "experts": model.experts is not None,
        "latent attention": model.latent is not None,
        "a feed-forward without a gate": not model.gated,
        "other norms, positions, biases or activations than Llama's": not is_like_llama(model),
        "biases of queries, keys and values": form == "torchtitan" and model.qkv_bias,
        "norms of queries and keys": form == "torchtitan" and model.qk_norm,
    }
    for what, is_so in wrong.items():
        if is_so:
            raise InputError(
                f"{form}'s names are not known of a network with {what}: go through a folder of "
                f"transformers (paceline export), and {form}'s own conversion."
            )


# ---- torchtitan ----------------------------------------------------------------------------------


def _of_titan(model: Model, shapes: Shapes, names: tuple[tuple[str, str], ...]) -> Places:
    found = {}
    for name in shapes:
        count = _rotated_heads(model, name)
        take = None if count is None else partial(halves, num_heads=count)
        found[name] = Place(_titan_name(name, names), take=take)
    return Places(found, {found[name].name: tuple(shape) for name, shape in shapes.items()})


def _rotated_heads(model: Model, name: str) -> int | None:
    """Heads of a tensor whose rows rotary positions turn; None: they turn nothing of it."""
    heads = {".q_proj.": model.num_heads, ".k_proj.": model.num_kv_heads}
    return next((count for part, count in heads.items() if part in name), None)


def _titan_name(name: str, names: tuple[tuple[str, str], ...]) -> str:
    for ours, theirs in (*_TITAN, *names):
        if ours.startswith("."):
            name = name.replace(ours, theirs)
        elif name.startswith(ours):
            name = theirs + name.removeprefix(ours)
    return name


def halves(rows: Tensor, num_heads: int) -> Tensor:
    """Sort each head's rows from pairs of neighbours (Meta's order) into two halves (ours)."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def neighbours(rows: Tensor, num_heads: int) -> Tensor:
    """The other way round."""
    return rows.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


# ---- Megatron-Core -------------------------------------------------------------------------------


def _of_megatron(model: Model, shapes: Shapes, there: Shapes) -> Places:
    ours = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    wanted = {name: tuple(t.shape) for name, t in _megatron_state(model, ours).items()}
    for name in _VOCABULARY:
        if name in wanted and name in there and there[name][1:] == wanted[name][1:]:
            # Of a vocabulary that was made divisible by the ranks.
            wanted[name] = (max(wanted[name][0], there[name][0]), *wanted[name][1:])
    found = {}
    for name in shapes:
        layer, rest = _block(name)
        if layer is None:
            is_table = _MEGATRON[name] in _VOCABULARY
            take = partial(_first, count=model.vocab_size) if is_table else None
            found[name] = Place(_MEGATRON[name], take=take)
        elif rest.startswith(_FUSED):
            kind, _, what = rest.removeprefix("attention.").partition(".")
            take = partial(_of_groups, model=model, kind=kind)
            found[name] = Place(f"{_LAYERS}{_QKV}{what}", layer, take)
        elif rest in ("ffn.gate_proj.weight", "ffn.up_proj.weight"):
            take = partial(_half, which=int(rest.startswith("ffn.up")))
            found[name] = Place(f"{_LAYERS}{_FC1}", layer, take)
        else:
            found[name] = Place(f"{_LAYERS}{_MEGATRON_BLOCK[rest]}", layer)
    return Places(found, wanted)


def _megatron_state(model: Model, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    whole = {_MEGATRON[name]: t for name, t in state.items() if _block(name)[0] is None}
    layers = [
        dict(_megatron_block(model, dict(_of_block(state, layer))))
        for layer in range(model.num_layers)
    ]
    stacked = {f"{_LAYERS}{name}": torch.stack([one[name] for one in layers]) for name in layers[0]}
    return whole | stacked


def megatron_objects(state: Mapping[str, Tensor]) -> dict[str, list[None]]:
    """What Megatron-Core asks for beside the weights of linear layers, of each layer: nothing.

    Args:
        state: in its form.
    """
    count = state[f"{_LAYERS}{_FC1}"].shape[0]
    return {
        f"{_LAYERS}{name}._extra_state/shard_{at}_{count}": [None]
        for name in _LINEAR
        for at in range(count)
    }


def _megatron_block(model: Model, block: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for ours, theirs in _MEGATRON_BLOCK.items():
        if ours in block:
            yield theirs, block[ours]
    groups = model.num_kv_heads
    for what in ("weight", "bias"):
        if f"{_FUSED[0]}{what}" in block:
            parts = [block[f"{kind}{what}"].unflatten(0, (groups, -1)) for kind in _FUSED]
            yield f"{_QKV}{what}", torch.cat(parts, 1).flatten(0, 1)
    yield _FC1, torch.cat([block["ffn.gate_proj.weight"], block["ffn.up_proj.weight"]])


def _of_block(state: Mapping[str, Tensor], layer: int) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        at, rest = _block(name)
        if at == layer:
            yield rest, tensor


def _block(name: str) -> tuple[int | None, str]:
    """The layer of a tensor of ours, and its name in there."""
    first, _, rest = name.partition(".")
    if first != "blocks":
        return None, name
    layer, _, rest = rest.partition(".")
    return int(layer), rest


def _of_groups(fused: Tensor, *, model: Model, kind: str) -> Tensor:
    """Queries, keys or values out of Megatron's groups."""
    groups = model.num_kv_heads
    per_group = model.num_heads // groups
    heads = fused.unflatten(0, (groups, per_group + 2, -1))
    begin, end = {
        "q_proj": (0, per_group),
        "k_proj": (per_group, per_group + 1),
        "v_proj": (per_group + 1, per_group + 2),
    }[kind]
    return heads[:, begin:end].flatten(0, 2)


def _half(rows: Tensor, *, which: int) -> Tensor:
    return rows.chunk(2)[which]


def _first(rows: Tensor, *, count: int) -> Tensor:
    return rows[:count]
