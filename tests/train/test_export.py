"""From a Run to a folder that transformers opens (processes)."""

import pytest
import torch

from paceline.models.weights import read_decoder
from tests.command_line import paceline, ranks, write_tiny_job


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a Run that was sharded over two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_job(folder)
    settings = ("--set", "layout.fsdp=2", "--set", "train.steps=2", *ranks(2))
    assert paceline("train", "job.toml", *settings, folder=folder).returncode == 0
    return folder


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_a_sharded_run_is_exported_and_opens_in_transformers(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = paceline("export", "runs/tiny", "weights", folder=trained)
    assert done.returncode == 0, done.stderr
    assert "after step 2" in done.stdout
    weights = trained / "weights"
    theirs = AutoModelForCausalLM.from_pretrained(weights).eval()
    text = "the lazy dog"
    tokens = AutoTokenizer.from_pretrained(weights)(text, return_tensors="pt").input_ids
    assert tokens[0].tolist() == list(text.encode())
    with torch.no_grad():
        logits = read_decoder(weights)(tokens)
        assert torch.allclose(theirs(tokens).logits, logits, atol=1e-5)
        # Two steps of training moved the weights away from their initial values.
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    assert loss < 5.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "out"], "nowhere is not a run"),
        (["runs/tiny", "runs"], "exists already"),
        (["runs/tiny", "out", "--dtype", "int3"], "--dtype int3"),
    ],
)
def test_what_can_not_be_exported_is_refused(arguments, words, trained):
    done = paceline("export", *arguments, folder=trained)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (trained / "out").exists()
