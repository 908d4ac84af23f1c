"""What a server needs beside its weights while it takes newer ones: counted by the system."""

import sys
from contextlib import ExitStack, closing
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.command_line import paceline, write_tiny_job
from tests.serve.served import wait_until
from tests.serve.test_serve_command import start, url_of

LAYERS, LAYER_BYTES = 16, 4 * (3 * 320**2 + 3 * 320 * 1280)
"""Without norms."""
SETTINGS = (
    *("model.hidden_size=320", "model.ffn_size=1280", f"model.num_layers={LAYERS}"),
    *("train.global_batch=2", "checkpoint.every=2", "checkpoint.keep_last=9"),
)
FORMS = {
    "packed": (),
    "in 8 bits": ("--set", "serve.weights=int8"),
    "two ranks": ("--set", "serve.tp=2"),
    "layers in files": ("--set", "serve.weights_gb=0.02", "--set", "serve.disk_folder=kept"),
}


def train(folder, steps):
    settings = [w for each in (*SETTINGS, f"train.steps={steps}") for w in ("--set", each)]
    done = paceline("train", "job.toml", *settings, folder=folder)
    assert done.returncode == 0, done.stderr


class Watched:
    """A server, and the memory of its processes."""

    def __init__(self, folder, options):
        self._process = start(folder, "--follow", *options)
        self._url = url_of(self._process)

    def close(self):
        self._process.kill()
        self._process.communicate()

    def ask(self):
        ask = {"prompt": "the quick", "max_tokens": 2, "ignore_eos": True}
        assert httpx2.post(f"{self._url}/v1/completions", json=ask, timeout=60).status_code == 200

    def step(self):
        return httpx2.get(f"{self._url}/ready").json()["step"]

    def begin(self):
        """Count from now on."""
        first = psutil.Process(self._process.pid)
        self._before = {each.pid: 0 for each in (first, *first.children(recursive=True))}
        for pid in self._before:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # begins the maximum anew
            self._before[pid] = self._status(pid, "VmRSS")

    def extra_bytes(self):
        """The most that a process needed since then."""
        return max(self._status(pid, "VmHWM") - was for pid, was in self._before.items())

    @staticmethod
    def _status(pid, key):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells the peak")
def test_newer_weights_take_the_memory_of_a_few_layers(tmp_path):
    """Two threads read a layer each, from a file that is in memory as well, and one matrix is
    packed before the old one goes: less than half of the network."""
    write_tiny_job(tmp_path)
    train(tmp_path, 2)
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(closing(Watched(tmp_path, options)))
            for name, options in FORMS.items()
        }
        for server in servers.values():
            server.ask()
            server.begin()
        train(tmp_path, 4)
        for server in servers.values():
            wait_until(lambda server=server: server.step() == 4)
            server.ask()
        layers = {name: server.extra_bytes() / LAYER_BYTES for name, server in servers.items()}
    assert max(layers.values()) < LAYERS / 2, layers
