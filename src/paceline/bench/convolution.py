"""Convolution: how much longer convolutions take than the matrix products they imply.

The planner takes a convolution for a product of equal FLOPs, times one constant of the software
(`conv_time`). Here is what that constant is: all convolutions of a small ResNet, forward and
backward, over what the planner says of them with a constant of 1. (On CPUs one of few pixels and
many channels takes several times its product, one of many pixels no more than that: measured, 3.9
and 0.9 in fp32 on cores of a Xeon.)
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from paceline.bench.clock import Call, RankTimer
from paceline.config.device import Device
from paceline.config.stack import CONSTANTS, Stack
from paceline.config.vision import Conv, ResNet
from paceline.plan.convnet.kernels import forward_backward_s

_SIDE, _IMAGES = {"cpu": 64, "cuda": 224}, {"cpu": 16, "cuda": 64}


def conv_time(clock: RankTimer, device: Device, precision: str, dtype: torch.dtype) -> float:
    """Measure it; every rank must call it.

    Args:
        clock: measures.
        device: with its measured products.
        precision: of images and weights.
        dtype: the same.

    Returns:
        seconds over those of the products, within the bounds of the constant.
    """
    kind = clock.ranks.device_type
    network = ResNet(depth=18, image_size=_SIDE[kind], num_classes=1)
    plain = Stack(constants={"conv_time": 1.0, "matmul_time": 1.0})
    expected_s, _ = forward_backward_s(
        network, device, plain, precision, np.array([_IMAGES[kind]])
    )  # (2, c, 1)
    convs = network.convolutions
    took_s = {
        conv: clock.seconds(_both_passes(conv, clock.ranks.device, dtype, conv is not convs[0]))
        for conv in dict.fromkeys(convs)
    }
    ratio = sum(took_s[conv] for conv in convs) / float(expected_s.sum())
    bounds = CONSTANTS["conv_time"]
    return min(max(ratio, bounds.low), bounds.high)


def _both_passes(conv: Conv, device: torch.device, dtype: torch.dtype, to_images: bool) -> Call:
    """Forward, and the gradients of weights and, but for the first one, of images."""
    shape = (_IMAGES[device.type], conv.in_channels, conv.in_side, conv.in_side)
    images = torch.randn(shape, device=device, dtype=dtype, requires_grad=to_images)
    kernel = (conv.out_channels, conv.in_channels, conv.kernel, conv.kernel)
    weights = torch.randn(kernel, device=device, dtype=dtype, requires_grad=True)
    wanted = (images, weights) if to_images else (weights,)

    def convolved() -> Tensor:
        return functional.conv2d(images, weights, stride=conv.stride, padding=conv.kernel // 2)

    grad = torch.randn_like(convolved())
    return lambda: torch.autograd.grad(convolved(), wanted, grad)
