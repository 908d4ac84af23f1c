"""`paceline.train`: a person's own module, loss and data through the whole of Paceline.

Called from a script, it starts that script again once per device, as the ranks; in these processes
the call trains and then ends the process. The process that the person started waits, loads the
trained weights into its module and returns the Run, so that what stands after the call happens
once. At a prompt or in a notebook there is no script to start again: one device trains, or ranks
that are sent what was given (`custom.sent`).
"""

import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from paceline.comm.forkserver_start import TRAINING, warm_up_ranks
from paceline.comm.rendezvous import Ranks, exit_rank
from paceline.config.errors import InputError
from paceline.config.frozen import Auto
from paceline.config.job import Job, JobSpec, job_of, read_job, with_effects
from paceline.config.job_sections import Data
from paceline.observe.run import Run
from paceline.parallel.tp_plan import TpPlan, check_plan
from paceline.render.figures import listed
from paceline.train.command import train_job
from paceline.train.custom.changes import changes_since, must_train
from paceline.train.custom.collate import Collate
from paceline.train.custom.feed import samples_of
from paceline.train.custom.fresh_module import FreshModules
from paceline.train.custom.loss import Loss
from paceline.train.custom.sent import SentTask
from paceline.train.custom.task import custom_task
from paceline.train.custom.user_inputs import UserInputs
from paceline.train.export import load
from paceline.train.failure import install_plain_excepthook
from paceline.train.generations import is_elastic_rank, run_elastic_rank
from paceline.train.launch import LAUNCHED_RUN, launched_rank
from paceline.train.learning_rates import MakeOptimizer, MakeSchedule
from paceline.train.metrics_buffer import Line
from paceline.train.session import MakeTask, run_rank
from paceline.train.task import LoopOptions, Task


def train(
    job: JobSpec | Mapping[str, Any] | str | Path,
    model: nn.Module,
    loss: Loss,
    data: Any,
    eval_data: Any | None = None,
    *,
    collate: Collate | None = None,
    workers: int | None = None,
    optimizer: MakeOptimizer | None = None,
    schedule: MakeSchedule | None = None,
    ema: float | None = None,
    find_unused_parameters: bool = False,
    tp_plan: TpPlan | None = None,
    on_step: Callable[[Line], None] | None = None,
    on_eval: Callable[[Line], None] | None = None,
    runs: str | Path = "runs",
    fresh: bool = False,
) -> Run:
    """Train a module on every device of this machine, with everything a Job can ask for.

    docs/own-models.md is the whole contract.

    Args:
        job: a JobSpec, its settings as nested dicts, or the path of a job.toml. Its [model] is
            `{family = "custom"}` (or left out) and it has no [data] section. Without a name it has
            the script's.
        model: any module; on return it holds the trained weights.
        loss: maps (model, batch) to the mean loss over the batch: a scalar tensor, a dict or an
            output with `loss`, or a pair of that and a dict of further means. What torch's
            cross_entropy returns counts by its labels; any other mean over something else than
            samples states their number as "weight".
        data: a dataset with `len` and `[index]`, or a DataLoader of one: read in the order of
            (train.seed, epoch), every sample once in an epoch over all ranks; an IterableDataset of
            samples; or an iterable that starts anew at each `iter` and yields batches of
            train.global_batch samples, of which each rank takes its part.
        eval_data: like data, read once through at each evaluation.
        collate: maps a list of samples to a batch; by default torch's rule stacks them.
        workers: processes of each rank that read samples ahead; by default those of the DataLoader,
            or some once reading is seen to hold up the steps.
        optimizer: maps the named trainable parameters to an optimizer of torch's kind, in place of
            the Job's AdamW; its learning rates are the peaks of the schedule.
        schedule: maps the optimizer to a scheduler of torch's, in place of the Job's.
        ema: decay of a mean of the weights, which is evaluated, and returned in the module.
        find_unused_parameters: for a module of which a step may not reach every parameter.
        tp_plan: by which `layout.tp` cuts the module: names of modules, with *, and a style of
            torch.distributed.tensor.parallel for each, or its word ("colwise", "rowwise"); by
            default what the module has as `tp_plan`, as those of transformers do.
        on_step: called with each step's line of metrics, on rank 0.
        on_eval: the same, with the lines that have an evaluation.
        runs: the folder of Runs; an existing Run of the Job's name goes on where it left off.
        fresh: start over instead.

    Raises:
        InputError: the Job or the data can't be used, or the Run is complete and what was given
            has changed since.
        RunError: the run ended early.
        StoppedInTimeError: it was stopped, and is to be started again; the script then ends with
            75 as by sys.exit.
    """
    if _is_script():
        install_plain_excepthook()
    job = _own_job(job)
    loop_options = LoopOptions(optimizer, schedule, ema, find_unused_parameters, on_step, on_eval)
    tp_plan = getattr(model, "tp_plan", None) if tp_plan is None else tp_plan
    _check_tp(job, model, tp_plan)
    brought = UserInputs(model, loss, data, eval_data, collate, workers, tp_plan, loop_options)
    traits = brought.traits()
    run = Run(Path(runs).absolute() / job.name)

    modules = FreshModules(model, is_elastic=job.elastic.is_on)

    def task_here(concrete: Job, ranks: Ranks) -> Task:
        module, has_values = modules.take()
        own = replace(brought, model=module)
        return custom_task(concrete, ranks, own, traits, has_values=has_values)

    make_task: MakeTask = task_here
    if not _is_script() and (num_ranks := _ranks_at_a_prompt(job)) > 1:
        warm_up_ranks(TRAINING)
        make_task = SentTask.of(brought, traits)
    elif not _is_script():
        job = job.replace(cluster=job.cluster.replace(devices_per_node=num_ranks))

    if (launched := os.environ.get(LAUNCHED_RUN)) is not None:
        if str(run.path) == launched:
            with launched_rank():
                (run_elastic_rank if is_elastic_rank() else run_rank)(run, make_task)
            exit_rank()
        load(run, model)  # an earlier training of the same script, complete by now
        return run

    def compare(concrete: Job) -> None:
        if changes := changes_since(run, concrete, traits):
            must_train(run, concrete, changes)
            print(f"{run.path} goes on with another training: {listed(changes)} changed.")

    trains_here = train_job(
        job,
        run,
        fresh=fresh,
        make_task=make_task,
        program=[sys.executable, *sys.orig_argv[1:]] if _is_script() else (),
        num_samples=samples_of(data, job.train.global_batch),
        compare=compare,
    )
    if not trains_here:
        load(run, model)
    return run


def _own_job(given: JobSpec | Mapping[str, Any] | str | Path) -> JobSpec:
    if isinstance(given, JobSpec):
        job = with_effects(given)
    elif isinstance(given, Mapping):
        job = job_of({"model": {"family": "custom"}, **given}, Path.cwd())
    else:
        job = read_job(Path(given))
    if not job.model.is_own:
        raise InputError(
            "a module was given but the Job's [model] describes another: set "
            'model.family = "custom".'
        )
    if job.data != Data():
        raise InputError("data was given but the Job has a [data] section as well: remove one.")
    return job if "name" in job.model_fields_set else job.replace(name=_name_of_script())


def _check_tp(job: JobSpec, model: nn.Module, tp_plan: TpPlan | None) -> None:
    tp = _at_least(job.layout.tp)
    if tp == 1:
        return
    if job.elastic.is_on or job.elastic.exact:
        raise InputError(
            "elastic.exact and elastic.min_nodes are of ranks that have a module of your own whole "
            f"or in shards, and layout.tp = {tp} cuts it: set tp to 1, or leave them out."
        )
    check_plan(model, tp_plan, tp)


def _name_of_script() -> str:
    """What a Run is called when nobody says: as the script, where there is one."""
    stem = Path(sys.modules["__main__"].__file__ or "").stem if _is_script() else ""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "run"


def _is_script() -> bool:
    """Whether this process runs a program that can be started again.

    A prompt or a notebook can't, nor can what multiprocessing started.
    """
    is_child = any(each.startswith("from multiprocessing.") for each in sys.orig_argv)
    is_program = getattr(sys.modules["__main__"], "__file__", None) is not None
    return is_program and not is_child and not hasattr(sys, "ps1")


def _ranks_at_a_prompt(job: JobSpec) -> int:
    """How many ranks a JobSpec asks for at least, where there is no script to start once a device.

    Raises:
        InputError: it asks for what needs one.
    """
    if job.elastic.is_on:
        raise InputError(
            f"elastic.min_nodes = {job.elastic.min_nodes} starts lost ranks again, from a script, "
            "and this is a prompt, a notebook or a process of multiprocessing: set it to 0, or run "
            "a script that calls paceline.train."
        )
    axes = (getattr(job.layout, axis) for axis in ("dp", "fsdp", "tp", "pp", "cp"))
    return max(_at_least(job.cluster.devices_per_node), math.prod(map(_at_least, axes)))


def _at_least(wish: Auto | int) -> int:
    return 1 if wish == "auto" else wish
