"""Prices: what each form of a network's weights takes on this device, measured.

How it works: forms take turns at the same passes, each over the next tokens of so many texts, and
what counts is the median of their times. "auto" (`chosen_form`) takes a form only where it was
quicker at every number of tokens that a pass may have. What it measured is kept in the user's
cache, for the same shapes on the same device with the same threads and torch.
"""

import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

import torch
from pydantic import TypeAdapter

from paceline.config.errors import InputError
from paceline.config.files import parse_json
from paceline.config.serving import Serving, WeightForm
from paceline.generate.paged import KeyShape, Memory
from paceline.generate.quantised import has_int8_products
from paceline.generate.runner import Runner
from paceline.models.decoder import Decoder
from paceline.models.quantised import matrices_of
from paceline.observe.run import cache_home, write_atomic

_TURNS = 5
_QUICKER = 0.95
"""Of the time as trained; what is above is taken for noise."""


@dataclass(frozen=True)
class WeightPrice:
    """A pass over the next tokens of so many texts, with weights in one form."""

    form: WeightForm
    rows: int
    """Tokens of the pass."""
    pass_s: float
    """Seconds, the median of a few."""
    resident_bytes: int
    """Of the matrices that products read, with their scales; the network's own come on top."""


def weight_prices(
    decoder: Decoder,
    forms: Sequence[WeightForm],
    rows: Iterable[int],
    weight_group: int = Serving().weight_group,
) -> list[WeightPrice]:
    """Measure forms of a network's weights, in turns.

    Args:
        decoder: on one device; as it was afterwards.
        forms: each takes memory of its own meanwhile.
        rows: tokens of the passes, each at place 0 of a text of its own.
        weight_group: weights that share a scale in int4.

    Returns:
        a price for each of `rows` and each form, in this order.
    """
    parameter = next(decoder.parameters())
    memory = Memory(KeyShape.of(decoder), 1, 1, parameter.dtype, parameter.device)
    runners = {
        form: Runner(decoder, memory, form=form, weight_group=weight_group) for form in forms
    }
    prices = []
    for count in rows:
        seconds = in_turns([partial(r.pass_of_spare, count) for r in runners.values()])
        prices += [
            WeightPrice(form, count, spent, runner.matrix_bytes)
            for (form, runner), spent in zip(runners.items(), seconds, strict=True)
        ]
    return prices


def in_turns(passes: Sequence[Callable[[], object]]) -> list[float]:
    """The median seconds of each of these passes, which take turns."""
    for one in passes:
        one()
    taken: list[list[float]] = [[] for _ in passes]
    for _ in range(_TURNS):
        for one, seconds in zip(passes, taken, strict=True):
            begun_s = time.perf_counter()
            one()
            seconds.append(time.perf_counter() - begun_s)
    return [median(seconds) for seconds in taken]


def chosen_form(decoder: Decoder, serving: Serving, most_tokens: int) -> WeightForm:
    """The form that an engine uses; "auto" is int8 where it is quicker whatever comes.

    Args:
        most_tokens: of a pass.

    Raises:
        InputError: fewer bits, and layers that are not all in memory, or weights that were read in
            fewer bits.
    """
    is_streamed = serving.weights_gb != "auto"
    if any(weight.is_meta for _, weight in matrices_of(decoder)):
        if is_streamed or serving.weights in ("int8", "int4"):
            raise InputError(
                "These weights are stored in fewer bits already, and are served as they are: leave "
                "serve.weights and serve.weights_gb out."
            )
        return "as_trained"
    if serving.weights != "auto":
        if is_streamed and serving.weights != "as_trained":
            raise InputError(
                f"serve.weights = {serving.weights!r} keeps all matrices in memory, and "
                f"serve.weights_gb = {serving.weights_gb} doesn't: leave one of them out."
            )
        return serving.weights
    if is_streamed or serving.exact or not has_int8_products(next(decoder.parameters()).device):
        return "as_trained"
    rows = _expected_rows(serving.max_sequences, most_tokens)
    forms: tuple[WeightForm, ...] = ("as_trained", "int8")
    prices = kept_prices(
        prices_file("weights", decoder, rows),
        WeightPrice,
        lambda found: [(p.rows, p.form) for p in found] == [(n, f) for n in rows for f in forms],
        lambda: weight_prices(decoder, forms, rows),
    )
    return "int8" if is_quicker(prices[::2], prices[1::2]) else "as_trained"


def _expected_rows(max_sequences: int, most_tokens: int) -> list[int]:
    """Numbers of tokens that passes may have: powers of two up to a text each, and a prompt."""
    powers = [2**n for n in range(max_sequences.bit_length()) if 2**n < most_tokens]
    return [*powers, most_tokens]


class Price(Protocol):
    """What something takes in one form."""

    @property
    def pass_s(self) -> float:
        """Seconds of a pass."""


P = TypeVar("P", bound=Price)


def is_quicker(before: Sequence[Price], after: Sequence[Price]) -> bool:
    """Whether a form takes less time in every pass."""
    return all(new.pass_s < _QUICKER * old.pass_s for old, new in zip(before, after, strict=True))


def kept_prices(
    file: Path, kind: type[P], is_same: Callable[[list[P]], bool], measure: Callable[[], list[P]]
) -> list[P]:
    """Prices that were measured once and are kept in a file.

    Args:
        is_same: whether those of the file are the wanted ones.
    """
    prices = read_prices(file, kind)
    if not is_same(prices):
        prices = measure()
        with suppress(OSError):
            write_atomic(file, text_of(prices))
    return prices


def prices_file(folder: str, decoder: Decoder, passes: Any) -> Path:
    """Where prices are kept, by all that they depend on."""
    shapes = [(*p.shape, str(p.dtype)) for p in decoder.parameters()]
    device = [platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    what = [decoder.model.model_dump(mode="json"), shapes, device, torch.__version__, passes]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return cache_home() / folder / f"{key}.json"


def text_of(prices: Sequence[Any]) -> str:
    """What is written of them."""
    return json.dumps([asdict(price) for price in prices])


def read_prices(file: Path, kind: type[P]) -> list[P]:
    """What was measured earlier; nothing where it wasn't, or the file is damaged."""
    try:
        return parse_json(file.read_text(), TypeAdapter(list[kind]))  # type: ignore[valid-type]
    except (OSError, ValueError):
        return []
