"""Peak memory against published runs: how much they took, and which didn't fit.

Layers: the text of a table's cells, then whole predictions of the lines in `benchmarks/data` (or
of PACELINE_RUNS_CSV); no tensors, no ranks.
"""

import os
import statistics
from pathlib import Path

import pytest

from paceline.published import PublishedRun, read_runs
from paceline.published.validate.validate import Scored, validate

PUBLISHED = Path(
    os.environ.get("PACELINE_RUNS_CSV", "")
    or Path(__file__).parents[2] / "benchmarks/data/published_llm_runs.csv"
)
LINE = {
    "gpu": "H100-80GB", "gpus": "8", "model": "llama3-8b", "layers": "32", "hidden": "4096",
    "ffn": "14336", "heads": "32", "kv_heads": "8", "vocab": "128256", "seq": "8192", "dp": "8",
    "tp": "1", "pp": "1", "cp": "1", "micro_batch": "1", "global_batch_seqs": "8",
    "framework": "torchtitan", "fsdp_or_zero": "FSDP2 (ZeRO-3)", "precision": "bf16",
    "activation_ckpt": "full", "peak_mem_gb": "40", "tokens_per_s_per_gpu": "5000",
}  # fmt: skip


def run_of(folder: Path, **cells: str) -> PublishedRun:
    line = LINE | cells
    table = folder / "runs.csv"
    table.write_text(",".join(line) + "\n" + ",".join(f'"{cell}"' for cell in line.values()))
    (run,) = read_runs([table])
    return run


@pytest.mark.parametrize(
    ("cells", "kind", "memory"),
    [
        ({}, "reserved", 40e9),
        ({"notes": "memory printed GB (it reports max reserved GiB)"}, "reserved", 40e9),
        (
            {
                "notes": "memory printed GB (torchtitan reports max reserved GiB)",
                "peak_mem_raw": "40 GB as printed",
            },
            "reserved",
            40 * 2**30,
        ),
        ({"framework": "Megatron-Bridge", "fsdp_or_zero": "ZeRO-1"}, "allocated", 40e9),
        ({"notes": "from nvidia-smi"}, "in use", 40_000 * 2**20),
    ],
)
def test_what_was_measured(tmp_path: Path, cells: dict[str, str], kind: str, memory: float) -> None:
    """Reserved, allocated or in use, and in which unit, goes by words of the line."""
    run = run_of(tmp_path, **cells)
    assert (run.memory_kind, run.peak_memory_bytes) == (kind, pytest.approx(memory))
    assert not run.is_memory_open


@pytest.mark.parametrize(
    "cells",
    [
        {"activation_ckpt": ""},
        {"micro_batch": "", "global_batch_seqs": "64"},
        {"notes": "model and batch not restated"},
        {"notes": "checkpointing from recipe not stated"},
        {"notes": "no recompute listed in the preset (recipe defaults not checked)"},
        {"notes": "sources conflict on the local batch"},
    ],
)
def test_what_was_not_published_leaves_memory_open(tmp_path: Path, cells: dict[str, str]) -> None:
    """Then neither the figure nor the verdict on it counts."""
    run = run_of(tmp_path, **cells)
    assert run.is_memory_open
    (one,) = validate([run]).scored
    assert one.prediction is not None
    assert one.memory_ratio is None


def test_a_pipeline_of_as_many_samples_as_ranks_leaves_no_choice(tmp_path: Path) -> None:
    """One sample a time; with more there may be larger micro-batches."""
    pipeline = {"dp": "1", "pp": "8", "micro_batch": ""}
    assert not run_of(tmp_path, **pipeline, global_batch_seqs="8").is_memory_open
    assert run_of(tmp_path, **pipeline, global_batch_seqs="32").is_memory_open


# ---- the tables --------------------------------------------------------------------------------

needs_table = pytest.mark.skipif(
    not PUBLISHED.exists(), reason=f"{PUBLISHED} is missing: PACELINE_RUNS_CSV"
)


@pytest.fixture(scope="module")
def scored() -> list[Scored]:
    """Lines whose memory is known, or that are known not to fit."""
    runs = [
        run
        for run in read_runs([PUBLISHED])
        if run.work is not None
        and not run.is_memory_open
        and (run.peak_memory_bytes is not None or run.out_of_memory)
    ]
    return list(validate(runs).scored)


def ratios(scored: list[Scored], group: str) -> dict[str, float]:
    """Predicted over measured memory of a source's lines."""
    return {
        one.run.name: one.memory_ratio
        for one in scored
        if one.run.group.startswith(group) and one.memory_ratio is not None
    }


@needs_table
def test_reserved_memory_of_torchtitan(scored: list[Scored]) -> None:
    """Never under, at most a tenth over: fp32 and compiled losses, recompute, fp8, tp, cp, pp."""
    found = ratios(scored, "torchtitan")
    assert len(found) >= 20
    assert {name: ratio for name, ratio in found.items() if not 1.0 <= ratio <= 1.1} == {}


@needs_table
def test_memory_of_other_systems(scored: list[Scored]) -> None:
    """Megatron-Bridge, whose overlapped experts hold buffers that aren't known, a tenth under at
    most; BigScience's nvidia-smi within a few per cent in the middle; torchao within its spread."""
    bridge = ratios(scored, "Megatron-Bridge").values()
    assert min(bridge) > 0.9
    assert max(bridge) < 1.25
    science = ratios(scored, "BigScience").values()
    assert 0.95 < statistics.median(science) < 1.05
    assert sum(0.85 < ratio < 1.15 for ratio in science) >= 0.95 * len(science)
    torchao = ratios(scored, "torchao").values()
    assert min(torchao) > 0.9
    assert max(torchao) < 1.45


def fits(one: Scored) -> bool | None:
    assert one.prediction is not None
    assert one.run.work is not None
    return one.prediction.fits(one.run.work.device)


@needs_table
def test_what_ran_is_not_refused() -> None:
    """At most one line in twenty of any source that says enough. A third of all lines suffice."""
    runs = [run for run in read_runs([PUBLISHED]) if run.work is not None]
    report = validate([run for run in runs if not run.is_memory_open][::3])
    assert report.fits().ran > 200
    for found in report.fits_by_source():
        assert found.false_refusals <= 0.05 * found.ran, found.name


@needs_table
def test_what_ran_out_of_memory_is_refused(scored: list[Scored]) -> None:
    """All but one, which differs from a line that ran by 1 % of its parameters."""
    assert {one.run.name for one in scored if one.run.out_of_memory and fits(one)} <= {"BSC-139"}
