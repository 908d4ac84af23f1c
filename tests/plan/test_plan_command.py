"""`paceline plan` as a person runs it: in this process, and once in its own, without torch."""

import gzip
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import decided, read_job, to_raw
from paceline.observe.accounting import accounting
from paceline.observe.terms import TERMS
from paceline.observe.timeline import Timeline
from tests.plan.answers import IMAGES, SMALL, eight, small_answer

ROOT = Path(__file__).parents[2]
EIGHT = ("--cluster", "8xA100-80")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with job.toml and images.toml, where the command runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "job.toml").write_text(tomli_w.dumps(SMALL))
    (tmp_path / "images.toml").write_text(tomli_w.dumps(IMAGES))
    return tmp_path


def _plan(*arguments: str) -> str:
    """What `paceline plan` prints; a sentence for the person comes as an InputError."""
    done = CliRunner().invoke(app, ["plan", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_out_is_a_job_that_runs_and_what_is_behind_it(folder):
    output = _plan("job.toml", *EIGHT, "--out", "plans/small", "--json")
    made = folder / "plans" / "small"
    names = {"job.toml", "plan.json", "plan.html", "predicted.json.gz"}
    assert {path.name for path in made.iterdir()} == names
    assert [path.name for path in (folder / "plans").iterdir()] == ["small"], "no draft is left"
    concrete = decided(read_job(made / "job.toml"))
    assert concrete.layout == small_answer().best.layout
    told = json.loads(output.splitlines()[-1])
    assert told == json.loads((made / "plan.json").read_text())
    again = json.loads(_plan(str(made / "job.toml"), "--json").splitlines()[-1])
    assert again["counts"]["points"] == 1
    assert again["layout"] == told["layout"]


def test_another_plan_replaces_the_whole_of_the_first(folder):
    _plan("job.toml", *EIGHT, "--out", "plans")
    (folder / "plans" / "notes.txt").write_text("mine")
    _plan("images.toml", *EIGHT, "--out", "plans")
    names = {path.name for path in (folder / "plans").iterdir()}
    assert names == {"job.toml", "plan.json", "plan.html", "notes.txt"}


def test_the_timeline_has_every_rank_of_the_pipeline(folder):
    fixed = ("--set", "layout.pp=4", "--set", "layout.schedule=1f1b")
    output = _plan("job.toml", *EIGHT, *fixed, "--out", "piped", "--json")
    file = folder / "piped" / "predicted.json.gz"
    trace = json.loads(gzip.decompress(file.read_bytes()))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1, 2, 3}
    for event in spans:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["cat"] in (*TERMS, "step")
        assert isinstance(event["tid"], int)
    named = {(event["name"], event["pid"]) for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {("process_name", rank) for rank in range(4)} <= named
    step_s = json.loads(output.splitlines()[-1])["layouts"][0]["step_s"]
    for steps in accounting(Timeline.read(file)).values():
        assert sum(steps[0].values()) == pytest.approx(step_s, rel=1e-6)


def test_a_run_directory_is_planned_by_its_job(folder):
    run = folder / "runs" / "small"
    _plan("job.toml", *EIGHT, "--out", str(run))
    (run / "facts.json").write_text("{}")
    assert "one layout agrees with what is fixed" in _plan(str(run))
    with pytest.raises(InputError, match="is a run, which keeps its own plan"):
        _plan(str(run), "--out", str(run))


def test_a_measured_cluster_is_read_from_its_file(folder):
    cluster = eight().replace(prices={"usd_per_device_hour": 1.25})
    (folder / "cluster.toml").write_text(tomli_w.dumps(to_raw(cluster)))
    assert " USD, " in _plan("job.toml", "--cluster", "cluster.toml")


def test_a_budget_compares_offers(folder):
    offers = ("--cluster", "2x8xA100-80", "--price", "1.5", "--cluster", "8xH100-SXM")
    asked = ("--tokens", "1e9", "--budget", "500 USD, 2 days")
    output = _plan("job.toml", *offers, "--price", "3", *asked, "--json")
    told = json.loads(output.splitlines()[-1])
    assert {run["num_devices"] for run in told["runs"]} == {8, 16}
    assert len(told["runs"]) == 3
    fastest = told["runs"][told["fastest"]]
    assert fastest["days"] == min(run["days"] for run in told["runs"])
    assert told["text"] in " ".join(output.split())
    assert "run by Paceline's own runtime" in " ".join(output.split())
    assert {run["runtime"]["whose"] for run in told["runs"]} == {"Paceline's own runtime"}


def test_what_does_not_fit_is_printed_and_ends_with_a_sentence(folder):
    large = ("--set", "model.num_layers=400", "--set", "model.hidden_size=16384")
    done = CliRunner().invoke(app, ["plan", "job.toml", *EIGHT, *large, "--out", "large"])
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith("nothing fits: ")
    assert "too much" in done.output
    assert {path.name for path in (folder / "large").iterdir()} == {"plan.json", "plan.html"}


WRONG = {
    "an unknown device": (["job.toml", "--cluster", "8xH100-SXN"], "did you mean H100-SXM"),
    "no such form": (["job.toml", "--cluster", "eight"], "not of the form 8xH100-SXM"),
    "a missing file": (["job.toml", "--cluster", "none.toml"], "none.toml does not exist"),
    "a setting that is not free": (["job.toml", *EIGHT, "--free", "nonsense"], "can't be freed"),
    "a bound of nothing": (["job.toml", *EIGHT, "--most", "tp=0"], "--most tp=0"),
    "a bound of no setting": (["job.toml", *EIGHT, "--most", "tq=2"], "did you mean tp"),
    "no layout": (["job.toml", *EIGHT, "--set", "layout.tp=3"], "no layout of 8 devices"),
    "two clusters": (["job.toml", *EIGHT, *EIGHT], "--cluster was given 2 times"),
    "a budget without a price": (["job.toml", *EIGHT, "--budget", "5 USD"], "give --price"),
    "a budget of nothing": (
        ["job.toml", *EIGHT, "--price", "2", "--budget", "0.01 USD"],
        "no run stays within",
    ),
    "a budget for images": (["images.toml", *EIGHT, "--budget", "5 USD"], "runs of decoders"),
    "a budget to write": (["job.toml", "--budget", "5 USD", "--out", "x"], "leave --out out"),
    "a file for a folder": (["job.toml", *EIGHT, "--out", "images.toml"], "is a file"),
    "a folder that can't be": (
        ["job.toml", *EIGHT, "--out", "images.toml/deeper"],
        "can't be written",
    ),
    "no such job": (["nothing.toml"], "nothing.toml does not exist"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_is_one_sentence_and_leaves_nothing(what, folder):
    arguments, words = WRONG[what]
    before = sorted(folder.rglob("*"))
    with pytest.raises(InputError, match=words) as error:
        _plan(*arguments)
    assert "\n" not in str(error.value)
    assert sorted(folder.rglob("*")) == before


def test_a_failed_write_leaves_no_folder(folder, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.plan.answer.page.render", full)
    with pytest.raises(InputError, match="No space left on device"):
        _plan("images.toml", *EIGHT, "--out", "plans")
    assert not (folder / "plans").exists()
    assert {path.name for path in folder.iterdir()} == {"job.toml", "images.toml"}


def test_the_readme_shows_what_the_command_prints(monkeypatch):
    """Figures move with the planner; what is planned and how it is told must be as printed."""
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"```sh\npaceline (plan .*?)\n```\n\n```text\n(.*?)```", readme, flags=re.S)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "88")
    printed = _plan(*shlex.split(found[1])[1:]).splitlines()
    told = found[2].splitlines()
    assert told[0] == printed[0].rstrip()
    for heading in ("layout ", "step ", "memory ", "what decides", "the whole run", "price "):
        assert any(line.startswith(heading) for line in told)
        assert any(line.startswith(heading) for line in printed)


def test_a_named_cluster_needs_neither_torch_nor_plotly(folder):
    code = (
        "import sys; from paceline.cli import app\n"
        "sys.argv = ['paceline', 'plan', 'job.toml', '--cluster', '8xA100-80']\n"
        "try: app()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'plotly', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "the fastest" in done.stdout


def test_this_machine_is_asked_only_where_no_cluster_is_named(folder, monkeypatch):
    def asked() -> Cluster:
        raise AssertionError("the machine was asked")

    monkeypatch.setattr("paceline.machine.discovery.this_machine", asked)
    _plan("images.toml", *EIGHT)
    with pytest.raises(AssertionError, match="the machine was asked"):
        _plan("images.toml")
