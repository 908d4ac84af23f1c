"""Profiled windows: now and then, a few steps of a run are recorded and accounted for.

The loop wraps each step in `record_function("paceline.step")` and says when it has ended:

    with ProfiledWindows(run.trace_folder, rank, every=100, axis="dp") as windows:
        for step in range(steps):
            with record_function("paceline.step"):
                ...
            for step, terms in windows.step().items():
                ...  # terms: {"matmul": seconds, ...}, on rank 0, when a window has just closed

A window is one step of warm-up, in which the profiler is armed but keeps nothing (its first step is
slow), and then the recorded steps. It begins at fixed step numbers, so all ranks record the same
steps, also after a resume. Outside windows no profiler exists, and `step` counts one up.

Each window leaves Kineto's own trace, `rank<k>-step<n>.json.gz` with n its first recorded step:
any viewer of PyTorch traces opens it, and `read_kineto` reads it again.

Recording costs time within the steps (a few microseconds for each operator: little for large ones,
half of the step for a model of tiny ones), so profiled steps are slower than their neighbours.
Closing a window happens between steps, so no step's own time contains it. On more than one rank
the others wait for rank 0 at their next collective: leave out the step after a window when steps
are compared.

Beside the trace a window leaves what it did with memory, where a recorder was given
(`observe.memory`).

Not here: what the terms mean (`observe.terms`) and how they are found (`observe.kineto`).
Source: torch.profiler, https://docs.pytorch.org/docs/stable/profiler.html
"""

import gc
import gzip
import json
import warnings
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from paceline.config.errors import InputError
from paceline.observe.accounting import accounting
from paceline.observe.kineto.read import METADATA, read_kineto
from paceline.observe.memory import MemoryRecorder
from paceline.observe.terms import coarse

_WARMUP = 1
# The first steps of a process allocate, compile and build buckets; they aren't like the others.
_UNTYPICAL_STEPS = 3


class ProfiledWindows:
    """Records windows of steps and returns their account. Use as a context manager."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        every: int,
        num_steps: int = 2,
        *,
        first_step: int = 0,
        axis: str | None = None,
        memory: MemoryRecorder | None = None,
    ) -> None:
        """Say which steps are recorded; nothing starts before the context is entered.

        Args:
            folder: where traces go; made when the first one is written.
            rank: of this process; only rank 0 accounts for its windows.
            every: steps from the beginning of one window to that of the next, which is more than
                the window has; 0: no windows.
            num_steps: recorded steps of a window.
            first_step: number of the step that the loop runs first (after a resume: not 0).
            axis: the mesh axis of collectives in the default process group, for their term.
            memory: records what windows do with memory.
        """
        assert not every or every >= _WARMUP + num_steps, "windows would run into one another"
        self._folder = folder
        self._rank = rank
        self._every = every
        self._num_steps = num_steps
        self._axis = axis
        self._memory = memory
        self._next_step = first_step
        self._close_before = first_step
        self._profiler: profile | None = None

    def __enter__(self) -> Self:
        self._open_if_due()
        return self

    @property
    def is_open(self) -> bool:
        """Whether steps are being recorded whose account is still to come."""
        return self._profiler is not None

    def step(self) -> dict[int, dict[str, float]]:
        """Say that a step has ended.

        Returns:
            step -> term -> seconds of the window that it closed, on rank 0; else {}.
        """
        self._next_step += 1
        account: dict[int, dict[str, float]] = {}
        if self._profiler is not None:
            self._profiler.step()
            if self._next_step == self._close_before:
                account = self._close(self._profiler)
                # What the profiler leaves behind would be collected in a later step, which then
                # stands still for as long as 0.6 s.
                gc.collect()
        if self._profiler is None:
            self._open_if_due()
        return account

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Drop a window that training left before its end: half a window is no sample."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
            if self._memory is not None:
                self._memory.end(None)

    def _open_if_due(self) -> None:
        if not self._every:
            return
        lead = min(_UNTYPICAL_STEPS, self._every - _WARMUP - self._num_steps)
        if (self._next_step - lead) % self._every != 0:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        plan = schedule(wait=0, warmup=_WARMUP, active=self._num_steps, repeat=1)
        # With shapes: without them nothing says how many bytes gloo's collectives carry.
        self._profiler = profile(activities=activities, schedule=plan, record_shapes=True)
        self._close_before = self._next_step + _WARMUP + self._num_steps
        note = {"first_step": self._next_step + _WARMUP, "axis": self._axis}
        self._profiler.preset_metadata_json(METADATA, json.dumps(note))
        self._profiler.start()
        if self._memory is not None:
            self._memory.begin()

    def _close(self, profiler: profile) -> dict[int, dict[str, float]]:
        profiler.stop()
        self._profiler = None
        first = self._next_step - self._num_steps
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"rank{self._rank}-step{first}.json.gz"
        plain, draft = trace.with_name(trace.name + ".json"), trace.with_name(trace.name + ".tmp")
        try:
            if self._memory is not None:
                self._memory.end(f"rank{self._rank}-step{first}")
            profiler.export_chrome_trace(str(plain))
            account = self._account(plain)
            # Level 3 takes a third of the time of the default and 15 % more bytes.
            draft.write_bytes(gzip.compress(plain.read_bytes(), 3, mtime=0))
            draft.replace(trace)
        except (OSError, InputError) as error:
            warnings.warn(
                f"the profiled steps from {first} on were not kept: {error}", stacklevel=2
            )
            account = {}
        finally:
            plain.unlink(missing_ok=True)
            draft.unlink(missing_ok=True)
        return account

    def _account(self, trace: Path) -> dict[int, dict[str, float]]:
        if self._rank != 0:
            return {}
        steps = accounting(read_kineto(trace, self._rank, self._axis))[self._rank]
        return {step: coarse(terms) for step, terms in steps.items()}
