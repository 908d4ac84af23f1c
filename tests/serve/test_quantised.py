"""Weights in fewer bits, by the commands."""

import json

import pytest

from tests.command_line import paceline, write_tiny_job


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a Run."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_job(folder)
    done = paceline("train", "job.toml", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_loss_says_what_a_form_costs(trained):
    losses = {}
    for form in ("as_trained", "int8", "int4"):
        done = paceline(
            "evaluate", "runs/tiny", "--set", f"serve.weights={form}", "--json", folder=trained
        )
        assert done.returncode == 0, done.stderr
        losses[form] = json.loads(done.stdout)["loss"]
    assert 0 < abs(losses["int8"] - losses["as_trained"]) < 0.01
    assert 0 < abs(losses["int4"] - losses["as_trained"]) < 0.1
