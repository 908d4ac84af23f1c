"""The queue of collectives: its order follows from submission alone, and failures get out.

First jobs that stand for collectives; then exchanges made of messages, several at once: played in
one process, where messages meet as gloo and as NCCL let them meet, and on gloo ranks.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.algorithms import ALGORITHMS, execute
from paceline.comm.algorithms import tree as trees
from paceline.comm.collectives import Collectives
from paceline.comm.queue import CollectiveQueue
from tests.ranks import run_ranks

CPU = torch.device("cpu")


class Awaited:
    """Stands for a collective that takes a while."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def wait(self) -> None:
        time.sleep(self.seconds)


def _job(name: str, delays: list[float], issued: list[str]) -> Iterator[tuple[Awaited]]:
    for part, seconds in enumerate(delays):
        issued.append(f"{name}{part}")
        yield (Awaited(seconds),)


def _issued(delays: list[list[float]], pauses: list[float]) -> list[str]:
    """What a series of jobs issues, in order, when collectives and submissions take so long."""
    issued: list[str] = []
    queue = CollectiveQueue(CPU)
    for name, (of_job, pause) in enumerate(zip(delays, pauses, strict=True)):
        queue.submit(_job("abcdef"[name], of_job, issued))
        time.sleep(pause)
    queue.flush()
    queue.wait()
    queue.close()
    return issued


def test_the_next_bucket_starts_before_the_last_one_goes_on():
    assert _issued([[0, 0]] * 3, [0] * 3) == ["a0", "b0", "a1", "c0", "b1", "c1"]


def test_the_youngest_goes_on_first():
    assert _issued([[0] * 3] * 3, [0] * 3) == [
        *("a0", "b0", "a1", "c0", "b1", "a2"),
        *("c1", "b2", "c2"),
    ]


_DELAYS = st.lists(st.sampled_from([0.0, 0.001, 0.003]), min_size=0, max_size=3)


@given(st.lists(_DELAYS, min_size=1, max_size=5), st.data())
@settings(max_examples=25, deadline=None)
def test_timing_does_not_change_the_order(delays, data):
    """Two ranks whose collectives and backward passes take differently long."""
    instant = [[0.0] * len(of_job) for of_job in delays]
    wait = st.sampled_from([0.0, 0.002])
    pauses = data.draw(st.lists(wait, min_size=len(delays), max_size=len(delays)))
    assert _issued(delays, pauses) == _issued(instant, [0.0] * len(delays))


def test_jobs_run_beside_the_thread_that_submits_them():
    threads: list[str] = []

    def job() -> Iterator[tuple[Awaited]]:
        threads.append(threading.current_thread().name)
        assert not torch.is_grad_enabled()
        yield (Awaited(),)

    queue = CollectiveQueue(CPU)
    queue.submit(job())
    queue.flush()
    queue.wait()
    assert threads == ["paceline-collectives"]


def test_an_error_reaches_whoever_waits_with_its_traceback_and_nothing_is_issued_after_it():
    def broken() -> Iterator[tuple[Awaited]]:
        yield (Awaited(),)
        raise ValueError("the payload is torn")

    issued: list[str] = []
    ended: list[bool] = []
    queue = CollectiveQueue(CPU)
    queue.submit(broken())
    queue.submit(_job("b", [0, 0], issued))
    queue.flush(lambda: ended.append(True))
    with pytest.raises(ValueError, match="the payload is torn") as raised:
        queue.wait()
    assert ended == [True], "whoever waits for the series must be let go"
    assert issued == ["b0"]
    assert "in job 0 of this rank's queue" in raised.value.__notes__[0]
    assert any("broken" in str(entry) for entry in raised.traceback)
    queue.submit(_job("c", [0], issued))
    queue.flush()
    with pytest.raises(ValueError, match="the payload is torn"):
        queue.wait()
    assert issued == ["b0"]


def test_a_series_goes_on_after_another():
    issued: list[str] = []
    queue = CollectiveQueue(CPU)
    for name in "ab":
        queue.submit(_job(name, [0.002, 0], issued))
        queue.flush()
    queue.wait()
    assert issued == ["a0", "a1", "b0", "b1"]


# ---- exchanges made of messages ------------------------------------------------------------------

SIZES = (40, 1, 7, 40, 2, 3, 41, 0, 40, 100)
"""Values of buckets on their way at once: equal ones, some with fewer values than ranks."""
EXCHANGES = [
    (n, algorithm, inside)
    for n in range(2, 10)
    for algorithm in ALGORITHMS["all_reduce"]
    for inside in range(1, n + 1)
    if n % inside == 0 and (inside == 1 or algorithm == "hierarchical")
]


@dataclass
class Member:
    """A group as one of its ranks sees it, where ranks are threads; it notes what is issued.

    Between two ranks the message that is sent first is received first, as in gloo and in NCCL.
    """

    number: int
    num_ranks: int
    messages: dict[tuple[int, int, int], Future]
    """Of all members, by sender, receiver and how many went this way before."""
    batches: list[list[tuple[str, tuple[int, int, int]]]] = field(default_factory=list)
    """What this rank issued together: sends and receives of messages."""
    counts: Counter = field(default_factory=Counter)

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.num_ranks

    def issue(self, ops: list[SimpleNamespace]) -> list[SimpleNamespace]:
        """Start messages as gloo does: what is sent is copied, what is received has its place."""
        works = []
        self.batches.append([])
        for op in ops:
            way = (self.number, op.peer) if op.kind == "send" else (op.peer, self.number)
            ends = (*way, self.counts[op.kind, *way])
            self.counts[op.kind, *way] += 1
            self.batches[-1].append((op.kind, ends))
            message = self.messages[ends]
            if op.kind == "send":
                message.set_result(op.tensor.clone())
                works.append(Awaited())
            else:
                works.append(SimpleNamespace(wait=partial(_arrive, message, op.tensor)))
        return works


def _arrive(message: Future, place: torch.Tensor) -> None:
    sent = message.result(timeout=10)
    assert sent.shape == place.shape, f"{len(sent)} values came where {len(place)} were expected"
    place.copy_(sent)


class Messages(dict):
    """Futures that are made when they are first asked for, by whichever thread."""

    def __missing__(self, ends: tuple[int, int, int]) -> Future:
        return self.setdefault(ends, Future())


@contextmanager
def _between_threads() -> Iterator[None]:
    """Let exchanges send messages between members, and trees send small buffers in segments."""
    transport = SimpleNamespace(
        isend="send",
        irecv="receive",
        P2POp=lambda kind, tensor, group, group_peer: SimpleNamespace(
            kind=kind, tensor=tensor, group=group, peer=group_peer
        ),
        batch_isend_irecv=lambda ops: ops[0].group.issue(ops),
    )
    segments = mock.patch.object(trees, "SEGMENT_VALUES", 16)
    with mock.patch.object(execute, "dist", transport), segments:
        yield


def _given(rank: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Numbers of which every sum of some is another, in every bucket others."""
    return [
        (torch.arange(1, size + 1, dtype=torch.float64) + 1000 * bucket) * 4**rank
        for bucket, size in enumerate(sizes)
    ]


def _are_sums(got: list[torch.Tensor], num_ranks: int, sizes: Sequence[int]) -> bool:
    given = [_given(rank, sizes) for rank in range(num_ranks)]
    totals = [sum(of_bucket) for of_bucket in zip(*given, strict=True)]
    return all(torch.equal(*pair) for pair in zip(got, totals, strict=True))


def _submitted(
    collectives: Collectives, buckets: list[torch.Tensor], first_series: int | None = None
) -> CollectiveQueue:
    """A queue that sums up buckets, in one series or two."""
    queue = CollectiveQueue(CPU)
    for number, values in enumerate(buckets):
        if number == first_series:
            queue.flush()
        queue.submit(collectives.all_reduce_works(values))
    queue.flush()
    return queue


def _play(
    n: int, algorithm: str, inside: int, sizes: Sequence[int], first_series: int | None = None
) -> list[Member]:
    """Sum up buckets among ranks that are threads and look at the sums; what was issued."""
    messages = Messages()
    members = [Member(rank, n, messages) for rank in range(n)]
    buckets = [_given(rank, sizes) for rank in range(n)]
    with _between_threads():
        queues = [
            _submitted(Collectives(member, algorithm, inside), of_rank, first_series)
            for member, of_rank in zip(members, buckets, strict=True)
        ]
        for queue in queues:
            queue.wait()
            queue.close()
    assert all(_are_sums(of_rank, n, sizes) for of_rank in buckets)
    return members


def _stuck(members: Sequence[Member]) -> list[int]:
    """Ranks that never end where all messages of a batch must meet their other ends before the next
    batch starts: NCCL on one stream, which has no tags and keeps nothing that was sent."""
    todo = [deque(member.batches) for member in members]
    met: set[tuple[int, int, int]] = set()
    while True:
        posted = {message for batches in todo if batches for message in batches[0]}
        met |= {ends for kind, ends in posted if {("send", ends), ("receive", ends)} <= posted}
        done = [batches for batches in todo if batches and met.issuperset(_ends(batches[0]))]
        if not done:
            return [rank for rank, batches in enumerate(todo) if batches]
        for batches in done:
            batches.popleft()


def _ends(batch: Sequence[tuple[str, tuple[int, int, int]]]) -> list[tuple[int, int, int]]:
    return [ends for _, ends in batch]


@pytest.mark.parametrize(
    ("n", "algorithm", "inside"), [each for each in EXCHANGES if each[0] in (2, 3, 6, 8)]
)
def test_buckets_on_their_way_at_once_do_not_mix(n, algorithm, inside):
    assert not _stuck(_play(n, algorithm, inside, SIZES))


@given(
    st.sampled_from(EXCHANGES),
    st.lists(st.integers(0, 70), min_size=2, max_size=12),
    st.integers(1, 11),
)
@settings(max_examples=40, deadline=None)
def test_buckets_of_any_sizes_do_not_mix(exchange, sizes, first_series):
    assert not _stuck(_play(*exchange, sizes, first_series))


def test_ranks_that_wait_for_each_other_are_found():
    """The check of the tests above: the same messages, in batches of one."""
    members = _play(3, "ring", 1, SIZES)
    for member in members:
        member.batches = [[message] for batch in member.batches for message in batch]
    assert _stuck(members) == [0, 1, 2]


def _summed_on_gloo(rank: int, n: int) -> list[str]:
    """Algorithms whose sums are wrong on this rank."""
    sizes = [*SIZES, 300_000, 300_001, 5]  # some of a tree's segments
    wrong = []
    for algorithm in ALGORITHMS["all_reduce"]:
        for inside in {1, n, 2 - n % 2} if algorithm == "hierarchical" else {1}:
            buckets = _given(rank, sizes)
            queue = _submitted(Collectives(dist.group.WORLD, algorithm, inside), buckets)
            queue.wait()
            queue.close()
            if not _are_sums(buckets, n, sizes):
                wrong.append(f"{algorithm}, {inside} a node")
    return wrong


@pytest.mark.parametrize("n", [2, 3, 5])
def test_buckets_on_their_way_at_once_do_not_mix_on_gloo(n):
    assert run_ranks(_summed_on_gloo, n) == [[]] * n
