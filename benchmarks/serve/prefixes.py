"""Time of loads with and without shared beginnings, tiers of memory, and layers in files.

How it works: of each pair of settings both do the same load in turns, each time by a new engine in
this process; the one that begins alternates. The ratio is taken within a turn. Networks have random
weights; requests are greedy.

    python -m benchmarks.serve.prefixes
    python -m benchmarks.serve.prefixes --turns 2 --scale 0.25 --only offload
"""

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.serve.workload import NETWORK
from benchmarks.tables import Spread, markdown
from paceline.config.model import Model
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from paceline.generate.paged import KeyShape
from paceline.models.decoder import Decoder

_WIDE_KEYS = {
    "vocab_size": 256,
    "hidden_size": 16,
    "ffn_size": 32,
    "num_layers": 1,
    "num_heads": 16,
    "head_dim": 128,
    "max_seq_len": 1024,
}
"""16 kB of keys and values of a token that 130,000 weights compute."""
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
    """On the device, at scale 1; None: as many as are needed."""
    first: dict[str, Any]
    """Settings of an engine; host_blocks is host_gb as blocks."""
    second: dict[str, Any]
    num_tokens: int = 8
    """Of each text."""


def _one_beginning(draw: random.Random, scale: float) -> Rounds:
    start = _tokens(draw, int(640 * scale))
    return [[start + _tokens(draw, 16) for _ in range(24)]]


def _no_beginning(draw: random.Random, scale: float) -> Rounds:
    return [[_tokens(draw, int(320 * scale)) for _ in range(16)]]


def _chats(draw: random.Random, scale: float) -> Rounds:
    """Eight conversations; in each round one after the other goes on."""
    histories = [_tokens(draw, int(560 * scale)) for _ in range(8)]
    rounds: Rounds = []
    for _ in range(4):
        for number, history in enumerate(histories):
            rounds.append([history])
            histories[number] = history + _tokens(draw, 24)
    return rounds


PAIRS = {
    "prefix": Pair(
        "24 prompts that begin with the same 640 tokens", NETWORK, _one_beginning, None,
        {"share_prefixes": True}, {"share_prefixes": False},
    ),
    "no_prefix": Pair(
        "16 prompts of 320 tokens that have nothing in common", NETWORK, _no_beginning, None,
        {"share_prefixes": True}, {"share_prefixes": False},
    ),
    "offload": Pair(
        "8 chats of 560 tokens and more, by turns; memory for 2", NETWORK, _chats, 44,
        {"host_blocks": 220}, {"host_blocks": 0},
    ),
    "offload_to_disk": Pair(
        "the same; host memory for 2 more, the others in files", NETWORK, _chats, 44,
        {"host_blocks": 44, "disk_gb": 10.0}, {"host_blocks": 0},
    ),
    "offload_wide_keys": Pair(
        "the same of a small network with wide keys", _WIDE_KEYS, _chats, 44,
        {"host_blocks": 220}, {"host_blocks": 0},
    ),
    "offload_idle": Pair(
        "the same of the first network; memory for all", NETWORK, _chats, None,
        {"host_gb": "auto"}, {"host_gb": 0.0},
    ),
    "weights": Pair(
        "16 prompts of 320 tokens; half of the weights in files", NETWORK, _no_beginning, None,
        {"weights_gb": 0.06}, {"weights_gb": 1.0},
    ),
}  # fmt: skip


def main() -> None:
    """Time all pairs, and write the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths of prompts")
    options = parser.parse_args()
    about = taken_with("benchmarks.serve.prefixes")
    console = Console(highlight=False, soft_wrap=True)
    found: dict[str, list[dict[str, Any]]] = {}
    for name in options.only:
        found[name] = []
        for turn in range(options.turns):
            found[name].append(_turn(PAIRS[name], options.scale, turn))
            console.print(f"{name}, turn {turn + 1}: {_ratio(found[name][-1]):.2f}")
    page = _page(found, options.scale, about)
    console.print(page)
    result = {"facts": about, "scale": options.scale, "turns": found}
    keep(folder_of(options.results, about), "serve_prefixes", result, page)


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
            found[side] = {"seconds": seconds, "texts": texts, "numbers": engine.numbers()}
    first, second = (found[side].pop("texts") for side in ("first", "second"))
    pairs = list(zip(first, second, strict=True))
    # In fp32 two likeliest tokens may be within rounding, and what follows then differs.
    found["same_texts"] = sum(one == other for one, other in pairs) / len(pairs)
    return found


@contextmanager
def _engine(pair: Pair, settings: dict[str, Any], scale: float) -> Iterator[Engine]:
    decoder = Decoder(Model.parse(pair.network))
    decoder.init_weights(torch.Generator().manual_seed(0))
    block_gb = KeyShape.of(decoder).block_bytes(32, torch.float32) / 1e9
    settings = {**settings}
    if "host_blocks" in settings:
        settings["host_gb"] = settings.pop("host_blocks") * scale * block_gb
    if pair.blocks is not None:
        settings["kv_gb"] = (int(pair.blocks * scale) + 0.5) * block_gb
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(decoder, Serving(disk_folder=folder, **settings))
        yield engine
        engine.close()


def _serve(engine: Engine, rounds: Rounds, num_tokens: int) -> Prompts:
    sampling = Sampling(max_tokens=num_tokens, temperature=0, ignore_end=True)
    texts = []
    for prompts in rounds:
        sequences = [engine.submit(prompt, sampling) for prompt in prompts]
        while not engine.is_idle:
            engine.step()
        texts += [sequence.made for sequence in sequences]
    return texts


def _tokens(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(256), k=count)


def _ratio(turn: dict[str, Any]) -> float:
    return turn["second"]["seconds"] / turn["first"]["seconds"]


def _page(found: dict[str, Sequence[dict[str, Any]]], scale: float, about: dict[str, Any]) -> str:
    rows = []
    for name, turns in found.items():
        pair, last = PAIRS[name], turns[-1]["first"]["numbers"]
        rows.append(
            (
                pair.text,
                _said(pair.first),
                _said(pair.second),
                *(
                    f"{Spread.of([turn[side]['seconds'] for turn in turns]).median:.2f}"
                    for side in ("first", "second")
                ),
                Spread.of([_ratio(turn) for turn in turns]).text(".2f"),
                f"{last['blocks_fetched']} / {last['blocks_recomputed']}",
                f"{100 * min(turn['same_texts'] for turn in turns):.0f} %",
            )
        )
    titles = (
        "load", "A", "B", "A, s", "B, s", "B / A", "fetched / recomputed blocks of A", "same texts",
    )  # fmt: skip
    text = f"Lengths times {scale:g}, {len(next(iter(found.values())))} turns.\n\n"
    return f"{text}{markdown(titles, rows, titles[:3])}\n{signature(about)}\n"


def _said(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


if __name__ == "__main__":
    main()
