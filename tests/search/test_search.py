"""`paceline search` with real trials: what runs, what never does, and how it goes on."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from paceline.config.errors import InputError
from paceline.config.job import read_job, to_toml
from paceline.search.forecast import forecast
from paceline.search.space import (
    Choices,
    Range,
    dimensions_of,
    job_at,
    point_text,
    read_search,
    rung_steps,
)
from paceline.search.study import SearchStudy
from tests.command_line import paceline, start_paceline, write_tiny_job
from tests.tune.jobs import CLUSTER

pytest.importorskip("optuna")

HERE = CLUSTER.replace(devices_per_node=1, tiers=())
SPACE = """\
[search]
job = "job.toml"
objectives = ["loss", "time"]
within = "{within_s:.9f} s"
rungs = 2
factor = 2
[search.space]
"optim.lr" = {{low = 1e-4, high = 1e-1, log = true}}
"model.num_layers" = [1, 2, 64]
[search.limits]
step_s = {step_s}
"""


def write_space(folder: Path) -> Path:
    """A space of which one choice is predicted too slow, with the time of three whole trials."""
    job = read_job(write_tiny_job(folder), ["train.steps=4", "checkpoint.every=1"])
    (folder / "job.toml").write_text(to_toml(job.replace(cluster=HERE)))
    search = read_search(_write(folder, SPACE.format(within_s=1, step_s=1e3)))
    expected = forecast(job, HERE, search)
    slow = forecast(job_at(job, {"model.num_layers": 64}), HERE, search)
    within_s = 3 * 4 * expected.cost_s
    return _write(folder, SPACE.format(within_s=within_s, step_s=slow.step_s / 2))


def _write(folder: Path, text: str) -> Path:
    file = folder / "space.toml"
    file.write_text(text)
    return file


def search(folder: Path) -> dict[str, object]:
    done = paceline("search", "space.toml", "--json", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def told(found: dict[str, object]) -> list[object]:
    """What doesn't depend on how long things took."""
    return [
        (each["number"], each["settings"], [(one["steps"], one["loss"]) for one in each["rungs"]])
        for each in found["trials"]
    ]


def test_a_search_that_is_killed_has_the_trials_of_one_that_is_not(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        write_space(folder)
    begun = start_paceline("search", "space.toml", folder=killed)
    second = killed / "searches" / "space" / "trials" / "0002" / "metrics.jsonl"
    while not second.exists() and begun.poll() is None:
        time.sleep(0.02)
    begun.kill()
    begun.communicate()
    assert not (killed / "searches" / "space" / "search.html").exists()
    found, again = search(whole), search(killed)
    assert told(found) == told(again)
    assert found["refused"] == again["refused"]

    layers = [each["settings"]["model.num_layers"] for each in found["refused"]]
    assert set(layers) == {64}
    assert all("step_s is predicted as" in each["reason"] for each in found["refused"])
    assert all(each["settings"]["model.num_layers"] < 64 for each in found["trials"])
    ended = [each for each in found["trials"] if len(each["rungs"]) == 2]
    assert 0 < len(ended) < len(found["trials"])
    runs = sorted(one.name for one in (whole / "searches/space/trials").iterdir() if one.is_dir())
    assert runs == [f"{each['number']:04}" for each in found["trials"]]

    steps = [json.loads(line)["step"] for line in second.read_text().splitlines()]
    assert steps == sorted(set(steps))  # no step is made twice
    assert found["answer"]["number"] in [each["number"] for each in found["front"]]
    best = read_job(whole / "searches" / "space" / "job.toml")
    assert best.optim.lr == found["answer"]["settings"]["optim.lr"]
    assert (whole / "searches" / "space" / "search.html").stat().st_size > 1e6
    assert told(search(whole)) == told(found)  # nothing is left to do

    journal = whole / "searches" / "space" / "study.log"
    _damaged_journals_are_one_sentence(journal, whole / "space.toml")
    done = paceline("search", "space.toml", "--set", "train.seed=5", folder=whole)
    assert done.returncode == 2
    assert "has a search with job.train.seed = 0, which is 5 now" in done.stderr


def test_a_search_that_is_told_to_end_has_its_page_and_goes_on(tmp_path):
    """SIGTERM reaches it alone, and not the process that trains its trials."""
    whole, told_to_end = tmp_path / "whole", tmp_path / "told"
    for folder in (whole, told_to_end):
        folder.mkdir()
        write_space(folder)
    begun = start_paceline("search", "space.toml", folder=told_to_end)
    first = told_to_end / "searches" / "space" / "trials" / "0001" / "metrics.jsonl"
    while not first.exists() and begun.poll() is None:
        time.sleep(0.02)
    os.kill(begun.pid, signal.SIGTERM)
    said = begun.communicate()[0]
    assert begun.returncode == 0, said
    assert "stopped; what was found is in searches/space, run it again to go on" in said
    assert (told_to_end / "searches" / "space" / "search.html").exists()
    assert told(search(told_to_end)) == told(search(whole))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("within = ", 'within = "0.000001 s" #'), "beyond search.within"),
        (("step_s = ", "step_s = 1e-9 #"), "step_s is predicted as"),
    ],
)
def test_a_space_without_a_trial_says_why(change, sentence, tmp_path):
    space = write_space(tmp_path)
    space.write_text(space.read_text().replace(*change))
    done = paceline("search", "space.toml", folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert sentence in " ".join(done.stderr.split()).replace("│ ", "")


def _damaged_journals_are_one_sentence(journal: Path, space: Path) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    asked = read_search(space)
    whole = SearchStudy(journal, asked).known
    journal.write_bytes(b"".join(lines) + b'{"op_code":')  # killed while it wrote
    assert SearchStudy(journal, asked).known == whole
    at = next(at for at, line in enumerate(lines) if b'"forecast"' in line)
    for damage in (
        b"nothing\n",
        b"[]\n",
        b'{"op_code":99}\n',
        b"\xff\xfe\n",
        lines[at].replace(b'"number":1', b'"number":-1'),
        lines[at].replace(b'"cost_s"', b'"costs"'),
        lines[at].replace(b'"time"', b'"price"'),
    ):
        journal.write_bytes(b"".join([*lines[:at], damage, *lines[at + 1 :]]))
        with pytest.raises(InputError, match="is no journal of this search") as refused:
            _ = SearchStudy(journal, asked).known
        assert "\n" not in str(refused.value)
    journal.write_bytes(b"".join(lines))


# ---- the file ------------------------------------------------------------------------------------

HEAD = '[search]\njob = "job.toml"\n'
LR = '[search.space]\n"optim.lr" = [1e-3, 3e-3]\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "search is missing"),
        (HEAD, "search.space is missing"),
        (HEAD + "[search.space]\n", "has 0 settings"),
        (HEAD + "[search.space]\noptim.lr = 3\n", "optim.lr = 3 is no choice"),
        (HEAD + "[search.space]\noptim.lr = []\n", "is no choice"),
        (HEAD + "[search.space]\noptim.lr = {low = 1}\n", "high is missing"),
        (HEAD + "[search.space]\noptim.lr = {low = 2, high = 1}\n", "must be below high"),
        (HEAD + "[search.space]\noptim.lr = {low = 0, high = 1, log = true}\n", "low above 0"),
        (HEAD + "[search.space]\noptim.lr = {low = 0.1, high = 1, step = 1}\n", "step is for"),
        (HEAD + "[search.space]\noptim.lr = {low = nan, high = 1}\n", "can't be used|must be"),
        (HEAD + "[search.space]\ntrain.steps = [1, 2]\n", "train.steps can't be searched"),
        (HEAD + "[search.space]\ncluster = [{num_nodes = 2}]\n", "can't be searched"),
        (HEAD + 'within = "soon"\n' + LR, "search.within 'soon' is no time"),
        (HEAD + 'objectives = ["time"]\n' + LR, 'objectives lack "loss"'),
        (HEAD + 'objectives = ["loss", "beauty"]\n' + LR, "beauty"),
        (HEAD + 'objectives = ["loss", "loss"]\n' + LR, "stands twice"),
        (HEAD + 'rule = "cheapest"\n' + LR, "needs limits.loss"),
        (HEAD + "rungs = 0\n" + LR, "rungs = 0"),
        (HEAD + LR + "[search.limits]\nmemory_gb = -1\n", "memory_gb = -1"),
        (HEAD + LR + "[search.limits]\nspeed = 1\n", "speed is not a setting"),
        ("search = 3\n", "search = 3"),
        ("[search\n", "not valid TOML"),
    ],
)
def test_a_file_that_is_no_search_is_one_sentence(text, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence) as refused:
        read_search(_write(tmp_path, text))
    assert "space.toml" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_choices_may_be_tables_of_settings(tmp_path):
    space = 'model = [{hidden_size = 64, num_heads = 8}]\n"optim.lr" = {low = 1e-3, high = 1.0}\n'
    found = read_search(_write(tmp_path, f"{HEAD}[search.space]\n{space}"))
    model, lr = dimensions_of(found).values()
    assert isinstance(model, Choices)
    assert isinstance(lr, Range)
    [value] = model.values.values()
    job = job_at(read_job(write_tiny_job(tmp_path)), {"model": value, "optim.lr": 1e-5})
    assert (job.model.hidden_size, job.model.num_heads, job.optim.lr) == (64, 8, 1e-5)
    shown = point_text({"model": value, "optim.lr": 1.23456e-5})
    assert shown == "model.hidden_size=64, model.num_heads=8, optim.lr=1.23e-05"


def test_rungs_are_multiples_of_the_first(tmp_path):
    found = read_search(_write(tmp_path, HEAD + LR))
    assert rung_steps(found, 100) == (11, 33, 100)
    assert rung_steps(found, 9) == (1, 3, 9)
    with pytest.raises(InputError, match="at least 9 steps, and it has 8"):
        rung_steps(found, 8)


@pytest.mark.parametrize(
    ("more", "point", "sentence"),
    [
        ('objectives = ["loss", "usd"]\n', {}, '"usd" is not known on here'),
        ('objectives = ["loss", "energy"]\n', {}, '"energy" is not known on here'),
        ("", {"model.hidden_size": 1 << 16, "model.num_layers": 9}, "GB"),
        ("", {"model.num_heads": 3}, "num_heads|num_kv_heads"),
        ("limits = {memory_gb = 1e-6}\n", {}, "memory_gb is predicted as"),
        ("limits = {latency_ms = 1e-9}\n", {}, "latency_ms is predicted as"),
        ("limits = {time_s = 1e-9}\n", {}, "time_s is predicted as"),
    ],
)
def test_what_can_not_run_is_refused_by_the_planner(more, point, sentence, tmp_path):
    found = read_search(_write(tmp_path, HEAD + more + LR))
    job = read_job(write_tiny_job(tmp_path))
    with pytest.raises(InputError, match=sentence):
        forecast(job_at(job, point), HERE, found)
