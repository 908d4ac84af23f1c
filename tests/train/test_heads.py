"""Heads of a run: what is trained and what stays, ranks against one, resuming, and refusals."""

import json
import shutil

import pytest
import torch

from paceline.config.heads import Heads
from paceline.models.heads import GuessHeads
from paceline.observe.run import Run
from paceline.train.kept_weights import weights_of
from tests.command_line import paceline, ranks, write_tiny_job
from tests.generate.networks import MODELS, built

HEADS = """
name = "heads"
[model]
family = "heads"
of = "runs/tiny"
num_heads = 2
[optim]
lr = 1e-2
warmup_steps = 2
[train]
steps = 12
global_batch = 12
seq_len = 32
eval_batches = 1
[checkpoint]
every = 4
keep_last = 9
[observe]
tensorboard = false
"""
FP64 = ("--set", "layout.param_dtype=fp64", "--set", "layout.precision=fp64")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a decoder, and heads of it."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_job(folder)
    (folder / "heads.toml").write_text(HEADS)
    for job in ("job.toml", "heads.toml"):
        done = paceline("train", job, folder=folder)
        assert done.returncode == 0, done.stderr
    return folder


def losses(folder, name):
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def test_only_heads_are_kept_and_they_learn(trained):
    job = Run(trained / "runs/heads").job()
    assert job.model.step == 12
    assert job.model.trunk == Run(trained / "runs/tiny").job().model
    assert job.data.source == Run(trained / "runs/tiny").job().data.source
    step, weights = weights_of(Run(trained / "runs/heads"))
    assert step == 12
    assert {name.split(".")[0] for name in weights} == {"heads"}
    assert sum(weight.numel() for weight in weights.values()) == job.model.num_params
    first, *_, last = losses(trained, "heads")
    assert last < first - 0.3


def test_the_network_stays_as_it_is_bit_for_bit():
    trunk = built(MODELS["experts"], torch.float32).requires_grad_(False)
    model = Heads(family="heads", of="", step=0, trunk=MODELS["experts"], num_heads=2)
    heads = GuessHeads(model, trunk)
    heads.init_weights(torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in trunk.state_dict().items()}
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-2)
    tokens = torch.randint(0, 61, (3, 17), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        heads(tokens[:, :-1], tokens[:, 1:], None).backward()
        assert all(parameter.grad is None for parameter in trunk.parameters())
        assert all(parameter.grad is not None for parameter in heads.parameters())
        optimizer.step()
    assert {*heads.state_dict()}.isdisjoint(before)
    assert all(torch.equal(before[name], value) for name, value in trunk.state_dict().items())


def test_a_head_is_told_the_tokens_between_and_no_later_one():
    """The loss of head k at token t reads the tokens up to t + k, and asks for t + k + 1."""
    trunk = built(MODELS["grouped"])
    model = Heads(family="heads", of="", step=0, trunk=MODELS["grouped"], num_heads=2)
    heads = GuessHeads(model, trunk).double()
    heads.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for head in heads.heads:
            head.down_proj.weight.normal_(generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(0, 61, (1, 9), generator=torch.Generator().manual_seed(2))
    state = trunk(tokens[:, :-1], returns_states=True)[0]
    wanted = []
    for number in (1, 2):
        parts = []
        for place in range(8 - number):
            at = state[place]
            for between in range(1, number + 1):
                at = heads.next_state(between, at, tokens[0, place + between])
            log = heads.logits(at).double().log_softmax(-1)
            parts.append(-log[tokens[0, place + number + 1]])
        wanted.append(torch.stack(parts).mean())
    found = heads(tokens[:, :-1], tokens[:, 1:], None)
    assert found.item() == pytest.approx(torch.stack(wanted).mean().item(), rel=1e-6)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    assert heads(tokens[:, :-1], tokens[:, 1:], documents).isfinite()


def test_ranks_are_equal_to_one_rank(trained):
    for name, settings in (("one", ()), ("two", ("--set", "layout.dp=2", *ranks(2)))):
        done = paceline(
            "train", "heads.toml", "--set", f"name={name}", *FP64, *settings, folder=trained
        )
        assert done.returncode == 0, done.stderr
    assert losses(trained, "two") == pytest.approx(losses(trained, "one"), rel=1e-10)
    one, two = (weights_of(Run(trained / "runs" / name))[1] for name in ("one", "two"))
    assert all(torch.allclose(one[name], two[name], rtol=1e-10, atol=1e-12) for name in one)


def test_a_run_of_heads_goes_on_where_it_was(trained):
    run = Run(trained / "runs/heads")
    wanted = weights_of(run)[1]
    for step in (8, 12):
        shutil.rmtree(run.checkpoint_folder / f"step-{step}")
    done = paceline("train", "heads.toml", folder=trained)
    assert done.returncode == 0, done.stderr
    step, weights = weights_of(run)
    assert step == 12
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.of=nowhere"], "nowhere"),
        (["model.of=runs/heads"], "needs a run of a decoder"),
        (["model.step=3"], "has no checkpoint of step 3"),
        (["model.num_heads=0"], "model.num_heads = 0"),
        (["layout.fsdp=2"], "layout.fsdp = 2 cuts the network"),
        (["layout.tp=2"], "layout.tp = 2 cuts the network"),
        (["train.weights=runs"], "train.weights and train.exact_eval have no effect"),
        (["data.tokenizer=bpe:300"], "is another tokenizer than that of"),
    ],
)
def test_what_can_not_be_trained_is_refused_in_a_sentence(settings, said, trained):
    given = [word for setting in settings for word in ("--set", setting)]
    if "layout" in settings[0]:
        given += ranks(2)
    done = paceline("train", "heads.toml", "--set", "name=new", *given, folder=trained)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert not (trained / "runs" / "new").exists()
