"""`paceline launch` and what looks at launches: refusals that leave nothing, and one real run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.config.site import NodeType, Site, site_named
from paceline.launch import command
from paceline.launch.contract import SilentError
from paceline.launch.prepare import Asked, Prepared, prepare_script
from paceline.launch.records import Launch, newest_launch
from paceline.launch.sizes import planned_sizes
from paceline.launch.supervision.engine import SupervisedEngine
from paceline.launch.supervision.state import STATE
from paceline.machine.discovery import this_machine
from paceline.observe.run import Run
from paceline.plan.resolve import resolve
from paceline.train.start import begin_run
from tests.command_line import environment, losses, metrics, paceline, write_tiny_job
from tests.launch.waiting import until

SITES = """
[lab]
engine = "ssh"
hosts = ["n1", "n2"]
max_hours = 10
[lab.node_types.gpu]
cluster = "8xH100-SXM"
num_nodes = 2
usd_per_device_hour = 2.5
[queue]
engine = "local"
"""
LLAMA = Path(__file__).parents[2] / "recipes" / "llama3_8b.toml"


def run(*arguments: str) -> str:
    """What a command prints, called in this process."""
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    write_tiny_job(tmp_path)
    (tmp_path / "paceline-sites.toml").write_text(SITES)
    return tmp_path


def launch(*arguments: str) -> str:
    return run("launch", *arguments)


ON_QUEUE = ("job.toml", "--on", "queue", "--set", "cluster.devices_per_node=1")


def refused(*arguments: str) -> str:
    with pytest.raises(InputError) as caught:
        launch(*arguments)
    assert not Path("runs").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("job.toml", "--on", "lbb"), "no site 'lbb' is in paceline-sites.toml; did you mean lab?"),
        (("job.toml", "--on", "lab", "--nodes", "3"), "3 nodes were asked for and the site has 2"),
        (("job.toml", "--on", "lab", "--spot"), "no spot_usd_per_device_hour"),
        (("job.toml", "--on", "queue", "--nodes", "2"), "the site has 1"),
        (("job.toml", "--on", "queue", "--spot"), "--spot needs node_types"),
        (("job.toml", "--on", "queue", "--after", "other"), "was not launched"),
        (("job.toml", "x", "--on", "queue"), "only a script (.py) takes arguments"),
        (("script.py", "--set", "train.steps=3"), "a script has none here"),
        (("job.toml", "--nodes", "3-2"), "--nodes 3-2 is no number of nodes"),
        (("job.toml", "--nodes", "0"), "--nodes 0 is no number of nodes"),
        (("job.toml", "--on", "lab", "--nodes", "1-2"), "only Slurm starts a job with fewer"),
        (("missing.py", "--on", "queue"), "missing.py does not exist"),
        (("job.toml", "--on", "queue", "--cheapest"), "can't be predicted"),
        (("job.toml", "--on", "lab", "--budget", "much"), "--budget 'much' is not of the form"),
        (("job.toml", "--on", "lab", "--set", "cluster.num_nodes=1", "--nodes", "2"), "leave one"),
        (("job.toml", "--on", "lab", "--set", "cluster.device=A100-80"), "gpu has H100-SXM"),
        ((*ON_QUEUE, "--set", "checkpoint.best=eval_los"), "use one of eval_loss, eval_perp"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_leaves_nothing(here, arguments, said):
    assert said in refused(*arguments)


def test_a_site_file_with_a_wrong_key_names_it(here):
    (here / "paceline-sites.toml").write_text('[lab]\nengine = "ssh"\nhost = ["n1"]\n')
    assert "lab.host is not a setting; did you mean hosts?" in refused("job.toml", "--on", "lab")
    for lines, said in {
        'engine = "pbs"': "lab.engine = 'pbs' can't be used",
        'engine = "slurm"\nhosts = ["n1"]': "lab.hosts has no effect with engine 'slurm'",
        'engine = "slurm"\nsetup = "true"': "lab.setup = 'true' can't be used: it must be a list.",
        'engine = "slurm"\nnode_types.a.cluster = 8': "lab.node_types.a.cluster = 8 can't be used",
    }.items():
        (here / "paceline-sites.toml").write_text(f"[lab]\n{lines}\n")
        assert said in refused("job.toml", "--on", "lab")
    (here / "paceline-sites.toml").write_text("")
    assert "no site 'lab' is in paceline-sites.toml" in refused("job.toml", "--on", "lab")


def test_the_sites_of_all_projects_are_known_beside_the_projects_own(here, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "config"))
    own = here / "config" / "paceline" / "sites.toml"
    own.parent.mkdir(parents=True)
    own.write_text(
        '[queue]\nengine = "ssh"\nhosts = ["x"]\n[mine]\nengine = "ssh"\nhosts = ["y"]\n'
    )
    assert site_named("mine").hosts == ("y",)
    assert site_named("queue").engine == "local"  # the project's counts


def test_the_site_of_the_page_is_one(here):
    page = (LLAMA.parents[1] / "docs" / "cluster.md").read_text()
    lines = page[page.index("        [lab]") :].split("\n\n")[0].splitlines()
    (here / "paceline-sites.toml").write_text("\n".join(line.strip() for line in lines))
    site = site_named("lab")
    assert len(site.hosts) == 4
    assert site.node_types["h100"].usd_per_device_hour == 2.5


def test_a_job_that_cannot_end_in_time_says_what_would_help(here):
    said = refused(str(LLAMA), "--on", "lab", "--nodes", "1")
    assert "the site ends jobs after 10 h 00 min: train at most" in said


def test_a_job_that_does_not_fit_is_refused_before_it_waits(here):
    wide = ("--set", "model.hidden_size=16384", "--set", "model.ffn_size=65536")
    said = refused(str(LLAMA), "--on", "lab", "--nodes", "1", *wide)
    assert "nothing fits" in said
    assert "GB" in said


def test_a_size_that_cannot_be_is_told_below_the_table(here):
    small = ("--set", "train.global_batch=8", "--set", "elastic.min_nodes=2")
    said = launch("job.toml", "--on", "lab", *small, "--dry-run")
    assert "--nodes 1 of gpu: elastic.min_nodes = 2 is more than 1 nodes" in said


def test_spot_machines_are_those_of_node_types_that_have_some(here):
    kind = NodeType(cluster="8xH100-SXM", num_nodes=1)
    types = {"spot": kind.replace(spot_usd_per_device_hour=1.0), "plain": kind}
    job = read_job(here / "job.toml", ["train.global_batch=8"])
    site = Site(engine="slurm", node_types=types)
    (size,) = planned_sizes(job, site, 1, this_machine, is_spot=True)
    assert size.size.node_type == "spot"


def test_all_sizes_are_planned_and_the_best_is_rendered(here):
    small = ("--set", "model.num_layers=2", "--set", "train.global_batch=16")
    said = launch(str(LLAMA), "--on", "lab", *small, "--dry-run")
    assert not (here / "runs").exists()
    rendered = said[said.index("job.toml <==") :]
    assert 'device = "H100-SXM"' in rendered
    assert "num_nodes = 2" in rendered
    assert "min_nodes = 2" in rendered
    assert "save_within_s = 45.0" in rendered
    cheap = launch(str(LLAMA), "--on", "lab", *small, "--dry-run", "--cheapest")
    assert "min_nodes = 0" in cheap[cheap.index("job.toml <==") :]


def test_code_that_is_not_committed_is_refused_or_kept(here):
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    (here / "code.py").write_text("a = 1\n")
    for arguments in (["init", "-q"], ["add", "code.py"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True, timeout=300)
    (here / "code.py").write_text("a = 2\n")
    assert "not committed (code.py)" in refused(*ON_QUEUE)
    (here / "script.py").write_text("import code\nprint('ran')\n")
    launch("script.py", "--on", "queue", "--patch")
    record = newest_launch(here / "runs" / "script").record
    assert len(record.commit) == 40
    assert record.uncommitted == ("code.py", "script.py")
    assert b"+a = 2" in (record.request.folder / "code.patch").read_bytes()
    assert "ran\n" in run("logs", "script", "-f")


def test_a_script_runs_with_its_arguments_and_its_name_is_taken_while_it_lives(here):
    (here / "a script.py").write_text(
        "import pathlib, sys, time\nprint(sys.argv[1:])\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.05)\n"
    )
    launch("a script.py", "--on", "queue", "--", "--epochs", "3 $(x)")
    with pytest.raises(InputError, match=r"a-script is \w+ already .* stop it by"):
        launch("a script.py", "--on", "queue")
    launch("a script.py", "--on", "queue", "--name", "second", "--after", "a-script")
    second = newest_launch(here / "runs" / "second")
    until(lambda: second.observe().reason == "dependency")
    assert "a job that must finish before has not finished" in run("why", "second")
    (here / "go").touch()
    assert "['--epochs', '3 $(x)']\n" in run("logs", "a-script", "--follow")
    until(lambda: second.observe().state == "finished")
    found = json.loads(run("jobs", "--json").splitlines()[-1])
    assert [(one["run"], one["state"], one["exit_code"]) for one in found] == [
        ("runs/a-script", "finished", 0),
        ("runs/second", "finished", 0),
    ]
    launch("a script.py", "--on", "queue")
    until(lambda: newest_launch(here / "runs" / "a-script").observe().state == "finished")
    assert newest_launch(here / "runs" / "a-script").number == 2
    assert run("jobs", "--all").count("finished") == 3
    with pytest.raises(InputError, match="there is nothing to stop"):
        run("stop", "second")
    (here / "a script.py").write_text("raise RuntimeError('no GPU today')\n")
    launch("a script.py", "--on", "queue", "--name", "third")
    until(lambda: newest_launch(here / "runs" / "third").observe().state == "failed")
    assert "localhost wrote last: RuntimeError: no GPU today\n" in run("why", "third")


def test_an_engine_that_is_silent_is_asked_once_and_loses_no_job(here, monkeypatch):
    (here / "script.py").write_text("print('ran')\n")
    for name in ("one", "two"):
        launch("script.py", "--on", "queue", "--name", name)
        until(lambda name=name: newest_launch(here / "runs" / name).observe().state == "finished")
    asked = []

    def is_silent(self, job):
        asked.append(job)
        raise SilentError("it is silent: try again.")

    with monkeypatch.context() as patch:
        patch.setattr(SupervisedEngine, "observe", is_silent)
        said = run("jobs", "--json")
        assert len(asked) == 1
        assert "one and 1 more: it is silent: try again.\n" in said
        found = json.loads(said.splitlines()[-1])
        assert [(one["state"], one["attempts"]) for one in found] == [("unknown", [])] * 2
        assert run("jobs", "--release-idle", "1 s").count("it is silent") == 3
        assert "ran\n" in run("logs", "one")
        with pytest.raises(InputError, match="it is silent"):
            run("why", "one")


def test_a_letter_that_is_half_written_is_shown_whole(tmp_path):
    log = command._Log(tmp_path / "log")
    assert [*log.new_parts()] == []
    raw = "50% █".encode()
    (tmp_path / "log").write_bytes(raw[:-1])
    assert "".join(log.new_parts()) == "50% "
    (tmp_path / "log").write_bytes(raw)
    assert "".join(log.new_parts()) == "█"


def test_a_submission_that_dies_half_way_leaves_nothing(here, monkeypatch):
    def die(self, folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(SupervisedEngine, "_start", die)
    (here / "script.py").write_text("print('ran')\n")
    with pytest.raises(KeyboardInterrupt):
        command.launch_command(_prepared(here), is_dry=False, as_json=False)
    assert not (here / "runs").exists()


def test_two_that_launch_one_run_at_once(here):
    (here / "script.py").write_text("print('ran')\n")
    first, second = _prepared(here), _prepared(here)
    command.submit(first)
    with pytest.raises(InputError, match="being launched by another process"):
        command.submit(second)
    until(lambda: newest_launch(first.run).observe().state == "finished")


@pytest.mark.parametrize("more", [(), ("--release-idle", "1 minute"), ("--sweep", "x")])
def test_a_folder_that_is_not_there_is_refused(here, more):
    with pytest.raises(InputError, match=r"nowhere (is not there: give|has no sweep)"):
        run("jobs", "--runs", "nowhere", *more)
    assert "nothing was launched in runs" in run("jobs")  # there will be, with the first


def test_a_damaged_record_is_a_sentence(here):
    folder = here / "runs" / "x" / "launch" / "1"
    folder.mkdir(parents=True)
    assert "nothing was launched" in run("jobs")  # it was never submitted
    (folder / "id").write_text("1")
    with pytest.raises(InputError, match=r"request\.json does not exist"):
        run("why", "x")
    (folder / "request.json").write_text('{"time": "soon"}')
    said = run("jobs")
    assert "x is left out: " in said
    assert "request.json" in said


def test_a_site_is_held_against_its_machines(here):
    done = CliRunner().invoke(app, ["doctor", "--site", "queue"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "ok      localhost: its clock agrees" in done.stdout
    (here / "paceline-sites.toml").write_text(
        f'[bad]\nengine = "local"\nvenv = "{here}/no venv"\nscratch = "/nowhere"\n'
        'modules = ["none"]\n[empty]\nengine = "ssh"\n'
        f'[nowhere]\nengine = "local"\nshared = "{here}/not made"\n[typed]\nengine = "local"\n'
        '[typed.node_types.a]\ncluster = "8xH100-SXM"\nnum_nodes = 1\n'
        '[typed.node_types.b]\ncluster = "8xH1000"\nnum_nodes = 1\n'
        '[typed.node_types.c]\ncluster = "8xH100-SXM"\nnum_nodes = 2\n'
    )
    done = CliRunner().invoke(app, ["doctor", "--site", "bad", "--json"], catch_exceptions=False)
    assert done.exit_code == 1
    found = json.loads(done.stdout.splitlines()[-1])["findings"]
    wrong = [one["text"] for one in found if not one["is_ok"]]
    assert [text.partition(" is ")[2][:3] for text in wrong] == ["not"] * 3
    assert "no venv/bin/paceline is there; install Paceline" in wrong[0]
    done = CliRunner().invoke(app, ["doctor", "--site", "empty"], catch_exceptions=False)
    assert "PROBLEM engine ssh can't be used: a site with engine" in done.stdout
    done = CliRunner().invoke(app, ["doctor", "--site", "nowhere"], catch_exceptions=False)
    assert "not made is no folder here: make it" in done.stdout
    assert not (here / "not made").exists()
    done = CliRunner().invoke(app, ["doctor", "--site", "typed"], catch_exceptions=False)
    assert done.exit_code == 1
    assert "ok      node type a: 1 node of 8xH100-SXM can be asked for" in done.stdout
    assert "PROBLEM node type b, 1 node: device 'H1000' is not in the catalogue" in done.stdout
    assert "PROBLEM node type c, 2 nodes: 2 nodes were asked for and the site has 1" in done.stdout
    assert not [*here.glob(".paceline-*")]


def test_the_cure_of_a_missing_library_is_whole(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    (here / "paceline-sites.toml").write_text('[lab]\nengine = "ray"\n')
    done = CliRunner().invoke(app, ["doctor", "--site", "lab"])
    assert done.exit_code == 1
    assert "pip install 'paceline[ray]'" in done.stdout


def test_a_training_saves_goes_on_and_is_stopped(tmp_path):
    write_tiny_job(tmp_path)
    settings = ("--set", "cluster.devices_per_node=1", "--set", "train.steps=1000000")
    done = paceline("launch", "job.toml", *settings, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    launch = newest_launch(tmp_path / "runs" / "tiny")
    try:
        until(lambda: len(metrics(tmp_path)) >= 3, 300)
        launch.engine.signal(launch.job, "save")
        until(lambda: launch.observe().attempt == 2, 300)
        saved = len(metrics(tmp_path))
        until(lambda: len(metrics(tmp_path)) > saved, 300)
    finally:
        launch.engine.signal(launch.job, "stop")
        until(lambda: launch.observe().state not in ("queued", "running"), 300)
    assert launch.observe().state == "cancelled"
    assert [one.exit_code for one in launch.engine.usage(launch.job)] == [75, 75]
    last = max(losses(tmp_path))  # a line for each step, none twice
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / f"step-{last}").is_dir()
    assert read_job(launch.job.folder / "job.toml").elastic.save_within_s == 45.0
    for setting, said in {
        "optim.lr=1": "",
        "model.hidden_size=64": "has checkpoints of another training: model.hidden_size (32 before",
        f"train.steps={last}": f"is complete after {last} steps",
    }.items():
        told = (*("launch", "job.toml", "--dry-run", *settings), "--set", setting)
        done = paceline(*told, folder=tmp_path)
        assert (done.returncode, said in done.stderr) == (2 if said else 0, True), done.stderr
    _must_have_its_bill(tmp_path, launch)


def _must_have_its_bill(folder: Path, launch: Launch):
    """By the engine's attempts, to the microsecond, and from what is kept of them afterwards."""
    attempts = launch.engine.usage(launch.job)
    device_us = sum(
        one.num_devices * (round(1e6 * one.ended) - round(1e6 * one.submitted)) for one in attempts
    )
    done = paceline("cost", "runs/tiny", "--price", "3.6", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["total_us"] == sum(told["device_us"].values()) == device_us
    assert [one["exit_code"] for one in told["attempts"]] == [75, 75]
    for name in ("starting", "compute", "restart", "preempted"):
        assert told["device_us"][name] > 0, told
    assert told["device_us"]["lost_work"] == told["device_us"]["hang"] == 0
    assert told["usd"] == pytest.approx(told["held_us"] / 1e9)
    (launch.job.folder / STATE).unlink()  # the engine forgets
    again = paceline("cost", "runs/tiny", "--json", folder=folder)
    assert json.loads(again.stdout.splitlines()[-1])["device_us"] == told["device_us"]


def test_a_fresh_start_keeps_what_says_how_it_was_launched(here):
    spec, run = read_job(here / "job.toml"), Run(here / "runs" / "tiny")
    plan = resolve(spec, this_machine())
    begin_run(run, plan, None, None, fresh=False)
    kept, old = run.launch_folder / "1" / "id", run.path / "old"
    for file in (kept, old):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    begin_run(run, plan, None, None, fresh=True)
    assert kept.exists()
    assert not old.exists()


def _prepared(here: Path) -> Prepared:
    asked = Asked("queue", site_named("queue"))
    return prepare_script(here / "script.py", (), None, asked, here / "runs", this_machine)
