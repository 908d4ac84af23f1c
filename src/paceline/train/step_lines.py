"""Step lines: times a step on this rank's host, and makes the line that metrics.jsonl has of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from torch.profiler import record_function as span

from paceline.observe.garbage import GarbageCollections
from paceline.train.metrics_buffer import Line
from paceline.train.rank_stats import memory_bytes
from paceline.train.run_checkpoints import RunCheckpoints
from paceline.train.trainer import Trainer


class StepLines:
    """Use as a context manager around all steps, and `step` around each."""

    def __init__(self, trainer: Trainer, checkpoints: RunCheckpoints, generation: int) -> None:
        self._trainer, self._checkpoints = trainer, checkpoints
        # Of an elastic run, its number.
        self._of_all = {"generation": generation} if generation else {}
        self._garbage = GarbageCollections()
        self._step_ended = time.perf_counter()
        self._between_s = self._step_time_s = self._data_wait_s = 0.0

    def __enter__(self) -> Self:
        self._garbage.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._garbage.__exit__(*failure)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a step."""
        began = time.perf_counter()
        self._between_s = began - self._step_ended
        with span("paceline.step"):
            yield
        self._step_ended = time.perf_counter()
        self._step_time_s = self._step_ended - began

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Time how long the step waits for its samples."""
        with span("paceline.data_wait"):
            asked = time.perf_counter()
            yield
            self._data_wait_s = time.perf_counter() - asked

    def line(self, done: int) -> Line:
        """What is known of step `done` when it is launched; loss and norms come when it is read."""
        trainer, task = self._trainer, self._trainer.task
        units = trainer.job.train.global_batch * task.units_per_sample
        rate = units / self._step_time_s
        return {
            "step": done,
            task.unit: done * units,
            "lr": trainer.update.lr,
            "step_time_s": self._step_time_s,
            "profiled": False,
            f"{task.unit}_per_s": rate,
            "mfu": _mfu(trainer, rate),
            "memory_bytes": memory_bytes(trainer.ranks.device),
            "time": time.time(),
            "between_s": self._between_s,
            "gc_s": self._garbage.take_s(),
            "checkpoint_cpu_s": self._checkpoints.take_cpu_s(),
            "terms": self._terms(),
            **({} if task.stream is None else task.stream.figures),
            **self._of_all,
        }

    def _terms(self) -> dict[str, float]:
        """The terms a host clock can tell apart; only a profile splits the rest."""
        known = {"data_wait": self._data_wait_s, "checkpoint_stall": self._checkpoints.stall_s}
        exposed_all_reduce = self._trainer.passes.exposed_all_reduce
        if exposed_all_reduce is not None:
            known["exposed_comm.dp"] = exposed_all_reduce.seconds
        return known | {"unattributed": self._step_time_s - sum(known.values())}


def _mfu(trainer: Trainer, units_per_s: float) -> float | None:
    """Model FLOPs done over those the devices could do at their peak; None where either is unknown.

    The peak is that of the arithmetic asked for; fp32 products run in plain fp32.
    """
    job, flops_per_unit = trainer.job, trainer.task.train_flops_per_unit
    peak = job.cluster.device.peak(job.layout.precision)
    if peak is None or flops_per_unit is None:
        return None
    return units_per_s * flops_per_unit / (peak.value * job.layout.num_ranks)
