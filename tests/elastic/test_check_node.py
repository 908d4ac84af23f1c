"""A machine that is taken in: right to the bit, and as fast as the Cluster says, or nearly."""

import time

import pytest
import torch

from paceline.config.curves import DeviceCurves, MatmulCurve
from paceline.config.figure import Figure
from paceline.config.hardware import Cluster, Tier
from paceline.elastic import check_node
from tests.parallel.training import CPU


def _cluster(**known):
    curve = MatmulCurve(m=(512.0,), n=(512.0,), k=(512.0,), share=(1.0,), source="a test")
    device = CPU.replace(curves=DeviceCurves(matmul={"fp32": curve}), **known)
    return Cluster(device=device, devices_per_node=2, num_nodes=2)


def _figure(value):
    return Figure(value=value, origin="cited", source="a test")


def test_the_known_product_is_the_product():
    x, y, product = check_node.known_factors(100)
    assert torch.equal(x.double() @ y.double(), product.double())
    assert len(product.unique()) > 50


def test_a_machine_as_it_should_be_is_taken_in():
    known = _cluster(peak_flops={"fp32": _figure(1e6)}, memory_bytes_per_s=_figure(1e5))
    assert check_node.check_apart(known, "fp32", 2) is None
    unknown = Cluster(device=CPU, devices_per_node=2, num_nodes=2)
    assert check_node.check_devices(unknown, "fp32", 2) is None


@pytest.mark.parametrize(
    ("known", "what"),
    [
        ({"peak_flops": {"fp32": _figure(1e18)}}, "a product in fp32 runs at"),
        ({"memory_bytes_per_s": _figure(1e18)}, "moving memory runs at"),
    ],
)
def test_a_slow_one_is_refused_with_what_is_required(known, what):
    sentence = check_node.check_devices(_cluster(**known), "fp32", 2)
    assert what in sentence
    assert "that the Cluster says; at least 50% is required" in sentence


def test_one_wrong_bit_is_refused(monkeypatch):
    right = check_node.known_factors

    def wrong(size):
        x, y, product = right(size)
        product.view(torch.int32)[3, 5] ^= 1
        return x, y, product

    monkeypatch.setattr(check_node, "known_factors", wrong)
    sentence = check_node.check_devices(_cluster(), "fp32", 2)
    assert sentence.endswith("a product of whole numbers has 1 wrong values of 262144")


def _die(*_arguments):
    raise SystemExit(3)


def _hang(*_arguments):
    time.sleep(600)


@pytest.mark.parametrize(
    ("answer", "sentence"), [(_die, "ended by itself"), (_hang, "did not end in 2 s")]
)
def test_a_check_that_does_not_end_well_is_a_refusal(answer, sentence, monkeypatch):
    monkeypatch.setattr(check_node, "_answer", answer)
    monkeypatch.setattr(check_node, "_LIMIT_S", 2.0 if answer is _hang else 60.0)
    assert sentence in check_node.check_apart(_cluster(), "fp32", 2)


def _tier(bytes_per_s):
    return Tier(
        name="ethernet", num_devices=4, latency_s=_figure(1e-5), bytes_per_s=_figure(bytes_per_s)
    )


def _slow(block):
    time.sleep(0.5)
    return block


def _gone(_block):
    raise check_node.NeighbourGoneError


def _broken(_block):
    raise ConnectionResetError(104, "Connection reset by peer")


@pytest.mark.parametrize(
    ("transfer", "bytes_per_s", "sentence"),
    [
        (lambda block: block, 1.0, None),
        (_slow, 1e18, "a transfer with a neighbour runs at"),
        (_gone, 1.0, None),
        (lambda block: block[:-1] + b"\0", 1.0, "came back from a neighbour with other bits"),
        (_broken, 1.0, "failed (Connection reset by peer)"),
    ],
)
def test_a_neighbour_gets_and_gives_what_was_sent(transfer, bytes_per_s, sentence):
    cluster = _cluster().replace(tiers=(_tier(bytes_per_s),))
    found = check_node.check_transfer(cluster, transfer)
    assert found is None if sentence is None else sentence in found
