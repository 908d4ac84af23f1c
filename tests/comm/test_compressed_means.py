"""Means over ranks in compressed form: what arrives and what is still owed is what was given."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.collectives import Collectives
from paceline.comm.compress.compressors import compressor_of
from paceline.comm.compress.feedback import BufferPart, ErrorFeedback
from paceline.comm.compress.means import UncompressedRest, chunks
from paceline.comm.queue import CollectiveQueue
from paceline.config.comm import codec
from tests.ranks import run_ranks

# A layer's tensors; powersgd takes the first one only, the codecs all.
SHAPES = {"a": (40, 60), "b": (700,), "c": (3, 5, 64)}
CODECS = ("fp16", "bf16", "int8", "fp8", "int4", "quinary", "onebit", "topk:0.05", "powersgd:2")
STEPS = 3


@given(st.integers(1, 5000), st.integers(1, 9))
def test_chunks_are_whole_blocks_that_cover_all(num_values, num_ranks):
    cuts = chunks(num_values, num_ranks)
    assert len(cuts) == num_ranks
    covered = [place for cut in cuts for place in range(cut.start, cut.stop)]
    assert covered == list(range(num_values))
    assert all(cut.start % 256 == 0 or cut.start == num_values for cut in cuts)
    assert max(cut.stop - cut.start for cut in cuts) == cuts[0].stop


def _wait(jobs) -> None:
    queue = CollectiveQueue(torch.device("cpu"))
    for job in jobs:
        queue.submit(job)
    queue.flush()
    queue.wait()


def _averaged(rank, world_size, names, dtype):
    """Of each codec: what was given, got and owed on this rank, over some steps."""
    found = {}
    for name in names:
        group = dist.group.WORLD
        compressor = compressor_of(codec(name), group)
        parts = [
            BufferPart(key, torch.Size(shape), compressor.takes(torch.Size(shape)))
            for key, shape in SHAPES.items()
        ]
        mean = compressor.mean_of(parts, torch.empty(0, dtype=dtype))
        errors = ErrorFeedback(rank, world_size).span(parts, torch.empty(0, dtype=dtype))
        stream = torch.Generator().manual_seed(rank)
        given = [torch.randn(errors.shape, generator=stream, dtype=dtype) for _ in range(STEPS)]
        got = [values.clone() for values in given]
        for values in got:
            _wait([mean.average(values, errors)])
        found[name] = (parts, given, got, errors.clone(), mean.sent_bytes)
    return found


@pytest.mark.parametrize(
    ("num_ranks", "dtype"), [(2, torch.float32), (3, torch.float32), (2, torch.float64)]
)
def test_what_arrives_and_what_is_owed_is_what_was_given(num_ranks, dtype):
    per_rank = run_ranks(_averaged, num_ranks, CODECS, dtype)
    for name in CODECS:
        parts = per_rank[0][name][0]
        mask = torch.cat([torch.full((p.num_values,), p.is_compressed) for p in parts])
        given = sum(sum(of_rank[name][1]) for of_rank in per_rank) / num_ranks
        got = sum(per_rank[0][name][2])
        owed = sum(of_rank[name][3] for of_rank in per_rank)
        off = (got + owed - given)[mask].abs().max().item()
        assert off < (1e-5 if dtype == torch.float32 else 1e-6), name
        assert owed[mask].abs().max() > 0, f"{name} is exact, which would prove nothing"
        for of_rank in per_rank[1:]:
            pairs = zip(of_rank[name][2], per_rank[0][name][2], strict=True)
            assert all(torch.equal(mine[mask], first[mask]) for mine, first in pairs), name


def _against_exact(rank, world_size, names):
    """The relative error of one step, by codec, and the bytes sent."""
    found = {}
    averaged = _averaged(rank, world_size, names, torch.float32)
    for name, (_, summands, got, _, sent) in averaged.items():
        exact = summands[0].clone()
        dist.all_reduce(exact)
        exact /= world_size
        found[name] = ((got[0] - exact).norm() / exact.norm()).item(), sent
    return found


def test_errors_and_bytes_are_those_of_the_codec():
    num_values = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    found = run_ranks(_against_exact, 2, ("fp16", "int8", "int4"))[0]
    for name, bits, step in (
        ("fp16", 16, 2**-11),
        ("int8", 8.125, 1 / 127),
        ("int4", 4.125, 1 / 7),
    ):
        error, sent = found[name]
        # The largest of a block of normal values is about 3; a rounding is off by 0.3 steps.
        assert step / 10 < error < step * 2.5, name
        # Of two ranks each sends the other its whole summand.
        assert sent == pytest.approx(num_values * bits / 8, rel=0.1), name


def _not_finite(rank, world_size, names):
    found = {}
    for name in names:
        compressor = compressor_of(codec(name), dist.group.WORLD)
        parts = [BufferPart("a", torch.Size((64, 64)), True)]
        mean = compressor.mean_of(parts, torch.empty(0))
        errors, values = torch.zeros(4096), torch.randn(4096)
        if rank == 1:
            values[100] = float("inf")
        _wait([mean.average(values, errors)])
        found[name] = bool(values.isfinite().all())
    return found


def test_what_is_not_finite_on_one_rank_is_not_finite_on_all():
    """The trainer's check for bad steps must see it."""
    for of_rank in run_ranks(_not_finite, 2, CODECS):
        assert not any(of_rank.values()), of_rank


def _rest(rank, world_size):
    buffer = torch.arange(6.0) * (rank + 1)
    rest = UncompressedRest(Collectives(dist.group.WORLD, "backend"))
    rest.take([buffer[:2], buffer[4:]])
    zeroed = buffer.clone()
    _wait([rest.average()])
    num_bytes = rest.put_back()
    return zeroed, buffer, num_bytes, rest.put_back()


def test_small_tensors_are_averaged_exactly_and_put_back():
    for rank, (zeroed, after, num_bytes, none_left) in enumerate(run_ranks(_rest, 2)):
        own = torch.arange(6.0) * (rank + 1)
        assert torch.equal(zeroed, torch.tensor([0, 0, own[2], own[3], 0, 0]))
        assert torch.equal(after, torch.tensor([0, 1.5, own[2], own[3], 6, 7.5]))
        assert (num_bytes, none_left) == (16, 0)


def test_errors_follow_their_parameters_into_other_buckets():
    like = torch.empty(0)
    a, b = (BufferPart(name, torch.Size((3,)), True) for name in "ab")
    small = BufferPart("norm", torch.Size((2,)), False)
    feedback = ErrorFeedback(0, 1)
    feedback.span([a, small, b], like).copy_(torch.arange(8.0))
    assert feedback.span([b], like).tolist() == [5, 6, 7]
    assert feedback.span([small, a], like).tolist() == [0, 0, 0, 1, 2]
    assert {name: e.tolist() for name, e in feedback.state()["0"].items()} == {
        "a": [0, 1, 2],
        "b": [5, 6, 7],
    }


@given(st.integers(1, 5), st.integers(1, 5))
def test_another_number_of_ranks_owes_the_same_sum(num_old, num_new):
    saved = {str(rank): {"a": torch.full((2,), 10.0**rank)} for rank in range(num_old)}
    owed = torch.zeros(2)
    for rank in range(num_new):
        feedback = ErrorFeedback(rank, num_new)
        mine = {old: of for old, of in saved.items() if feedback.takes_over(int(old))}
        feedback.load(mine)
        owed += feedback.span([BufferPart("a", torch.Size((2,)), True)], torch.empty(0))
    assert owed.tolist() == [sum(10.0**rank for rank in range(num_old))] * 2
