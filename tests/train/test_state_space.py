"""A Mamba-2 trains from the command line: on ranks as on one, in and out of transformers."""

import json

import pytest
import torch

from paceline.observe.run import Run
from tests.command_line import paceline, ranks, write_tiny_job

MODEL = """
family = "mamba2"
vocab_size = 257
hidden_size = 32
num_layers = 2
num_heads = 8
head_dim = 8
state_size = 8
chunk_size = 16
"""
KINDS = {
    "one": [],
    "dp": ["--set", "layout.dp=2", *ranks(2)],
    "fsdp": ["--set", "layout.fsdp=2", *ranks(2)],
    "again": ["--set", "layout.recompute=full"],
    "apart": ["--set", "data.reset_at_documents=true"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of every kind."""
    folder = tmp_path_factory.mktemp("mamba")
    job = write_tiny_job(folder)
    head, _, rest = job.read_text().partition("[model]")
    _, _, rest = rest.partition("[data]")
    rest = rest.replace("text.txt", "documents.jsonl")
    job.write_text(f"{head}[model]{MODEL}[data]{rest}")
    lines = (folder / "text.txt").read_text().splitlines()
    (folder / "documents.jsonl").write_text("\n".join(json.dumps({"text": x}) for x in lines))
    for name, settings in KINDS.items():
        done = paceline("train", "job.toml", "--set", f"name={name}", *settings, folder=folder)
        assert done.returncode == 0, done.stderr
    assert paceline("export", "runs/one", "weights", folder=folder).returncode == 0
    return folder


def losses(folder, name):
    return [line["loss"] for line in Run(folder / "runs" / name).metrics()]


def test_losses_fall_and_the_run_knows_its_work(trained):
    found = losses(trained, "one")
    assert found[-1] < found[0] - 0.3
    facts = Run(trained / "runs/one").facts()
    assert facts["train_flops_per_token"] > 6 * (facts["num_params"] - 2 * 257 * 32)


@pytest.mark.parametrize("kind", ["dp", "fsdp", "again"])
def test_every_layout_trains_as_one_rank(trained, kind):
    assert losses(trained, kind) == pytest.approx(losses(trained, "one"), rel=1e-5)


def test_documents_apart_are_another_work(trained):
    assert losses(trained, "apart") != pytest.approx(losses(trained, "one"), rel=1e-5)


def test_an_export_is_opened_by_transformers_and_trained_on(trained):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained / "weights")
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained / "weights")
    tokens = torch.tensor([tokenizer.encode("the quick brown fox jumps over the lazy dog")])
    with torch.no_grad():
        loss = float(theirs(tokens, labels=tokens).loss)
    assert loss < losses(trained, "one")[0]
    (trained / "on.toml").write_text(
        'name = "on"\n[model]\nhf = "weights"\n[data]\nsource = "documents.jsonl"\n'
        "eval_fraction = 0.1\n"
        "[optim]\nlr = 1e-9\n[train]\nsteps = 1\nglobal_batch = 12\nseq_len = 32\n"
        "eval_batches = 1\nweights = true\n"
    )
    done = paceline("train", "on.toml", folder=trained)
    assert done.returncode == 0, done.stderr
    # The same held-out text by the same weights.
    before, after = (Run(trained / "runs" / name).metrics()[-1] for name in ("one", "on"))
    assert after["eval_loss"] == pytest.approx(before["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["train", "job.toml", "--set", "layout.tp=2", *ranks(2)],
            "layout.tp = 2 cuts the network",
        ),
        (
            ["train", "job.toml", "--set", "layout.pp=2", *ranks(2)],
            "layout.pp = 2 cuts the network",
        ),
        (["train", "job.toml", "--set", "train.exact_eval=true"], "train.exact_eval = true takes"),
        (["train", "job.toml", "--set", 'observe.samples=["a"]'], "observe.samples are texts"),
        (["generate", "runs/one", "fox"], "trained a mamba2, and texts come from a decoder"),
        (["generate", "weights", "fox"], "'mamba2' is not a network this decoder can be"),
    ],
)
def test_what_it_can_not_do_is_refused_in_a_sentence(trained, arguments, said):
    done = paceline(*arguments, folder=trained)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
