"""`paceline serve` in a process of its own: what it prints, how it ends, what it refuses."""

import os
import re
import signal
import time

import httpx2
import pytest

from tests.command_line import COMMAND, Started, paceline, write_tiny_job

PATIENCE_S = 400.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_job(folder)
    done = paceline("train", "job.toml", "--set", "train.steps=8", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def start(folder, *arguments, **variables):
    command = [COMMAND, "serve", "runs/tiny", "--port", "0", *arguments]
    return Started(command, folder, num_outputs=1, variables=variables)


def url_of(process):
    """Where it says that it listens."""
    (output,) = process._printed
    end = time.monotonic() + PATIENCE_S
    while not (found := re.search(rb"http://[\w.:\[\]]+", process._printed[output])):
        assert time.monotonic() < end
        if output.poll(0.1):
            part = os.read(output.fileno(), 1 << 16)
            process._printed[output] += part
            assert part, process._printed[output].decode()
    return found[0].decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_is_under_way_end(trained, number):
    keeps = ("kv_gb=0.5", "host_gb=2", "disk_gb=20", "disk_folder=kept", "max_sequences=4")
    settings = [word for setting in keeps for word in ("--set", f"serve.{setting}")]
    process = start(trained, "--follow", *settings)
    try:
        url = url_of(process)
        assert [each.name[:13] for each in (trained / "kept").iterdir()] == ["paceline-tier"]
        ask = {"prompt": "the", "max_tokens": 60, "stream": True, "ignore_eos": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=ask, timeout=PATIENCE_S) as told:
            lines = told.iter_lines()
            next(lines)
            os.kill(process.pid, number)
            *_, last = (line for line in lines if line)
        assert last == "data: [DONE]"
        output, _ = process.communicate(PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "tiny, step 8" in output
    assert "no API key is asked for" in output
    assert "stopping" in output
    assert "Traceback" not in output
    assert not list((trained / "kept").iterdir())


def test_a_record_is_whole_when_the_server_has_ended(trained):
    process = start(trained, "--record", "records/monday")
    try:
        url = url_of(process)
        ask = {"prompt": "the", "max_tokens": 5, "ignore_eos": True}
        assert httpx2.post(f"{url}/v1/completions", json=ask, timeout=PATIENCE_S).is_success
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0
    done = paceline("explain", "records/monday", folder=trained)
    assert done.returncode == 0, done.stderr
    assert "5 steps, 3 tokens of prompts, 5 of texts" in " ".join(done.stdout.split())


def test_keys_are_asked_for_and_never_shown(trained):
    key = "secret-secret-secret-secret"
    process = start(trained, PACELINE_API_KEYS=key)
    try:
        url = url_of(process)
        assert httpx2.get(f"{url}/v1/models").status_code == 401
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx2.get(f"{url}/v1/models", headers=headers).status_code == 200
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0
    assert key not in output
    assert "no API key" not in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0 lets other hosts ask: give API keys"),
        (("--host", "::"), "--host :: lets other hosts ask"),
        (("--host", "no.such.host.example", "--no-keys"), "can't be listened at"),
        (("--follow", "--step", "4"), "leave one of them out"),
        (("--step", "3"), "has no checkpoint of step 3"),
        (("--no-keys", "--api-key-file", "job.toml"), "contradict each other"),
        (("--api-key-file", "nowhere"), "nowhere does not exist"),
        (("--api-key-file", "job.toml"), "API key 1 of"),
        (("--set", "serve.max_sequence=3"), "did you mean max_sequences"),
    ],
)
def test_what_is_wrong_is_refused_in_a_sentence(trained, arguments, said):
    done = paceline("serve", "runs/tiny", "--port", "0", *arguments, folder=trained)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_port_that_is_taken_is_refused_before_weights_are_read(trained):
    process = start(trained)
    try:
        port = url_of(process).rpartition(":")[2]
        done = paceline("serve", "nowhere", "--port", port, folder=trained)
        assert done.returncode == 2
        assert f"127.0.0.1:{port} can't be listened at (Address already in use)" in done.stderr
    finally:
        process.kill()
        process.communicate(PATIENCE_S)
