"""How tensor parallelism cuts a decoder: one style per module, as data.

`placements` names the modules of a Model's network and says what the ranks of the tp axis do with
each. It holds no torch: `paceline.parallel.tp` acts on it. The residual stream, which all layers
read and add to, is on every rank, or shared out over the tokens (sequence parallel); a layer sees
all tokens, and each rank computes some of its heads or columns.

Papers: columns, rows and vocabulary https://arxiv.org/abs/1909.08053, sequence parallel
https://arxiv.org/abs/2205.05198.
"""

from typing import Literal

from paceline.config.model import Model

Style = Literal[
    "embedding", "norm", "final_norm", "head",
    "input", "layer", "column", "key_heads", "row", "summand", "inner", "experts",
    "experts_inner",
]  # fmt: skip
"""What the ranks do with a module and its parameters.

- embedding: each looks up the ids of its rows; the sum over the ranks goes to the stream.
- norm: whole on each, works on the stream, token by token.
- final_norm: as norm; its output goes whole to the head.
- head: each has the columns of some of the vocabulary, and keeps those logits.
- input: a layer, entered with the stream; all tokens come to every rank, and the gradients of the
  ranks' different heads and columns are added up on the way back.
- layer: entered as input; what it returns on the ranks is added up and goes to the stream.
- column: in a layer; each has some output columns.
- key_heads: in a layer; where there are more ranks than heads, those that have parts of one put it
  together.
- row: in a layer; each has the input columns that fit them, and the sum goes to the stream. One
  rank adds the bias, which all hold.
- summand: as row, without a sum of its own.
- inner: in a layer; whole on each, and works on what the rank has of its input.
- experts: in a layer; left to expert parallelism, which cuts experts along tp too.
- experts_inner: likewise; whole on each, and works on the columns that the rank has.
"""


def placements(model: Model) -> dict[str, Style]:
    """Return the style of each module that has parameters or is a layer.

    A key is a module's name as in `named_modules`; * is the number of any block.
    """
    styles: dict[str, Style] = {"embed": "embedding", "norm": "final_norm"}
    if model.positions == "learned":
        styles["position_embed"] = "embedding"
    if model.token_types:
        styles["type_embed"] = "embedding"
    if model.embedding_norm:
        styles["embed_norm"] = "norm"
    if model.head_layer:
        styles |= {"norm": "norm", "head_layer.proj": "norm", "head_layer.norm": "final_norm"}
    if not model.tie_embeddings:
        styles["head"] = "head"
    elif model.head_bias:
        styles["head_bias"] = "head"
    block: dict[str, Style] = {"attention_norm": "norm", "ffn_norm": "norm"}
    if model.post_norms:
        block |= {"attention_out_norm": "norm", "ffn_out_norm": "norm"}
    block |= _within("attention", _attention(model) if model.latent is None else _latent(model))
    block |= _within("ffn", _FEED_FORWARD)
    styles |= _within("blocks.*", block)
    for layer in filter(model.has_experts, range(model.num_layers)):
        styles |= _within(f"blocks.{layer}.ffn", _EXPERT_LAYER)
    return styles


_FEED_FORWARD: dict[str, Style] = {
    "": "input",
    "gate_proj": "column",
    "up_proj": "column",
    "down_proj": "row",
}
# One sum of what routed and shared experts give.
_EXPERT_LAYER: dict[str, Style] = {
    "": "layer",
    "router": "inner",
    "experts": "experts",
    "shared.gate_proj": "column",
    "shared.up_proj": "column",
    "shared.down_proj": "summand",
    "shared_gate": "inner",
}


def _attention(model: Model) -> dict[str, Style]:
    styles: dict[str, Style] = {"": "input", "key_heads": "key_heads", "o_proj": "row"}
    styles |= {f"{name}_proj": "column" for name in "qkv"}
    if model.sinks:
        styles["sinks"] = "column"
    if model.qk_norm:
        styles |= {f"{name}_norm": "inner" for name in "qk"}
    return styles


def _latent(model: Model) -> dict[str, Style]:
    """The narrow vectors are whole on every rank; its heads' part of their gradient is not."""
    assert model.latent is not None
    sources = ["kv"] if model.latent.q_rank is None else ["q", "kv"]
    styles: dict[str, Style] = {"": "input", "o_proj": "row"}
    if model.latent.q_rank is None:
        styles["q_proj"] = "column"
    for source in sources:
        styles |= {f"{source}_a_proj": "inner", f"{source}_a_norm": "inner"}
        styles[f"{source}_b_proj"] = "column"
    return styles


def _within(name: str, styles: dict[str, Style]) -> dict[str, Style]:
    return {f"{name}.{part}".rstrip("."): style for part, style in styles.items()}
