"""The recipe for an encoder, run as a person runs it; what it writes is opened as an encoder."""

import re
from pathlib import Path

from paceline.serve.retrieval.encoder import open_encoder
from tests.command_line import python

RECIPE = Path(__file__).parents[2] / "recipes" / "own_encoder.py"


def test_an_encoder_learns_to_find_and_can_be_indexed_with(tmp_path):
    done = python(str(RECIPE), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    before, after = re.findall(r"(\d+)% (?:before|after)", done.stdout)
    assert int(after) > int(before) + 8
    assert open_encoder(tmp_path / "encoder").vectors(["import os"]).shape == (1, 64)
