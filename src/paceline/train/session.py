"""One rank's part of a run, from joining the others to the report.

`run_rank` is executed on every rank, however it was started. Rank 0 owns the terminal,
metrics.jsonl and the report; the others write to their log only.
"""

import copy
import ctypes
import os
import platform
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store

from paceline.comm.core_share import CoreShare, core_share_of
from paceline.comm.rendezvous import (
    Ranks,
    connect,
    disconnect,
    exit_rank,
    lost_before_begin,
    ranks_from_env,
    set_collective_timeout,
    store_of_run,
)
from paceline.config.job import Job
from paceline.config.layout import Layout
from paceline.config.recommender import Dlrm
from paceline.config.vision import ResNet
from paceline.elastic.membership import Membership
from paceline.elastic.peer_failure import PeerFailureDetector, reserve_s
from paceline.observe.console import Progress, step_time_table
from paceline.observe.memory import memory_recorder
from paceline.observe.metrics import Metrics
from paceline.observe.profile import ProfiledWindows
from paceline.observe.run import Run
from paceline.train.attention_core import attention_choice
from paceline.train.best_evaluation import BestEvaluation
from paceline.train.checkpoint import Checkpointer
from paceline.train.data import prepare
from paceline.train.debug_checks import enabled_checks
from paceline.train.debugging import debug_server, dump_flight_recorder, enable_flight_recorder
from paceline.train.failure import LostPeerError, is_lost_peer, report, report_at_once
from paceline.train.loop import RunContext, read_lag, stateful_parts, train_loop
from paceline.train.memory_owners import memory_owners
from paceline.train.metrics_buffer import Line, MetricsBuffer
from paceline.train.recommendation import click_task
from paceline.train.start import identity
from paceline.train.stopping import StopRequest, exit_with_parent, shield_compile_workers
from paceline.train.task import Task, language_task
from paceline.train.trainer import Trainer
from paceline.train.vision import image_task

# Of glibc's malloc.h.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1

MakeTask = Callable[[Job, Ranks], Task]


def launched_rank(run_path: str, launcher_pid: int) -> None:
    """What each process does that Paceline's launcher started: train the Run's own Job."""
    exit_with_parent(launcher_pid)
    run_launched_rank(Run(Path(run_path)), language_model)


def run_launched_rank(run: Run, make_task: MakeTask) -> None:
    """Train the Run's own Job in a process that Paceline's launcher started, and end with it.

    A rank that fails leaves why to the launcher and is gone at once: neither a checkpoint that is
    being written nor the goodbye of process groups may keep the others waiting.
    """
    try:
        job = run.job()
        ranks = ranks_from_env(job.cluster.known_device.kind)
        assert ranks is not None, "the launcher gives every process a rank"
        store = store_of_run(ranks) if job.comm.local.min_workers else None
        run_rank(job, run, ranks, make_task, store, launched=True)
    except BaseException as error:
        report(error)
        exit_rank(1)


def language_model(job: Job, ranks: Ranks) -> Task:
    """The Task of a Job that is complete in itself."""
    if isinstance(job.model, Dlrm):
        return click_task(job, ranks)
    if isinstance(job.model, ResNet):
        return image_task(job, ranks)
    return language_task(job, ranks, prepare(job.data))


def run_rank(
    job: Job,
    run: Run,
    ranks: Ranks,
    make_task: MakeTask,
    store: Store | None = None,
    *,
    launched: bool = False,
) -> nn.Module:
    """Train as one of the ranks of a run.

    Args:
        job: concrete, and already written to the Run.
        make_task: builds module, loss and batches on this rank.
        store: where workers meet that may be lost, and share no process group.
        launched: whether Paceline's launcher waits for this process.

    Returns:
        the trained module, wrapped as the layout says.
    """
    assert job.is_concrete, "nothing is resolved after the plan"
    with ExitStack() as stack:
        stop = StopRequest(run.stop_file)
        stack.callback(stop.close)
        if job.layout.compile:
            shield_compile_workers()
        if ranks.device_type == "cpu":
            keep_freed_memory()
        if store is None:
            enable_flight_recorder(run.log_folder)
            connect(ranks, priority=job.comm.priority)
        if ranks.world_size > 1:
            log = run.log_folder / f"rank{ranks.rank}.log"
            back = _log_to(log, keep_stdout=ranks.is_first)
            if not launched:  # there is no launcher that could say why this rank failed
                stack.callback(back)
        if store is None:
            stack.enter_context(_together(job, run, ranks))
        with report_at_once():
            module = _train(job, run, ranks, make_task, store, stop, stack)
    disconnect()
    return module


def _train(
    job: Job,
    run: Run,
    ranks: Ranks,
    make_task: MakeTask,
    store: Store | None,
    stop: StopRequest,
    stack: ExitStack,
) -> nn.Module:
    """Train; what is opened for it is closed with the stack."""
    cores = core_share_of(ranks)
    torch.set_num_threads(cores.own)
    stack.enter_context(debug_server(job.observe.debug_port, ranks))
    torch.manual_seed(job.train.seed)
    task = make_task(job, ranks)
    torch.manual_seed(job.train.seed + ranks.rank)  # dropout differs from rank to rank
    reporter = stack.enter_context(RunReporter(job, run, ranks, task, cores))
    membership = None if store is None else _membership(job, ranks, store, reporter)
    trainer = Trainer.of(job, ranks, task, membership)
    for exchange in stateful_parts(trainer).values():
        reporter.say(exchange.describe())
    if (attention := attention_choice(job, ranks.device)) is not None:
        reporter.say(f"attention by {attention.backend}: {attention.why}")
    if task.tell_by is not None:
        task.tell_by(reporter.say)
    if task.tables is not None:
        stack.callback(task.tables.close)
        task.tables.open(run.path / "tables", run.checkpoint_folder, reporter.tell)
    context = _run_context(job, run, trainer, stop, reporter)
    done = train_loop(trainer, task, context)
    reporter.conclude(done, context.best)
    if trainer.update.ema is not None:
        trainer.update.ema.take()
    if membership is not None:
        membership.close()
    return trainer.module


def _membership(job: Job, ranks: Ranks, store: Store, reporter: "RunReporter") -> Membership:
    least = job.comm.local.min_workers
    return Membership(store, ranks.rank, job.comm.timeout_s, least, reporter.tell)


@contextmanager
def _together(job: Job, run: Run, ranks: Ranks) -> Iterator[None]:
    """Let no rank wait longer than the Job allows, and say who is missing when one waits in vain.

    Raises:
        LostPeerError: another rank is lost.
    """
    if ranks.world_size == 1:
        yield
        return
    timeout_s = job.comm.timeout_s
    set_collective_timeout(timeout_s - reserve_s(timeout_s))
    try:
        failure_detector = PeerFailureDetector.of_this_run(ranks, timeout_s)
    except RuntimeError as error:  # the store is gone, or can't be reached any more
        raise LostPeerError(str(lost_before_begin(ranks, error))) from error
    with failure_detector:
        try:
            yield
        except Exception as error:
            if not is_lost_peer(error):
                failure_detector.tell(error)
                raise
            kept = dump_flight_recorder(run.log_folder, ranks.rank)
            sentence = failure_detector.explain(error)
            traceback.print_exc()  # to the log
            print(f"the last collectives of this rank are in {kept}", file=sys.stderr)
            raise LostPeerError(sentence) from error


def _run_context(
    job: Job, run: Run, trainer: Trainer, stop: StopRequest, reporter: "RunReporter"
) -> RunContext:
    ranks = trainer.ranks
    lag, most_bad_steps = read_lag(job, ranks.device_type)
    keeps_state = ranks.is_first or not job.comm.local.min_workers
    return RunContext(
        checkpointer=_checkpointer(job, run, reporter) if keeps_state else None,
        windows_from=lambda first: ProfiledWindows(
            run.trace_folder,
            ranks.rank,
            job.observe.profile_every,
            job.observe.profile_steps,
            first_step=first,
            axis=_only_axis(job.layout),
            memory=memory_recorder(
                run.memory_folder, ranks.device, partial(memory_owners, trainer)
            ),
        ),
        stop=stop,
        metrics_buffer=MetricsBuffer(reporter.record, lag, most_bad_steps),
        identity=identity(job, trainer.task.data_key),
        best=BestEvaluation(job),
    )


def _checkpointer(job: Job, run: Run, reporter: "RunReporter") -> Checkpointer:
    return Checkpointer(
        run.checkpoint_folder,
        keep_last=job.checkpoint.keep_last,
        keep_every=job.checkpoint.keep_every,
        say=reporter.say,
    )


def _only_axis(layout: Layout) -> str | None:
    """The axis of collectives that don't tell theirs; None where it could be one of several."""
    used = [axis for axis in ("dp", "fsdp", "tp", "pp", "cp") if getattr(layout, axis) != 1]
    return (used or ["dp"])[0] if len(used) < 2 else None


class RunReporter:
    """What rank 0 writes and says about a run; silent on the other ranks."""

    def __init__(self, job: Job, run: Run, ranks: Ranks, task: Task, cores: CoreShare) -> None:
        self.job, self.run, self.task = job, run, task
        self.speaks = ranks.is_first
        self._log = run.log_folder / "rank0.log"
        self.facts = facts_of(job, ranks, task, cores) if self.speaks else {}
        self.progress = Progress(job.train.steps, task.unit)
        self._metrics: Metrics | None = None
        self._trouble: str | None = None

    def __enter__(self) -> "RunReporter":
        if self.speaks:
            self.run.log_folder.mkdir(exist_ok=True)
            self.run.write_json("facts.json", self.facts)
        return self

    def __exit__(self, *_failure: object) -> None:
        if self.speaks:
            self.progress.close()
            if self._metrics is not None:
                self._metrics.close()

    def say(self, sentence: str) -> None:
        """Tell the person at the terminal, and the log."""
        if self.speaks:
            self.progress.say(sentence)
            with suppress(OSError), self._log.open("a") as log:  # a full disk is no reason to stop
                print(time.strftime("%Y-%m-%d %H:%M:%S"), sentence, file=log)

    def tell(self, sentence: str) -> None:
        """As `say`; where this rank doesn't speak, into its own log."""
        if self.speaks:
            self.say(sentence)
        else:
            print(time.strftime("%Y-%m-%d %H:%M:%S"), sentence, file=sys.stderr, flush=True)

    def record(self, line: Line) -> None:
        """Write a step's line; the first one decides from where a resumed Run goes on."""
        if not self.speaks:
            return
        if self._metrics is None:
            first = line["step"] - 1
            self._metrics = Metrics(self.run, self.job.observe, self.task.unit, first)
        trouble = self._metrics.record(line)
        self._call_back(line)
        if trouble and trouble != self._trouble:
            self.say(f"{trouble}; the run goes on.")
        self._trouble = trouble
        self.progress.update(line)

    def _call_back(self, line: Line) -> None:
        loop_options = self.task.loop_options
        if loop_options.on_step is not None:
            loop_options.on_step(copy.deepcopy(line))
        if loop_options.on_eval is not None and "eval_loss" in line:
            loop_options.on_eval(copy.deepcopy(line))

    def conclude(self, done: int, best: BestEvaluation) -> None:
        """Show where the time went and write the report."""
        if not self.speaks:
            return
        self.progress.close()
        lines, has_windows = self.run.metrics(), self.run.has_windows
        self.progress.say(step_time_table(lines, self.facts, has_windows=has_windows))
        if best.is_over:
            self.say(f"stopped early after step {done}: {best.sentence()}.")
        elif done < self.job.train.steps:
            self.say(
                f"stopped after step {done} of {self.job.train.steps}, checkpoint kept; "
                f"go on with: paceline train {self.run.path}"
            )
        # Here, because only this rank needs it, and only at the end.
        from paceline.explain.page import write_report

        try:
            self.progress.say(f"report: {write_report(self.run, self.say)}")
        except Exception as error:  # a page is no reason for a run that has trained to fail
            self.say(f"report.html was not written ({error}).")


def facts_of(job: Job, ranks: Ranks, task: Task, cores: CoreShare) -> dict[str, Any]:
    """What a reader of the Run wants to know besides the Job."""
    device = job.cluster.known_device
    peak = device.peak(job.layout.precision)
    return {
        **software(),
        "device": device.name,
        "num_ranks": ranks.world_size,
        "threads_per_rank": torch.get_num_threads(),
        "num_ranks_of_host": cores.ranks,
        "num_cores": cores.together,
        "num_cores_of_host": cores.of_host,
        "checking": enabled_checks(),
        "unit": task.unit,
        "train_flops_per_token": task.train_flops_per_unit,
        "peak_flops": peak.value if peak else None,
        "peak_source": peak.source if peak else None,
        "started": time.time(),
        **task.facts,
    }


def software() -> dict[str, Any]:
    """Versions of what runs here, and the host's name."""
    found = {
        "paceline": version("paceline"),
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
    }
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        if dist.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _commit() -> str | None:
    """Commit of the folder the run was started in, None outside a git checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return (
            subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
            or None
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def keep_freed_memory() -> None:
    """Let glibc reuse the memory of activations instead of giving it back after every step.

    The kernel would clear it again, page by page, in the next one (33,000 page faults a step, 2-4 %
    of its time, see docs/decisions/overhead.md). Other C libraries have no such switch and are left
    alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc allows
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _log_to(file: Path, *, keep_stdout: bool) -> Callable[[], object]:
    """Send this process's standard error (and output) to its log, below Python as well.

    Libraries write warnings from C++, once per rank; on the terminal they would tear the progress
    line to pieces.

    Returns:
        a function that gives standard error back to the terminal.
    """
    terminal = os.dup(2)
    file.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    if not keep_stdout:
        os.dup2(log, 1)
    os.close(log)
    warnings.simplefilter("default")
    return lambda: os.dup2(terminal, 2)
