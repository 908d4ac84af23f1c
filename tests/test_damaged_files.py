"""Whatever stands in a file that a command reads, a person gets a sentence or what they asked for.

A small Run is trained once, and each file of it (and of what else commands read) is damaged in each
of many ways. Commands run in this process, so that an exception which `main` lets through fails the
test, as does one that takes a minute.
"""

import io
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paceline
from paceline import cli
from paceline.comm import forkserver_start
from paceline.config.errors import InputError
from paceline.config.frozen import FrozenConfig
from paceline.config.job import read_job
from paceline.kernels import launch
from paceline.observe.locks import owned
from paceline.observe.run import Run
from paceline.tune.journal import FolderJournal
from paceline.tune.trial import Decision, Reference, Trial
from tests.small_job import work_in, write_small_job

OBSERVED = """\
[observe]
profile_every = 3
profile_steps = 1
tensorboard = false
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def call(*arguments: object) -> Ended:
    """`paceline ...` in this process."""
    given_argv, out, err, code = sys.argv, io.StringIO(), io.StringIO(), 0
    sys.argv = ["paceline", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = given_argv
    return Ended(code, out.getvalue(), err.getvalue())


def is_one_sentence(ended: Ended, name: str = "") -> None:
    """Exit code 2 and one line that names what is wrong."""
    assert ended.code == 2, ended
    (line,) = ended.err.strip().splitlines()
    assert line.startswith("paceline: "), line
    assert line.endswith((".", "?")), line
    assert name in line, line
    assert len(line) < 1500, line


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A Run of four steps, with a window, what it read, and the other files that commands read."""
    folder = tmp_path_factory.mktemp("damaged")
    patch = pytest.MonkeyPatch()
    patch.setattr(forkserver_start, "warm_up_ranks", lambda _module: None)
    work_in(folder, patch)
    write_small_job(folder, more=OBSERVED)
    ended = call("train", "small.toml")
    assert ended.code == 0, ended
    run = folder / "runs/small"
    checks = {"nccl-network": {"status": "ok", "seen": "x", "fix": ""}}
    found = {"facts": {"gpus": [{"clocks": {"sm_mhz": 1.0, "reasons": []}}]}, "checks": checks}
    (run / "doctor.json").write_text(json.dumps(found))
    (run / "tags.json").write_text('["a"]')
    (run / "cluster.toml").write_text('device = "H100-SXM"\ndevices_per_node = 8\nnum_nodes = 1\n')
    hf = {"model_type": "llama", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32}
    hf |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(hf | {"rms_norm_eps": 1e-5}))
    row = {"device": "x", "kernel": "y", "dtype": "bf16", "size": 1, "blocks": {"A": 1}}
    row |= {"num_warps": 1, "num_stages": 1, "ms": 1.0, "peer_ms": 1.0}
    (folder / "launches.json").write_text(json.dumps({"rows": [row]}))
    shutil.copytree(Path(__file__).parent / "doctor/recorded/hgx_h100", folder / "hgx")
    (folder / "hgx/ibstat.txt").unlink()
    (folder / "hgx/infiniband.json").write_text("[]")
    (folder / "runs.csv").write_text(
        "source_model,gpu,gpus,params_b,seq,global_batch_seqs,micro_batch,dp,tp,pp,step_time_s\n"
        "7B,H100-SXM,8,7,4096,64,1,1,8,1,5\n"
    )
    journal = FolderJournal(folder / "tuned")
    job = Run(run).job()
    with owned(journal.folder):
        journal.open(job)
        journal.add(
            Trial(0, 0, {"layout.tp": 1}, "why", 1.0, 1.0, 1.0, "measured", (1.0,), 1.0, 0.0),
            Decision(0, 0, "text"),
            Reference(1.0, 2, "measured"),
        )
    yield folder
    patch.undo()


def deep(opens: bytes, closes: bytes) -> bytes:
    return opens * 100_000 + closes * 100_000


# Names that one file or another has.
EVERYWHERE = (
    json.dumps(
        dict.fromkeys(("step", "peak_flops", "layouts", "facts", "checks", "rows", "cores"), "?")
    )
    .encode()
    .replace(b'"?"', b"?")
)
# What a whole file may be instead. None of them is a file of ours.
WHOLES = {
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "zeros": bytes(4096),
    "list": b"[]\n",
    "number": b"17\n",
    "text": b'"text"\n',
    "null": b"null\n",
    "word": b"nonsense",
    "nested lists": deep(b"[", b"]"),
    "nested objects": deep(b'{"a":', b"}"),
    "huge integer": b'{"step": ' + b"9" * 5000 + b"}",
    "infinite": EVERYWHERE.replace(b"?", b"1e999"),
    "not a number": EVERYWHERE.replace(b"?", b"NaN"),
    "words for numbers": EVERYWHERE.replace(b"?", b'"many"'),
    "lists for numbers": EVERYWHERE.replace(b"?", b"[1]"),
    "endless line": b'{"step": "' + b"x" * 3_000_000,
    "invalid UTF-8": b'{"step": "\xff\xfe"}',
    "UTF-16": '{"step": 1}'.encode("utf-16"),
}
# Of TOML and CSV, what is one of the above is often another error, and these are worse.
TOMLS = {
    "nested arrays": b"name = " + b"[" * 100_000,
    "nested tables": b"name = " + b"{a=" * 100_000,
    "long key": b"a." * 30_000 + b"b = 1",
    "long header": b"[" + b"a." * 30_000 + b"b]\n",
    "huge number": b"name = " + b"9" * 100_000,
}
EMPTY_IS_FINE = ("empty", "list", "null")  # of a table, or of a list of ports


class Reader(NamedTuple):
    """A command and the file that it reads."""

    file: str
    arguments: tuple[str, ...]
    kinds: dict[str, bytes] = WHOLES
    fine: tuple[str, ...] = ()
    """Kinds that hold nothing wrong here."""


RUN = "runs/small"
READERS = {
    "explain facts": Reader(f"{RUN}/facts.json", ("explain", RUN)),
    "explain plan": Reader(f"{RUN}/plan.json", ("explain", RUN)),
    "explain job": Reader(f"{RUN}/job.toml", ("explain", RUN), WHOLES | TOMLS),
    "explain doctor": Reader(f"{RUN}/doctor.json", ("explain", RUN)),
    "explain against facts": Reader(f"{RUN}/facts.json", ("explain", "copy", "--against", RUN)),
    "top facts": Reader(f"{RUN}/facts.json", ("top", "--once", RUN)),
    "top job": Reader(f"{RUN}/job.toml", ("top", "--once", RUN), WHOLES | TOMLS),
    "train facts": Reader(f"{RUN}/facts.json", ("train", RUN)),
    "train job": Reader(f"{RUN}/job.toml", ("train", RUN), WHOLES | TOMLS),
    "train cluster": Reader(
        f"{RUN}/cluster.toml",
        ("train", "small.toml", "--show", "--set", f'cluster.file="{RUN}/cluster.toml"'),
        WHOLES | TOMLS,
        ("empty",),
    ),
    "plan job": Reader("small.toml", ("plan", "small.toml"), WHOLES | TOMLS),
    "plan cluster": Reader(
        f"{RUN}/cluster.toml",
        ("plan", "small.toml", "--cluster", f"{RUN}/cluster.toml"),
        WHOLES | TOMLS,
    ),
    "plan hf": Reader(
        "config.json",
        ("plan", "small.toml", "--set", "model.hf=config.json", "--cluster", "8xH100-SXM"),
    ),
    "tune job": Reader("small.toml", ("tune", "small.toml"), WHOLES | TOMLS),
    "export job": Reader(f"{RUN}/job.toml", ("export", RUN, "exported"), WHOLES | TOMLS),
    "export manifest": Reader(f"{RUN}/checkpoints/step-4/manifest.json", ("export", RUN, "out")),
    "cost facts": Reader(f"{RUN}/facts.json", ("cost", RUN)),
    "cost plan": Reader(f"{RUN}/plan.json", ("cost", RUN)),
    "cost job": Reader(f"{RUN}/job.toml", ("cost", RUN), WHOLES | TOMLS),
    "compare facts": Reader(f"{RUN}/facts.json", ("runs", "compare", "copy", RUN)),
    "tag": Reader(f"{RUN}/tags.json", ("runs", "tag", RUN, "x"), fine=("list",)),
    "validate table": Reader("runs.csv", ("validate", "runs.csv")),
    "doctor system": Reader("hgx/system.json", ("doctor", "--from", "hgx"), fine=("empty",)),
    "doctor software": Reader("hgx/software.json", ("doctor", "--from", "hgx"), fine=("empty",)),
    "doctor ports": Reader(
        "hgx/infiniband.json", ("doctor", "--from", "hgx"), fine=("empty", "list")
    ),
    # Of what is no XML, the doctor says that nvidia-smi printed it.
    "doctor xml": Reader("hgx/nvidia-smi.xml", ("doctor", "--from", "hgx"), {}),
}
# Every reader with a third of the kinds, the next reader with the next third, so that every kind
# meets readers of every sort.
CASES = [
    pytest.param(reader, kind, id=f"{name}, {kind}")
    for number, (name, reader) in enumerate(READERS.items())
    for at, kind in enumerate((*reader.kinds, "folder", "pipe", "dangling link"))
    if (at + number) % 3 == 0
]


@pytest.fixture
def damaged(trained, monkeypatch):
    """Puts something else in a file's place; what was there comes back afterwards."""
    monkeypatch.setattr(forkserver_start, "warm_up_ranks", lambda _module: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(trained / "cache"))
    monkeypatch.chdir(trained)
    if not Path("copy").exists():
        shutil.copytree(RUN, "copy")
    undo = []

    def damage(name: str, data: bytes | str) -> None:
        path, aside = Path(name), Path(f"{name}.aside")
        path.rename(aside)
        undo.append((path, aside))
        if data == "folder":
            path.mkdir()
        elif data == "pipe":
            os.mkfifo(path)
        elif data == "dangling link":
            path.symlink_to("nowhere")
        else:
            path.write_bytes(data)

    yield damage
    for path, aside in reversed(undo):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        aside.rename(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("reader", "kind"), CASES)
def test_a_file_that_is_something_else_ends_in_one_sentence(damaged, reader, kind):
    damaged(reader.file, reader.kinds.get(kind, kind))
    ended = call(*reader.arguments)
    if kind in reader.fine:
        assert ended.code in (0, 1, 2)
        return
    is_one_sentence(ended)


DAMAGED_LINES = {
    "nothing": b"",
    "a list": b"[1]",
    "a number": b"7",
    "no step": b'{"loss": 1.0}',
    "half": b'{"step": 3, "lo',
    "binary": bytes(range(128, 256)),
    "nested": deep(b"[", b"]"),
    "a word for a number": b'{"step": 3, "step_time_s": "long"}',
    "a number for terms": b'{"step": 3, "terms": 4}',
    "ranks without figures": b'{"step": 3, "ranks": {"busy_s": []}}',
    "an endless line": b'{"step": 3, "loss": "' + b"9" * 3_000_000 + b'"}',
    "an infinite time": b'{"step": 3, "time": 1e999}',
}


@pytest.mark.parametrize("line", DAMAGED_LINES.values(), ids=DAMAGED_LINES)
def test_a_damaged_line_of_metrics_is_left_out_and_said(damaged, line):
    first, second, *others = Path(f"{RUN}/metrics.jsonl").read_bytes().splitlines()
    damaged(f"{RUN}/metrics.jsonl", b"\n".join([first, line, second, *others, b""]))
    steps = Run(Path(RUN)).steps()
    assert [each["step"] for each in steps.lines] == [1, 2, 3, 4]
    assert steps.damage is not None
    assert "line 2 holds no step" in steps.damage
    for command in (("explain", RUN), ("top", "--once", RUN), ("train", RUN)):
        if command[0] == "top" and len(line) > 2_000_000:
            continue  # it reads no more than the end of the file
        ended = call(*command)
        assert ended.code == 0, ended
        assert "left out" in " ".join(ended.out.split()), ended.out


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_metrics_that_are_no_file_end_in_one_sentence(damaged, kind):
    damaged(f"{RUN}/metrics.jsonl", kind)
    for command in (("explain", RUN), ("top", "--once", RUN), ("train", RUN), ("cost", RUN)):
        is_one_sentence(call(*command), "metrics.jsonl")


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_events_that_are_no_file_end_in_one_sentence(damaged, kind):
    damaged(f"{RUN}/events.jsonl", kind)
    for command in (("explain", RUN), ("top", "--once", RUN), ("train", RUN), ("cost", RUN)):
        is_one_sentence(call(*command), "events.jsonl")


def test_a_damaged_line_of_events_is_left_out_and_said(damaged):
    claim = b'{"time": 5, "event": "generation", "generation": 1, "nodes": ["n0"]}\n'
    damaged(f"{RUN}/events.jsonl", claim + b"nonsense\n" + claim.replace(b'"n0"', b"7") + b"half")
    for command in (("explain", RUN), ("top", "--once", RUN), ("train", RUN)):
        ended = call(*command)
        assert ended.code == 0, ended
        assert "2 lines (2, 3) hold no event" in " ".join(ended.out.split())
    assert "interruptions  none" in call("train", RUN).out


def test_a_run_goes_on_over_damaged_metrics(damaged):
    """Found before ranks start; the damage is said once and gone afterwards."""
    whole = Path(f"{RUN}/metrics.jsonl").read_bytes()
    damaged(f"{RUN}/metrics.jsonl", whole + b"nonsense\n")
    shutil.rmtree("resumed", ignore_errors=True)
    shutil.copytree(RUN, "resumed/small")
    ended = call("train", "resumed/small", "--set", "train.steps=5")
    assert ended.code == 0, ended
    assert ended.out.count("left out") == 1
    steps = Run(Path("resumed/small")).steps()
    assert [each["step"] for each in steps.lines] == [1, 2, 3, 4, 5]
    assert steps.damage is None


@pytest.mark.parametrize("data", [b"", b"\xff", b"step-x", "folder", "pipe", "dangling link"])
def test_the_newest_checkpoints_link_may_be_anything(damaged, data):
    damaged(f"{RUN}/checkpoints/latest", data)
    assert call("top", "--once", RUN).code == 0


@pytest.mark.parametrize("data", WHOLES.values(), ids=WHOLES)
def test_a_table_of_launches_that_is_none_is_refused(damaged, monkeypatch, data):
    damaged("launches.json", data)
    with pytest.raises(InputError, match=r"launches\.json"):
        launch.rows_of(Path("launches.json"))


@pytest.mark.parametrize("data", [each for name, each in WHOLES.items() if name != "empty"])
def test_trials_that_are_none_are_refused(damaged, data):
    damaged("tuned/trials.jsonl", data)
    with pytest.raises(InputError, match=r"trials\.jsonl: line 1 "):
        FolderJournal(Path("tuned")).open(Run(Path(RUN)).job())


def test_a_decision_about_a_trial_that_is_missing_is_refused(damaged):
    lines = Path("tuned/trials.jsonl").read_bytes().splitlines(keepends=True)
    damaged("tuned/trials.jsonl", b"".join(lines[1:]))
    with pytest.raises(InputError, match=r"trials\.jsonl: line 1 is of trial 0, which is not"):
        FolderJournal(Path("tuned")).open(Run(Path(RUN)).job())


def test_a_complete_run_says_which_change_changed_nothing(damaged):
    shutil.rmtree("again", ignore_errors=True)
    shutil.copytree(RUN, "again/small")
    said = call("train", "again/small", "--set", "optim.lr=0.5")
    assert said.code == 0, said
    assert "changed since: optim.lr 0.0003 -> 0.5\n" in said.out
    assert "is complete after 4 steps" in said.out
    assert "changed since" not in call("train", RUN).out


def test_a_complete_run_keeps_what_it_was_trained_with(damaged):
    """Nothing is trained with other settings, so its files go on to say what was."""
    shutil.rmtree("again", ignore_errors=True)
    shutil.copytree(RUN, "again/small")
    files = [each for each in Path("again/small").rglob("*") if each.is_file()]
    was = {each: each.read_bytes() for each in files}
    for change in ("optim.lr=0.5", "train.steps=3", "observe.profile_every=2"):
        for _ in range(2):
            said = call("train", "again/small", "--set", change)
            assert f"changed since: {change.split('=')[0]} " in said.out
        assert {each: each.read_bytes() for each in files} == was
    said = call("train", "again/small", "--set", "optim.lr=0.5", "--set", "train.steps=5")
    assert said.code == 0, said
    assert "going on after step 4 of 5" in said.out
    assert Run(Path("again/small")).job().optim.lr == 0.5
    call("train", "again/small", "--set", "train.steps=5", "--set", "optim.lr=0.25", "--fresh")
    assert Run(Path("again/small")).job().optim.lr == 0.25


def test_the_version_is_told():
    assert call("--version").out.strip() == paceline.__version__


# ---- places to write to, and numbers -------------------------------------------------------------

LONG = "9" * 5000
WRITERS = {
    "plan --out": ("plan", "small.toml", "--cluster", "8xH100-SXM", "--out"),
    "explain --html": ("explain", RUN, "--html"),
    "validate --html": ("validate", "runs.csv", "--html"),
    "export": ("export", RUN),
    "doctor --save": ("doctor", "--from", "hgx", "--save"),
    "tune --out": ("tune", "small.toml", "--out"),
    "train --runs": ("train", "small.toml", "--runs"),
    "bench --out": ("bench", "--out"),
    "bench collectives --out": ("bench", "collectives", "--out"),
    "bench collectives --html": ("bench", "collectives", "--html"),
    "bench kernels --out": ("bench", "kernels", "--out"),
}
FOLDERS = ("plan --out", "export", "doctor --save", "tune --out", "train --runs")


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("place", ["below a file", "something else", "too long", "very long"])
def test_a_place_that_cannot_be_written_is_refused_at_once(damaged, name, place):
    where = {
        "below a file": "text.txt/below",
        "something else": "text.txt" if name in FOLDERS else "runs",
        "too long": "x" * 300,
        "very long": "/".join(["x" * 100] * 50),
    }[place]
    is_one_sentence(call(*WRITERS[name], where), name.split()[-1].replace("export", "folder"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system nobody writes to")
@pytest.mark.parametrize("name", ["explain --html", "export", "plan --out", "train --runs"])
def test_a_place_that_only_fails_when_it_is_written_is_told(damaged, name):
    is_one_sentence(call(*WRITERS[name], "/proc/paceline/place"), "/proc/")


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "small.toml", "--cluster", "8xH100-SXM", "--most", f"tp={LONG}"),
        ("plan", "small.toml", "--cluster", f"{LONG}x8xH100-SXM"),
        ("plan", "small.toml", "--cluster", "8xH100-SXM", "--tokens", "nan"),
        ("plan", "small.toml", "--cluster", "8xH100-SXM", "--tokens", "1e300"),
        ("plan", "small.toml", "--cluster", "8xH100-SXM", "--price", "inf"),
        ("plan", "small.toml", "--cluster", "8xH100-SXM", "--set", "a." * 5000 + "b=1"),
        ("plan", "small.toml", "--cluster", "8xH100-SXM", "--set", "train.steps=" + "[" * 5000),
        ("plan", "x" * 5000),
        ("explain", "x" * 5000),
        ("top", "--once", "x" * 5000),
        ("validate", "runs.csv", "--calibrate-on", LONG),
        ("bench", "collectives", "--sizes", f"4KiB:1MiB:{LONG}"),
        ("bench", "collectives", "--sizes", f"{LONG}KiB"),
        ("tune", "small.toml", "--until", f"mfu={LONG}"),
    ],
    ids=lambda arguments: " ".join(each[:12] for each in arguments),
)
def test_an_argument_without_end_is_refused(damaged, arguments):
    is_one_sentence(call(*arguments))


def settings_of(noun: FrozenConfig, prefix: str = "") -> Iterator[str]:
    """Dotted names of every setting that holds a number."""
    for name, value in noun:
        if isinstance(value, FrozenConfig):
            yield from settings_of(value, f"{prefix}{name}.")
        elif not isinstance(value, bool | str | tuple) or value == "auto":
            yield f"{prefix}{name}"


def test_every_number_of_a_job_has_bounds(damaged):
    """Beyond them a Job is refused at once, and never by an exception."""
    job = read_job(Path("small.toml"))
    texts = {"data.cache_dir", "data.stream.folder", "train.weights", "checkpoint.best"}
    names = set(settings_of(job)) - texts
    assert len(names) > 60
    for name in names:
        for value in ("1e31", "1e300", "10" * 16, LONG, "inf", "-inf", "nan", "-1e300"):
            with suppress(InputError):
                read_job(Path("small.toml"), [f"{name}={value}"])
                pytest.fail(f"{name} = {value} is taken")


FILES = ("facts.json", "plan.json", "doctor.json", "metrics.jsonl", "job.toml")


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(
    name=st.sampled_from(FILES),
    at=st.floats(0, 1),
    length=st.integers(0, 40),
    junk=st.sampled_from(
        [b"", b'"', b"[", b"}", b"-1", b"null", b"1e999", b"\xff", b'{"a":', b"0"]
    ),
)
def test_bytes_that_change_anywhere_end_in_a_sentence_or_are_tolerated(
    damaged, name, at, length, junk
):
    file = Path(f"{RUN}/{name}")
    whole = file.read_bytes()
    where = int(at * len(whole))
    file.write_bytes(whole[:where] + junk + whole[where + length :])
    try:
        ended = call("top", "--once", RUN) if name == "job.toml" else call("explain", RUN)
    finally:
        file.write_bytes(whole)
    if ended.code:
        is_one_sentence(ended)
