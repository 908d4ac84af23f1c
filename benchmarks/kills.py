"""Kill -9 at random moments, while the number of ranks moves among 1 to 4.

`python -m benchmarks.kills mixture` trains a small Job on a mixture with a curriculum twice:
undisturbed, and killed again and again (the command that was typed, or one of its ranks) and
started with another number of ranks. `python -m benchmarks.kills stream` does so on a stream, while
lines still arrive; there the process that appends to the log is killed, too. Each rank notes the id
and the tokens of every sample that it trains on. What was noted, whenever and how often, has to be
the sequence of the undisturbed run.

Half of the kills are drawn for the time between a start and its first new step, the others after
it.

`python -m benchmarks.kills train ARGUMENTS` is `paceline train ARGUMENTS` with ranks that note.
"""

import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import markdown
from paceline.comm.rendezvous import Ranks
from paceline.config.job import Job
from paceline.observe.run import Run
from paceline.train import command, session
from paceline.train.data import batches
from paceline.train.data.batches import BatchShape, MicroBatch, TokenRows
from paceline.train.data.order import Ids, rank_share
from paceline.train.session import MakeTask
from paceline.train.task import Step, Task
from tests.command_line import Started

BATCH, SEQ_LEN = 12, 32
STEPS_A_KILL = 12
"""A run does about so many more until the next kill, at most."""
_MOST_RANKS = 4
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
[train]
steps = {steps}
global_batch = {batch}
seq_len = {seq_len}
[checkpoint]
every = 3
[observe]
tensorboard = false
[data]
tokenizer = "bytes"
"""
STREAM = """
[data.stream]
folder = "incoming"
segment_mb = 0.002
shuffle = 6
"""
_SOURCES = {"words": 400, "sums": 150, "dates": 60}
_RECORD = "record {:06d} of all"
_LINE_TOKENS = len(_RECORD.format(0)) + 1
_FIRST_STAGE, _NUM_STAGES = 6, 10
_NOTES = "read.jsonl"
_LINE_S, _LOOK_S, _PATIENCE_S, _WHOLE_S = 0.005, 0.02, 120.0, 7200.0


class Sample(NamedTuple):
    """What a rank noted of one."""

    id: int
    tokens: list[int]


# ---- ranks that note -----------------------------------------------------------------------------


def noting_rank(run: Run, make_task: MakeTask, *placed: Any) -> object:
    """What a rank does, with notes of all that it trains on."""
    return session.run_rank(run, partial(_noting_task, run, make_task), *placed)


def _noting_task(run: Run, make_task: MakeTask, job: Job, ranks: Ranks) -> Task:
    load_steps, ids_of_steps = batches.load_steps, deque[list[int]]()

    def remembering(rows: TokenRows, shape: BatchShape, ids: Ids) -> list[list[MicroBatch]]:
        ids_of_steps.extend(shape.shares(ids).tolist())
        return load_steps(rows, shape, ids)

    batches.load_steps = remembering
    task = make_task(job, ranks)
    return replace(task, steps_from=partial(_noted, run, task, job, ranks, ids_of_steps))


def _noted(
    run: Run, task: Task, job: Job, ranks: Ranks, ids_of_steps: deque[list[int]], first: int
) -> Iterator[Step]:
    size = job.train.global_batch
    for step in task.steps_from(first):
        place = job.layout.data_rank(ranks.rank), job.layout.num_data_ranks
        numbers = rank_share(np.arange(first, first + size), *place, micro_batch=job.micro_batch)
        rows = torch.cat([micro_batch.tokens for micro_batch in step]).tolist()
        with (run.path / _NOTES).open("a") as notes:
            ids = ids_of_steps.popleft()
            for number, *sample in zip(numbers.tolist(), ids, rows, strict=True):
                notes.write(json.dumps([number, *sample]) + "\n")
        yield step
        first += size


def _noted_in(text: str) -> Iterator[tuple[int, Sample]]:
    """Running numbers and samples; lines that a kill cut are passed over."""
    for line in text.splitlines():
        with suppress(ValueError):
            number, *sample = json.loads(line)
            yield number, Sample(*sample)


def read_by(folder: Path) -> dict[int, Sample]:
    """Running number -> sample, as ranks noted them.

    Raises:
        ValueError: it was not the same each time.
    """
    found: dict[int, Sample] = {}
    for number, sample in _noted_in(_notes(folder).read_text()):
        if found.setdefault(number, sample) != sample:
            raise ValueError(f"sample {number} was {found[number]} and then {sample}")
    return found


def _notes(folder: Path) -> Path:
    return folder / "runs" / "killed" / _NOTES


def _steps_begun(folder: Path) -> int:
    """By what was noted last."""
    try:
        with _notes(folder).open("rb") as file:
            file.seek(-min(2**14, file.seek(0, os.SEEK_END)), os.SEEK_END)
            noted = [number for number, _ in _noted_in(file.read().decode())]
    except FileNotFoundError:
        return 0
    return max(noted, default=-1) // BATCH + 1


# ---- the two kinds of data -----------------------------------------------------------------------


class Mixture:
    """Three sources of different sizes, with other weights again and again."""

    victims = ("trainer", "rank")

    def make(self, folder: Path, steps: int) -> None:
        """Write Job and sources."""
        job = JOB.format(steps=steps, batch=BATCH, seq_len=SEQ_LEN)
        for number, (name, count) in enumerate(_SOURCES.items()):
            rows = ({"text": f"text {row:04d} of {name} and no other"} for row in range(count))
            (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
            job += f'[[data.sources]]\nname = "{name}"\nsource = "{name}.jsonl"\n'
            job += f"weight = {number + 1}\n" + ("max_epochs = 2.5\n" if name == "dates" else "")
        for number in range(_NUM_STAGES):
            weights = ", ".join(
                f"{name} = {1 + (number + place) % 3}" for place, name in enumerate(_SOURCES)
            )
            job += f"[[data.stages]]\nfrom_step = {_FIRST_STAGE << number}\n"
            job += f"weights = {{ {weights} }}\n"
        (folder / "job.toml").write_text(job)

    def feed(self, folder: Path, steps: int, may_do: Callable[[], int]) -> None:
        """It is all there."""


class Stream:
    """Lines that are appended to files while they are trained on."""

    victims = ("trainer", "rank", "ingester")

    def make(self, folder: Path, steps: int) -> None:
        """Write the Job, and the folder that is watched."""
        (folder / "incoming").mkdir()
        (folder / "job.toml").write_text(
            JOB.format(steps=steps, batch=BATCH, seq_len=SEQ_LEN) + STREAM
        )

    def feed(self, folder: Path, steps: int, may_do: Callable[[], int]) -> None:
        """Append lines one by one, as many as `may_do` steps need."""
        for number in range(_lines_for(steps)):
            while number >= _lines_for(allowed := may_do()):
                time.sleep(_LOOK_S)
            with (folder / "incoming" / f"{number // 500:06d}.jsonl").open("a") as file:
                file.write(json.dumps({"text": _RECORD.format(number)}) + "\n")
            if allowed < steps:
                time.sleep(_LINE_S)


KINDS: dict[str, type[Mixture | Stream]] = {"mixture": Mixture, "stream": Stream}


def _lines_for(steps: int) -> int:
    """More than so many steps need."""
    return steps * BATCH * SEQ_LEN // _LINE_TOKENS + 40


# ---- the two runs --------------------------------------------------------------------------------


@dataclass
class Disturbed:
    """What a run read that was killed again and again, and how that was."""

    read: dict[int, Sample] = field(default_factory=dict)
    killed: Counter[str] = field(default_factory=Counter)
    """By who was."""
    ranks: Counter[int] = field(default_factory=Counter)
    """Kills by the number of ranks that trained, or began to."""
    before_a_step: int = 0
    """Kills before the first step after a start."""
    read_again: int = 0
    """Samples that were read more than once."""


def steps_for(kills: int) -> int:
    """Of a run that is killed so often."""
    return STEPS_A_KILL * (kills + 2)


def undisturbed(kind: str, folder: Path, kills: int) -> dict[int, Sample]:
    """What a run reads that nobody disturbs."""
    data, steps = KINDS[kind](), steps_for(kills)
    folder.mkdir()
    data.make(folder, steps)
    data.feed(folder, steps, lambda: steps)
    _await_end(_trains(1, folder))
    return read_by(folder)


def disturbed(kind: str, folder: Path, kills: int, pick: random.Random, most_s: float) -> Disturbed:
    """Kill a run again and again, and let it come to its end.

    Args:
        most_s: after the first step that follows a start, the latest moment of a kill.
    """
    data, steps, found = KINDS[kind](), steps_for(kills), Disturbed()

    def may_do() -> int:
        so_many = found.killed.total()
        return steps if so_many == kills else STEPS_A_KILL * (so_many + 1)

    folder.mkdir()
    data.make(folder, steps)
    feeder = threading.Thread(target=data.feed, args=(folder, steps, may_do), daemon=True)
    feeder.start()
    process, num_ranks, until_step_s = None, 0, most_s
    while found.killed.total() < kills:
        before = _steps_begun(folder)
        if process is None or process.poll() is not None:
            num_ranks = pick.randint(1, _MOST_RANKS)
            process, began = _trains(num_ranks, folder), time.monotonic()
        if pick.random() < 0.5:
            _wait_for(before + 1, folder, pick.uniform(0, until_step_s))
        elif _wait_for(before + 1, folder, _PATIENCE_S):
            until_step_s = time.monotonic() - began
            _wait_for(may_do(), folder, pick.uniform(0, most_s))
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with {process.poll()} and nobody had killed it")
        who = pick.choice(data.victims)
        if _kill(process, who):
            found.killed[who] += 1
            found.ranks[num_ranks] += 1
            found.before_a_step += _steps_begun(folder) == before
    feeder.join()
    if process is None or process.poll() is not None:
        process = _trains(_MOST_RANKS, folder)
    _await_end(process)
    found.read = read_by(folder)
    found.read_again = sum(1 for _ in _noted_in(_notes(folder).read_text())) - len(found.read)
    return found


def _trains(num_ranks: int, folder: Path) -> Started:
    wanted = f"cluster.devices_per_node={num_ranks}"
    arguments = ["-m", "benchmarks.kills", "train", "job.toml", "--set", wanted]
    return Started(arguments, folder, num_outputs=1)


def _wait_for(steps: int, folder: Path, limit_s: float) -> bool:
    """Until so many steps have begun; False: they have not for so long."""
    deadline = time.monotonic() + limit_s
    while not (have_begun := _steps_begun(folder) >= steps) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return have_begun


def _kill(process: Started, who: str) -> bool:
    """End the command's own process, one of its ranks, or its ingester; False: there is none now.

    With the command or a rank the whole run ends by itself, which is waited for.
    """
    with suppress(psutil.NoSuchProcess):
        trainer = psutil.Process(process.pid)
        others = trainer.children(recursive=True)
        ingesters = [each for each in others if "stream" in each.cmdline()]
        started = [each for child in trainer.children() for each in child.children()]
        ranks = [each for each in started if each not in ingesters]
        victims = {"trainer": [trainer], "rank": ranks, "ingester": ingesters}[who]
        if not victims:
            return False
        random.choice(victims).kill()
        while who != "ingester" and (process.poll() is None or psutil.wait_procs(others, 20)[1]):
            time.sleep(_LOOK_S)
        return True
    return False


def _await_end(process: Started) -> None:
    printed, _ = process.communicate(_WHOLE_S)
    if process.returncode:
        raise RuntimeError(f"the run ended with {process.returncode}: {printed}")


def differences(expected: dict[int, Sample], found: dict[int, Sample]) -> list[int]:
    """Running numbers that only one run read, or of which it read another sample."""
    return [
        number
        for number in sorted(expected.keys() | found.keys())
        if expected.get(number) != found.get(number)
    ]


# ---- the program ---------------------------------------------------------------------------------


def _page(kind: str, found: Disturbed, result: dict[str, Any]) -> str:
    rows = [
        ("kill -9 of " + ", ".join(f"{who} {n}" for who, n in sorted(found.killed.items())), "sum"),
        ("kills while 1, 2, 3, 4 ranks trained or began to", "ranks"),
        ("kills before the first step after a start", "before_a_step"),
        ("steps of the run", "steps"),
        ("samples that it trained on", "samples"),
        ("samples that were read again after a kill", "read_again"),
        ("samples that are others than in the undisturbed run, or missing, or too many", "differ"),
    ]
    figures = [
        (what, ", ".join(map(str, result[key])) if key == "ranks" else str(result[key]))
        for what, key in rows
    ]
    table = markdown((f"a run on a {kind}", ""), figures, left=(f"a run on a {kind}",))
    return f"{table}\n{result['took_s']:.0f} s. {signature(result['about'])}\n"


def main() -> None:
    """Kill, compare, and say so; exit code 1 where something differs."""
    parser = parser_of(__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-s", type=float, default=2.0, help="latest kill after a first step")
    asked = parser.parse_args()
    about, began = taken_with("benchmarks.kills"), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, kind, kills = Path(name), asked.kind, asked.kills
        expected = undisturbed(kind, folder / "undisturbed", kills)
        pick = random.Random(asked.seed)
        found = disturbed(kind, folder / "disturbed", kills, pick, asked.most_s)
        differing = differences(expected, found.read)
    is_whole = sorted(expected) == list(range(steps_for(kills) * BATCH))
    result = {
        "about": about,
        "sum": found.killed.total(),
        "killed": dict(found.killed),
        "ranks": [found.ranks[count] for count in range(1, _MOST_RANKS + 1)],
        "before_a_step": found.before_a_step,
        "steps": steps_for(kills),
        "samples": len(found.read),
        "read_again": found.read_again,
        "differ": len(differing),
        "took_s": time.monotonic() - began,
    }
    page = _page(kind, found, result)
    print(page, differing[:10])
    keep(folder_of(asked.results, about), f"kills_{kind}", result, page)
    sys.exit(bool(differing) or not is_whole)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        from benchmarks.kills import noting_rank as by_its_full_name
        from paceline.cli import main as paceline

        command.run_rank = by_its_full_name
        paceline()
    else:
        main()
