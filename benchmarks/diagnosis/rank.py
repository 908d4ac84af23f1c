"""One rank of a run with a fault: `paceline train`, after what `inject` and `gate` change.

Started by `twins`, in the environment that a launcher gives: as a fork of a warm process, or, on a
host of a laboratory, as `python -m benchmarks.diagnosis.rank FOLDER`.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.diagnosis.gate import Gate
from benchmarks.diagnosis.inject import inject
from paceline.comm.rendezvous import exit_rank
from paceline.config.job import read_job
from paceline.observe.run import Run
from paceline.train.command import train_job
from paceline.train.stopping import exit_with_parent

BASE = Path(__file__).with_name("base.toml")


def forked_rank(folder: Path, environment: Mapping[str, str], starter_pid: int) -> None:
    """Be a rank in a process that a forkserver made."""
    os.setsid()  # as a launcher's ranks: where the kernel shares cores by session, each has one
    exit_with_parent(starter_pid)
    os.environ.update(environment)
    output = os.open(folder / f"output-{environment.get('RANK', '0')}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    train(folder)


def train(folder: Path) -> None:
    """Train what `folder`/twin.json says, in `folder`/runs/run."""
    asked = json.loads((folder / "twin.json").read_text())
    rank = int(os.environ.get("RANK", "0"))
    gate = Gate(folder, rank)
    inject(asked["injections"], rank, gate)
    gate.stand()
    job = read_job(BASE, asked["settings"])
    train_job(job, Run((folder / "runs" / job.name).absolute()), fresh=True)
    exit_rank()


if __name__ == "__main__":
    exit_with_parent(os.getppid())
    train(Path(sys.argv[1]))
