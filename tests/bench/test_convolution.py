"""Convolutions over products: with a clock that knows, and on a real core."""

import pytest
import torch

from paceline.bench.clock import Call, Clock
from paceline.bench.convolution import conv_time
from paceline.comm.ranks import Ranks
from paceline.config.stack import CONSTANTS
from tests.bench.test_host_time import CPU, KNOWN, MEASURED

DEVICE = CPU.replace(curves=MEASURED, peak_flops={"fp32": KNOWN}, memory_bytes_per_s=KNOWN)


class Slow(Clock):
    """Makes each call once, and says that it took so long."""

    said_s = 0.0

    def seconds(self, *calls: Call) -> float:
        for call in calls:
            images, weights = call()
            assert images.shape[1] == weights.shape[1]
            assert images.shape[0] == 16
        return self.said_s


def _found(said_s: float, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(Slow, "said_s", said_s)
    return conv_time(Slow(Ranks()), DEVICE, "fp32", torch.float32)


def test_it_is_the_seconds_of_convolutions_over_those_of_products(monkeypatch: pytest.MonkeyPatch):
    # Sixteen images of 64 x 64: every stage has as many FLOPs, at half of the peak, and what
    # narrow sides cost (`plan.convnet.kernels`).
    product_s = [
        3 * 16 * 2 * 9 * 64**2 * 16**2 / 5e10 * (1 + 8 / width) * (1 + 8 / (9 * width))
        for width in (64, 128, 256, 512)
    ]
    assert _found(0.03, monkeypatch) == pytest.approx(4 * 0.03 / sum(product_s), rel=1e-3)
    bounds = CONSTANTS["conv_time"]
    assert _found(1e-9, monkeypatch) == bounds.low
    assert _found(1e3, monkeypatch) == bounds.high
