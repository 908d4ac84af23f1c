"""`paceline.train`: a person's own module, loss and data through the whole of Paceline.

Called from a script, it starts that script again once per device, as the ranks; in these processes
the call trains and then ends the process. The process that the person started waits, loads the
trained weights into its module and returns the Run, so that what stands after the call happens
once. In a notebook there is no script to start again, and one device trains.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from paceline.comm.ranks import Ranks, leave
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import CustomModel, Data, Job, read_job
from paceline.observe.run import Run
from paceline.train.command import carry_out
from paceline.train.custom.batches import Collate
from paceline.train.custom.loss import Loss
from paceline.train.custom.task import custom_task
from paceline.train.export import load
from paceline.train.failure import say_plainly
from paceline.train.launch import launch
from paceline.train.session import MakeTask, run_launched_rank
from paceline.train.start import resolve_here
from paceline.train.stopping import end_with
from paceline.train.task import Task

_LAUNCHER = "PACELINE_LAUNCHER_PID"
_LAUNCHED_RUN = "PACELINE_LAUNCHED_RUN"


def train(
    job: Job | Mapping[str, Any] | str | Path,
    model: nn.Module,
    loss: Loss,
    data: Any,
    eval_data: Any | None = None,
    *,
    collate: Collate | None = None,
    workers: int | None = None,
    runs: str | Path = "runs",
    fresh: bool = False,
) -> Run:
    """Train a module on every device of this machine, with everything a Job can ask for.

    Args:
        job: a Job, its settings as nested dicts, or the path of a job.toml. Its [model] is
            `{family = "custom"}` (or left out) and it has no [data] section.
        model: any module; on return it holds the trained weights. loss: maps (model, batch) to the
        mean loss over the batch, a scalar tensor. data: a map-style dataset (`len`, `[index]`):
        shuffled by (train.seed, epoch) and collated by
            torch's default rule; or an iterable that starts anew at each `iter` and yields batches
            of train.global_batch samples, of which each rank takes its part.
        eval_data: like data, read once through at each evaluation.
        runs: the folder of Runs; an existing Run of the Job's name goes on where it left off.
        fresh: start over instead.

    Raises:
        InputError: the Job or the data can't be used.
        RunError: the run ended early.
    """
    say_plainly()
    job = _own_job(job)

    def make_task(concrete: Job, ranks: Ranks) -> Task:
        return custom_task(concrete, ranks, model, loss, data, eval_data, collate, workers)

    if _LAUNCHER in os.environ:
        run = Run(Path(runs).absolute() / job.name)
        if str(run.path) == os.environ[_LAUNCHED_RUN]:
            _train_as_launched_rank(run, make_task)
        load(run, model)  # an earlier training of the same script, complete by now
        return run
    if not _is_script() and job.cluster.devices_per_node == "auto":
        job = job.replace(cluster=Cluster(devices_per_node=1))
    plan = resolve_here(job)
    run = Run(Path(runs).absolute() / job.name)

    def launch_ranks() -> None:
        os.environ |= {_LAUNCHER: str(os.getpid()), _LAUNCHED_RUN: str(run.path)}
        try:
            launch(run, plan.job.layout.num_ranks, sys.executable, sys.orig_argv[1:])
        finally:
            del os.environ[_LAUNCHER], os.environ[_LAUNCHED_RUN]

    if not carry_out(plan, run, make_task, launch_ranks, fresh=fresh):
        load(run, model)
    return run


def _own_job(given: Job | Mapping[str, Any] | str | Path) -> Job:
    if isinstance(given, Job):
        job = given
    elif isinstance(given, Mapping):
        job = Job.parse({"model": {"family": "custom"}, **given})
    else:
        job = read_job(Path(given))
    if not isinstance(job.model, CustomModel):
        raise InputError(
            "a module was given but the Job's [model] describes another: set "
            'model.family = "custom".'
        )
    if job.data != Data():
        raise InputError("data was given but the Job has a [data] section as well: remove one.")
    return job


def _is_script() -> bool:
    """Whether this process runs a program that can be started again."""
    return hasattr(sys.modules["__main__"], "__file__") and not hasattr(sys, "ps1")


def _train_as_launched_rank(run: Run, make_task: MakeTask) -> NoReturn:
    end_with(int(os.environ[_LAUNCHER]))
    run_launched_rank(run, make_task)
    leave()
