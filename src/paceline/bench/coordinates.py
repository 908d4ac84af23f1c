"""The coordinate check: does one learning rate suit every width?

Networks of several widths, alike otherwise, take a few steps on one batch of random tokens. For
each kind of layer the mean size of what its outputs have changed by since the start is held against
the width. Where the parametrization is right for all widths, it doesn't depend on it: outputs then
neither explode nor stand still as networks grow (https://arxiv.org/abs/2203.03466, appendix D.1).
"""

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from paceline.config.errors import InputError
from paceline.config.job import JobSpec
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.mup import lr_factor
from paceline.models.decoder import Decoder
from paceline.render.table import Table
from paceline.train.optimizers import build_optimizer

MOST, LEAST = 0.2, -0.5
"""Of exponents. What is left of random first weights vanishes with the root of the width, and that
is right; from width 64 to 512 a change may grow to 1.5 times as much."""
_SAMPLES, _TOKENS, _VOCAB, _LAYERS, _SEEDS = 8, 32, 256, 2, 3
_KINDS = {"attention": "attention", "feed-forward": "ffn", "residual stream": ""}


class Coordinates(NamedTuple):
    """What became of one kind of layer."""

    layer: str
    changes: list[float]
    """Mean absolute change of its outputs, by width."""
    exponent: float
    """The power of the width by which it grows."""

    @property
    def is_even(self) -> bool:
        """Whether the width hardly matters."""
        return LEAST <= self.exponent <= MOST


def widened(model: Model, width: int) -> Model:
    """The network at another hidden_size: with more or fewer heads, that stay as wide.

    Raises:
        InputError: some width or number would not be whole.
    """
    sizes = {"hidden_size": model.hidden_size, "ffn_size": model.ffn_size}
    sizes |= {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads}
    for name, size in sizes.items():
        if size * width % model.hidden_size:
            raise InputError(
                f"--widths {width}: model.{name} = {size} for hidden_size = {model.hidden_size} is "
                "no whole number there: give other widths."
            )
    changed = {name: size * width // model.hidden_size for name, size in sizes.items()}
    return model.replace(head_dim=model.head_dim, **changed)


def coordinate_check(job: JobSpec, widths: Sequence[int], steps: int) -> list[Coordinates]:
    """Train at each width, and compare.

    Args:
        job: of a dense decoder; its vocabulary and its number of layers are cut down.
        widths: two or more.
        steps: of the optimizer, at the peak learning rate.

    Raises:
        InputError: it has another network, or there is nothing to compare.
    """
    model = job.model
    if not isinstance(model, Model) or model.experts is not None or model.latent is not None:
        raise InputError(
            "coordinates compares dense decoders, and [model] describes another network: give such "
            "a Job."
        )
    if len(set(widths)) < 2:
        raise InputError(f"--widths {','.join(map(str, widths))}: give two or more, to compare.")
    small = model.replace(
        vocab_size=min(model.vocab_size, _VOCAB), num_layers=min(model.num_layers, _LAYERS),
        max_seq_len=_TOKENS, full_layers=(), sliding_window=None,
    )  # fmt: skip
    found = [changes_of(job, widened(small, width), steps) for width in widths]
    return [
        Coordinates(layer, changes, _exponent(widths, changes))
        for layer in found[0]
        for changes in [[each[layer] for each in found]]
    ]


def coordinates_command(job: JobSpec, widths: Sequence[int], steps: int, *, as_json: bool) -> bool:
    """Check, show a table, and say whether every layer passes."""
    rows = coordinate_check(job, widths, steps)
    passes = all(row.is_even for row in rows)
    verdict = "One learning rate suits these widths" if passes else "Layers depend on the width"
    table = Table(
        ("width", *map(str, widths), "exponent", ""),
        [
            (row.layer, *(f"{change:.3g}" for change in row.changes), f"{row.exponent:+.2f}",
             "ok" if row.is_even else "not even")
            for row in rows
        ],
        note=f"{verdict}: changes grow by a power of it, {LEAST} to {MOST} pass.",
    )  # fmt: skip
    Console().print(table)
    if as_json:
        layers = {row.layer: {"changes": row.changes, "exponent": row.exponent} for row in rows}
        print(json.dumps({"passes": passes, "widths": list(widths), "layers": layers}))
    return passes


def changes_of(job: JobSpec, model: Model, steps: int) -> dict[str, float]:
    """Layer -> mean change after some steps, over seeds and the blocks."""
    sums: dict[str, float] = {}
    for seed in range(_SEEDS):
        generator = torch.Generator().manual_seed(seed)
        network = Decoder(model)
        network.init_weights(generator)
        tokens = torch.randint(model.vocab_size, (_SAMPLES, _TOKENS + 1), generator=generator)
        before = _outputs(network, tokens[:, :-1])
        factor = partial(lr_factor, model)
        optimizer = build_optimizer(network.named_parameters(), job.optim, Layout(), factor)
        for group in optimizer.param_groups:
            group["lr"] = job.optim.lr * group["lr_factor"]
        for _ in range(steps):
            network(tokens[:, :-1], targets=tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
        for layer, after in _outputs(network, tokens[:, :-1]).items():
            change = (after - before[layer]).abs().mean().item() / _SEEDS
            sums[layer] = sums.get(layer, 0.0) + change
    return sums


@torch.no_grad()
def _outputs(network: Decoder, tokens: Tensor) -> dict[str, Tensor]:
    """Layer -> what it gives, of all blocks together."""
    seen: dict[str, list[Tensor]] = {}

    def note(layer: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        kept = seen.setdefault(layer, [])
        return module.register_forward_hook(lambda _module, _inputs, given: kept.append(given))

    assert network.embed is not None
    handles = [note("embedding", network.embed)]
    for block in network.blocks:
        handles += [note(layer, block.get_submodule(path)) for layer, path in _KINDS.items()]
    seen["logits"] = [network(tokens)]
    for handle in handles:
        handle.remove()
    return {layer: torch.stack(outputs) for layer, outputs in seen.items()}


def _exponent(widths: Sequence[int], changes: Sequence[float]) -> float:
    """Of the power law that fits best."""
    x = torch.tensor([math.log(width) for width in widths], dtype=torch.float64)
    y = torch.tensor(changes, dtype=torch.float64).clamp(min=1e-300).log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())
