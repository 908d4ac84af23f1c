"""ResNet: images to the logits of their classes, from the list of convolutions of the config.

Every convolution has a batch norm behind it; norm, residual sum and ReLU are one operator
(`paceline.kernels.batch_norm`), fused on CUDA where `layout.kernels` says so. Statistics are those
of a rank's own micro-batch, unless a norm is given whom it shares them with
(`paceline.parallel.statistics`); evaluation uses the running ones.

Not here: squeeze-and-excitation (planned only).

Papers: https://arxiv.org/abs/1512.03385, grouped convolutions https://arxiv.org/abs/1611.05431.
Shapes and first values are torchvision's ("v1.5": the 3x3 convolution takes the stride).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.vision import Conv, ResNet
from paceline.kernels.batch_norm import batch_norm_act
from paceline.kernels.batch_norm.shared import MeanOverRanks
from paceline.models.shares import assign


class ResNetwork(nn.Module):
    """A ResNet, ResNeXt or wide ResNet."""

    def __init__(self, model: ResNet) -> None:
        super().__init__()
        stem, *others = model.convolutions
        self.stem = ConvNorm(stem)
        self.blocks = nn.ModuleList(Residual(convs) for convs in _by_block(others))
        self.head = nn.Linear(model.num_features, model.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, 3, side, side) -> logits (batch, num_classes)."""
        x = F.max_pool2d(self.stem(images), kernel_size=3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Normal convolutions of deviation sqrt(2 / fan out), norms that change nothing at first.

        The head is uniform within sqrt(1 / inputs), as torch's linear layers are. In place, also on
        a sharded module: give every rank a generator with the same seed.
        """
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                drawn = torch.randn(layer.weight.shape, generator=generator)
                fan_out = drawn[:, 0].numel() // layer.groups
                assign(layer.weight, drawn * (2 / fan_out) ** 0.5)
            elif isinstance(layer, Norm):
                layer.init_weights()
        bound = self.head.in_features**-0.5
        for parameter in self.head.parameters():
            drawn = torch.rand(parameter.shape, generator=generator)
            assign(parameter, (2 * drawn - 1) * bound)


class Residual(nn.Module):
    """The convolutions of a block, around which its input goes on: as it is, or projected."""

    def __init__(self, convs: Sequence[Conv]) -> None:
        super().__init__()
        *inner, last = [conv for conv in convs if not conv.skips]
        self.inner = nn.Sequential(*map(ConvNorm, inner))
        self.last = ConvNorm(last)
        self.project = next((ConvNorm(conv) for conv in convs if conv.skips), None)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, in_channels, side, side) to (batch, out_channels, side / stride, ...)."""
        skipped = x if self.project is None else self.project(x)
        return self.last(self.inner(x), skipped)


class ConvNorm(nn.Module):
    """A convolution, its norm, and what follows in the same pass: residual sum and ReLU."""

    def __init__(self, conv: Conv) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            conv.in_channels,
            conv.out_channels,
            conv.kernel,
            conv.stride,
            padding=conv.kernel // 2,
            groups=conv.groups,
            bias=False,
        )
        self.norm = Norm(conv.out_channels, relu=conv.activation == "relu")

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Map (batch, in_channels, side, side), and a residual of the result's shape."""
        return self.norm(self.conv(x), residual)


class Norm(nn.Module):
    """Batch norm with what follows it."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_channels: int, *, relu: bool) -> None:
        super().__init__()
        self.relu = relu
        self.mean_over_ranks: MeanOverRanks | None = None
        """Whom statistics are shared with in training; None: nobody."""
        self.weight = nn.Parameter(torch.empty(num_channels))
        self.bias = nn.Parameter(torch.empty(num_channels))
        self.register_buffer("running_mean", torch.empty(num_channels))
        self.register_buffer("running_var", torch.empty(num_channels))

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Map (batch, channels, side, side) to the same shape."""
        kept = self.running_mean.dtype  # where shards compute in 16 bits, weights come in them
        return batch_norm_act(
            x,
            residual,
            self.weight.to(kept),
            self.bias.to(kept),
            self.running_mean,
            self.running_var,
            self.training,
            relu=self.relu,
            mean_over_ranks=self.mean_over_ranks,
        )

    @torch.no_grad()
    def init_weights(self) -> None:
        """Scale 1 and shift 0; running statistics of a standard normal input."""
        self.weight.fill_(1)
        self.bias.zero_()
        self.running_mean.zero_()
        self.running_var.fill_(1)


def _by_block(convs: Sequence[Conv]) -> Iterator[list[Conv]]:
    """Each block's convolutions: the last of them is the one that adds."""
    block: list[Conv] = []
    for conv in convs:
        block.append(conv)
        if conv.adds:
            yield block
            block = []


# ---- for others ----------------------------------------------------------------------------------

# Shapes that torchvision has names for: depth, groups, width of a group.
_NAMED = {
    (50, 32, 4): "resnext50_32x4d",
    (101, 32, 8): "resnext101_32x8d",
    (101, 64, 4): "resnext101_64x4d",
    (50, 1, 128): "wide_resnet50_2",
    (101, 1, 128): "wide_resnet101_2",
}


def torchvision_state(model: ResNet, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of `torchvision.models.ResNet`, which computes the same with them.

    Args:
        model: the shapes.
        state: under the names of `ResNetwork.state_dict()`.
    """
    layers = {"stem.conv": "conv1", "stem.norm": "bn1", "head": "fc"}
    inner = [f"inner.{number}" for number in range(2 if model.has_bottlenecks else 1)]
    blocks = (
        f"layer{stage}.{block}"
        for stage, num_blocks in enumerate(model.num_blocks, start=1)
        for block in range(num_blocks)
    )
    for index, block in enumerate(blocks):
        for number, part in enumerate([*inner, "last"], start=1):
            layers[f"blocks.{index}.{part}.conv"] = f"{block}.conv{number}"
            layers[f"blocks.{index}.{part}.norm"] = f"{block}.bn{number}"
        layers[f"blocks.{index}.project.conv"] = f"{block}.downsample.0"
        layers[f"blocks.{index}.project.norm"] = f"{block}.downsample.1"
    parts = ((name.rpartition("."), tensor) for name, tensor in state.items())
    return {f"{layers[layer]}.{kind}": tensor for (layer, _, kind), tensor in parts}


def torchvision_config(model: ResNet) -> dict[str, Any]:
    """The arguments of `torchvision.models.ResNet`, the name of this architecture where it has one,
    and the size of the images that it was trained on."""
    usual = f"resnet{model.depth}" if (model.groups, model.width_per_group) == (1, 64) else None
    name = _NAMED.get((model.depth, model.groups, model.width_per_group), usual)
    return {
        "architecture": name,
        "block": "Bottleneck" if model.has_bottlenecks else "BasicBlock",
        "layers": list(model.num_blocks),
        "num_classes": model.num_classes,
        "groups": model.groups,
        "width_per_group": model.width_per_group,
        "image_size": model.image_size,
    }
