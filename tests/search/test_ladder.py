"""`paceline ladder`: its sizes keep to the budget, and real small runs meet their prediction."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config.errors import InputError
from paceline.config.job import JobSpec, read_job, to_toml
from paceline.search.ladder.advice import Advice, Budget, chosen, options, size_near
from paceline.search.ladder.law import Law, Sweep, rate_law
from paceline.search.ladder.page import notes
from paceline.search.ladder.rungs import (
    FINER,
    LENGTHS,
    MORE_RATES,
    NUM_RATES,
    SWEPT,
    Rung,
    lengthened,
    network_of,
    plan_rungs,
    sized,
)
from paceline.search.ladder.runs import Climbed, RungRun
from tests.command_line import paceline, start_paceline, write_tiny_job
from tests.tune.jobs import CLUSTER, figure

HERE = CLUSTER.replace(devices_per_node=1, tiers=())
LAW = Law(floor=1.4, a=0.45, alpha=0.36, b=0.7, beta=0.31)
HOURS = 1 / 24


def tiny(folder: Path, num_lines: int = 400) -> JobSpec:
    """The tiny Job on a stated device."""
    return read_job(write_tiny_job(folder, num_lines)).replace(cluster=HERE)


@pytest.mark.parametrize("within_s", [5.0, 30.0, 1000.0])
@pytest.mark.parametrize("largest", [None, 80_000])
def test_all_runs_together_cost_no_more_than_they_may(within_s, largest, tmp_path):
    job = tiny(tmp_path)
    found = plan_rungs(job, HERE, within_s, largest, 20.0)
    sweep = (NUM_RATES + MORE_RATES + len(FINER)) * SWEPT * found.steps
    runs = sum(one.cost_s * steps for one in found.rungs for steps in found.lengths)
    assert runs + sweep * found.rungs[0].cost_s == pytest.approx(found.cost_s)
    assert 0.3 * within_s < found.cost_s <= within_s
    params = [one.params for one in found.rungs]
    assert params == sorted(set(params))
    assert largest is None or params[-1] <= largest
    assert found.lengths == tuple(found.steps * each for each in LENGTHS)
    assert found.tokens_per_step == 12 * 32


def test_more_time_gives_larger_rungs(tmp_path):
    job = tiny(tmp_path)
    tops = [plan_rungs(job, HERE, s, None, 20.0).rungs[-1].params for s in (500, 5000, 50000)]
    assert tops == sorted(set(tops))


def test_sizes_keep_the_proportions_of_the_job(tmp_path):
    job = tiny(tmp_path)
    twice = sized(job, 8, 2).model
    assert (twice.hidden_size, twice.ffn_size, twice.num_layers) == (64, 128, 4)
    assert (twice.num_heads, twice.num_kv_heads, twice.head_dim) == (8, 4, 8)
    assert (twice.parametrization, twice.base_width, twice.base_layers) == ("mup", 16, 1)
    normed = job.replace(model=job.model.replace(post_norms=True))
    assert sized(normed, 8, 2).model.base_layers is None
    one = sized(job, 1, 1).model
    assert (one.num_heads, one.num_kv_heads, one.num_layers) == (1, 1, 1)
    near = size_near(job, twice.num_params * 1.02)
    assert near == 8
    longer = lengthened(job, 120)
    assert (longer.train.steps, longer.optim.warmup_steps) == (120, 20)
    assert lengthened(job, 4).optim.warmup_steps == 1
    falls = job.replace(optim=job.optim.replace(schedule="wsd", decay_steps=6))
    shorter = [lengthened(falls, steps).optim for steps in (1, 2, 4)]
    assert [(each.warmup_steps, each.decay_steps) for each in shorter] == [(0, 1), (1, 1), (1, 2)]


def test_the_run_keeps_to_the_budget_and_loses_least(tmp_path):
    job = tiny(tmp_path)
    priced = HERE.replace(prices={"usd_per_device_hour": figure(2.0)})
    rungs = plan_rungs(job, HERE, 5, None, 20.0)
    for budget in (
        Budget(None, HOURS),
        Budget(1.0, None),
        Budget(1.0, HOURS / 4),
        Budget(0.1, HOURS),
    ):
        found = list(options(job, rungs, priced, budget, LAW, {8: (1.0, 1.0)}, None))
        best = chosen(found)
        assert best.loss <= min(one.loss for one in found) * 1.001
        assert len(found) > 3
        bounds = [
            (best.run.train_s, None if budget.days is None else budget.days * 86400),
            (best.run.usd, budget.usd),
        ]
        assert all(limit is None or value <= limit for value, limit in bounds)
        assert any(limit is not None and value > 0.95 * limit for value, limit in bounds)
    slow = list(options(job, rungs, priced, Budget(None, HOURS), LAW, {8: (2.0, 2.0)}, 1e6))
    [fast] = options(
        job, rungs, priced, Budget(None, HOURS), LAW, {8: (1.0, 1.0), 2: (9.0, 9.0)}, 1e6
    )
    assert slow[0].tokens == pytest.approx(fast.tokens / 2, rel=0.01)
    assert slow[0].multiplied == fast.multiplied


@pytest.mark.parametrize(
    ("changes", "arguments", "sentence"),
    [
        ([], ["--budget", "soon"], "--budget 'soon' is not of the form"),
        ([], ["--budget", "1 hour", "--share", "2"], "--share 2 is no part of a budget"),
        ([], ["--budget", "0.000001 hours"], "the shortest takes"),
        ([], ["--budget", "5 USD"], "give --price"),
        ([], ["--budget", "5 USD", "--price", "0"], "the budget has no end"),
        ([], ["--budget", "1 hour", "--largest", "100"], "--largest 100 has no room"),
        (["model.tie_embeddings=true"], ["--budget", "1 hour"], "tie_embeddings=false"),
        ([], [], 'give --budget "500 USD, 3 days"'),
        ([], ["--compare", "runs/none"], "climb the ladder first"),
        ([], ["--budget", "1 hour", "--cluster", "8xNothing"], "Nothing"),
    ],
)
def test_what_can_not_be_is_one_sentence(changes, arguments, sentence, tmp_path):
    job = read_job(write_tiny_job(tmp_path), changes).replace(cluster=HERE)
    (tmp_path / "job.toml").write_text(to_toml(job))
    done = paceline("ladder", "job.toml", *arguments, folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    said = " ".join(done.stderr.split()).replace("│ ", "")
    assert sentence in said


@pytest.mark.parametrize(("text", "said"), [(None, 0), (3000, 0), (1000, 1)])
def test_a_text_that_is_read_often_is_told(text, said):
    advice = Advice.model_construct(tokens=8000.0, multiplied=1, largest=1)
    rung = Rung(heads=1, params=1, step_s=1.0, cost_s=1.0)
    sweep = Sweep(1.0, (1.0, 2.0, 4.0), (2.0, 1.0, 2.0))
    run = RungRun(rung, steps=100, rate=1.0, loss=1.0, step_s=1.0)
    climbed = Climbed(sweep, rate_law(sweep), (run,), tokens_per_step=10)
    found = notes(advice, climbed, replace(LAW, text_tokens=text))
    assert len(found) == said
    assert all("reads its text 8 times, which counts as 6.63 texts" in one for one in found)


def test_other_networks_are_refused(tmp_path):
    job = tiny(tmp_path)
    with pytest.raises(InputError, match="dense decoders"):
        network_of(job.replace(model=job.model.replace(causal=False)))


def climb(folder: Path, *arguments: str) -> dict[str, object]:
    budget = ["--budget", BUDGET, "--share", "0.2", "--out", "ladder"]
    done = paceline("ladder", "job.toml", *budget, *arguments, "--json", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# The stated device is slow: its seconds pass in a fraction of one.
BUDGET = "0.01 hours"


def told(found: dict[str, object]) -> list[object]:
    return [found["runs"], found["law"], found["lr"]]


def test_a_ladder_that_is_killed_ends_as_one_that_is_not_and_meets_its_run(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        # So long that no network learns it by heart, however fast this machine is.
        (folder / "job.toml").write_text(to_toml(tiny(folder, num_lines=20_000)))
    begun = start_paceline(
        "ladder", "job.toml", "--budget", BUDGET, "--share", "0.2", "--out", "ladder",
        folder=killed,
    )  # fmt: skip
    runs = killed / "ladder" / "runs"
    while begun.poll() is None and len(list(runs.glob("*/metrics.jsonl"))) < 3:
        time.sleep(0.02)
    begun.kill()
    begun.communicate()
    assert not (killed / "ladder" / "ladder.html").exists()
    found, again = climb(whole), climb(killed)
    assert told(found) == told(again)
    _keeps_what_it_promised(whole, found)
    _recommends_anew(whole, found)
    _meets_its_run(whole, found)


def _keeps_what_it_promised(folder: Path, found: dict[str, object]) -> None:
    text = found["law"]["text_tokens"]
    assert text == pytest.approx(0.9 * (folder / "text.txt").stat().st_size, rel=0.01)
    assert found["predicted_device_s"] <= 0.2 * 36
    advice = found["advice"]
    assert advice["loss_low"] < advice["loss"] < advice["loss_high"]
    assert advice["train_s"] <= 0.8 * 36 * 1.01
    assert advice["multiplied"] <= 1e6
    _was_timed(folder, advice)
    job = read_job(folder / "ladder" / "job.toml")
    assert (job.model.parametrization, job.model.tie_embeddings) == ("mup", False)
    assert job.optim.lr == advice["lr"]
    assert job.train.steps == advice["steps"]
    assert (folder / "ladder" / "ladder.html").stat().st_size > 1e6


def _was_timed(folder: Path, advice: dict[str, object]) -> None:
    """The seconds of its steps are those of steps that were made here: of a few of it, or of the
    largest small network's runs where it is as large."""
    which = "*-steps-*" if advice["multiplied"] == advice["largest"] else "for-its-speed"
    files = (folder / "ladder" / "runs").glob(f"{advice['heads']}-heads-{which}/metrics.jsonl")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    times = sorted(line["step_time_s"] for line in lines)
    assert len(times) >= 24
    low_s, high_s = (advice[name] / advice["steps"] for name in ("train_low_s", "train_high_s"))
    assert times[0] <= low_s <= advice["step_s"] <= high_s <= times[-1]


def _recommends_anew(folder: Path, found: dict[str, object]) -> None:
    """From the same small runs, for twice the budget."""
    before = {file: file.stat().st_mtime for file in (folder / "ladder" / "runs").glob("*")}
    done = paceline(
        "ladder", "job.toml", "--budget", "0.02 hours", "--share", "0.2", "--out", "ladder",
        "--json", folder=folder,
    )  # fmt: skip
    more = json.loads(done.stdout.splitlines()[-1])
    assert told(more) == told(found)
    assert more["advice"]["loss"] < found["advice"]["loss"]
    after = {file: file.stat().st_mtime for file in (folder / "ladder" / "runs").glob("*")}
    assert before.items() <= after.items()  # another size may have been tried for its speed
    assert told(climb(folder)) == told(found)
    done = paceline(
        "ladder", "job.toml", "--budget", BUDGET, "--share", "0.3", "--out", "ladder",
        folder=folder,
    )  # fmt: skip
    assert done.returncode == 2
    assert "has a ladder with ladder.share = 0.2, which is 0.3 now" in done.stderr


def _meets_its_run(folder: Path, found: dict[str, object]) -> None:
    asked = ["ladder", "job.toml", "--out", "ladder", "--compare"]
    other = next((folder / "ladder" / "runs").glob("*/metrics.jsonl")).parent
    done = paceline(*asked, str(other), folder=folder)
    assert done.returncode == 2
    assert "is not the run that was predicted" in done.stderr
    done = paceline("train", "ladder/job.toml", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    done = paceline(*asked, "runs/ladder-run", "--json", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row[""]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    lines = (folder / "runs/ladder-run/metrics.jsonl").read_text().splitlines()
    measured = json.loads(lines[-1])["eval_loss"]
    assert float(rows["loss"]["measured"]) == pytest.approx(measured, rel=1e-3)
    assert float(rows["loss"]["predicted"]) == pytest.approx(found["advice"]["loss"], rel=1e-3)
    # A stated device says nothing of this machine's speed; losses don't depend on it. The run is a
    # hundred times as long as the small ones, so that its interval is wide.
    advice = found["advice"]
    assert 0.9 * advice["loss_low"] <= measured <= 1.1 * advice["loss_high"]
    assert measured < min(one["loss"] for one in found["runs"])
