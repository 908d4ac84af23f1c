"""Units of rows and columns: what they make of a matrix (pure), and that runs go on with them."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.compress import scaled
from paceline.comm.compress.blockwise import BLOCKWISE
from paceline.comm.compress.feedback import BufferPart, ErrorFeedback
from paceline.comm.compress.means import CodecMeans
from paceline.comm.compress.scaled import ScaledMeans, ScaleUnits
from paceline.comm.queue import CollectiveQueue
from tests.ranks import run_ranks

SHAPE = (80, 128)
"""Two rows in a block."""
PARTS = (
    BufferPart("vector", torch.Size((100,)), True),
    BufferPart("matrix", torch.Size(SHAPE), True),
    BufferPart("small", torch.Size((3, 5)), False),
)
NUM_VALUES = sum(part.num_values for part in PARTS)
LIKE = torch.empty(0)
SMALL = 0.2


def _matrix(buffer: Tensor) -> Tensor:
    return buffer[100 : 100 + SHAPE[0] * SHAPE[1]].view(SHAPE)


def _uneven(seed: int) -> Tensor:
    """A buffer whose matrix has rows of magnitude 1 and SMALL in turns, and uneven columns."""
    values = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(seed))
    _matrix(values)[1::2] *= SMALL
    _matrix(values).mul_(torch.logspace(0, -1, SHAPE[1]))
    return values


def test_units_make_rows_and_columns_alike():
    units = ScaleUnits(PARTS, {}, LIKE)
    for seed in range(40):
        units.learn(_uneven(seed))
    values = _uneven(99)
    in_units = values.clone()
    units.divide(in_units)
    for values_of, even in ((values, False), (in_units, True)):
        rows = _matrix(values_of).square().mean(1).sqrt()
        columns = _matrix(values_of)[::2].square().mean(0).sqrt()
        assert (rows[::2].mean() < 1.5 * rows[1::2].mean()) == even
        assert (columns[:10].mean() < 1.5 * columns[-10:].mean()) == even
    assert torch.equal(in_units[:100], values[:100])
    assert torch.equal(in_units[-15:], values[-15:])


@pytest.mark.parametrize("chunk", [300, 5000, 1 << 17])
def test_out_of_units_is_what_went_in_whatever_the_chunks(
    chunk: int, monkeypatch: pytest.MonkeyPatch
):
    whole = ScaleUnits(PARTS, {}, LIKE)
    monkeypatch.setattr(scaled, "_CHUNK_VALUES", chunk)
    cut = ScaleUnits(PARTS, {}, LIKE)
    for seed in range(3):
        whole.learn(_uneven(seed))
        cut.learn(_uneven(seed))
    values = _uneven(5)
    first, second = values.clone(), values.clone()
    whole.divide(first)
    cut.divide(second)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=0)
    assert not torch.equal(first, values)
    cut.multiply(second)
    torch.testing.assert_close(second, values, rtol=1e-6, atol=0)


def test_what_is_not_finite_teaches_nothing():
    squares: dict[str, Tensor] = {}
    units = ScaleUnits(PARTS, squares, LIKE)
    units.learn(_uneven(0))
    before = squares["matrix"].clone()
    bad = _uneven(1)
    _matrix(bad)[3, 7], _matrix(bad)[4, 8] = math.nan, math.inf
    units.learn(bad)
    after = squares["matrix"]
    kept = torch.tensor([3, 4, SHAPE[0] + 7, SHAPE[0] + 8])
    assert torch.equal(after[kept], before[kept])
    assert after.isfinite().all()
    assert (after != before).sum() == len(before) - len(kept)


def _errors_of_rows(rank, world_size):
    """How far each row is from the exact mean after some steps, with units and without."""
    found = []
    for means in (
        ScaledMeans(BLOCKWISE["quinary"], dist.group.WORLD),
        CodecMeans(BLOCKWISE["quinary"], dist.group.WORLD),
    ):
        mean = means.mean_of(PARTS[1:2], LIKE)
        errors = torch.zeros(SHAPE[0] * SHAPE[1])
        off = torch.zeros(SHAPE[0])
        for step in range(20):
            values = _matrix(_uneven(step * world_size + rank)).flatten()
            exact = values.clone()
            dist.all_reduce(exact)
            _average(mean, values, errors)
            error = (values - exact / world_size).view(SHAPE)
            off = error.norm(dim=1) / exact.view(SHAPE).norm(dim=1) * world_size
        found.append(off)
    return found


def _average(mean, values: Tensor, errors: Tensor) -> None:
    queue = CollectiveQueue(torch.device("cpu"))
    queue.submit(mean.average(values, errors))
    queue.flush()
    queue.wait()


def test_small_rows_arrive_as_well_as_large_ones():
    with_units, without = run_ranks(_errors_of_rows, 2)[0]
    assert with_units[1::2].mean() < 1.2 * with_units[::2].mean()
    assert without[1::2].mean() > 1.5 * without[::2].mean()


def _resumed(rank, world_size):
    """The last step of a run, and of one that goes on with its state in other memory."""
    results = []
    for is_resumed in (False, True):
        means = ScaledMeans(BLOCKWISE["quinary"], dist.group.WORLD)
        mean = means.mean_of(PARTS, LIKE)
        errors = ErrorFeedback(rank, world_size).span(PARTS, LIKE)
        for step in range(6):
            if is_resumed and step == 4:
                state = {name: squares.clone() for name, squares in means.state().items()}
                means = ScaledMeans(BLOCKWISE["quinary"], dist.group.WORLD)
                means.load(state)
                mean, errors = means.mean_of(PARTS, LIKE), errors.clone()
            values = _uneven(step * world_size + rank)
            _average(mean, values, errors)
        results.append((values, errors.clone(), means.state()["matrix"]))
    return results


def test_a_run_that_goes_on_has_the_same_bits_on_all_ranks():
    (first, resumed), (of_other, _) = run_ranks(_resumed, 2)
    assert all(torch.equal(*pair) for pair in zip(first, resumed, strict=True))
    assert torch.equal(first[0], of_other[0])
    assert torch.equal(first[2], of_other[2])
    assert list(first[2].shape) == [sum(SHAPE)]
