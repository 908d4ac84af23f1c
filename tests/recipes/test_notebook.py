"""The notebook: its cells in an interpreter without a script, and in Jupyter where it is there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import environment

NOTEBOOK = Path(__file__).parents[2] / "recipes" / "notebook.ipynb"
pytest.importorskip("cloudpickle")


def _is_right(printed: str) -> None:
    assert (found := re.search(r"2 ranks, ([\d.]+)% of the held-out points right", printed))
    assert float(found[1]) > 90
    assert re.search(r"^150 0\.\d+ \d", printed, re.M)


def test_the_cells_train_on_two_ranks(tmp_path):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path),
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _is_right(done.stdout)


def test_it_runs_in_jupyter(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", ())]
    _is_right("".join(each.get("text", "") for each in outputs))
