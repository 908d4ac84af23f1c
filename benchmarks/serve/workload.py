"""What every contestant is given: a network in a folder, and requests."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from paceline.plan.serving.load import Request

VOCAB = 8192
NETWORK = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "ffn_size": 1408,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 4,
    "max_seq_len": 1024,
    "tie_embeddings": True,
}
"""27.8 M parameters in the shape of Llama."""
COMPARED_TOKENS = 8
"""Of each text, by which a contestant that computes something else is found."""


@dataclass(frozen=True)
class Asked:
    """What a contestant's process is to do."""

    folder: str
    precision: str
    started: float
    """Unix time at which its process was started."""
    rounds: tuple[tuple[Request, ...], ...]

    def write(self, file: Path) -> None:
        """For the process to read."""
        file.write_text(json.dumps(asdict(self)))


def asked() -> Asked:
    """What this process is to do."""
    raw = json.loads(Path(sys.argv[1]).read_text())
    rounds = tuple(
        tuple(Request(tuple(r["prompt"]), r["num_tokens"], r["after_s"]) for r in of_round)
        for of_round in raw.pop("rounds")
    )
    return Asked(**raw, rounds=rounds)


class Stopwatch:
    """When each request's tokens came.

    Args:
        requests: of one round; it starts now.
    """

    def __init__(self, requests: tuple[Request, ...]) -> None:
        self._requests = requests
        self._begun = time.perf_counter()
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._texts: list[list[int]] = [[] for _ in requests]

    def now(self) -> float:
        """Seconds since the round began."""
        return time.perf_counter() - self._begun

    def waiting(self, left: list[tuple[int, Request]]) -> list[tuple[int, Request]]:
        """Those of `left`, with their numbers, that have come by now."""
        now = self.now()
        return [each for each in left if each[1].after_s <= now]

    def came(self, number: int, tokens: Sequence[int]) -> None:
        """These tokens of a request came."""
        if tokens:
            now = self.now()
            self._first.setdefault(number, now)
            self._last[number] = now
            self._texts[number] += tokens

    def lacks(self, number: int) -> bool:
        """Whether a request waits for more tokens."""
        return len(self._texts[number]) < self._requests[number].num_tokens

    def result(self) -> dict[str, Any]:
        """Seconds of the round and of each request: to its first token, and between tokens."""
        seconds, numbers = self.now(), range(len(self._requests))
        wanted = [request.num_tokens for request in self._requests]
        made = [len(text) for text in self._texts]
        assert made == wanted, f"{made} tokens came of {wanted}"
        return {
            "seconds": seconds,
            "tokens": sum(made),
            "beginnings": [text[:COMPARED_TOKENS] for text in self._texts],
            "ttft": [self._first[n] - self._requests[n].after_s for n in numbers],
            "tpot": [
                (self._last[n] - self._first[n]) / max(1, self._requests[n].num_tokens - 1)
                for n in numbers
            ],
        }


def answer(task: Asked, run: Callable[[tuple[Request, ...]], Stopwatch], package: str) -> None:
    """Warm up, say what it took to be ready, do all rounds, and write the results.

    Args:
        package: whose version is told.
    """
    ready_s = time.time() - task.started
    run(tuple(Request(tuple(range(n, n + 9)), 4, 0.0) for n in range(3)))
    rounds = [run(of_round).result() for of_round in task.rounds]
    memory = psutil.Process().memory_info().rss + sum(
        child.memory_info().rss for child in psutil.Process().children(recursive=True)
    )
    found = {"version": version(package), "ready_s": ready_s, "resident_bytes": memory}
    Path(sys.argv[2]).write_text(json.dumps({**found, "rounds": rounds}))
