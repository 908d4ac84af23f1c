"""Partial sums over the tree of their numbers, and sums of numbers that nothing is rounded in."""

import math
from fractions import Fraction
from random import Random

import pytest
import torch

from paceline.parallel.exact_sums import WIDTH, exact_sums, read_sums, row_squares
from paceline.parallel.ordered_exchange import OrderedExchange
from paceline.parallel.partial_sums import PartialSums, TreeNode, nodes_of
from tests.ranks import run_ranks


def _summed(parts, order):
    sums = PartialSums(len(parts))
    held = []
    for number in order:
        sums.add(TreeNode(0, number), [parts[number].clone()])
        held.append(len(sums.nodes))
    assert sums.is_whole
    return sums.take_root()[0], max(held)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 8, 12, 13, 64, 100])
def test_parts_have_one_sum_in_whatever_order_they_come(count):
    torch.manual_seed(count)
    parts, stream = list(torch.randn(count, 50)), Random(count)
    expected, most = _summed(parts, range(count))
    assert most <= 2 + math.log2(count)
    for _ in range(5):
        order = stream.sample(range(count), count)
        assert torch.equal(_summed(parts, order)[0], expected)
    torch.testing.assert_close(expected, torch.stack(parts).sum(0))
    if count == 64:
        assert not torch.equal(expected, sum(parts)), "the order matters"


def test_a_rank_holds_few_nodes():
    assert nodes_of(range(8, 12), 16) == [(2, 2)]
    assert nodes_of(range(3, 6), 12) == [(0, 3), (1, 2)]
    assert nodes_of(range(12), 12) == [(4, 0)]
    assert nodes_of(range(8, 12), 12) == [(3, 1)]  # nothing stands to the right of it
    assert max(len(nodes_of(range(at, at + 1000), 4096)) for at in range(0, 3000, 7)) <= 20


def test_a_sum_has_no_negative_zero():
    sums = PartialSums(1)
    sums.add(TreeNode(0, 0), [torch.tensor([-0.0])])
    assert not torch.signbit(sums.take_root()[0]).any()


def test_a_part_that_comes_twice_is_an_error():
    sums = PartialSums(3)
    sums.add(TreeNode(0, 0), [])
    with pytest.raises(AssertionError, match="came twice"):
        sums.add(TreeNode(0, 0), [])


SIZES = [(7, 30), (1,), (0, 4), (13,)]


def _exchanged(rank, world_size, shares):
    """Sums of parts that the ranks have in shares, everywhere and in pieces."""
    import torch.distributed as dist

    found = []
    for numbers in shares:
        num_parts = sum(map(len, numbers))
        exchange = OrderedExchange(dist.group.WORLD, numbers, num_parts)
        sums, pieces = PartialSums(num_parts), PartialSums(num_parts)
        for number in numbers[rank]:
            sums.add(TreeNode(0, number), _part(number))
            flat = torch.cat([each.flatten() for each in _part(number)])
            pieces.add(TreeNode(0, number), [flat[: world_size * 50].view(world_size, 50)])
        everywhere = exchange.everywhere(sums)
        sent = exchange.sent_bytes
        (piece,) = exchange.scatter(pieces).take_root()
        assert piece.untyped_storage().nbytes() == piece.nbytes, "nothing else is kept"
        found.append((everywhere, piece, sent))
    return found


def _part(number):
    stream = torch.Generator().manual_seed(number)
    return [torch.randn(size, generator=stream) for size in SIZES]


def test_ranks_sum_their_parts_as_one_would():
    shares = [
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
        [[0], [1, 2], [3, 4, 5]],
        [[0, 3, 6], [1, 4, 7], [2, 5, 8]],
    ]
    of_ranks = run_ranks(_exchanged, 3, shares)
    values = sum(torch.Size(size).numel() for size in SIZES)
    for case, numbers in enumerate(shares):
        sums = PartialSums(sum(map(len, numbers)))
        for number in range(sums.num_parts):
            sums.add(TreeNode(0, number), _part(number))
        expected = sums.take_root()
        flat = torch.cat([each.flatten() for each in expected])
        for rank, found in enumerate(of_ranks):
            everywhere, piece, _ = found[case]
            assert all(map(torch.equal, everywhere, expected))
            assert torch.equal(piece, flat[rank * 50 : (rank + 1) * 50])
    # One node each: the bytes of an all-reduce, of values filled up to a multiple of the ranks.
    filled = 4 * 3 * math.ceil(values / 3)
    assert all(found[0][2] == 2 * filled * 2 // 3 for found in of_ranks)


@pytest.mark.parametrize("exponent", [0, 200, -290, -310])
def test_sums_of_numbers_are_exact_and_know_no_order(exponent):
    torch.manual_seed(exponent + 400)
    spread = torch.exp(torch.randn(3, 400, dtype=torch.float64) * 12)
    values = torch.randn(3, 400, dtype=torch.float64) * spread * 10.0**exponent
    sums = read_sums(exact_sums(values))
    for row, got in zip(values.tolist(), sums.tolist(), strict=True):
        wanted = sum(map(Fraction, row))
        assert abs(Fraction(got) - wanted) <= Fraction(sum(map(abs, row))) / 2**50
    for cut in (1, 77, 399):
        order = torch.randperm(400)
        parts = values[:, order[:cut]], values[:, order[cut:]]
        assert torch.equal(read_sums(exact_sums(parts[0]) + exact_sums(parts[1])), sums)


def test_a_carry_runs_through_all_digits():
    ones = torch.tensor([[2.0**k for k in range(-1074, 900)]], dtype=torch.float64)
    smallest = torch.tensor([[2.0**-1074]], dtype=torch.float64)
    assert read_sums(exact_sums(ones) + exact_sums(smallest)) == 2.0**900
    assert read_sums(exact_sums(-ones) + exact_sums(-smallest)) == -(2.0**900)


def test_what_is_not_finite_stays_so():
    inf, nan = math.inf, math.nan
    rows = [[inf, 1.0], [-inf, 1.0], [inf, -inf], [nan, 1.0], [1e308, 1e308], [0.0, -0.0]]
    digits = exact_sums(torch.tensor(rows, dtype=torch.float64))
    assert digits.shape == (6, WIDTH)
    assert str(read_sums(digits).tolist()) == str([inf, -inf, nan, nan, inf, 0.0])
    assert read_sums(exact_sums(torch.zeros(1, 0, dtype=torch.float64))).tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_squares_of_a_row_do_not_depend_on_the_others(dtype):
    x = torch.randn(37, 3, 33).to(dtype)
    whole = row_squares(x)
    for first, last in ((0, 1), (5, 9), (36, 37), (4, 4)):
        assert torch.equal(row_squares(x[first:last]), whole[first:last])
    torch.testing.assert_close(whole, x.double().square().sum((1, 2)))
