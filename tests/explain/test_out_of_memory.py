"""After an out-of-memory: torch's own messages, and the cheapest change that fits. Pure."""

from pathlib import Path

import pytest

from paceline.config.job import Job
from paceline.explain.changes import changed_job
from paceline.explain.explain import explain
from paceline.explain.out_of_memory import AllocationFailure, out_of_memory, parse
from paceline.explain.subject import Subject
from paceline.explain.what_if import memory_terms
from tests.explain.accounts import MODEL, job, run_folder
from tests.plan.planned import cluster

GIB = 2.0**30
# As torch 2.11 words it (c10/cuda/CUDACachingAllocator.cpp).
TORCH_2 = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total \
capacity of 79.10 GiB of which 1.06 GiB is free. Including non-PyTorch memory, this process has \
78.03 GiB memory in use. Of the allocated memory 75.20 GiB is allocated by PyTorch, and 1.32 \
GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try ..."""
TORCH_1 = """RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 1; 39.59 GiB \
total capacity; 30.00 GiB already allocated; 120.00 MiB free; 38.00 GiB reserved in total by \
PyTorch)"""
HOST = "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't \
allocate memory: you tried to allocate 1024 bytes. Error code 12 (Cannot allocate memory)"


def test_the_message_of_torch_2() -> None:
    found = parse(TORCH_2, 3)
    assert found == AllocationFailure(
        rank=3,
        where="device",
        asked_bytes=2.5 * GIB,
        capacity_bytes=79.10 * GIB,
        free_bytes=1.06 * GIB,
        allocated_bytes=75.20 * GIB,
        unused_bytes=1.32 * GIB,
    )
    assert found.needed_bytes == pytest.approx(77.7 * GIB)


def test_the_message_of_torch_1_tells_what_was_reserved_in_all() -> None:
    found = parse(TORCH_1)
    assert found is not None
    assert found.asked_bytes == 0.5 * GIB
    assert found.allocated_bytes == 30 * GIB
    assert found.unused_bytes == 8 * GIB


def test_the_host_s_memory_and_the_kernel_s_verdict() -> None:
    host = parse(HOST)
    assert host is not None
    assert (host.where, host.asked_bytes) == ("host", 1024)
    killed = parse("rank 1 (pid 77) ended with -9 and took the run down")
    assert killed is not None
    assert killed.where == "killed"
    assert parse("step 3 loss 2.1\nrank 0 (pid 7) ended with 1") is None


def test_the_last_message_counts() -> None:
    found = parse(TORCH_2 + "\n...\n" + TORCH_1)
    assert found is not None
    assert found.capacity_bytes == 39.59 * GIB


def ran_out(folder: Path, made: Job, text: str = TORCH_2) -> Path:
    run = run_folder(folder, made)
    (run / "log").mkdir()
    (run / "log" / "rank0.log").write_text("")
    (run / "log" / "rank1.log").write_text(text)
    return run


def large_job(**more: object) -> Job:
    """Eight H100, whose micro-batches of 16 ask for more than there is."""
    model = MODEL.replace(
        vocab_size=32000, hidden_size=4096, ffn_size=11008, num_layers=32, num_heads=32,
        num_kv_heads=32, head_dim=128, max_seq_len=4096,
    )  # fmt: skip
    settings = {"dp": 1, "fsdp": 8, "zero": 3, "micro_batch": 16, **more}
    made = job(8, cluster=cluster(nodes=1), model=model, batch=128, **settings)
    return made.replace(train=made.train.replace(seq_len=4096))


def test_the_cheapest_change_that_fits_is_proposed(tmp_path: Path) -> None:
    run = ran_out(tmp_path / "run", large_job())
    found = out_of_memory(Subject.of(run))
    assert found is not None
    assert found.shortage.rank == 1
    assert found.term == "activations"
    assert found.ways
    assert found.limit_bytes is not None
    made = Subject.of(run).job
    assert made is not None
    for way in found.ways:
        assert changed_job(made, way.changes) is not None
        assert way.peak_bytes <= found.limit_bytes
    costs = [way.slower for way in found.ways]
    assert None not in costs
    assert costs == sorted(costs, key=lambda each: each or 0.0)
    assert any("--set" in sentence for sentence in found.sentences)


def test_what_the_planner_was_wrong_by_is_left_as_room(tmp_path: Path) -> None:
    """A Job that the planner thinks small, and that ran out of memory all the same."""
    run = ran_out(tmp_path / "run", large_job(micro_batch=2, recompute="full"))
    found = out_of_memory(Subject.of(run))
    assert found is not None
    now = sum(found.predicted_bytes.values())
    assert now < 40e9
    assert found.ways
    made = Subject.of(run).job
    assert made is not None
    for way in found.ways:
        other = changed_job(made, way.changes)
        assert other is not None
        alone = sum((memory_terms(other) or {}).values())
        assert way.peak_bytes == pytest.approx(alone * 79.10 * GIB / now)


def test_a_run_without_a_step_is_explained_by_its_memory(tmp_path: Path) -> None:
    run = ran_out(tmp_path / "run", large_job())
    told = explain(run)
    assert "out of memory" in told.headline
    assert told.next_command is not None
    assert told.to_json()["out_of_memory"]["shortage"]["rank"] == 1


def test_no_message_no_finding(tmp_path: Path) -> None:
    assert out_of_memory(Subject.of(ran_out(tmp_path / "run", large_job(), "fine"))) is None
