"""What every family of models says of itself, and what a family that says nothing gets."""

from typing import get_args

import pytest

from paceline.config.comm import Comm
from paceline.config.family import ModelFamily
from paceline.config.heads import Heads
from paceline.config.job_sections import CustomModel, Sections
from paceline.config.layout import Layout
from paceline.config.mamba import Mamba2
from paceline.config.model import Model
from paceline.config.recommender import Dlrm
from paceline.config.vision import EfficientNet, ResNet

DECODER = Model(
    vocab_size=64, hidden_size=32, ffn_size=64, num_layers=2, num_heads=2, max_seq_len=16
)
CLICKS = Dlrm(family="dlrm", tables=(8, 4), dim=4, num_dense=3)
HEADS = Heads(family="heads", of="runs/a", step=1, trunk=DECODER, num_heads=2)
MAMBA = Mamba2(
    family="mamba2",
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=8,
    head_dim=8,
    state_size=16,
    chunk_size=8,
)
ONE = Layout()


def test_every_model_of_a_job_is_a_family():
    families = get_args(Sections.model_fields["model"].annotation)
    assert set(families) == {Model, Mamba2, Dlrm, ResNet, EfficientNet, Heads, CustomModel}
    assert all(issubclass(family, ModelFamily) for family in families)


@pytest.mark.parametrize(
    ("model", "units", "flops"),
    [
        (DECODER, 16, DECODER.train_flops_per_token(16)),
        (ResNet(depth=18), 1, ResNet(depth=18).train_flops_per_image),
        (CLICKS, 1, CLICKS.train_flops_per_sample),
        # The decoder forward; both heads and what reads them forward and backward.
        (
            HEADS,
            16,
            DECODER.train_flops_per_token(16) / 3 + 6 * 2 * (3 * 32 * 32 + 32 + 64 * 32),
        ),
        # Products, convolution, pairs in chunks, states; the head.
        (
            MAMBA,
            16,
            6 * 2 * (32 * (64 + 96 + 8 + 64) + 96 * 4)
            + 3 * 2 * (2 * 4 * (16 + 64) + 4 * 64 * 16)
            + 6 * 64 * 32,
        ),
        (CustomModel(), 1, None),
    ],
    ids=lambda value: getattr(value, "family", ""),
)
def test_work_is_counted_in_the_units_of_the_family(model, units, flops):
    assert model.units_per_sample(16) == units
    assert (model.unit == "tokens") == (units > 1)
    assert model.train_flops_per_unit(16) == flops


def test_layers_of_a_mamba_are_not_cut_either():
    assert list(MAMBA.layout_refusals(ONE.replace(fsdp=2))) == []
    (sentence,) = MAMBA.layout_refusals(ONE.replace(tp=2))
    assert sentence.startswith("layout.tp = 2 cuts the network")


@pytest.mark.parametrize("model", [ResNet(), EfficientNet(), CLICKS, CustomModel()])
def test_layers_nobody_knows_are_not_cut(model):
    assert list(model.layout_refusals(ONE)) == []
    assert not list(DECODER.layout_refusals(ONE.replace(tp=2, pp=2, cp=2, ep=2)))
    for axis in ("tp", "pp", "cp", "ep"):
        sentences = list(model.layout_refusals(ONE.replace(**{axis: 2})))
        if axis == "tp" and model.is_own:  # cut by a plan
            assert not sentences
            continue
        (sentence,) = sentences
        assert sentence.startswith(f"layout.{axis} = 2 needs a model that Paceline knows")


def test_heads_need_a_whole_network_on_each_rank():
    assert list(HEADS.layout_refusals(ONE.replace(dp=2))) == []
    for axis in ("tp", "pp", "cp", "ep", "fsdp"):
        (sentence,) = HEADS.layout_refusals(ONE.replace(**{axis: 2}))
        assert sentence.startswith(f"layout.{axis} = 2 cuts the network")


@pytest.mark.parametrize("model", [DECODER, CLICKS, HEADS])
def test_statistics_of_no_batch_norms_are_not_shared(model):
    (sentence,) = model.layout_refusals(ONE.replace(sync_batch_norm=True))
    assert f'"{model.family}"' in sentence
    for other in (ResNet(), CustomModel()):
        assert not list(other.layout_refusals(ONE.replace(sync_batch_norm=True)))


def test_a_family_that_says_nothing_is_one_of_which_nothing_is_known():
    class Unknown(ModelFamily):
        family: str = "unknown"

    model = Unknown()
    assert (model.num_params, model.mixture, model.longest_sequence) == (None, None, None)
    assert (model.unit, model.train_flops_per_unit(16)) == ("samples", None)
    assert model.why_only_planned(Comm()) is None
    assert next(model.layout_refusals(ONE.replace(pp=2))).startswith("layout.pp = 2")
