"""Wrong input to `paceline train`: one sentence, exit code 2, nothing half-written (processes)."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.comm.rendezvous import MEETING
from paceline.config.device import Device
from paceline.config.errors import InputError
from paceline.config.figure import Figure
from paceline.config.hardware import Cluster
from paceline.config.job import change_job, read_job
from paceline.train.this_machine import resolve_on_this_machine
from tests.command_line import (
    COMMAND,
    TINY_JOB,
    Started,
    environment,
    losses,
    metrics,
    paceline,
    ranks,
    start_paceline,
    write_tiny_job,
)

# What is given (settings) -> what the sentence must say.
WRONG = {
    "a missing file": (["data.source=nowhere.txt"], ["nowhere.txt"]),
    "an empty text": (["data.source=empty.txt"], ["empty.txt"]),
    "a sequence longer than the data": (
        ["data.source=short.txt", "data.eval_fraction=0.4"],
        ["train.seq_len = 32", "at most"],
    ),
    "a batch that does not divide": (["train.global_batch=13"], ["13", "2 ranks", "use 12"]),
    "micro-batches that do not divide": (
        ["layout.micro_batch=4"],
        ["micro-batches of 4", "use 16"],
    ),
    "a tokenizer larger than the model": (
        ["data.tokenizer=bpe:300"],
        ["model.vocab_size = 257", "raise it"],
    ),
    "a module that only a script has": (
        ['model={family="custom"}'],
        ["only in the script", "paceline.train"],
    ),
    "a best figure that is none": (
        ["checkpoint.best=eval_los"],
        ["checkpoint.best = 'eval_los'", "use one of eval_loss, eval_perplexity."],
    ),
    "an unknown setting": (["optim.lrr=1"], ["optim.lrr", "did you mean lr?"]),
    "weights that are not there": (["train.weights=nowhere"], ["nowhere"]),
    "another machine's device": (["cluster.device=H200"], ["H200", 'cluster.device = "auto"']),
    "several nodes": (["cluster.num_nodes=2"], ["cluster.num_nodes = 2", "torchrun or srun"]),
    "a device that is not in the catalogue": (["cluster.device=H2000"], ["H2000", "H200"]),
    "wider than any memory": (["model.hidden_size=1073741824"], ["EB or more", "has", "smaller"]),
    "more words than any memory": (
        ["model.vocab_size=1073741824"],
        ["GB or more", "over more ranks"],
    ),
    "deeper than this memory": (
        ["model.num_layers=1000", "model.hidden_size=8192"],
        ["TB or more", "over more ranks"],
    ),
    "profiles that run into one another": (["observe.profile_every=2"], ["profile_every = 2"]),
}


def test_the_memory_of_this_machine_is_shared_by_the_ranks_there_are(tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text(TINY_JOB)
    given = read_job(tmp_path / "job.toml", ["layout.precision=fp32"])
    state = 12 * given.model.num_params
    memory = Figure(value=1.2 * state / 2, origin="measured", source="a test")
    device = Device(name="some CPU", kind="cpu", precisions=("fp32",), memory_bytes=memory)
    here = Cluster(device=device, devices_per_node=2, num_nodes=1)
    monkeypatch.setattr("paceline.train.this_machine.this_machine", lambda: here)
    alone = change_job(given, ["cluster.devices_per_node=1"])
    assert resolve_on_this_machine(alone).job.layout.num_ranks == 1
    shards = change_job(given, ["cluster.devices_per_node=2", "layout.fsdp=2"])
    assert resolve_on_this_machine(shards).job.layout.fsdp == 2
    replicas = change_job(given, ["cluster.devices_per_node=2", "layout.dp=2"])
    with pytest.raises(InputError, match="share it out over more ranks"):
        resolve_on_this_machine(replicas)


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_is_one_sentence_and_leaves_nothing(what, tmp_path):
    write_tiny_job(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("too short")
    given, required = WRONG[what]
    settings = [part for setting in given for part in ("--set", setting)]
    done = paceline("train", "job.toml", *settings, *ranks(2), folder=tmp_path)
    assert done.returncode == 2, done.stderr
    sentence = done.stderr.strip()
    assert sentence.startswith("paceline: ")
    assert "\n" not in sentence
    for words in required:
        assert words in sentence
    assert not (tmp_path / "runs" / "tiny").exists()


def test_a_missing_job_and_an_unknown_option_exit_with_two(tmp_path):
    missing = paceline("train", "nothing.toml", folder=tmp_path)
    assert missing.returncode == 2
    assert "nothing.toml does not exist" in missing.stderr
    assert paceline("train", "--frobnicate", folder=tmp_path).returncode == 2
    assert paceline("trian", folder=tmp_path).returncode == 2


def test_a_precision_that_the_device_lacks_is_refused(tmp_path):
    write_tiny_job(tmp_path)
    done = paceline("train", "job.toml", "--set", "layout.precision=fp16", folder=tmp_path)
    assert done.returncode == 2
    assert 'layout.precision = "fp16" is not supported by' in done.stderr


def test_a_run_in_use_is_refused_and_left_alone(tmp_path):
    write_tiny_job(tmp_path)
    endless = ("train", "job.toml", "--set", "train.steps=100000", *ranks(1))
    first = start_paceline(*endless, folder=tmp_path)
    try:
        while len(metrics(tmp_path)) < 2:
            assert first.poll() is None, first.communicate()[0]
        second = paceline(*endless, "--fresh", folder=tmp_path)
        assert second.returncode == 2
        assert "in use by another live process" in second.stderr
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    assert losses(tmp_path)


def test_a_run_of_something_else_is_refused_and_kept(tmp_path):
    write_tiny_job(tmp_path)
    first = paceline("train", "job.toml", "--set", "train.steps=2", *ranks(1), folder=tmp_path)
    assert first.returncode == 0, first.stderr
    _write_tokenizer(tmp_path / "text.json")
    before = (tmp_path / "runs/tiny/job.toml").read_text()
    for setting, words in (
        ("model.hidden_size=64", "model.hidden_size (32 before, 64 now)"),
        ("train.seed=1", "train.seed (0 before, 1 now)"),
        ("data.tokenizer=text.json", "the text, its tokenizer or its order changed"),
    ):
        again = paceline("train", "job.toml", "--set", setting, *ranks(1), folder=tmp_path)
        assert again.returncode == 2, again.stdout
        assert words in again.stderr
        assert "--fresh" in again.stderr
        assert (tmp_path / "runs/tiny/job.toml").read_text() == before


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {chr(code): code for code in range(32, 127)} | {"<eos>": 0, "\n": 1, "Ġ": 2, "Ċ": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(path))


def test_a_full_disk_during_a_checkpoint_does_not_end_the_run(tmp_path):
    """A file system of one megabyte holds the first checkpoints but not all that are asked for."""
    small = tmp_path / "small"
    small.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    if shutil.which("mount") is None or subprocess.run(options, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        write_tiny_job(tmp_path)
        settings = ("--set", "checkpoint.every=2", "--set", "checkpoint.keep_every=1")
        runs = ("--runs", str(small))
        done = paceline("train", "job.toml", *settings, *runs, *ranks(2), folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "was not saved" in done.stdout
        assert "No space left on device" in done.stdout
        assert "is kept" in done.stdout
        checkpoints = small / "tiny" / "checkpoints"
        assert list(checkpoints.glob("step-*/manifest.json"))
        assert not list(checkpoints.glob("*.tmp"))
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_help_teaches(tmp_path):
    general = paceline("--help", folder=tmp_path)
    assert general.returncode == 0
    assert "train" in general.stdout
    train = paceline("train", "--help", folder=tmp_path)
    for words in ("--set", "--show", "--fresh", "demo", "Ctrl-C"):
        assert words in train.stdout


def test_show_prints_a_concrete_job_that_trains_and_json_makes_the_last_line_one_object(tmp_path):
    write_tiny_job(tmp_path)
    shown = paceline("train", "job.toml", "--show", *ranks(1), folder=tmp_path)
    assert shown.returncode == 0
    assert not (tmp_path / "runs").exists()
    assert "devices_per_node = 1" in shown.stdout
    (tmp_path / "shown.toml").write_text(shown.stdout)
    done = paceline("train", "shown.toml", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["step"] == 12
    assert Path(last["run"]) == tmp_path / "runs" / "tiny"


def test_help_loads_neither_torch_nor_pydantic(tmp_path):
    code = (
        "import sys; sys.argv = ['paceline', '--help']; from paceline.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'pydantic', 'numpy'} & set(sys.modules), 'slow imports'"
    )
    command = [os.sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_show_and_plan_load_no_torch_where_there_is_no_driver(tmp_path):
    code = (
        "import sys; from paceline.cli import main; from paceline.machine import discovery\n"
        "discovery._has_driver = lambda: False\n"
        "for words in (['train', '--show'], ['plan', '--cluster', '1xH100-SXM']):\n"
        "    sys.argv = ['paceline', *words]\n"
        "    main()\n"
        "    assert 'torch' not in sys.modules, words"
    )
    command = [os.sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "devices_per_node = " in done.stdout


def test_a_table_of_launches_that_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_KERNEL_TABLE", "nowhere.json")
    write_tiny_job(tmp_path)
    done = paceline("train", "job.toml", folder=tmp_path)
    assert done.returncode == 2
    assert "nowhere.json does not exist: name in PACELINE_KERNEL_TABLE" in done.stderr
    assert not (tmp_path / "runs" / "tiny").exists()


def test_of_given_ranks_the_first_alone_says_what_is_refused(tmp_path):
    write_tiny_job(tmp_path)
    (tmp_path / "meeting").mkdir()
    program = [COMMAND, "train", "job.toml", "--set=data.source=nowhere.txt"]
    env = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", MEETING: str(tmp_path / "meeting")}
    started = [
        Started(program, tmp_path, 2, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(3)
    ]
    printed = [each.communicate(200)[1] for each in started]
    assert [each.returncode for each in started] == [2, 2, 2], printed
    assert "nowhere.txt" in printed[0]
    assert printed[0].count("\n") == 1
    assert printed[1:] == ["", ""]
