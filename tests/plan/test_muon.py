"""What Muon's update costs: the matrices that are counted are those that the runtime steps, and
their products are shared out over the ranks that share the matrices."""

from collections import Counter

import pytest
import torch

from paceline.config.layers import Experts, LatentAttention
from paceline.config.optim import Optim
from paceline.models.decoder import Decoder
from paceline.plan.points import Points
from paceline.plan.price.muon import block_matrices, muon_s
from paceline.plan.price.step import predict
from paceline.train.optimizers import parameter_groups
from tests.plan.planned import EXPERTS, MODEL, layout, setting

LATENT = LatentAttention(q_rank=96, kv_rank=64, nope_dim=32, rope_dim=16, v_dim=24)
SMALL = MODEL.replace(
    num_layers=2, hidden_size=256, ffn_size=512, vocab_size=512,
    num_heads=4, num_kv_heads=2, head_dim=64, max_seq_len=64,
)  # fmt: skip
NETWORKS = {
    "dense": SMALL,
    "two matrices": SMALL.replace(gated=False),
    "latent": SMALL.replace(num_kv_heads=4, latent=LATENT, head_dim=48),
    "experts": SMALL.replace(experts=Experts(**EXPERTS, shared_ffn_size=128, dense_layers=(0,))),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_matrices_are_those_that_muon_steps(name):
    model = NETWORKS[name]
    with torch.device("meta"):
        named = list(Decoder(model).named_parameters())
    stepped = [
        p
        for group in parameter_groups(named, Optim(name="muon"), lambda _: 1.0)
        if group["rule"] == "muon"
        for p in group["params"]
    ]
    counted = Counter()
    for layer in range(model.num_layers):
        for count, *sides in block_matrices(model, layer):
            counted[tuple(sorted(sides))] += count
    found = Counter()
    for p in stepped:
        found[tuple(sorted(p.shape[-2:]))] += p.shape[0] if p.ndim == 3 else 1
    assert counted == found


def test_products_are_shared_out_and_swaps_are_not_free():
    on, stepped = setting(has_muon=True), 1e9
    alone = Points.of([layout()], on)
    shared = Points.of([layout(fsdp=8)], on)
    assert muon_s(on, shared, stepped / 8) < muon_s(on, alone, stepped) / 4
    assert muon_s(on, shared, stepped) > muon_s(on, alone, stepped)


def test_a_step_with_muon_has_them_in_its_optimizer():
    plain, muon = (predict(setting(has_muon=has), layout(fsdp=8)) for has in (False, True))
    assert muon.time_s["optimizer"] > 1.2 * plain.time_s["optimizer"]
    others = plain.time_s.keys() - {"optimizer", "straggler_wait"}
    assert {name: muon.time_s[name] for name in others} == pytest.approx(
        {name: plain.time_s[name] for name in others}
    )
