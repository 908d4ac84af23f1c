"""`paceline export --prune`, and training on what is left."""

import re

import pytest

from paceline.models.weights import read_decoder, read_model
from tests.command_line import losses, metrics, paceline, settings, write_tiny_job

HEAL = """
name = "healed"
[model]
hf = "small"
[cluster]
devices_per_node = 1
[data]
source = "text.txt"
eval_fraction = 0.1
[finetune]
objective = "distill"
distill.teacher = "runs/tiny"
distill.weight = 0.9
[optim]
lr = 3e-3
warmup_steps = 1
[train]
weights = true
steps = 12
global_batch = 12
seq_len = 32
eval_every = 12
eval_batches = 1
[checkpoint]
every = 12
[observe]
tensorboard = false
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, and what is left of it in the folder small."""
    folder = tmp_path_factory.mktemp("pruned")
    write_tiny_job(folder)
    (folder / "heal.toml").write_text(HEAL)
    done = paceline("train", "job.toml", *settings("train.steps=40"), folder=folder)
    assert done.returncode == 0, done.stderr
    sizes = "num_layers=1, num_kv_heads=1, ffn_size=24"
    done = paceline("export", "runs/tiny", "small", "--prune", sizes, folder=folder)
    assert done.returncode == 0, done.stderr
    (folder / "said").write_text(done.stdout)
    return folder


def test_an_ordinary_smaller_network_is_written(folder):
    model = read_model(folder / "small")
    assert (model.num_layers, model.ffn_size) == (1, 24)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (2, 1, 8)
    assert sum(each.numel() for each in read_decoder(folder / "small").parameters()) == (
        model.num_params
    )
    assert f"{model.num_params:,} of " in (folder / "said").read_text()


def test_distilled_after_it_is_better_than_pruned_alone(folder):
    done = paceline("train", "heal.toml", folder=folder)
    assert done.returncode == 0, done.stderr
    alone, before = re.search(
        r"loss is (\d+\.\d+), and was (\d+\.\d+)", (folder / "said").read_text()
    ).groups()
    lines = metrics(folder, "healed")
    assert lines[0]["figures"]["likelihood"] == pytest.approx(float(alone), rel=0.05)
    healed = lines[-1]["eval_loss"]
    assert float(before) < float(alone)
    assert healed < float(alone) - 0.3 * (float(alone) - float(before))
    assert len(losses(folder, "healed")) == 12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prune", "num_layers"), "is no list of sizes"),
        (("--prune", "hidden_size=16"), "is no list of sizes"),
        (("--prune", "ffn_size=8, ffn_size=8"), "is no list of sizes"),
        (("--prune", "ffn_size=65"), "ffn_size=65 is not from 1 to the 64"),
        (("--prune", "ffn_size=8", "--format", "gguf"), "--format has no effect in an export with"),
        (("--prune", "ffn_size=8", "--for", "edge"), "--prune has no effect in --for edge"),
    ],
)
def test_what_can_not_be_is_refused(folder, options, said):
    done = paceline("export", "runs/tiny", "no", *options, folder=folder)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert not (folder / "no").exists()
