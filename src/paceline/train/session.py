"""One rank's part of a run, from joining the others to the report.

`run_rank` is executed on every rank, however it was started. Rank 0 owns the terminal,
metrics.jsonl and the report; the others write to their log only.
"""

import copy
import os
import platform
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.comm.core_share import CoreShare, core_share_of
from paceline.comm.rendezvous import (
    Ranks,
    connect,
    disconnect,
    lost_before_begin,
    ranks_from_env,
    set_collective_timeout,
    store_of_ranks,
)
from paceline.config.errors import EXIT_SAVED, RunError, StoppedInTimeError
from paceline.config.job import Job
from paceline.elastic.peer_failure import PeerFailureDetector, reserve_s
from paceline.machine.freed_memory import keep_freed_memory
from paceline.observe.console import Progress, step_time_table
from paceline.observe.events import append_event
from paceline.observe.generations import generations_of
from paceline.observe.metrics import Metrics
from paceline.observe.run import Run
from paceline.observe.trackers import Trackers
from paceline.train.best_evaluation import BestEvaluation
from paceline.train.called import Called
from paceline.train.debug_checks import enabled_checks
from paceline.train.debugging import debug_server, dump_flight_recorder, enable_flight_recorder
from paceline.train.failure import LostPeerError, is_lost_peer, report_at_once
from paceline.train.kept_state import KeptState
from paceline.train.loop import train_loop
from paceline.train.metrics_buffer import Line
from paceline.train.run_context import RunContext
from paceline.train.starting_weights import parent_of
from paceline.train.stopping import StopRequest, shield_compile_workers
from paceline.train.task import Task
from paceline.train.trainer import Trainer

# How long a generation that is over waits for trackers.
_TRACKERS_S = 0.5

MakeTask = Callable[[Job, Ranks], Task]


def run_rank(
    run: Run, make_task: MakeTask, job: Job | None = None, ranks: Ranks | None = None
) -> nn.Module:
    """Train as one of the ranks of a run.

    Args:
        run: the Job is written there already.
        make_task: builds module, loss and batches on this rank.
        job: concrete; None: the Run's.
        ranks: this process's place; None: what Paceline's launcher says, which waits for it.

    Returns:
        the trained module, wrapped as the layout says.

    Raises:
        StoppedInTimeError: the run was stopped before its end, and is to be started again.
    """
    job = run.job() if job is None else job
    is_launched, ranks = ranks is None, ranks or ranks_of(job)
    with process_of_rank(job, run) as stop, _left_by_others(stop):
        stop.speaks = ranks.is_first
        with _meeting(job, run, ranks, stop, is_launched=is_launched):
            module = train_together(run, make_task, job, ranks, stop)
    disconnect()
    return module


def train_together(
    run: Run,
    make_task: MakeTask,
    job: Job,
    ranks: Ranks,
    stop: StopRequest,
    kept: KeptState | None = None,
) -> nn.Module:
    """Train as one of ranks that have met, from the newest state on, to the end or a wish to stop.

    An error is left to the launcher before anything closes.

    Args:
        kept: from one generation of an elastic run to the next; None: it is none.

    Returns:
        the trained module, wrapped as the layout says.

    Raises:
        StoppedInTimeError: as `run_rank`.
    """
    stop.speaks = ranks.is_first
    kept = kept or KeptState()
    with ExitStack() as stack, report_at_once():
        cores = core_share_of(ranks)
        torch.set_num_threads(_threads(run, kept, cores))
        stack.enter_context(debug_server(job.observe.debug_port, ranks))
        torch.manual_seed(job.train.seed)
        task = make_task(job, ranks)
        torch.manual_seed(job.train.seed + ranks.rank)  # dropout differs from rank to rank
        reporter = stack.enter_context(RunReporter(job, run, ranks, task, cores))
        trainer = Trainer.of(job, ranks, task)
        trainer.stats.watch = kept.watch
        reporter.introduce(trainer)
        if task.tables is not None:
            stack.callback(task.tables.close)
            task.tables.open(run.path / "tables", run.checkpoint_folder, reporter.tell)

        if task.keep_in is not None and ranks.is_first:
            task.keep_in(run)
        if task.stream is not None:
            # The listener looks at the stop file; who waits would do so fifty times a second.
            task.stream.wait.bind(
                trainer.stats,
                lambda: stop.notice is not None,
                reporter.say,
                store_of_ranks(ranks),
                is_first=ranks.is_first,
            )
            if ranks.is_first:
                stack.enter_context(task.stream.accompany(run, reporter.say))

        def record(line: Line) -> None:
            if ranks.is_first:
                kept.must_be_newest(run)
            reporter.record(line)

        context = RunContext.of(run, trainer, stop, reporter.say, record, kept)
        stack.callback(context.checkpointer.close)
        done = train_loop(trainer, context)
        is_finished = context.best.is_finished(done)
        stop.saved(done, is_finished=is_finished)
        again = stop.asks_again and not is_finished
        reporter.conclude(done, context.best, again=again)
        if trainer.update.ema is not None:
            trainer.update.ema.take()
    if again:
        raise StoppedInTimeError
    return trainer.module


def _threads(run: Run, kept: KeptState, cores: CoreShare) -> int:
    """Of this rank: the same in all generations, for sums depend on it in their last bits."""
    return (run.facts().get("threads_per_rank") if kept.generation else None) or cores.own


def ranks_of(job: Job) -> Ranks:
    """This process's place among a Job's ranks, as a launcher gave it; alone where none did."""
    kind = job.cluster.device.kind
    return ranks_from_env(kind) or Ranks(device_type=kind)


@contextmanager
def process_of_rank(job: Job, run: Run) -> Iterator[StopRequest]:
    """Make this process one in which a rank can train: signals, and what the machine has of memory.

    Yields:
        whether it was asked to stop.
    """
    stop = StopRequest(run, job.elastic)
    if job.layout.compile:
        shield_compile_workers()
    if job.cluster.device.kind == "cpu":
        keep_freed_memory()
    try:
        yield stop
    finally:
        stop.close()


@contextmanager
def _meeting(
    job: Job, run: Run, ranks: Ranks, stop: StopRequest, *, is_launched: bool
) -> Iterator[None]:
    """Join the other ranks that a launcher started: process group and log."""
    with ExitStack() as stack:
        enable_flight_recorder(run.log_folder)
        connect(ranks, priority=job.comm.priority)
        if ranks.world_size > 1:
            log = run.log_folder / f"rank{ranks.rank}.log"
            back = log_to(log, keep_stdout=ranks.is_first)
            if not is_launched:  # there is no launcher that could say why this rank failed
                stack.callback(back)
        stack.enter_context(_together(job, run, ranks, stop))
        with report_at_once():
            yield


@contextmanager
def _left_by_others(stop: StopRequest) -> Iterator[None]:
    """Let a rank that misses others do as they did where all were asked to stop in time."""
    try:
        yield
    except RunError as error:
        is_lost = isinstance(error, LostPeerError) or isinstance(error.__cause__, RuntimeError)
        if is_lost and stop and stop.asks_again:
            raise StoppedInTimeError from error
        raise


@contextmanager
def _together(job: Job, run: Run, ranks: Ranks, stop: StopRequest) -> Iterator[None]:
    """Let no rank wait longer than the Job allows, and say who is missing when one waits in vain.

    Raises:
        LostPeerError: another rank is lost.
        StoppedInTimeError: it has left, as all were asked to.
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
            if stop and stop.asks_again:
                raise StoppedInTimeError from error  # nobody is missing
            kept = dump_flight_recorder(run.log_folder, ranks.rank)
            sentence = failure_detector.explain(error)
            traceback.print_exc()  # to the log
            print(f"the last collectives of this rank are in {kept}", file=sys.stderr)
            raise LostPeerError(sentence) from error


class RunReporter:
    """What rank 0 writes and says about a run; silent on the other ranks."""

    def __init__(self, job: Job, run: Run, ranks: Ranks, task: Task, cores: CoreShare) -> None:
        self.job, self.run, self.task = job, run, task
        self.speaks = ranks.is_first
        self._log = run.log_folder / "rank0.log"
        self.facts = facts_of(job, ranks, task, cores) if self.speaks else {}
        self.progress = Progress(job.train.steps, task.unit)
        self._metrics: Metrics | None = None
        self._trackers: Trackers | None = None
        self._trouble: str | None = None
        self._last_step = 0
        self._called = Called()

    def __enter__(self) -> "RunReporter":
        if self.speaks:
            self.run.log_folder.mkdir(exist_ok=True)
            self.run.write_json("facts.json", self.facts)
            self._trackers = Trackers(self.run, self.job.observe.trackers, self.task.unit)
            wanted = self.task.loop_options
            if self.job.elastic.is_on and (wanted.on_step or wanted.on_eval):
                self._called = Called.of(self.run)
        return self

    def __exit__(self, failure: type[BaseException] | None, *_details: object) -> None:
        if self.speaks:
            self.progress.close()
            if self._metrics is not None:
                self._metrics.close()
            if self._trackers is not None:
                has_failed = failure is not None
                # The next generation of an elastic run waits for this one's end.
                patience_s = _TRACKERS_S if has_failed and self.job.elastic.is_on else None
                for sentence in self._trackers.close(has_failed=has_failed, patience_s=patience_s):
                    self.say(sentence)

    def introduce(self, trainer: Trainer) -> None:
        """Say in which forms the ranks train."""
        for part in trainer.stateful_parts().values():
            self.say(part.describe())
        if self.job.elastic.exact:
            self.say(trainer.replicas.describe())
        for sentence in self.task.sentences:
            self.say(sentence)
        if self.task.tell_by is not None:
            self.task.tell_by(self.say)

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
        """Write a step's line; the first one decides from where a resumed Run goes on, and so does
        one that comes again, after an earlier state came back."""
        if not self.speaks:
            return
        if self._metrics is not None and line["step"] <= self._last_step:
            self._metrics.close()
            self._metrics = None
            if not self._is_made_up(line):
                self._called.go_back(self.run, line["step"] - 1)
        self._last_step = line["step"]
        if self._metrics is None:
            first = line["step"] - 1
            if self._called.step > first:
                self._called.keep(self.run)
            self._metrics = Metrics(self.run, self.job.observe, self.task.unit, first)
            self._tell_lost(self._metrics.taken_back, line)
        trouble = self._metrics.record(line)
        for sentence in () if self._trackers is None else self._trackers.log(line):
            self.say(sentence)
        self._call_back(line)
        if trouble and trouble != self._trouble:
            self.say(f"{trouble}; the run goes on.")
        self._trouble = trouble
        self.progress.update(line)

    def _tell_lost(self, taken_back: list[Line], line: Line) -> None:
        """Keep how long the steps took that are done again: their lines are gone."""
        spans = [
            (one["time"] - (one.get("step_time_s") or 0.0), one["time"])
            for one in taken_back
            # The same step's line comes again where an evaluation was made up.
            if one.get("time") and (one["step"], one["time"]) != (line["step"], line.get("time"))
        ]
        if spans:
            began, ended = min(began for began, _ in spans), max(ended for _, ended in spans)
            append_event(self.run, "taken_back", steps=len(spans), began=began, ended=ended)

    def _is_made_up(self, line: Line) -> bool:
        """Whether only the evaluation after its step was still to be made."""
        return "eval_loss" in line and self._called.evaluation < line["step"] <= self._called.step

    def _call_back(self, line: Line) -> None:
        """Give it to a person's own functions, once: not again where a lost rank's step is done
        again."""
        loop_options, step = self.task.loop_options, line["step"]
        if step > self._called.step:
            if loop_options.on_step is not None:
                loop_options.on_step(copy.deepcopy(line))
            self._called.step = step
        if "eval_loss" in line and step > self._called.evaluation:
            if loop_options.on_eval is not None:
                loop_options.on_eval(copy.deepcopy(line))
            self._called.evaluation = step

    def conclude(self, done: int, best: BestEvaluation, *, again: bool) -> None:
        """Show where the time went and write the report; neither where the run is to be started
        again, for this machine goes away."""
        if not self.speaks:
            return
        self.progress.close()
        code = EXIT_SAVED if again else 0
        state = "finished" if best.is_finished(done) else "saved"
        if not self.job.elastic.is_on:  # else an agent says so
            append_event(self.run, "end", state=state, exit_code=code, step=done)
        if again:
            self.say(f"stopped after step {done}, checkpoint kept; start it again.")
            return
        lines, has_windows = self.run.metrics(), self.run.has_windows
        found = generations_of(self.run)
        table = step_time_table(lines, self.facts, has_windows=has_windows, generations=found)
        self.progress.say(table)
        if best.is_over:
            self.say(f"stopped early after step {done}: {best.sentence()}.")
        elif not best.is_finished(done):
            self.say(
                f"stopped after step {done} of {self.job.train.steps}, checkpoint kept; "
                f"go on with: paceline train {self.run.path}"
            )
        if not self.task.loop_options.reports:
            return
        # Here, because only this rank needs it, and only at the end.
        from paceline.explain.page import write_report

        try:
            self.progress.say(f"report: {write_report(self.run, self.say)}")
        except Exception as error:  # a page is no reason for a run that has trained to fail
            self.say(f"report.html was not written ({error}).")


def facts_of(job: Job, ranks: Ranks, task: Task, cores: CoreShare) -> dict[str, Any]:
    """What a reader of the Run wants to know besides the Job."""
    device = job.cluster.device
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
        "data_key": task.data_key,
        "parent": parent_of(job.train.weights),
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


def log_to(file: Path, *, keep_stdout: bool) -> Callable[[], object]:
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
