"""Prices: what each form of keys and values takes on this device, measured.

How it works: forms take turns at the same passes, of few and many texts, short and long ones, and
of a part of a prompt behind a long text. "auto" (`chosen_key_form`) is int8 only where it was
quicker in all of them. What it measured is kept as that of weights is (`prices`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from paceline.config.errors import InputError
from paceline.config.serving import KeyForm, Serving
from paceline.generate.narrow_keys import kept_type
from paceline.generate.paged import KeyShape, Memory, Part
from paceline.generate.prices import in_turns, is_quicker, kept_prices, prices_file
from paceline.generate.runner import Runner
from paceline.models.decoder import Decoder

_MOST_FILLED = 8192
"""Tokens whose keys and values are in memory meanwhile."""
_SHORT = 64


@dataclass(frozen=True)
class KeyLoad:
    """A pass over so many texts."""

    texts: int
    tokens: int
    """Of each, which are computed: one, or a part of a prompt."""
    context: int
    """Of each, with them."""


@dataclass(frozen=True)
class KeyPrice:
    """What a load takes with keys and values in one form."""

    form: KeyForm
    load: KeyLoad
    pass_s: float
    """Seconds, the median of a few."""
    token_bytes: int
    """Of a token's keys and values, in all layers."""


def key_prices(
    decoder: Decoder, forms: Sequence[KeyForm], loads: Sequence[KeyLoad], block_size: int
) -> list[KeyPrice]:
    """Measure forms of keys and values, in turns.

    Args:
        decoder: on one device; as it was afterwards.

    Returns:
        a price for each of `loads` and each form, in this order.
    """
    first, shape = next(decoder.parameters()), KeyShape.of(decoder)
    num_blocks = max(load.texts * -(-load.context // block_size) for load in loads)
    runners, token_bytes = [], []
    for form in forms:
        dtype = kept_type(form, first.dtype)
        memory = Memory(shape, num_blocks, block_size, dtype, first.device)
        memory.clear(range(num_blocks))  # untouched memory is one page of zeros
        runners.append(Runner(decoder, memory))
        token_bytes.append(shape.block_bytes(1, dtype))
    prices = []
    for load in loads:
        parts = _parts(load, block_size)
        num_tokens = load.texts * load.tokens
        wanted = [*range(load.tokens - 1, num_tokens, load.tokens)]
        seconds = in_turns(
            [partial(runner.compute, [0] * num_tokens, parts, wanted) for runner in runners]
        )
        prices += [
            KeyPrice(form, load, spent, num_bytes)
            for form, spent, num_bytes in zip(forms, seconds, token_bytes, strict=True)
        ]
    return prices


def _parts(load: KeyLoad, block_size: int) -> list[Part]:
    of_text = -(-load.context // block_size)
    return [
        Part(
            text * load.tokens,
            load.context - load.tokens,
            load.tokens,
            range(text * of_text, (text + 1) * of_text),
        )
        for text in range(load.texts)
    ]


def expected_loads(longest: int, max_sequences: int, most_tokens: int) -> list[KeyLoad]:
    """What passes may be of: one text and many, short and as long as can be, and parts of prompts.

    Args:
        longest: tokens of a text.
        most_tokens: of a pass.
    """
    longest, most_texts = min(longest, _MOST_FILLED), min(max_sequences, most_tokens)
    loads = [
        KeyLoad(texts, 1, context)
        for texts in (1, min(8, most_texts), most_texts)
        for context in (_SHORT, longest // 4, longest)
    ]
    part = max(1, min(most_tokens, longest // 2))
    loads += [KeyLoad(1, part, part), KeyLoad(1, part, longest)]
    fitting = (
        KeyLoad(load.texts, load.tokens, min(load.context, longest, _MOST_FILLED // load.texts))
        for load in loads
        if load.context > 0
    )
    return list(dict.fromkeys(fitting))


def chosen_key_form(decoder: Decoder, serving: Serving, most_tokens: int) -> KeyForm:
    """The form that an engine uses; "auto" is int8 where it is quicker whatever comes.

    Args:
        most_tokens: of a pass.

    Raises:
        InputError: 8 bits, and exact passes.
    """
    if serving.kv == "int8" and serving.exact:
        raise InputError(
            "serve.kv = 'int8' rounds keys and values, and serve.exact promises the trainer's own "
            "bits: leave one of them out."
        )
    if serving.kv != "auto":
        return serving.kv
    if serving.exact or serving.num_ranks > 1 or serving.weights_gb != "auto":
        return "as_weights"
    loads = expected_loads(decoder.model.max_seq_len, serving.max_sequences, most_tokens)
    forms: tuple[KeyForm, ...] = ("as_weights", "int8")
    what = [(load.texts, load.tokens, load.context) for load in loads]
    prices = kept_prices(
        prices_file("keys", decoder, [serving.block_size, what]),
        KeyPrice,
        lambda found: [(p.load, p.form) for p in found] == [(n, f) for n in loads for f in forms],
        lambda: key_prices(decoder, forms, loads, serving.block_size),
    )
    return "int8" if is_quicker(prices[::2], prices[1::2]) else "as_weights"
