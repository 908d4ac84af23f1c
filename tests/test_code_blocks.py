"""Python in the pages runs as it stands, and TOML in them is read as part of a Job.

A block runs as a script of its own, between what its page takes as given and what must come of it.
Of trainings the first eight steps are enough. `tests.test_documents` runs the README's blocks.
"""

import json
import re

import pytest

from paceline.config.federate import read_federate
from paceline.config.huggingface import to_hf
from paceline.config.job import read_job
from paceline.config.site import read_sites
from tests.command_line import python
from tests.small_job import work_in, write_small_job
from tests.test_names import PAGES, ROOT

OWN = """
import torch
import paceline

def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

model = torch.nn.Linear(8, 1)
dataset = held_out = torch.utils.data.TensorDataset(torch.randn(128, 8), torch.randn(128, 1))
"""
EIGHT_STEPS = "assert [line['step'] for line in run.metrics()] == list(range(1, 9))"
# What is given before a block, and what is asked of it after it, by page and place in the page.
AROUND = {
    ("recipes/README.md", 0): (OWN, EIGHT_STEPS),
    ("docs/own-models.md", 0): (OWN, EIGHT_STEPS),
    ("docs/own-models.md", 1): (
        """
import torch
import torch.nn.functional as F

def penalty(model):
    return model.weight.square().sum()
""",
        """
batch = {"x": torch.randn(1, 4, 8), "labels": torch.tensor([[3, -100, 2, 1]])}
assert loss(torch.nn.Linear(8, 4), batch)["weight"] == 3
""",
    ),
    ("docs/own-models.md", 2): (
        """
import torch

def model(x, labels):
    return {"loss": x.mean()}
""",
        """
batch = {"x": torch.randn(1, 4, 8), "labels": torch.tensor([[3, -100, 2, 1]])}
assert loss(model, batch)[1]["weight"] == 2
""",
    ),
    ("docs/own-models.md", 3): (
        """
import torch
import torch.nn.functional as F
from torch import nn
import paceline

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        parts = (self.q, self.k, self.v)
        heads = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))

class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.ffn = Attention(), FeedForward()

    def forward(self, x):
        return self.ffn(x + self.attention(x))

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def loss(model, batch):
    return F.mse_loss(model(batch), batch)

model, data = Network(), list(torch.randn(64, 4, 8))
job = {"name": "cut", "cluster": {"devices_per_node": 2}, "train": {"steps": 8, "global_batch": 8}}
""",
        """
from pathlib import Path
from paceline.observe.run import Run
assert [line["step"] for line in Run(Path("runs/cut")).metrics()] == list(range(1, 9))
""",
    ),
    ("docs/own-models.md", 4): (
        OWN
        + """
from pathlib import Path

def loss(model, batch):
    return 1e-3 * torch.nn.functional.mse_loss(model(batch[0]), batch[1])

job = {"name": "mine", "train": {"steps": 2000, "global_batch": 64, "eval_every": 1}}
""",
        "assert 1 <= len(run.metrics()) < 2000",
    ),
    ("docs/serving.md", 0): (
        """
import torch
from paceline.config.model import Model
from paceline.models.decoder import Decoder
from paceline.train.data.tokenizer import make_encoder

tokenizer = make_encoder("bytes", ()).tokenizer
decoder = Decoder(
    Model(vocab_size=257, hidden_size=32, ffn_size=64, num_layers=2, num_heads=4, max_seq_len=96)
)
decoder.init_weights(torch.Generator().manual_seed(0))
""",
        "assert engine.is_idle",
    ),
    ("docs/explain.md", 0): (
        """
import torch

rank, loader, weight = 0, range(14), torch.randn(8, 8, requires_grad=True)

def train_step(batch):
    (weight @ weight).sum().backward()
""",
        """
from paceline.observe.recorded import read_account
assert len(read_account(Path("traces")).steps) == 3
""",
    ),
    ("docs/traces.md", 0): (
        """
from paceline.cli import app

if __name__ == "__main__":
    settings = ["name=demo", "observe.profile_every=3", "observe.profile_steps=1"]
    flags = [word for setting in settings for word in ("--set", setting)]
    app(["train", "small.toml", *flags], standalone_mode=False)
""",
        "assert len(account.steps) == 1",
    ),
    ("docs/checkpoints.md", 0): (
        """
from pathlib import Path
import torch
from paceline.cli import app
from paceline.models.decoder import Decoder
from paceline.observe.run import Run

app(["train", "small.toml"], standalone_mode=False)
app(["export", "runs/small", "weights", "--format", "dcp"], standalone_mode=False)
model = Decoder(Run(Path("runs/small")).job().model)
""",
        """
from paceline.train.export import load as load_run
kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
load_run("runs/small", model)
assert all(torch.equal(kept[name], tensor) for name, tensor in model.state_dict().items())
""",
    ),
}


def _blocks(language):
    for page in PAGES[1:]:  # after the README
        found = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.S | re.M)
        yield from ((str(page.relative_to(ROOT)), at, block) for at, block in enumerate(found))


def test_every_block_of_python_is_known():
    assert {(page, at) for page, at, _ in _blocks("python")} == set(AROUND)


@pytest.mark.parametrize(("page", "at", "block"), list(_blocks("python")))
def test_python_runs(page, at, block, tmp_path, monkeypatch):
    work_in(tmp_path, monkeypatch)
    write_small_job(tmp_path)
    before, after = AROUND[page, at]
    short = re.sub(r'"steps": \d+', '"steps": 8', block)
    (tmp_path / "page.py").write_text("\n".join((before, short, after)))
    done = python("page.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "at", "block"), list(_blocks("toml")))
def test_toml_is_read(page, at, block, tmp_path):
    recipe = ROOT / "recipes" / "dlrm.toml"
    if block.startswith("[federate]"):
        (tmp_path / "clients.toml").write_text(block)
        assert read_federate(tmp_path / "clients.toml")
        return
    if "# paceline-sites.toml" in block:
        (tmp_path / "sites.toml").write_text(block)
        assert read_sites(tmp_path / "sites.toml")
        return
    if "[comm.embeddings]" in block:
        others = re.sub(r"\[comm.embeddings\]\n(?:.+\n)*", "", recipe.read_text())
        (tmp_path / "job.toml").write_text(others + block)
    elif "[[data.sources]]" in block:
        (tmp_path / "job.toml").write_text(block)
    elif 'family = "heads"' in block:
        run = tmp_path / "runs" / "demo" / "job.toml"
        run.parent.mkdir(parents=True)
        small = write_small_job(tmp_path).read_text()
        run.write_text(small.replace("max_seq_len = 32", "max_seq_len = 128"))
        (tmp_path / "job.toml").write_text(block)
    elif 'hf = "base"' in block:
        model = read_job(None, []).model.replace(max_seq_len=4096)
        for name in ("base", "larger"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(json.dumps(to_hf(model)))
        (tmp_path / "job.toml").write_text(block)
    elif block.startswith("name = ") and "[model]" in block:  # a whole Job
        (tmp_path / "job.toml").write_text(block)
    elif block.startswith("[data]\n"):  # in place of the small Job's own
        small = write_small_job(tmp_path).read_text()
        (tmp_path / "job.toml").write_text(small.replace('[data]\nsource = "text.txt"\n', block))
    else:
        write_small_job(tmp_path, more=block).rename(tmp_path / "job.toml")
    read_job(tmp_path / "job.toml")
