"""Audits: does every rank compute what another one would? Silent corruption has no other sign.

Every `elastic.audit_every` steps each rank computes the gradient of its step's first micro-batch
once more, apart from training, and its neighbour does the same on the same samples, weights and
random numbers. Equal arithmetic gives equal bits, so a checksum of the gradient's bits tells. Where
two differ, all compute again, with one rank more to judge: whoever differs from itself, or from two
others that agree, is named.

The same bits are to be had only where ranks hold the same network (dp, fsdp), compute with as many
threads, and use operators without a random order; what can't be audited is refused or said, once.
What is checked is a rank's arithmetic and its copy of the weights, not the exchange of gradients.

Source: Dixit et al. 2021, "Silent Data Corruptions at Scale", https://arxiv.org/abs/2102.11245, for
why a machine must be compared with another one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from paceline.comm import records
from paceline.observe.events import append_event
from paceline.observe.run import Run
from paceline.train.checkpoint.state import restore_rng_state, rng_state
from paceline.train.task import Step
from paceline.train.trainer import Trainer

# Values of which a checksum takes the bits at once: what it needs of memory, times eight bytes.
_CHUNK = 1 << 22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Verdict:
    """What an audit found."""

    ranks: tuple[int, ...]
    """Whose arithmetic is wrong; of two where nobody can tell which, both."""
    is_random: bool = False
    """Every rank differs from itself: it is the network, and no rank."""


Checksums = Sequence[Sequence[int]]
"""Rank -> of its own micro-batch, of its neighbour's."""


def differing(first: Checksums) -> list[int]:
    """The ranks whose micro-batch the rank before them computed otherwise."""
    size = len(first)
    return [rank for rank in range(size) if first[rank][0] != first[(rank - 1) % size][1]]


def verdict(first: Checksums, again: Checksums) -> Verdict:
    """Name who is wrong.

    Args:
        first: of the audit.
        again: rank -> of its own micro-batch, repeated, and of that of the rank after the next;
            of two ranks it is the neighbour's, repeated.
    """
    size = len(first)
    unsteady = {rank for rank in range(size) if first[rank][0] != again[rank][0]}
    if size == 2:
        unsteady |= {rank for rank in range(size) if first[rank][1] != again[rank][1]}
    if len(unsteady) == size:
        return Verdict((), is_random=True)
    if unsteady:
        return Verdict(tuple(sorted(unsteady)))
    outvoted: set[int] = set()
    for rank in differing(first):
        judges = [rank, (rank - 1) % size, (rank - 2) % size]
        votes = [first[judges[0]][0], first[judges[1]][1], again[judges[2]][1]]
        alone = [who for who, vote in zip(judges, votes, strict=True) if votes.count(vote) == 1]
        outvoted |= set(alone if size > 2 else judges)
    return Verdict(tuple(sorted(outvoted)))


def checksum(values: Tensor) -> Tensor:
    """Of a tensor's bits: () int64, another one whichever bit is flipped.

    Each value counts with an odd number of its own, modulo 2^64, in which the difference that one
    bit makes can't vanish; the sum of integers doesn't depend on its order.
    """
    flat = values.detach().contiguous().flatten()
    flat = flat.view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, len(flat), _CHUNK):
        part = flat[first : first + _CHUNK].long()
        part = part ^ (part >> 32)  # else the highest bit would count alike in each place
        numbers = torch.arange(first, first + len(part), device=flat.device)
        total += (part * (2 * numbers + 1)).sum()
    return total


@dataclass
class Auditor:
    """The audits of one rank; every rank makes the same calls."""

    trainer: Trainer
    run: Run
    say: Callable[[str], None]
    _is_off: bool = field(default=False, init=False)

    def audit_if_due(self, done: int, micro_batches: Step) -> Verdict | None:
        """Audit before step `done`, where that is due.

        Returns:
            who is wrong; None where nobody is, or nothing was compared.
        """
        every = self.trainer.job.elastic.audit_every
        if self._is_off or not every or not done or done % every:
            return None
        if (why := self._unequal(micro_batches[0])) is not None:
            self._is_off = True
            self.say(f"nothing is audited: {why}.")
            return None
        found = self._audit(done, micro_batches[0])
        self._tell(done, found)
        return found

    def _audit(self, done: int, own: object) -> Verdict | None:
        size = self.trainer.ranks.world_size
        neighbours = self._from_rank_after(own, 1)
        first = self._together([self._bits(own, done, 0), self._bits(neighbours, done, 1)])
        if not differing(first):
            return None
        further = min(2, size - 1)
        other = self._from_rank_after(own, further)
        again = self._together([self._bits(own, done, 0), self._bits(other, done, further)])
        return verdict(first, again)

    def _bits(self, micro_batch: object, done: int, after: int) -> int:
        """Checksum of the loss and of the gradient of a micro-batch of the rank so many after this
        one, without effect on training."""
        trainer, ranks = self.trainer, self.trainer.ranks
        buffers = [buffer.clone() for buffer in trainer.module.buffers()]
        generators = rng_state()
        torch.manual_seed(done * ranks.world_size + (ranks.rank + after) % ranks.world_size)
        trainer.replicas.begin(None)
        with _gradient_bits(trainer.module) as found:
            loss = trainer.passes.without_effect(micro_batch)
        trainer.replicas.finish()
        trainer.update.optimizer.zero_grad()
        restore_rng_state(generators)
        for buffer, before in zip(trainer.module.buffers(), buffers, strict=True):
            buffer.copy_(before)
        return int(checksum(torch.stack([checksum(loss), *(found[key] for key in sorted(found))])))

    def _unequal(self, micro_batch: object) -> str | None:
        """Why ranks can't be compared; None: they can."""
        leaves = pytree.tree_leaves(micro_batch)
        is_plain = all(isinstance(leaf, Tensor) or leaf is None for leaf in leaves)
        facts = records.all_gather([torch.get_num_threads(), is_plain])
        threads = sorted({fact[0] for fact in facts})
        if len(threads) > 1:
            return f"ranks compute with {threads[0]} to {threads[-1]} threads, each with its sums"
        if not all(fact[1] for fact in facts):
            return "micro-batches hold what is no tensor, and another rank can't be given it"
        return None

    def _from_rank_after(self, own: object, by: int) -> object:
        """The micro-batch of the rank so many after this one, which gets that of one before."""
        rank, size = self.trainer.ranks.rank, self.trainer.ranks.world_size
        leaves, form = pytree.tree_flatten(own)
        shapes = [None if leaf is None else list(leaf.shape) for leaf in leaves]
        theirs = records.all_gather(shapes)[(rank + by) % size]
        got = [
            None if leaf is None else leaf.new_empty(shape)
            for leaf, shape in zip(leaves, theirs, strict=True)
        ]
        sends = []
        for leaf, room in zip(leaves, got, strict=True):
            if leaf is not None and room is not None:
                sends.append(dist.P2POp(dist.isend, leaf.contiguous(), (rank - by) % size))
                sends.append(dist.P2POp(dist.irecv, room, (rank + by) % size))
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        return pytree.tree_unflatten(got, form)

    def _together(self, own: list[int]) -> Checksums:
        return records.all_gather(own)

    def _tell(self, done: int, found: Verdict | None) -> None:
        if not self.trainer.ranks.is_first:
            return
        named = (None,) if found is None or found.is_random else found.ranks
        for rank in named:
            append_event(self.run, "audit", step=done, rank=rank, ok=found is None)
        if found is None:
            return
        if found.is_random:
            self._is_off = True
            self.say(
                f"audit before step {done + 1}: every rank's gradient differs from its own when "
                "repeated, so this network has an operator without a fixed order, and nothing can "
                "be audited (torch.use_deterministic_algorithms)."
            )
            return
        who = " or ".join(map(str, found.ranks))
        self.say(
            f"audit before step {done + 1}: rank {who} computes other bits than the others from "
            "the same samples and weights: take its machine out and check it."
        )


@contextmanager
def _gradient_bits(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collect the checksum of each parameter's gradient by name, as one rank's backward gives it:
    before ranks add theirs up."""
    found: dict[str, Tensor] = {}
    handles: list[torch.utils.hooks.RemovableHandle] = []
    hooked: set[int] = set()

    def watch(name: str, parameter: Tensor) -> None:
        if not parameter.requires_grad or id(parameter) in hooked:
            return
        hooked.add(id(parameter))

        def keep(gradient: Tensor) -> None:
            found[name] = checksum(gradient)

        handles.append(parameter.register_hook(keep))

    def watch_own(name: str) -> Callable[..., None]:
        """Of a module whose parameters are whole only while it is called (FSDP2)."""

        def before(module: nn.Module, _inputs: object) -> None:
            for key, parameter in module.named_parameters(recurse=False):
                watch(f"{name}.{key}", parameter)

        return before

    for name, part in module.named_modules():
        own = list(part.named_parameters(recurse=False))
        if any(isinstance(parameter, DTensor) for _, parameter in own):
            handles.append(part.register_forward_pre_hook(watch_own(name)))
        else:
            for key, parameter in own:
                watch(f"{name}.{key}", parameter)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
