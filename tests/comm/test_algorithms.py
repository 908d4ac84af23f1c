"""Algorithms of collectives: first the lists of messages, in numpy; then those lists on gloo ranks.

What a list must do: deliver the sum, meet its other end in every round, send no more than theory
allows, and put the same bits everywhere.
"""

import math
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.algorithms import ALGORITHMS, OPS, load, rounds, rounds_inside
from paceline.comm.algorithms import tree as trees
from paceline.comm.algorithms.blocks import Cut
from paceline.comm.collectives import Collectives, members_per_node
from paceline.config.errors import InputError
from tests.ranks import run_ranks

SIZES = (*range(1, 10), 16)
CASES = [
    (op, algorithm, n, g)
    for op in OPS
    for algorithm in ALGORITHMS[op]
    for n in SIZES
    for g in ([g for g in SIZES if n % g == 0] if algorithm == "hierarchical" else [1])
]


def part(rank, num_ranks, num_values):
    return slice(num_values * rank // num_ranks, num_values * (rank + 1) // num_ranks)


def simulate(of_rank, buffers):
    """Run all ranks' rounds side by side, each to its end before the next; values sent by rank."""
    sent = [0] * len(of_rank)
    for now in zip(*of_rank, strict=True):  # as many rounds on every rank
        on_the_way = {}
        for rank, each in enumerate(now):
            for peer, start, stop in each.sends:
                assert peer != rank
                assert start < stop, "an empty message"
                on_the_way.setdefault((rank, peer), []).append(
                    (start, stop, buffers[rank][start:stop].copy())
                )
                sent[rank] += stop - start
        for rank, each in enumerate(now):
            for peer, start, stop in each.receives:
                *cut, values = on_the_way[peer, rank].pop(0)
                assert cut == [start, stop], "the ends of a message differ"
                kept = buffers[rank][start:stop] if each.adds else 0
                buffers[rank][start:stop] = kept + values
        assert not any(on_the_way.values()), "nobody receives a message"
    return sent


def delivered(op, algorithm, n, g, num_values):
    """Check the result of an op on numbers of which every sum of some is another; values sent."""
    buffers = [np.arange(1, num_values + 1) * 4**rank for rank in range(n)]
    start = [each.copy() for each in buffers]
    of_rank = [rounds(algorithm, op, n, rank, num_values, ranks_per_node=g) for rank in range(n)]
    sent = simulate(of_rank, buffers)
    total = np.sum(start, axis=0)
    for rank, buffer in enumerate(buffers):
        mine = part(rank, n, num_values)
        if op == "all_reduce":
            np.testing.assert_array_equal(buffer, total)
        elif op == "reduce_scatter":
            np.testing.assert_array_equal(buffer[mine], total[mine])
        else:
            for other in range(n):
                theirs = part(other, n, num_values)
                np.testing.assert_array_equal(buffer[theirs], start[other][theirs])
    return sent, of_rank


@pytest.mark.parametrize(("op", "algorithm", "n", "g"), CASES)
def test_rounds_deliver_and_send_what_theory_says(op, algorithm, n, g):
    num_values = 144 * math.lcm(n, 5)  # divisible: exact bounds hold
    sent, of_rank = delivered(op, algorithm, n, g, num_values)
    passes = 2 if op == "all_reduce" else 1
    least = passes * num_values * (n - 1) // n
    if algorithm == "one_shot" and op == "all_reduce":
        assert sent == [(n - 1) * num_values] * n
    elif algorithm == "tree":
        assert max(sent) <= 2 * num_values
        assert sum(sent) == 2 * (n - 1) * num_values  # up and down each edge once
    else:
        assert sent == [least] * n
    longest = {
        "ring": passes * (n - 1),
        "pairwise": passes * (n - 1),
        "halving_doubling": passes * math.ceil(math.log2(n)),
        "one_shot": min(1, n - 1),
        "hierarchical": passes * (math.ceil(math.log2(g)) + math.ceil(math.log2(n // g))),
        "tree": 2 * math.ceil(math.log2(n + 1)),
    }[algorithm]
    assert max(map(len, of_rank)) <= longest


@given(st.integers(1, 11), st.integers(0, 40), st.sampled_from(OPS), st.data())
def test_rounds_deliver_any_length(n, num_values, op, data):
    algorithm = data.draw(st.sampled_from(ALGORITHMS[op]))
    g = data.draw(st.sampled_from([g for g in range(1, n + 1) if n % g == 0]))
    delivered(op, algorithm, n, g, num_values)


def test_a_tree_sends_segments_one_behind_the_other(monkeypatch):
    monkeypatch.setattr(trees, "SEGMENT_VALUES", 16)
    _, of_rank = delivered("all_reduce", "tree", 7, 1, 320)
    up = [each for each in of_rank[0] if each.adds]
    assert len(up) == 10 + 3 - 1  # segments of a half, and the depth of seven ranks


@pytest.mark.parametrize("n", range(2, 20))
def test_a_rank_is_an_inner_node_of_one_tree_at_most(n):
    for rank in range(n):
        places = [trees.position_in(tree, n, rank, Cut(0, 8)) for tree in (0, 1)]
        inner = [place for place in places if place.children and place.parent is not None]
        assert len(inner) <= 1
        assert all(place.depth <= math.ceil(math.log2(n + 1)) for place in places)


def test_hierarchical_sends_the_least_across_nodes():
    size, nodes, inside = 2400, 3, 2
    across = sum(
        each.values_across
        for each in load("hierarchical", "all_reduce", nodes * inside, size, inside)
    )
    assert across == 2 * (nodes - 1) / nodes * size
    flat = load("halving_doubling", "all_reduce", nodes * inside, size, inside)
    assert sum(each.values_across for each in flat) > 1.5 * across


@pytest.mark.parametrize(("n", "g"), [(1, 1), (4, 1), (4, 2), (6, 3), (8, 8), (9, 3)])
def test_inside_nodes_the_parts_of_a_place_are_added_up(n, g):
    num_values = 7 * n
    buffers = [np.arange(1, num_values + 1) * 4**rank for rank in range(n)]
    start = [each.copy() for each in buffers]
    simulate([rounds_inside(n, rank, num_values, ranks_per_node=g) for rank in range(n)], buffers)
    for rank, buffer in enumerate(buffers):
        node = rank // g * g
        total = np.sum(start[node : node + g], axis=0)
        for other in range(rank % g, n, g):
            mine = part(other, n, num_values)
            np.testing.assert_array_equal(buffer[mine], total[mine])


def test_load_counts_the_busiest_rank():
    (only,) = load("one_shot", "all_reduce", 4, 100, 2)
    assert (only.messages, only.values, only.added) == (3, 300, 300)
    assert (only.messages_across, only.values_across) == (2, 400)


def test_bad_requests_say_what_to_change():
    with pytest.raises(InputError, match="did you mean ring"):
        rounds("rimg", "all_reduce", 2, 0, 8)
    with pytest.raises(InputError, match="no reduce_scatter by 'tree'"):
        rounds("tree", "reduce_scatter", 2, 0, 8)
    with pytest.raises(InputError, match="5 ranks are not whole nodes of 2"):
        rounds("hierarchical", "all_reduce", 5, 0, 8, ranks_per_node=2)


# ---- on gloo ranks -------------------------------------------------------------------------------


def _all_ops(rank, world_size):
    """Errors of every algorithm against exact sums, and whether all ranks have the same bits."""
    group, found = dist.group.WORLD, []
    inside = [g for g in (1, 2, world_size) if world_size % g == 0]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        for algorithm in ("backend", *ALGORITHMS["all_reduce"]):
            for g in inside if algorithm == "hierarchical" else [1]:
                if dtype != torch.bfloat16 or algorithm != "backend":
                    found += _one(Collectives(group, algorithm, g), dtype, rank, world_size)
    return found


def _one(collectives, dtype, rank, world_size):
    length = 4 * world_size * 3
    stream = torch.Generator().manual_seed(5)
    everybody = (torch.rand(world_size, length, generator=stream) * 64).to(dtype)
    total = everybody.sum(dim=0, dtype=torch.float64)
    what = f"{collectives.algorithm} of {dtype} with {collectives.ranks_per_node} on a node"
    tolerance = {torch.bfloat16: 0.02, torch.float32: 1e-6}.get(dtype, 1e-15)
    found = []

    values = everybody[rank].clone()
    collectives.all_reduce(values)
    seen = [torch.empty_like(values) for _ in range(world_size)]
    dist.all_gather(seen, values)
    same = all(torch.equal(each, values) for each in seen)
    found.append((what + ", all_reduce", _off(values, total), tolerance, same))

    values = everybody[rank, :-1].clone()  # not divisible by the ranks
    collectives.all_reduce(values)
    found.append((what + ", odd length", _off(values, total[:-1]), tolerance, True))

    mine = slice(rank * length // world_size, (rank + 1) * length // world_size)
    if collectives.algorithm != "tree":
        is_float = dtype.is_floating_point
        received = torch.empty(length // world_size, dtype=dtype)
        collectives.reduce_scatter(received, everybody[rank].clone(), mean=is_float)
        wanted = total[mine] / (world_size if is_float else 1)
        found.append((what + ", reduce_scatter", _off(received, wanted), tolerance, True))

        whole = torch.full((length,), -1, dtype=dtype)
        collectives.all_gather(whole, everybody[0][mine])
        found.append((what + ", all_gather", _off(whole, everybody[0]), 0.0, True))
    return found


def _off(got, wanted):
    return (
        ((got.double() - wanted.double()).abs() / wanted.double().abs().clamp(min=1)).max().item()
    )


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_every_algorithm_on_gloo(world_size):
    for results in run_ranks(_all_ops, world_size):
        assert results
        for what, off, tolerance, same in results:
            assert off <= tolerance, f"{what} is off by {off}"
            assert same, f"{what}: ranks differ"


def _mean_and_group(rank, world_size):
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    values = torch.full((7,), float(rank))
    Collectives(group, "ring").all_reduce(values, mean=True)
    with pytest.raises(ValueError, match="7 values are not 2 parts of 3"):
        Collectives(group, "ring").all_gather(values, values[:3])
    return values.tolist(), members_per_node(group, 1), members_per_node(group, 3)


def test_a_group_of_some_ranks_and_its_mean():
    results = run_ranks(_mean_and_group, 3)
    assert results[0] == results[2] == ([1.0] * 7, 1, 2)


def _silent_peer(rank, world_size):
    """Rank 1 is alive and never takes part."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    # The first exchange connects the pair.
    Collectives(group, "halving_doubling").all_reduce(torch.ones(4))
    if rank == 1:
        time.sleep(3)
        return None
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
        Collectives(group, "halving_doubling").all_reduce(torch.ones(4))
    return time.monotonic() - start


def test_a_silent_peer_ends_by_the_groups_timeout():
    waited_s, _ = run_ranks(_silent_peer, 2)
    assert 0.9 < waited_s < 2.9
