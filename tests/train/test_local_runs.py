"""Whole runs of workers that step each for itself, through the command line."""

import shutil
from pathlib import Path

import pytest

from tests.command_line import losses, metrics, paceline, ranks, write_tiny_job

STREAMING = (
    *("comm.local.method=streaming", "comm.local.every=5", "comm.local.fragments=2"),
    *("comm.local.overlap_steps=2", "model.vocab_size=264"),
)
INT8 = ("comm.local.compress=int8", "comm.compress_from=512")
FP64 = ("layout.precision=fp64", "layout.param_dtype=fp64")
WORKERS = {
    "one rank": ("dp=2", 2),
    "shards": ("dp=2 fsdp=2 zero=3", 4),
    "columns": ("dp=2 tp=2", 4),
}
"""Two workers: their layout, and the ranks of both."""


def _train(folder: Path, layout: str, num_ranks: int, *settings: str) -> str:
    axes = (f"layout.{axis}" for axis in layout.split())
    sets = [f"--set={each}" for each in (*STREAMING, *settings, *axes)]
    done = paceline("train", "job.toml", *sets, *ranks(num_ranks), folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _back_to_step_8(folder: Path) -> None:
    """One fragment is on its way then."""
    shutil.rmtree(folder / "runs/tiny/checkpoints/step-12")


@pytest.mark.parametrize("name", WORKERS)
def test_it_goes_on_bit_identically_in_the_middle_of_a_round(name, tmp_path):
    write_tiny_job(tmp_path)
    layout, num_ranks = WORKERS[name]
    said = _train(tmp_path, layout, num_ranks, *INT8)
    of_ranks = "" if num_ranks == 2 else f" of {num_ranks // 2} ranks"
    assert (
        f"2 workers{of_ranks} step each for itself (streaming); what they changed travels as int8 "
        "every 5 steps, in 2 fragments, 2 steps on their way." in said
    )
    sent = [line["comm"]["dp.bytes"] > 0 for line in metrics(tmp_path)]
    # Fragment 0 leaves after 5 and 10 steps, fragment 1 after 2, 7 and 12; all at the end.
    assert [step for step, did in enumerate(sent, 1) if did] == [2, 5, 7, 10, 12]
    whole = losses(tmp_path)
    assert sorted(whole) == list(range(1, 13))
    _back_to_step_8(tmp_path)
    assert "going on after step 8" in _train(tmp_path, layout, num_ranks, *INT8)
    assert losses(tmp_path) == whole


def test_it_goes_on_with_workers_that_are_cut_in_another_way(tmp_path):
    write_tiny_job(tmp_path)
    _train(tmp_path, *WORKERS["shards"], *FP64)
    whole = losses(tmp_path)
    for name in ("one rank", "columns", "shards"):
        _back_to_step_8(tmp_path)
        assert "going on after step 8" in _train(tmp_path, *WORKERS[name], *FP64)
        assert losses(tmp_path) == pytest.approx(whole, rel=1e-10), name


def test_it_goes_on_with_another_number_of_workers_and_what_compression_owes(tmp_path):
    write_tiny_job(tmp_path)
    _train(tmp_path, *WORKERS["shards"], *INT8)
    whole = losses(tmp_path)
    for layout, num_ranks in (("dp=4", 4), ("dp=3 tp=2", 6)):
        _back_to_step_8(tmp_path)
        assert "going on after step 8" in _train(tmp_path, layout, num_ranks, *INT8)
        assert losses(tmp_path) == pytest.approx(whole, rel=0.02), layout
