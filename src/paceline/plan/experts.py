"""Where the experts of each layer lie: replicas and placement from their loads.

Tokens choose their experts, so some ranks would have more to do than others, and all wait for the
busiest. The remedy is to choose which experts a rank holds, and to hold several replicas of the
hottest ones. Each rank has the same number of *slots*, each slot holds one expert; a replicated
expert's tokens are shared out evenly over its slots. Without spare slots (training) a placement is
a permutation of the experts.

How it works: `place_experts` starts afresh. Spare slots go one at a time to the expert whose
replicas have most to do; then the heaviest goes first to the rank that has least, among those with
room; then swaps improve the result. With several nodes whole groups of experts are packed onto
nodes first, so that a token routed to few groups visits few nodes. `move_experts` starts from the
placement that is there and only swaps slots of the busiest rank with others (and, with replicas,
turns a slot of a cold expert over to a hot one), because every move sends an expert's weights and,
in training, its optimizer state. All layers are worked on at once as rows of arrays.

It does not guess loads of the future and moves no weights: it only says who goes where. Nodes
drifting apart is not repaired by moves (groups stay on their node); `imbalance` of `node_loads`
tells when to start afresh.

The idea is that of EPLB (https://github.com/deepseek-ai/EPLB, DeepSeek-V3
https://arxiv.org/abs/2412.19437 section 3.4); packing the heaviest first is Graham's rule
(https://doi.org/10.1137/0117039).
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.config.errors import InputError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_LEAST_GAIN = 1e-9  # of the busiest rank's load: a smaller gain may be rounding


@dataclass(frozen=True, eq=False)
class Placement:
    """Which expert each slot of each layer holds.

    Slots are numbered through: rank r holds slots r * S / num_ranks up to the next rank's, node n
    the ranks n * num_ranks / num_nodes up to the next node's.
    """

    expert_of_slot: Ints
    """(layers, slots)."""
    num_experts: int
    num_ranks: int
    num_nodes: int = 1

    @property
    def num_slots(self) -> int:
        """Slots of a layer, on all ranks together."""
        return self.expert_of_slot.shape[1]

    @property
    def replicas(self) -> Ints:
        """(layers, experts): how many slots hold each expert."""
        return _count(self.expert_of_slot, self.num_experts)

    @property
    def slots_of_expert(self) -> Ints:
        """(layers, experts, most replicas): the slots of each expert, ascending, padded by -1."""
        replicas = self.replicas
        slots = np.full((*replicas.shape, replicas.max()), -1, dtype=np.int64)
        order = self.expert_of_slot.argsort(axis=1, kind="stable")  # slots, by their expert
        expert = np.take_along_axis(self.expert_of_slot, order, axis=1)
        first = np.cumsum(replicas, axis=1) - replicas
        nth = np.arange(self.num_slots) - np.take_along_axis(first, expert, axis=1)
        slots[np.arange(len(slots))[:, None], expert, nth] = order
        return slots

    @property
    def slot_of_expert(self) -> Ints:
        """(layers, experts): the only slot of each expert, where none is replicated."""
        if self.num_slots != self.num_experts:
            raise InputError(
                f"A placement of {self.num_experts} experts on {self.num_slots} slots was given, "
                "but only one without replicas has a single slot per expert; use slots_of_expert."
            )
        return self.expert_of_slot.argsort(axis=1)

    def rank_loads(self, loads: ArrayLike) -> Floats:
        """(layers, ranks): what each rank has to do, given the (layers, experts) loads."""
        shares = _shares(self.expert_of_slot, np.asarray(loads, dtype=np.float64))
        return shares.reshape(len(shares), self.num_ranks, -1).sum(axis=2)

    def node_loads(self, loads: ArrayLike) -> Floats:
        """(layers, nodes): what each node has to do, given the (layers, experts) loads."""
        ranks = self.rank_loads(loads)
        return ranks.reshape(len(ranks), self.num_nodes, -1).sum(axis=2)


def placement_of(slot_of_expert: ArrayLike, num_ranks: int, num_nodes: int = 1) -> Placement:
    """Return the Placement without replicas that has these (layers, experts) slots."""
    slots = np.asarray(slot_of_expert, dtype=np.int64)
    return Placement(slots.argsort(axis=1), slots.shape[1], num_ranks, num_nodes)


def imbalance(loads_of_ranks: ArrayLike) -> Floats:
    """Busiest over mean: (layers,) from (layers, ranks or nodes); 1 is even, also without load."""
    loads = np.asarray(loads_of_ranks, dtype=np.float64)
    mean = loads.mean(axis=1)
    return np.where(mean > 0, loads.max(axis=1) / np.where(mean > 0, mean, 1), 1.0)


def num_moves(before: Placement, after: Placement) -> Ints:
    """(layers,): slots whose new expert their rank did not hold before, so that it is sent."""
    held, holds = (
        _count(p.expert_of_slot.reshape(-1, p.num_slots // p.num_ranks), p.num_experts)
        for p in (before, after)
    )
    fetched = (holds > 0) & (held == 0)  # a second replica on the same rank is a local copy
    return fetched.sum(axis=1).reshape(-1, before.num_ranks).sum(axis=1)


def place_experts(
    loads: ArrayLike,
    num_slots: int,
    num_groups: int = 1,
    num_nodes: int = 1,
    num_ranks: int = 1,
) -> Placement:
    """Choose replicas and slots for every expert from scratch.

    Args:
        loads: (layers, experts), tokens that chose each expert (or any measure of its work).
        num_slots: slots of a layer over all ranks; the more than experts, the more replicas.
        num_groups: groups of neighbouring experts that stay together on a node; matters with
            several nodes only.
        num_nodes: 1 puts any expert on any rank.
        num_ranks: over all nodes.

    Raises:
        InputError: sizes that do not divide, fewer slots than experts, loads that are no loads.
    """
    loads = _checked_loads(loads)
    num_experts = loads.shape[1]
    num_groups = num_groups if num_nodes > 1 else 1
    _check_sizes(num_experts, num_slots, num_groups, num_nodes, num_ranks)
    experts = _experts_of_nodes(loads, num_groups, num_nodes)  # (layers * nodes, experts of a node)
    node_loads = np.take_along_axis(np.repeat(loads, num_nodes, axis=0), experts, axis=1)
    local = _replicate(node_loads, num_slots // num_nodes)  # (layers * nodes, slots of a node)
    packed = _pack(_shares(local, node_loads), num_ranks // num_nodes)
    slots = np.take_along_axis(experts, np.take_along_axis(local, packed, axis=1), axis=1)
    placement = Placement(slots.reshape(len(loads), -1), num_experts, num_ranks, num_nodes)
    return move_experts(placement, loads, target=1.0)


def move_experts(
    placement: Placement,
    loads: ArrayLike,
    max_moves: int | None = None,
    target: float = 1.02,
) -> Placement:
    """Even out the ranks by few moves from the placement that is there.

    Each step takes a layer's busiest rank and does the one swap with another rank (of its node)
    that leaves the busier of the two with least. A layer rests as soon as it has reached the
    target, and where no swap helps.

    Args:
        placement: where the experts are.
        loads: (layers, experts), by now.
        max_moves: most slots of a layer to change (its nodes share them evenly); None: any number.
        target: busiest over mean load of the ranks that is good enough, from 1.

    Returns:
        a placement that is nowhere worse than the given one.
    """
    loads = _checked_loads(loads)
    if loads.shape != (len(placement.expert_of_slot), placement.num_experts):
        raise InputError(
            f"Loads of shape {loads.shape} were given for a placement of "
            f"{len(placement.expert_of_slot)} layers and {placement.num_experts} experts; give one "
            "load for each."
        )
    nodes, ranks = placement.num_nodes, placement.num_ranks // placement.num_nodes
    rows = placement.expert_of_slot.reshape(len(loads) * nodes, -1)
    row_loads = np.repeat(loads, nodes, axis=0)
    means = placement.rank_loads(loads).reshape(len(loads), nodes, ranks).mean(axis=2)
    # A node that has less to do than others need not be as even as they: nobody waits for it.
    limits = target * np.maximum(means, means.mean(axis=1, keepdims=True)).reshape(-1)
    most = rows.shape[1] if max_moves is None else max_moves // nodes
    moved = _search(rows, row_loads, ranks, limits, most)
    return replace(placement, expert_of_slot=moved.reshape(len(loads), -1))


def _search(slots: Ints, loads: Floats, num_ranks: int, limits: Floats, max_moves: int) -> Ints:
    """Lower the busiest rank of each row below its limit; rows (R, slots), loads (R, experts)."""
    best, best_peak = slots.copy(), _rank_loads(slots, loads, num_ranks).max(axis=1)
    now, active = slots.copy(), np.arange(len(slots))
    turns_left = np.full(len(slots), slots.shape[1])  # of slots turned over: these might circle
    while True:
        peak = _rank_loads(now[active], loads[active], num_ranks).max(axis=1)
        better = peak < best_peak[active] * (1 - _LEAST_GAIN)
        best[active[better]], best_peak[active[better]] = now[active[better]], peak[better]
        changed = (now[active] != slots[active]).sum(axis=1)
        active = active[(peak > limits[active]) & (changed + 2 <= max_moves)]
        if not len(active):
            return best
        moved, did = _swap_busiest(now[active], loads[active], num_ranks)
        stuck = np.flatnonzero(~did & (turns_left[active] > 0))
        turned, did[stuck] = _turn_over(now[active[stuck]], loads[active[stuck]], num_ranks)
        moved[stuck] = turned
        turns_left[active[stuck]] -= 1
        now[active], active = moved, active[did]


def _swap_busiest(slots: Ints, loads: Floats, num_ranks: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Do each row's best swap of a slot of its busiest rank; also say which rows had one."""
    row, size = np.arange(len(slots)), slots.shape[1] // num_ranks
    shares = _shares(slots, loads)
    ranks = shares.reshape(len(slots), num_ranks, size).sum(axis=2)
    busiest = ranks.argmax(axis=1)
    own = busiest[:, None] * size + np.arange(size)  # (R, size): its slots
    given = shares[row[:, None], own][:, :, None] - shares[:, None, :]  # (R, size, slots)
    theirs = np.repeat(ranks, size, axis=1)[:, None, :] + given
    # Within the busiest rank no swap seems to help: `theirs` is then its whole load and more.
    after = np.maximum(ranks[row, busiest][:, None, None] - given, theirs)
    flat = after.reshape(len(slots), -1)
    choice = flat.argmin(axis=1)
    did = flat[row, choice] < ranks[row, busiest] * (1 - _LEAST_GAIN)
    here, there = own[row, choice // slots.shape[1]], choice % slots.shape[1]
    slots = slots.copy()
    r, a, b = row[did], here[did], there[did]
    slots[r, a], slots[r, b] = slots[r, b], slots[r, a]
    return slots, did


def _turn_over(slots: Ints, loads: Floats, num_ranks: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Give one slot of a cold replicated expert to the hottest expert; say which rows could."""
    row, counts = np.arange(len(slots)), _count(slots, loads.shape[1])
    share = np.where(counts > 0, loads / np.maximum(counts, 1), -np.inf)
    hot = share.argmax(axis=1)
    without = np.where(counts > 1, loads / np.maximum(counts - 1, 1), np.inf)
    without[row, hot] = np.inf
    cold = without.argmin(axis=1)
    did = without[row, cold] < share[row, hot]
    ranks = np.repeat(_rank_loads(slots, loads, num_ranks), slots.shape[1] // num_ranks, axis=1)
    slot = np.where(slots == cold[:, None], ranks, np.inf).argmin(axis=1)
    slots = slots.copy()
    slots[row[did], slot[did]] = hot[did]
    return slots, did


def _experts_of_nodes(loads: Floats, num_groups: int, num_nodes: int) -> Ints:
    """(layers * nodes, experts of a node): groups packed onto nodes by their loads."""
    groups = loads.reshape(len(loads), num_groups, -1)
    packed = _pack(groups.sum(axis=2), num_nodes) if num_nodes > 1 else np.zeros((len(loads), 1))
    size = groups.shape[2]
    experts = packed.astype(np.int64)[:, :, None] * size + np.arange(size)
    return experts.reshape(len(loads) * num_nodes, -1)


def _replicate(loads: Floats, num_slots: int) -> Ints:
    """(rows, slots) expert of each slot: a spare one goes to the expert with most per replica."""
    rows, num_experts = loads.shape
    slots = np.empty((rows, num_slots), dtype=np.int64)
    slots[:, :num_experts] = np.arange(num_experts)
    counts, row = np.ones_like(loads), np.arange(rows)
    for slot in range(num_experts, num_slots):
        slots[:, slot] = (loads / counts).argmax(axis=1)
        counts[row, slots[:, slot]] += 1
    return slots


def _pack(weights: Floats, num_bins: int) -> Ints:
    """Pack each row's items into bins of equal size, the heaviest first into the lightest bin.

    Returns:
        (rows, items): the items in the order of the bins, an equal number in each.
    """
    rows, items = weights.shape
    size, row = items // num_bins, np.arange(rows)
    filled, sums = np.zeros((rows, num_bins), dtype=np.int64), np.zeros((rows, num_bins))
    packed = np.empty((rows, num_bins, size), dtype=np.int64)
    for item in (-weights).argsort(axis=1, kind="stable").T:
        into = np.where(filled < size, sums, np.inf).argmin(axis=1)
        packed[row, into, filled[row, into]] = item
        filled[row, into] += 1
        sums[row, into] += weights[row, item]
    return packed.reshape(rows, items)


def _count(slots: Ints, num_experts: int) -> Ints:
    """(rows, experts): how many of a row's slots hold each expert."""
    offsets = np.arange(len(slots))[:, None] * num_experts
    flat = np.bincount((slots + offsets).reshape(-1), minlength=len(slots) * num_experts)
    return flat.reshape(len(slots), num_experts)


def _shares(slots: Ints, loads: Floats) -> Floats:
    """(rows, slots): the load of each slot, an even share of its expert's."""
    return np.take_along_axis(loads / np.maximum(_count(slots, loads.shape[1]), 1), slots, axis=1)


def _rank_loads(slots: Ints, loads: Floats, num_ranks: int) -> Floats:
    shape = (len(slots), num_ranks, slots.shape[1] // num_ranks)
    return _shares(slots, loads).reshape(shape).sum(axis=2)


def _checked_loads(loads: ArrayLike) -> Floats:
    array = np.asarray(loads, dtype=np.float64)
    if array.ndim != 2 or not (np.isfinite(array).all() and (array >= 0).all()):
        raise InputError(
            f"Expert loads of shape {array.shape} were given; they must be (layers, experts) "
            "numbers, finite and not negative."
        )
    return array


def _check_sizes(
    num_experts: int, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int
) -> None:
    if num_slots < num_experts:
        raise InputError(
            f"{num_slots} slots were given for {num_experts} experts; give at least as many."
        )
    for what, count, by, size in (
        ("slots", num_slots, "ranks", num_ranks),
        ("ranks", num_ranks, "nodes", num_nodes),
        ("expert groups", num_groups, "nodes", num_nodes),
        ("experts", num_experts, "expert groups", num_groups),
    ):
        if count % size:
            raise InputError(
                f"{count} {what} can't be shared out evenly over {size} {by}; choose a multiple "
                f"of {size}."
            )
