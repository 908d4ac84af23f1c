"""`paceline tune` as a whole on two real ranks, and what it refuses."""

import json
import os
import signal

import pytest

from paceline.config.comm import Comm
from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.tune import command
from paceline.tune.command import TuneOptions, tune_command
from tests.tune.fake import FakeMeasurer
from tests.tune.jobs import job
from tests.tune.test_trial_round import real, text

__all__ = ["text"]


def test_a_badly_set_job_is_mended_on_real_ranks(text, tmp_path, capsys):
    """Everything is computed twice, sample by sample: what is left is a good deal faster."""
    out = tmp_path / "tuned"
    keep = ["dp", "fsdp", "tp", "pp", "cp", "bucket_mib", "comm.dp.compress"]
    given = real(job(samples=32), text)
    found = tune_command(given, TuneOptions(trials=3, keep=keep), out)
    assert found["num_trials"] == 3
    assert found["step_s"] < 0.8 * found["given_step_s"]
    best = read_job(out / "job.toml")
    assert best.layout.micro_batch > 1
    assert (best.train, best.data, best.model) == (given.train, given.data, given.model)
    entries = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in entries].count("trial") == 3
    assert "scaling efficiency" in capsys.readouterr().out
    assert (out / "tune.html").stat().st_size > 1e6


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (TuneOptions(until="speed=3"), "--until speed=3 is no goal"),
        (TuneOptions(until="samples_per_s=3"), "this model is trained on tokens; use tokens_per_s"),
        (TuneOptions(budget="soon"), "--budget 'soon' is no time"),
        (TuneOptions(free=["lr"]), "--free lr is no setting"),
        (TuneOptions(keep=["model"]), "--keep model is no setting"),
    ],
)
def test_wrong_input_is_one_sentence_and_leaves_nothing(asked, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        tune_command(job(), asked, tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()


def test_steps_that_workers_take_by_themselves_are_not_compared(tmp_path):
    local = Comm().local.replace(method="local_sgd")
    given = job()
    with pytest.raises(InputError, match="tune compares steps that all take together"):
        tune_command(
            given.replace(comm=given.comm.replace(local=local)), TuneOptions(), tmp_path / "tuned"
        )


class _StoppedMeasurer(FakeMeasurer):
    """Somebody sends this process SIGTERM once a trial round is known."""

    def measure(self, *asked):
        if self.tried:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().measure(*asked)


def test_a_tuning_that_is_asked_to_end_writes_what_it_has(text, tmp_path, monkeypatch, capsys):
    """As a scheduler ends a job, and as Ctrl-C does."""
    died: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: died.append(number))
    monkeypatch.setattr(
        command, "RealMeasurer", lambda *_: _StoppedMeasurer(lambda one: 1 / one.micro_batch)
    )
    try:
        asked = TuneOptions(keep=["dp", "fsdp", "tp", "pp", "cp", "comm.dp.compress"])
        found = tune_command(real(job(samples=32), text), asked, tmp_path / "tuned")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not died
    assert found["ended"] == "it was interrupted"
    assert (tmp_path / "tuned" / "tune.html").exists()
    said = capsys.readouterr().out
    assert "run it again to go on" in said
    assert "It ended because it was interrupted." in said
