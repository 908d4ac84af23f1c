"""Convolutional networks as configs: ResNet and EfficientNet, by the shapes of their convolutions.

How it works: a network is a list of `Conv`s, each with its batch norm, activation, residual sum and
squeeze-and-excitation, then a mean over the image and one linear layer. Parameters, FLOPs and bytes
are sums over that list. ResNets are those of torchvision ("v1.5": the 3x3 convolution of a
bottleneck takes the stride), ResNeXt by `groups` and `width_per_group`, wide ones by the width.

FLOP convention as in `paceline.config.model`: 2 per multiply-add, the backward pass twice the
forward, norms and element-wise work nothing. (torchvision's "GFLOPS" are multiply-adds.)

ResNets without squeeze-and-excitation are trained as well (`paceline.models.resnet`); the others
are planned, and trained as modules of your own.

Papers: ResNet https://arxiv.org/abs/1512.03385, ResNeXt https://arxiv.org/abs/1611.05431,
squeeze-and-excitation https://arxiv.org/abs/1709.01507, EfficientNet
https://arxiv.org/abs/1905.11946.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from paceline.config.comm import Comm
from paceline.config.family import ModelFamily
from paceline.config.frozen import Auto, FrozenConfig, Ways, Width
from paceline.config.layers import require
from paceline.config.layout import Layout
from paceline.config.urls import SourceNames


class Conv(NamedTuple):
    """A convolution of a square image with what follows it, batch norm first."""

    in_channels: int
    out_channels: int
    kernel: int
    stride: int
    groups: int
    in_side: int
    """Pixels of a side of the input."""
    activation: Literal["none", "relu", "silu"]
    """After the norm and the sum."""
    adds: bool = False
    """Whether a residual is added before the activation."""
    squeeze: int = 0
    """Channels that squeeze-and-excitation narrows to, after the norm (ResNet) or the activation
    (EfficientNet); 0: there is none."""
    pooled: bool = False
    """Whether a 3x3 maximum with stride 2 follows (the stem of a ResNet)."""
    skips: bool = False
    """Whether it stands beside the others of its block: the projection of the residual."""

    @property
    def out_side(self) -> int:
        """Pixels of a side of the output, with half the kernel as padding."""
        return -(-self.in_side // self.stride)

    @property
    def num_weights(self) -> int:
        """Parameters of the convolution itself, which has no bias."""
        return self.in_channels // self.groups * self.out_channels * self.kernel**2

    @property
    def num_params(self) -> int:
        """With the norm's scale and shift and the two layers of squeeze-and-excitation."""
        excite = 2 * self.squeeze * self.out_channels + self.squeeze
        return (
            self.num_weights
            + 2 * self.out_channels
            + (excite + self.out_channels if self.squeeze else 0)
        )

    @property
    def in_elements(self) -> int:
        """Numbers of one image that it reads."""
        return self.in_channels * self.in_side**2

    @property
    def out_elements(self) -> int:
        """Numbers of one image that it writes."""
        return self.out_channels * self.out_side**2

    @property
    def forward_flops(self) -> int:
        """Of one image, those of squeeze-and-excitation included."""
        products = self.num_weights * self.out_side**2 + 2 * self.squeeze * self.out_channels
        return 2 * products


class _ConvNet(ModelFamily):
    """What all convolutional networks have."""

    has_batch_norms: ClassVar[bool] = True
    takes_images: ClassVar[bool] = True

    image_size: int = Field(224, ge=32, le=65536)
    """Pixels of a side of an image."""
    num_classes: Width = 1000
    """Kinds of image that are told apart: the linear layer's outputs."""

    @property
    def convolutions(self) -> tuple[Conv, ...]:
        """In the order of the forward pass."""
        return _listed(self)

    def _convolutions(self) -> Iterator[Conv]:
        raise NotImplementedError

    @property
    def num_features(self) -> int:
        """Inputs of the linear layer."""
        return self.convolutions[-1].out_channels

    @property
    def num_params(self) -> int:
        """All parameters."""
        head = (self.num_features + 1) * self.num_classes
        return sum(conv.num_params for conv in self.convolutions) + head

    @property
    def forward_flops_per_image(self) -> int:
        """2 per multiply-add of convolutions and linear layers."""
        head = 2 * self.num_features * self.num_classes
        return sum(conv.forward_flops for conv in self.convolutions) + head

    @property
    def train_flops_per_image(self) -> int:
        """Of forward and backward: three times the forward pass."""
        return 3 * self.forward_flops_per_image

    def train_flops_per_unit(self, seq_len: int) -> int:
        """See `train_flops_per_image`."""
        return self.train_flops_per_image


@lru_cache(maxsize=64)
def _listed(network: _ConvNet) -> tuple[Conv, ...]:
    return tuple(network._convolutions())


# Blocks of the four stages; from 50 on they are bottlenecks of three convolutions.
_BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
_EXPANSION = 4
_SQUEEZE_RATIO = 16


class ResNet(_ConvNet):
    """A ResNet, ResNeXt, wide ResNet or SE-ResNet."""

    family: Literal["resnet"] = "resnet"
    """The kind of network."""
    depth: Literal[18, 34, 50, 101, 152] = 50
    """Layers with weights."""
    groups: Ways = 1
    """Groups of the 3x3 convolutions (ResNeXt: 32)."""
    width_per_group: Ways = 64
    """Channels of a group in the first stage (ResNeXt-32x4d: 4; wide: 128)."""
    squeeze_excite: bool = False
    """Whether each block weighs its channels by a summary of the image."""

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Residual blocks of each stage."""
        return _BLOCKS[self.depth]

    @property
    def has_bottlenecks(self) -> bool:
        """Whether a block has three convolutions, not two."""
        return self.depth >= 50

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        require(
            self.has_bottlenecks or (self.groups == 1 and self.width_per_group == 64),
            f"depth = {self.depth} has no bottlenecks, which groups and width_per_group widen; "
            "leave both out or take depth = 50 or more.",
        )
        return self

    def why_only_planned(self, comm: Comm) -> str | None:
        """See `ModelFamily.why_only_planned`."""
        if not self.squeeze_excite:
            return None
        return (
            "model.squeeze_excite = true can be planned, not trained yet: leave it out, or train "
            "your own module with paceline.train."
        )

    def layout_refusals(self, layout: Layout) -> Iterator[str]:
        """Besides: products are convolutions, and batch norms need two values a channel."""
        yield from super().layout_refusals(layout)
        if layout.precision == "fp8":
            yield 'layout.precision = "fp8" has no effect on convolutions: use "bf16" or "fp16".'
        if layout.micro_batch == 1 and self.convolutions[-1].out_side == 1:
            yield (
                f"layout.micro_batch = 1 with model.image_size = {self.image_size} leaves the last "
                "batch norms one value a channel, and statistics need two: raise one of them."
            )

    def _convolutions(self) -> Iterator[Conv]:
        yield Conv(3, 64, 7, 2, 1, self.image_size, "relu", pooled=True)
        channels, side = 64, -(-self.image_size // 4)
        for stage, num_blocks in enumerate(self.num_blocks):
            for block in range(num_blocks):
                stride = 2 if stage and not block else 1
                convs = list(self._block(64 * 2**stage, channels, side, stride))
                yield from convs
                channels, side = convs[-1].out_channels, convs[-1].out_side

    def _block(self, width: int, channels: int, side: int, stride: int) -> Iterator[Conv]:
        """The convolutions of a block; the projection of the residual before the last."""
        deep = self.has_bottlenecks
        out = width * _EXPANSION if deep else width
        inner = width * self.width_per_group // 64 * self.groups if deep else width
        after = -(-side // stride)
        if deep:
            yield Conv(channels, inner, 1, 1, 1, side, "relu")
            yield Conv(inner, inner, 3, stride, self.groups, side, "relu")
        else:
            yield Conv(channels, inner, 3, stride, 1, side, "relu")
        if channels != out:  # then alone is there a stride
            yield Conv(channels, out, 1, stride, 1, side, "none", skips=True)
        squeeze = out // _SQUEEZE_RATIO if self.squeeze_excite else 0
        kernel = 1 if deep else 3
        yield Conv(inner, out, kernel, 1, 1, after, "relu", adds=True, squeeze=squeeze)


class _Stage(NamedTuple):
    """A stage of EfficientNet-B0."""

    expansion: int
    kernel: int
    stride: int
    out_channels: int
    num_blocks: int


_STAGES = (
    *(_Stage(1, 3, 1, 16, 1), _Stage(6, 3, 2, 24, 2), _Stage(6, 5, 2, 40, 2)),
    *(_Stage(6, 3, 2, 80, 3), _Stage(6, 5, 1, 112, 3), _Stage(6, 5, 2, 192, 4)),
    _Stage(6, 3, 1, 320, 1),
)
# Width and depth over those of B0, the paper's compound scaling; the image size is your own.
_SCALES = {
    "b0": (1.0, 1.0),
    "b1": (1.0, 1.1),
    "b2": (1.1, 1.2),
    "b3": (1.2, 1.4),
    "b4": (1.4, 1.8),
    "b5": (1.6, 2.2),
    "b6": (1.8, 2.6),
    "b7": (2.0, 3.1),
}


class EfficientNet(_ConvNet):
    """An EfficientNet (first version)."""

    family: Literal["efficientnet"] = "efficientnet"
    """The kind of network."""
    variant: Literal["b0", "b1", "b2", "b3", "b4", "b5", "b6", "b7"] = "b0"
    """How far the network is scaled up; b4 is made for image_size = 380."""
    wide_squeeze: bool = False
    """Whether squeeze-and-excitation narrows the widened channels, not the block's input, to a
    quarter."""

    def why_only_planned(self, comm: Comm) -> str:
        """See `ModelFamily.why_only_planned`."""
        return (
            'model.family = "efficientnet" can be planned, not trained yet: train your own module '
            "of it with paceline.train."
        )

    def _convolutions(self) -> Iterator[Conv]:
        width, depth = _SCALES[self.variant]
        channels, side = _rounded(32 * width), -(-self.image_size // 2)
        yield Conv(3, channels, 3, 2, 1, self.image_size, "silu")
        for stage in _STAGES:
            out = _rounded(stage.out_channels * width)
            for block in range(math.ceil(stage.num_blocks * depth)):
                stride = 1 if block else stage.stride
                yield from self._block(stage, channels, out, side, stride)
                channels, side = out, -(-side // stride)
        yield Conv(channels, 4 * channels, 1, 1, 1, side, "silu")

    def _block(
        self, stage: _Stage, channels: int, out: int, side: int, stride: int
    ) -> Iterator[Conv]:
        inner = channels * stage.expansion
        if inner != channels:
            yield Conv(channels, inner, 1, 1, 1, side, "silu")
        squeeze = (inner if self.wide_squeeze else channels) // 4
        yield Conv(inner, inner, stage.kernel, stride, inner, side, "silu", squeeze=squeeze)
        adds = stride == 1 and channels == out
        yield Conv(inner, out, 1, 1, 1, -(-side // stride), "none", adds=adds)


def _rounded(channels: float) -> int:
    """The nearest multiple of 8, but never less than nine tenths."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest


ConvNet = ResNet | EfficientNet

SYNTHETIC = "images"
"""The `data.source` of synthetic textures."""


class Images(FrozenConfig):
    """How images in files are read (docs/images.md)."""

    eval_source: SourceNames | None = None
    """What is held out, as `data.source`; None: the part `data.eval_fraction` of that."""
    least_area: float = Field(0.08, gt=0, le=1)
    """Training reads a random part of an image, of at least this share of its area; 1: all of it.
    """
    eval_crop: float = Field(0.875, gt=0, le=1)
    """Evaluation reads the middle square, of this share of the shorter side."""
    flip: bool = True
    """Whether training mirrors every other image, left to right."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of a label that training spreads over all classes alike
    (https://arxiv.org/abs/1512.00567)."""
    workers: Auto | Annotated[int, Field(ge=0, le=1000)] = "auto"
    """Processes of each rank that decode ahead; "auto": some, when that is seen to hold a step up.
    """
