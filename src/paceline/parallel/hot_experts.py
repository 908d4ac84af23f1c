"""Copies of hot experts: the tokens of an expert that many want are worked on where they are.

How it works: a layer puts the rows of experts that are copied behind those of all slots, and they
stay on their rank. Inside the layer's experts, where FSDP2 has gathered this rank's stacks, owners
broadcast the weights of these experts over ep, each its own as one message, beside the products of
the rank's own experts. In the backward pass the gradients of copies are ready first: they are
summed up on the owners, again beside the products of its own experts, and added to the owner's
gradients before FSDP2 sees those. So a copy lives from its forward to its backward pass, and
neither the optimizer nor a checkpoint knows of it.

It doesn't choose the experts: see `paceline.plan.experts.hot_experts`.

Paper: dynamic shadowing, FasterMoE (He et al., PPoPP 2022), https://doi.org/10.1145/3503221.3508418
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Stacks = Mapping[str, Tensor]


class Copies:
    """Those that every rank of ep gets of a layer's hot experts."""

    def __init__(self) -> None:
        self.slots: tuple[int, ...] = ()
        """Of the experts that are copied, sorted; the same on every rank."""
        self._stayed = self._total = 0

    # Compiled code would be made anew for each choice of slots, and for each count.
    @torch.compiler.disable
    def of(self, stacks: Stacks, group: dist.ProcessGroup) -> tuple[Stacks, Callable[[], Stacks]]:
        """Start to give all ranks of a group copies; every rank calls it.

        Args:
            stacks: this rank's experts by name: (local slots, ...) each, of one type.
            group: the ranks of ep.

        Returns:
            the stacks to work on instead, through which gradients of copies come home, and a
            function that waits for the copies: by name, (copies, ...) each.
        """
        flight = _Flight(group, self.slots, list(stacks.values()))
        *own, message = _Send.apply(flight, *stacks.values())
        return dict(zip(stacks, own, strict=True)), partial(_arrived, flight, message, list(stacks))

    @torch.compiler.disable
    def count(self, stayed: int, total: int) -> None:
        """Add up rows that stayed on this rank, and all that it had, of training."""
        if torch.is_grad_enabled():
            self._stayed += stayed
            self._total += total

    def take(self) -> tuple[int, int]:
        """These sums, which begin anew."""
        found = self._stayed, self._total
        self._stayed = self._total = 0
        return found


@torch.compiler.disable
def _arrived(flight: "_Flight", message: Tensor, names: list[str]) -> Stacks:
    return dict(zip(names, _Arrive.apply(flight, message), strict=True))


class _Flight:
    """What is on its way: the weights of copies, later their gradients."""

    def __init__(
        self, group: dist.ProcessGroup, slots: Sequence[int], stacks: Sequence[Tensor]
    ) -> None:
        self.group = group
        self.shapes = [stack.shape[1:] for stack in stacks]
        self.trains = [stack.requires_grad for stack in stacks]
        self.num_copies, num_local = len(slots), len(stacks[0])
        owners = [slot // num_local for slot in slots]
        self._of_owners = {
            owner: slice(owners.index(owner), owners.index(owner) + owners.count(owner))
            for owner in dict.fromkeys(owners)
        }
        rank = dist.get_rank(group)
        self.mine = self._of_owners.get(rank, slice(0, 0))
        """Which copies are those of this rank's experts."""
        self.places = [slot - rank * num_local for slot in slots[self.mine]]
        """In which of its slots these are."""
        self.sums: Tensor | None = None
        """(copies, numbers of an expert that train): gradients, in fp32 at least."""
        self._works: list[dist.Work | None] = []

    @property
    def widths(self) -> list[int]:
        """Numbers of an expert in each stack."""
        return [shape.numel() for shape in self.shapes]

    @property
    def trained_widths(self) -> list[int]:
        """Those of the stacks that train."""
        return [width for width, trains in zip(self.widths, self.trains, strict=True) if trains]

    def frozen(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """Of these, the ones that don't train."""
        return [stack for stack, trains in zip(stacks, self.trains, strict=True) if not trains]

    def start(self, collective: Callable[[Tensor, int], dist.Work | None], rows: Tensor) -> None:
        """Start a collective for each owner, on the rows of its experts."""
        self._works = [collective(rows[at], owner) for owner, at in self._of_owners.items()]

    def wait(self) -> None:
        """Wait for these (on CUDA the stream does)."""
        for work in self._works:
            assert work is not None  # None is for ranks outside of the group
            work.wait()
        self._works = []


class _Send(torch.autograd.Function):
    """Starts to send this rank's hot experts; backward waits for the gradients of their copies."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, *stacks: Tensor) -> tuple[Tensor, ...]:
        """Return the stacks, and the message on its way: (copies, numbers of an expert)."""
        ctx.flight = flight
        ctx.set_materialize_grads(False)
        message = stacks[0].new_empty(flight.num_copies, sum(flight.widths))
        for stack, part in zip(stacks, message[flight.mine].split(flight.widths, 1), strict=True):
            for place, row in zip(flight.places, part, strict=True):
                row.copy_(stack[place].flatten())
        flight.start(
            lambda rows, owner: dist.broadcast(
                rows, group=flight.group, group_src=owner, async_op=True
            ),
            message,
        )
        same = [stack.view_as(stack) for stack in stacks]
        ctx.mark_non_differentiable(*flight.frozen(same))
        return *same, message

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Add the sums for this rank's experts, in place: these gradients were made for here."""
        flight = ctx.flight
        flight.wait()
        sums, flight.sums = flight.sums[flight.mine].split(flight.trained_widths, 1), None
        trained = [grad for grad in grads if grad is not None]  # the message has none
        for grad, added in zip(trained, sums, strict=True):
            for place, row in zip(flight.places, added, strict=True):
                grad[place] += row.view_as(grad[place])
        return None, *grads[:-1]


class _Arrive(torch.autograd.Function):
    """Waits for a message; backward starts to sum up the gradients of copies on their owners."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, message: Tensor) -> tuple[Tensor, ...]:
        """Return the stacks of copies."""
        ctx.flight, ctx.dtype = flight, torch.promote_types(message.dtype, torch.float32)
        ctx.set_materialize_grads(False)
        flight.wait()
        copies = [
            # Each its own memory: kernels want stacks without gaps, and the message is let go.
            part.clone(memory_format=torch.contiguous_format).view(-1, *shape)
            for part, shape in zip(message.split(flight.widths, 1), flight.shapes, strict=True)
        ]
        ctx.mark_non_differentiable(*flight.frozen(copies))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        """Leave the sums in the flight: `_Send` takes them when the rank's own are there."""
        flight = ctx.flight
        # Of many ranks they are added up, which 8 bits of mantissa are too few for.
        parts = [grad.flatten(1).to(ctx.dtype) for grad in grads if grad is not None]
        flight.sums = torch.cat(parts, 1)
        flight.start(
            lambda rows, owner: dist.reduce(
                rows, group=flight.group, group_dst=owner, async_op=True
            ),
            flight.sums,
        )
        return None, None
