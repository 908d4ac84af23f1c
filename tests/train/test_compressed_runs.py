"""Whole runs with compressed gradients, through the command line: what they say, and going on."""

import shutil
import time
from pathlib import Path

import pytest

from tests.command_line import losses, metrics, paceline, python, ranks, write_tiny_job


def _settings(kind: str, num_ranks: int = 2) -> list[str]:
    settings = ("layout.bucket_mib=0.02", "comm.compress_from=512", f"comm.dp.compress={kind}")
    return [*(f"--set={each}" for each in settings), *ranks(num_ranks)]


def _train(folder: Path, *arguments: str) -> str:
    done = paceline("train", "job.toml", *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("kind", "num_ranks"), [("int8", 2), ("powersgd:2", 3)])
def test_it_goes_on_bit_identically(kind, num_ranks, tmp_path):
    write_tiny_job(tmp_path)
    settings = [*_settings(kind, num_ranks), "--set=comm.warmup_steps=2"]
    said = _train(tmp_path, *settings)
    assert f"Gradients travel as {kind}, with error feedback; exactly: 5 of " in said
    assert "all in the first 2 steps." in said
    _says_what_was_sent_and_waited_for(metrics(tmp_path))
    whole = losses(tmp_path)
    shutil.rmtree(tmp_path / "runs/tiny/checkpoints/step-12")
    assert "going on after step 8" in _train(tmp_path, *settings)
    assert losses(tmp_path) == whole


def test_what_was_owed_is_not_dropped_in_silence(tmp_path):
    write_tiny_job(tmp_path)
    assert "dropped" not in _train(tmp_path, *_settings("int8"))
    exact = ("--set=layout.bucket_mib=0.02", *ranks(2))
    said = _train(tmp_path, *exact, "--set=train.steps=14")
    told = "what compression still owed in the checkpoint of step 12 is dropped."
    assert f"nothing is compressed now: {told}" in " ".join(said.split())


def _says_what_was_sent_and_waited_for(lines: list[dict]) -> None:
    sent = [line["comm"]["dp.bytes"] for line in lines]
    assert sent[0] == pytest.approx(sent[1], rel=1e-3)
    assert sent[2] < 0.6 * sent[0]
    assert [line["step"] for line in lines if "error_norm" in line["comm"]] == [1, 11]
    for line in lines:
        assert line["terms"]["exposed_comm.dp"] >= 0
        assert sum(line["terms"].values()) == pytest.approx(line["step_time_s"])


def test_what_cannot_be_compressed_is_refused_in_one_sentence(tmp_path):
    write_tiny_job(tmp_path)
    done = paceline("train", "job.toml", *_settings("int8", 1), folder=tmp_path)
    assert done.returncode == 2
    assert 'comm.dp.compress = "int8" has no effect with layout.dp = 1' in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_rank_that_fails_in_an_exchange_ends_the_run_with_its_traceback(tmp_path):
    write_tiny_job(tmp_path)
    command = ("train", "job.toml", *_settings("int8"))
    began = time.monotonic()
    done = python("-m", "tests.train.faulty_exchange", *command, folder=tmp_path, timeout_s=300)
    assert done.returncode == 1
    tracebacks = done.stderr.split("Traceback (most recent call last):")
    assert "ValueError: the payload is torn" in tracebacks[1]
    assert "rank 1 " in done.stderr
    assert time.monotonic() - began < 60
