"""Tokens a second, waits and memory of engines that make texts on this machine's CPU.

How it works: every contestant gets the same network (random weights in Llama's shape, 27.8 M
parameters; those with a format of their own convert it first) and the same requests: greedy, of a
given number of tokens each. Contestants take turns, each time in a process of its own: all requests
at once, then at rates. Figures are medians over the turns; a ratio is the median of those of each
turn. Texts have to begin as ours do: how many don't is told.

    python -m benchmarks.serve --contestants paceline transformers
    python -m benchmarks.serve --precision bf16 --rates 1 2 4 8 --python vllm=PATH/TO/python

vLLM for CPUs pins its own versions of much: give it an environment of its own by --python.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.provenance import ROOT, folder_of, keep, parser_of, signature, taken_with
from benchmarks.serve.workload import COMPARED_TOKENS, NETWORK, VOCAB, Asked
from benchmarks.tables import Spread, markdown
from paceline.config.model import Model
from paceline.models.decoder import Decoder
from paceline.models.weights import write_weights
from paceline.plan.serving.load import requests_of

CONTESTANTS = {
    "paceline": "benchmarks.serve.ours",
    "vllm": "benchmarks.serve.vllm_engine",
    "transformers": "benchmarks.serve.transformers_batches",
    "transformers-continuous": "benchmarks.serve.transformers_continuous",
    "ctranslate2": "benchmarks.serve.ctranslate2_engine",
    "llama.cpp": "benchmarks.serve.llama_cpp_engine",
}
_CONVERTING = ("ctranslate2", "llama.cpp")
_LONGEST_S = 3600
_LIVELY = 3.0
"""Factor of the initial matrices: as they are drawn, each token is followed by itself."""


def main() -> None:
    """Let contestants take turns, and write what they took."""
    options = _options()
    about = taken_with("benchmarks.serve")
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _write_network(folder / "network")
        for name in _CONVERTING:
            if name in options.contestants:
                _run(name, folder, options, "convert", folder / "network", folder / name)
        lengths = (options.shortest, options.longest)
        rounds = tuple(
            tuple(requests_of(number, rate, seed, lengths, lengths, VOCAB))
            for seed, (number, rate) in enumerate(
                [(options.requests, None)]
                + [(max(1, round(rate * options.seconds)), rate) for rate in options.rates]
            )
        )
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in options.contestants}
        for turn in range(options.turns):
            for name in options.contestants:
                console.print(f"turn {turn + 1}: {name}")
                turns[name].append(_turn(name, folder, options, rounds))
                console.print(_line(turns[name][-1]["rounds"][0]))
    page = _page(turns, options, about)
    console.print(page)
    result = {
        "facts": about,
        "network": NETWORK,
        "options": vars(options) | {"results": None, "python": None},
        "turns": turns,
    }
    keep(folder_of(options.results, about), f"serve_{options.precision}", result, page)


def _write_network(folder: Path) -> None:
    model = Model.parse(NETWORK)
    decoder = Decoder(model)
    decoder.init_weights(torch.Generator().manual_seed(0))
    state = decoder.state_dict()
    for name, tensor in state.items():
        if name.startswith("blocks.") and tensor.ndim == 2:
            tensor *= _LIVELY
    write_weights(folder, model, state)


def _turn(name: str, folder: Path, options: argparse.Namespace, rounds: Any) -> dict[str, Any]:
    task, answer = folder / "task.json", folder / "answer.json"
    Asked(str(folder / "network"), options.precision, time.time(), rounds).write(task)
    _run(name, folder, options, task, answer)
    found = json.loads(answer.read_text())
    answer.unlink()
    return found


def _run(name: str, folder: Path, options: argparse.Namespace, *arguments: str | Path) -> None:
    """Have a contestant's process do something."""
    python = dict(each.split("=", 1) for each in options.python).get(name, sys.executable)
    variables = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, "-m", CONTESTANTS[name], *map(str, arguments)],
        env=variables, cwd=folder, timeout=_LONGEST_S, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{name} failed ({done.returncode}):\n{done.stderr[-3000:]}")


def _line(of_round: dict[str, Any]) -> str:
    return f"  {of_round['tokens'] / of_round['seconds']:.0f} tokens/s"


def _page(turns: dict[str, Any], options: argparse.Namespace, about: dict[str, Any]) -> str:
    first = next(iter(turns))
    rows = []
    for name, of_name in turns.items():
        ratios = [a / b for a, b in zip(_speeds(turns[first]), _speeds(of_name), strict=True)]
        agreed, compared = _agreement(turns[first], of_name)
        rows.append(
            (
                f"{name} {of_name[0]['version']}",
                Spread.of(_speeds(of_name)).text(".0f"),
                "" if name == first else Spread.of(ratios).text(".2f"),
                f"{statistics.median(turn['ready_s'] for turn in of_name):.1f}",
                f"{statistics.median(turn['resident_bytes'] for turn in of_name) / 1e6:.0f}",
                f"{agreed} of {compared}",
            )
        )
    heads = (
        "all at once",
        "tokens/s (least – most)",
        f"{first} is so many times as fast",
        "ready after, s",
        "resident, MB",
        f"texts whose first {COMPARED_TOKENS} tokens are {first}'s",
    )
    text = (
        f"{options.precision}, {options.requests} requests, {options.shortest} to "
        f"{options.longest} tokens in and out, {options.turns} turns; at a rate as many requests "
        f"as come in {options.seconds:g} s.\n\n"
    )
    text += markdown(heads, rows, ["all at once"])
    for place, rate in enumerate(options.rates, 1):
        rows = []
        for name, of_name in turns.items():
            waits = {
                kind: [ms * 1e3 for turn in of_name for ms in turn["rounds"][place][kind]]
                for kind in ("ttft", "tpot")
            }
            seconds = [turn["rounds"][place]["seconds"] for turn in of_name]
            parts = (0.5, 0.9, 0.99)
            figures = [f"{_at(waits[kind], part):.0f}" for kind in waits for part in parts]
            rows.append((name, *figures, f"{statistics.median(seconds):.1f}"))
        heads = (
            f"{rate:g} requests/s",
            "TTFT median, ms",
            "90 %",
            "99 %",
            "TPOT median, ms",
            "90 %",
            "99 %",
            "until all are done, s",
        )
        text += "\n" + markdown(heads, rows, [heads[0]])
    return f"{text}\n{signature(about)}\n"


def _speeds(turns: list[dict[str, Any]]) -> list[float]:
    return [turn["rounds"][0]["tokens"] / turn["rounds"][0]["seconds"] for turn in turns]


def _agreement(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[int, int]:
    """Texts that begin as ours do, and how many there are, in all rounds of all turns."""
    pairs = [
        pair
        for turns in zip(ours, theirs, strict=True)
        for rounds in zip(*(turn["rounds"] for turn in turns), strict=True)
        for pair in zip(*(of_round["beginnings"] for of_round in rounds), strict=True)
    ]
    return sum(a == b for a, b in pairs), len(pairs)


def _at(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--requests", type=int, default=64, help="all at once")
    parser.add_argument(
        "--shortest", type=int, default=32, help="tokens of a prompt, and of a text"
    )
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="requests a second")
    parser.add_argument("--seconds", type=float, default=15, help="that requests come at a rate")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="of a contestant"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
