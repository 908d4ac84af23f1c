"""`paceline train`: run a Job on every device of this machine, or as one of the ranks given."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import tomli_w
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.comm.rendezvous import (
    Found,
    Ranks,
    connect,
    disconnect,
    exit_rank,
    ranks_from_env,
    store_of_run,
    word_from_first_rank,
)
from paceline.config.errors import InputError
from paceline.config.job import Job, differing, to_raw
from paceline.config.job_sections import CustomModel
from paceline.config.model import Model
from paceline.config.recommender import Dlrm
from paceline.config.vision import ResNet
from paceline.observe.console import step_time_table
from paceline.observe.run import Run
from paceline.observe.summary import bytes_text, step_time_text
from paceline.plan.calibrate import calibrate_from_run
from paceline.plan.resolve import Plan
from paceline.train.elastic_workers import launch_workers
from paceline.train.export import keep_tokenizer
from paceline.train.launch import launch
from paceline.train.length import length_in_steps
from paceline.train.session import MakeTask, language_model, launched_rank, run_rank
from paceline.train.start import (
    begin_run,
    locked_run,
    progress_of,
    read_inputs,
    with_measured_speed,
)
from paceline.train.this_machine import resolve_on_this_machine

_CONSOLE = Console(highlight=False, soft_wrap=True)


def train_command(job: Job, runs: Path, *, fresh: bool) -> Run:
    """Train a Job in runs/<name>; an existing Run goes on from its newest good checkpoint.

    Args:
        job: partial or concrete.
        runs: the folder of Runs.
        fresh: start over, deleting what an earlier start of the same name left.

    Raises:
        InputError: wrong input; nothing was written.
        RunError: the run ended early.
    """
    with _tokenising() as progress:
        plan = resolve_on_this_machine(length_in_steps(job, progress))
    run = Run((runs / job.name).absolute())

    def launch_ranks() -> None:
        start = launch_workers if plan.job.comm.local.min_workers else launch
        start(run, plan.job.layout.num_ranks, launched_rank, (str(run.path), os.getpid()))

    run_job(plan, run, language_model, launch_ranks, fresh=fresh)
    return run


def run_job(
    plan: Plan,
    run: Run,
    make_task: MakeTask,
    launch_ranks: Callable[[], None],
    *,
    fresh: bool,
    compare: Callable[[], None] = lambda: None,
) -> bool:
    """Check, write and train: in this process where it is a rank already or the only one.

    Args:
        make_task: what a rank trains.
        launch_ranks: starts the ranks of this machine and waits for them.
        fresh: start over.
        compare: says or refuses what is another than before, where a Run goes on.

    Returns:
        whether this process trained, and not others or nobody.
    """
    plan = with_measured_speed(plan, _CONSOLE.print)
    kind = _device_kind(plan.job)
    ranks = ranks_from_env(kind) or Ranks(device_type=kind)
    is_alone, store = ranks.world_size == 1, None
    if plan.job.comm.local.min_workers and not is_alone:
        store = store_of_run(ranks)
    else:
        ranks = connect(ranks, hosts=plan.job.cluster.hosts, priority=plan.job.comm.priority)
    with ExitStack() as held:
        found: Found = "done"
        try:
            if ranks.is_first:
                held.enter_context(locked_run(run))
                if _is_ready(plan, run, compare, fresh=fresh):
                    found = "ready"
        except (InputError, OSError):
            word_from_first_rank("refused", ranks, store)
            raise
        # The other ranks wait here for what rank 0 finds.
        found = word_from_first_rank(found, ranks, store)
        if found == "refused":
            exit_rank(2)  # rank 0 says why
        if found == "done":
            disconnect()
            return False
        launches = is_alone and plan.job.layout.num_ranks > 1
        if launches:
            launch_ranks()
        else:
            run_rank(plan.job, run, ranks, make_task, store)
        if ranks.is_first:
            fit_cluster_from_run(plan, run)
        return not launches


def fit_cluster_from_run(plan: Plan, run: Run) -> None:
    """Write down what the steps of a predicted Run say about the machine, for the next plan."""
    if plan.ranked and isinstance(plan.job.model, Model):
        run.write("cluster.toml", tomli_w.dumps(to_raw(calibrate_from_run(run))))


def _is_ready(plan: Plan, run: Run, compare: Callable[[], None], *, fresh: bool) -> bool:
    """Read the inputs, begin the Run and say what it is; False where nothing is left to do."""
    with _tokenising() as progress:
        data_key = read_inputs(plan.job, progress, _CONSOLE.print)
    before = None  # and a job.toml that can't be read is written anew
    with suppress(InputError):
        before = run.job() if run.exists else None
    if not fresh:
        compare()
    is_left = begin_run(run, plan, data_key, before, fresh=fresh)
    if is_left and isinstance(plan.job.model, Model):
        keep_tokenizer(run, plan.job.data, plan.job.train.weights)
    _introduce(plan, run, is_left=is_left)
    if not is_left:
        _say_complete(plan.job, run, before)
    return is_left


def _introduce(plan: Plan, run: Run, *, is_left: bool) -> None:
    """Say what is trained on what, what is expected of it, and from where on."""
    done, steps = progress_of(run, plan.job)[0], plan.job.train.steps
    _CONSOLE.print(_description(plan.job))
    if damage := run.steps().damage:
        _CONSOLE.print(damage)
    for expected in plan.ranked[:1]:
        low, high = map(step_time_text, expected.interval_s)
        _CONSOLE.print(
            f"expected: {step_time_text(expected.step_s)} a step ({low} to {high}), "
            f"{bytes_text(expected.peak_memory_bytes)} on a device (plan.json says why)"
        )
    if is_left and done:
        _CONSOLE.print(f"going on after step {done} of {steps}")


def _say_complete(job: Job, run: Run, before: Job | None) -> None:
    """Show the figures again, and say what would train further."""
    done, best = progress_of(run, job)
    _CONSOLE.print(step_time_table(run.metrics(), run.facts(), has_windows=run.has_windows))
    if before is not None and (changes := _changes(before, job)):
        _CONSOLE.print(f"no step was made with what changed since: {changes}")
    if best.is_over:
        _CONSOLE.print(f"{run.path} stopped early after step {done}: {best.sentence()}.")
        return
    is_own = isinstance(job.model, CustomModel)
    longer, anew = ("train.steps", "fresh=True") if is_own else ("--set train.steps", "--fresh")
    _CONSOLE.print(
        f"{run.path} is complete after {done} steps: train on with {longer}={2 * done}, "
        f"or start over with {anew}.\nreport: {run.report_file}"
    )


def _changes(before: Job, now: Job) -> str:
    """The settings of two Jobs that differ, as "optim.lr 0.001 -> 0.01"; "" where none does."""
    found = [
        f"{name} {'unset' if old is None else old} -> {'unset' if new is None else new}"
        for name, old, new in differing(to_raw(before), to_raw(now))
    ]
    return ", ".join(found[:5]) + (", ..." if found[5:] else "")


def _description(job: Job) -> str:
    layout, model = job.layout, job.model
    what = "own model"
    if isinstance(model, Model | Dlrm | ResNet):
        what = f"{model.num_params / 1e6:.1f} M parameters"
    sample = f" x {job.train.seq_len} tokens" if isinstance(model, Model) else " samples"
    return (
        f"{job.name}: {what} on {layout.num_ranks} x {job.cluster.known_device.name}, "
        f"{layout.summary}, {layout.precision}, "
        f"{job.train.global_batch}{sample} a step in micro-batches of {layout.micro_batch}"
    )


def _device_kind(job: Job) -> str:
    return job.cluster.known_device.kind


@contextmanager
def _tokenising() -> Iterator[Callable[[int, int], None]]:
    """A progress bar that shows itself only where there is something to tokenise."""
    columns = (TextColumn("tokenising"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_CONSOLE, transient=True) as bar:
        task = bar.add_task("tokenising", visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
