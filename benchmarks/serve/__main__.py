"""Tokens a second, waits and memory of engines that make texts on this machine's CPU.

How it works: every contestant opens the same folder (random weights in Llama's shape, 27.8 M
parameters) and gets the same requests: greedy, of a given number of tokens each. Contestants take
turns, each time in a process of its own: all requests at once, then at rates. Figures are medians
over the turns; the ratio is of the medians.

    python -m benchmarks.serve
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
from benchmarks.serve.workload import NETWORK, Asked, requests_of
from benchmarks.tables import markdown
from paceline.config.model import Model
from paceline.models.decoder import Decoder
from paceline.models.weights import write_weights

CONTESTANTS = {
    "paceline": "benchmarks.serve.ours",
    "vllm": "benchmarks.serve.vllm_engine",
    "transformers": "benchmarks.serve.transformers_batches",
}
_LONGEST_S = 1800


def main() -> None:
    """Let contestants take turns, and write what they took."""
    options = _options()
    about = taken_with("benchmarks.serve")
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = Model.parse(NETWORK)
        decoder = Decoder(model)
        decoder.init_weights(torch.Generator().manual_seed(0))
        write_weights(folder / "network", model, decoder.state_dict())
        rounds = tuple(
            tuple(requests_of(options.requests, rate, seed, options.shortest, options.longest))
            for seed, rate in enumerate((None, *options.rates))
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


def _turn(name: str, folder: Path, options: argparse.Namespace, rounds: Any) -> dict[str, Any]:
    task, answer = folder / "task.json", folder / "answer.json"
    python = dict(each.split("=", 1) for each in options.python).get(name, sys.executable)
    Asked(str(folder / "network"), options.precision, time.time(), rounds).write(task)
    variables = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, "-m", CONTESTANTS[name], str(task), str(answer)],
        env=variables, cwd=folder, timeout=_LONGEST_S, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    found = json.loads(answer.read_text())
    answer.unlink()
    return found


def _line(of_round: dict[str, Any]) -> str:
    return f"  {of_round['tokens'] / of_round['seconds']:.0f} tokens/s"


def _page(turns: dict[str, Any], options: argparse.Namespace, about: dict[str, Any]) -> str:
    rows = []
    for name, of_name in turns.items():
        speeds = [turn["rounds"][0]["tokens"] / turn["rounds"][0]["seconds"] for turn in of_name]
        ready = statistics.median(turn["ready_s"] for turn in of_name)
        memory = statistics.median(turn["resident_bytes"] for turn in of_name)
        rows.append(
            (
                name,
                f"{statistics.median(speeds):.0f}",
                f"{min(speeds):.0f} to {max(speeds):.0f}",
                f"{ready:.1f}",
                f"{memory / 1e6:.0f}",
            )
        )
    heads = ("all at once", "tokens/s", "least to most", "ready after, s", "resident, MB")
    text = (
        f"{options.precision}, {options.requests} requests, {options.shortest} to "
        f"{options.longest} tokens in and out, {options.turns} turns.\n\n"
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
            figures = [f"{_at(waits[kind], part):.0f}" for kind in waits for part in (0.5, 0.99)]
            rows.append((name, *figures, f"{statistics.median(seconds):.1f}"))
        heads = (
            f"{rate:g} requests/s",
            "TTFT median, ms",
            "99 %",
            "TPOT median, ms",
            "99 %",
            "until all are done, s",
        )
        text += "\n" + markdown(heads, rows, [heads[0]])
    return f"{text}\n{signature(about)}\n"


def _at(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument(
        "--shortest", type=int, default=32, help="tokens of a prompt, and of a text"
    )
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="requests a second")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="of a contestant"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
