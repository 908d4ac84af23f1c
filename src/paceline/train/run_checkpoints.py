"""Run checkpoints: what a run keeps of itself, when, and how it goes on from there.

Besides parameters, optimizer and random generators there are sections for what compression still
owes or workers share, and for a mean of the weights; and facts, by which a run goes on counting.

Not here: how files are written and read (`train.checkpoint`).
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function as span

from paceline.parallel.replicas import COMM_SECTION, ROUNDS_SECTION
from paceline.train.checkpoint.files import FoundState, TensorEntry
from paceline.train.checkpoint.held import HeldState, History
from paceline.train.checkpoint.lockstep import LockstepRanks
from paceline.train.checkpoint.memory import Recovered, recover
from paceline.train.checkpoint.state import (
    restore_rng_state,
    restore_training_state,
    rng_state,
    training_state,
)
from paceline.train.failure import StateLostError
from paceline.train.kept_weights import EMA_SECTION
from paceline.train.memory_copies import MemoryCopies
from paceline.train.run_context import RunContext
from paceline.train.trainer import Trainer

# Under this name a checkpoint keeps what a worker under local updates, but the first, has.
_WORKER_SECTION = "worker"
_OWED = {
    COMM_SECTION: "nothing is compressed now: what compression still owed",
    ROUNDS_SECTION: "workers meet in every step now: what they had not yet agreed on",
    EMA_SECTION: "no mean of the weights is kept now: that",
}


class RunCheckpoints:
    """The checkpoints of a run; every rank makes the same calls."""

    def __init__(self, trainer: Trainer, context: RunContext) -> None:
        self._trainer, self._context = trainer, context
        self._checkpointer = context.checkpointer
        self._first = 0
        self._saved: tuple[int, dict[str, Any]] | None = None
        """After how many steps the last save was, and what evaluations had found by then."""
        self._copies: MemoryCopies | None = None
        self._rounds: list[HeldState] = []
        """Copies of what this rank of a worker had after the last rounds, the newest one last."""
        self._history: History = ()
        self.recovered: Recovered | None = None
        """How the run went on from the memory of ranks; None: from the disk, or anew."""
        self.stall_s = 0.0
        """For so long the last step waited for a checkpoint, or a copy in memory."""

    def begin(self, held: Sequence[HeldState] = (), generation: int = 0) -> int:
        """Restore what there is.

        Args:
            held: what this rank has kept in memory (`held`) of the generation before.
            generation: of an elastic run, its number; 0: no rank has anything in memory.

        Returns:
            the steps that the run has done.

        Raises:
            RuntimeError: another rank was lost meanwhile; what is held is as it was.
            StateLostError: there is no state at all.
        """
        if generation:
            holders = self._context.kept.holders or self._checkpointer.ranks
            go_on = partial(self._go_on_from, ranks=holders)
            saved = self._context.run.checkpoint_folder
            self.recovered = recover(go_on, held, holders, generation, saved)
        if self.recovered is not None:
            # The disk may not have it: it is saved at once where that is due, and at the end.
            done, self._first = self.recovered.step, self.recovered.step - 1
            history = self.recovered.history
        else:
            done = self._restore()
            self._first, history = done, ((generation, done),)
        self._copy_from(done, held, history)
        if generation and self._trainer.replicas.steps_alone:
            # They step no round more where too few are left.
            is_over = self._trainer.agreement.on_stop(bool(self._context.stop), at_round=True)
            self._context.metrics_buffer.stop_wanted = is_over
        if done == 0 and self._trainer.job.elastic.on_spike == "roll_back":
            self.save(0)  # what comes back after a spike before the first checkpoint
        return done

    def _copy_from(self, done: int, held: Sequence[HeldState], history: History) -> None:
        """Copy what trains into memory from here on, where the run is elastic."""
        trainer = self._trainer
        trainer.update.done, self._history = done, history
        if trainer.replicas.steps_alone:
            self._rounds = [one for one in held if one.follows(history)]
            self.keep_round(done)
        elif trainer.job.elastic.is_on:
            self._copies = MemoryCopies(trainer, held, history, done)

    def keep_round(self, done: int) -> None:
        """After a round of an elastic run: copy its state into this worker's memory.

        Parameters and outer momentum are the same on all workers then, so the copies of those who
        are left make up the whole, and nothing has to travel. A worker that comes in takes the
        inner optimizer's state from them as well.

        Ranks of one worker may be lost when some of them have this round and others the one before.
        So these keep both: who is in a round knows that all have the one before.
        """
        trainer = self._trainer
        if not trainer.job.elastic.is_on or not trainer.replicas.is_round(done):
            return
        self._context.metrics_buffer.settle()
        state = self._state(as_worker=False)
        del state[ROUNDS_SECTION]["start"]  # the parameters are
        facts, history = self._facts_with_lines(done), self._history
        if self._rounds and self._rounds[-1].step < done:
            del self._rounds[:-1]
        copied = HeldState.of(done, state, facts, copy=True, history=history)
        self._rounds.append(replace(copied, kind="own"))
        if trainer.replicas.together is None:
            del self._rounds[:-1]
        # The next round doesn't wait for it: until it is done a piece is taken for good.
        threading.Thread(target=self._rounds[-1].seal, name="sums", daemon=True).start()

    def held(self) -> list[HeldState]:
        """What this rank has in memory of the run's state, after a rank was lost: for `begin` of
        the next generation. It stays as it is, whatever becomes of the trainer's groups."""
        if self._copies is None:
            return self._rounds
        return self._copies.held(self._state, self._facts_with_lines)

    def roll_back(self) -> int:
        """After a spike: bring the newest good checkpoint back and leave out the samples since.

        Returns:
            the steps that the run has done.

        Raises:
            RunError: that state came back too often.
        """
        trainer, context = self._trainer, self._context
        spike, train = context.metrics_buffer.rolls_back, trainer.job.train
        assert spike is not None
        context.metrics_buffer.forget()
        done = self._restore()
        self._saved = done, context.best.found()
        self._copy_from(done, (), (*self._history, (context.kept.generation, done)))
        context.left_out.add(spike, done, train.global_batch, train.max_bad_steps)
        if trainer.ranks.is_first:
            context.left_out.write(context.run)
        context.say(
            f"the state of step {done} is back; samples of {spike.step - done} steps are left out."
        )
        return done

    def save_if_due(self, done: int) -> None:
        """Within a step: save the state after the `done` steps before it, where the Job says so,
        and renew its copies in memory."""
        every = self._trainer.job.checkpoint.every
        is_due = (every > 0 and done % every == 0) or done == self._context.best.step
        with span("paceline.checkpoint_stall"):
            self.stall_s = self.save(done) if is_due and done > self._first else 0.0
            if self._copies is not None:
                self.stall_s += self._copies.before_step(done, self._state, self._facts_with_lines)

    def save(self, done: int) -> float:
        """Start a checkpoint of the state after `done` steps; return the seconds the run waited."""
        trainer, context = self._trainer, self._context
        trainer.stats.watch.enter("checkpoint")
        context.kept.must_be_newest(context.run)
        trainer.agreement.on_buffers()
        trainer.agreement.meet(done, at_once=True)
        context.metrics_buffer.settle()  # a checkpoint never runs ahead of metrics.jsonl
        if context.metrics_buffer.rolls_back is not None:
            return 0.0  # not of a state that is to be undone
        if trainer.task.tables is not None:
            trainer.task.tables.save(done)  # first: a checkpoint is complete only with its tables
        self._saved = done, context.best.found()
        facts = self._facts_with_lines(done) if context.best.is_due else self._facts(done)
        return self._checkpointer.save(done, self._state(), facts, best=context.best.step or None)

    def _state(self, *, as_worker: bool = True) -> dict[str, Any]:
        """What the run goes on from: of a checkpoint, and of a copy in memory.

        Args:
            as_worker: whether workers of local updates keep parameters and optimizer apart.
        """
        trainer = self._trainer
        state = training_state(trainer.module, trainer.update.optimizer)
        if as_worker and trainer.replicas.steps_alone:
            state = _of_worker(state, self._worker)
        kept = {section: part.state() for section, part in trainer.stateful_parts().items()}
        return {**state, **kept, "rng": rng_state()}

    @property
    def _worker(self) -> int:
        """Of this rank, under local updates."""
        trainer = self._trainer
        return trainer.job.layout.place(trainer.ranks.rank).dp

    def _facts(self, done: int) -> dict[str, Any]:
        """What is kept beside it."""
        trainer, context = self._trainer, self._context
        data = trainer.task.data_state
        return {
            "step": done,
            "samples": context.left_out.consumed(done, trainer.job.train.global_batch),
            "skipped": context.metrics_buffer.num_skipped,
            "loss_scale": trainer.update.loss_scale.state_dict(),
            "identity": context.identity,
            "best": context.best.facts(),
            "groups": trainer.update.rates.moved(),
            "recent_losses": trainer.update.recent.state(),
            "data": None if data is None else data.state(),
        }

    def _facts_with_lines(self, done: int) -> dict[str, Any]:
        """What is kept beside it in memory: also what rank 0 may be lost before it writes it."""
        return {**self._facts(done), "lines": self._context.metrics_buffer.newest()}

    def poll(self) -> None:
        """Say how a save ended, if one did."""
        self._checkpointer.poll()

    def take_cpu_s(self) -> float:
        """Seconds of processor time that saves took which ended since the last call."""
        return self._checkpointer.take_cpu_s()

    def keep_after_failure(self, done: int) -> None:
        """Keep what was trained before an evaluation failed: by the save that has begun, or by one
        that a rank makes alone."""
        with suppress(RuntimeError):  # of ranks that are gone
            if self._saved is not None and self._saved[0] == done:
                self._context.metrics_buffer.settle()
            elif self._trainer.ranks.world_size == 1:
                self.save(done)
            self._checkpointer.finish()
            self._checkpointer.finish_copies()

    def finish(self, done: int) -> None:
        """At the end of the run: save what isn't saved yet, and wait until it is written, and
        copied to a store."""
        self._trainer.stats.watch.enter("checkpoint")
        is_new = done > self._first or self._saved is not None
        if is_new and self._saved != (done, self._context.best.found()):
            self.save(done)
        self._checkpointer.finish()
        if self._copies is not None:
            self._copies.buddies.finish()
        self._trainer.stats.watch.enter("idle")  # a slow store makes nobody late
        self._context.stop.is_copying = True
        self._checkpointer.finish_copies()
        self._context.stop.is_copying = False

    def _restore(self) -> int:
        """Load the newest good checkpoint, if there is one; return the steps it had done."""
        trainer = self._trainer
        found = self._checkpointer.latest_good()
        if trainer.task.tables is not None:
            trainer.task.tables.load(found.step if found else 0)
        if found is None:
            if not trainer.task.has_values:
                raise StateLostError(
                    "no rank has the state of the run, or the weights it began with, and there is "
                    "no checkpoint: a new process makes them again."
                )
            return 0
        self._go_on_from(found)
        return found.step

    def _go_on_from(self, found: FoundState, ranks: LockstepRanks | None = None) -> None:
        """Load a state that was found on the disk or in the memory of ranks.

        Args:
            ranks: that hold parts of it; None: the disk has it.
        """
        trainer, context = self._trainer, self._context
        state = own = training_state(trainer.module, trainer.update.optimizer, found)
        if trainer.replicas.steps_alone:
            # A worker that was not there when it was saved takes over the state of another one.
            workers = [name for name in found.sections if name.startswith(_WORKER_SECTION)]
            own = _of_worker(state, self._worker % (1 + len(workers)))
        rng, owed, parts = rng_state(), state_to_load(trainer, found), trainer.stateful_parts()
        facts = self._checkpointer.load(found, {**own, **owed, "rng": rng}, ranks)
        restore_training_state(trainer.module, trainer.update.optimizer, state)
        restore_rng_state(rng)
        for section, part in parts.items():
            part.load(owed[section])
        for section in _OWED:
            if section in found.sections - parts.keys():
                self._checkpointer.tell(
                    f"{_OWED[section]} in the checkpoint of step {found.step} is dropped."
                )
        trainer.update.loss_scale.load_state_dict(facts["loss_scale"])
        trainer.update.rates.put_back(facts.get("groups", []))
        trainer.update.recent.load(facts.get("recent_losses", []))
        if trainer.task.data_state is not None:
            trainer.task.data_state.load(facts.get("data"))
        context.best.load(facts.get("best", {}), partial(self._was_evaluated, facts["step"], ranks))
        if context.best.is_due:  # once it is judged, the same state is another checkpoint
            self._saved = facts["step"], context.best.found()
        context.metrics_buffer.num_skipped = facts["skipped"]
        context.metrics_buffer.recent.extend(facts.get("lines", []))

    def _was_evaluated(self, step: int, holders: LockstepRanks | None) -> bool:
        """Whether the Run has the evaluation after a step, as rank 0 sees it. What ranks hold in
        memory says itself that one is due."""
        run, ranks = self._context.run, self._checkpointer.ranks
        return holders is None and ranks.on_first(lambda: run.has_evaluation(step))


def state_to_load(trainer: Trainer, found: FoundState) -> dict[str, dict[str, Any]]:
    """Room for this rank's part of what compression owed, or of what workers share; none where
    nothing is compressed now, and there are no such workers."""
    owed: dict[str, dict[str, Any]] = {}
    for section, part in trainer.stateful_parts().items():
        entries = found.section(section)

        def room(path: str, entries: dict[str, TensorEntry] = entries) -> Tensor:
            entry = entries[path]
            return torch.empty(entry.size, dtype=entry.torch_dtype, device=trainer.ranks.device)

        owed[section] = part.targets(entries, room)
    return owed


def _of_worker(state: dict[str, Any], worker: int) -> dict[str, Any]:
    """Where a worker that steps for itself keeps parameters and optimizer in a checkpoint: the
    first one where a run without workers keeps its own."""
    return {f"{_WORKER_SECTION}{worker}": state} if worker else state
