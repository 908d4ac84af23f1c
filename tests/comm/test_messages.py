"""Records between ranks: what arrives is what was sent, and never runs code (gloo ranks)."""

import pickle

import torch.distributed as dist

from paceline.comm import messages
from tests.ranks import run_ranks

RECORD = {"text": "größer", "bytes": b"\x80\x04", "numbers": [1, -2.5, None, True], "nested": [{}]}


def _exchanged(rank, world_size):
    mine = {**RECORD, "rank": rank, "filler": "x" * 1000 * rank}
    everyone = messages.all_gather(mine)
    gathered = messages.gather(rank)
    scattered = messages.scatter([f"for {each}" * each for each in range(world_size)])
    said = messages.broadcast(RECORD if rank == 0 else "not looked at")
    others = dist.new_group([1, 2])
    in_part = messages.broadcast(rank, others) if rank in (1, 2) else None
    return everyone, gathered, scattered, said, in_part


def test_every_rank_gets_what_was_sent_to_it():
    expected = [{**RECORD, "rank": rank, "filler": "x" * 1000 * rank} for rank in range(3)]
    for rank, got in enumerate(run_ranks(_exchanged, 3)):
        gathered = [0, 1, 2] if rank == 0 else []
        assert got == (expected, gathered, f"for {rank}" * rank, RECORD, 1 if rank else None)


def test_a_process_alone_hears_itself():
    assert messages.all_gather(RECORD) == messages.gather(RECORD) == [RECORD]
    assert messages.scatter([RECORD]) == messages.broadcast(RECORD) == RECORD


class _Evil:
    def __reduce__(self):
        return print, ("ran",)


def _planted(rank, world_size):
    """A pickle in the place of a record is bytes, and nothing else."""
    return messages.all_gather(pickle.dumps(_Evil()))


def test_a_pickle_stays_bytes():
    assert run_ranks(_planted, 2) == [[pickle.dumps(_Evil())] * 2] * 2
