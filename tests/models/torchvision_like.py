"""ResNets as `torchvision.models` writes them, for tests of the names that an export gives.

The module tree, its order and its arithmetic are torchvision's (torchvision/models/resnet.py,
BSD-3-Clause): a state of one loads into the other.
"""

from typing import Any

import torch
from torch import Tensor, nn


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inputs: int, planes: int, stride: int, groups: int, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, planes, 3, stride), nn.BatchNorm2d(planes)
        self.relu = nn.ReLU()
        self.conv2, self.bn2 = conv(planes, planes, 3), nn.BatchNorm2d(planes)
        self.downsample = projection(inputs, planes, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs: int, planes: int, stride: int, groups: int, width: int) -> None:
        super().__init__()
        inner, outputs = planes * width // 64 * groups, planes * self.expansion
        self.conv1, self.bn1 = conv(inputs, inner, 1), nn.BatchNorm2d(inner)
        self.conv2 = conv(inner, inner, 3, stride, groups)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = conv(inner, outputs, 1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample = projection(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


def projection(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """With the arguments of torchvision's own."""

    def __init__(
        self, block: Any, layers: list[int], num_classes: int, groups: int, width_per_group: int
    ) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs = 64
        for stage, number in enumerate(layers):
            planes, blocks = 64 * 2**stage, []
            for index in range(number):
                stride = 2 if stage and not index else 1
                blocks.append(block(inputs, planes, stride, groups, width_per_group))
                inputs = planes * block.expansion
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def of_config(config: dict[str, Any]) -> ResNet:
    """The network that an exported config.json states."""
    blocks = {"BasicBlock": BasicBlock, "Bottleneck": Bottleneck}
    names = ("layers", "num_classes", "groups", "width_per_group")
    return ResNet(blocks[config["block"]], **{name: config[name] for name in names})
