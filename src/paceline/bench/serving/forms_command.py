"""`paceline bench serve --forms`: the prices of fewer bits, with the loss of held-out text."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.bench.serving.forms import (
    WEIGHT_FORMS,
    FormPrice,
    crossover,
    form_prices,
    forms_of_keys,
    same_load,
)
from paceline.config.serving import ServingSettings, WeightForm
from paceline.generate.key_prices import KeyPrice
from paceline.render.figures import bytes_text, milliseconds
from paceline.render.table import Table
from paceline.serve.evaluate_command import held_out_loss
from paceline.serve.generate_command import described
from paceline.serve.network import open_network

_CONSOLE = Console(highlight=False, soft_wrap=True)
_MOST_TOKENS = 512


def bench_forms_command(path: Path, settings: ServingSettings, step: int | None) -> dict[str, Any]:
    """Measure forms of weights, keys and values, and show what they take.

    Args:
        path: a run or a folder of weights.
        step: of the run's checkpoint; None: the newest good one.

    Returns:
        what was found, as plain data.

    Raises:
        InputError: no such network, or one whose weights have fewer bits already.
    """
    serving = settings.serve
    network = open_network(path, serving, step)
    most = _MOST_TOKENS if serving.max_tokens == "auto" else serving.max_tokens
    _CONSOLE.print(described(network))
    prices = form_prices(network.decoder, serving, most)
    keys = forms_of_keys(network.decoder, serving, most)
    of_weights = {
        form: held_out_loss(path, network, serving.replace(weights=form)) for form in WEIGHT_FORMS
    }
    of_keys = held_out_loss(path, network, serving.replace(kv="int8"))
    _show_weights(prices, of_weights)
    _show_keys(keys, of_keys)
    return {
        "weights": [{**asdict(price), "loss": of_weights[price.form]} for price in prices],
        "keys": [asdict(price) for price in keys],
        "keys_loss": of_keys,
    }


def _show_weights(prices: Sequence[FormPrice], losses: Mapping[WeightForm, float | None]) -> None:
    forms = [
        (
            price.form,
            bytes_text(price.resident_bytes),
            bytes_text(price.peak_bytes),
            _crossover(prices[0], price),
            _loss(losses[price.form]),
        )
        for price in prices
    ]
    heads = ("weights", "matrices", "peak", "slower from", "loss")
    _CONSOLE.print(Table(heads, forms, title="forms of weights", one_line=True))
    passes = [
        (
            f"{one.rows:,}",
            price.form,
            *map(milliseconds, (one.pass_s, one.bytes_s, one.product_s, one.rest_s)),
        )
        for of_rows in zip(*(price.passes for price in prices), strict=True)
        for price, one in zip(prices, of_rows, strict=True)
    ]
    columns = ("tokens", "weights", "pass, ms", "bytes", "products", "rest")
    _CONSOLE.print(Table(columns, passes, words=(1,), title="forward passes", one_line=True))


def _crossover(before: FormPrice, price: FormPrice) -> str:
    if price is before:
        return ""
    rows = crossover(before, price)
    return "never" if rows is None else f"{rows:,} tokens"


def _show_keys(prices: Sequence[KeyPrice], loss: float | None) -> None:
    pairs = same_load(prices)
    rows = [
        (
            f"{before.load.texts:,}",
            f"{before.load.tokens:,}",
            f"{before.load.context:,}",
            milliseconds(before.pass_s),
            milliseconds(after.pass_s),
            f"{after.pass_s / before.pass_s:.2f}",
        )
        for before, after in pairs
    ]
    heads = ("texts", "tokens of each", "of context", "as weights, ms", "int8, ms", "ratio")
    _CONSOLE.print(Table(heads, rows, words=(), title="forms of keys and values"))
    before, after = pairs[0]
    _CONSOLE.print(
        f"a token's keys and values: {bytes_text(before.token_bytes)} as weights, "
        f"{bytes_text(after.token_bytes)} in int8, with which the loss is {_loss(loss)}"
    )


def _loss(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.5f}"
