"""The first contact with a GPU, in one command: is it right, then how fast is it.

How it works: parts in the order of their importance, each a command of its own in less than nine
minutes, so that a machine lent for a short while gives something. A part that fails doesn't keep
the next ones from running. What is done is kept in gpu.json, and typed again the command goes on
with what is missing: another commit or --again starts over.

    python -m benchmarks.gpu [--only tests bench] [--again]          (or: make gpu)

Without a device each part says what it could not do, and what can be rehearsed is
(tests/rehearsal). Results: benchmarks/results/<device>/gpu.json and gpu.md; the parts' own pages
stand beside them.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.provenance import ROOT, folder_of, parser_of, signature, taken_with
from paceline.observe.run import write_atomic

MOST_S = 530.0
"""Of a part: some machines end what takes ten minutes."""
_TAIL = 4000
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "500")
_TIMED_OUT = 124


@dataclass(frozen=True)
class Part:
    """One command of the contact."""

    name: str
    why: str
    command: tuple[str, ...]
    """Arguments of this Python; "{results}" is the device's folder."""
    num_devices: int = 1
    """It needs that many; 0: it needs none."""


PARTS = (
    Part(
        "rehearsal",
        "whole steps on a stand-in device: dtypes, devices, streams, fake collectives",
        (*_PYTEST, "tests/test_rehearsal.py"),
        num_devices=0,
    ),
    Part(
        "tests",
        "training, profiles, compressed gradients and NCCL of one rank",
        (*_PYTEST, "-m", "gpu", "tests", "-n", "4"),
    ),
    Part(
        "kernels right",
        "every kernel against fp64, CUDA graphs, 16 and 8 bits",
        (*_PYTEST, "tests/kernels", "-n", "4"),
    ),
    Part(
        "layouts",
        "every way to split a model over NCCL ranks against one rank",
        (*_PYTEST, "-m", "gpu", "tests/parallel/test_layouts_cuda.py"),
        num_devices=2,
    ),
    Part(
        "bench",
        "the Cluster file of this machine, for the planner",
        ("-m", "paceline", "bench", "--quick", "--out", "{results}/cluster.toml"),
    ),
    Part(
        "demo",
        "the demo, as everybody runs it first",
        ("-m", "paceline", "train", "--fresh", "--runs", "{scratch}"),
    ),
    Part(
        "step 1b",
        "tokens/s and MFU of a decoder of 1B, the plan's prediction beside it",
        ("-m", "benchmarks.step", "--models", "1b"),
    ),
    Part("step 3b", "the same of 3B", ("-m", "benchmarks.step", "--models", "3b")),
    Part(
        "kernels fast",
        "kernels against torch, torch.compile and Liger",
        ("-m", "benchmarks.kernels.run"),
    ),
    Part(
        "overhead",
        "Paceline's own work against a hand-written loop",
        ("-m", "benchmarks.overhead", "--cuda", "--rounds", "3"),
    ),
)


@dataclass(frozen=True)
class Done:
    """How a part ended."""

    status: str
    """"passed", "failed", "timed out" or "not done"."""
    seconds: float
    tail: str
    """The end of what it printed, or why it was not done."""


def main() -> int:
    """Run what is missing, say how each part ended, and keep it."""
    options = _options()
    console = Console(highlight=False, soft_wrap=True)
    facts = taken_with("benchmarks.gpu")
    facts["devices"] = num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    folder = folder_of(options.results, facts)
    kept = {} if options.again else done_before(folder / "gpu.json", facts["commit"])
    for part in PARTS:
        if options.only and part.name not in options.only:
            continue
        if part.name in kept and kept[part.name].status == "passed":
            console.print(f"{part.name:<14} passed before")
            continue
        console.print(f"{part.name:<14} {part.why} ...")
        kept[part.name] = run(part, folder, num_devices)
        done = kept[part.name]
        console.print(f"{'':<14} {done.status} after {done.seconds:.0f} s", style=_style(done))
        if done.status != "passed":
            console.print(done.tail, style="dim", markup=False)
        write(folder, facts, kept)
    console.print(f"results: {folder / 'gpu.md'}")
    return int(any(done.status in ("failed", "timed out") for done in kept.values()))


def run(part: Part, folder: Path, num_devices: int) -> Done:
    """Run a part to its end or its limit.

    Args:
        folder: the device's results.
        num_devices: CUDA devices here.
    """
    if num_devices < part.num_devices:
        has = "none is here" if num_devices == 0 else f"{num_devices} is here"
        return Done("not done", 0.0, f"needs {part.num_devices} CUDA device(s), and {has}.")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [each.format(results=folder, scratch=scratch) for each in part.command]
        code, text = _run([sys.executable, *arguments])
    status = "timed out" if code == _TIMED_OUT else "passed" if code == 0 else "failed"
    return Done(status, round(time.monotonic() - began, 1), text[-_TAIL:])


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Exit code and all output; a command that takes too long is killed with all it started."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=MOST_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        return _TIMED_OUT, text
    return process.returncode, text


def done_before(file: Path, commit: str | None) -> dict[str, Done]:
    """What earlier calls at this commit did; nothing where the file is another commit's."""
    try:
        kept = json.loads(file.read_text())
        if kept["facts"]["commit"] == commit:
            return {name: Done(**done) for name, done in kept["parts"].items()}
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return {}


def write(folder: Path, facts: dict[str, Any], parts: dict[str, Done]) -> None:
    """Keep what is done so far, as data and as a page."""
    data = {"facts": facts, "parts": {name: asdict(done) for name, done in parts.items()}}
    write_atomic(folder / "gpu.json", json.dumps(data, indent=1) + "\n")
    lines = ["# First contact with this device", "", "| part | what | ended | seconds |"]
    lines.append("| --- | --- | --- | ---: |")
    for part in PARTS:
        done = parts.get(part.name, Done("not yet", 0.0, ""))
        lines.append(f"| {part.name} | {part.why} | {done.status} | {done.seconds:.0f} |")
    for name, done in parts.items():
        if done.status != "passed":
            lines += ["", f"## {name}: {done.status}", "", "```text", done.tail.strip(), "```"]
    write_atomic(folder / "gpu.md", "\n".join([*lines, "", signature(facts)]) + "\n")


def _style(done: Done) -> str:
    return {"passed": "green", "not done": "yellow"}.get(done.status, "red")


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="also what has passed before")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
