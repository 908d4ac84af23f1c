"""Two ranks serve a run: the commands' texts are one rank's, newer weights reach both, all end
together. Real processes."""

import os
import signal

import httpx2
import psutil
import pytest
from openai import OpenAI

from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.serve.network import open_network
from tests.command_line import paceline, write_tiny_job
from tests.serve.served import wait_until
from tests.serve.test_serve_command import PATIENCE_S, start, url_of

TWO = ("--set", "serve.tp=2")
PROMPT = "the quick"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_job(folder)
    train(folder, 8)
    return folder


def train(folder, steps):
    done = paceline("train", "job.toml", "--set", f"train.steps={steps}", folder=folder)
    assert done.returncode == 0, done.stderr


def one_rank(folder):
    """The greedy text of one rank."""
    engine = open_network(folder / "runs" / "tiny").engine(Serving())
    return engine.texts([PROMPT], Sampling(max_tokens=20, temperature=0))[0]


def other_ranks(process):
    """Those that a command has started: each leads a session."""
    started = psutil.Process(process.pid).children(recursive=True)
    return [each.pid for each in started if os.getsid(each.pid) == each.pid]


def test_texts_of_the_command_are_those_of_one_rank(trained):
    ask = ("generate", "runs/tiny", PROMPT, "--tokens", "20", "--temperature", "0")
    shared = paceline(*ask, *TWO, folder=trained)
    assert shared.returncode == 0, shared.stderr
    assert shared.stdout == f"{PROMPT}{one_rank(trained)}\n"
    refused = paceline(*ask, "--set", "serve.tp=4", folder=trained)
    assert refused.returncode == 2
    assert "serve.tp = 4 does not divide num_kv_heads = 2" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_an_endpoint_of_two_ranks_answers_follows_and_stops(trained):
    process = start(trained, *TWO, "--follow")
    try:
        url = url_of(process)
        others = other_ranks(process)
        assert len(others) == 1
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def text():
            ask = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
            return client.completions.create(**ask).choices[0].text

        assert text() == one_rank(trained)
        assert httpx2.post(f"{url}/v1/embeddings", json={"input": "a"}).status_code == 400
        train(trained, 40)
        wait_until(lambda: httpx2.get(f"{url}/ready").json()["step"] == 40)
        assert text() == one_rank(trained)
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "Traceback" not in output
    assert not psutil.pid_exists(others[0])


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_rank_that_dies_ends_the_server(trained, is_busy):
    process = start(trained, *TWO)
    try:
        url = url_of(process)
        (other,) = other_ranks(process)
        if is_busy:
            ask = {"prompt": PROMPT, "max_tokens": 50, "stream": True, "ignore_eos": True}
            with httpx2.stream("POST", f"{url}/v1/completions", json=ask, timeout=60) as told:
                lines = (line for line in told.iter_lines() if line)
                next(lines)
                os.kill(other, signal.SIGKILL)
                *_, last = lines
            assert "The engine has died" in last
        else:
            os.kill(other, signal.SIGKILL)
        output, _ = process.communicate(PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 1, output
    assert f"Rank 1 (pid {other}) ended by SIGKILL" in output
