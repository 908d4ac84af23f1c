"""`paceline`, with stamps and notes of steps put into every process that trains, and faults.

A rank comes from a forkserver, which imports the file of the program that was started: this one.
So what is put in at import is in every rank, and in the agent, which does no step.

    python benchmarks/elastic/entry.py train job.toml --set elastic.min_nodes=1
"""

import os
import sys
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.elastic import faults
from benchmarks.peers.stamps import FOLDER, Stamps
from paceline.elastic.generation import Generation
from paceline.elastic.link import RankLink
from paceline.train.trainer import Trainer

NOTES = "ELASTIC_NOTES"
"""The variable that names the folder of notes, which `history.read_notes` reads."""


def stamp_steps() -> None:
    """Let every rank stamp the end of its steps."""
    step = Trainer.step
    stamps: list[Stamps] = []

    def stamped(trainer: Trainer, index: int, *others: Any, **told: Any) -> Any:
        result = step(trainer, index, *others, **told)
        if not stamps:
            stamps.append(Stamps())
        stamps[0].step_done(index + 1, trainer.job.train.global_batch, trainer.ranks.rank)
        return result

    Trainer.step = stamped


def note_steps(folder: Path) -> None:
    """Let every rank note which samples a step begins with, in which generation, and its end."""
    step, next_generation = Trainer.step, RankLink.next_generation
    number = 0
    files: list[int] = []

    def entered(link: RankLink) -> tuple[Generation, int, int] | None:
        nonlocal number
        place = next_generation(link)
        number = number if place is None else place[0].number
        return place

    def write(text: str) -> None:
        if not files:
            folder.mkdir(parents=True, exist_ok=True)
            name = folder / f"{os.getpid()}.notes"
            files.append(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        os.write(files[0], text.encode())

    def noted(trainer: Trainer, index: int, batches: Any, *others: Any, **told: Any) -> Any:
        place = f"{number} {index + 1} {trainer.ranks.rank}"
        sums = (zlib.crc32(row.numpy().tobytes()) for each in batches for row in each[0].cpu())
        write(f"began {place} {' '.join(map(str, sums))}\n")
        result = step(trainer, index, batches, *others, **told)
        write(f"finished {place}\n")
        return result

    Trainer.step, RankLink.next_generation = noted, entered


if FOLDER in os.environ:
    stamp_steps()
if NOTES in os.environ:
    note_steps(Path(os.environ[NOTES]))
if faults.FAULT in os.environ:
    faults.put_in(os.environ[faults.FAULT])

if __name__ == "__main__":
    from paceline.cli import main

    main()
