"""What searches that are measured side by side share: a core each, Optuna's TPE with Hyperband, and
trials in a process of their own, which asks after each evaluation whether to go on."""

import gc
import multiprocessing
import os
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from paceline.config.errors import InputError, RunError
from paceline.config.job import read_job
from paceline.observe.run import Run
from paceline.train.stopping import exit_with_parent

Judge = Callable[[int, float, float], bool]
"""Told the step, the held-out loss and the trial's CPU-seconds so far; says whether it goes on."""


def one_core_each() -> ProcessPoolExecutor:
    """Two processes; each keeps itself, and what it starts, to a core of its own: threads that wait
    for each other on a core that others have count as CPU-seconds."""
    spawn = multiprocessing.get_context("spawn")
    cores = spawn.SimpleQueue()
    for core in (both := sorted(os.sched_getaffinity(0))[:2]):
        cores.put(core)
    return ProcessPoolExecutor(len(both), spawn, _keep_to_one, (cores, os.getpid()))


def _keep_to_one(cores: Any, parent: int) -> None:
    exit_with_parent(parent)
    os.sched_setaffinity(0, {cores.get()})


def hyperband_study(seed: int, first: int, last: int, factor: int) -> Any:
    """Optuna's TPE, whose trials are pruned by Hyperband.

    Args:
        seed: of TPE.
        first: steps after which a trial is first judged.
        last: steps of a whole trial.
        factor: between the numbers of trials from rung to rung.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(
        direction="minimize",
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.HyperbandPruner(
            min_resource=first, max_resource=last, reduction_factor=factor
        ),
    )


class JudgedTrials:
    """A process that trains what it is given. Where it is forked from, nothing is imported anew."""

    def __enter__(self) -> Self:
        self._words, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._words.close()
        self._process.join()

    def train(self, run: Run, job: str, judge: Judge, at_most: int | None = None) -> float:
        """Train a Job, given as TOML, until its end, the judge's or so many steps; one that fails
        has no evaluation.

        Returns:
            CPU-seconds (user and system) that it took.
        """
        run.path.parent.mkdir(parents=True, exist_ok=True)
        run.path.with_suffix(".toml").write_text(job)
        self._words.send((str(run.path), at_most))
        while True:
            step, loss, cpu_s = self._words.recv()
            if step is None:
                return float(cpu_s)
            self._words.send(judge(step, loss, cpu_s))


# ---- in the process ------------------------------------------------------------------------------


def used_cpu_s() -> float:
    """User and system time of this process, and of those that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def _serve(words: Connection) -> None:
    with suppress(EOFError):
        while True:
            path, at_most = words.recv()
            before_s = used_cpu_s()
            _train(words, Run(Path(path)), at_most, before_s)
            gc.collect()
            words.send((None, None, used_cpu_s() - before_s))
    os._exit(0)


def _train(words: Connection, run: Run, at_most: int | None, before_s: float) -> None:
    from paceline.train.command import train_job
    from paceline.train.families import task_of
    from paceline.train.metrics_buffer import Line
    from paceline.train.stopping import ask_by_file
    from paceline.train.task import LoopOptions

    with run.path.with_suffix(".log").open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)

    def on_step(line: Line) -> None:
        if at_most is not None and line["step"] >= at_most:
            ask_by_file(run, "a contest: beyond a limit", None)

    def on_eval(line: Line) -> None:
        words.send((line["step"], line["eval_loss"], used_cpu_s() - before_s))
        if not words.recv():
            ask_by_file(run, "a contest: judged", None)

    def task(job: Any, ranks: Any) -> Any:
        options = LoopOptions(on_step=on_step, on_eval=on_eval, reports=False)
        return replace(task_of(job, ranks), loop_options=options)

    with suppress(InputError, RunError):  # no Job: it failed when it started; or it diverged
        job = read_job(run.path.with_suffix(".toml"))
        train_job(job, run, fresh=False, make_task=task, fits_cluster=False)
