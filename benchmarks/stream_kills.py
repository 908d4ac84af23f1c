"""Kill -9 of trainer and ingester at random moments, while ranks move among 1 and 2.

`python -m benchmarks.stream_kills --kills 200` trains a small Job on a stream twice: undisturbed,
and killed again and again while lines still arrive. Each rank notes the tokens of every sample that
it reads. All that were read, whenever and how often, have to be those of the undisturbed run.

`python -m benchmarks.stream_kills train ARGUMENTS` is `paceline train ARGUMENTS` with ranks that
note.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import torch

from paceline.comm.rendezvous import Ranks
from paceline.config.job import Job
from paceline.observe.run import Run
from paceline.train import command, session
from paceline.train.data.order import rank_share
from paceline.train.session import MakeTask
from paceline.train.task import Step, Task

BATCH, SEQ_LEN = 4, 32
JOB = """
name = "killed"
[model]
family = "decoder"
vocab_size = 257
hidden_size = 16
ffn_size = 32
num_layers = 1
num_heads = 2
max_seq_len = 64
[data]
tokenizer = "bytes"
[data.stream]
folder = "incoming"
segment_mb = 0.002
shuffle = 6
[train]
steps = {steps}
global_batch = {batch}
seq_len = {seq_len}
[checkpoint]
every = 3
[observe]
tensorboard = false
"""
_NOTES = "read.jsonl"


class Process(Protocol):
    """Of a trainer."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""


Start = Callable[[Sequence[str], Path], Process]
"""Starts python with arguments in a folder, in a session of its own."""


# ---- ranks that note -----------------------------------------------------------------------------


def noting_rank(run: Run, make_task: MakeTask, *placed: Any) -> object:
    """What a rank does, with notes of all that it reads."""
    return session.run_rank(run, partial(_noting_task, run, make_task), *placed)


def _noting_task(run: Run, make_task: MakeTask, job: Job, ranks: Ranks) -> Task:
    task = make_task(job, ranks)
    return replace(task, steps_from=partial(_noted, run, task, job, ranks))


def _noted(run: Run, task: Task, job: Job, ranks: Ranks, first: int) -> Iterator[Step]:
    size = job.train.global_batch
    for step in task.steps_from(first):
        place = job.layout.data_rank(ranks.rank), job.layout.num_data_ranks
        numbers = rank_share(np.arange(first, first + size), *place, micro_batch=job.micro_batch)
        rows = torch.cat([micro_batch.tokens for micro_batch in step]).tolist()
        with (run.path / _NOTES).open("a") as notes:
            for number, row in zip(numbers.tolist(), rows, strict=True):
                notes.write(json.dumps([number, row]) + "\n")
        yield step
        first += size


def read_by(folder: Path) -> dict[int, list[int]]:
    """Number of a sample -> its tokens, as ranks noted them.

    Raises:
        ValueError: it was not the same each time.
    """
    found: dict[int, list[int]] = {}
    for line in (folder / "runs" / "killed" / _NOTES).read_text().splitlines():
        with suppress(json.JSONDecodeError):  # killed while it noted
            number, row = json.loads(line)
            if found.setdefault(number, row) != row:
                raise ValueError(f"sample {number} was {found[number]} and then {row}")
    return found


# ---- the two runs --------------------------------------------------------------------------------


def lines_for(steps: int) -> list[str]:
    """More than so many steps need."""
    count = steps * BATCH * SEQ_LEN // 16 + 40
    return [json.dumps({"text": f"record {number:06d} of all"}) + "\n" for number in range(count)]


def undisturbed(folder: Path, steps: int, start: Start) -> dict[int, list[int]]:
    """What a run reads that nobody disturbs."""
    _make(folder, steps)
    lines = lines_for(steps)
    _feed(folder, lines, range(len(lines)), 0.0)
    process = start(_trains(1), folder)
    _await_end(process)
    return read_by(folder)


def disturbed(
    folder: Path, steps: int, kills: int, pick: random.Random, start: Start, most_s: float
) -> tuple[dict[int, list[int]], Counter[str]]:
    """What a run reads that is killed again and again, and how often who was.

    Args:
        most_s: after a start, the latest moment of a kill.
    """
    _make(folder, steps)
    # Lines arrive while it is killed; some are kept back, so that there is always one to kill.
    lines = lines_for(steps)
    early = len(lines) // 2
    feeding = (folder, lines, range(early), kills * most_s / 2 / early)
    feeder = threading.Thread(target=_feed, args=feeding, daemon=True)
    feeder.start()
    killed: Counter[str] = Counter()
    process, who = None, pick.choice(("trainer", "ingester"))
    while killed.total() < kills:
        if process is None or process.poll() is not None:
            process = start(_trains(pick.choice((1, 2))), folder)
        time.sleep(pick.uniform(0, most_s))
        if _kill(process, who):
            killed[who] += 1
            who = pick.choice(("trainer", "ingester"))
    feeder.join()
    _feed(folder, lines, range(early, len(lines)), 0.0)
    if process is None or process.poll() is not None:
        process = start(_trains(2), folder)
    _await_end(process)
    return read_by(folder), killed


def _make(folder: Path, steps: int) -> None:
    (folder / "incoming").mkdir(parents=True)
    (folder / "job.toml").write_text(JOB.format(steps=steps, batch=BATCH, seq_len=SEQ_LEN))


def _feed(folder: Path, lines: Sequence[str], which: range, pause_s: float) -> None:
    for number in which:
        with (folder / "incoming" / f"{number // 50:06d}.jsonl").open("a") as file:
            file.write(lines[number])
        if pause_s:
            time.sleep(pause_s)


def _trains(num_ranks: int) -> list[str]:
    wanted = f"cluster.devices_per_node={num_ranks}"
    return ["-m", "benchmarks.stream_kills", "train", "job.toml", "--set", wanted]


def _kill(process: Process, who: str) -> bool:
    """End the trainer's own process, or its ingester; False: there is none now."""
    with suppress(psutil.NoSuchProcess):
        trainer = psutil.Process(process.pid)
        children = trainer.children(recursive=True)
        if who == "trainer" and process.poll() is None:
            trainer.kill()
            # Its ranks and its ingester end by themselves.
            while process.poll() is None or psutil.wait_procs(children, timeout=20)[1]:
                time.sleep(0.01)
            return True
        for child in children:
            if "stream" in child.cmdline():
                child.kill()
                return True
    return False


def _await_end(process: Process) -> None:
    while (code := process.poll()) is None:
        time.sleep(0.05)
    if code:
        raise RuntimeError(f"the run ended with {code}")


def differences(expected: dict[int, list[int]], found: dict[int, list[int]]) -> list[int]:
    """Samples that one run read and the other didn't, or that differ."""
    return [
        number
        for number in sorted(expected.keys() | found.keys())
        if expected.get(number) != found.get(number)
    ]


def _start(arguments: Sequence[str], folder: Path) -> Process:
    log = (folder / "printed").open("ab")
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)


def main() -> None:
    """Kill, compare, and say so; exit code 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-s", type=float, default=12.0, help="latest kill after a start")
    asked = parser.parse_args()
    steps = 5 * asked.kills
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.monotonic()
        expected = undisturbed(folder / "undisturbed", steps, _start)
        pick = random.Random(asked.seed)
        found, killed = disturbed(
            folder / "disturbed", steps, asked.kills, pick, _start, asked.most_s
        )
        differing = differences(expected, found)
    print(
        f"{dict(killed)} killed in {time.monotonic() - began:.0f} s: {len(found)} samples of "
        f"{steps} steps read, {len(differing)} differ {differing[:10]}"
    )
    sys.exit(bool(differing) or len(expected) != steps * BATCH)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        from benchmarks.stream_kills import noting_rank as by_its_full_name
        from paceline.cli import main as paceline

        command.run_rank = by_its_full_name
        paceline()
    else:
        main()
