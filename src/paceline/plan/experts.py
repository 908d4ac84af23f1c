"""Where the experts of each layer lie, by their loads.

Tokens choose their experts, so some ranks would have more to do than others, and all wait for the
busiest. The remedy is to choose which experts a rank holds. Each rank has the same number of
*slots*, each slot holds one expert: rank r has slots r * S / num_ranks up to the next rank's.

How it works: `move_experts` starts from the placement that is there and only swaps slots of the
busiest rank with others, because every move sends an expert's weights and optimizer state. All
layers are worked on at once as rows of arrays.

`hot_experts` names the experts that every rank should have a copy of.

It does not guess loads of the future and moves no weights: it only says who goes where.

The idea of moves is that of EPLB (https://github.com/deepseek-ai/EPLB, DeepSeek-V3
https://arxiv.org/abs/2412.19437 section 3.4), without its replicas; that of copies is FasterMoE's
dynamic shadowing (https://doi.org/10.1145/3503221.3508418).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.config.errors import InputError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_LEAST_GAIN = 1e-9  # of the busiest rank's load: a smaller gain may be rounding


def move_experts(
    slot_of_expert: ArrayLike, loads: ArrayLike, num_ranks: int, target: float = 1.02
) -> Ints:
    """Even out the ranks by few moves from the placement that is there.

    Each step takes a layer's busiest rank and does the one swap with another rank that leaves the
    busier of the two with least. A layer rests as soon as it has reached the target, and where no
    swap helps.

    Args:
        slot_of_expert: (layers, experts), where the experts are.
        loads: (layers, experts), tokens that chose each expert (or any measure of its work).
        num_ranks: they share out the slots.
        target: busiest over mean load of the ranks that is good enough, from 1.

    Returns:
        (layers, experts): a placement that is nowhere worse than the given one.

    Raises:
        InputError: loads that are no loads, or of another shape than the slots.
    """
    slots, loads = np.asarray(slot_of_expert, dtype=np.int64), _checked_loads(loads)
    if loads.shape != slots.shape:
        layers, experts = slots.shape
        raise InputError(
            f"Loads of shape {loads.shape} were given for a placement of {layers} layers and "
            f"{experts} experts; give one load for each."
        )
    experts_of_slots = slots.argsort(axis=1)
    limits = target * rank_loads(slots, loads, num_ranks).mean(axis=1)
    return _search(experts_of_slots, loads, num_ranks, limits).argsort(axis=1)


def hot_experts(
    slot_of_expert: ArrayLike, loads: ArrayLike, num_ranks: int, most: int
) -> list[Ints]:
    """Choose the experts of each layer that all ranks get copies of.

    One after another: of the rank that is then the busiest, the expert with most tokens. Tokens of
    a copied expert are worked on where they are, taken to be as many on each rank. So many are
    chosen as leave the busiest rank with least: none where loads are even.

    Args:
        slot_of_expert: (layers, experts), where the experts are.
        loads: (layers, experts), tokens that chose each expert.
        num_ranks: they share out the slots.
        most: copies of a layer, fewer than there are experts.

    Returns:
        of each layer (copies,), experts.

    Raises:
        InputError: loads that are no loads.
    """
    experts = np.asarray(slot_of_expert, dtype=np.int64).argsort(axis=1)  # of each slot
    left = np.take_along_axis(_checked_loads(loads), experts, axis=1)
    left = left.reshape(len(experts), num_ranks, -1)  # of slots; -1: is copied
    row, shared = np.arange(len(experts)), np.zeros(len(experts))
    chosen, peaks = np.empty((len(experts), most), dtype=np.int64), [left.sum(axis=2).max(axis=1)]
    for at in range(most):
        # A rank of which all are copied comes behind one of which none is wanted.
        ranks = np.where(left.max(axis=2) < 0, -1, np.maximum(left, 0).sum(axis=2))
        busiest = ranks.argmax(axis=1)
        slot = left[row, busiest].argmax(axis=1)
        shared += left[row, busiest, slot] / num_ranks
        left[row, busiest, slot] = -1
        chosen[:, at] = experts[row, busiest * left.shape[2] + slot]
        peaks.append(np.maximum(left, 0).sum(axis=2).max(axis=1) + shared)
    num = np.argmin(peaks, axis=0)
    return [of_layer[:few] for of_layer, few in zip(chosen, num, strict=True)]


def rank_loads(slot_of_expert: ArrayLike, loads: ArrayLike, num_ranks: int) -> Floats:
    """(layers, ranks): what each rank has to do, given the (layers, experts) loads."""
    experts = np.asarray(slot_of_expert).argsort(axis=1)
    return _rank_loads(experts, np.asarray(loads, dtype=np.float64), num_ranks)


def _search(experts: Ints, loads: Floats, num_ranks: int, limits: Floats) -> Ints:
    """Lower the busiest rank of each row below its limit; (rows, slots) the expert of each slot."""
    best, best_peak = experts.copy(), _rank_loads(experts, loads, num_ranks).max(axis=1)
    now, active = experts.copy(), np.arange(len(experts))
    while True:
        peak = _rank_loads(now[active], loads[active], num_ranks).max(axis=1)
        # A swap of one of two equally busy ranks pays only where one of the other follows.
        better = peak < best_peak[active] * (1 - _LEAST_GAIN)
        best[active[better]], best_peak[active[better]] = now[active[better]], peak[better]
        changed = (now[active] != experts[active]).sum(axis=1)
        active = active[(peak > limits[active]) & (changed + 2 <= experts.shape[1])]
        if not len(active):
            return best
        moved, did = _swap_busiest(now[active], loads[active], num_ranks)
        now[active], active = moved, active[did]


def _swap_busiest(slots: Ints, loads: Floats, num_ranks: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Do each row's best swap of a slot of its busiest rank; also say which rows had one."""
    row, size = np.arange(len(slots)), slots.shape[1] // num_ranks
    shares = np.take_along_axis(loads, slots, axis=1)
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


def _rank_loads(experts: Ints, loads: Floats, num_ranks: int) -> Floats:
    shares = np.take_along_axis(loads, experts, axis=1)
    shape = (len(experts), num_ranks, experts.shape[1] // num_ranks)
    return shares.reshape(shape).sum(axis=2)


def _checked_loads(loads: ArrayLike) -> Floats:
    array = np.asarray(loads, dtype=np.float64)
    if array.ndim != 2 or not (np.isfinite(array).all() and (array >= 0).all()):
        raise InputError(
            f"Expert loads of shape {array.shape} were given; they must be (layers, experts) "
            "numbers, finite and not negative."
        )
    return array
