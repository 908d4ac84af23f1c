"""Counted adapters against those of the network itself, on one rank and as tp cuts them."""

import numpy as np
import pytest
import torch

from paceline.config.finetune import Finetune
from paceline.config.layout import Layout
from paceline.config.stack import Stack
from paceline.models.adapters import adapt, is_of_adapter
from paceline.models.decoder import Decoder
from paceline.parallel.tp import style_of
from paceline.plan.block_kinds import block_kinds_of
from paceline.plan.adapters import adapters_of_block, expert_adapters_of_block
from paceline.plan.memory.holdings import holdings_of
from paceline.plan.memory.parameter_counts import counts_of, trained_counts
from paceline.plan.points import Points, Setting
from tests.generate.networks import MODELS
from tests.parallel.training import job_of

TARGETS = [("*_proj",), ("attention.*", "ffn.up_proj"), ("blocks.1.*",), ("shared.*", "o_proj")]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("decomposed", [False, True])
def test_adapters_are_as_many_as_the_network_has(kind, targets, decomposed):
    model = MODELS[kind]
    if model.experts is None:
        targets = tuple(each for each in targets if each != "shared.*")
    else:
        model = model.replace(experts=model.experts.replace(shared_ffn_size=16))
    factors = "a" if decomposed else "b"
    finetune = Finetune(
        method="lora", rank=3, targets=targets, decomposed=decomposed, factors=factors
    )
    with torch.device("meta"):
        network = Decoder(model)
        adapt(network, finetune)
    styles = network.placements()
    whole, cut = np.zeros(2), np.zeros(2)  # all parameters, those that are trained
    for name, parameter in network.named_parameters():
        if is_of_adapter(name):
            is_cut = style_of(name.rpartition(".")[0], styles) in ("column", "summand")
            is_cut = is_cut and not name.endswith("magnitude")
            number = parameter.numel() * np.array([1, parameter.requires_grad])
            cut += number * is_cut
            whole += number * (not is_cut)
    cluster = job_of(2, ("layout.dp=2",)).cluster
    setting = Setting(model, cluster, 32, 4, Stack(), finetune=finetune)
    for tp in (1, 2):
        points = Points.of([Layout(tp=tp)], setting)
        layers = [len(kind.layers) for kind in block_kinds_of(model)]
        for at, trained in enumerate((False, True)):
            of_block = adapters_of_block(setting, points, trained=trained)[:, 0]
            assert layers @ of_block == pytest.approx(cut[at] / tp + whole[at])


@pytest.mark.parametrize("kind", ["experts", "gpt_oss"])
@pytest.mark.parametrize("targets", [("experts.*",), ("q_proj", "blocks.1.*experts.down_proj")])
def test_adapters_of_experts_are_as_many_as_the_network_has(kind, targets):
    model = MODELS[kind]
    finetune = Finetune(method="lora", rank=3, targets=targets)
    with torch.device("meta"):
        network = Decoder(model)
        adapt(network, finetune)
    styles, whole, cut = network.placements(), 0, 0
    for name, parameter in network.named_parameters():
        if is_of_adapter(name) and ".experts." in name:
            is_cut = style_of(name.rpartition(".")[0], styles) == "experts"
            cut, whole = cut + parameter.numel() * is_cut, whole + parameter.numel() * (not is_cut)
    assert cut * whole > 0
    cluster = job_of(2, ("layout.dp=2",)).cluster
    setting = Setting(model, cluster, 32, 4, Stack(), finetune=finetune)
    for layout in (Layout(), Layout(tp=2), Layout(dp=2, ep=2), Layout(dp=2, ep=2, tp=2)):
        points, holdings = Points.of([layout], setting), holdings_of(setting, layout, None)
        of_block = expert_adapters_of_block(setting, points)[:, 0]
        kinds = block_kinds_of(model)
        found = sum(len(kind.layers) * float(n) for kind, n in zip(kinds, of_block, strict=True))
        assert found == pytest.approx((cut / layout.tp + whole) / layout.ep)
        counts = counts_of(setting, points, holdings)
        trained = trained_counts(setting, points, holdings, counts)
        dense = adapters_of_block(setting, points)[:, 0]
        linear = sum(len(kind.layers) * float(n) for kind, n in zip(kinds, dense, strict=True))
        assert float(trained.whole[0, 0]) == pytest.approx(found + linear)


@pytest.mark.parametrize("base", ["nf4", "nf4_double"])
@pytest.mark.parametrize("tp", [1, 2])
def test_matrices_in_4_bits_take_the_bytes_that_the_network_has(base, tp):
    model = MODELS["grouped"].replace(hidden_size=64, head_dim=32, ffn_size=128)
    finetune = Finetune(method="lora", rank=3, targets=("q_proj", "ffn.*"))
    cluster = job_of(2, ("layout.dp=2",)).cluster
    found = {}
    for form in ("dense", base):
        tuned = finetune.replace(base=form)
        with torch.device("meta"):
            network = Decoder(model)
            adapt(network, tuned)
        setting = Setting(model, cluster, 32, 4, Stack(), finetune=tuned)
        layout = Layout(tp=tp)
        points, holdings = Points.of([layout], setting), holdings_of(setting, layout, None)
        counts = counts_of(setting, points, holdings)
        bytes_ = sum(p.nbytes for n, p in network.named_parameters() if "blocks" in n)
        found[form] = 4 * float(counts.whole[0, 0]), bytes_
    counted, there = (dense - narrow for dense, narrow in zip(*found.values(), strict=True))
    assert counted == pytest.approx(there / tp)
    assert there > 0
