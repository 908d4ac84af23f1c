"""Trial run: trains a trial to a rung, in a process of its own.

Its Run is an ordinary one of the whole Job, which stops after the rung's evaluation as if a person
had asked it to, and goes on from its checkpoint. So the learning rate is that of the whole length
at every rung, and `paceline train` can finish any of them.
"""

import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from pydantic import Field, TypeAdapter

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError, RunError, StoppedInTimeError
from paceline.config.files import read_json
from paceline.config.frozen import FrozenConfig
from paceline.config.job import Job, JobSpec, read_job, to_toml
from paceline.observe.run import Run, write_atomic
from paceline.search.halving import RungResult
from paceline.train.command import train_job
from paceline.train.families import task_of
from paceline.train.metrics_buffer import Line
from paceline.train.stopping import ask_by_file, exit_with_parent
from paceline.train.task import LoopOptions, Task

_STOPPED = 130


class _Ended(FrozenConfig):
    """What a trial's process leaves."""

    cpu_s: float = Field(ge=0)
    failure: str | None


_ENDED = TypeAdapter(_Ended)


def train_to(run: Run, job: JobSpec, steps: int) -> RungResult | None:
    """Train a trial until so many steps are done and evaluated.

    Args:
        run: below a folder that holds its files.
        job: of the whole length, evaluated at this step among others.

    Returns:
        what it came to; None: it was asked to stop before.
    """
    if (loss := eval_loss(run, steps)) is not None:
        return RungResult(loss)  # a search that was killed before it kept that
    asked = run.path.with_suffix(".toml")
    ended = run.path.with_suffix(".json")
    write_atomic(asked, to_toml(job))
    ended.unlink(missing_ok=True)
    began = time.perf_counter()
    process = get_context("forkserver").Process(
        target=_train, args=(os.getpid(), str(asked), str(run.path), steps)
    )
    process.start()
    _wait(process.join)
    seconds = time.perf_counter() - began
    cpu_s, failure = 0.0, f"its process ended with code {process.exitcode}"
    if ended.exists():
        left = read_json(ended, _ENDED, "remove it")
        cpu_s, failure = left.cpu_s, left.failure or ""
    if (loss := eval_loss(run, steps)) is not None:
        return RungResult(loss, seconds, cpu_s)
    if process.exitcode == _STOPPED:
        return None
    return RungResult(None, seconds, cpu_s, failure or "its evaluation has no loss")


def eval_loss(run: Run, steps: int) -> float | None:
    """Of a Run's evaluation at a step; None: there is none."""
    line = (run.step(steps) if run.exists else None) or {}
    loss = line.get("eval_loss")
    return None if loss is None else float(loss)


def _wait(join: Callable[[], None]) -> None:
    """Ctrl-C reaches the trial as well, which stops with a checkpoint: wait for that."""
    try:
        join()
    except KeyboardInterrupt:
        join()
        raise


# ---- in the trial's process ----------------------------------------------------------------------


def _train(parent: int, asked: str, path: str, steps: int) -> None:
    exit_with_parent(parent)
    run = Run(Path(path))
    with run.path.with_suffix(".log").open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    failure, code = None, 0
    try:
        # The search plans by the cluster that it began with, so that none is fitted to a trial.
        make_task = partial(task_until, run, steps)
        train_job(read_job(Path(asked)), run, fresh=False, make_task=make_task, fits_cluster=False)
        if eval_loss(run, steps) is None and run.stop_file.exists():
            code = _STOPPED
    except StoppedInTimeError:
        code = _STOPPED
    except (InputError, RunError) as error:
        failure = str(error)[:1000]
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu_s = sum(one.ru_utime + one.ru_stime for one in used)
    write_atomic(
        run.path.with_suffix(".json"), _Ended(cpu_s=cpu_s, failure=failure).model_dump_json()
    )
    os._exit(code)


def task_until(run: Run, steps: int, job: Job, ranks: Ranks) -> Task:
    """The Job's task, whose run is asked to stop once so many steps are evaluated."""

    def see(line: Line) -> None:
        if line["step"] >= steps:
            ask_by_file(run, "a search: this rung is done", None)

    task = task_of(job, ranks)
    is_last = steps >= job.train.steps
    return task if is_last else replace(task, loop_options=LoopOptions(on_eval=see, reports=False))


def as_trial(job: JobSpec, name: str, every: int) -> JobSpec:
    """The Job of a trial: evaluated at each rung, and otherwise what its point says."""
    train = job.train.replace(eval_every=every)
    observe = job.observe.replace(profile_every=0, tensorboard=False)
    return job.replace(name=name, train=train, observe=observe)
