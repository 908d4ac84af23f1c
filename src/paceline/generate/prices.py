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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

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
        seconds = _in_turns(list(runners.values()), count)
        prices += [
            WeightPrice(form, count, spent, runner.matrix_bytes)
            for (form, runner), spent in zip(runners.items(), seconds, strict=True)
        ]
    return prices


def _in_turns(runners: Sequence[Runner], rows: int) -> list[float]:
    """The median seconds of a pass, for each runner."""
    for runner in runners:
        runner.pass_of_spare(rows)
    taken: list[list[float]] = [[] for _ in runners]
    for _ in range(_TURNS):
        for runner, seconds in zip(runners, taken, strict=True):
            begun_s = time.perf_counter()
            runner.pass_of_spare(rows)
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
    before, narrow = _kept_prices(decoder, rows)
    return "int8" if is_quicker(before, narrow) else "as_trained"


def is_quicker(before: Sequence[WeightPrice], after: Sequence[WeightPrice]) -> bool:
    """Whether a form takes less time at every number of tokens."""
    return all(new.pass_s < _QUICKER * old.pass_s for old, new in zip(before, after, strict=True))


def _expected_rows(max_sequences: int, most_tokens: int) -> list[int]:
    """Numbers of tokens that passes may have: powers of two up to a text each, and a prompt."""
    powers = [2**n for n in range(max_sequences.bit_length()) if 2**n < most_tokens]
    return [*powers, most_tokens]


def _kept_prices(
    decoder: Decoder, rows: Sequence[int]
) -> tuple[list[WeightPrice], list[WeightPrice]]:
    """The prices as trained and of int8, measured once and kept."""
    forms: tuple[WeightForm, ...] = ("as_trained", "int8")
    file = _file(decoder, rows)
    prices = _read(file)
    if [(p.rows, p.form) for p in prices] != [(n, form) for n in rows for form in forms]:
        prices = weight_prices(decoder, forms, rows)
        with suppress(OSError):
            write_atomic(file, _text(prices))
    return prices[::2], prices[1::2]


def _file(decoder: Decoder, rows: Sequence[int]) -> Path:
    """Where prices are kept, by all that they depend on."""
    shapes = [(*p.shape, str(p.dtype)) for p in decoder.parameters()]
    device = [platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    what = [decoder.model.model_dump(mode="json"), shapes, device, torch.__version__, [*rows]]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return cache_home() / "weights" / f"{key}.json"


def _text(prices: Iterable[WeightPrice]) -> str:
    return json.dumps([asdict(price) for price in prices])


def _read(file: Path) -> list[WeightPrice]:
    """What was measured earlier; nothing where it wasn't, or the file is damaged."""
    try:
        return parse_json(file.read_text(), TypeAdapter(list[WeightPrice]))
    except (OSError, ValueError):
        return []
