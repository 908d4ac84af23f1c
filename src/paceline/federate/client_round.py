"""A client's round: trains its Job from what is shared, and leaves what it came to.

A process of its own: `python -m paceline.federate.client_round JOB OUT KEY=VALUE ...`.
"""

import os
import shutil
import sys
from pathlib import Path

from paceline.config.job import read_job
from paceline.observe.run import Run
from paceline.train.command import train_job
from paceline.train.export import export, export_adapters
from paceline.train.stopping import exit_with_parent


def main(job_file: Path, out: Path, settings: list[str]) -> None:
    """Train, write adapters or weights, and remove the Run: it holds the optimizer's state as well.

    Args:
        job_file: the client's Job.
        out: folder of what is written; what an earlier try left there is removed.
        settings: `--set`s of this round.
    """
    run = Run(out.with_suffix(".run"))
    job = read_job(job_file, settings)
    train_job(job, run, fresh=True, fits_cluster=False)
    shutil.rmtree(out, ignore_errors=True)
    if job.finetune.is_adapted:
        export_adapters(run, out)
    else:
        export(run, out)
    run.metrics_file.rename(out / "metrics.jsonl")
    shutil.rmtree(run.path)


if __name__ == "__main__":
    exit_with_parent(os.getppid())
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
