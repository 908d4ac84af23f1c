"""`paceline train`: run a Job on every device of this machine, or as one of the ranks given."""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial

import tomli_w
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.comm.rendezvous import (
    Found,
    Ranks,
    connect,
    disconnect,
    exit_rank,
    word_from_first_rank,
)
from paceline.config.errors import InputError, RunError, StoppedInTimeError
from paceline.config.job import Job, JobSpec, differing, to_raw
from paceline.elastic.signals import leaving_until_begun
from paceline.observe.console import step_time_table
from paceline.observe.generations import generations_of
from paceline.observe.run import Run
from paceline.plan.calibrate import calibrate_from_run
from paceline.plan.resolve import Plan
from paceline.render.figures import bytes_text, time_text
from paceline.train.elastic_launch import train_elastic
from paceline.train.energy_log import energy_logged
from paceline.train.families import family_of, task_of
from paceline.train.generations import run_elastic_rank
from paceline.train.launch import launch
from paceline.train.length import length_in_steps
from paceline.train.session import MakeTask, ranks_of, run_rank
from paceline.train.start import (
    begin_run,
    locked_run,
    progress_of,
    read_inputs,
    was_asked_to_stop,
    with_measured_speed,
)
from paceline.train.stopping import ask_by_file
from paceline.train.this_machine import resolve_on_this_machine

_CONSOLE = Console(highlight=False, soft_wrap=True)


def train_job(
    job: JobSpec,
    run: Run,
    *,
    fresh: bool,
    make_task: MakeTask = task_of,
    program: Sequence[str] = (),
    num_samples: int | None = None,
    compare: Callable[[Job], None] = lambda _job: None,
    fits_cluster: bool = True,
) -> bool:
    """Train a Job in a Run; one that exists goes on from its newest good checkpoint.

    In this process where it is a rank already or the only one, else in ranks that it starts and
    waits for.

    Args:
        job: what a person asks for.
        run: may not exist yet.
        fresh: start over, deleting what an earlier start of the same name left.
        make_task: what a rank trains.
        program: what each rank runs, and its arguments; none: ranks come from the forkserver.
        num_samples: one epoch of a person's own data, None where nobody can tell.
        compare: says or refuses what is another than before, where a Run goes on.
        fits_cluster: whether constants are fitted to its steps, for the next plan.

    Returns:
        whether this process trained, and not others or nobody.

    Raises:
        InputError: wrong input; nothing was written.
        RunError: the run ended early.
    """
    if job.model.is_own and make_task is task_of:
        raise InputError(
            'the module of model.family = "custom" is only in the script that trains it: start '
            "that script, which calls paceline.train."
        )
    with ExitStack() as held:
        tell = partial(ask_by_file, run, within_s=job.elastic.save_within_s)
        begin = held.enter_context(leaving_until_begun(job.elastic, tell))
        since = time.time()
        with _tokenising() as progress:
            plan = resolve_on_this_machine(length_in_steps(job, progress, num_samples))
        plan = with_measured_speed(plan, _CONSOLE.print)
        if plan.job.elastic.is_on:
            is_ready = partial(_is_ready, plan, run, compare, fresh=fresh, since=since)
            rank = program or partial(run_elastic_rank, run, make_task)
            train_elastic(plan.job, job, run, rank, is_ready, begin, _CONSOLE.print)
            return False
        job, ranks = plan.job, ranks_of(plan.job)
        ranks = connect(ranks, hosts=job.cluster.hosts, priority=job.comm.priority)
        try:
            is_begun = _is_begun(plan, run, ranks, held, compare, fresh=fresh, since=since)
        except RunError as error:
            if job.elastic.asks_again and was_asked_to_stop(run, since):
                raise StoppedInTimeError from error  # the one that is lost has heard it
            raise
        if not is_begun:
            disconnect()
            return False
        begin()
        launches = ranks.world_size == 1 and job.layout.num_ranks > 1
        if ranks.local_rank == 0:
            held.enter_context(_energy_logged(run, job, ranks))
        if launches:
            entry = program or partial(run_rank, run, make_task)
            launch(run, job.layout.num_ranks, entry, job.elastic)
        else:
            run_rank(run, make_task, job, ranks)
        if ranks.is_first and fits_cluster:
            fit_cluster_from_run(plan, run)
        return not launches


def _energy_logged(run: Run, job: Job, ranks: Ranks) -> AbstractContextManager[None]:
    """As the first process of this node, for all of its ranks."""
    here = job.layout.num_ranks if ranks.world_size == 1 else ranks.local_world_size
    return energy_logged(run, socket.gethostname(), here if ranks.device_type == "cuda" else 0)


def _is_begun(
    plan: Plan,
    run: Run,
    ranks: Ranks,
    held: ExitStack,
    compare: Callable[[Job], None],
    *,
    fresh: bool,
    since: float,
) -> bool:
    """Begin the Run as its first rank; return on every rank whether there is anything to train.

    Args:
        held: keeps the Run locked until it closes.
        since: unix time of this start.
    """
    found: Found = "done"
    try:
        if ranks.is_first:
            held.enter_context(locked_run(run))
            if _is_ready(plan, run, compare, fresh=fresh, since=since):
                found = "ready"
    except (InputError, OSError):
        word_from_first_rank("refused", ranks)
        raise
    # The other ranks wait here for what rank 0 finds.
    found = word_from_first_rank(found, ranks)
    if found == "refused":
        exit_rank(2)  # rank 0 says why
    return found == "ready"


def fit_cluster_from_run(plan: Plan, run: Run) -> None:
    """Write down what the steps of a predicted Run say about the machine, for the next plan."""
    if plan.ranked and plan.job.model.knows_layers:
        run.write("cluster.toml", tomli_w.dumps(to_raw(calibrate_from_run(run))))


def _is_ready(
    plan: Plan, run: Run, compare: Callable[[Job], None], *, fresh: bool, since: float
) -> bool:
    """Read the inputs, begin the Run and say what it is; False where nothing is left to do."""
    with _tokenising() as progress:
        data_key = read_inputs(plan.job, progress, _CONSOLE.print)
    before = None  # and a job.toml that can't be read is written anew
    with suppress(InputError):
        before = run.job() if run.exists else None
    if not fresh:
        compare(plan.job)
    say = _CONSOLE.print
    is_left = begin_run(run, plan, data_key, before, fresh=fresh, since=since, say=say)
    if is_left:
        family_of(plan.job.model).keep_inputs(run, plan.job)
    _introduce(plan, run, is_left=is_left)
    if not is_left:
        _say_complete(plan.job, run, before)
    return is_left


def _introduce(plan: Plan, run: Run, *, is_left: bool) -> None:
    """Say what is trained on what, what is expected of it, and from where on."""
    done, steps = progress_of(run, plan.job)[0], plan.job.train.steps
    _CONSOLE.print(_description(plan.job))
    for damage in filter(None, (run.steps().damage, run.events().damage)):
        _CONSOLE.print(damage)
    for expected in plan.ranked[:1]:
        low, high = map(time_text, expected.interval_s)
        _CONSOLE.print(
            f"expected: {time_text(expected.step_s)} a step ({low} to {high}), "
            f"{bytes_text(expected.peak_memory_bytes)} on a device (plan.json says why)"
        )
    if is_left and done:
        _CONSOLE.print(f"going on after step {done} of {steps}")


def _say_complete(job: Job, run: Run, before: Job | None) -> None:
    """Show the figures again, and say what would train further."""
    done, best = progress_of(run, job)
    found, has_windows = generations_of(run), run.has_windows
    lines, facts = run.metrics(), run.facts()
    _CONSOLE.print(step_time_table(lines, facts, has_windows=has_windows, generations=found))
    if before is not None and (changes := _changes(before, job)):
        _CONSOLE.print(f"no step was made with what changed since: {changes}")
    if best.is_over:
        _CONSOLE.print(f"{run.path} stopped early after step {done}: {best.sentence()}.")
        return
    if not run.report_file.exists():  # nobody wanted one while it trained
        from paceline.explain.page import write_report

        write_report(run, _CONSOLE.print)
    by_script = job.model.is_own
    longer, anew = ("train.steps", "fresh=True") if by_script else ("--set train.steps", "--fresh")
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
    known = model.num_params
    what = "own model" if known is None else f"{known / 1e6:.1f} M parameters"
    return (
        f"{job.name}: {what} on {layout.num_ranks} x {job.cluster.device.name}, "
        f"{layout.summary}, {layout.precision}, "
        f"{model.batch_text(job.train.global_batch, job.train.seq_len)} a step in micro-batches of "
        f"{layout.micro_batch}"
    )


@contextmanager
def _tokenising() -> Iterator[Callable[[int, int], None]]:
    """A progress bar that shows itself only where there is something to tokenise."""
    columns = (TextColumn("tokenising"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_CONSOLE, transient=True) as bar:
        task = bar.add_task("tokenising", visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
