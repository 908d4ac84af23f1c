"""Search: the fewest replicas that keep a promise, the cheapest engine, and why others lose."""

from dataclasses import replace

import pytest

from paceline.config.hardware import Cluster, device
from paceline.config.model import Model
from paceline.config.prices import Prices
from paceline.plan.serving.catalogue import catalogue_costs, key_bytes, num_blocks, shares
from paceline.plan.serving.costs import NOTHING, StepCosts
from paceline.plan.serving.options import ApiPrice
from paceline.plan.serving.search import (
    Asked,
    EnginePlan,
    Fleet,
    _engines,
    _fewest_replicas,
    _simulated,
    find_fleets,
)
from paceline.plan.serving.slo import Slo
from tests.plan.serving.test_measured import MODEL, measured

LLAMA = Model(
    vocab_size=32000, hidden_size=4096, ffn_size=11008, num_layers=32, num_heads=32,
    max_seq_len=4096,
)  # fmt: skip
ASKED = Asked(LLAMA, 8.0, (200, 200), (30, 30), Slo(ttft_s=1.0, tpot_s=0.06), num_requests=60)


def cluster(name="H100-SXM", usd=2.0, nodes=4, devices=8):
    return Cluster(
        device=device(name),
        devices_per_node=devices,
        num_nodes=nodes,
        prices=Prices.parse({"usd_per_device_hour": usd}),
    )


def test_one_replica_less_breaks_the_promise():
    here = measured()
    one = here.costs()
    asked = Asked(MODEL, 3000.0, (60, 60), (30, 30), Slo(ttft_s=0.05), num_requests=400)
    assert asked.rate * one.least_s(60, 30) > 5
    some = Cluster.parse(
        {"device": {"name": here.device, "kind": "cpu"}, "devices_per_node": 50, "num_nodes": 1}
    )
    found = find_fleets(asked, [some], [here])
    best = found.fleets[0]
    assert best.replicas > 6
    assert not asked.slo.broken(best.simulated.served)
    fewer = _simulated(asked, best.engine, asked.rate / (best.replicas - 1))
    assert asked.slo.broken(fewer.served)
    assert best.usd_per_hour is None
    assert best.cost == best.num_devices == min(fleet.num_devices for fleet in found.fleets)


def test_costs_of_nothing_need_a_replica():
    """As fitted to figures of a machine that did something else meanwhile."""
    [engine, *_] = _engines(ASKED, cluster(), ())
    asked = replace(ASKED, rate=1 / 60, slo=Slo(ttft_s=60.0))
    free = replace(engine, costs=StepCosts(NOTHING, NOTHING))
    assert free.costs.least_s(200, 30) == 0
    fleet = _fewest_replicas(asked, free, float("inf"))
    assert isinstance(fleet, Fleet)
    assert fleet.replicas == 1


def test_the_cheapest_of_two_clusters_and_why_others_lose():
    found = find_fleets(ASKED, [cluster(), cluster("A100-80", 0.9), cluster("L4", 0.1)])
    best = found.fleets[0]
    assert [fleet.cost for fleet in found.fleets] == sorted(fleet.cost for fleet in found.fleets)
    assert best.usd_per_hour == pytest.approx(
        best.num_devices * best.engine.cluster.prices.usd_per_device_hour.value
    )
    into, out = best.usd_per_million
    hour = ASKED.rate * 3600 / 1e6
    assert into * hour * 200 + out * hour * 30 == pytest.approx(best.usd_per_hour)
    why = {(one.device, one.why) for one in found.lost}
    assert any("weights take 27" in reason and "L4, tp 1, fp32" in who for who, reason in why)
    assert any("costs more" in reason for _, reason in why)


def test_what_no_replica_can_keep_is_said_of_a_request_alone():
    asked = replace(ASKED, slo=Slo(tpot_s=0.001))
    found = find_fleets(asked, [cluster()])
    assert not found.fleets
    assert all("TPOT is" in one.why and "for a request alone" in one.why for one in found.lost)


def test_a_load_beyond_all_devices_is_refused_by_its_replicas():
    asked = replace(ASKED, rate=100_000.0)
    found = find_fleets(asked, [cluster(nodes=1)])
    assert not found.fleets
    assert all("always full it takes" in one.why for one in found.lost)


def test_rent_pays_where_it_costs_what_the_api_asks():
    found = find_fleets(ASKED, [cluster(nodes=1)], (), ApiPrice(0.5, 1.5))
    best, rent = found.fleets[0], found.rent
    request_usd = (200 * 0.5 + 30 * 1.5) / 1e6
    assert rent.api_usd_per_hour == pytest.approx(8 * 3600 * request_usd)
    assert rent.pays_from == pytest.approx(best.engine.usd_per_hour / 3600 / request_usd)
    assert rent.most_rate >= 8 / best.replicas
    never = find_fleets(ASKED, [cluster(nodes=1)], (), ApiPrice(0.0001, 0.0001)).rent
    assert never.pays_from is None


def test_devices_that_share_a_network_are_quicker_and_hold_more():
    assert shares(LLAMA, 8) == [1, 2, 4, 8]
    assert shares(LLAMA.replace(num_kv_heads=2), 8) == [1, 2]
    here = cluster()
    one, four = (catalogue_costs(LLAMA, here, tp, "bf16", 32, 512) for tp in (1, 4))
    assert four.body(64) < one.body(64)
    assert one.exchange(64) == 0
    assert four.exchange(64) > 0
    assert four.block_s == pytest.approx(one.block_s / 4)
    blocks = [num_blocks(LLAMA, here, tp, "bf16", 32, 512, 64) for tp in (1, 4)]
    assert blocks[1] > 4 * blocks[0]
    # Weights are read once a pass: 13.5 GB at 3.35 TB/s, and what small kernels lose.
    assert 0.004 < one.body(1) < 0.015
    assert key_bytes(LLAMA, "bf16") == 32 * 2 * 4096 * 2


def test_keys_in_8_bits_take_less_memory_and_more_time():
    # A row of 128 numbers takes 128 bytes and a scale.
    assert key_bytes(LLAMA, "bf16", "int8") == 32 * 2 * 32 * (128 + 4)
    shape = (LLAMA, cluster(), 1, "bf16", 32, 512)
    wide, narrow = (num_blocks(*shape, 64, keys) for keys in ("as_weights", "int8"))
    assert narrow == pytest.approx(wide * 256 / 132, rel=1e-3)
    wide, narrow = (catalogue_costs(*shape, keys) for keys in ("as_weights", "int8"))
    assert narrow.block_s == pytest.approx(wide.block_s * (2 + 132 / 256))
    assert narrow.body.seconds == wide.body.seconds


def test_keys_in_8_bits_are_tried_where_wide_ones_have_no_room():
    """13.5 GB of weights on 24 GB leave room for about 30 texts of 460 tokens at 0.5 MB a token."""
    asked = replace(ASKED, num_in=(400, 400), num_out=(60, 60))
    engines = _engines(asked, cluster("L4", nodes=1, devices=1), ())
    found = {
        (engine.form, engine.limits.max_sequences)
        for engine in engines
        if isinstance(engine, EnginePlan)
    }
    wide = {("bf16", count) for count in (16, 64, 256)}
    assert found == wide | {("bf16-kv8", count) for count in (64, 256)}
