"""What Paceline's own work costs: `paceline train` against three peers that train the same thing.

How it works: the demo Job's decoder, batches, optimizer and schedule, in fp32, on the gloo ranks of
this machine. Short blocks alternate (Paceline, plain DDP, Fabric, Accelerate, and again, each round
beginning with another one), so that whatever else the machine does hits all of them alike. A block
is one process group from its start to its end, as a person would start it, on a terminal. Its
throughput is wall-clock from the end of step 4 to the end of the last step: for Paceline that
includes metrics.jsonl, TensorBoard, the progress line and one checkpoint; the peers write nothing.
Ratios are taken within a round, then the median over rounds.

The losses of the first steps must agree: a faster loop that computes something else is no faster.

It is no measure of scaling or of kernels; all four run the same ones.

    python -m benchmarks.overhead [--rounds 5] [--steps 16]      (or: make bench)
    python -m benchmarks.overhead --cuda        on the CUDA devices, against the hand-written loop
"""

import argparse
import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# All run on the CPU ranks, here and in every process that is started from here, or with --cuda on
# every device that there is: CUDA leaves out the numbers from the first that doesn't exist on.
os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3,4,5,6,7" if "--cuda" in sys.argv else ""

import numpy as np
import torch
from rich.console import Console

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import Spread, markdown, terminal_table
from paceline.config.job import Job, read_job, to_raw, to_toml
from paceline.machine.discovery import num_cores
from paceline.observe.run import Run
from paceline.train.data import BatchShape, prepare, train_batches
from paceline.train.this_machine import resolve_on_this_machine

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
PEERS = {"plain DDP": "plain_ddp", "Fabric": "fabric_loop", "Accelerate": "accelerate_loop"}
OURS = "Paceline"
ON_CUDA = "--cuda" in sys.argv
# Fabric's and Accelerate's loops are written for CPU ranks.
CONTENDERS = (OURS, "plain DDP") if ON_CUDA else (OURS, *PEERS)
FIRST_TIMED_STEP = 4
"""Steps up to this one warm up: allocators, DDP's first bucket order, the progress line."""
COMPARED_STEPS = 5
LOSS_TOLERANCE = 1e-4
_BLOCK_LIMIT_S = 600
_PATIENCE_S = 20


@dataclass(frozen=True)
class Block:
    """One start of one contender."""

    contender: str
    round: int
    tokens_per_s: float
    """From the end of step FIRST_TIMED_STEP to the end of the last step."""
    first_step_s: float
    """From the start of the process to the end of step 1."""
    ends_s: list[float]
    """When each step ended, after the start of the process."""
    losses: list[float]


def workload_job(steps: int) -> Job:
    """The demo Job in fp32, concrete on this machine, one checkpoint inside the timed steps."""
    settings = {
        "name": "overhead",
        "layout.precision": "fp32",
        "train.steps": steps,
        "train.eval_every": 0,
        "train.eval_batches": 1,  # an evaluation is due after the last step, which is not timed
        "optim.warmup_steps": min(20, steps),
        "checkpoint.every": (FIRST_TIMED_STEP + steps) // 2,
        "observe.profile_every": 0,
    }
    return resolve_on_this_machine(
        read_job(None, [f"{key}={value}" for key, value in settings.items()])
    ).job


def write_workload(job: Job, folder: Path) -> None:
    """Write what all contenders read: the Job, and its samples in the order of training."""
    train = job.train
    (folder / "job.toml").write_text(to_toml(job))
    shape = BatchShape(train.global_batch, train.global_batch, train.seq_len)
    batches = train_batches(prepare(job.data).dataset("train"), shape, train.seed, 0)
    rows = np.empty((train.steps, train.global_batch, train.seq_len + 1), np.int32)
    for row, (batch,) in zip(rows, batches, strict=False):
        row[:, :-1], row[:, -1] = batch.tokens, batch.targets[:, -1]
    np.save(folder / "samples.npy", rows.reshape(-1, train.seq_len + 1))


def run_block(contender: str, number: int, job: Job, folder: Path) -> Block:
    """Start a contender, wait for its end and read what it measured.

    Args:
        contender: one of CONTENDERS.
        number: of the round.
        folder: where `write_workload` wrote the Job and the samples.
    """
    name = f"{number}-{contender.replace(' ', '-')}"
    began = time.time()
    if contender == OURS:
        settings = ["--runs", folder, "--set", f"name={name}"]
        run_on_terminal([BIN / "paceline", "train", folder / "job.toml", *settings])
        lines = Run(folder / name).metrics()
        ends, losses = [line["time"] for line in lines], [line["loss"] for line in lines]
    else:
        script, result = HERE / "peers" / f"{PEERS[contender]}.py", folder / f"{name}.json"
        launcher = _launcher(contender, job.layout.num_ranks)
        run_on_terminal([*launcher, script, folder, result], _peer_settings(job))
        clock = json.loads(result.read_text())
        ends, losses = clock["ends_s"], clock["losses"]
    assert len(ends) == job.train.steps, f"{contender} did {len(ends)} steps instead of all"
    tokens = (len(ends) - FIRST_TIMED_STEP) * job.train.global_batch * job.train.seq_len
    rate = tokens / (ends[-1] - ends[FIRST_TIMED_STEP - 1])
    after_s = [round(end - began, 4) for end in ends]
    return Block(contender, number, rate, after_s[0], after_s, losses)


def _launcher(contender: str, num_ranks: int) -> list[Any]:
    """The launcher that the peer's documentation names for several processes on CPUs."""
    if contender == "Fabric":
        settings = ["--accelerator", "cpu", "--strategy", "ddp", "--devices", num_ranks]
        return [BIN / "fabric", "run", *settings]
    return [BIN / "torchrun", "--standalone", "--nproc-per-node", num_ranks]


def _peer_settings(job: Job) -> dict[str, str]:
    """What Paceline's launcher sees to by itself: threads of a rank, and ranks on one host."""
    threads = max(1, num_cores() // job.layout.num_ranks)
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {"OMP_NUM_THREADS": str(threads), **loopback}


def run_on_terminal(command: Sequence[Any], settings: Mapping[str, str] | None = None) -> None:
    """Run a program on a terminal of its own, so that what it shows there counts as well.

    Args:
        command: program and arguments.
        settings: environment variables besides this process's own.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", **(settings or {})},
        start_new_session=True,  # Ctrl-C is this program's to handle
    )
    os.close(theirs)
    shown: list[bytes] = []
    reader = threading.Thread(target=_drain, args=(ours, shown), daemon=True)
    reader.start()
    try:
        code = process.wait(_BLOCK_LIMIT_S)
    finally:
        _end(process)
        reader.join(_PATIENCE_S)
    if code != 0:
        text = b"".join(shown).decode(errors="replace")
        raise BlockError(f"{Path(command[0]).name} ended with code {code}:\n{text[-4000:]}")


class BlockError(Exception):
    """A contender ended badly: the text is the end of what it showed."""


def _drain(terminal: int, shown: list[bytes]) -> None:
    """Read what is shown on a terminal until nobody holds its other end."""
    try:
        while part := os.read(terminal, 65536):
            shown.append(part)
    except OSError:  # how Linux says it
        pass
    finally:
        os.close(terminal)


def _end(process: subprocess.Popen) -> None:
    """End a launcher that still runs; on SIGTERM each of them ends its ranks."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def help_time_s() -> float:
    """Seconds that `paceline --help` takes."""
    began = time.perf_counter()
    subprocess.run([BIN / "paceline", "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def largest_disagreement(blocks: Sequence[Block]) -> float:
    """Largest difference of a block's first losses to those of the first block."""
    reference = blocks[0].losses[:COMPARED_STEPS]
    return max(
        abs(loss - wanted)
        for block in blocks
        for loss, wanted in zip(block.losses, reference, strict=False)
    )


def figures(blocks: Sequence[Block]) -> dict[str, dict[str, Spread]]:
    """Per contender: tokens/s, time to the first step, and Paceline's tokens/s over its own."""
    of = {(block.contender, block.round): block for block in blocks}
    rounds = sorted({block.round for block in blocks})
    table = {}
    for contender in CONTENDERS:
        mine = [of[contender, number] for number in rounds]
        ours = [of[OURS, number] for number in rounds]
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, mine, strict=True)]
        table[contender] = {
            "tokens_per_s": Spread.of([block.tokens_per_s for block in mine]),
            "first_step_s": Spread.of([block.first_step_s for block in mine]),
            "ours_over_this": Spread.of(ratios),
        }
    return table


def rows(table: dict[str, dict[str, Spread]]) -> list[tuple[str, str, str, str]]:
    """The figures as text."""
    return [
        (
            contender,
            of["tokens_per_s"].text(",.0f"),
            "" if contender == OURS else of["ours_over_this"].text(".3f"),
            of["first_step_s"].text(".1f"),
        )
        for contender, of in table.items()
    ]


_TITLES = ("", "tokens/s", "Paceline / this, within a round", "time to first step, s")


def measure(job: Job, num_rounds: int, folder: Path, say: Callable[[str], None]) -> list[Block]:
    """Run all rounds; each begins with the next contender, so that none is always the first."""
    blocks = []
    for number in range(num_rounds):
        turn = number % len(CONTENDERS)
        for contender in CONTENDERS[turn:] + CONTENDERS[:turn]:
            block = run_block(contender, number, job, folder)
            blocks.append(block)
            say(
                f"round {number + 1}/{num_rounds}  {contender:<10}  {block.tokens_per_s:8,.0f} "
                f"tokens/s  first step after {block.first_step_s:.1f} s"
            )
    return blocks


def write_results(folder: Path, result: dict[str, Any], lines: Sequence[tuple[str, ...]]) -> Path:
    """Write overhead.json with every block, and overhead.md with the table; _cuda on CUDA."""
    about = result["facts"]
    page = (
        f"{markdown(_TITLES, lines, [''])}\nMedian (least – most) of {result['num_rounds']} rounds "
        f"on {about['num_ranks']} ranks; `paceline --help` takes "
        f"{result['help_s']['median']:.2f} s; {signature(about)}\n"
    )
    return keep(folder, "overhead_cuda" if ON_CUDA else "overhead", result, page)


def main() -> None:
    """Run the benchmark, show the table and write the results."""
    options = _options()
    console = Console(highlight=False)
    if ON_CUDA and not torch.cuda.is_available():
        sys.exit("--cuda needs a CUDA device and torch sees none here.")
    packages = () if ON_CUDA else ("lightning_fabric", "accelerate")
    missing = [name for name in packages if not find_spec(name)]
    if missing:
        sys.exit(f"{' and '.join(missing)} can't be imported: pip install -e '.[bench]'.")
    job = workload_job(options.steps)
    about = {
        **taken_with("benchmarks.overhead", *(name.replace("_", "-") for name in packages)),
        "num_ranks": job.layout.num_ranks,
        "timed_steps": [FIRST_TIMED_STEP + 1, job.train.steps],
        "checkpoint_every": job.checkpoint.every,
        "job": to_raw(job),
    }
    with tempfile.TemporaryDirectory() as place:
        write_workload(job, Path(place))
        help_s = Spread.of([help_time_s() for _ in range(5)])
        try:
            blocks = measure(job, options.rounds, Path(place), console.print)
        except BlockError as failure:
            sys.exit(str(failure))
    lines = rows(figures(blocks))
    console.print(
        terminal_table("Overhead: median (least – most) over the rounds", _TITLES, lines, [""])
    )
    console.print(f"paceline --help: {help_s.text('.2f')} s")
    apart = largest_disagreement(blocks)
    if not apart <= LOSS_TOLERANCE:
        sys.exit(f"the first losses differ by {apart:.2g}: the contenders don't train the same.")
    console.print(f"losses of the first {COMPARED_STEPS} steps agree to {apart:.1g}")
    result = {
        "facts": about,
        "num_rounds": options.rounds,
        "help_s": asdict(help_s),
        "largest_loss_difference": apart,
        "figures": {
            name: {key: asdict(spread) for key, spread in of.items()}
            for name, of in figures(blocks).items()
        },
        "blocks": [asdict(block) for block in blocks],
    }
    console.print(f"results: {write_results(folder_of(options.results, about), result, lines)}")


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each contender")
    parser.add_argument("--steps", type=int, default=16, help="steps of a block")
    parser.add_argument("--cuda", action="store_true", help="on the CUDA devices of this machine")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps <= FIRST_TIMED_STEP:
        parser.error(f"--rounds must be at least 1 and --steps more than {FIRST_TIMED_STEP}")
    return options


if __name__ == "__main__":
    main()
