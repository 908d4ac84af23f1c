"""Pairs: latency and bandwidth from every rank to every other, together and alone.

How it works: a round-robin tournament. In each round every rank has one partner, so all rounds are
as few as there can be and no rank sends to two at once. A message's bandwidth is that of large
messages each way in turn, from the start until the partner's short answer is back; the latency is
half the way there and back of a short message. The sender's clock takes the time, and medians
count. What a link can do is the best of all its messages: noise makes them slower only, and a slow
link has no good ones.

"Together" all pairs of a round are at work, which is how pipelines and rings load a network; ranks
of one host then share its cards. "Alone" only one pair is: what a link can do. Their quotient is
contention. Alone takes as many steps as there are pairs, so beyond `MOST_ALONE` it is left out.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.rendezvous import Ranks

Say = Callable[[str], None]
Matrix = tuple[tuple[float, ...], ...]
"""Of sender (row) and receiver (column); 0 on the diagonal."""

MOST_ALONE = 512
"""Pairs that are measured one at a time; assumed: about half a minute."""
_SHORT = 2  # values of a message that only latency counts for
_WARM_UP = 2


@dataclass(frozen=True)
class Pairs:
    """What was measured between the ranks."""

    hosts: tuple[str, ...]
    """Of each rank."""
    num_bytes: int
    """Of a large message."""
    latency_s: Matrix
    """One way, together."""
    bytes_per_s: Matrix
    """Together."""
    alone_bytes_per_s: Matrix | None
    """None where there were too many pairs, or where no two can be at work at once."""
    best_bytes_per_s: Matrix
    """The fastest of all messages: what a link can do."""


def tournament(num_ranks: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which everybody meets everybody once.

    The circle method: rank 0 stays, the others move on by one place. With an odd number of ranks
    one of them rests in each round.
    """
    seats = [*range(num_ranks), *([-1] if num_ranks % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in facing if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def measure_pairs(
    ranks: Ranks,
    hosts: tuple[str, ...],
    num_bytes: int,
    num_messages: int,
    say: Say,
    pg: dist.ProcessGroup | None = None,
) -> Pairs:
    """Measure every pair; every rank must call it and gets the same.

    Args:
        ranks: at least two.
        hosts: of each rank.
        num_bytes: of a large message.
        num_messages: of each size and direction.
        say: called once for each round.
        pg: all ranks; None: the default group.
    """
    rounds = tournament(ranks.world_size)
    meeting = _PairRound(ranks, num_bytes, num_messages, pg)
    latency, together, best = meeting.matrices(rounds, "pairs, all at once", say)
    alone = None
    if num_alone_rounds(ranks.world_size):
        one_by_one = [[pair] for round_ in rounds for pair in round_]
        _, alone, best_alone = meeting.matrices(one_by_one, "pairs, one at a time", say)
        best = best.maximum(best_alone)
    return Pairs(
        hosts,
        num_bytes,
        _plain(latency),
        _plain(together),
        None if alone is None else _plain(alone),
        _plain(best),
    )


def _plain(matrix: Tensor) -> Matrix:
    return tuple(tuple(row) for row in matrix.tolist())


def num_alone_rounds(num_ranks: int) -> int:
    """Pairs that are measured alone: none where no two could be at work at once."""
    number = num_ranks * (num_ranks - 1) // 2
    return number if num_ranks > 3 and number <= MOST_ALONE else 0


def num_rounds(num_ranks: int) -> int:
    """How many times `measure_pairs` will speak."""
    return len(tournament(num_ranks)) + num_alone_rounds(num_ranks)


@dataclass(frozen=True)
class _PairRound:
    """Exchanges between pairs of ranks."""

    ranks: Ranks
    num_bytes: int
    num_messages: int
    pg: dist.ProcessGroup | None

    def matrices(
        self, rounds: list[list[tuple[int, int]]], what: str, say: Say
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Latency, bandwidth and best bandwidth: each (ranks, ranks) by sender and receiver."""
        number = self.ranks.world_size
        found = torch.zeros(3, number, number, dtype=torch.float64)
        for pairs in rounds:
            dist.all_reduce(torch.zeros(1))  # a barrier that also works beside NCCL
            for pair in pairs:
                if self.ranks.rank in pair:
                    self._meet(found, *pair)
            say(what)
        dist.all_reduce(found)
        return found[0], found[1], found[2]

    def _meet(self, found: Tensor, low: int, high: int) -> None:
        """Both directions of a pair; each sender notes its own."""
        for sender, receiver in ((low, high), (high, low)):
            short_s = self._round_trips_s(sender, receiver, _SHORT)
            long_s = self._round_trips_s(sender, receiver, self.num_bytes // 4)
            if self.ranks.rank == sender:
                found[0, sender, receiver] = median(short_s) / 2
                found[1, sender, receiver] = self.num_bytes / median(long_s)
                found[2, sender, receiver] = self.num_bytes / min(long_s)

    def _round_trips_s(self, sender: int, receiver: int, length: int) -> list[float]:
        """Seconds until a short answer to a message of so many fp32 values is back."""
        message, answer = (torch.zeros(size, device=self.ranks.device) for size in (length, _SHORT))
        times = []
        for _ in range(_WARM_UP + self.num_messages):
            began = time.perf_counter()
            if self.ranks.rank == sender:
                dist.send(message, receiver, group=self.pg)
                dist.recv(answer, receiver, group=self.pg)
            else:
                dist.recv(message, sender, group=self.pg)
                dist.send(answer, sender, group=self.pg)
            if self.ranks.device_type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return times[_WARM_UP:]
