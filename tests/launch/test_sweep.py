"""A sweep on engine "local": which trials there are, what is refused, and how one goes on.

The site's paceline is a line of shell, which ends as a file beside it says.
"""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.launch import command
from paceline.launch.records import launches_of, newest_launch
from paceline.launch.sweep import is_sweep, read_sweep, trials_of
from tests.command_line import environment, write_tiny_job
from tests.launch.made_run import make_run, start, step
from tests.launch.waiting import until

HEAD = '[sweep]\njob = "job.toml"\n'
GRID = 'grid = {"optim.lr" = [1e-3, 3e-3], "train.seed" = [1, 2]}\n'
FAKE = """\
#!/bin/bash
name=$(sed '/^name = /!d; s/.*"\\(.*\\)"/\\1/; q' "$2")
until [ -e go ]; do sleep 0.05; done
exit "$(cat "$name.code" 2>/dev/null || echo 0)"
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    write_tiny_job(tmp_path)
    fake = tmp_path / "venv" / "bin" / "paceline"
    fake.parent.mkdir(parents=True)
    fake.write_text(FAKE)
    fake.chmod(0o755)
    (tmp_path / "paceline-sites.toml").write_text(
        f'[queue]\nengine = "local"\nvenv = "{tmp_path}/venv"\n'
    )
    yield tmp_path
    (tmp_path / "go").touch()
    for run in (tmp_path / "runs").glob("*"):
        for launch in launches_of(run):
            until(lambda one=launch: one.observe().state not in ("queued", "running"))


def write(text: str, name: str = "sweep.toml") -> Path:
    file = Path(name)
    file.write_text(text)
    return file


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def launch(*arguments: str) -> str:
    one_device = ("--set", "cluster.devices_per_node=1")
    return run("launch", "sweep.toml", "--on", "queue", *one_device, *arguments)


def last_line(printed: str) -> object:
    return json.loads(printed.splitlines()[-1])


def states() -> list[str]:
    return [one["state"] for one in last_line(run("jobs", "--sweep", "sweep", "--json"))]


def until_states(*expected: str) -> None:
    until(lambda: sorted(states()) == sorted(expected), instead=lambda: run("jobs"))


def settings_of(text: str) -> list[dict[str, object]]:
    file = write(text)
    trials = trials_of(read_sweep(file, None), file, (), read_job)
    return [dict(trial.settings) for trial in trials]


# ---- the file ------------------------------------------------------------------------------------


def test_a_grid_has_every_combination_and_a_list_comes_after_it(here):
    found = settings_of(f'{HEAD}{GRID}trials = [{{"data.tokenizer" = "bytes", optim.lr = 0.5}}]\n')
    rates = [1e-3, 1e-3, 3e-3, 3e-3]
    grid = [
        {"optim.lr": lr, "train.seed": seed} for lr, seed in zip(rates, [1, 2] * 2, strict=True)
    ]
    assert found == [*grid, {"data.tokenizer": "bytes", "optim.lr": 0.5}]
    file = Path("sweep.toml")
    jobs = [trial.job for trial in trials_of(read_sweep(file, None), file, (), read_job)]
    assert [(job.optim.lr, job.train.seed) for job in jobs[:2]] == [(1e-3, 1), (1e-3, 2)]
    assert is_sweep(file)
    assert not is_sweep(Path("job.toml"))
    assert read_sweep(file, None).name == "sweep"
    assert read_sweep(write(HEAD, "my sweep.toml"), None).name == "my-sweep"
    assert read_sweep(file, "other").name == "other"


def test_tables_and_lists_are_values(here):
    lists = "[sweep.grid]\nmodel.num_layers = [1, 2]\ndata.source = ['text.txt', ['text.txt']]\n"
    assert [one["data.source"] for one in settings_of(HEAD + lists)] == 2 * [
        "text.txt",
        ["text.txt"],
    ]


def test_the_sweep_of_the_page_is_one(here):
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    lines = page[page.index("    [sweep]") :].split("\n\n")[0].splitlines()
    text = "\n".join(line.strip() for line in lines).replace("my.toml", "job.toml")
    assert len(settings_of(text)) == 6
    row = page[page.index("`trials = [") + 1 :].partition("`")[0]
    assert len(settings_of(f"{HEAD}{row}\n")) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f'{HEAD}grid = {{"optim.lrr" = [1]}}',
            "trial optim.lrr=1: optim.lrr is not a setting; did",
        ),
        (f"{HEAD}grid.optim.lr = [0.1, 'x']", "optim.lr = 'x' can't be used: it must be a number"),
        (f"{HEAD}grid.optim.lr = []", "grid.optim.lr = [] is no list of at least one value"),
        (f"{HEAD}grid.optim.lr = 0.1", "grid.optim.lr = 0.1 is no list of at least one value"),
        (HEAD, "the sweep has 0 trials, and it must have 1 to 1,000"),
        (f"{HEAD}grid = {{a = {[*range(99)]}, b = {[*range(99)]}}}", "the sweep has 9,801 trials"),
        (f"{HEAD}grid.optim.lr = [1, 1.0]", "optim.lr=1 and optim.lr=1.0 have equal settings"),
        (
            f"{HEAD}trials = [{{}}, {{train.steps = 12}}]",
            "the Job as it is and train.steps=12 have",
        ),
        (f"{HEAD}trials = [{{name = 'x'}}]", "trials are numbered and can't set their name"),
        (f"{HEAD}trials = [{{optim = 3}}]", "trial optim=3: optim = 3 can't be used"),
        (f"{HEAD}grids = 3", "sweep.grids is not a setting; did you mean grid?"),
        ("[sweep]\ngrid.optim.lr = [1]", "sweep.job is missing"),
        (f"{HEAD}[model]\n", "model is not a setting; known are sweep."),
        ("sweep = 3", "sweep = 3 can't be used"),
        ("[sweep]\njob = 'none.toml'\ngrid.optim.lr = [1]", "none.toml does not exist"),
        (f"{HEAD}grid.cluster.devices_per_node = [1]", "by --set and by the sweep: leave one"),
        (f"{HEAD}at_most = 0\n{GRID}", "sweep.at_most = 0 can't be used"),
        (f"{HEAD}grid.layout.tp = [1, 2]", "sweep-002 (layout.tp=2): "),
        (f"{HEAD}grid.checkpoint.best = ['eval_los']", "is no figure of an evaluation: use one of"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_nothing_is_submitted(here, text, said):
    write(text)
    with pytest.raises(InputError) as caught:
        launch()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("runs").exists()


def test_a_name_that_is_taken(here):
    write(HEAD + GRID)
    make_run(here / "runs" / "sweep-002", [step(1, 2.0)], [start(0.0)])
    with pytest.raises(InputError, match=r"sweep-002 is there already and is no trial of sweep s"):
        launch()
    assert not launches_of(here / "runs" / "sweep-001")
    with pytest.raises(InputError, match=r"has no sweep 'sweep': launch one"):
        run("jobs", "--sweep", "sweep")


# ---- a sweep -------------------------------------------------------------------------------------


def test_so_many_at_once_and_the_failed_ones_again(here):
    write(f"{HEAD}at_most = 2\npriority = 3\n{GRID}")
    Path("sweep-003.code").write_text("1")
    assert "to launch" in launch("--dry-run")
    assert not Path("runs").exists()
    done = last_line(launch("--json"))
    assert [Path(one["run"]).name for one in done["launched"]] == [
        f"sweep-00{number}" for number in (1, 2, 3, 4)
    ]
    request = newest_launch(here / "runs" / "sweep-001").record.request
    assert (request.group, request.at_most, request.priority) == ("sweep", 2, 3)
    until_states("queued", "queued", "running", "running")
    done = last_line(launch("--json"))  # all live
    assert (len(done["launched"]), len(done["left_alone"])) == (0, 4)
    Path("go").touch()
    until_states("failed", "finished", "finished", "finished")
    Path("sweep-003.code").unlink()
    write(
        f"{HEAD}trials = [{{train.seed = 3}}]\n[sweep.grid]\ntrain.seed = [1, 2]\noptim.lr = [3e-3]"
    )
    done = last_line(launch("--json"))
    names = [Path(one["run"]).name for one in done["launched"]]
    assert names == ["sweep-003", "sweep-005"]  # the failed one, and one that is new
    until_states(*["finished"] * 5)
    assert [one.number for one in launches_of(here / "runs" / "sweep-003")] == [1, 2]
    with pytest.raises(InputError, match=r"was launched with train.steps = 12, which is 13 now"):
        launch("--set", "train.steps=13")
    assert run("jobs").count("finished") == 5
    with pytest.raises(InputError, match=r"has no sweep 'sweeq'; did you mean sweep\?"):
        run("jobs", "--sweep", "sweeq")


def test_a_submission_that_dies_half_way_leaves_nothing_queued(here, monkeypatch):
    write(HEAD + GRID)
    submit = command.submit

    def die(prepared):
        if prepared.run.name == "sweep-003":
            raise error
        return submit(prepared)

    monkeypatch.setattr("paceline.launch.sweep_command.submit", die)
    error = InputError("the disk is full.")
    with pytest.raises(InputError) as caught:
        launch()
    assert str(caught.value) == (
        "sweep-003 can't be submitted (the 2 trials submitted before it asked to stop): "
        "the disk is full."
    )
    until_states("cancelled", "cancelled")
    error = KeyboardInterrupt()
    arguments = ["launch", "sweep.toml", "--on", "queue", "--set", "cluster.devices_per_node=1"]
    assert CliRunner().invoke(app, arguments).exit_code == 130
    until_states("cancelled", "cancelled")
    assert newest_launch(here / "runs" / "sweep-001").number == 2


def test_the_table_has_losses_and_the_best_trial(here):
    Path("go").touch()
    write(f"{HEAD}grid.optim.lr = [1e-3, 3e-3]\nat_most = 2\n")
    launch()
    until_states("finished", "finished")
    first = last_line(run("jobs", "--sweep", "sweep", "--json"))[0]
    assert (first["steps"], first["loss"]) == (None, None)
    for name, loss in (("sweep-001", 3.0), ("sweep-002", 2.5)):
        lines = [step(1, 2.0, eval_loss=loss), step(2, 4.0, eval_loss=loss + 1)]
        made = make_run(here / "made" / name, lines, [start(0.0)])
        shutil.copytree(made.path, here / "runs" / name, dirs_exist_ok=True)
    printed = run("jobs", "--sweep", "sweep", "--json")
    second = last_line(printed)[1]
    assert second["settings"] == {"optim.lr": 3e-3}
    assert (second["steps"], second["loss"], second["best_eval_loss"]) == (2, 3.98, 2.5)
    assert "optim.lr=0.003" in printed
    assert "2 trials: 2 finished" in printed
    done = last_line(run("runs", "--sort", "best_eval_loss", "--json"))
    assert [one["name"] for one in done] == ["sweep-002", "sweep-001"]


def test_a_damaged_record_of_a_trial_is_left_out_of_the_table_and_launches_nothing_twice(here):
    write(HEAD + "grid.train.seed = [1, 2]\n")
    Path("go").touch()
    launch()
    until_states("finished", "finished")
    request = here / "runs" / "sweep-001" / "launch" / "1" / "request.json"
    whole = request.read_text()
    request.write_text(whole[: len(whole) // 2])
    said = run("jobs", "--sweep", "sweep")
    assert "1 trial: 1 finished" in said
    assert "sweep-001 is left out: " in said
    other = here / "runs" / "sweep-002" / "launch" / "1" / "request.json"
    kept = other.read_text()
    other.write_text("{")
    assert "sweep-002 is left out: " in run("jobs", "--sweep", "sweep")
    other.write_text(kept)
    with pytest.raises(InputError, match=r"sweep-001 may be any trial of sweep sweep, so none is"):
        launch()
    request.write_text(whole)
    stray = here / "runs" / "other" / "launch" / "1"
    stray.mkdir(parents=True)
    (stray / "id").write_text("1")  # what is no trial's is no worse for a sweep
    assert "2 trials of it left alone" in launch()
    assert "other" not in run("jobs", "--sweep", "sweep")
    shutil.rmtree(stray.parent.parent)
