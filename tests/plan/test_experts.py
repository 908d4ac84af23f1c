"""Expert placement: pure functions, against brute force on tiny cases and stated figures."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.errors import InputError
from paceline.plan.experts import (
    Placement,
    imbalance,
    move_experts,
    num_moves,
    place_experts,
    placement_of,
)


def _skewed(layers: int, experts: int, seed: int = 0) -> np.ndarray:
    """Loads as routers make them: log-normal, the busiest expert 3.5 times the mean."""
    return np.random.default_rng(seed).lognormal(sigma=0.5, size=(layers, experts)) * 1000


def _drifted(loads: np.ndarray, seed: int = 1) -> np.ndarray:
    """Each load changed by about 10 %."""
    return loads * np.random.default_rng(seed).lognormal(sigma=0.1, size=loads.shape)


def _best_possible(loads: np.ndarray, num_slots: int, num_ranks: int) -> float:
    """The least imbalance of any placement of one layer, by trying all."""
    num_experts, best = len(loads), np.inf
    for extra in product(range(num_experts), repeat=num_slots - num_experts):
        for order in set(permutations([*range(num_experts), *extra])):
            placement = Placement(np.array([order]), num_experts, num_ranks)
            best = min(best, imbalance(placement.rank_loads(loads[None]))[0])
    return best


@pytest.mark.parametrize(
    ("experts", "slots", "ranks", "off"),
    [(6, 6, 2, 1e-9), (6, 6, 3, 1e-9), (4, 6, 3, 0.13), (4, 6, 2, 0.08)],
)
def test_close_to_the_best_of_all(experts, slots, ranks, off):
    """Exactly the best without replicas; with the fewest of slots, replicas cost some per cent."""
    ratios = []
    for seed in range(12):
        loads = _skewed(1, experts, seed)
        found = imbalance(place_experts(loads, slots, num_ranks=ranks).rank_loads(loads))[0]
        ratios.append(found / _best_possible(loads[0], slots, ranks))
    assert min(ratios) >= 1 - 1e-12
    assert max(ratios) <= 1 + off
    assert np.mean(ratios) <= 1 + off / 3


def test_a_case_worked_out_by_hand():
    """90 of 190 goes to expert 0: it gets the two spare slots, then ranks have 60 to 70."""
    loads = [[90, 40, 30, 30]]
    placement = place_experts(loads, 6, num_ranks=3)
    assert placement.replicas.tolist() == [[3, 1, 1, 1]]
    assert sorted(placement.rank_loads(loads)[0]) == [60, 60, 70]
    for rank in placement.expert_of_slot.reshape(3, 2):
        assert 0 in rank  # no rank has two replicas of it


SIZES = st.sampled_from(
    # experts, slots, groups, nodes, ranks
    [(8, 8, 1, 1, 4), (8, 12, 1, 1, 4), (8, 8, 4, 2, 4), (8, 16, 4, 2, 8), (6, 9, 3, 3, 3)]
)


@given(SIZES, st.integers(0, 2**32 - 1), st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_every_placement_is_whole(sizes, seed, max_moves):
    """All experts present, slots consistent, groups together, moves bounded and never for worse."""
    experts, slots, groups, nodes, ranks = sizes
    rng = np.random.default_rng(seed)
    loads = np.floor(rng.pareto(1.0, size=(3, experts)) * 4)  # wild, with zeros
    fresh = place_experts(loads, slots, groups, nodes, ranks)
    later = np.floor(rng.pareto(1.0, size=(3, experts)) * 4)
    moved = move_experts(fresh, later, max_moves=max_moves)
    for placement in (fresh, moved):
        assert placement.expert_of_slot.shape == (3, slots)
        assert (placement.replicas >= 1).all()
        assert (placement.replicas.sum(axis=1) == slots).all()
        _check_slots(placement)
        _check_groups(placement, groups, nodes)
        assert np.allclose(placement.rank_loads(later).sum(axis=1), later.sum(axis=1))
    changed = (fresh.expert_of_slot != moved.expert_of_slot).sum(axis=1)
    assert (changed <= max_moves).all()
    assert (num_moves(fresh, moved) <= changed).all()
    assert (moved.rank_loads(later).max(axis=1) <= fresh.rank_loads(later).max(axis=1) + 1e-9).all()


def _check_slots(placement):
    for layer, experts in enumerate(placement.slots_of_expert):
        for expert, slots in enumerate(experts):
            own = np.flatnonzero(placement.expert_of_slot[layer] == expert)
            assert slots[slots >= 0].tolist() == own.tolist()


def _check_groups(placement, groups, nodes):
    size = placement.num_experts // groups
    for layer in placement.expert_of_slot:
        groups_of_node = [set(part // size) for part in layer.reshape(nodes, -1)]
        assert sum(len(s) for s in groups_of_node) == groups


def test_drift_is_mended_by_few_moves():
    """After 10 % drift on 61 layers x 256 experts on 32 ranks, seeds 0 and 1 (figures in the docs).

    From 1.086 x the mean (averaged over the layers) a fresh placement reaches 1.0005 but moves 95 %
    of the experts; the swap search moves 7.4 % and reaches 1.02 in every layer.
    """
    loads = _skewed(61, 256)
    drifted = _drifted(loads)
    before = place_experts(loads, 256, num_ranks=32)
    fresh = place_experts(drifted, 256, num_ranks=32)
    moved = move_experts(before, drifted, target=1.02)
    assert imbalance(before.rank_loads(loads)).max() < 1.005
    assert imbalance(before.rank_loads(drifted)).mean() > 1.07
    assert imbalance(fresh.rank_loads(drifted)).max() < 1.01
    assert imbalance(moved.rank_loads(drifted)).max() <= 1.02
    assert num_moves(before, fresh).mean() / 256 > 0.8
    assert num_moves(before, moved).mean() / 256 < 0.1


def test_drift_with_replicas_and_nodes():
    loads = _skewed(20, 256)
    drifted = _drifted(loads)
    for groups, nodes in ((1, 1), (8, 4)):
        before = place_experts(loads, 320, groups, nodes, 32)
        moved = move_experts(before, drifted, target=1.02)
        assert num_moves(before, moved).mean() / 320 < 0.08
        peak = moved.rank_loads(drifted).max(axis=1)
        # What moves within nodes can't mend is the nodes' own drift.
        busiest_node = before.node_loads(drifted).max(axis=1) / (32 // nodes)
        assert (peak <= 1.02 * busiest_node + 1e-9).all()


def test_a_new_hot_expert_takes_over_the_slots_of_a_cold_one():
    """Swaps alone can't help: the load of one expert is more than a rank should have."""
    before = place_experts([[400, 100, 100, 100, 50, 50]], 8, num_ranks=4)
    now = [[20, 100, 100, 400, 50, 50]]
    assert before.replicas[0, 0] > 1
    assert before.replicas[0, 3] == 1
    moved = move_experts(before, now)
    assert moved.replicas[0, 3] > 1
    assert imbalance(moved.rank_loads(now))[0] < imbalance(before.rank_loads(now))[0] / 1.5


def test_a_search_that_ends_worse_than_it_began_is_not_taken():
    """Here turning slots over makes the load of each smaller, but they no longer pack as well."""
    before = Placement(np.array([[3, 2, 0, 3, 2, 1]]), num_experts=4, num_ranks=2)
    loads = [[13, 11, 42, 1]]
    moved = move_experts(before, loads, target=1.0)
    assert moved.rank_loads(loads).max() <= before.rank_loads(loads).max() == 34.5


def test_nodes_are_even_and_replicas_stay_on_theirs():
    """Groups of 60, 50, 30 and 20: the nodes get 60 + 20 and 50 + 30, not the first two."""
    loads = [[30, 30, 10, 40, 15, 15, 10, 10]]
    placement = place_experts(loads, 12, num_groups=4, num_nodes=2, num_ranks=4)
    assert placement.node_loads(loads).tolist() == [[80, 80]]
    assert placement.rank_loads(loads).max() <= 45


def test_nothing_moves_when_nothing_is_wrong():
    loads = _skewed(4, 32)
    before = place_experts(loads, 32, num_ranks=4)
    for after in (
        move_experts(before, loads),
        move_experts(before, loads * 0),
        move_experts(before, _drifted(loads), max_moves=1),  # a swap would be two
    ):
        assert (after.expert_of_slot == before.expert_of_slot).all()
        assert (num_moves(before, after) == 0).all()


def test_slot_of_expert_and_back():
    placement = place_experts(_skewed(3, 16), 16, num_ranks=4)
    slots = placement.slot_of_expert
    again = placement_of(slots, 4)
    assert (again.expert_of_slot == placement.expert_of_slot).all()
    assert (np.take_along_axis(placement.expert_of_slot, slots, axis=1) == np.arange(16)).all()
    with pytest.raises(InputError, match="16 experts on 20 slots"):
        _ = place_experts(_skewed(3, 16), 20, num_ranks=4).slot_of_expert


def test_a_swap_within_a_rank_is_no_move():
    before, after = (Placement(np.array([s]), 4, 2) for s in ([0, 1, 2, 3], [1, 0, 2, 3]))
    assert num_moves(before, after).tolist() == [0]
    across = Placement(np.array([[2, 1, 0, 3]]), 4, 2)
    assert num_moves(before, across).tolist() == [2]


def test_imbalance_without_load_is_even():
    assert imbalance([[0, 0], [1, 3]]).tolist() == [1, 1.5]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: place_experts([[1, 1, 1]], 2), "2 slots were given for 3 experts"),
        (lambda: place_experts([[1, 1, 1, 1]], 4, num_ranks=3), "4 slots can't be .* over 3 ranks"),
        (
            lambda: place_experts([[1] * 4], 4, 4, num_nodes=2, num_ranks=1),
            "1 ranks can't be .* over 2 nodes",
        ),
        (
            lambda: place_experts([[1] * 6], 6, 3, num_nodes=2, num_ranks=2),
            "3 expert groups can't be .* over 2 nodes",
        ),
        (
            lambda: place_experts([[1] * 6], 6, 4, num_nodes=2, num_ranks=2),
            "6 experts can't be .* over 4 expert groups",
        ),
        (lambda: place_experts([1, 2], 2), r"shape \(2,\)"),
        (lambda: place_experts([[1, -2]], 2), "not negative"),
        (lambda: place_experts([[1, float("nan")]], 2), "finite"),
        (
            lambda: move_experts(placement_of([[0, 1]], 2), [[1, 2, 3]]),
            r"shape \(1, 3\) .* 1 layers and 2 experts",
        ),
    ],
)
def test_wrong_input(call, sentence):
    with pytest.raises(InputError, match=sentence):
        call()
