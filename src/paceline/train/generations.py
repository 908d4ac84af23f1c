"""A rank of an elastic run: one process through one generation after another.

What survives a generation is the process with its imports, its tokenised data and its compiled
kernels, and the state of the run in its memory. Process groups, the module on them and its
optimizer are made anew, for the layout of those who are left.

A rank that lost another one is told by its agent that the generation is over; then the sockets of
its groups are cut, so that no collective waits. It waits for the next generation without a
time-out: its agent ends it if none comes.

Not here: who is a member and what the next layout is (`elastic.agent`).
"""

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from statistics import median_low
from typing import Any

from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.comm.rendezvous import (
    Ranks,
    disconnect,
    group_apart,
    join_generation,
    set_collective_timeout,
    store_of_generation,
)
from paceline.comm.words import await_all, say
from paceline.config.errors import RunError, StoppedInTimeError
from paceline.config.job import Job
from paceline.elastic.cut import GroupSockets
from paceline.elastic.generation import Generation
from paceline.elastic.link import AGENT, RankLink
from paceline.observe.run import Run
from paceline.train.checkpoint.files import FoundState
from paceline.train.checkpoint.loading import load
from paceline.train.checkpoint.lockstep import LockstepRanks
from paceline.train.checkpoint.memory import Recovered, recover
from paceline.train.failure import Failure, StateLostError, is_lost_peer
from paceline.train.kept_state import GenerationOverError, KeptState
from paceline.train.rank_stats import Watch
from paceline.train.session import MakeTask, log_to, process_of_rank, train_together
from paceline.train.stopping import StopRequest

# An error that a lost rank causes may come before the agent's word that the generation is over.
_WORD_S, _LOOK_S = 1.0, 0.02
# What torch, the operating system and our own words raise where another rank is gone.
_MAY_BE_LOSS = (RuntimeError, OSError, RunError)
_HAS_JOINED = "joined/{}"
# A rank is slow that is at work so many times as long as the median, in so many steps.
_SLOW_TIMES, _SLOW_STEPS = 1.5, 50


def is_elastic_rank() -> bool:
    """Whether an agent started this process."""
    return AGENT in os.environ


def run_elastic_rank(run: Run, make_task: MakeTask) -> nn.Module | None:
    """Train as a rank of an elastic run until its agent says that it is over.

    Returns:
        the trained module, wrapped as the last layout says; None: this process trained nothing.
    """
    job = run.job()
    with process_of_rank(job, run) as stop:
        return ElasticRank(run, make_task, stop).live()


class ElasticRank:
    """This process, whatever its number is in the present generation."""

    def __init__(self, run: Run, make_task: MakeTask, stop: StopRequest) -> None:
        self._run, self._make_task, self._stop = run, make_task, stop
        self._sockets = GroupSockets()
        limit_s = run.job().elastic.first_limit_s
        ask = partial(stop.ask, "the agent")
        self._link = RankLink(os.environ[AGENT], self._leave, ask, first_limit_s=limit_s)
        self._watch = LinkWatch(self._link)
        self._kept = KeptState(self._watch)
        self._module: nn.Module | None = None
        self._terminal = os.dup(1)

    def live(self) -> nn.Module | None:
        """Train in each generation that the agent gives; its end is the run's."""
        while (given := self._link.next_generation()) is not None:
            generation, rank, local_rank = given
            job = generation.concrete_job()
            count, kind = job.cluster.devices_per_node, job.cluster.device.kind
            ranks = Ranks(rank, generation.num_ranks, local_rank, count, kind)
            self._log_as(ranks)
            self._module = None  # of the generation before: its memory is needed
            try:
                if rank < generation.num_ranks:
                    self._train_in(generation, job, ranks)
                    self._link.tell("done")
                else:
                    self._hand_over(generation, job, ranks)
                    self._link.tell("handed_over")
            except StoppedInTimeError:
                self._link.tell("done", asks_again=True)
            except Exception as error:
                if not self._is_loss(error, ranks):
                    self._link.tell("failed", failure=asdict(Failure.of(error)))
                    raise
                print(f"generation {generation.number} is over: {error}", file=sys.stderr)
                self._link.tell("lost", text=str(error))
            finally:
                disconnect()
        return self._module

    def _train_in(self, generation: Generation, job: Job, ranks: Ranks) -> None:
        hosts = {generation.store[0], *(node.address for node in generation.active)}
        self._connect_to(hosts)
        self._kept.generation, timeout_s = generation.number, job.comm.timeout_s
        store = self._store_of(generation, ranks, timeout_s)
        join_generation(ranks, store, timeout_s)
        set_collective_timeout(timeout_s)
        self._kept.holders = _holders(generation, ranks.rank, store, timeout_s)
        self._watch.on_joined = partial(say, store, _HAS_JOINED.format(ranks.rank), True)
        self._sockets.collect()
        self._module = train_together(
            self._run, self._make_task, job, ranks, self._stop, self._kept
        )

    def _hand_over(self, generation: Generation, job: Job, ranks: Ranks) -> None:
        """As a process that no longer trains: give what it holds to those that do."""
        self._connect_to({generation.store[0]})
        timeout_s = job.comm.timeout_s
        store = self._store_of(generation, ranks, timeout_s)
        holders = _holders(generation, ranks.rank, store, timeout_s)
        self._sockets.collect()
        assert holders is not None, "this process is one of them"

        def take_nothing(found: FoundState) -> None:
            load(found, {}, holders)

        saved = self._run.checkpoint_folder
        recover(take_nothing, self._kept.held, holders, generation.number, saved)
        # A group that closes breaks what others still do in it.
        await_all(store, _HAS_JOINED, range(generation.num_ranks), timeout_s)

    def _store_of(self, generation: Generation, ranks: Ranks, timeout_s: float) -> Store:
        number = generation.number
        return store_of_generation(
            ranks, generation.store, number, timeout_s, lambda: self._link.must_leave
        )

    def _connect_to(self, hosts: set[str]) -> None:
        """From now on a cut is one of this generation's connections."""
        self._sockets.close()
        self._sockets = GroupSockets(hosts)

    def _log_as(self, ranks: Ranks) -> None:
        """Rank 0 has the terminal, whichever process it is."""
        sys.stdout.flush()
        log_to(self._run.log_folder / f"rank{ranks.rank}.log", keep_stdout=False)
        if ranks.is_first:
            os.dup2(self._terminal, 1)

    def _leave(self, generation: int) -> None:
        """On the link's thread: let nothing of a generation wait any longer."""
        self._sockets.cut()

    def _is_loss(self, error: Exception, ranks: Ranks) -> bool:
        """Whether it is only what another rank's end does to this one. Where no state is left, the
        first rank makes room for a new process."""
        if isinstance(error, StateLostError):
            return not ranks.is_first
        if isinstance(error, GenerationOverError) or is_lost_peer(error):
            return True
        if not isinstance(error, _MAY_BE_LOSS):
            return self._link.must_leave
        until = time.monotonic() + _WORD_S
        while not self._link.must_leave and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return self._link.must_leave


def _holders(
    generation: Generation, number: int, store: Store, timeout_s: float
) -> LockstepRanks | None:
    """All that may hold a part of the state; None: the ranks of the generation."""
    size = generation.num_ranks + len(generation.helpers)
    if size == generation.num_ranks:
        return None
    limit = timedelta(seconds=timeout_s)
    group = group_apart(PrefixStore("helpers", store), number, size, limit)
    return LockstepRanks(number, size, group)


class LinkWatch(Watch):
    """Tells the agent where this rank is, and ends a step whose generation is over."""

    def __init__(self, link: RankLink) -> None:
        self._link, self._step = link, 0
        self.on_joined: Callable[[], object] = lambda: None
        """Is called when this rank has its state."""
        self._busy: deque[tuple[float, float]] = deque(maxlen=_SLOW_STEPS)
        """Of the last steps: this rank's seconds at work, a typical rank's."""
        self._has_told = False

    def enter(self, section: str) -> None:
        """As `Watch`.

        Raises:
            GenerationOverError: this rank has to leave.
        """
        if self._link.must_leave:
            raise GenerationOverError
        self._link.enter(section)

    def at(self, step: int) -> None:
        """As `Watch`."""
        self._step = step
        self._link.at(step)
        self._link.tell("stepped")

    def compare(self, busy_s: list[float], rank: int) -> None:
        """As `Watch`: a rank that is slow for many steps says so itself, once."""
        self._busy.append((busy_s[rank], median_low(busy_s)))
        own_s, typical_s = (sum(each) / len(self._busy) for each in zip(*self._busy, strict=True))
        if self._has_told or len(self._busy) < _SLOW_STEPS or own_s <= _SLOW_TIMES * typical_s:
            return
        self._has_told = True
        text = (
            f"rank {rank} on {socket.gethostname()} is slow: it was at work for {own_s:.3g} s of "
            f"each of the last {_SLOW_STEPS} steps, the median rank for {typical_s:.3g} s."
        )
        self._link.tell("slow", text=text)

    def joined(self, step: int, recovered: Recovered | None) -> None:
        """As `Watch`."""
        how: dict[str, Any] = {"source": "disk" if step else "start"}
        if recovered is not None:
            how = {"source": recovered.source, "bytes": recovered.bytes}
            how["seconds"] = {"restore": recovered.seconds}
        self.on_joined()
        lost, self._step = max(0, self._step - step), step
        self._busy.clear()
        self._link.at(step)
        self._link.tell("joined", recomputed=lost, **how)
