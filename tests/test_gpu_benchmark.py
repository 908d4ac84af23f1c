"""`make gpu`: parts are run, limited, kept and taken up again. No device is needed."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import PARTS, Done, Part, done_before, run, write
from benchmarks.provenance import ROOT

FACTS = {
    "commit": "abc", "device": "None", "cores": 2, "load_average_before": [0.0], "date": "today",
    "versions": {"torch": "2"}, "command": "python -m benchmarks.gpu",
}  # fmt: skip


def test_a_part_passes_fails_or_runs_out_of_time_and_says_so(tmp_path, monkeypatch):
    def of(code):
        return run(Part("x", "y", ("-c", code), num_devices=0), tmp_path, 0)

    assert of("print('fine')") == Done("passed", pytest.approx(0, abs=60), "fine\n")
    failed = of("import sys; print('why'); sys.exit(3)")
    assert (failed.status, failed.tail) == ("failed", "why\n")
    monkeypatch.setattr(gpu, "MOST_S", 1.0)
    late = of("import time; print('began', flush=True); time.sleep(100)")
    assert (late.status, late.tail) == ("timed out", "began\n")


def test_what_needs_devices_is_not_done_without_them(tmp_path):
    done = run(Part("x", "y", ("-c", "1/0"), num_devices=2), tmp_path, 1)
    assert (done.status, done.tail) == ("not done", "needs 2 CUDA device(s), and 1 is here.")


def test_a_page_tells_of_every_part_and_the_next_call_takes_up_the_same_commit(tmp_path):
    parts = {"demo": Done("failed", 2.0, "Traceback"), "bench": Done("passed", 3.0, "")}
    write(tmp_path, FACTS, parts)
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"| {part.name} |" in page for part in PARTS)
    assert "## demo: failed" in page
    assert done_before(tmp_path / "gpu.json", "abc") == parts
    assert done_before(tmp_path / "gpu.json", "abd") == {}
    (tmp_path / "gpu.json").write_text("[1")
    assert done_before(tmp_path / "gpu.json", "abc") == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a device")
def test_without_a_device_the_command_ends_well_and_says_what_it_could_not_do(tmp_path):
    names = [part.name for part in PARTS if part.num_devices]
    command = [sys.executable, "-m", "benchmarks.gpu", "--results", str(tmp_path), "--only", *names]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*/gpu.json")
    kept = json.loads(file.read_text())["parts"]
    assert {name: part["status"] for name, part in kept.items()} == dict.fromkeys(names, "not done")
    assert all("CUDA device" in part["tail"] for part in kept.values())
