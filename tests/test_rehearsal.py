"""Whole training steps on a stand-in CUDA device (tests/rehearsal); needs a C++ compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rehearsal.cases import CASES, FAULTS
from tests.rehearsal.device import compiler

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What a case said. All are of one process: it can't be taken back that torch sees a device."""
    folder = tmp_path_factory.mktemp("device")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    told = {}

    def get(name):
        while name not in told:  # a test waits for its own case, not for all of them
            line = process.stdout.readline()
            assert line, (folder / "errors").read_text()
            if line.startswith("{"):
                said = json.loads(line)
                told[said["case"]] = said
        return told[name]

    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.rehearsal", str(folder)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    with process:
        try:
            yield get
        finally:
            process.kill()


@pytest.mark.parametrize("name", CASES)
def test_a_step_runs_on_the_stand_in_device(name, ran):
    assert ran(name)["error"] is None, ran(name)["error"]
    assert ran(name)["kernels"] > 100


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, ran):
    _, said = FAULTS[name]
    assert ran(name)["error"] is not None, "nothing was found"
    assert said in ran(name)["error"]


def test_what_overlaps_has_streams_of_its_own(ran):
    """Otherwise the order of streams would be right because there is one."""
    for name in ("offloaded activations", "offloaded optimizer", "fsdp", "cp", "dp, int8"):
        assert ran(name)["streams"] > 1, name
