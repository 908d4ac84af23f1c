"""Time of loads with weights, keys and values in fewer bits, and what "auto" takes.

How it works: `pairs`. What "auto" goes by is measured anew, before the first load.

    python -m benchmarks.serve.quantised
    python -m benchmarks.serve.quantised --turns 2 --scale 0.25 --only weights_few
"""

import os
import random
import tempfile
from dataclasses import replace

import torch

from benchmarks.serve.pairs import Column, Pair, Rounds, compare, tokens
from benchmarks.serve.workload import NETWORK


def _one_by_one(draw: random.Random, scale: float) -> Rounds:
    return [[tokens(draw, int(64 * scale))] for _ in range(4)]


def _prompts(draw: random.Random, scale: float) -> Rounds:
    return [[tokens(draw, int(320 * scale)) for _ in range(16)]]


def _many(draw: random.Random, scale: float) -> Rounds:
    return [[tokens(draw, int(192 * scale)) for _ in range(48)]]


_WHOLE, _WIDE = {"weights": "as_trained"}, {"kv": "as_weights"}
_FEW = Pair(
    "4 texts of 64 tokens, one after the other",
    NETWORK, _one_by_one, None, {"weights": "int8"}, _WHOLE, 64,
)  # fmt: skip
_READ = Pair(
    "16 prompts of 320 tokens, 8 made of each",
    NETWORK, _prompts, None, {"weights": "int8"}, _WHOLE,
)  # fmt: skip
_LITTLE = Pair(
    "48 texts of 64 tokens after 192; memory for 8 as wide as weights",
    NETWORK, _many, 64, {"kv": "int8", "host_gb": 0.0}, {"kv": "as_weights", "host_gb": 0.0}, 64,
)  # fmt: skip
_ROOM = replace(_FEW, first={"kv": "int8"}, second=_WIDE)


def _narrow(pair: Pair, **first: str) -> Pair:
    """The same of a network in bf16, by other settings."""
    return replace(pair, text=f"{pair.text}; bf16", first=first or pair.first, dtype=torch.bfloat16)


PAIRS = {
    "weights_few": _FEW,
    "weights_few_int4": replace(_FEW, first={"weights": "int4"}),
    "weights_few_auto": replace(_FEW, first={"weights": "auto"}),
    "weights_prompts_int4": _narrow(_READ, weights="int4"),
    "weights_prompts_auto": _narrow(_READ, weights="auto"),
    "keys_little_memory": _LITTLE,
    "keys_enough_memory": _ROOM,
    "keys_auto": replace(_ROOM, first={"kv": "auto"}),
}
_TAKEN = Column("forms of A", lambda numbers: f"{numbers['weights']}, {numbers['keys']}")

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        compare(__doc__, "quantised", PAIRS, _TAKEN)
