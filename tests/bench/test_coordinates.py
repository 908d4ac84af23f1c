"""muP: its factors, and the coordinate check, which tells it from the standard parametrization."""

import math
from functools import partial

import pytest
import torch

from paceline.bench.coordinates import changes_of, coordinate_check, widened
from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.config.layout import Layout
from paceline.config.mup import init_factor, lr_factor, writes_residual
from paceline.models.decoder import Decoder
from paceline.train.optimizers import build_optimizer
from tests.command_line import paceline

WIDTHS = 64, 128, 256, 512
BASE = (
    *("model.hidden_size=64", "model.num_heads=4", "model.num_kv_heads=4", "model.head_dim=16"),
    *("model.ffn_size=128", "model.tie_embeddings=false", "optim.weight_decay=0.0"),
    "optim.lr=3e-3",
)
MUP = ("model.parametrization=mup", "model.base_width=64")
SHALLOW = (*BASE, *MUP, "model.vocab_size=256", "train.seq_len=32")


def test_widths_64_to_512_change_alike_under_mup():
    rows = coordinate_check(read_job(None, [*BASE, *MUP]), WIDTHS, 4)
    assert {row.layer for row in rows} > {"embedding", "attention", "logits"}
    assert all(row.is_even for row in rows), rows


def test_they_do_not_under_the_standard_parametrization():
    rows = {row.layer: row for row in coordinate_check(read_job(None, BASE), WIDTHS, 4)}
    for layer in ("attention", "feed-forward", "residual stream", "logits"):
        assert rows[layer].exponent > 0.5, rows


def test_weights_and_learning_rates_are_those_of_the_paper():
    job = read_job(None, [*BASE, *MUP, "model.base_head_dim=4"])
    model = widened(job.model, 256)
    assert (model.num_heads, model.ffn_size, model.head_dim) == (16, 512, 16)
    network = Decoder(model)
    network.init_weights(torch.Generator().manual_seed(0))
    expected = {  # factor of the standard deviation, and of the learning rate
        "embed.weight": (1, 1),
        "head.weight": (1 / 4, 1 / 4),
        "blocks.0.attention.k_proj.weight": (1 / 2, 1 / 4),
        "blocks.0.attention.q_proj.weight": (1 / 4, 1 / 8),
        "blocks.0.ffn.up_proj.weight": (1 / 2, 1 / 4),
    }
    for name, (std, rate) in expected.items():
        assert init_factor(model, name) == pytest.approx(std)
        assert lr_factor(model, name) == pytest.approx(rate)
        found = network.get_parameter(name).std().item()
        assert found == pytest.approx(std * model.init_std, rel=0.05)
    assert lr_factor(model, "norm.weight") == 1
    assert torch.equal(network.norm.weight, torch.ones(256))


def grown_by(layer: str, *more: str) -> float:
    """The change of its outputs with 16 blocks over that with 2."""
    few, many = (
        changes_of(job, job.model, 4)[layer]
        for depth in (2, 16)
        for job in [read_job(None, [*SHALLOW, *more, f"model.num_layers={depth}"])]
    )
    return many / few


def test_depths_2_to_16_change_alike_with_base_layers():
    for layer in ("residual stream", "logits"):
        assert 0.8 < grown_by(layer, "model.base_layers=2") < 1.25
    assert grown_by("residual stream") > 2.5


def test_what_writes_to_the_stream_is_scaled_by_the_depth():
    job = read_job(None, [*SHALLOW, "model.base_layers=2", "model.num_layers=8", "model.bias=true"])
    model, network = job.model, Decoder(job.model)
    network.init_weights(torch.Generator().manual_seed(0))
    for name in ("attention.o_proj", "ffn.down_proj"):
        for kind in ("weight", "bias"):
            assert lr_factor(model, f"blocks.0.{name}.{kind}") == pytest.approx(1 / 4)
        found = network.get_parameter(f"blocks.0.{name}.weight").std().item()
        assert found == pytest.approx(model.init_std / math.sqrt(2 * 2) / 4, rel=0.05)
    assert lr_factor(model, "blocks.0.ffn.experts.down_bias") == pytest.approx(1 / 4)
    for name in ("blocks.0.attention.v_proj.weight", "blocks.0.ffn.up_proj.weight", "head.weight"):
        assert lr_factor(model, name) == init_factor(model, name) == 1


def test_the_factor_is_as_one_of_the_forward_pass():
    """AdamW's steps don't depend on the size of gradients: with tiny `eps` and without decay, a
    network whose branches are a quarter steps as one with the factor in weights and rates."""
    more = ("model.base_layers=2", "model.num_layers=8", "optim.eps=1e-20")
    job = read_job(None, [*SHALLOW, *more])
    folded = Decoder(job.model)
    folded.init_weights(torch.Generator().manual_seed(0))
    plain = Decoder(job.model.replace(base_layers=None))
    plain.load_state_dict(folded.state_dict())
    factors = {name for name, _ in plain.named_parameters() if writes_residual(name)}
    with torch.no_grad():
        for name in factors:
            plain.get_parameter(name).mul_(4)
    tokens = torch.randint(
        job.model.vocab_size, (4, 33), generator=torch.Generator().manual_seed(1)
    )
    losses = []
    for network, model in ((folded, job.model), (plain, plain.model)):
        optimizer = build_optimizer(
            network.named_parameters(), job.optim, Layout(), partial(lr_factor, model)
        )
        for group in optimizer.param_groups:
            group["lr"] = job.optim.lr * group["lr_factor"]
        for _ in range(5):
            weights = dict(network.named_parameters())
            if network is plain:
                weights |= {name: weights[name] / 4 for name in factors}
            loss = torch.func.functional_call(
                network, weights, (tokens[:, :-1],), {"targets": tokens[:, 1:]}
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:5] == pytest.approx(losses[5:], rel=1e-5)
    assert losses[4] < losses[0] - 0.1


def test_the_base_width_itself_is_the_standard_parametrization():
    standard, same = (Decoder(read_job(None, [*BASE, *more]).model) for more in ((), MUP))
    for network in (standard, same):
        network.init_weights(torch.Generator().manual_seed(0))
    for one, other in zip(standard.parameters(), same.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("model.base_width=64",), r"base_width has no effect without parametrization"),
        (("model.parametrization=mup",), r"needs base_width"),
        ((*MUP, "model.tie_embeddings=true"), r"needs a head of its own"),
        ((*MUP, "model.base_head_dim=8", "model.qk_norm=true"), r"qk_norm sets their size"),
        ((*MUP, "optim.name=muon"), r"is for adamw, lion, schedulefree"),
        (("model.base_layers=2",), r"base_layers has no effect without parametrization"),
        ((*MUP, "model.base_layers=2", "model.post_norms=true"), r"a norm after it sets its size"),
    ],
)
def test_what_mup_does_not_go_with_is_refused(settings, sentence):
    with pytest.raises(InputError, match=sentence):
        read_job(None, [*BASE, *settings])


def test_widths_that_fit_no_head_are_refused():
    job = read_job(None, [*BASE, *MUP])
    with pytest.raises(InputError, match=r"--widths 72: model\.num_heads = 4"):
        coordinate_check(job, (64, 72), 1)
    with pytest.raises(InputError, match="give two or more"):
        coordinate_check(job, (64,), 1)


def test_the_command_says_and_exits(tmp_path):
    settings = [word for each in BASE for word in ("--set", each)]
    asked = ("coordinates", *settings, "--widths", "64,256", "--json")
    fails = paceline(*asked, folder=tmp_path)
    assert fails.returncode == 1, fails.stderr
    assert "not even" in fails.stdout
    assert '"passes": false' in fails.stdout
    mup = [word for each in MUP for word in ("--set", each)]
    passes = paceline(*asked, *mup, folder=tmp_path)
    assert passes.returncode == 0, passes.stderr
    demo = ("model.tie_embeddings=false", *MUP)  # as docs/optimizers.md has it
    sets = [word for each in demo for word in ("--set", each)]
    assert paceline("coordinates", *sets, folder=tmp_path).returncode == 0
    wrong = paceline("coordinates", "--widths", "a", folder=tmp_path)
    assert wrong.returncode == 2
