"""Execute: the rounds of an algorithm over torch.distributed, in place on a flat buffer.

Written as a generator that yields what it waits for, so that whoever runs it decides what happens
meanwhile. It yields once per round, whatever this rank has to do in it: whoever interleaves several
exchanges does so alike on every rank. A wait ends by the group's time-out, like that of any
collective.

A message that is added arrives in a scratch buffer. What arrives in a round for the same values is
added in order of rank, this rank's own among them, so that ranks which add up the same
contributions get the same bits.
"""

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from paceline.comm.algorithms.blocks import Round, Transfer


def exchange(
    rounds: Sequence[Round], values: Tensor, group: dist.ProcessGroup
) -> Iterator[Sequence[dist.Work]]:
    """Run a rank's rounds; the buffer is complete when the generator ends.

    Args:
        rounds: of `rounds`, for this rank of the group.
        values: (num_values,) contiguous, on the group's device; in place.
        group: all its ranks must run theirs, one exchange at a time or interleaved alike.

    Yields:
        for each round the works, perhaps none, that must have been waited for when the generator is
        continued.
    """
    largest = max((_received(each) for each in rounds if each.adds), default=0)
    scratch = values.new_empty(largest)
    for each in rounds:
        arriving = _arriving(each, values, scratch)
        yield _messages(each, values, arriving, group)
        if each.adds:
            _add(values, each.receives, arriving, group.rank())


def _received(each: Round) -> int:
    return sum(stop - start for _, start, stop in each.receives)


def _arriving(each: Round, values: Tensor, scratch: Tensor) -> list[Tensor]:
    """Where each message of a round arrives."""
    if not each.adds:
        return [values[start:stop] for _, start, stop in each.receives]
    sizes = [stop - start for _, start, stop in each.receives]
    return list(scratch[: sum(sizes)].split(sizes))


def _messages(
    each: Round, values: Tensor, arriving: Sequence[Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Start all messages of a round at once."""
    receives = [
        dist.P2POp(dist.irecv, place, group=group, group_peer=peer)
        for (peer, _, _), place in zip(each.receives, arriving, strict=True)
    ]
    sends = [
        dist.P2POp(dist.isend, values[start:stop], group=group, group_peer=peer)
        for peer, start, stop in each.sends
    ]
    return dist.batch_isend_irecv([*receives, *sends]) if receives or sends else []


def _add(
    values: Tensor, receives: Sequence[Transfer], arrived: Sequence[Tensor], rank: int
) -> None:
    """Add what arrived, the contributions to the same values in order of rank."""
    lower = [each for each in zip(receives, arrived, strict=True) if each[0].peer < rank]
    upper = [each for each in zip(receives, arrived, strict=True) if each[0].peer > rank]
    for (_, start, stop), place in _summed(lower):
        values[start:stop] += place
    for (_, start, stop), place in sorted(upper, key=lambda each: each[0].peer):
        values[start:stop] += place


def _summed(lower: Sequence[tuple[Transfer, Tensor]]) -> list[tuple[Transfer, Tensor]]:
    """Sums of contributions of lower ranks, one for each cut."""
    sums: dict[tuple[int, int], tuple[Transfer, Tensor]] = {}
    for transfer, place in sorted(lower, key=lambda each: each[0].peer):
        cut = (transfer.start, transfer.stop)
        if cut in sums:
            sums[cut][1].add_(place)
        else:
            sums[cut] = transfer, place
    return list(sums.values())
