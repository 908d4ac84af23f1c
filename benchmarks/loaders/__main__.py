"""Samples a CPU-second of loaders of tokenised data, and their first batch, also from a store.

How it works: one corpus of random text is tokenised by Paceline; the others get the same rows of
tokens, which each writes in its own form first. Loaders take turns, each time in a process of its
own without workers, and give shuffled batches of the same size: first from this machine's disk,
then from an object store (moto on loopback) into an empty cache. A ratio is that of one turn. A
first batch is timed from when everything is imported, the store's client too.

    python -m benchmarks.loaders --python lit=PATH mosaic=PATH stateful=PATH

The others' packages (litdata, mosaicml-streaming, torchdata, boto3) are best in an environment of
their own, whose python --python names.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.loaders.ours import TEXTS, TOKENS, data_of
from benchmarks.loaders.task import BUCKET, Asked
from benchmarks.provenance import ROOT, folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import Spread, markdown
from paceline.train.data import prepare_corpus
from paceline.train.data.publish import publish

LOADERS = {
    "paceline": "benchmarks.loaders.ours",
    "lit": "benchmarks.loaders.lit",
    "mosaic": "benchmarks.loaders.mosaic",
    "stateful": "benchmarks.loaders.stateful",
}
_OURS = "paceline"
_DOCUMENT_CHARS = 4000
_LONGEST_S, _STORE_S = 600, 60.0


def main() -> None:
    """Let loaders take turns, and write what they took."""
    options = _options()
    about, console = taken_with("benchmarks.loaders"), Console(highlight=False, soft_wrap=True)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in options.loaders}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        corpus = _write_corpus(folder, options)
        for name in options.loaders:
            if name != _OURS:
                (folder / name).mkdir()
                _run(name, folder, options, _asked(folder, options, 0, in_store=False), None)
        with _store(folder, options.loaders) as environment:
            for turn in range(options.turns):
                for name in options.loaders:
                    console.print(f"turn {turn + 1}: {name}")
                    turns[name].append(_turn(name, folder, options, turn, environment, corpus))
    page = _page(turns, options, about)
    console.print(page)
    result = {"facts": about, "options": vars(options) | {"results": None, "python": None}}
    keep(folder_of(options.results, about), "loaders", result | {"turns": turns}, page)


def _write_corpus(folder: Path, options: argparse.Namespace) -> set[bytes]:
    """The text, its tokens published, and their rows, which are returned too."""
    draw, size = np.random.default_rng(options.seed), options.seq_len + 1
    (folder / _OURS).mkdir()
    with (folder / _OURS / TEXTS).open("w") as file:
        for _ in range(options.samples * options.seq_len // _DOCUMENT_CHARS + 1):
            text = draw.integers(ord(" "), ord("~") + 1, _DOCUMENT_CHARS, np.uint8)
            file.write(json.dumps({"text": text.tobytes().decode()}) + "\n")
    task = _asked(folder, options, 0, in_store=False)
    corpus = prepare_corpus(data_of(task, str(folder / "cache")))
    publish(corpus, str(folder / _OURS / TOKENS), lambda _done, _total: None)
    rows = corpus.for_samples(options.seq_len).train_split(1)
    numbers = np.arange(rows.num_samples(options.seq_len))
    np.save(folder / "rows.npy", rows.gather(numbers, options.seq_len).astype(np.int32))
    assert task.rows().shape[1] == size
    return {row.tobytes() for row in task.rows()}


def _asked(folder: Path, options: argparse.Namespace, seed: int, *, in_store: bool) -> Asked:
    cache = tempfile.mkdtemp(dir=folder)
    sizes = options.batch, options.seq_len, options.batches
    return Asked(str(folder), cache, *sizes, seed, in_store)


def _turn(
    name: str,
    folder: Path,
    options: argparse.Namespace,
    turn: int,
    environment: dict[str, str],
    corpus: set[bytes],
) -> dict[str, Any]:
    """A loader's answers from disk and from the store."""
    found = {}
    for place in ("disk", "store"):
        task = _asked(folder, options, turn, in_store=place == "store")
        answer = _run(name, folder, options, task, environment)
        rows = np.array(answer.pop("first_rows"), np.int32)
        if len(rows) != options.batch or not all(row.tobytes() in corpus for row in rows):
            sys.exit(f"{name} gave samples that are not of the corpus.")
        found[place] = answer
    return found


def _run(
    name: str,
    folder: Path,
    options: argparse.Namespace,
    task: Asked,
    environment: dict[str, str] | None,
) -> dict[str, Any]:
    """Have a loader's process write its form, where there is no environment of a store yet, or
    answer."""
    python = dict(each.split("=", 1) for each in options.python).get(name, sys.executable)
    asked, answer = folder / "task.json", folder / "answer.json"
    answer.unlink(missing_ok=True)
    task.write(asked)
    arguments = [asked] if environment is None else [asked, answer]
    done = subprocess.run(
        [python, "-m", LOADERS[name], *map(str, arguments)],
        env={**os.environ, **(environment or {}), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        cwd=folder, timeout=_LONGEST_S, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{name} failed ({done.returncode}):\n{done.stderr[-3000:]}")
    return json.loads(answer.read_text()) if environment is not None else {}


@contextmanager
def _store(folder: Path, loaders: list[str]) -> Iterator[dict[str, str]]:
    """An object store with every loader's form; yields the environment to reach it."""
    import boto3

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    at = f"http://127.0.0.1:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "none"}
    places = {"AWS_ENDPOINT_URL": at, "S3_ENDPOINT_URL": at, "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        _await_port(port)
        client = boto3.client(
            "s3",
            endpoint_url=at,
            region_name=places["AWS_DEFAULT_REGION"],
            aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
        )
        client.create_bucket(Bucket=BUCKET)
        for name in loaders:
            for file in (folder / name).rglob("*"):
                if file.is_file():
                    client.upload_file(str(file), BUCKET, str(file.relative_to(folder)))
        yield keys | places
    finally:
        server.terminate()
        server.wait()


def _await_port(port: int) -> None:
    deadline = time.monotonic() + _STORE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _rate(turn: dict[str, Any]) -> float:
    return turn["disk"]["samples"] / turn["disk"]["cpu_s"]


def _page(turns: dict[str, Any], options: argparse.Namespace, about: dict[str, Any]) -> str:
    first, rows = next(iter(turns)), []
    for name, of_name in turns.items():
        pairs = zip(turns[first], of_name, strict=True)
        ratios = [_rate(mine) / _rate(theirs) for mine, theirs in pairs]
        waits = [[turn[place]["first_s"] * 1e3 for turn in of_name] for place in ("disk", "store")]
        rows.append(
            (
                f"{name} {of_name[0]['disk']['version']}",
                Spread.of([_rate(turn) for turn in of_name]).text(",.0f"),
                "" if name == first else Spread.of(ratios).text(".1f"),
                *(Spread.of(each).text(".0f") for each in waits),
            )
        )
    heads = (
        "loader",
        "samples per CPU-second (least – most)",
        f"{first} gives so many times as many",
        "first batch, ms",
        "first batch from the store, ms",
    )
    text = (
        f"Batches of {options.batch} samples of {options.seq_len + 1} tokens from a corpus of "
        f"{options.samples:,}, shuffled, {options.batches} a turn, {options.turns} turns.\n\n"
    )
    text += markdown(heads, rows, ["loader"])
    resumes = [turn["disk"]["resumes"] for turn in turns.get(_OURS, [])]
    if resumes:
        text += "\nPaceline resumes at any of a billion samples within "
        text += ", ".join(
            f"{median(every) * 1e3:.1f} ms (at most {max(every) * 1e3:.1f}; a {kind})"
            for kind in resumes[0]
            for every in [[seconds for turn in resumes for seconds in turn[kind]]]
        )
        text += ": from the Job to the first step.\n"
    return f"{text}\n{signature(about)}\n"


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, default=list(LOADERS))
    parser.add_argument("--samples", type=int, default=20_000, help="of the corpus")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--batches", type=int, default=1000, help="a turn, after the first")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--python", nargs="+", default=[], metavar="NAME=PATH", help="of a loader's environment"
    )
    options = parser.parse_args()
    if (options.batches + 1) * options.batch > options.samples * 0.9:  # some are held out
        parser.error("--samples has to be more than --batches x --batch: a loader reads once.")
    return options


if __name__ == "__main__":
    main()
