"""Trial run: trains trials to their rungs, one after another, in a process of its own.

A trial's Run is an ordinary one of the whole Job, which stops after the rung's evaluation as if a
person had asked it to, and goes on from its checkpoint. So the learning rate is that of the whole
length at every rung, and `paceline train` can finish any of them.
"""

import gc
import os
import resource
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from pydantic import Field

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import EXIT_SAVED, InputError, RunError, StoppedInTimeError
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
_LOOK_S = 0.5
# Then the process is begun anew: libraries keep memory of what they have seen.
_MOST_RUNGS = 100


class _Asked(FrozenConfig):
    """A rung that is to be trained."""

    path: str
    """Of the Run; its Job is beside it."""
    steps: int = Field(ge=1)


class _Ended(FrozenConfig):
    """What a rung came to, besides what its Run says."""

    cpu_s: float = Field(0.0, ge=0)
    failure: str = ""
    is_stopped: bool = False


class TrialProcess:
    """A process that trains one rung after another, of any trial, until it is closed.

    What a training needs of imports, threads and caches, it has from the first one on. It is begun
    anew where it died or a rung failed, and after so many rungs.
    """

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._num_rungs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it, also in the middle of a rung."""
        if self._process is not None:
            self._process.kill()  # what it has trained is in the Runs
            self._process.join()
            self._words.close()
            self._process = None

    def train_to(self, run: Run, job: JobSpec, steps: int) -> RungResult | None:
        """Train a trial until so many steps are done and evaluated.

        Args:
            run: below a folder that holds its files.
            job: of the whole length, evaluated at this step among others.

        Returns:
            what it came to; None: it was asked to stop before.
        """
        if (loss := eval_loss(run, steps)) is not None:
            return RungResult(loss)  # a search that was killed before it kept that
        write_atomic(_beside(run, "toml"), to_toml(job))
        began = time.perf_counter()
        ended = self._train(_Asked(path=str(run.path), steps=steps))
        seconds = time.perf_counter() - began
        loss = eval_loss(run, steps)
        if loss is None:
            self.close()
            if ended.is_stopped:
                return None
        reason = "" if loss is not None else ended.failure or "its evaluation has no loss"
        return RungResult(loss, seconds, ended.cpu_s, reason)

    def _train(self, asked: _Asked) -> _Ended:
        if self._num_rungs == _MOST_RUNGS:
            self.close()
        process = self._process
        if process is None or not process.is_alive():
            process = self._begin()
        self._num_rungs += 1
        try:
            self._words.send_bytes(asked.model_dump_json().encode())
            return _Ended.model_validate_json(self._heard(Run(Path(asked.path))))
        except (EOFError, OSError):
            process.join()
            code = process.exitcode
            failure = f"its process ended with code {code}"
            return _Ended(failure=failure, is_stopped=code in (_STOPPED, EXIT_SAVED))

    def _begin(self) -> BaseProcess:
        self.close()
        context = get_context("forkserver")
        self._words, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(os.getpid(), theirs))
        self._process.start()
        theirs.close()
        self._num_rungs = 0
        return self._process

    def _heard(self, run: Run) -> bytes:
        """Ctrl-C on a terminal reaches the process as well, whose run stops with a checkpoint; a
        signal to this process alone doesn't, so its run is asked to. Wait for that."""
        try:
            return self._words.recv_bytes()
        except KeyboardInterrupt:
            with suppress(EOFError, OSError):
                while not self._words.poll(_LOOK_S):
                    ask_by_file(run, "the search is stopped", None)
                self._words.recv_bytes()
            raise


def _beside(run: Run, kind: str) -> Path:
    """A trial's own file; with_suffix would cut a name at its point, as that of a learning rate."""
    return run.path.with_name(f"{run.path.name}.{kind}")


def eval_loss(run: Run, steps: int) -> float | None:
    """Of a Run's evaluation at a step; None: there is none."""
    line = (run.step(steps) if run.exists else None) or {}
    loss = line.get("eval_loss")
    return None if loss is None else float(loss)


# ---- in the process ------------------------------------------------------------------------------


def _serve(parent: int, words: Connection) -> None:
    exit_with_parent(parent)
    before_s = 0.0
    try:
        while True:
            asked = _Asked.model_validate_json(words.recv_bytes())
            ended = _train(Run(Path(asked.path)), asked.steps)
            gc.collect()  # of the network, before the next one
            used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
            used_s = sum(one.ru_utime + one.ru_stime for one in used)
            ended, before_s = ended.replace(cpu_s=used_s - before_s), used_s
            words.send_bytes(ended.model_dump_json().encode())
    except (EOFError, KeyboardInterrupt):
        os._exit(_STOPPED)


def _train(run: Run, steps: int) -> _Ended:
    with _beside(run, "log").open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    try:
        job = read_job(_beside(run, "toml"))
        if job.layout.compile:
            torch.compiler.reset()  # it gives up on code that it has compiled too often
        # The search plans by the cluster that it began with, so that none is fitted to a trial.
        make_task = partial(task_until, run, steps)
        train_job(job, run, fresh=False, make_task=make_task, fits_cluster=False)
        # Not where a loss that is no number was evaluated: that is a failure.
        is_evaluated = "eval_loss" in (run.step(steps) or {})
        return _Ended(is_stopped=run.stop_file.exists() and not is_evaluated)
    except StoppedInTimeError:
        return _Ended(is_stopped=True)
    except (InputError, RunError) as error:
        return _Ended(failure=str(error)[:1000])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def task_until(run: Run, steps: int, job: Job, ranks: Ranks) -> Task:
    """The Job's task, whose run is asked to stop once so many steps are evaluated. It writes no
    report: `paceline train` does, of one that is complete."""

    def see(line: Line) -> None:
        if steps <= line["step"] < job.train.steps:
            ask_by_file(run, "a search: this rung is done", None)

    return replace(task_of(job, ranks), loop_options=LoopOptions(on_eval=see, reports=False))


def as_trial(job: JobSpec, name: str, every: int) -> JobSpec:
    """The Job of a trial: evaluated at each rung, and otherwise what its point says."""
    train = job.train.replace(eval_every=every)
    observe = job.observe.replace(profile_every=0, tensorboard=False)
    return job.replace(name=name, train=train, observe=observe)
