"""Answers from documents under an open load whose rate changes: overlapped, and one at a time.

How it works: the standard library of Python is indexed once, with a small decoder of random weights
as the encoder; requests come at random moments (Poisson), first slowly and then faster, and ask for
a few words of some chunk, of popular ones (Zipf) more often. Contestants have the same index,
network, prompts and caps of memory, and take turns, each time in a process of its own:

- paceline: `paceline serve` with `retrieval.index`, asked over HTTP;
- one at a time: the same parts composed serially, without HTTP: encode, search, generate, the next;
- apart: as paceline, but no request shares keys and values with another.

A latency is from the moment at which a request comes to its last token. All texts are greedy and of
a given length. Figures are over the requests of all turns.

    python -m benchmarks.serve.retrieval
    python -m benchmarks.serve.retrieval --rates 1 3 --seconds 20 20 --chunks 4000
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.provenance import ROOT, folder_of, keep, parser_of, signature, taken_with
from benchmarks.serve.workload import NETWORK
from benchmarks.tables import markdown
from paceline.config.job_sections import Data
from paceline.config.model import Model
from paceline.models.decoder import Decoder
from paceline.models.weights import write_weights
from paceline.serve.retrieval.build import Cut, build_index, nearest, recall_of
from paceline.serve.retrieval.encoder import open_encoder
from paceline.serve.retrieval.folder import IndexFolder
from paceline.train.data.files import find_files
from paceline.train.data.tokenizer import make_encoder

CONTESTANTS = ("paceline", "one at a time", "apart")
ENCODER = NETWORK | {"hidden_size": 256, "ffn_size": 704, "num_layers": 4, "num_heads": 4}
"""4.7 M parameters, 2.6 M of them in its layers."""
_SPREAD = 3.0
"""By which matrices are larger than at first, so that tokens don't just follow themselves."""
_POPULAR = 200
"""Chunks that are asked about."""
_TIMES = 1800


@dataclass(frozen=True)
class Task:
    """What a contestant is to do."""

    folder: str
    """With the network, and the index with its encoder."""
    way: str
    k: int
    num_tokens: int
    kv_gb: float
    memory_gb: float
    queries: list[str]
    after_s: list[float]
    """When each comes, after the first."""


def main() -> None:
    """Make the index, let contestants take turns, and write how long requests took."""
    options = _options()
    about = taken_with("benchmarks.serve.retrieval", "faiss-cpu")
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        made = _prepare(folder, options, console)
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in options.contestants}
        tasks = []
        for turn in range(options.turns):
            queries, after_s = _requests(folder / "index", options, turn)
            tasks.append(queries)
            for way in options.contestants:
                console.print(f"turn {turn + 1}: {way}")
                task = Task(
                    str(folder), way, options.k, options.tokens, options.kv_gb, options.memory_gb,
                    queries, after_s,
                )  # fmt: skip
                turns[way].append(_turn(task, folder))
                latencies = turns[way][-1]["latencies"]
                console.print(f"  mean {statistics.mean(latencies):.2f} s")
        recall = _recall(folder, tasks, turns, options.k)
    page = _page(turns, options, about, made, recall)
    console.print(page)
    result = {
        "facts": about,
        "options": {k: v for k, v in vars(options).items() if k != "results"},
        "index": made,
        "recall": recall,
        "turns": turns,
    }
    keep(folder_of(options.results, about), "serve_retrieval", result, page)


def _prepare(folder: Path, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Write the documents, two networks, and the index."""
    texts = [file.path.read_text(errors="replace") for file in find_files(Data())]
    random.Random(0).shuffle(texts)
    encoder = make_encoder(f"bpe:{NETWORK['vocab_size']}", texts[:200])
    for seed, (name, shape) in enumerate({"network": NETWORK, "encoder": ENCODER}.items()):
        model = Model.parse(shape)
        decoder = Decoder(model)
        decoder.init_weights(torch.Generator().manual_seed(seed))
        with torch.no_grad():
            for parameter in decoder.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(_SPREAD)
        write_weights(folder / name, model, decoder.state_dict())
        encoder.tokenizer.save(str(folder / name / "tokenizer.json"))
    left, kept = options.chunks * (options.chunk - options.overlap), []
    for text in texts:
        kept.append(json.dumps({"text": text}))
        left -= len(encoder.tokenizer.encode(text).ids)
        if left < 0:
            break
    (folder / "documents.jsonl").write_text("\n".join(kept))
    console.print("making the index")
    made = build_index(
        folder / "documents.jsonl",
        open_encoder(folder / "encoder"),
        folder / "encoder",
        folder / "index",
        Cut(options.chunk, options.overlap),
    )
    told = ("num_documents", "num_chunks", "num_lists", "probes", "recall")
    lists_bytes = made.files["lists.bin"].bytes
    return {name: getattr(made, name) for name in told} | {"lists_bytes": lists_bytes}


def _requests(index: Path, options: argparse.Namespace, seed: int) -> tuple[list[str], list[float]]:
    """Queries, and when they come."""
    draw, folder = random.Random(seed), IndexFolder(index)
    popular = random.Random(0).sample(range(len(folder)), min(_POPULAR, len(folder)))
    weights = [1 / (rank + 1) for rank in range(len(popular))]
    queries, after_s, begun_s = [], [], 0.0
    for rate, seconds in zip(options.rates, options.seconds, strict=True):
        at = begun_s + draw.expovariate(rate)
        while at < begun_s + seconds:
            words = folder.text(draw.choices(popular, weights)[0]).split()
            first = draw.randrange(max(1, len(words) - 8))
            queries.append(" ".join(words[first : first + 12]) or "import")
            after_s.append(at)
            at += draw.expovariate(rate)
        begun_s += seconds
    return queries, after_s


def _turn(task: Task, folder: Path) -> dict[str, Any]:
    file, answer = folder / "task.json", folder / "answer.json"
    file.write_text(json.dumps(asdict(task)))
    paths = f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serve.retrieval_ways", str(file), str(answer)],
        env={**os.environ, "PYTHONPATH": paths}, timeout=_TIMES, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{task.way} failed:\n{done.stderr[-3000:]}")
    return json.loads(answer.read_text())


def _recall(
    folder: Path, tasks: list[list[str]], turns: dict[str, list[dict[str, Any]]], k: int
) -> dict[str, float]:
    """What each contestant found of the nearest chunks of its queries, beside looking at all."""
    index, encoder = IndexFolder(folder / "index"), open_encoder(folder / "encoder")
    vectors = np.empty((len(index), encoder.width), np.float32)
    with index.lists_file.open("rb") as file:
        for size in index.sizes.tolist():
            rows = np.fromfile(file, "<f4", size * encoder.width).reshape(size, -1)
            vectors[np.fromfile(file, "<i8", size)] = rows
    wanted = [nearest(encoder.vectors(queries), vectors, k) for queries in tasks]
    return {
        way: statistics.mean(
            recall_of(each, turn["chunks"]) for each, turn in zip(wanted, of_way, strict=True)
        )
        for way, of_way in turns.items()
    }


def _page(
    turns: dict[str, Any],
    options: argparse.Namespace,
    about: dict[str, Any],
    made: dict[str, Any],
    recall: dict[str, float],
) -> str:
    rows = []
    first = turns[options.contestants[0]]
    for way, of_way in turns.items():
        mean, last = _figures(of_way)
        same = [
            ours == theirs
            for turn, other in zip(of_way, first, strict=True)
            for ours, theirs in zip(turn["texts"], other["texts"], strict=True)
        ]
        cached = sum(turn["cached"] for turn in of_way) / sum(turn["prompts"] for turn in of_way)
        rows.append(
            (
                way,
                f"{mean:.2f}",
                f"{last:.2f}",
                f"{recall[way]:.3f}",
                f"{sum(same)} of {len(same)}",
                f"{100 * cached:.0f} %",
                f"{max(turn['resident_bytes'] for turn in of_way) / 1e6:.0f}",
            )
        )
    heads = (
        "way", "latency, mean, s", "99 %", "recall", "texts as the first's",
        "prompt tokens there already", "most resident, MB",
    )  # fmt: skip
    load = ", then ".join(
        f"{rate:g} requests/s for {seconds:g} s"
        for rate, seconds in zip(options.rates, options.seconds, strict=True)
    )
    megabytes = made["lists_bytes"] / 1e6
    text = (
        f"{load}, {options.turns} turns. {made['num_chunks']:,} chunks of {options.chunk} tokens "
        f"in {made['num_lists']} lists ({megabytes:.0f} MB), {made['probes']} of them searched; "
        f"{options.k} chunks in a prompt, texts of {options.tokens} tokens. Caps: "
        f"{options.kv_gb:g} GB for keys and values, {options.memory_gb:g} GB for copies of "
        "lists.\n\n"
    )
    text += markdown(heads, rows, ["way"])
    if {"paceline", "one at a time"} <= turns.keys():
        (mean, last), (serial_mean, serial_last) = (
            _figures(turns[way]) for way in ("paceline", "one at a time")
        )
        text += (
            f"\nOne at a time takes {serial_mean / mean:.1f} x as long on average, "
            f"{serial_last / last:.1f} x at 99 %.\n"
        )
    return f"{text}\n{signature(about)}\n"


def _figures(turns: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean latency, and that of 99 %, seconds."""
    latencies = sorted(seconds for turn in turns for seconds in turn["latencies"])
    return statistics.mean(latencies), latencies[int(0.99 * (len(latencies) - 1))]


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--seconds", type=float, nargs="+", default=[20.0, 20.0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=8000, help="about so many are indexed")
    parser.add_argument("--chunk", type=int, default=96, help="tokens of a chunk")
    parser.add_argument("--overlap", type=int, default=16)
    parser.add_argument("--k", type=int, default=4, help="chunks in a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of a text")
    parser.add_argument("--kv-gb", type=float, default=0.25)
    parser.add_argument("--memory-gb", type=float, default=0.004)
    return parser.parse_args()


if __name__ == "__main__":
    main()
