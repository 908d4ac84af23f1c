"""Time of loads with and without shared beginnings, tiers of memory, and layers in files.

How it works: `pairs`.

    python -m benchmarks.serve.prefixes
    python -m benchmarks.serve.prefixes --turns 2 --scale 0.25 --only offload
"""

import random

from benchmarks.serve.pairs import Column, Pair, Rounds, compare, tokens
from benchmarks.serve.workload import NETWORK

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


def _one_beginning(draw: random.Random, scale: float) -> Rounds:
    start = tokens(draw, int(640 * scale))
    return [[start + tokens(draw, 16) for _ in range(24)]]


def _no_beginning(draw: random.Random, scale: float) -> Rounds:
    return [[tokens(draw, int(320 * scale)) for _ in range(16)]]


def _chats(draw: random.Random, scale: float) -> Rounds:
    """Eight conversations; in each round one after the other goes on."""
    histories = [tokens(draw, int(560 * scale)) for _ in range(8)]
    rounds: Rounds = []
    for _ in range(4):
        for number, history in enumerate(histories):
            rounds.append([history])
            histories[number] = history + tokens(draw, 24)
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


_FETCHED = Column(
    "fetched / recomputed blocks of A",
    lambda numbers: f"{numbers['blocks_fetched']} / {numbers['blocks_recomputed']}",
)

if __name__ == "__main__":
    compare(__doc__, "prefixes", PAIRS, _FETCHED)
