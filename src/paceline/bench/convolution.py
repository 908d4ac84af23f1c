"""Convolution: how much longer convolutions take than the matrix products they imply.

The planner takes a convolution for a product of equal FLOPs, times one constant of the software
(`conv_time`). Here is what that constant is: the 3 x 3 convolutions of a small ResNet, forward and
backward, over what the planner says of them with a constant of 1, all together. (On CPUs one of few
pixels and many channels takes several times its product, one of many pixels no more than that:
measured, 3.9 and 0.9 in fp32 on cores of a Xeon.)
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from paceline.bench.clock import Call, Clock
from paceline.config.device import Device
from paceline.config.stack import CONSTANTS, Stack
from paceline.config.vision import Conv, ResNet
from paceline.plan.convnet.kernels import forward_backward_s

_SIDE, _IMAGES = {"cpu": 64, "cuda": 224}, {"cpu": 16, "cuda": 64}
_KERNEL = 3


def conv_time(clock: Clock, device: Device, precision: str, dtype: torch.dtype) -> float:
    """Measure it; every rank must call it.

    Args:
        clock: measures.
        device: with its measured products.
        precision: of images and weights.
        dtype: the same.

    Returns:
        seconds over the product's, within the bounds of the constant.
    """
    kind = clock.ranks.device_type
    network = ResNet(depth=18, image_size=_SIDE[kind], num_classes=2)
    plain = Stack(constants={"conv_time": 1.0, "matmul_time": 1.0})
    expected, _ = forward_backward_s(network, device, plain, precision, np.array([_IMAGES[kind]]))
    expected_s = dict(zip(network.convolutions, expected.sum(0)[:, 0].tolist(), strict=True))
    shapes = [conv for conv in expected_s if conv.kernel == _KERNEL and conv.stride == 1]
    took_s = [clock.seconds(_both_passes(conv, clock.ranks.device, dtype)) for conv in shapes]
    ratio = sum(took_s) / sum(expected_s[conv] for conv in shapes)
    bounds = CONSTANTS["conv_time"]
    return min(max(ratio, bounds.low), bounds.high)


def _both_passes(conv: Conv, device: torch.device, dtype: torch.dtype) -> Call:
    """Forward, and the gradients of images and weights."""
    sides = (conv.in_side, conv.in_side)
    images = torch.randn(_IMAGES[device.type], conv.in_channels, *sides, device=device, dtype=dtype)
    weights = torch.randn(
        conv.out_channels, conv.in_channels, _KERNEL, _KERNEL, device=device, dtype=dtype
    )
    both = (images.requires_grad_(), weights.requires_grad_())
    grad = torch.randn_like(_convolved(*both))
    return lambda: torch.autograd.grad(_convolved(*both), both, grad)


def _convolved(images: Tensor, weights: Tensor) -> Tensor:
    return functional.conv2d(images, weights, padding=_KERNEL // 2)
