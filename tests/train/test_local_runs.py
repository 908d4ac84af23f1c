"""Whole runs of workers that step each for itself, through the command line."""

import shutil
from pathlib import Path

from tests.command_line import losses, metrics, paceline, ranks, write_tiny_job

SETTINGS = (
    *("comm.local.method=streaming", "comm.local.every=5", "comm.local.fragments=2"),
    *("comm.local.overlap_steps=2", "comm.local.compress=int8", "comm.compress_from=512"),
)


def _train(folder: Path) -> str:
    settings = [*(f"--set={each}" for each in SETTINGS), *ranks(2)]
    done = paceline("train", "job.toml", *settings, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_goes_on_bit_identically_in_the_middle_of_a_round(tmp_path):
    write_tiny_job(tmp_path)
    said = _train(tmp_path)
    assert (
        "2 workers step each for itself (streaming); what they changed travels as int8 every "
        "5 steps, in 2 fragments, 2 steps on their way." in said
    )
    sent = [line["comm"]["dp.bytes"] > 0 for line in metrics(tmp_path)]
    # Fragment 0 leaves after 5 and 10 steps, fragment 1 after 2, 7 and 12; all at the end.
    assert [step for step, did in enumerate(sent, 1) if did] == [2, 5, 7, 10, 12]
    whole = losses(tmp_path)
    assert sorted(whole) == list(range(1, 13))
    shutil.rmtree(tmp_path / "runs/tiny/checkpoints/step-12")
    assert "going on after step 8" in _train(tmp_path)  # one fragment is on its way
    assert losses(tmp_path) == whole
