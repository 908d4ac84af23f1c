"""Guesses in runs that were trained: texts of the command line, what is refused, and metrics."""

import json
import re
from pathlib import Path

import pytest
import torch

from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.serve.network import open_network
from tests.command_line import paceline, write_tiny_job
from tests.serve.served import serve
from tests.train.test_heads import HEADS

PROMPTS = ["the quick", "dog", "over the lazy brown"]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run, a smaller one of the same text, and heads of it."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_job(folder)
    small = ("--set", "name=small", "--set", "model.num_layers=1", "--set", "model.ffn_size=32")
    for settings in ((), small):
        done = paceline("train", "job.toml", "--set", "train.steps=30", *settings, folder=folder)
        assert done.returncode == 0, done.stderr
    (folder / "heads.toml").write_text(HEADS)
    done = paceline("train", "heads.toml", "--set", "train.steps=150", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_guesses_for_another(trained):
    network, draft = open_network(trained / "runs/tiny"), str(trained / "runs/small")
    sampling = Sampling(max_tokens=40, temperature=0)
    wanted = network.engine(Serving()).texts(PROMPTS, sampling)
    for kind in ("draft", "auto"):
        engine = network.engine(Serving(speculate=kind, draft=draft, precision="fp32"))
        assert engine.texts(PROMPTS, sampling) == wanted
        if kind == "draft":
            numbers = engine.numbers()
            assert numbers["guessed_right"] > numbers["guessed"] / 2


def test_heads_guess_better_when_they_are_trained(trained):
    network, path = open_network(trained / "runs/tiny"), str(trained / "runs/heads")
    sampling = Sampling(max_tokens=40, temperature=0)
    wanted = network.engine(Serving()).texts(PROMPTS, sampling)
    rates = {}
    for name in ("trained", "untrained"):
        engine = network.engine(Serving(speculate="heads", draft=path, precision="fp32"))
        if name == "untrained":
            heads = engine._speculator._guessers["heads"]._heads
            heads.init_weights(torch.Generator().manual_seed(0))
        assert engine.texts(PROMPTS, sampling) == wanted
        numbers = engine.numbers()
        rates[name] = numbers["guessed_right"] / numbers["guessed"]
    assert rates["trained"] > 0.5 > 0.1 > rates["untrained"]


def test_the_pages_commands_run(trained):
    page = (DOCS / "serving.md").read_text()
    (job,) = re.findall(r'^```toml\n(name = "heads".*?)^```', page, flags=re.M | re.S)
    changes = {"runs/demo": "runs/tiny", 'name = "heads"': 'name = "own"', "128": "32", "500": "4"}
    for text, other in changes.items():
        assert text in job
        job = job.replace(text, other)
    (trained / "own.toml").write_text(job)
    done = paceline("train", "own.toml", folder=trained)
    assert done.returncode == 0, done.stderr
    commands = re.findall(r'^paceline generate runs/demo "(.*)" (.*speculate.*)$', page, flags=re.M)
    assert len(commands) == 3
    texts = set()
    for prompt, settings in commands:
        arguments = settings.replace("runs/heads", "runs/own").split()
        done = paceline(
            "generate", "runs/tiny", prompt, *arguments, "--seed", "1", "--json", folder=trained
        )
        assert done.returncode == 0, done.stderr
        texts.add(json.loads(done.stdout)["text"])
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["speculate=draft"], "needs a small network"),
        (["draft=runs/small"], 'no effect with serve.speculate = "off"'),
        (["speculate=auto", "draft=nowhere"], "nowhere is neither a run nor a folder"),
        (["speculate=auto", "draft=other"], "other has another tokenizer than tiny"),
        (["guess_tokens=0"], "serve.guess_tokens = 0"),
    ],
)
def test_a_draft_that_can_not_be_had_is_refused_in_a_sentence(settings, said, trained):
    if not (trained / "other").exists():
        assert paceline("export", "runs/small", "other", folder=trained).returncode == 0
        file = trained / "other" / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        file.write_text(json.dumps(tokenizer))
    given = [word for setting in settings for word in ("--set", f"serve.{setting}")]
    done = paceline("generate", "runs/tiny", "the", *given, folder=trained)
    assert done.returncode == 2
    assert said in done.stderr


def test_guesses_are_counted_for_prometheus():
    with serve(settings=Serving(block_size=8, speculate="ngram")) as served:
        served.post(prompt="abcabcabcabc", max_tokens=40, temperature=0)
        served.wait_until_idle()
        numbers, told = served.engine.numbers(), served.metrics()
        assert numbers["guessed"] > 0
        assert told["guessed_tokens_total right"] == numbers["guessed_right"]
        assert told["guessed_tokens_total wrong"] == numbers["guessed"] - numbers["guessed_right"]
