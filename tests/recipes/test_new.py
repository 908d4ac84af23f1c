"""`paceline new`: each Job that it writes trains, with small shapes and a person's small data."""

import json
from typing import get_args

import pytest

from paceline.config.model import Model
from paceline.config.new import Kind
from paceline.models.weights import write_weights
from paceline.train.data.tokenizer import make_encoder
from tests.command_line import metrics, paceline, ranks
from tests.generate.networks import built
from tests.train.test_conversations import talks
from tests.train.written_images import write_images

SHAPE = {
    "hidden_size": 32, "ffn_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1,
    "max_seq_len": 64,
}  # fmt: skip
BYTES = {"data.tokenizer": "bytes", "model.vocab_size": 257}
DECODER = {f"model.{name}": value for name, value in SHAPE.items()} | BYTES
SHORT = {"train.steps": 3, "train.global_batch": 4, "optim.warmup_steps": 1}
SMALL = {
    "pretrain": {**DECODER, **SHORT, "data.source": "code"},
    "mixture": {**DECODER, **SHORT, "data.stages": "[]"},
    "stream": {**DECODER, **SHORT},
    "sft": {"train.global_batch": 4, "optim.warmup_steps": 1},
    "lora": {"train.global_batch": 4, "optim.warmup_steps": 1},
    "dpo": {"train.global_batch": 4, "optim.warmup_steps": 1, "train.epochs": 2},
    "grpo": {**SHORT, "finetune.grpo.group": 2, "finetune.grpo.max_tokens": 8},
    "distill": {**SHORT, **DECODER, "data.source": "code", "finetune.distill.teacher": "base"},
    "images": {
        "train.epochs": 1, "train.global_batch": 16, "optim.warmup_steps": 1, "model.depth": 18,
        "model.image_size": 32, "data.eval_fraction": 0.3,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the lines that say "yours" name."""
    folder = tmp_path_factory.mktemp("new")
    for name in ("web", "code", "incoming"):
        (folder / name).mkdir()
        text = "\n".join(f"{name} {at} and some more words" for at in range(900))
        (folder / name / "a.txt").write_text(text)
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks(60)))
    pairs = [
        {"prompt": f"{at} and?", "chosen": f"{at + 1} follows.", "rejected": "I don't know."}
        for at in range(40)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    prompts = ({"prompt": f"Count from {at}:"} for at in range(40))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (folder / "reward.py").write_text(
        "def reward(prompt, completion):\n    return len(completion)\n"
    )
    model = Model(vocab_size=257, **SHAPE)
    write_weights(folder / "base", model, built(model).state_dict())
    make_encoder("bytes", ()).tokenizer.save(str(folder / "base" / "tokenizer.json"))
    write_images(folder / "photos", 60)
    return folder


@pytest.mark.parametrize("kind", get_args(Kind))
def test_what_is_written_trains(kind, folder):
    if kind == "images":
        pytest.importorskip("PIL")
    done = paceline("new", kind, folder=folder)
    assert done.returncode == 0, done.stderr
    text = (folder / f"{kind}.toml").read_text()
    assert f"paceline train {kind}.toml" in done.stdout
    assert f"paceline train {kind}.toml" in text
    assert "yours" in text
    lengths = {} if kind == "images" else {"train.seq_len": 64}
    small = {**SMALL[kind], **lengths}.items()
    settings = [word for name, value in small for word in ("--set", f"{name}={value}")]
    done = paceline("train", f"{kind}.toml", *settings, *ranks(1), folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(metrics(folder, kind)) >= 3


def test_a_file_that_exists_stays_as_it_is(tmp_path):
    (tmp_path / "mine.toml").write_text("mine")
    done = paceline("new", "sft", "mine.toml", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "mine.toml is there already" in done.stderr
    assert (tmp_path / "mine.toml").read_text() == "mine"


def test_a_file_of_another_name_names_itself(tmp_path):
    assert paceline("new", "lora", "jobs/a.toml", folder=tmp_path).returncode == 0
    assert "paceline train jobs/a.toml" in (tmp_path / "jobs" / "a.toml").read_text()
