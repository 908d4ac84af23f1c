"""The queue of a process's collectives: sequence-numbered, advanced by one thread.

Collectives match by the order in which ranks issue them. Whoever issues the next one from the
callback of the last (torch's PowerSGD hook does) issues them in the order in which they happen to
complete, which differs between ranks: with more than one bucket the run aborts. Here work is
submitted as jobs, and which collective is issued after which follows from the order of submission
alone.

A job is a generator: it computes, issues a collective, yields the work it has to wait for, goes on.
Each job submitted starts at once, and every unfinished older job then goes on by one part, the
youngest first. So the next bucket's all-to-all is issued before the last bucket's all-gather, and
while the one is on the wire, the other is decoded. `flush` ends a series: what is left of its jobs
goes on in the same rounds. Ranks must submit equal series; their timing is free.

Parts are what ranks count, so a job has as many of them on every rank. Of a collective made of
messages each round is one part, also on a rank that sends and receives nothing in it: two ranks
then issue their messages to each other in one order, by which both gloo and NCCL match them, and
the earliest part that is not done can always be done.

The thread lets a backward pass go on beside it (operators release the interpreter). On CUDA it
works on a stream of its own, behind what was queued when the job was submitted.

Not here: what the jobs compute (`compress`), and a time-out: a job waits for its group, and the
group has one.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

Works = Sequence[dist.Work]
"""What a part of a job has issued; a rank that takes no part in a round has none."""
Job = Generator[Works, None, None]
"""Yields what it has issued and has to wait for, equally often on every rank."""

_PRIORITIES = {"normal": 0, "high": -1}
"""Of comm.priority: as CUDA numbers its streams."""


@dataclass(frozen=True)
class _Submitted:
    number: int
    job: Job
    ready: torch.cuda.Event | None
    """On CUDA: when what the job reads has been computed."""


@dataclass(frozen=True)
class _Flush:
    then: Callable[[], None]


class CollectiveQueue:
    """Runs jobs of collectives on a thread, in an order that every rank shares."""

    def __init__(self, device: torch.device, priority: str = "normal") -> None:
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=_PRIORITIES[priority])
        self._inbox: SimpleQueue[_Submitted | _Flush | None] = SimpleQueue()
        self._active: list[tuple[_Submitted, Works]] = []
        self._num_submitted = 0
        self._num_entered = self._num_left = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        # A daemon: a collective whose peer is gone must not keep the process from ending.
        threading.Thread(target=self._work, name="paceline-collectives", daemon=True).start()

    def submit(self, job: Job) -> None:
        """Start a job as soon as what was submitted before it allows."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        self._enter(_Submitted(self._num_submitted, job, ready))
        self._num_submitted += 1

    def flush(self, then: Callable[[], None] = lambda: None) -> None:
        """End a series of jobs: nothing else will be submitted before they are done.

        Args:
            then: called on the queue's thread (and stream) when they are, or when one has failed.
        """
        self._enter(_Flush(then))

    def _enter(self, entry: _Submitted | _Flush) -> None:
        self._num_entered += 1
        self._inbox.put(entry)

    def wait(self) -> None:
        """Wait until every series that was flushed is done.

        Raises:
            Exception: what a job raised, with its traceback. The queue is of no use then.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._num_left == self._num_entered)
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def close(self) -> None:
        """End the thread; what was submitted is done before."""
        self._inbox.put(None)

    def _work(self) -> None:
        on_stream: Any = nullcontext()
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)
            on_stream = torch.cuda.stream(self._stream)
        with torch.no_grad(), on_stream:
            while (entry := self._inbox.get()) is not None:
                if isinstance(entry, _Submitted):
                    self._attempt(partial(self._start, entry))
                else:
                    self._attempt(self._finish)
                    entry.then()
                with self._changed:
                    self._num_left += 1
                    self._changed.notify_all()

    def _attempt(self, step: Callable[[], None]) -> None:
        """Do it, unless something failed before: then the ranks no longer agree on an order."""
        if self._error is not None:
            return
        try:
            step()
        except BaseException as error:
            self._error = error
            self._active.clear()

    def _start(self, submitted: _Submitted) -> None:
        if self._stream is not None and submitted.ready is not None:
            self._stream.wait_event(submitted.ready)
        before, self._active = self._active, []
        self._go_on(submitted)
        self._round(before)

    def _finish(self) -> None:
        while self._active:
            before, self._active = self._active, []
            self._round(before)

    def _round(self, jobs: list[tuple[_Submitted, Works]]) -> None:
        """Wait for what each job has issued and go on with it, the youngest first."""
        for submitted, works in jobs:
            for work in works:
                work.wait()
            self._go_on(submitted)

    def _go_on(self, submitted: _Submitted) -> None:
        try:
            works = next(submitted.job, None)
        except Exception as error:
            error.add_note(f"in job {submitted.number} of this rank's queue of collectives")
            raise
        if works is not None:
            self._active.append((submitted, works))
