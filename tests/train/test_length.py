"""A run's length in epochs or tokens becomes steps before it starts."""

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from paceline.config.errors import InputError
from paceline.config.job import change_job, read_job
from paceline.observe.run import Run
from paceline.train.command import train_job
from paceline.train.custom.feed import samples_of
from paceline.train.data import prepare
from paceline.train.length import length_in_steps
from tests.command_line import paceline as command
from tests.small_job import work_in, write_small_job


@pytest.fixture
def job_file(tmp_path, monkeypatch):
    work_in(tmp_path, monkeypatch)
    return partial(write_small_job, tmp_path)


def test_tokens_are_rounded_up_to_steps(job_file):
    for tokens, steps in ((1, 1), (32, 1), (33, 2), (320, 10)):
        job = length_in_steps(read_job(job_file(f"tokens = {tokens}")))
        assert (job.train.steps, job.train.tokens) == (steps, None)


def test_an_epoch_reads_every_sample_of_the_train_split(job_file):
    job = read_job(job_file("epochs = 1"))
    num_samples = prepare(job.data).dataset("train").num_samples(16)
    assert length_in_steps(job).train.steps == -(-num_samples // 2)
    tenth = length_in_steps(read_job(job_file("epochs = 0.1")))
    assert tenth.train.steps == -(-num_samples // 20)
    assert tenth.train.epochs is None


def test_steps_are_left_as_they_are(job_file):
    job = read_job(job_file("steps = 7"))
    assert length_in_steps(job) is job


def test_a_run_is_said_to_be_one_length(job_file):
    with pytest.raises(InputError, match=r"steps = 3 and train\.tokens = 96 each say .* keep one"):
        read_job(job_file("steps = 3\ntokens = 96"))
    with pytest.raises(InputError, match=r"train\.steps is missing: .* train\.epochs or"):
        read_job(job_file(""))
    for length in ("epochs = 0", "epochs = inf", "tokens = 0", "tokens = 2.5", "epochs = 1e300"):
        with pytest.raises(InputError, match=rf"train\.{length.split()[0]} = .* can't be used"):
            read_job(job_file(length))


def test_a_setting_takes_the_place_of_the_files_length(job_file):
    job = read_job(job_file("steps = 3"), ["train.tokens=64"])
    assert (job.train.steps, job.train.tokens) == (0, 64)
    assert length_in_steps(job).train.steps == 2
    assert change_job(job, ["train.steps=5"]).train.tokens is None
    with pytest.raises(InputError, match="each say how long"):
        read_job(job_file("steps = 3"), ["train.tokens=96", "train.epochs=2"])


def test_the_schedule_is_checked_against_the_steps_made(job_file):
    job = read_job(job_file("tokens = 64"), ["optim.warmup_steps=3"])
    with pytest.raises(InputError, match=r"3 steps but train\.steps = 2"):
        length_in_steps(job)


def test_synthetic_samples_have_neither_epochs_nor_tokens(tmp_path):
    file = tmp_path / "job.toml"
    sections = '[model]\nfamily = "dlrm"\ntables = [50, 20]\ndim = 4\nnum_dense = 3\n'
    file.write_text(f'{sections}[data]\nsource = "clicks"\n[train]\nepochs = 2\nglobal_batch = 8\n')
    with pytest.raises(InputError, match=r"epochs = 2.0 needs .* synthetic samples have no end"):
        length_in_steps(read_job(file))
    with pytest.raises(InputError, match=r"tokens = 9 counts what language models read"):
        read_job(file, ["train.tokens=9"])


def test_show_and_plan_answer_in_steps(job_file, tmp_path):
    file = str(job_file("tokens = 320"))
    shown = command("train", file, "--show", folder=tmp_path)
    assert "steps = 10\n" in shown.stdout, shown.stderr
    planned = command("plan", file, "--cluster", "1x1xH100-SXM", "--out", "p", folder=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert read_job(tmp_path / "p" / "job.toml").train.steps == 10


class _Samples(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(5, 2))


def test_the_length_of_ones_own_data():
    samples = TensorDataset(torch.ones(10, 2))
    assert samples_of(samples, 4) == 10
    assert samples_of(DataLoader(samples, 4, shuffle=True), 4) == 10
    assert samples_of(DataLoader(samples, 4, drop_last=True), 4) == 8
    assert samples_of(_Samples(), 4) is None
    assert samples_of(DataLoader(_Samples(), 4), 4) is None
    assert samples_of(iter([1]), 4) is None


def test_epochs_of_ones_own_data(tmp_path):
    data = TensorDataset(torch.randn(10, 2))

    def loss(model, batch):
        return model(batch[0]).square().mean()

    job = {"train": {"epochs": 2, "global_batch": 4}, "cluster": {"devices_per_node": 1}}
    run = paceline.train(job, torch.nn.Linear(2, 1), loss, data, runs=tmp_path)
    assert run.job().train.steps == 5
    assert len(run.metrics()) == 5
    with pytest.raises(InputError, match="this data has no length"):
        paceline.train(job, torch.nn.Linear(2, 1), loss, _Samples(), runs=tmp_path / "other")


def test_a_small_text_trains_and_says_what_is_held_out(job_file, tmp_path, capsys):
    file = job_file("epochs = 1")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog, twice")
    run = Run(tmp_path / "runs" / "small")
    train_job(read_job(file), run, fresh=False)
    assert run.metrics()[-1]["eval_loss"] > 0
    assert run.facts()["data"]["eval_tokens"] == 17
    assert "17 are held out, which is one sample" in " ".join(capsys.readouterr().out.split())
