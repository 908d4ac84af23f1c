"""Collectives: seconds of every exchange by size and by number of ranks, on whatever is there.

How it works: through torch.distributed, as training does (gloo between CPU ranks, NCCL between
CUDA devices). All groups of a size run at the same time, as the groups of a layout do. Before a
size is timed, its result is compared with what it must be. Sizes are those of nccl-tests: the whole
buffer that is reduced, gathered or scattered; they take turns.

Between CPU ranks a small exchange takes 0.3 to 2.5 ms, as the scheduler places gloo's threads, and
that lasts for tenths of a second (measured: 300 blocks of 30 all-reduces of 4 KiB, two ranks on two
cores). It depends on what was done before: repeated for a second, all-reduces of 4 and 64 KiB take
1.1 to 1.6 ms, in turns with other exchanges 0.5 to 0.9. So there all collectives take turns, and
many of them.

Inside a node a group is of neighbours in rank order; across nodes it has one rank of each.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.bench.clock import Call, RankTimer
from paceline.comm.collectives import Collectives
from paceline.comm.rendezvous import Ranks
from paceline.config.curves import CollectiveCurve
from paceline.config.errors import RunError
from paceline.config.hardware import Figure, Tier

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
_ITEM_BYTES = 4

Say = Callable[[str], None]


def sizes_of(device_type: str, *, quick: bool) -> tuple[int, ...]:
    """Buffers to measure, bytes: from what only latency decides to what only bandwidth does."""
    if device_type == "cuda":
        powers = range(9, 31, 3 if quick else 1)  # 512 B to 1 GiB
    else:
        powers = range(9, 26, 4 if quick else 2)  # 512 B to 32 MiB
    return tuple(2**power for power in powers)


class Group(NamedTuple):
    """The group of one size that this rank is in; the others of that size run beside it."""

    num_ranks: int
    process_group: dist.ProcessGroup
    across: bool
    """One rank of each node, instead of neighbours on one."""
    ranks_per_node: int
    """Of its ranks."""
    has_first: bool
    """Whether rank 0 is in it."""


def all_groups(ranks: Ranks, backend: str | None = None) -> list[Group]:
    """Every group size that divides the ranks of a node, and then the nodes.

    Args:
        ranks: all of them must call this.
        backend: of the groups; None: that of the ranks' own.
    """
    inside = ranks.local_world_size
    nodes = ranks.world_size // inside
    return [
        *(_group(ranks, size, 1, size, backend) for size in _parts(inside)),
        *(_group(ranks, size, inside, 1, backend) for size in _parts(nodes)),
    ]


def group_of_all(ranks: Ranks, backend: str | None = None) -> Group:
    """All ranks as one group; arguments as in `all_groups`."""
    return _group(ranks, ranks.world_size, 1, ranks.local_world_size, backend)


def _parts(number: int) -> list[int]:
    return [size for size in range(2, number + 1) if number % size == 0]


def _group(ranks: Ranks, size: int, stride: int, ranks_per_node: int, backend: str | None) -> Group:
    found = None
    for first in range(ranks.world_size):
        if first // stride % size == 0:
            members = list(range(first, first + size * stride, stride))
            group = dist.new_group(members, backend=backend)
            if ranks.rank in members:
                found = Group(size, group, ranks_per_node < size, ranks_per_node, first == 0)
    assert found is not None
    return found


def measure_tiers(
    clock: RankTimer,
    groups: Sequence[Group],
    sizes: Sequence[int],
    source: str,
    say: Say,
    ops: Sequence[str] = OPS,
) -> tuple[Tier, ...]:
    """The links of this cluster with their measured collectives, the fastest first.

    Args:
        clock: measures; every rank must call this.
        groups: of `all_groups`.
        sizes: bytes, see `sizes_of`.
        source: where, when and by which command.
        say: called with each collective and number of ranks.
        ops: which; send_recv among them.

    Raises:
        RunError: a collective gave a wrong result.
    """
    ranks = clock.ranks
    inside = "loopback" if ranks.device_type == "cpu" else "node"
    tiers = []
    for name, across, num_devices in (
        (inside, False, ranks.local_world_size),
        ("network", True, ranks.world_size),
    ):
        of_tier = [each for each in groups if each.across == across]
        if of_tier:
            curves = measure_curves(clock, of_tier, sizes, source, say, ops)
            tiers.append(tier_of(name, num_devices, curves, source))
    return tuple(tiers)


def measure_curves(
    clock: RankTimer,
    groups: Sequence[Group],
    sizes: Sequence[int],
    source: str,
    say: Say,
    ops: Sequence[str] = OPS,
) -> dict[str, tuple[CollectiveCurve, ...]]:
    """Curves of every collective, or of some; other arguments as in `measure_tiers`."""
    in_turns = [tuple(ops)] if clock.ranks.device_type == "cpu" else [(op,) for op in ops]
    curves: dict[str, tuple[CollectiveCurve, ...]] = dict.fromkeys(ops, ())
    for group, some in product(groups, in_turns):
        found = _curves(clock, some, group, sizes, source, say)
        curves |= {op: (*curves[op], curve) for op, curve in zip(some, found, strict=True)}
    return curves


def num_measurements(groups: Sequence[Group]) -> int:
    """How many times `measure_tiers` will speak."""
    return len(OPS) * len(groups)


def _curves(
    clock: RankTimer, ops: Sequence[str], group: Group, sizes: Sequence[int], source: str, say: Say
) -> list[CollectiveCurve]:
    """Of collectives that take turns."""
    lengths = sorted({max(1, wanted // (_ITEM_BYTES * group.num_ranks)) for wanted in sizes})

    def calls() -> Iterator[Call]:
        for op in ops:
            for length in lengths:
                yield checked_exchange(op, group, length, clock.ranks.device)
            say(f"{op} of {group.num_ranks} ranks")

    seconds = iter(clock.in_rounds(calls()))
    return [
        CollectiveCurve(
            num_ranks=group.num_ranks,
            bytes=tuple(float(length * group.num_ranks * _ITEM_BYTES) for length in lengths),
            seconds=tuple(islice(seconds, len(lengths))),
            source=source,
        )
        for _ in ops
    ]


def checked_exchange(
    op: str, group: Group, length: int, device: torch.device, algorithm: str = "backend"
) -> Call:
    """A collective on buffers of its own, whose first result was right.

    Args:
        op: one of OPS; "send_recv" sends to the next rank what comes from the one before, as a ring
            of keys or a full pipeline does.
        group: all of its ranks must call this.
        length: fp32 numbers of each rank's part: a num_ranks-th of the whole buffer.
        device: where the buffers are.
        algorithm: the backend's, or one of `comm.algorithms.ALGORITHMS` for this op.

    Raises:
        RunError: the result was wrong.
    """
    number, pg = group.num_ranks, group.process_group
    me = dist.get_rank(pg)
    # Small whole numbers, so that sums are exact: rank r has r + 1 everywhere.
    part, whole = (
        torch.full((size,), me + 1.0, device=device) for size in (length, number * length)
    )
    received = torch.empty_like(whole)
    of_each = torch.arange(1.0, number + 1, device=device).repeat_interleave(length)
    total, before = torch.tensor(number * (number + 1) / 2), torch.tensor((me - 1) % number + 1.0)
    ours = Collectives(pg, algorithm, group.ranks_per_node)
    call, result, expected = {
        "all_reduce": (partial(ours.all_reduce, whole), whole, total),
        "all_gather": (
            partial(ours.all_gather, received, part), received, of_each,
        ),
        "reduce_scatter": (
            partial(ours.reduce_scatter, part, whole), part, total,
        ),
        "all_to_all": (
            partial(dist.all_to_all_single, received, whole, group=pg), received, of_each,
        ),
        "broadcast": (
            partial(dist.broadcast, whole, group=pg, group_src=0), whole, torch.tensor(1.0),
        ),
        "send_recv": (partial(_shift, whole, received, pg), received, before),
    }[op]  # fmt: skip
    call()
    if not torch.equal(result, expected.to(result).expand_as(result)):
        by = "" if algorithm == "backend" else f" by {algorithm}"
        raise RunError(
            f"{op}{by} among {number} ranks of {length * number * _ITEM_BYTES} bytes gave a wrong "
            "result: nothing that trains over these links can be trusted."
        )
    whole.zero_()  # sums of sums would overflow
    return call


def _shift(sent: Tensor, received: Tensor, pg: dist.ProcessGroup) -> None:
    me, number = dist.get_rank(pg), dist.get_world_size(pg)
    after, before = (dist.get_global_rank(pg, (me + by) % number) for by in (1, -1))
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, after, pg), dist.P2POp(dist.irecv, received, before, pg)]
    )
    for work in works:
        work.wait()


def tier_of(
    name: str, num_devices: int, curves: dict[str, tuple[CollectiveCurve, ...]], source: str
) -> Tier:
    """A tier whose latency and bandwidth are those of messages between two ranks or few."""
    messages = curves["send_recv"][0]
    latency_s, bytes_per_s = messages.seconds[0], messages.bytes[-1] / messages.seconds[-1]
    return Tier(
        name=name,
        num_devices=num_devices,
        latency_s=Figure(value=latency_s, origin="measured", source=source),
        bytes_per_s=Figure(value=bytes_per_s, origin="measured", source=source),
        collectives=curves,
    )
