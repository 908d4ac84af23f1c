"""The registry: an index that is never the truth, tags, comparison, retention, and exports.

One run of six steps in this process has real checkpoints; another starts from weights of it.
"""

import json
import os
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from paceline import cli
from paceline.comm import forkserver_start
from paceline.config.model import Model
from paceline.launch import index
from paceline.launch.index import INDEX_FILE, indexed_runs
from paceline.launch.run_facts import folder_bytes, read_run, tags_of
from paceline.launch.runs_command import tag_command
from paceline.models.decoder import Decoder
from paceline.models.weights import read_decoder
from paceline.observe.run import Run, complete_steps
from paceline.train.checkpoint.store import CheckpointStore
from paceline.train.export import load
from tests.launch.made_run import attempt, event, make_run, start, step
from tests.ranks import WARM
from tests.small_job import work_in, write_small_job

KEPT = """
[checkpoint]
every = 1
keep_last = 10
best = "eval_loss"
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder with both runs in runs/, and the exported weights between them."""
    folder = tmp_path_factory.mktemp("registry")
    patch = pytest.MonkeyPatch()
    patch.setattr(forkserver_start, "warm_up_ranks", lambda _module: None)
    work_in(folder, patch)
    write_small_job(folder, "steps = 6\neval_every = 2", KEPT)
    paceline(patch, "train", "small.toml")
    paceline(patch, "export", "runs/small", "weights", "--step", "3")
    given = ("--set", "name=child", "--set", "train.weights=weights", "--set", "train.steps=2")
    paceline(patch, "train", "small.toml", *given, "--set", "checkpoint.best=eval_perplexity")
    patch.undo()
    return folder


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    """A copy of it, in which the test is."""
    shutil.copytree(trained, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def paceline(patch, *arguments):
    """The command in this process."""
    patch.setattr("sys.argv", ["paceline", *arguments])
    cli.main()


@pytest.fixture
def call(monkeypatch, capsys):
    """A command -> what it prints and its exit code."""

    def run(*arguments):
        capsys.readouterr()
        code = 0
        try:
            paceline(monkeypatch, *arguments)
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return out, err, code

    monkeypatch.setenv("COLUMNS", "80")
    return run


def rows(call, *arguments):
    out, err, code = call("runs", *arguments, "--json")
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


# ---- the index -----------------------------------------------------------------------------------


def test_the_index_says_what_runs_are_and_where_they_come_from(folder, call):
    child, small = rows(call)
    assert (child["name"], child["state"], child["steps"]) == ("child", "finished", 2)
    assert (child["parent"], child["parent_step"]) == ("small", 3)
    assert (small["parent"], small["state"], small["checkpoints"]) == (None, "finished", 6)
    assert small["data_key"] == child["data_key"] is not None
    assert small["eval_loss"] == Run(Path("runs/small")).metrics()[-1]["eval_loss"]
    assert small["device_s"] > 0
    assert small["settings"]["optim"]["lr"] == 3e-4
    with sqlite3.connect(folder / "runs" / INDEX_FILE) as known:
        exports = list(known.execute("SELECT run, step, folder, dtype, checkpoint FROM exports"))
        sums = dict(known.execute("SELECT step, sha256 FROM checkpoints WHERE run = 'small'"))
        evaluated = known.execute(
            "SELECT step FROM evaluations WHERE run = 'small' AND figure = 'eval_loss'"
        )
        assert [at for (at,) in evaluated] == [2, 4, 6]
        attempts = known.execute("SELECT number, num_devices, state FROM attempts")
        assert set(attempts) == {(1, 1, "finished")}
    known.close()
    ((run, of_step, where, dtype, checkpoint),) = exports
    assert (run, of_step, Path(where).name, dtype) == ("small", 3, "weights", "fp32")
    assert checkpoint == sums[3]
    origin = json.loads((folder / "weights/paceline.json").read_text())
    assert origin["checkpoint"] == checkpoint
    assert len(set(sums.values())) == 6


def test_a_deleted_index_loses_nothing(folder, call):
    before = rows(call)
    for file in Path("runs").glob(".index*"):
        file.unlink()
    assert rows(call) == before


@pytest.mark.parametrize(
    "damage",
    [
        b"no database",
        b"",
        "torn",
        "UPDATE runs SET settings = '{'",
        "DROP TABLE tags",
        "PRAGMA user_version = 99",
        "ALTER TABLE runs RENAME COLUMN loss TO lost",
    ],
)
def test_a_damaged_index_is_made_anew(damage, folder, call):
    before, file = rows(call), Path("runs") / INDEX_FILE
    if isinstance(damage, bytes):
        file.write_bytes(damage)
    elif damage == "torn":
        whole = bytearray(file.read_bytes())
        whole[4096 : len(whole) // 2] = os.urandom(len(whole) // 2 - 4096)
        file.write_bytes(whole)
    else:
        with sqlite3.connect(file) as known:
            known.execute(damage)
        known.close()
    assert rows(call) == before
    with sqlite3.connect(file) as known:
        assert len(list(known.execute("SELECT name FROM runs"))) == 2
    known.close()


def test_only_runs_with_other_files_are_read_again(folder, monkeypatch):
    read = []

    def noted(run):
        read.append(run.path.name)
        return read_run(run)

    monkeypatch.setattr(index, "read_run", noted)
    runs = Path("runs")
    indexed_runs(runs)
    assert sorted(read) == ["child", "small"]
    indexed_runs(runs)
    assert len(read) == 2
    with (runs / "small/metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": 7, "loss": 0.5}) + "\n")
    assert {one.facts.name: one.facts.steps for one in indexed_runs(runs)} == {
        "child": 2,
        "small": 7,
    }
    shutil.rmtree(runs / "small/checkpoints/step-2")
    (small,) = (one for one in indexed_runs(runs) if one.facts.name == "small")
    assert small.num_checkpoints == 5
    shutil.rmtree(runs / "child")
    assert [one.facts.name for one in indexed_runs(runs)] == ["small"]
    assert read[2:] == ["small", "small"]


def _look_often(folder, names):
    opened, first = [], index._open

    def noted(file):
        opened.append(file.name)
        return first(file)

    index._open = noted
    for _ in range(6):
        assert [one.facts.name for one in indexed_runs(folder)] == names
        for name in names:
            (folder / name / "events.jsonl").touch()
    assert set(opened) == {INDEX_FILE}, "one gave up waiting for the others"


def test_commands_at_once_use_one_index(tmp_path):
    names = ["a", "b", "c"]
    for name in names:
        make_run(tmp_path / name, [step(1, 12)], [start(0)])
    others = [WARM.Process(target=_look_often, args=(tmp_path, names)) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join(120)
    assert [other.exitcode for other in others] == [0, 0, 0]


def test_a_folder_that_cannot_be_written_is_indexed_in_memory(folder, monkeypatch):
    """A folder in the file's place stands for it: rights mean nothing to root."""
    (Path("runs") / INDEX_FILE).unlink(missing_ok=True)
    (Path("runs") / INDEX_FILE).mkdir()
    assert [one.facts.name for one in indexed_runs(Path("runs"))] == ["child", "small"]


def test_a_damaged_run_is_listed_as_such(folder, call):
    Path("runs/child/job.toml").write_text("[model")
    Path("runs/small/tags.json").write_text("{}")
    out, _, code = call("runs")
    assert code == 0
    assert out.count("damaged") == 2
    assert "child/job.toml" in out
    assert "tags.json" in out


# ---- lists ---------------------------------------------------------------------------------------


def test_tags_that_are_given_at_once_are_all_kept(folder):
    tags, run = {f"t{number}" for number in range(12)}, Run(folder / "runs" / "small")
    with ThreadPoolExecutor(len(tags)) as pool:
        list(pool.map(lambda tag: tag_command(run, tag, remove=False), tags))
    assert set(tags_of(run)) == tags


def test_runs_are_chosen_and_ordered_by_figures_and_settings(folder, call):
    names = lambda *given: [row["name"] for row in rows(call, *given)]  # noqa: E731
    assert names("--where", "steps>3") == ["small"]
    assert names("--where", "train.steps = 2") == ["child"]
    assert names("--where", "parent=small", "--where", "loss<100") == ["child"]
    assert names("--where", "state!=finished") == []
    assert names("--sort", "steps") == ["child", "small"]
    assert names("--sort", "-train.steps") == ["small", "child"]
    assert names("--sort", "parent_step") == ["child", "small"]  # what has none comes last
    assert call("runs", "tag", "small", "baseline")[0] == "small: baseline\n"
    call("runs", "tag", "runs/small", "v1.0")
    assert rows(call, "--tag", "baseline")[0]["tags"] == ["baseline", "v1.0"]
    assert call("runs", "tag", "small", "v1.0", "--remove")[0] == "small: baseline\n"
    out, _, _ = call("runs")
    assert max(map(len, out.splitlines())) <= 80
    assert "baseline" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    {
        ("runs", "--where", "loss"): "--where 'loss' is no condition",
        ("runs", "--where", "los<3"): "--where: no run has los; did you mean loss?",
        ("runs", "--sort", "x.y"): "--sort: no run has x.y",
        ("runs", "--runs", "nowhere"): "nowhere has no run",
        ("runs", "tag", "small", "a b"): "'a b' can't be a tag",
        ("runs", "tag", "nope", "a"): "runs/nope is not a run",
        ("runs", "compare", "small", "nope"): "runs/nope is not a run",
        ("runs", "prune"): "needs a rule",
        ("runs", "prune", "--older-than", "long"): "--older-than 'long' is no time",
        ("runs", "prune", "nope", "--keep-best"): "runs/nope is not a run",
        ("runs", "--tag", "x", "compare", "a", "b"): "are given after its name",
        ("export", "runs/small", "out", "--step", "9"): "no checkpoint of step 9: there are 1, 2",
    }.items(),
)
def test_what_cannot_be_is_one_sentence(arguments, words, folder, call):
    out, err, code = call(*arguments)
    assert (out, code, err.count("\n")) == ("", 2, 1)
    assert words in err


def test_two_runs_are_compared(folder, call):
    out, _, _ = call("runs", "compare", "small", "child")
    lines = [line.split() for line in out.splitlines()]
    assert ["train.steps", "6", "2"] in lines
    assert ["checkpoint.best", "eval_loss", "eval_perplexity"] in lines
    assert "small, step 3" in out
    assert "optim.lr" not in out
    assert max(map(len, out.splitlines())) <= 80
    told = json.loads(call("runs", "compare", "small", "child", "--json")[0].splitlines()[-1])
    assert told["settings"]["train.steps"] == [6, 2]
    assert call("runs", "compare", "small", "runs/small")[0].startswith("all settings are the same")


def test_a_damaged_run_is_not_compared(folder, call):
    (folder / "runs" / "child" / "tags.json").write_text("{")
    out, err, code = call("runs", "compare", "small", "child")
    assert (out, code, err.count("\n")) == ("", 2, 1)
    assert "runs/child/tags.json" in err


# ---- retention -----------------------------------------------------------------------------------


def steps_of(name):
    return complete_steps(Path("runs") / name / "checkpoints")


def best_of(name):
    return int((Path("runs") / name / "checkpoints/best").readlink().name.removeprefix("step-"))


def test_checkpoints_go_by_a_rule_and_those_that_matter_stay(folder, call):
    out, _, _ = call("runs", "prune", "--keep-last", "2", "--json")
    *_, told = json.loads(out.splitlines()[-1])
    assert "nothing was removed" in out
    assert steps_of("small") == [1, 2, 3, 4, 5, 6], "a dry run is the default"
    kept = sorted({5, 6, 3, best_of("small")})  # 3 was exported
    assert told["steps"] == [at for at in range(1, 7) if at not in kept]
    before = sum(file.stat().st_size for file in Path("runs/small").rglob("*") if file.is_file())
    out, _, _ = call("runs", "prune", "--keep-last", "2", "--yes", "--json")
    assert steps_of("small") == kept
    after = sum(file.stat().st_size for file in Path("runs/small").rglob("*") if file.is_file())
    assert json.loads(out.splitlines()[-1])[-1]["bytes"] == told["bytes"] == before - after
    assert load("runs/small", decoder()) == 6
    assert "no checkpoint goes" in call("runs", "prune", "--keep-last", "2")[0]


def decoder():
    return Decoder(Model.parse(Run(Path("runs/small")).job().model.model_dump()))


def test_only_old_ones_go_and_a_damaged_one_is_not_counted_as_kept(folder, call):
    for at in (1, 2, 4):
        os.utime(f"runs/small/checkpoints/step-{at}", (0, 0))
    shard = Path("runs/small/checkpoints/step-6/rank0.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    Path("runs/small/checkpoints/best").unlink()
    call("runs", "prune", "small", "--older-than", "30 days", "--yes")
    assert steps_of("small") == [3, 5, 6]  # 5 is the newest that is whole


def test_the_best_evaluation_is_kept_without_a_link_to_it(folder, call):
    Path("runs/small/checkpoints/best").unlink()
    lines = [json.loads(line) for line in Path("runs/small/metrics.jsonl").read_text().splitlines()]
    best = min((line for line in lines if "eval_loss" in line), key=lambda line: line["eval_loss"])
    call("runs", "prune", "small", "--keep-best", "--yes")
    assert steps_of("small") == sorted({3, 6, best["step"]})


def test_copies_in_a_store_go_by_the_same_rule_and_the_disk_stays(folder, call):
    out, _, _ = call("runs", "prune", "small", "--keep-last", "2", "--copies", "--yes")
    assert "small is left alone: it has no copies (checkpoint.copy_to)." in out
    file = Path("runs/small/job.toml")
    url = f"file://{folder}/store"
    file.write_text(file.read_text().replace("[checkpoint]", f'[checkpoint]\ncopy_to = "{url}"'))
    store = CheckpointStore(url, "small")
    for at in range(1, 7):
        store.put(Path(f"runs/small/checkpoints/step-{at}"), at, lambda: None)
    sizes = {at: folder_bytes(Path(f"store/small/step-{at}")) for at in range(1, 7)}
    Path("store/small/step-2/manifest.json").unlink()  # half a copy
    Path("store/small/step-5/manifest.json").write_text("{}")  # and one that is damaged
    kept = sorted({4, 6, 3, best_of("small")})  # 3 was exported
    going = [at for at in range(1, 7) if at not in kept]
    manifest = Path("store/small/step-1/manifest.json").stat().st_size
    out, _, _ = call("runs", "prune", "small", "--keep-last", "2", "--copies", "--json")
    told = json.loads(out.splitlines()[-1])[0]
    assert store.steps() == [1, 2, 3, 4, 5, 6], "a dry run is the default"
    assert told["steps"] == going
    assert told["bytes"] == sum(sizes[at] - manifest for at in going if at not in (2, 5))
    os.utime("store/small/step-1/manifest.json", (0, 0))
    rule = ("--keep-last", "2", "--older-than", "30 days", "--copies", "--yes")
    call("runs", "prune", "small", *rule)
    assert store.steps() == [2, 3, 4, 5, 6]  # of half a copy nobody says how old it is
    call("runs", "prune", "small", "--keep-last", "2", "--copies", "--yes")
    assert store.steps() == kept
    assert steps_of("small") == [1, 2, 3, 4, 5, 6]
    out, _, _ = call("runs", "prune", "small", "--keep-last", "2", "--copies")
    assert "no checkpoint goes" in out


def test_a_store_that_can_not_be_read_is_a_sentence(folder, call):
    file = Path("runs/small/job.toml")
    text = file.read_text()
    Path("store").write_text("no folder")
    for url, said in (
        (f"file://{folder}/store", "NotADirectoryError"),
        ("nowhere://x", "can't be used"),
    ):
        file.write_text(text.replace("[checkpoint]", f'[checkpoint]\ncopy_to = "{url}"'))
        out, _, code = call("runs", "prune", "small", "--keep-last", "2", "--copies", "--yes")
        assert code == 0
        assert "small is left alone" in out
        assert said in out.replace("\n", " ")


def test_a_live_run_is_left_alone(folder, call):
    for lock in ("runs/small/.lock", "runs/small/agents/n0.lock"):
        Path(lock).parent.mkdir(exist_ok=True)
        with FileLock(lock):
            out, _, code = call("runs", "prune", "small", "--keep-last", "1", "--yes")
            assert code == 0
            assert "small is left alone" in out
            assert {row["name"]: row["state"] for row in rows(call)}["small"] == "running"
        assert len(steps_of("small")) == 6


def test_a_run_whose_exports_cannot_be_read_is_left_alone(folder, call):
    Path("runs/small/exports.jsonl").unlink()
    Path("runs/small/exports.jsonl").mkdir()
    out, _, _ = call("runs", "prune", "small", "--keep-last", "1", "--yes")
    assert "small is left alone" in out
    assert len(steps_of("small")) == 6


# ---- exports and parents -------------------------------------------------------------------------


def test_any_checkpoint_is_exported(folder, call):
    out, _, code = call("export", "runs/small", "second", "--step", "2")
    assert (code, out) == (0, "second: the weights after step 2\n")
    states = [read_decoder(place).state_dict() for place in ("second", "weights")]
    assert any((states[0][name] != states[1][name]).any() for name in states[0])
    shard = Path("runs/small/checkpoints/step-4/rank0.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    _, err, code = call("export", "runs/small", "fourth", "--step", "4")
    assert code == 2
    assert "checkpoint step-4 in runs/small/checkpoints is damaged" in err
    assert not Path("fourth").exists()


def test_records_of_an_engine_are_in_the_index(tmp_path):
    attempts = [attempt(1, 0, 5, 9, state="NODE_FAIL"), attempt(2, 9, 10, 20)]
    run = make_run(tmp_path / "a", [step(1, 18)], [start(10), event("end", 19)], attempts)
    parts = read_run(run)
    assert [row["state"] for row in parts.rows["attempts"]] == ["NODE_FAIL", "COMPLETED"]
    assert parts.facts.device_s == 2 * (4 + 10)
