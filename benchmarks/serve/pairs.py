"""Pairs: the same loads by two settings of an engine, in turns.

How it works: of each pair both do the same load in turns, each time by a new engine in this
process; the one that begins alternates. The ratio is taken within a turn. Networks have random
weights; requests are greedy.
"""

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import Spread, markdown
from paceline.config.model import Model
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from paceline.generate.paged import KeyShape
from paceline.models.decoder import Decoder

Prompts = list[list[int]]
Rounds = list[Prompts]
"""Prompts of a round come together, when the round before is done."""


@dataclass(frozen=True)
class Pair:
    """A load, and two settings that it is done with."""

    text: str
    network: dict[str, Any]
    rounds: Callable[[random.Random, float], Rounds]
    """Of a random stream and a scale of lengths."""
    blocks: int | None
    """On the device, at scale 1, as wide as weights; None: as many as are needed."""
    first: dict[str, Any]
    """Settings of an engine; host_blocks is host_gb as blocks."""
    second: dict[str, Any]
    num_tokens: int = 8
    """Of each text."""
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Column:
    """What a page says of A besides, by the engine's numbers."""

    title: str
    of: Callable[[Mapping[str, Any]], str]


def compare(doc: str | None, name: str, pairs: Mapping[str, Pair], column: Column) -> None:
    """Time pairs as the command line says, and write the table.

    Args:
        doc: of the benchmark.
        name: of its module in `benchmarks.serve`.
    """
    parser = parser_of(doc)
    parser.add_argument("--only", nargs="+", choices=pairs, default=list(pairs))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths of prompts")
    options = parser.parse_args()
    about = taken_with(f"benchmarks.serve.{name}")
    console = Console(highlight=False, soft_wrap=True)
    found: dict[str, list[dict[str, Any]]] = {}
    for each in options.only:
        found[each] = []
        for turn in range(options.turns):
            found[each].append(_turn(pairs[each], options.scale, turn))
            console.print(f"{each}, turn {turn + 1}: {_ratio(found[each][-1]):.2f}")
    rows = [_row(pairs[each], turns, column) for each, turns in found.items()]
    titles = ("load", "A", "B", "A, s", "B, s", "B / A", column.title, "same texts")
    text = f"Lengths times {options.scale:g}, {options.turns} turns.\n\n"
    page = f"{text}{markdown(titles, rows, titles[:3])}\n{signature(about)}\n"
    console.print(page)
    result = {"facts": about, "scale": options.scale, "turns": found}
    keep(folder_of(options.results, about), f"serve_{name}", result, page)


def _turn(pair: Pair, scale: float, turn: int) -> dict[str, Any]:
    rounds = pair.rounds(random.Random(turn), scale)
    sides = [("first", pair.first), ("second", pair.second)]
    found = {}
    for side, settings in sides if turn % 2 else reversed(sides):
        with _engine(pair, settings, scale) as engine:
            _serve(engine, [[[1] * 40]], 2)
            begun_s = time.perf_counter()
            texts = _serve(engine, rounds, pair.num_tokens)
            seconds = time.perf_counter() - begun_s
            found[side] = {"seconds": seconds, "texts": texts, "numbers": _numbers(engine)}
    first, second = (found[side].pop("texts") for side in ("first", "second"))
    pairs = list(zip(first, second, strict=True))
    # In fp32 two likeliest tokens may be within rounding, and what follows then differs.
    found["same_texts"] = sum(one == other for one, other in pairs) / len(pairs)
    return found


@contextmanager
def _engine(pair: Pair, settings: dict[str, Any], scale: float) -> Iterator[Engine]:
    decoder = Decoder(Model.parse(pair.network))
    decoder.init_weights(torch.Generator().manual_seed(0))
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(pair.dtype)
    block_gb = KeyShape.of(decoder).block_bytes(32, pair.dtype) / 1e9
    settings = {**settings}
    if "host_blocks" in settings:
        settings["host_gb"] = settings.pop("host_blocks") * scale * block_gb
    if pair.blocks is not None:
        settings["kv_gb"] = (int(pair.blocks * scale) + 0.5) * block_gb
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(decoder, Serving(disk_folder=folder, **settings))
        yield engine
        engine.close()


def _numbers(engine: Engine) -> dict[str, Any]:
    forms = {"weights": engine.weight_form, "keys": engine.key_form}
    return {**engine.numbers(), **forms}


def _serve(engine: Engine, rounds: Rounds, num_tokens: int) -> Prompts:
    sampling = Sampling(max_tokens=num_tokens, temperature=0, ignore_end=True)
    texts = []
    for prompts in rounds:
        sequences = [engine.submit(prompt, sampling) for prompt in prompts]
        while not engine.is_idle:
            engine.step()
        texts += [sequence.made for sequence in sequences]
    return texts


def tokens(draw: random.Random, count: int) -> list[int]:
    """Of a text."""
    return draw.choices(range(256), k=count)


def _ratio(turn: dict[str, Any]) -> float:
    return turn["second"]["seconds"] / turn["first"]["seconds"]


def _row(pair: Pair, turns: Sequence[dict[str, Any]], column: Column) -> tuple[str, ...]:
    seconds = [[turn[side]["seconds"] for turn in turns] for side in ("first", "second")]
    return (
        pair.text,
        _said(pair.first),
        _said(pair.second),
        *(f"{Spread.of(each).median:.2f}" for each in seconds),
        Spread.of([_ratio(turn) for turn in turns]).text(".2f"),
        column.of(turns[-1]["first"]["numbers"]),
        f"{100 * min(turn['same_texts'] for turn in turns):.0f} %",
    )


def _said(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())
