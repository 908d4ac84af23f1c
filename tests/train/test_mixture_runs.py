"""Runs on a mixture with a curriculum: killed, resumed on other ranks, evaluated by name.

`elastic.exact` gives losses the same bits on any number of ranks, so equal losses say that every
step read the same samples.
"""

import json
import random

import pytest

from tests.command_line import losses, metrics, paceline, ranks, start_paceline, write_tiny_job
from tests.train.judged import must_be_told_before
from tests.train.test_resume import _kill_when

STEPS = 18
MIXTURE = """
[[data.sources]]
name = "words"
source = "text.txt"
weight = 3
[[data.sources]]
name = "sums"
source = "sums.jsonl"
text_field = "sum"
weight = 1
max_epochs = 1.5
[[data.stages]]
from_step = 7
weights = { words = 1, sums = 2 }
[[data.eval_sets]]
name = "dates"
source = "dates.txt"
"""
SETTINGS = (
    *("--set", f"train.steps={STEPS}", "--set", "train.eval_every=6"),
    *("--set", "elastic.min_nodes=1", "--set", "elastic.exact=true"),
    *("--set", "layout.micro_batch=1", "--set", "checkpoint.every=2"),
)


def write_mixed_job(folder, mixture=MIXTURE):
    """The tiny Job on a mixture of its text and others."""
    job = write_tiny_job(folder)
    job.write_text(job.read_text().replace('source = "text.txt"\n', "") + mixture)
    rows = (json.dumps({"sum": f"{n} + {n} = {2 * n}"}) for n in range(100, 250))
    (folder / "sums.jsonl").write_text("\n".join(rows))
    (folder / "dates.txt").write_text("".join(f"{n} May 1999\n" for n in range(1, 31)))


def train(folder, *settings):
    done = paceline("train", "job.toml", *settings, folder=folder)
    assert done.returncode == 0, done.stderr
    return losses(folder)


def test_killed_on_changing_ranks_it_reads_the_same_samples(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    write_mixed_job(whole)
    expected = train(whole, *SETTINGS, *ranks(1))
    write_mixed_job(tmp_path)
    kills = sorted(random.sample(range(2, STEPS - 2), 3))
    counts = random.sample([1, 2, 3, 4], 4)
    for step, count in zip(kills, counts, strict=False):
        process = start_paceline("train", "job.toml", *SETTINGS, *ranks(count), folder=tmp_path)
        _kill_when(process, lambda step=step: len(metrics(tmp_path)) >= step)
    told = f"killed at {kills} on {counts} ranks"
    assert train(tmp_path, *SETTINGS, *ranks(counts[-1])) == expected, told


def test_each_set_that_is_evaluated_has_its_loss(tmp_path):
    write_mixed_job(tmp_path)
    train(tmp_path, *SETTINGS, "--set", "checkpoint.best=loss.sums", *ranks(2))
    line = metrics(tmp_path)[-1]
    found = line["eval_figures"]
    assert list(found) == ["loss.words", "loss.sums", "loss.dates"]
    assert line["eval_loss"] == pytest.approx(sum(found.values()) / 3)
    assert len(set(found.values())) == 3
    must_be_told_before(tmp_path, "tiny")
    facts = json.loads((tmp_path / "runs/tiny/facts.json").read_text())
    assert list(facts["data"]["sources"]) == ["words", "sums"]
    told = paceline("evaluate", "runs/tiny", "--step", str(STEPS), "--json", folder=tmp_path)
    assert told.returncode == 0, told.stderr
    evaluated = json.loads(told.stdout.splitlines()[-1])
    assert evaluated["loss"] == pytest.approx(line["eval_loss"], rel=1e-4)


def test_each_source_has_its_loss_in_every_step(tmp_path):
    """Weighed by the samples of each they make the loss; other ranks and micro-batches say the
    same, and so does a network cut into stages."""
    write_mixed_job(tmp_path)
    few = ("--set", "train.steps=4", "--set", "checkpoint.every=0", "--fresh")

    def figures(*layout):
        train(tmp_path, *few, *layout)
        return [line["figures"] for line in metrics(tmp_path)]

    alone = figures(*ranks(1))
    for line in metrics(tmp_path):
        low, high = sorted(line["figures"].values())
        assert low < line["loss"] < high
    assert all(list(each) == ["loss.words", "loss.sums"] for each in alone)
    for layout in ("layout.micro_batch=3", "layout.pp=2"):
        together = figures("--set", layout, *ranks(2))
        assert together == [pytest.approx(each, rel=1e-4) for each in alone]
    assert "loss of each source" in (tmp_path / "runs/tiny/report.html").read_text()


def test_stages_to_come_may_change_and_others_not(tmp_path):
    write_mixed_job(tmp_path)
    train(tmp_path, *SETTINGS, "--set", "train.steps=6", *ranks(1))
    later = "[{from_step = 9, weights = {sums = 1}}]"
    train(
        tmp_path, *SETTINGS, "--set", "train.steps=10", "--set", f"data.stages={later}", *ranks(1)
    )
    again = paceline("train", "job.toml", *SETTINGS, *ranks(1), folder=tmp_path)
    assert again.returncode == 2
    assert "another training: data.stages" in again.stderr


def test_a_run_that_its_sources_can_t_feed_is_refused(tmp_path):
    write_mixed_job(tmp_path, MIXTURE.replace("weight = 3", "weight = 3\nmax_epochs = 0.5"))
    done = paceline("train", "job.toml", "--set", "train.steps=999", *ranks(1), folder=tmp_path)
    assert done.returncode == 2
    assert "train.steps = 999 are more than the" in done.stderr
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
