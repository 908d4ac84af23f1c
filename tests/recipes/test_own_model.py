"""The recipe for one's own model, run as a person runs it: gloo ranks, in a process of its own."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.command_line import metrics, python

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")
RECIPE = Path(__file__).parents[2] / "recipes" / "own_model.py"


def _run(folder: Path) -> str:
    done = python(str(RECIPE), folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _accuracy(output: str) -> float:
    found = re.findall(r"held-out accuracy ([\d.]+)%", output)
    assert len(found) == 1, f"not said once, by the process that was started: {output}"
    return float(found[0])


def test_it_learns_the_digits_and_a_second_start_finds_it_done(tmp_path):
    accuracy = _accuracy(_run(tmp_path))
    assert accuracy >= 95
    lines = metrics(tmp_path, "digits")
    assert [line["step"] for line in lines] == list(range(1, 201))
    assert lines[-1]["samples"] == 200 * 64
    assert lines[-1]["eval_loss"] < 0.3
    run = tmp_path / "runs" / "digits"
    assert "digits" in (run / "report.html").read_text()
    assert (run / "checkpoints" / "step-200" / "manifest.json").is_file()
    again = _run(tmp_path)
    assert "is complete after 200 steps" in again
    assert _accuracy(again) == accuracy
