"""Rounds of workers that may be lost, and come back, while the others go on.

How it works: as `elastic.local_rounds`, but the workers have no process group that a lost one would
break. They meet in the groups of a `Membership`, each made of those who are there. An outer
gradient leaves as a copy and is computed anew where a round has to be repeated without a lost
worker, so the mean is always of whole changes of those who take part. All members then do the same
outer step, and nobody does it before the first worker's verdict.

A worker that comes is handed the parameters, the outer momentum and the first worker's inner
optimizer (as torchft does, https://github.com/pytorch/torchft): an Adam that starts anew would step
by signs. What compression owed a lost worker's changes is lost with it.

What crosses the wires is in host memory, as the groups are gloo's: there the outer gradients of a
CUDA device are coded as well.

Not here: who is a member (`elastic.membership`); fragments that travel one after another
(streaming): a worker that comes would find the others in the middle of several rounds.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.collectives import Collectives, wait
from paceline.comm.compress.compressors import compressor_of
from paceline.comm.compress.means import mean_of_parts
from paceline.config.comm import LocalUpdates, codec
from paceline.elastic.local_rounds import LocalRounds
from paceline.elastic.membership import Membership, group_of_one
from paceline.elastic.state_transfer import Nested, receive_state, send_state
from paceline.parallel.replicas import kept_buffers

_HOST = torch.device("cpu")


class ElasticRounds(LocalRounds):
    """The rounds of one worker; all members call alike after every step.

    Args:
        compress_from: tensors with fewer values travel exactly.
        membership: of this worker, not yet open or joined.
        num_workers: of the run, lost ones among them.
        num_steps: of the run; the last one is followed by a round.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Mapping[nn.Parameter, str],
        local: LocalUpdates,
        compress_from: int,
        membership: Membership,
        num_workers: int,
        num_steps: int,
    ) -> None:
        super().__init__(module, names, local, compress_from, group_of_one(), num_steps)
        self.membership, self.num_workers = membership, num_workers
        self._module = module
        (self._fragment_of_all,) = self._fragments
        self._travels = replace(self._fragment_of_all, outer=self._fragment_of_all.outer.to(_HOST))
        self._alone, self._is_coded = self._group, self._travels.mean is not None
        self._meet_in(None)
        self._fragment_of_all.mean = None  # what travels is coded where it leaves

    def describe(self) -> str:
        """Who meets when, and without how many they go on."""
        least = self._local.min_workers
        return f"{super().describe()} They go on while at least {least} are left."

    def _meet_if_due(self, done: int) -> None:
        """As in `LocalRounds`.

        Raises:
            RunError: too few workers are left, or this one was lost.
        """
        self.sent_bytes = 0
        if not self.is_round(done):
            return
        owed = [error.clone() for error in self._errors()]
        self.membership.exchange(partial(self._meet, owed), is_last=False)
        self._fragment_of_all.outer.copy_(self._travels.outer)
        self._take(self._fragments, 0.0)

    def sum_up(self, values: Tensor, *, ends_round: bool = False) -> tuple[Tensor, int]:
        """As `Replicas.sum_up`, over the members: in host memory, and `welcome` follows a round.

        Raises:
            RunError: too few workers are left, or this one was lost.
        """

        def act(group: dist.ProcessGroup) -> tuple[Tensor, int]:
            summed = values.detach().to(_HOST, copy=True)
            dist.all_reduce(summed, group=group)
            return summed, group.size()

        return self.membership.exchange(act, is_last=ends_round)

    def sent(self) -> dict[str, float]:
        """Of how many workers the numbers are, besides."""
        return {"dp.workers": len(self.membership.members), **super().sent()}

    def welcome(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Hand those who came in with the last round what they go on from."""

        def hand_over(group: dist.ProcessGroup) -> None:
            if group.rank() == 0:
                send_state(state(), group)
            else:
                receive_state(group, _HOST, keep=False)

        self.membership.welcome(hand_over)

    def join(self, device: torch.device) -> Nested:
        """Wait until the others let this worker in, and take what they go on from.

        Raises:
            RunError: nobody lets it in.
        """
        return self.membership.join(partial(receive_state, device=device))

    def _meet(self, owed: list[Tensor], group: dist.ProcessGroup) -> None:
        """Average the outer gradients of the group's members; leaves the parameters alone."""
        for error, before in zip(self._errors(), owed, strict=True):
            error.copy_(before)
        self._fragment_of_all.leave()
        self._travels.outer.copy_(self._fragment_of_all.outer)
        try:
            self._meet_in(group)
            wait(self._average(self._travels))
            self.sent_bytes = self._bytes(self._travels)
        finally:  # others that wait in a group fail when the last reference to it is gone
            self._meet_in(None)
        for buffer in kept_buffers(self._module):  # the first worker's, as replicas have it
            values = buffer.to(_HOST)
            dist.broadcast(values, group=group, group_src=0)
            buffer.copy_(values)

    def _meet_in(self, group: dist.ProcessGroup | None) -> None:
        """Average in this group from here on; None: in no group of others."""
        self._group = group or self._alone
        self._collectives = Collectives(self._group, "backend")
        travels = self._travels
        travels.mean = None
        if self._is_coded and group is not None:
            compressor = compressor_of(codec(self._local.compress), group)
            travels.mean = mean_of_parts(compressor, travels.parts, travels.outer)

    def _errors(self) -> list[Tensor]:
        """What compression owes: one buffer, or none."""
        travels = self._travels
        return [self._feedback.span(travels.parts, travels.outer)] if self._is_coded else []
