"""From a Run to a folder that transformers opens (processes)."""

import pytest
import torch

from paceline.models.weights import read_decoder
from tests.command_line import paceline, ranks, write_tiny_job


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_a_sharded_run_is_exported_and_opens_in_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_tiny_job(tmp_path)
    settings = ("--set", "layout.fsdp=2", "--set", "train.steps=2", *ranks(2))
    assert paceline("train", "job.toml", *settings, folder=tmp_path).returncode == 0
    done = paceline("export", "runs/tiny", "out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "after step 2" in done.stdout
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    text = "the lazy dog"
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")(text, return_tensors="pt").input_ids
    assert tokens[0].tolist() == list(text.encode())
    with torch.no_grad():
        logits = read_decoder(tmp_path / "out")(tokens)
        assert torch.allclose(theirs(tokens).logits, logits, atol=1e-5)
        # Two steps of training moved the weights away from their initial values.
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    assert loss < 5.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "out"], "nowhere is not a run"),
        (["runs/tiny", "."], "exists already"),
        (["runs/tiny", "out", "--dtype", "int3"], "--dtype int3"),
    ],
)
def test_what_can_not_be_exported_is_refused(arguments, words, tmp_path):
    write_tiny_job(tmp_path)
    settings = ("--set", "train.steps=2", *ranks(1))
    assert paceline("train", "job.toml", *settings, folder=tmp_path).returncode == 0
    done = paceline("export", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
