"""Weights that a training starts from: in stages too, with their tokens and their arithmetic."""

import json
import shutil

import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.models.weights import read_decoder
from tests.command_line import losses, paceline, ranks, write_tiny_job
from tests.parallel.training import DENSE, FP64, TRAIN, assert_equal, run_cases, train

SETTINGS = ("--set", "train.steps=2")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a Job, and `big`: weights that it trained, as another program would give."""
    folder = tmp_path_factory.mktemp("base")
    write_tiny_job(folder)
    done = paceline("train", "job.toml", *SETTINGS, folder=folder)
    assert done.returncode == 0, done.stderr
    assert paceline("export", "runs/tiny", "big", folder=folder).returncode == 0
    return folder


def _job(base, **sections):
    """The text of a Job on the tiny text with sections of its own."""
    lines = [f'name = "{sections.pop("name")}"', "[data]", f'source = "{base / "text.txt"}"']
    lines += [f'cache_dir = "{base / "cache"}"', *sections.pop("data", ())]
    train = ["global_batch = 8", "seq_len = 24", "steps = 2", *sections.pop("train", ())]
    lines += ["[train]", *train, "[optim]", "warmup_steps = 1", "[model]", *sections.pop("model")]
    return "\n".join(lines) + "\n"


def test_one_folder_named_once_gives_network_tokens_and_weights(base):
    (base / "once.toml").write_text(
        _job(base, name="once", model=['hf = "big"'], train=["weights = true"])
    )
    job = read_job(base / "once.toml")
    assert job.train.weights == job.data.tokenizer == str(base / "big")
    done = paceline("train", "once.toml", folder=base)
    assert done.returncode == 0, done.stderr
    # It goes on from what was trained, in the same tokens.
    assert losses(base, "once")[1] < losses(base)[1]


def test_the_tokens_of_a_folder_are_taken_without_its_weights(base):
    (base / "shapes.toml").write_text(_job(base, name="shapes", model=['hf = "big"']))
    job = read_job(base / "shapes.toml")
    assert job.train.weights is None
    assert job.data.tokenizer == str(base / "big")


def test_true_needs_a_folder(base):
    with pytest.raises(InputError, match=r"train\.weights = true takes the weights of model.hf"):
        read_job(None, ["train.weights=true"])


def test_a_setting_beside_hf_changes_that_setting_alone(tmp_path):
    from transformers import MixtralConfig

    MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        num_local_experts=8, num_experts_per_tok=2,
    ).save_pretrained(tmp_path / "experts")  # fmt: skip
    plain = read_job(None, [f"model.hf={tmp_path / 'experts'}"]).model
    changed = read_job(
        None, [f"model.hf={tmp_path / 'experts'}", "model.experts.balance_loss=0.25"]
    ).model
    assert changed.experts == plain.experts.replace(balance_loss=0.25)
    assert changed.vocab_size == 64  # not the demo's


@pytest.mark.parametrize(
    ("data", "change", "words"),
    [
        (['tokenizer = "bpe:310"'], [], "other tokens than data.tokenizer = 'bpe:310'"),
        ([], ["norm_eps = 0.25"], "model.norm_eps = 1e-05, and the Job has 0.25"),
        ([], ["ffn_size = 32"], "model.ffn_size"),
    ],
)
def test_weights_of_other_tokens_or_another_arithmetic_are_refused(base, data, change, words):
    text = _job(base, name="no", model=['hf = "big"', *change], data=data, train=["weights = true"])
    (base / "no.toml").write_text(text)
    done = paceline("train", "no.toml", folder=base)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (base / "runs" / "no").exists()


def test_a_fresh_tokenizer_is_no_weights_tokenizer(base):
    bare = base / "bare"
    shutil.copytree(base / "big", bare)
    (bare / "tokenizer.json").unlink()
    text = _job(base, name="bare", model=['hf = "bare"'], train=["weights = true"])
    (base / "bare.toml").write_text(text.replace("[data]", '[data]\ntokenizer = "bpe:300"'))
    done = paceline("train", "bare.toml", folder=base)
    assert done.returncode == 2
    assert "is trained afresh" in done.stderr


def test_what_people_change_of_a_trained_network_is_accepted(base):
    changes = ["max_seq_len = 48", "init_std = 0.5", "rope_theta = 20000.0"]
    text = _job(base, name="longer", model=['hf = "big"', *changes], train=["weights = true"])
    (base / "longer.toml").write_text(text)
    done = paceline("train", "longer.toml", folder=base)
    assert done.returncode == 0, done.stderr


def test_stages_take_their_part_of_the_weights(tmp_path):
    """Steps in four stages, two to a rank, equal one rank's, both from the same folder."""
    from paceline.config.model import Model
    from paceline.models.decoder import Decoder
    from paceline.models.weights import write_weights

    job = read_job(None, [*DENSE, *TRAIN])
    assert isinstance(job.model, Model)
    network = Decoder(job.model)
    network.init_weights(torch.Generator().manual_seed(3))
    write_weights(tmp_path / "weights", job.model, network.state_dict())
    start = (*FP64, f"train.weights={tmp_path / 'weights'}", "layout.micro_batch=4")
    serial = train(0, 1, start)
    assert serial.losses != train(0, 1, (*FP64, "layout.micro_batch=4")).losses
    (ran,) = run_cases(2, [(*start, "layout.pp=2", "layout.schedule=zbv")])
    assert_equal(ran, serial, 1e-10, "zbv")


def test_a_run_in_stages_starts_from_weights(base):
    text = _job(base, name="staged", model=['hf = "big"'], train=["weights = true"])
    (base / "staged.toml").write_text(text)
    done = paceline("train", "staged.toml", "--set", "layout.pp=2", *ranks(2), folder=base)
    assert done.returncode == 0, done.stderr


def test_what_came_with_a_tokenizer_leaves_with_the_weights(base):
    """A chat template, special tokens and how to generate; the data may be gone by then."""
    given = base / "given"
    shutil.copytree(base / "big", given)
    settings = json.loads((given / "tokenizer_config.json").read_text())
    settings |= {"chat_template": "{{ messages }}", "eos_token": "<|im_end|>"}
    (given / "tokenizer_config.json").write_text(json.dumps(settings))
    (given / "generation_config.json").write_text('{"eos_token_id": [7, 9], "temperature": 0.5}')
    (base / "given.toml").write_text(
        _job(base, name="given", model=['hf = "given"'], train=["weights = true"])
    )
    assert paceline("train", "given.toml", folder=base).returncode == 0
    hidden = base / "hidden.txt"
    (base / "text.txt").rename(hidden)
    try:
        done = paceline("export", "runs/given", "out", folder=base)
    finally:
        hidden.rename(base / "text.txt")
    assert done.returncode == 0, done.stderr
    told = json.loads((base / "out" / "tokenizer_config.json").read_text())
    assert (told["chat_template"], told["eos_token"]) == ("{{ messages }}", "<|im_end|>")
    generation = json.loads((base / "out" / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["temperature"]) == ([7, 9], 0.5)
    assert json.loads((base / "out" / "config.json").read_text())["eos_token_id"] == [7, 9]
    assert (base / "out" / "model.safetensors").stat().st_mode & 0o044  # others may read it
    assert read_decoder(base / "out").model == read_decoder(given).model
