"""Buddies: each rank's part of the state, copied into its own and another node's memory.

How a copy goes. On the training thread a rank puts its state together and copies its pieces to host
memory (pinned beside a CUDA device); that is all the step waits for. A thread then checksums them,
sends to the buddy what no rank of another node holds anyway, takes what others send here, and hears
from all whether it arrived. There are two places for each copy. One is written over only when all
ranks have the copy in the other: whoever is lost, and whenever, the last step that all have is
whole.

Copies of the generation before stay until all ranks have the first one of this generation.

Not here: how a state is put together again (`memory`).

Source: Gemini (Wang et al., SOSP 2023) for checkpoints in the memory of peers.
"""

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import records
from paceline.comm.rank_env import Ranks
from paceline.config.frozen import Auto
from paceline.train.checkpoint.held import (
    HeldState,
    Piece,
    Row,
    is_per_rank,
    starts,
    views,
)
from paceline.train.checkpoint.regions import Region

# Of a step's time, for "auto": what a copy may cost, spread over the steps between two.
_SHARE = 0.01
# The first copies pay for their memory; of those after them the middle one of so many counts.
_WARM_UP, _REMEMBERED = 2, 5
# One message at most; larger ones gain nothing.
_MESSAGE_BYTES = 64 << 20


def buddy_of(nodes: Sequence[int], rank: int) -> int:
    """Whose memory holds the copy of a rank's part: the rank at its place in the next node, or,
    where there is one node, the next rank.

    Args:
        nodes: of each rank, in the order of ranks.
        rank: whose buddy.
    """
    if len(set(nodes)) == 1:
        return (rank + 1) % len(nodes)
    order = list(dict.fromkeys(nodes))
    follower = order[(order.index(nodes[rank]) + 1) % len(order)]
    place = nodes[:rank].count(nodes[rank])
    ranks = [other for other, node in enumerate(nodes) if node == follower]
    return ranks[place % len(ranks)]


def rows_to_send(tables: Sequence[Sequence[Row]], nodes: Sequence[int], rank: int) -> list[int]:
    """Which of a rank's pieces no rank of another node holds, or of the one node no other rank.

    Args:
        tables: the pieces of each rank.
        nodes: of each rank.
        rank: whose pieces.
    """
    is_one = len(set(nodes)) == 1
    elsewhere: dict[str, set[Region]] = {}
    for other, rows in enumerate(tables):
        if other != rank if is_one else nodes[other] != nodes[rank]:
            for row in rows:
                elsewhere.setdefault(row.path, set()).add(row.region)
    return [
        number
        for number, row in enumerate(tables[rank])
        if not row.region.is_covered(elsewhere.get(row.path, ()))
    ]


def is_everywhere(tables: Sequence[Sequence[Row]]) -> bool:
    """Whether each rank holds the whole state: then a lost one takes nothing along."""
    wholes = [
        {row.path for row in rows if row.region == Region.whole(row.whole)} for rows in tables
    ]
    names = {row.path for rows in tables for row in rows if not is_per_rank(row.path)}
    return all(names <= whole for whole in wholes)


class Buddies:
    """The copies of one rank, in one generation. Every rank makes the same calls.

    Args:
        ranks: this one's place; a node's ranks follow each other.
        group: of all ranks, for tensors in host memory; nobody else may use it.
        every: steps between copies; "auto": as many as keep their cost at 1 % of a step's time.
        kept: copies that were made before this generation, and their state.
    """

    def __init__(
        self,
        ranks: Ranks,
        group: dist.ProcessGroup | None,
        every: Auto | int,
        kept: Iterable[HeldState] = (),
    ) -> None:
        self.every = 1 if every == "auto" else every
        """Steps between copies, as it is now."""
        self.names: frozenset[str] = frozenset()
        """Of the tensors of all ranks, as of the last copy."""
        self.cost_s = 0.0
        """Of the last copy: how long the step waited, and the processor time of the thread; in the
        end, the slowest rank's."""
        self.sent_bytes = 0
        """Of the pieces that this rank's last copy sent to the buddy."""
        self.last_whole: int | None = None
        """The newest step of which all ranks have their copies."""
        self._is_auto = every == "auto"
        self._ranks, self._group = ranks, group
        self._kept = tuple(kept)
        self._own = [_Place(), _Place()]
        self._guests: dict[int, list[_Place]] = {}
        self._tables: list[list[Row]] = [[] for _ in range(ranks.world_size)]
        self._nodes: list[int] = []
        self._sent: list[list[int]] = []
        self._is_everywhere = False
        self._due = 0
        self._last: tuple[int, float] | None = None
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)
        self._num_copies = 0
        self._thread: threading.Thread | None = None
        self._is_broken = False
        self._failure: Exception | None = None

    def is_due(self, done: int) -> bool:
        """Whether the state after so many steps is to be copied; on all ranks alike."""
        return self._ranks.world_size > 1 and done >= self._due

    def renew(self, held: HeldState, prepared_s: float = 0.0) -> float:
        """Copy this rank's part, and begin to send it.

        Args:
            held: what trains; it may change as soon as this returns.
            prepared_s: seconds that it took to put that together.

        Returns:
            the seconds that the step waited: these, for the copy before, where that is still on its
            way, and for this one. Nothing happens any more after a rank was lost.
        """
        began = time.perf_counter() - prepared_s
        self.finish()
        if self._is_broken:
            return prepared_s
        self._due = held.step + self.every
        step_s = self._step_time(held.step, began)
        place = _spare(self._own, self.last_whole)
        place.copy(held, self._numbers_to_keep(held))
        waited_s = time.perf_counter() - began
        self._last = held.step, time.perf_counter()
        self._thread = threading.Thread(
            target=self._send, args=(place, waited_s, step_s), name="buddies", daemon=True
        )
        self._thread.start()
        return waited_s

    def finish(self) -> None:
        """Wait until the last copy has arrived everywhere, or a rank is lost.

        Raises:
            Exception: what went wrong on the thread, other than a lost rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def offers(self) -> list[HeldState]:
        """The copies in this rank's memory that are whole, for `recover`. They stay as they are
        until the next copy is made."""
        places = [*self._own, *(place for each in self._guests.values() for place in each)]
        return [*self._kept, *(place.held for place in places if place.held is not None)]

    def _numbers_to_keep(self, held: HeldState) -> list[int]:
        """Which pieces this rank copies for itself. Where every rank has all of it, a lost one
        takes only its generators along; but what trains on a CUDA device doesn't count, since
        broken collectives spoil it."""
        everything = list(range(len(held.pieces)))
        on_host = not any(piece.tensor.is_cuda for piece in held.pieces)
        is_known = held.rows == self._tables[self._ranks.rank]
        if not (self._is_everywhere and on_host and is_known):
            return everything
        return [number for number in everything if is_per_rank(held.pieces[number].row.path)]

    def _step_time(self, step: int, now: float) -> float:
        """Mean seconds of a step since the last copy; 0: not known."""
        if self._last is None or step <= self._last[0]:
            return 0.0
        return (now - self._last[1]) / (step - self._last[0])

    def _send(self, place: "_Place", waited_s: float, step_s: float) -> None:
        began_s = time.thread_time()
        try:
            waited_s += place.seal()
            self._exchange_tables(place)
            arrived = self._exchange_copies(place)
            cost_s = waited_s + time.thread_time() - began_s
            words = records.all_gather([arrived, cost_s, step_s], self._group)
        except RuntimeError:  # a rank was lost: the step's own collectives say so
            self._is_broken = True
            return
        except Exception as error:
            self._failure = error
            return
        assert place.held is not None
        if all(ok for ok, _, _ in words):
            self.last_whole = place.held.step
            self._kept = ()
        self.cost_s = max(cost for _, cost, _ in words)
        self._choose_interval(max(step for _, _, step in words))

    def _choose_interval(self, step_s: float) -> None:
        self._num_copies += 1
        if not self._is_auto or self._num_copies <= _WARM_UP or not step_s:
            return
        self._costs.append(self.cost_s)
        self.every = max(1, math.ceil(statistics.median(self._costs) / (_SHARE * step_s)))

    def _exchange_tables(self, place: "_Place") -> None:
        """Tell the others what this rank's pieces are, where they aren't those of its last copy."""
        assert place.held is not None
        mine, rank = place.offered, self._ranks.rank
        word = None if self._tables[rank] == mine else mine
        node = rank - self._ranks.local_rank
        everyone = records.all_gather([node, word], self._group)
        self._nodes = [node for node, _ in everyone]
        for other, (_, rows) in enumerate(everyone):
            if rows is not None:
                self._tables[other] = [Row.of_plain(row) for row in rows]
        if any(rows is not None for _, rows in everyone):
            self._sent = [
                rows_to_send(self._tables, self._nodes, other) for other in range(len(everyone))
            ]
            self._is_everywhere = is_everywhere(self._tables)
            paths = {row.path for rows in self._tables for row in rows}
            self.names = frozenset(path for path in paths if not is_per_rank(path))
        place.held = replace(place.held, names=self.names)

    def _exchange_copies(self, place: "_Place") -> bool:
        """Send this rank's copy and take those of others; return whether they arrived whole."""
        held, rank = place.held, self._ranks.rank
        assert held is not None
        sums = place.checksums(self._sent[rank])
        said = msgspec.msgpack.encode([held.step, held.facts, held.values, held.history, sums])
        lengths = records.all_gather(len(said), self._group)
        guests = [r for r in range(len(lengths)) if buddy_of(self._nodes, r) == rank]
        header = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        outgoing = [header, *place.messages(self._sent[rank])]
        buddy = buddy_of(self._nodes, rank)
        works = [
            dist.isend(message, group=self._group, group_dst=buddy, tag=tag)
            for tag, message in enumerate(outgoing)
        ]
        self.sent_bytes = sum(len(message) for message in outgoing[1:])
        coming = {}
        for guest in guests:
            rows = [self._tables[guest][number] for number in self._sent[guest]]
            places = self._guests.setdefault(guest, [_Place(), _Place()])
            spare = _spare(places, self.last_whole)
            spare.make_room(rows, self._sent[guest])
            headed = torch.empty(lengths[guest], dtype=torch.uint8)
            coming[guest] = spare, rows, headed
            works += [
                dist.irecv(message, group=self._group, group_src=guest, tag=tag)
                for tag, message in enumerate([headed, *spare.messages(self._sent[guest])])
            ]
        for work in works:
            if work is not None:
                work.wait()
        damaged = [guest for guest, each in coming.items() if not self._accept(*each)]
        return not damaged

    def _accept(self, place: "_Place", rows: list[Row], header: Tensor) -> bool:
        """Keep what came, if it is what was sent."""
        step, facts, values, history, sums = msgspec.msgpack.decode(header.numpy().tobytes())
        tensors = views(place.memory, rows)
        pieces = [Piece(*each) for each in zip(rows, tensors, sums, strict=True)]
        if not all(piece.is_good for piece in pieces):
            return False
        generations = tuple((number, first) for number, first in history)
        place.held = HeldState(step, facts, values, pieces, "buddy", generations, self.names)
        return True


class _Place:
    """Memory for one copy, kept from one to the next."""

    def __init__(self) -> None:
        self.held: HeldState | None = None
        """None: there is none, or it is being written."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.offered: list[Row] = []
        """All pieces of the rank that this copy is of."""
        self._position: dict[int, int] = {}
        self._rows: list[Row] = []
        self._coming: tuple[HeldState, torch.cuda.Stream, torch.cuda.Event] | None = None

    def make_room(self, rows: list[Row], numbers: Sequence[int], *, pin: bool = False) -> None:
        """Let go of what is here, for other pieces.

        Args:
            rows: what they are.
            numbers: of these pieces among all of their rank, ascending.
            pin: whether a device copies from here.
        """
        self.held = None
        _, length = starts(rows)
        if length != len(self.memory):
            self.memory = torch.empty(0, dtype=torch.uint8)  # let go before more is asked for
            self.memory = torch.empty(length, dtype=torch.uint8, pin_memory=pin)
        self._rows, self._position = rows, {number: at for at, number in enumerate(numbers)}

    @torch.no_grad()
    def copy(self, held: HeldState, numbers: Sequence[int]) -> None:
        """Take a copy of some pieces; where they lie on a device, `seal` waits for it."""
        self.offered = held.rows
        device = next((p.tensor.device for p in held.pieces if p.tensor.is_cuda), None)
        sources = [held.pieces[number] for number in numbers]
        rows = [piece.row for piece in sources]
        self.make_room(rows, numbers, pin=device is not None)
        tensors = views(self.memory, rows)
        pieces = [Piece(row, tensor) for row, tensor in zip(rows, tensors, strict=True)]
        copied = replace(held, pieces=pieces, kind="own")
        if device is None:
            for piece, source in zip(pieces, sources, strict=True):
                piece.tensor.copy_(source.tensor)
            self.held = copied
            return
        stream, present = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        began = torch.cuda.Event(enable_timing=True)
        stream.wait_stream(present)
        with torch.cuda.stream(stream):
            began.record()
            for piece, source in zip(pieces, sources, strict=True):
                piece.tensor.copy_(source.tensor, non_blocking=True)
        present.wait_stream(stream)  # the device, not the host, waits before it changes anything
        self._coming = copied, stream, began

    def seal(self) -> float:
        """Wait until the copy is there, and checksum it; return the seconds that a device waited
        for it."""
        waited_s = 0.0
        if self._coming is not None:
            self.held, stream, began = self._coming
            with torch.cuda.stream(stream):
                ended = torch.cuda.Event(enable_timing=True)
                ended.record()
            ended.synchronize()
            waited_s, self._coming = began.elapsed_time(ended) / 1e3, None
        assert self.held is not None
        self.held.seal()
        return waited_s

    def checksums(self, numbers: Iterable[int]) -> list[int | None]:
        """Of some pieces, by their numbers among all of their rank."""
        assert self.held is not None
        return [self.held.pieces[self._position[number]].checksum for number in numbers]

    def messages(self, numbers: Sequence[int]) -> Iterator[Tensor]:
        """The memory of some pieces, in parts that are sent as one: the same at both ends."""
        places, _ = starts(self._rows)
        for run in _runs(numbers):
            first, last = self._position[run[0]], self._position[run[-1]]
            end = places[last] + self._rows[last].num_bytes
            for at in range(places[first], end, _MESSAGE_BYTES):
                yield self.memory[at : min(at + _MESSAGE_BYTES, end)]


def _runs(numbers: Sequence[int]) -> list[Sequence[int]]:
    """Ascending numbers, cut where one is missing."""
    cuts = [at for at in range(1, len(numbers)) if numbers[at] != numbers[at - 1] + 1]
    spans = zip([0, *cuts], [*cuts, len(numbers)], strict=True)
    return [numbers[start:end] for start, end in spans if end > start]


def _spare(places: Sequence[_Place], last_whole: int | None) -> _Place:
    """The place that may be written over."""

    def worth(place: _Place) -> tuple[bool, int]:
        step = -1 if place.held is None else place.held.step
        return step == last_whole, step

    return min(places, key=worth)
