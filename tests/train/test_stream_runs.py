"""Whole runs on a stream: waits, and what is said of them.

tests/train/test_kills.py has what is read under kill -9.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

from benchmarks.kills import JOB, STREAM
from paceline.observe.run import Run
from paceline.train.data.stream.log import is_written
from tests.command_line import metrics, paceline, ranks, start_paceline


def write_job(folder, steps: int = 6, more: str = "") -> None:
    (folder / "incoming").mkdir()
    job = JOB.format(steps=steps, batch=4, seq_len=32).replace('"killed"', '"live"') + STREAM
    (folder / "job.toml").write_text(job.replace("[data.stream]\n", f"[data.stream]\n{more}"))


def add_lines(folder, count: int) -> None:
    with (folder / "incoming" / "a.jsonl").open("a") as file:
        for number in range(count):
            file.write(json.dumps({"text": f"line {number:06d} of the stream"}) + "\n")


def _wait_for(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_ranks_wait_together_and_stop_while_they_do(tmp_path):
    """Data for some steps: they are trained, the rest is waited for, and SIGTERM ends the wait with
    a checkpoint from which it goes on."""
    write_job(tmp_path)
    add_lines(tmp_path, 20)
    process = start_paceline("train", "job.toml", *ranks(2), folder=tmp_path)
    run = Run(tmp_path / "runs" / "live")
    _wait_for(lambda: len(metrics(tmp_path, "live")) == 3)
    os.kill(process.pid, signal.SIGTERM)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert "stopped after step 3 of 6, checkpoint kept" in printed
    add_lines(tmp_path, 60)
    done = paceline("train", "job.toml", *ranks(1), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path, "live")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["stream_latency_s"] > 0 for line in lines)
    assert lines[-1]["stream_backlog_tokens"] > 0
    assert "stream" in run.facts()["data"]
    other = ("--set", "data.stream.shuffle=7", "--set", "train.steps=7")
    refused = paceline("train", "job.toml", *ranks(1), *other, folder=tmp_path)
    assert refused.returncode == 2
    assert "its order changed" in refused.stderr


def test_a_wait_is_said_and_has_an_end(tmp_path):
    write_job(tmp_path, more="wait_s = 6\n")
    add_lines(tmp_path, 20)
    paceline("stream", "job.toml", "--once", folder=tmp_path)
    done = paceline("train", "job.toml", *ranks(1), folder=tmp_path)
    assert done.returncode == 1
    assert "waiting for data since 5" in done.stdout
    assert "no data arrived for 6" in done.stderr
    assert Run(tmp_path / "runs" / "live").last_checkpoint()[0] == 3


def test_a_run_takes_what_a_command_of_its_own_appended(tmp_path):
    write_job(tmp_path)
    add_lines(tmp_path, 60)
    done = paceline("stream", "job.toml", "--once", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "60 texts more" in done.stdout
    again = paceline("stream", "job.toml", "--once", folder=tmp_path)
    assert "texts more" not in again.stdout
    done = paceline("train", "job.toml", *ranks(1), folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_another_tokenizer_is_refused(tmp_path):
    write_job(tmp_path)
    paceline("stream", "job.toml", "--once", folder=tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text of some words " * 200)
    other = ("--set", "data.source=texts", "--set", 'data.tokenizer="bpe:257"')
    done = paceline("stream", "job.toml", "--once", *other, folder=tmp_path)
    assert done.returncode == 2
    assert "holds tokens of another tokenizer (bytes when it was made)" in done.stderr


def test_the_commands_of_the_page_run_as_they_stand(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "streams.md").read_text()
    commands = "".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL)).splitlines()
    write_job(tmp_path, steps=3)
    (tmp_path / "job.toml").rename(tmp_path / "my.toml")
    (tmp_path / "incoming").rmdir()
    trained = 0
    # The stream has data before it is trained on, and nobody sends a signal here.
    for command in sorted(commands, key=lambda command: command.startswith("paceline")):
        program, *arguments = shlex.split(command, comments=True)
        if program != "paceline":
            subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
            continue
        if arguments == ["stream", "my.toml"]:
            process = start_paceline(*arguments, folder=tmp_path)
            _wait_for(lambda: is_written(tmp_path / "streams" / "live"))
            os.kill(process.pid, signal.SIGTERM)
            process.communicate(timeout=300)
            assert process.returncode == 0
            continue
        add_lines(tmp_path, 20)
        done = paceline(*arguments, *(ranks(1) if "train" in arguments else ()), folder=tmp_path)
        assert done.returncode == 0, done.stderr
        trained += "train" in arguments
    assert trained == 1
