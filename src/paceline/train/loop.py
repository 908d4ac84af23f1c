"""The loop: what happens around the steps of a run.

Every rank executes the same lines in the same order; rank 0 also writes the Run and speaks.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function as span

from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.observe.garbage import GarbageCollections
from paceline.observe.profile import ProfiledWindows
from paceline.parallel.exposed_all_reduce import ExposedAllReduce
from paceline.parallel.replicas import COMM_SECTION, ROUNDS_SECTION, Replicas
from paceline.train.best_evaluation import BestEvaluation
from paceline.train.checkpoint import (
    Checkpointer,
    FoundCheckpoint,
    restore_rng_state,
    restore_training_state,
    rng_state,
    training_state,
)
from paceline.train.checkpoint.files import TensorEntry
from paceline.train.elastic_start import join_workers, open_membership, welcome_workers
from paceline.train.ema import EMA_SECTION, Ema
from paceline.train.metrics_buffer import Line, MetricsBuffer, perplexity
from paceline.train.rank_stats import memory_bytes
from paceline.train.stopping import StopRequest
from paceline.train.task import Step, Task
from paceline.train.trainer import Trainer

# From 65,536 the fp16 loss scale may halve this often before it is below one.
_FP16_SCALE_HALVINGS = 16
# Under this name a checkpoint keeps what a worker under local updates, but the first, has.
WORKER_SECTION = "worker"
_OWED = {
    COMM_SECTION: "nothing is compressed now: what compression still owed",
    ROUNDS_SECTION: "workers meet in every step now: what they had not yet agreed on",
    EMA_SECTION: "no mean of the weights is kept now: that",
}


@dataclass(frozen=True)
class RunContext:
    """What a run is kept in, watched by and stopped with."""

    checkpointer: Checkpointer | None
    """None on a worker whose state is its own: then the first one's is the run's."""
    windows_from: Callable[[int], ProfiledWindows]
    """Maps the number of the first step to the windows that are profiled from there on."""
    stop: StopRequest
    metrics_buffer: MetricsBuffer
    identity: dict[str, Any]
    """Kept in every checkpoint: what may not change when the run goes on."""
    best: BestEvaluation


def train_loop(trainer: Trainer, task: Task, context: RunContext) -> int:
    """Train from the newest good checkpoint to the Job's last step, or until asked to stop.

    Returns:
        the number of optimizer steps done since the run began.

    Raises:
        RunError: too many bad steps in a row.
        InputError: evaluations don't have the figure that the Job wants them judged by.
    """
    job, metrics_buffer = trainer.job, context.metrics_buffer
    if job.checkpoint.best is not None and task.eval_steps is None:
        raise InputError(
            f"checkpoint.best = {job.checkpoint.best!r} is judged by evaluations and there are "
            "none: give eval_data, or leave it out."
        )
    done = first = _begin(trainer, context)
    kept = None  # what a checkpoint says of evaluations that was written before the last one
    steps = _resumed_steps(trainer, task, first)
    ended = time.perf_counter()
    with (
        context.windows_from(first + 1) as windows,
        GarbageCollections() as garbage,
        trainer.stats.clock,
    ):
        while (
            done < job.train.steps and not metrics_buffer.stop_wanted and not context.best.is_over
        ):
            began = time.perf_counter()
            between_s = began - ended
            with span("paceline.step"):
                stall_s = _save_if_due(trainer, context, done, first)
                with span("paceline.data_wait"):
                    asked = time.perf_counter()
                    micro_batches = next(steps)
                    data_wait_s = time.perf_counter() - asked
                result = trainer.step(done, micro_batches, bool(context.stop))
            ended = time.perf_counter()
            step_time_s = ended - began
            done += 1
            line = _line(trainer, task, done, step_time_s)
            line |= {"between_s": between_s, "gc_s": garbage.take_s()}
            if context.checkpointer is not None:
                line["checkpoint_cpu_s"] = context.checkpointer.take_cpu_s()
            line["terms"] = _measured_terms(
                step_time_s, data_wait_s, stall_s, trainer.passes.exposed_all_reduce
            )
            if _evaluation_due(job, task, done):
                if done == job.train.steps and not job.comm.local.min_workers:
                    # If it fails on one of several ranks, these can't agree on a checkpoint any
                    # more, but threads write on that have begun.
                    _save(trainer, context, done)
                    kept = context.best.facts()
                try:
                    line |= (evaluation := _evaluation(trainer, task))
                    context.best.see(evaluation, done)
                except Exception:
                    metrics_buffer.add(line, result)
                    _keep(trainer, context, done, has_begun=kept is not None)
                    raise
            metrics_buffer.add(line, result)
            if trainer.agreement.meet(done):
                metrics_buffer.catch_up()
                welcome_workers(trainer, done, is_over=metrics_buffer.stop_wanted)
            terms = windows.step()
            if not windows.is_open:
                metrics_buffer.release(terms)
            if context.checkpointer is not None:
                context.checkpointer.poll()
    trainer.agreement.meet(done, at_once=True)
    metrics_buffer.settle()
    if done > first and kept != context.best.facts():
        _save(trainer, context, done)
    if context.checkpointer is not None:
        context.checkpointer.finish()
    return done


def _keep(trainer: Trainer, context: RunContext, done: int, *, has_begun: bool) -> None:
    """Keep what was trained before an evaluation failed: by the checkpoint that has begun, or by
    one that a rank makes alone."""
    with suppress(RuntimeError):  # of ranks that are gone
        if has_begun:
            context.metrics_buffer.settle()
        elif trainer.ranks.world_size == 1:
            _save(trainer, context, done)
        if context.checkpointer is not None:
            context.checkpointer.finish()


def read_lag(job: Job, device_type: str) -> tuple[int, int]:
    """How late results are read, and how many bad steps in a row the loop stands, for a
    MetricsBuffer.

    On CUDA the host launches a step before it reads the last one; on a CPU nothing is ahead. fp16
    begins with a loss scale that is meant to overflow until it has halved enough.
    """
    allowance = _FP16_SCALE_HALVINGS if job.layout.precision == "fp16" else 0
    # Workers that step each for itself read results when they meet, never earlier.
    is_local = job.comm.local.method != "none"
    lag = job.train.steps if is_local else int(device_type == "cuda")
    return lag, job.train.max_bad_steps + allowance


def _begin(trainer: Trainer, context: RunContext) -> int:
    """Restore what there is, and come together where workers may come and go; return the steps."""
    if context.checkpointer is None:
        done, context.metrics_buffer.stop_wanted = join_workers(trainer)
        return done
    done = _restore(trainer, context.checkpointer, context)
    open_membership(trainer, done)
    return done


def _restore(trainer: Trainer, checkpointer: Checkpointer, context: RunContext) -> int:
    """Load the newest good checkpoint, if there is one; return the steps it had done."""
    found = checkpointer.latest_good()
    if trainer.task.tables is not None:
        trainer.task.tables.load(found.step if found else 0)
    if found is None:
        return 0
    state = training_state(trainer.module, trainer.update.optimizer, found)
    rng = rng_state()
    owed = state_to_load(trainer, found)
    own = (
        worker_section(state, trainer.ranks.rank, found) if trainer.replicas.steps_alone else state
    )
    facts = checkpointer.load(found, {**own, **owed, "rng": rng})
    restore_training_state(trainer.module, trainer.update.optimizer, state)
    restore_rng_state(rng)
    for section, exchange in stateful_parts(trainer).items():
        exchange.load(owed[section])
    for section in _left_behind(trainer, found):
        checkpointer.tell(f"{_OWED[section]} in the checkpoint of step {found.step} is dropped.")
    trainer.update.loss_scale.load_state_dict(facts["loss_scale"])
    trainer.update.rates.put_back(facts.get("groups", []))
    context.best.load(facts.get("best", {}))
    context.metrics_buffer.num_skipped = facts["skipped"]
    return facts["step"]


def _left_behind(trainer: Trainer, found: FoundCheckpoint) -> list[str]:
    """Sections that nothing of this run takes: the Job's comm is another one now."""
    saved = {name.partition(".")[0] for name in found.manifest.tensors}
    return [section for section in _OWED if section in saved - stateful_parts(trainer).keys()]


def state_to_load(trainer: Trainer, found: FoundCheckpoint) -> dict[str, dict[str, Any]]:
    """Room for this rank's part of what compression owed, or of what workers share; none where
    nothing is compressed now, and there are no such workers."""
    owed: dict[str, dict[str, Any]] = {}
    for section, exchange in stateful_parts(trainer).items():
        entries = {
            name.removeprefix(f"{section}."): entry
            for name, entry in found.manifest.tensors.items()
            if name.startswith(f"{section}.")
        }

        def room(path: str, entries: dict[str, TensorEntry] = entries) -> Tensor:
            entry = entries[path]
            return torch.empty(entry.size, dtype=entry.torch_dtype, device=trainer.ranks.device)

        owed[section] = exchange.targets(entries, room)
    return owed


def stateful_parts(trainer: Trainer) -> dict[str, Replicas | Ema]:
    """What has a state of its own in a checkpoint, by its section."""
    replicas, ema = trainer.replicas, trainer.update.ema
    kept: dict[str, Replicas | Ema] = (
        {} if replicas.section is None else {replicas.section: replicas}
    )
    return kept if ema is None else {**kept, EMA_SECTION: ema}


def worker_section(
    state: dict[str, Any], rank: int, saved: FoundCheckpoint | None
) -> dict[str, Any]:
    """Where a worker that steps for itself keeps parameters and optimizer in a checkpoint.

    The first worker's stand where a run without workers keeps its own. A worker that was not there
    when it was saved takes over those of another one.

    Args:
        state: of the worker.
        rank: of the worker.
        saved: the checkpoint to load from, None to save.
    """
    if saved is not None:
        heads = {name.partition(".")[0] for name in saved.manifest.tensors}
        rank %= 1 + sum(head.startswith(WORKER_SECTION) for head in heads)
    return {f"{WORKER_SECTION}{rank}": state} if rank else state


def _save_if_due(trainer: Trainer, context: RunContext, done: int, first: int) -> float:
    every = trainer.job.checkpoint.every
    due = done > first and ((every > 0 and done % every == 0) or done == context.best.step)
    with span("paceline.checkpoint_stall"):
        return _save(trainer, context, done) if due else 0.0


def _save(trainer: Trainer, context: RunContext, done: int) -> float:
    """Start a checkpoint of the state after `done` steps; return the seconds the run waited."""
    trainer.agreement.on_buffers()
    trainer.agreement.meet(done, at_once=True)
    context.metrics_buffer.settle()  # a checkpoint never runs ahead of metrics.jsonl
    if context.checkpointer is None:
        return 0.0
    if trainer.task.tables is not None:
        trainer.task.tables.save(done)  # first: a checkpoint is complete only with its tables
    facts = {
        "step": done,
        "samples": done * trainer.job.train.global_batch,
        "skipped": context.metrics_buffer.num_skipped,
        "loss_scale": trainer.update.loss_scale.state_dict(),
        "identity": context.identity,
        "best": context.best.facts(),
        "groups": trainer.update.rates.moved(),
    }
    context.checkpointer.best = context.best.step or None
    state = training_state(trainer.module, trainer.update.optimizer)
    if trainer.replicas.steps_alone:
        state = worker_section(state, trainer.ranks.rank, None)
    kept = {section: exchange.state() for section, exchange in stateful_parts(trainer).items()}
    return context.checkpointer.save(done, {**state, **kept, "rng": rng_state()}, facts)


def _resumed_steps(trainer: Trainer, task: Task, first: int) -> Iterator[Step]:
    """The batches from step `first` on, after whatever a resumed run has to do before its step."""
    consumed = first * trainer.job.train.global_batch
    if first and trainer.needs_warm_up:
        trainer.warm_up(next(task.steps_from(consumed)))
    return task.steps_from(consumed)


def _line(trainer: Trainer, task: Task, done: int, step_time_s: float) -> Line:
    """What is known of a step when it has been launched; loss and norms come when it is read."""
    job = trainer.job
    units = job.train.global_batch * task.units_per_sample
    rate = units / step_time_s
    return {
        "step": done,
        task.unit: done * units,
        "lr": trainer.update.lr,
        "step_time_s": step_time_s,
        "profiled": False,
        f"{task.unit}_per_s": rate,
        "mfu": _mfu(job, task, rate),
        "memory_bytes": memory_bytes(trainer.ranks.device),
        "time": time.time(),
    }


def _mfu(job: Job, task: Task, units_per_s: float) -> float | None:
    """Model FLOPs done over those the devices could do at their peak; None where either is unknown.

    The peak is that of the arithmetic asked for; fp32 products run in plain fp32.
    """
    peak = job.cluster.known_device.peak(job.layout.precision)
    if peak is None or task.train_flops_per_unit is None:
        return None
    return units_per_s * task.train_flops_per_unit / (peak.value * job.layout.num_ranks)


def _measured_terms(
    step_time_s: float,
    data_wait_s: float,
    stall_s: float,
    exposed_all_reduce: ExposedAllReduce | None,
) -> dict[str, float]:
    """The terms a host clock can tell apart; only a profile splits the rest."""
    known = {"data_wait": data_wait_s, "checkpoint_stall": stall_s}
    if exposed_all_reduce is not None:
        known["exposed_comm.dp"] = exposed_all_reduce.seconds
    return known | {"unattributed": step_time_s - sum(known.values())}


def _evaluation_due(job: Job, task: Task, done: int) -> bool:
    every = job.train.eval_every
    is_last = done == job.train.steps
    return task.eval_steps is not None and (is_last or (every > 0 and done % every == 0))


def _evaluation(trainer: Trainer, task: Task) -> Line:
    """An evaluation's figures; training goes on with random numbers as if there had been none."""
    assert task.eval_steps is not None
    began, generators = time.perf_counter(), rng_state()
    loss, figures = trainer.evaluate(list(task.eval_steps()))
    restore_rng_state(generators)
    line: Line = {"eval_loss": loss, "eval_s": time.perf_counter() - began}
    if figures:
        line["eval_figures"] = figures
    is_language = task.unit == "tokens"
    more = {"eval_perplexity": perplexity(loss)} if is_language else {}
    return line | more | (task.eval_figures() if task.eval_figures else {})
