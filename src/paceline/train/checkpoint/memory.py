"""Recovery from the memory of ranks: the newest step of which all pieces are left, put together.

Every rank tells what it holds. All take the newest step whose pieces make up every tensor, and
each asks for the regions of its own layout: of itself where it has them, else of whoever has been
asked for least. Who is asked checks its copy first, and who gets something checks what came; a
damaged piece counts as lost from then on, for all ranks, and the search begins anew. Nothing is
unpickled, no rank needs a whole tensor, and what is held stays until the caller lets it go: a loss
on the way takes nothing along.

Not here: copies (`buddies`), and what becomes of a loaded state (`train.run_checkpoints`).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.train.checkpoint.files import (
    FORMAT_VERSION,
    DamagedError,
    FoundState,
    Manifest,
    TensorEntry,
)
from paceline.train.checkpoint.held import (
    HeldState,
    History,
    Kind,
    Piece,
    Row,
    checksum,
    is_per_rank,
    starts,
    views,
)
from paceline.train.checkpoint.loading import has_good_after
from paceline.train.checkpoint.lockstep import LockstepRanks
from paceline.train.checkpoint.plan import RankState
from paceline.train.checkpoint.regions import Region

# What is asked for at a time, so that holders share a large tensor; and what one message carries.
_PART_BYTES, _BATCH_BYTES = 8 << 20, 64 << 20
# From the best source to the last.
_KINDS: tuple[Kind, ...] = ("live", "own", "buddy")


@dataclass(frozen=True)
class Recovered:
    """How ranks went on from what they held."""

    step: int
    source: Kind
    """The last resort that some rank needed: what trained, copies of ranks that are left, or
    copies of others."""
    bytes: int
    """What travelled between ranks, of all of them."""
    seconds: float
    history: History
    """Of the states that follow."""


def recover(
    go_on_from: Callable[[FoundState], None],
    held: Sequence[HeldState],
    ranks: LockstepRanks,
    generation: int,
    saved: Path,
) -> Recovered | None:
    """Put the newest state together that the ranks still hold. Every rank calls this.

    Args:
        go_on_from: loads a state (`loading.load`) into this rank's layout, as of a checkpoint.
        held: what this rank has; a new process has nothing.
        ranks: all of the new generation.
        generation: its number.
        saved: where the checkpoints are.

    Returns:
        what was loaded, or None where no step is left whole or the disk has a later one: then the
        disk has the last word.

    Raises:
        InputError: what is held isn't of this model and optimizer.
        RuntimeError: another rank was lost meanwhile; what is held is as it was.
    """
    began = time.perf_counter()
    pool = _Pool.of(held, ranks)
    while (found := pool.newest()) is not None:
        # One looks for all: the others may hear of a checkpoint later than it does.
        if any(ranks.all_gather(ranks.rank == 0 and has_good_after(saved, found.step))):
            return None
        try:
            go_on_from(found)
        except DamagedError:
            continue
        history = (*found.history, (generation, found.step))
        seconds = time.perf_counter() - began
        return Recovered(found.step, found.source, found.moved_bytes, seconds, history)
    return None


class _Source(NamedTuple):
    """Where a piece is: the rank, which of its held states, which piece of that."""

    rank: int
    state: int
    piece: int


class _Request(NamedTuple):
    """A region that one rank asks another for."""

    source: _Source
    region: Region

    @staticmethod
    def of_plain(record: Sequence[Any]) -> "_Request":
        source, (offsets, sizes) = record
        return _Request(_Source(*source), Region(tuple(offsets), tuple(sizes)))


class _Wanted(NamedTuple):
    """A region that this rank needs, and where it goes."""

    path: str
    region: Region
    target: Tensor


@dataclass(frozen=True)
class _Pool:
    """What all ranks hold, as each of them knows it."""

    ranks: LockstepRanks
    held: Sequence[HeldState]
    offers: list[list[HeldState]]
    """Of each rank, with pieces that have no contents."""
    damaged: set[_Source] = field(default_factory=set)

    @staticmethod
    def of(held: Sequence[HeldState], ranks: LockstepRanks) -> "_Pool":
        """Let all know of all."""
        everyone = ranks.all_gather([_told(one) for one in held])
        return _Pool(ranks, held, [[_heard(each) for each in told] for told in everyone])

    def newest(self) -> "FoundInMemory | None":
        """The newest step whose pieces make up every tensor, with what isn't damaged."""
        everything = [one for told in self.offers for one in told]
        if not everything:
            return None
        # Of runs that parted, the one that went on last.
        present = max((one.history for one in everything), key=lambda h: h[-1:] or ((-1, 0),))
        for step in sorted({one.step for one in everything}, reverse=True):
            of_step = [
                (rank, number, one)
                for rank, told in enumerate(self.offers)
                for number, one in enumerate(told)
                if one.step == step and one.follows(present)
            ]
            if of_step and (found := self._put_together(step, of_step)) is not None:
                return found
        return None

    def _put_together(
        self, step: int, offers: list[tuple[int, int, HeldState]]
    ) -> "FoundInMemory | None":
        holders: dict[str, list[tuple[_Source, Row]]] = {}
        for rank, number, one in offers:
            for at, piece in enumerate(one.pieces):
                source = _Source(rank, number, at)
                if source not in self.damaged:
                    holders.setdefault(piece.row.path, []).append((source, piece.row))
        names = frozenset[str]().union(*(one.names for *_, one in offers))
        entries = {}
        for path in sorted(names | holders.keys()):  # in one order on all ranks
            pieces = [row for _, row in holders.get(path, [])]
            cover = dict.fromkeys(row.region for row in pieces)
            if pieces and Region.whole(pieces[0].whole).is_covered(cover):
                size = list(pieces[0].whole)
                entries[path] = TensorEntry(dtype=pieces[0].dtype, size=size, chunks=[])
            elif not is_per_rank(path):
                return None
        manifest = Manifest(
            format=FORMAT_VERSION,
            step=step,
            facts=offers[0][2].facts,
            values={name: value for *_, one in offers for name, value in one.values.items()},
            files={},
            tensors=entries,
        )
        history = max((one.history for *_, one in offers), key=len)
        return FoundInMemory(step, manifest, self, holders, history)

    def kind_of(self, source: _Source) -> int:
        """Its place in the order of resorts."""
        return _KINDS.index(self.offers[source.rank][source.state].kind)

    def row_of(self, source: _Source) -> Row:
        """What it is a piece of."""
        return self.offers[source.rank][source.state].pieces[source.piece].row

    def own(self, request: _Request) -> Tensor:
        """The contents of a region that this rank is asked for, contiguous."""
        piece = self._piece(request.source)
        return piece.tensor[request.region.within(piece.row.region)].contiguous()

    def is_good(self, source: _Source) -> bool:
        """Whether a piece of this rank's is what it was when it was copied."""
        return self._piece(source).is_good

    def _piece(self, source: _Source) -> Piece:
        return self.held[source.state].pieces[source.piece]


@dataclass(frozen=True)
class FoundInMemory(FoundState):
    """A state that the ranks hold between them."""

    pool: _Pool
    holders: dict[str, list[tuple[_Source, Row]]]
    history: History
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def moved_bytes(self) -> int:
        """What travelled between ranks."""
        return self.counts["bytes"]

    @property
    def source(self) -> Kind:
        """The last resort that was needed."""
        return _KINDS[self.counts["kind"]]

    def fill(self, targets: dict[str, Tensor]) -> None:
        """Ask for what each target lacks, and answer what others ask.

        Raises:
            DamagedError: what isn't damaged no longer makes up the whole; on every rank.
        """
        pool, ranks = self.pool, self.pool.ranks
        wanted = list(self._wanted(targets))
        while True:
            chosen = self._choose(wanted)
            asked = ranks.all_gather([] if chosen is None else list(chosen))
            if ranks.any_of([chosen is None])[0] or chosen is None:
                raise DamagedError(f"what the ranks hold of step {self.step} is damaged")
            requests = [[_Request.of_plain(record) for record in mine] for mine in asked]
            if not any(requests):
                return
            sums = self._checked(requests)
            pool.damaged.update(r.source for known in sums for r, s in known.items() if s is None)
            good = [[r for r, s in known.items() if s is not None] for known in sums]
            self._count(good)
            landed = self._transfer(good, chosen, sums[ranks.rank])
            spoilt = [r.source for r in good[ranks.rank] if r not in landed]
            for of_rank in ranks.all_gather(spoilt):
                pool.damaged.update(_Source(*source) for source in of_rank)
            wanted = [each for request, each in chosen.items() if request not in landed]

    def _wanted(self, targets: dict[str, Tensor]) -> Iterator[_Wanted]:
        for item, data, tensor in RankState.of(dict(targets)).pieces():
            region = Region(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            if region.numel:
                for part in region.rows(max(1, _PART_BYTES // tensor.element_size())):
                    yield _Wanted(item.index.fqn, part, tensor[part.within(region)])

    def _choose(self, wanted: Iterable[_Wanted]) -> dict[_Request, _Wanted] | None:
        """Whom to ask, for what; None: something is nowhere."""
        me, size = self.pool.ranks.rank, self.pool.ranks.size
        taken: Counter[int] = Counter()

        def cost(each: tuple[_Source, Region]) -> tuple[bool, int, int, int]:
            source, _ = each
            apart = (source.rank - me) % size
            return apart > 0, taken[source.rank], apart, self.pool.kind_of(source)

        chosen: dict[_Request, _Wanted] = {}
        for path, region, target in wanted:
            rest = [region]
            while rest:
                part = rest.pop()
                overlaps = (
                    (source, part.overlap(row.region))
                    for source, row in self.holders[path]
                    if source not in self.pool.damaged
                )
                found = [(source, shared) for source, shared in overlaps if shared is not None]
                if not found:
                    return None
                source, shared = min(found, key=cost)
                taken[source.rank] += shared.numel * target.element_size()
                at = target[shared.within(region)]
                chosen[_Request(source, shared)] = _Wanted(path, shared, at)
                rest += part.without(shared)
        return chosen

    def _checked(self, requests: list[list[_Request]]) -> list[dict[_Request, int | None]]:
        """Of each rank's requests the checksum of what it will get; None: the piece is damaged."""
        pool, me = self.pool, self.pool.ranks.rank
        mine = {r.source for of_rank in requests for r in of_rank if r.source.rank == me}
        good = {source for source in mine if pool.is_good(source)}
        answers = [
            [
                (checksum(pool.own(r)) if asking != me else 0) if r.source in good else None
                for r in of_rank
                if r.source.rank == me
            ]
            for asking, of_rank in enumerate(requests)
        ]
        everyone = [[iter(told) for told in of_rank] for of_rank in pool.ranks.all_gather(answers)]
        return [
            {r: next(everyone[r.source.rank][asking]) for r in of_rank}
            for asking, of_rank in enumerate(requests)
        ]

    def _count(self, requests: list[list[_Request]]) -> None:
        for asking, of_rank in enumerate(requests):
            for request in of_rank:
                row = self._row(request)
                if not is_per_rank(row.path):
                    kind = self.pool.kind_of(request.source)
                    self.counts["kind"] = max(self.counts["kind"], kind)
                if request.source.rank != asking:
                    self.counts["bytes"] += row.num_bytes

    def _row(self, request: _Request) -> Row:
        return self.pool.row_of(request.source)._replace(region=request.region)

    @torch.no_grad()
    def _transfer(
        self,
        requests: list[list[_Request]],
        chosen: dict[_Request, _Wanted],
        sums: dict[_Request, int | None],
    ) -> set[_Request]:
        """Send what others asked for, and put what comes where it belongs.

        Returns:
            what came as it was sent.
        """
        me, group = self.pool.ranks.rank, self.pool.ranks.group
        peers = [peer for peer in range(len(requests)) if peer != me]
        outgoing = {p: self._batches(r for r in requests[p] if r.source.rank == me) for p in peers}
        coming = {p: self._batches(r for r in requests[me] if r.source.rank == p) for p in peers}
        landed = {r for r in requests[me] if r.source.rank == me}
        for request in landed:
            chosen[request].target.copy_(self.pool.own(request))
        rounds = max(map(len, (*outgoing.values(), *coming.values())), default=0)
        for tag in range(rounds):
            works: list[dist.Work | None] = []
            tensors: dict[_Request, Tensor] = {}
            for peer in peers:
                for batch in coming[peer][tag : tag + 1]:
                    rows = [self._row(r) for r in batch]
                    buffer = torch.empty(starts(rows)[1], dtype=torch.uint8)
                    works.append(dist.irecv(buffer, group=group, group_src=peer, tag=tag))
                    tensors |= dict(zip(batch, views(buffer, rows), strict=True))
                for batch in outgoing[peer][tag : tag + 1]:
                    packed = self._packed(batch)
                    works.append(dist.isend(packed, group=group, group_dst=peer, tag=tag))
            for work in works:
                if work is not None:
                    work.wait()
            for request, tensor in tensors.items():
                if checksum(tensor) == sums[request]:
                    chosen[request].target.copy_(tensor)
                    landed.add(request)
        return landed

    def _batches(self, requests: Iterable[_Request]) -> list[list[_Request]]:
        """What travels together."""
        batches: list[list[_Request]] = []
        left = 0
        for request in requests:
            num_bytes = self._row(request).num_bytes
            if num_bytes > left:
                batches.append([])
                left = _BATCH_BYTES
            batches[-1].append(request)
            left -= num_bytes
        return batches

    def _packed(self, batch: list[_Request]) -> Tensor:
        rows = [self._row(r) for r in batch]
        packed = torch.empty(starts(rows)[1], dtype=torch.uint8)
        for request, view in zip(batch, views(packed, rows), strict=True):
            view.copy_(self.pool.own(request))
        return packed


def _told(held: HeldState) -> list[Any]:
    """What others need to know of it."""
    own = [held.step, held.facts, held.values, held.rows, held.kind, held.history]
    return [*own, sorted(held.names)]


def _heard(record: list[Any]) -> HeldState:
    step, facts, values, rows, kind, history, names = record
    nothing = torch.empty(0)
    pieces = [Piece(Row.of_plain(row), nothing) for row in rows]
    past = tuple((generation, first) for generation, first in history)
    return HeldState(step, facts, values, pieces, kind, past, frozenset(names))
