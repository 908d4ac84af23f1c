"""Convolutions over products: with a clock that knows, and on a real core."""

from typing import ClassVar

import pytest
import torch

from paceline.bench.clock import Call, RankTimer
from paceline.bench.convolution import conv_time
from paceline.comm.rendezvous import Ranks
from paceline.config.stack import CONSTANTS
from paceline.config.vision import ResNet
from tests.bench.test_host_time import CPU, KNOWN, MEASURED

DEVICE = CPU.replace(curves=MEASURED, peak_flops={"fp32": KNOWN}, memory_bytes_per_s=KNOWN)


class Slow(RankTimer):
    """Makes each call once, and says that it took so long."""

    said_s = 0.0
    given: ClassVar[list[list[tuple[int, ...]]]] = []

    def seconds(self, *calls: Call) -> float:
        self.given += [[gradient.shape for gradient in call()] for call in calls]
        return self.said_s


def _found(said_s: float, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(Slow, "said_s", said_s)
    monkeypatch.setattr(Slow, "given", [])
    return conv_time(Slow(Ranks()), DEVICE, "fp32", torch.float32)


def test_it_is_the_seconds_of_convolutions_over_those_of_products(monkeypatch: pytest.MonkeyPatch):
    once = _found(0.02, monkeypatch)
    first, *others = Slow.given
    assert first == [(64, 3, 7, 7)]  # nobody asks for the gradient of the pictures
    assert ([16, 64, 16, 16], [128, 64, 3, 3]) in [tuple(map(list, each)) for each in others]
    # Twenty convolutions: half of the peak for 3 x 0.29 GFLOP of an image, less the stem's third,
    # and what narrow sides cost (`plan.convnet.kernels`).
    network = ResNet(depth=18, image_size=64, num_classes=1)
    stem = 2 * 3 * 64 * 7**2 * 32**2
    flops = 16 * (3 * network.forward_flops_per_image - stem)
    assert once == pytest.approx(20 * 0.02 / (flops / 5e10), rel=0.2)
    assert once < 20 * 0.02 / (flops / 5e10)
    assert _found(0.022, monkeypatch) == pytest.approx(1.1 * once)
    bounds = CONSTANTS["conv_time"]
    assert _found(1e-9, monkeypatch) == bounds.low
    assert _found(1e3, monkeypatch) == bounds.high
