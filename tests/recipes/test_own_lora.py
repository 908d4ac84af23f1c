"""The recipe for an adapter, run as a person runs it."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.command_line import metrics, python

pytestmark = pytest.mark.skipif(
    find_spec("peft") is None or find_spec("transformers") is None,
    reason="needs peft and transformers",
)
RECIPE = Path(__file__).parents[2] / "recipes" / "own_lora.py"


def test_an_adapter_learns_and_is_saved_without_its_base(tmp_path):
    done = python(str(RECIPE), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"held-out accuracy ([\d.]+)%", done.stdout)
    assert float(accuracy) > 80
    lines = metrics(tmp_path, "lora")
    assert lines[-1]["eval_loss"] < lines[49]["eval_loss"]
    run = tmp_path / "runs" / "lora"
    assert (run / "checkpoints" / "best").is_symlink()
    with safe_open(run / "adapter" / "adapter_model.safetensors", "pt") as adapter:
        names = list(adapter.keys())
    assert names
    assert all("lora_" in name for name in names)
