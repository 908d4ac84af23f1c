"""What guessed tokens are worth: texts of a trained network with each kind of guesses and without.

How it works: a network, a small one and heads are trained on the demo's text, Python's own library.
Engines of one network, one of each kind of guesses, then take turns at the same loads: 1, 4 and 16
texts at a time, that go on from held-out text, from held-out text that repeats itself, and drawn
ones. Figures are medians over the turns; ratios are against no guesses in the same turn. Texts
have to be the same: how many aren't, by rounding, is told.

    python -m benchmarks.serve.speculated
    python -m benchmarks.serve.speculated --runs FOLDER     # keeps what was trained, or takes it
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import Spread, markdown
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from paceline.observe.run import Run
from paceline.serve.network import Network, open_network
from paceline.train.data import prepare

_NETWORK = {
    "hidden_size": 512, "ffn_size": 1408, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4,
}  # fmt: skip
_SMALL = {"hidden_size": 128, "ffn_size": 352, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
_KINDS: dict[str, tuple[Any, str | None]] = {
    "off": ("off", None),
    "ngram": ("ngram", None),
    "draft": ("draft", "small"),
    "heads": ("heads", "heads"),
    "auto, draft": ("auto", "small"),
    "auto, heads": ("auto", "heads"),
}
_PROMPT, _REPEATED = 96, 32  # tokens
_LOADS = {"held-out text": 0.0, "text that repeats itself": 0.0, "drawn text": 0.8}
"""Their temperatures."""


@dataclass(frozen=True)
class Turn:
    """A load once, with one kind of guesses."""

    tokens_per_s: float
    guessed: int
    right: int
    texts: list[list[int]]


def main() -> None:
    """Train what is missing, let kinds take turns, and write what they took."""
    options, console = _options(), Console(highlight=False, soft_wrap=True)
    about = taken_with("benchmarks.serve.speculated")
    with tempfile.TemporaryDirectory() as place:
        runs = options.runs or Path(place)
        runs.mkdir(parents=True, exist_ok=True)
        _train(runs, options, console)
        network = open_network(runs / "network")
        found = _measured(runs, network, options, console)
    page = _page(found, options, about)
    console.print(page)
    keep(folder_of(options.results, about), "serve_speculated", {"facts": about, **found}, page)


def _train(runs: Path, options: argparse.Namespace, console: Console) -> None:
    """The network, a small one, and heads of the first, where they aren't there."""
    (runs / "heads.toml").write_text(
        f'name = "heads"\n[model]\nfamily = "heads"\nof = "network"\nnum_heads = 4\n'
        f"[optim]\nlr = 1e-3\nwarmup_steps = 10\n[train]\nsteps = {options.steps}\n"
        "global_batch = 8\nseq_len = 128\n"
    )
    jobs: dict[str, Sequence[str]] = {
        "network": _shape(_NETWORK, options),
        "small": _shape(_SMALL, options),
        "heads": (str(runs / "heads.toml"),),
    }
    for name, arguments in jobs.items():
        if not Run(runs / name).exists:
            console.print(f"training {name}")
            command = [sys.executable, "-m", "paceline", "train", *arguments]
            names = [
                "--runs",
                str(runs),
                "--set",
                f"name={name}",
                "--set",
                "observe.profile_every=0",
            ]
            done = subprocess.run([*command, *names], capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"training {name} failed:\n{done.stderr[-3000:]}")


def _shape(shape: dict[str, int], options: argparse.Namespace) -> list[str]:
    settings = {f"model.{name}": value for name, value in shape.items()}
    settings |= {"train.steps": options.steps, "train.global_batch": 8, "train.eval_every": 0}
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def _measured(
    runs: Path, network: Network, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    prompts = _prompts(runs / "network", max(options.texts))
    engines = {
        name: network.engine(
            Serving(
                speculate=kind,
                draft=None if by is None else str(runs / by),
                max_sequences=max(options.texts),
                guess_tokens=options.guess_tokens,
                share_prefixes=False,  # or a load would be quicker the second time
            )
        )
        for name, (kind, by) in _KINDS.items()
    }
    found = []
    for load, temperature in _LOADS.items():
        for count in options.texts:
            turns: dict[str, list[Turn]] = {name: [] for name in engines}
            for number in range(options.turns + 1):
                for name, engine in engines.items():
                    turn = _turn(engine, prompts[load][:count], temperature, options.tokens)
                    if number:  # the first one warms up, and teaches how often guesses are right
                        turns[name].append(turn)
            found.append({"load": load, "texts": count, "kinds": _figures(turns)})
            console.print(found[-1])
    return {"options": vars(options) | {"results": None, "runs": None}, "loads": found}


def _prompts(run: Path, count: int) -> dict[str, list[list[int]]]:
    """Of each load so many, from the held-out split."""
    data = prepare(Run(run).job().data).for_samples(_PROMPT).dataset("eval")
    places = np.linspace(0, data.num_samples(_PROMPT) - 1, count).astype(np.int64)
    held_out = data.gather(places, _PROMPT)[:, :_PROMPT].tolist()
    repeated = [tokens[:_REPEATED] * (_PROMPT // _REPEATED) for tokens in held_out]
    return dict(zip(_LOADS, (held_out, repeated, held_out), strict=True))


def _turn(engine: Engine, prompts: list[list[int]], temperature: float, most: int) -> Turn:
    before, begun = engine.numbers(), time.perf_counter()
    sequences = [
        engine.submit(
            tokens,
            Sampling(max_tokens=most, temperature=temperature, ignore_end=True, seed=number),
        )
        for number, tokens in enumerate(prompts)
    ]
    while not engine.is_idle:
        engine.step()
    seconds, after = time.perf_counter() - begun, engine.numbers()
    guessed, right = (after[name] - before[name] for name in ("guessed", "guessed_right"))
    texts = [sequence.made for sequence in sequences]
    return Turn(sum(map(len, texts)) / seconds, guessed, right, texts)


def _figures(turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """Of each kind: tokens a second and ratios of each turn, guesses, and texts that differ."""
    off = turns["off"]
    return {
        name: {
            "tokens_per_s": [turn.tokens_per_s for turn in of_kind],
            "ratio": [
                turn.tokens_per_s / other.tokens_per_s
                for turn, other in zip(of_kind, off, strict=True)
            ],
            "guessed": sum(turn.guessed for turn in of_kind),
            "right": sum(turn.right for turn in of_kind),
            "made": sum(len(text) for turn in of_kind for text in turn.texts),
            "other_texts": sum(a != b for a, b in zip(of_kind[0].texts, off[0].texts, strict=True)),
        }
        for name, of_kind in turns.items()
    }


def _page(found: dict[str, Any], options: argparse.Namespace, about: dict[str, Any]) -> str:
    rows = []
    for load in found["loads"]:
        for name, kind in load["kinds"].items():
            guessed = kind["guessed"]
            rows.append(
                (
                    load["load"],
                    str(load["texts"]),
                    name,
                    Spread.of(kind["tokens_per_s"]).text(".0f"),
                    Spread.of(kind["ratio"]).text(".2f"),
                    f"{guessed / kind['made']:.2f}",
                    f"{kind['right'] / guessed:.0%}" if guessed else "",
                    str(kind["other_texts"]),
                )
            )
    heads = (
        "text", "texts at a time", "guesses", "tokens/s", "times as fast as without",
        "guessed per token", "of these right", "texts that differ",
    )  # fmt: skip
    text = (
        f"Prompts of {_PROMPT} tokens, {options.tokens} tokens made, at most "
        f"{options.guess_tokens} guessed at a time; network, draft and heads trained for "
        f"{options.steps} steps; {options.turns} turns.\n\n"
    )
    return f"{text}{markdown(heads, rows, heads[:3])}\n{signature(about)}\n"


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=Path, help="folder for what is trained; else none is kept")
    parser.add_argument("--steps", type=int, default=300, help="of each training")
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 4, 16], help="at a time")
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--guess-tokens", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
