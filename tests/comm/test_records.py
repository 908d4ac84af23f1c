"""Records between ranks: what arrives is what was sent, and never runs code (gloo ranks)."""

import pickle

import torch.distributed as dist

from paceline.comm import records
from tests.ranks import run_ranks

RECORD = {"text": "größer", "bytes": b"\x80\x04", "numbers": [1, -2.5, None, True], "nested": [{}]}


def _exchanged(rank, world_size):
    mine = {**RECORD, "rank": rank, "filler": "x" * 1000 * rank}
    everyone = records.all_gather(mine)
    gathered = records.gather(rank)
    scattered = records.scatter([f"for {each}" * each for each in range(world_size)])
    said = records.broadcast(RECORD if rank == 0 else "not looked at")
    others = dist.new_group([1, 2])
    in_part = records.broadcast(rank, others) if rank in (1, 2) else None
    if rank == 0:
        records.send(RECORD, 2)
    received = records.receive(0) if rank == 2 else None
    return everyone, gathered, scattered, said, in_part, received


def test_every_rank_gets_what_was_sent_to_it():
    expected = [{**RECORD, "rank": rank, "filler": "x" * 1000 * rank} for rank in range(3)]
    for rank, got in enumerate(run_ranks(_exchanged, 3)):
        gathered = [0, 1, 2] if rank == 0 else []
        in_part, received = 1 if rank else None, RECORD if rank == 2 else None
        assert got == (expected, gathered, f"for {rank}" * rank, RECORD, in_part, received)


def test_a_process_alone_hears_itself():
    assert records.all_gather(RECORD) == records.gather(RECORD) == [RECORD]
    assert records.scatter([RECORD]) == records.broadcast(RECORD) == RECORD


class _Evil:
    def __reduce__(self):
        return print, ("ran",)


def _planted(rank, world_size):
    """A pickle in the place of a record is bytes, and nothing else."""
    return records.all_gather(pickle.dumps(_Evil()))


def test_a_pickle_stays_bytes():
    assert run_ranks(_planted, 2) == [[pickle.dumps(_Evil())] * 2] * 2
