"""The multi-rank helper itself: results in order, tracebacks, time-outs (gloo ranks)."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks


def _sum_of_ranks(rank, world_size, scale):
    value = torch.tensor(float(rank * scale))
    dist.all_reduce(value)
    return rank, value.item()


def _fail_on_one(rank, world_size):
    if rank == 1:
        raise RuntimeError("rank one gave up")
    dist.barrier()


def _hang(rank, world_size):
    time.sleep(60)


def test_results_come_in_rank_order():
    assert run_ranks(_sum_of_ranks, 3, 10) == [(0, 30.0), (1, 30.0), (2, 30.0)]


def test_the_traceback_of_the_failed_rank_is_shown():
    with pytest.raises(AssertionError, match="rank one gave up"):
        run_ranks(_fail_on_one, 2)


def test_a_hang_ends_at_the_time_limit():
    with pytest.raises(AssertionError, match="did not finish"):
        run_ranks(_hang, 2, timeout_s=2)
