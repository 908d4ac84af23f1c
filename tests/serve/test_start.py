"""What starts a server or a text is only what they need."""

import subprocess
import sys

import pytest

from tests.command_line import paceline, write_tiny_job

NOT_NEEDED = (
    "torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch._dynamo", "torch._inductor", "sympy", "triton", "transformers", "datasets", "pandas",
    "tensorboard", "scipy", "llguidance", "openai", "paceline.parallel.apply",
    "paceline.train.trainer",
)  # fmt: skip
"""Each takes as long as all of the rest, or would bring one that does."""

_START = """
import sys
from pathlib import Path

from paceline.config.serving import ServingSettings
from paceline.serve.keys import Keys
from paceline.serve.network import open_network
from paceline.serve.serve_command import Serving, _listener

network = open_network(Path(sys.argv[1]))
serving = Serving(network, ServingSettings(), Keys(), _listener("127.0.0.1", 0))
serving.service.engine.texts(["the"], ServingSettings().sampling.replace(max_tokens=2))
import uvicorn

print(*sys.modules)
"""


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
    command = [sys.executable, "-c", _START, served]
    done = subprocess.run(command, cwd=trained, capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert "paceline.generate.engine" in modules
    assert [module for module in NOT_NEEDED if module in modules] == []
