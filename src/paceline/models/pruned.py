"""Structured pruning: whole layers, heads and channels are left out, and an ordinary, smaller
network is left.

How it works: on some text, each part is rated by what it does to the residual stream. A layer: by
how far it turns the stream, 1 - cos(before, after), mean over tokens. A group of heads (a key and
value head with its query heads) and a channel of the feed-forward layer: by the mean square of what
it adds. The parts that do least are left out, in each layer as many. What is left computes what the
whole network would without them; how it learns again is training's.

Papers: https://arxiv.org/abs/2407.14679 (ratings by activations, and distillation after),
https://arxiv.org/abs/2403.03853 (layers).
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.errors import InputError
from paceline.config.model import Model
from paceline.models.decoder import Decoder

SIZES = ("num_layers", "num_kv_heads", "ffn_size")
"""Of a network, those that can be made smaller."""


class Ratings(NamedTuple):
    """How much parts do, in fp64."""

    layers: Tensor
    """(layers,)"""
    groups: Tensor
    """(layers, kv_heads)"""
    channels: Tensor
    """(layers, ffn_size)"""


class Kept(NamedTuple):
    """What stays, in the order of the network."""

    layers: list[int]
    groups: list[list[int]]
    """Key and value heads of each layer of these."""
    channels: list[list[int]]
    """Of the feed-forward layer of each."""


def check_prunable(model: Model, sizes: Mapping[str, int]) -> None:
    """See that a network can get sizes.

    Raises:
        InputError: it has parts of other kinds, or the sizes are not smaller ones.
    """
    odd = {
        "experts": model.experts is not None,
        "latent": model.latent is not None,
        "causal = false": not model.causal,
    }
    if named := [name for name, is_so in odd.items() if is_so]:
        raise InputError(
            f"--prune is of causal decoders with plain attention and no experts, and this one has "
            f"{named[0]}: leave it out."
        )
    for name, size in sizes.items():
        if not 0 < size <= getattr(model, name):
            raise InputError(
                f"--prune {name}={size} is not from 1 to the {getattr(model, name)} that the "
                "network has: give one that is."
            )


@torch.no_grad()
def ratings(decoder: Decoder, texts: Iterable[tuple[Tensor, Tensor | None]]) -> Ratings:
    """Rate the parts of a network.

    Args:
        decoder: whole, on one device.
        texts: tokens and numbers of documents, see `Decoder.forward`.
    """
    model = decoder.model
    sizes = (), (model.num_kv_heads,), (model.ffn_size,)
    found = Ratings(*(torch.zeros(model.num_layers, *size, dtype=torch.float64) for size in sizes))
    hooks = []
    for layer, block in enumerate(decoder.blocks):
        hooks += [
            block.register_forward_hook(partial(_see_layer, found.layers[layer])),
            block.get_submodule("attention.o_proj").register_forward_pre_hook(
                partial(_see_groups, found.groups[layer])
            ),
            block.get_submodule("ffn.down_proj").register_forward_pre_hook(
                partial(_see_channels, found.channels[layer])
            ),
        ]
    try:
        for tokens, documents in texts:
            decoder(tokens, documents)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _see_layer(total: Tensor, _block: nn.Module, given: tuple[Any, ...], out: Tensor) -> None:
    total += (1 - F.cosine_similarity(given[0].float(), out.float(), dim=-1)).sum().cpu()


def _see_groups(total: Tensor, layer: nn.Module, given: tuple[Any, ...]) -> None:
    weights = layer.get_parameter("weight").chunk(len(total), 1)
    for number, (x, weight) in enumerate(zip(given[0].chunk(len(total), -1), weights, strict=True)):
        total[number] += F.linear(x, weight).double().square().sum().cpu()


def _see_channels(total: Tensor, layer: nn.Module, given: tuple[Any, ...]) -> None:
    squares = given[0].double().square().flatten(0, -2).sum(0)
    total += (squares * layer.get_parameter("weight").double().square().sum(0)).cpu()


def chosen(model: Model, rated: Ratings, sizes: Mapping[str, int]) -> Kept:
    """What stays, of the parts that do most.

    Args:
        model: the whole network.
        rated: its parts.
        sizes: by name (`SIZES`); those that aren't named stay.
    """
    layers, groups, channels = (sizes.get(name, getattr(model, name)) for name in SIZES)
    kept = _most(rated.layers, layers)
    return Kept(
        kept,
        [_most(rated.groups[layer], groups) for layer in kept],
        [_most(rated.channels[layer], channels) for layer in kept],
    )


def _most(rated: Tensor, count: int) -> list[int]:
    order = rated.argsort(descending=True, stable=True)
    return sorted(order[:count].tolist())


def smaller(model: Model, kept: Kept) -> Model:
    """The shapes of what stays."""
    groups, channels = len(kept.groups[0]), len(kept.channels[0])
    full = tuple(new for new, old in enumerate(kept.layers) if old in model.full_layers)
    changes: dict[str, Any] = {
        "num_layers": len(kept.layers),
        "num_heads": model.num_heads // model.num_kv_heads * groups,
        "num_kv_heads": groups,
        "head_dim": model.head_dim,
        "ffn_size": channels,
        "full_layers": full,
    }
    if len(full) == len(kept.layers):  # those with a window are gone
        changes |= {"full_layers": (), "sliding_window": None, "window_rope_theta": None}
    return model.replace(**changes)


def pruned(model: Model, state: Mapping[str, Tensor], kept: Kept) -> dict[str, Tensor]:
    """The weights of what stays, by the names of the smaller network.

    Args:
        model: the whole network.
        state: its weights by our names, whole.
        kept: what stays.
    """
    found = {name: each for name, each in state.items() if not name.startswith("blocks.")}
    for new, old in enumerate(kept.layers):
        wanted = _places(model, kept.groups[new], kept.channels[new])
        prefix = f"blocks.{old}."
        for name, tensor in state.items():
            if name.startswith(prefix):
                inner = name.removeprefix(prefix)
                dim, places = wanted.get(inner, (0, None))
                tensor = tensor if places is None else tensor.index_select(dim, places)
                found[f"blocks.{new}.{inner}"] = tensor
    return found


def _places(
    model: Model, groups: list[int], channels: list[int]
) -> dict[str, tuple[int, Tensor | None]]:
    """Of a block's tensors, along which dimension which places stay."""
    of_group = torch.tensor(groups)
    shared = model.num_heads // model.num_kv_heads
    heads = _each(of_group, shared)
    queries, keys = _each(heads, model.head_dim), _each(of_group, model.head_dim)
    inner = torch.tensor(channels)
    places: dict[str, tuple[int, Tensor | None]] = {
        "attention.o_proj.weight": (1, queries),
        "attention.sinks.weight": (0, heads),
        "ffn.down_proj.weight": (1, inner),
    }
    rows = {
        "attention.q_proj": queries,
        "attention.k_proj": keys,
        "attention.v_proj": keys,
        "ffn.gate_proj": inner,
        "ffn.up_proj": inner,
    }
    for name, wanted in rows.items():
        places |= {f"{name}.weight": (0, wanted), f"{name}.bias": (0, wanted)}
    return places


def _each(numbers: Tensor, width: int) -> Tensor:
    """The places of wide parts by their numbers."""
    return (numbers[:, None] * width + torch.arange(width)).flatten()
