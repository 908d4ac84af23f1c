"""One server: rows, who has pushed what, and when a pull may be answered.

Every worker pushes once per step, perhaps nothing; the clock is the number of steps that all of
them have pushed. A pull for step t is answered when the clock is at t (synchronous), at t minus the
staleness (stale), or at once (asynchronous). In synchronous mode the pushes of a step are applied
together when the last has come, in the order of the workers: as one process would, whoever is
fastest. In the others each is applied when it comes. A worker pushes its share of the gradient of
the mean loss over all workers, so sums are means.

A push says its step, so one that comes twice (the worker could not know whether it had arrived) is
applied once. A server that came back from its checkpoint learns from the workers' hellos how far
they are: the updates between are lost, and it says how many.

One thread per worker answers it, one lock guards everything: the updates of a server are in order.

Bounded staleness: Ho et al., NIPS 2013. Parameter server: Li et al., OSDI 2014.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from paceline.recommender.parameter_server.consistent_hash import Ids
from paceline.recommender.parameter_server.rows import Rows, RowStore, merged
from paceline.recommender.parameter_server.snapshot import Arrays, ServerCheckpoints
from paceline.recommender.parameter_server.wire import Message, MessageKind, failed


@dataclass
class Server:
    """What one server process holds and knows."""

    store: RowStore
    snapshots: ServerCheckpoints
    num_workers: int
    lag: int | None
    """Steps by which a pull may lag behind: 0 synchronous; None: any number."""
    checkpoint_every: int
    run_checkpoints: Path
    """Where the run's own checkpoints are: their steps are kept here as well."""
    say: Callable[[str], None]
    timeout_s: float
    restored_at: int | None = None
    """Steps of the checkpoint that a killed server came back from, until all have said hello."""
    _pushed: dict[int, int] = field(default_factory=dict)
    _waiting: dict[int, dict[int, tuple[Ids, Rows, float]]] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _writer: threading.Thread | None = None

    @property
    def clock(self) -> int:
        """Steps that all workers have pushed; -1 while one of them was never heard."""
        return min(self._pushed.values()) if len(self._pushed) == self.num_workers else -1

    def answer(self, message: Message) -> Message:
        """Do what a worker asks, waiting where the mode says so."""
        handle = {
            MessageKind.HELLO: self._hello,
            MessageKind.PULL: self._pull,
            MessageKind.PUSH: self._push,
            MessageKind.SAVE: self._save,
            MessageKind.LOAD: self._load,
        }.get(message.kind)
        if handle is None or not 0 <= message.worker < self.num_workers:
            return failed(f"a server can't answer {message.kind.name} of worker {message.worker}.")
        try:
            with self._changed:
                return handle(message)
        except Exception as error:  # whatever it is, the worker has to know
            return failed(f"{type(error).__name__}: {error}")

    def recover(self, base: int) -> None:
        """Come back after being killed: from the newest own checkpoint, or the run's, or anew."""
        found = self.snapshots.newest_good()
        if found is not None and found[0] >= base:
            self.restored_at = found[0]
            self.store.take(found[1])
            return
        self.restored_at = base
        if base:
            self._take_all(base)

    def _hello(self, message: Message) -> Message:
        before = self.clock
        self._pushed[message.worker] = max(message.step, self._pushed.get(message.worker, -1))
        self._advance(before)
        if self.restored_at is not None and self.clock >= 0:
            self._tell_losses(self.restored_at, max(self._pushed.values()))
            self.restored_at = None
        return self._done()

    def _tell_losses(self, restored: int, known: int) -> None:
        lost = f"the updates of steps {restored + 1} to {known} to its rows are lost"
        self.say(
            f"came back from its checkpoint of step {restored}: "
            + (lost if known > restored else "no update is lost")
        )

    def _pull(self, message: Message) -> Message:
        if self.lag is not None:
            self._await_clock(message.step - self.lag)
        return Message(MessageKind.ROWS, clock=self.clock, values=self.store.read(message.ids))

    def _await_clock(self, step: int) -> None:
        if not self._changed.wait_for(lambda: self.clock >= step, self.timeout_s):
            late = [w for w in range(self.num_workers) if self._pushed.get(w, -1) < step]
            raise TimeoutError(f"workers {late} did not push step {step} in {self.timeout_s:g} s.")

    def _push(self, message: Message) -> Message:
        worker, step = message.worker, message.step
        if step >= self._pushed.get(worker, 0):
            gradients = message.values.reshape(-1, self.store.dim)
            if len(gradients) != len(message.ids):
                raise ValueError(f"{len(message.ids)} rows came with {len(gradients)} gradients")
            if self.lag == 0:
                share = (message.ids, gradients, message.lr)
                self._waiting.setdefault(step, {})[worker] = share
            else:
                self.store.update(message.ids, gradients, message.lr)
            before = self.clock
            self._pushed[worker] = step + 1
            self._advance(before)
        return self._done()

    def _advance(self, before: int) -> None:
        """Apply what is complete, keep a checkpoint where one is due, wake those who wait."""
        clock = self.clock
        for step in sorted(step for step in self._waiting if step < clock):
            self._apply(self._waiting.pop(step))
        every = self.checkpoint_every
        if 0 <= before < clock and clock // every > before // every:
            self._keep_beside(clock)
        self._changed.notify_all()

    def _apply(self, shares: dict[int, tuple[Ids, Rows, float]]) -> None:
        ordered = [shares[worker] for worker in sorted(shares)]
        ids, gradients = merged(
            np.concatenate([ids for ids, _, _ in ordered]),
            np.concatenate([gradients for _, gradients, _ in ordered]),
        )
        if len(ids):
            self.store.update(ids, gradients, ordered[0][2])

    def _keep_beside(self, step: int) -> None:
        """Write a copy while the others go on; one at a time, or a slow disk would fall behind."""
        if self._writer is not None:
            self._writer.join()
        copy = {name: array.copy() for name, array in self.store.arrays().items()}
        self._writer = threading.Thread(target=self._write, args=(step, copy), daemon=True)
        self._writer.start()

    def _write(self, step: int, arrays: Arrays) -> None:
        try:
            self.snapshots.write(step, arrays)
            self.snapshots.tidy(self.run_checkpoints)
        except OSError as error:
            self.say(f"could not write its checkpoint of step {step} ({error})")

    def _save(self, message: Message) -> Message:
        self._await_clock(message.step)
        if self._writer is not None:
            self._writer.join()
        self.snapshots.write(message.step, dict(self.store.arrays()))
        self.snapshots.tidy(self.run_checkpoints)
        return self._done()

    def _load(self, message: Message) -> Message:
        if self._writer is not None:
            self._writer.join()
        later = [step for step in self.snapshots.steps() if step > message.step]
        self.snapshots.forget(later)
        self.store.reset()
        self._pushed.clear()
        self._waiting.clear()
        if message.step:
            self._take_all(message.step)
        return self._done()

    def _take_all(self, step: int) -> None:
        num_taken = sum(self.store.take(arrays) for arrays in self.snapshots.read(step))
        if num_taken != len(self.store.ids):
            raise ValueError(
                f"checkpoint step-{step} has {num_taken} of {len(self.store.ids)} rows"
            )

    def _done(self) -> Message:
        return Message(MessageKind.DONE, clock=self.clock)
