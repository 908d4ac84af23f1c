"""What starts a server or makes a text is only what they need."""

import re
import subprocess
import sys

import httpx2
import pytest

from tests.command_line import paceline, write_tiny_job

PATIENCE_S = 400.0
NOT_NEEDED = (
    "torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch._dynamo", "torch._inductor", "sympy", "triton", "transformers", "datasets", "pandas",
    "tensorboard", "scipy", "llguidance", "paceline.parallel.apply", "paceline.train.trainer",
)  # fmt: skip
"""Each takes a large part of the time that all the rest takes, or would bring one that does."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_job(folder)
    done = paceline("train", "job.toml", "--set", "train.steps=2", folder=folder)
    assert done.returncode == 0, done.stderr
    assert paceline("export", "runs/tiny", "weights", folder=folder).returncode == 0
    return folder


@pytest.mark.parametrize("served", ["runs/tiny", "weights"])
def test_a_server_imports_no_compiler_and_nothing_of_training_on_ranks(trained, served):
    command = [sys.executable, "-X", "importtime", "-m", "paceline", "serve", served, "--port", "0"]
    with (trained / "imports").open("w") as imports:
        process = subprocess.Popen(
            command, cwd=trained, stdout=subprocess.PIPE, stderr=imports, text=True
        )
    try:
        assert process.stdout is not None
        (url,) = re.findall(r"http://[\d.:]+", process.stdout.readline())
        assert httpx2.get(f"{url}/ready", timeout=PATIENCE_S).status_code == 200
        ask = {"prompt": "the", "max_tokens": 3}
        answer = httpx2.post(f"{url}/v1/completions", json=ask, timeout=PATIENCE_S)
        assert answer.status_code == 200
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    lines = (trained / "imports").read_text().splitlines()
    modules = {line.rpartition("|")[2].strip() for line in lines}
    assert "paceline.generate.engine" in modules
    assert [module for module in NOT_NEEDED if module in modules] == []
