"""Counting what tensors hold (pure functions, then one process)."""

import torch

from benchmarks.step_memory import AddressRanges, MemoryChange, peak_bytes, peaks


def test_the_peak_of_each_part_counts_what_was_there_before():
    changes = [
        MemoryChange(0, 100, 10),
        MemoryChange(1, 200, 50),
        MemoryChange(2, 200, -50),
        MemoryChange(11, 300, 20),
        MemoryChange(12, 300, -20),
        MemoryChange(21, 300, 5),
    ]
    assert peaks(changes, [10, 20]) == [30, 15]


def test_a_part_without_changes_holds_what_was_there():
    assert peaks([MemoryChange(0, 100, 10), MemoryChange(30, 200, 1)], [10, 20]) == [10, 11]


def test_what_is_allocated_over_was_released_unseen():
    heap = AddressRanges()
    for address in (0, 100, 200):
        heap.note(MemoryChange(0, address, 100))
    heap.note(MemoryChange(1, 50, 100))  # overlaps the first two
    assert heap.held_bytes == 200
    heap.note(MemoryChange(2, 100, -100))  # gone already
    heap.note(MemoryChange(3, 200, -100))
    assert heap.held_bytes == 100


def test_neighbours_stay():
    heap = AddressRanges()
    heap.note(MemoryChange(0, 0, 100))
    heap.note(MemoryChange(0, 200, 100))
    heap.note(MemoryChange(0, 100, 100))
    assert heap.held_bytes == 300


def test_a_step_on_a_cpu_is_counted_to_the_byte():
    kept: list[torch.Tensor] = []

    def step() -> None:
        first = torch.ones(1 << 20)  # 4 MiB
        del first
        second = torch.ones(1 << 19)  # 2 MiB beside 1 MiB more
        second[: 1 << 18].clone()

    peak = peak_bytes(lambda: kept.append(torch.ones(1 << 18)), step, 2)
    assert peak == (1 << 20) + (4 << 20)
