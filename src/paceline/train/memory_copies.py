"""What an elastic run has of its state in memory when a rank is lost.

On a CPU that is what trains, unless an update was under way: collectives stand before it, so the
loss of another rank leaves parameters and optimizer as they were before a step or as they are after
it. Buffers and random generators, which passes change, are put back to the step's beginning. Copies
alone count on a CUDA device, where work is launched ahead and computes with what a broken
collective left; and with compression, whose errors change within the backward pass.

Not here: how copies travel (`checkpoint.buddies`) and how ranks go on from them
(`train.run_checkpoints`).
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.rendezvous import collective_timeout
from paceline.parallel.replicas import kept_buffers
from paceline.train.checkpoint.buddies import Buddies
from paceline.train.checkpoint.held import HeldState, History
from paceline.train.checkpoint.state import restore_rng_state, rng_state
from paceline.train.trainer import Trainer

State = Callable[[], dict[str, Any]]
"""Gives the live state of this rank, in nested dicts."""
Facts = Callable[[int], dict[str, Any]]
"""Gives what is kept beside it after so many steps."""


class MemoryCopies:
    """Of one rank, in one generation; all ranks make the same calls, but for `held`.

    Args:
        trainer: what trains.
        held: of the generation before; what doesn't lead to the present state is let go.
        history: of the present state.
        done: its steps.
    """

    def __init__(
        self, trainer: Trainer, held: Sequence[HeldState], history: History, done: int
    ) -> None:
        ranks = trainer.ranks
        is_alone = ranks.world_size == 1
        group = None if is_alone else dist.new_group(backend="gloo", timeout=collective_timeout())
        kept = [one for one in held if one.follows(history)]
        self.buddies = Buddies(ranks, group, trainer.job.elastic.copy_every, kept)
        self._trainer, self._history = trainer, history
        self._mark(done)

    def before_step(self, done: int, state: State, facts: Facts) -> float:
        """Remember what a step changes on its way, and copy the state where that is due.

        Returns:
            the seconds that copying kept the step waiting.
        """
        self._mark(done)
        if not self.buddies.is_due(done):
            return 0.0
        began = time.perf_counter()
        held = self._live(done, state, facts)
        return self.buddies.renew(held, time.perf_counter() - began)

    @torch.no_grad()
    def held(self, state: State, facts: Facts) -> list[HeldState]:
        """What this rank has, after another one was lost."""
        copies, done = self.buddies.offers(), self._trainer.update.done
        if not self._is_live_whole or done is None:
            return copies
        if done == self._marked:
            buffers = kept_buffers(self._trainer.module)
            for buffer, before in zip(buffers, self._buffers, strict=True):
                buffer.copy_(before)
            restore_rng_state(self._generators)
        return [self._live(done, state, facts), *copies]

    @property
    def _is_live_whole(self) -> bool:
        """Whether what trains is the state of a step, before and after its update."""
        return self._trainer.ranks.device_type == "cpu" and self._trainer.replicas.section is None

    def _live(self, done: int, state: State, facts: Facts) -> HeldState:
        names = self.buddies.names
        return HeldState.live(done, state(), facts(done), history=self._history, names=names)

    def _mark(self, done: int) -> None:
        if self._is_live_whole:
            self._marked = done
            self._buffers = [buffer.clone() for buffer in kept_buffers(self._trainer.module)]
            self._generators = rng_state()
