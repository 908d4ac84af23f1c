"""Train your own module: a small ResNet learns to read handwritten digits.

    python recipes/own_model.py

`paceline.train` starts this script once per device. Ranks train inside the call and end there; the
process you started waits, gets the trained weights into its `model`, and goes on: what stands after
the call happens once. Ctrl-C keeps a checkpoint, and the same command goes on from it.

The network is a small one of https://arxiv.org/abs/1512.03385. The 1797 images of 8 x 8 pixels come
with scikit-learn; their origin is https://archive.ics.uci.edu/dataset/80.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("This recipe reads scikit-learn's digits: pip install scikit-learn")

NUM_TRAIN = 1437  # the remaining 360, a fifth, are held out


class Residual(nn.Module):
    """Two convolutions around which the input goes on, halved in size where stride is 2."""

    def __init__(self, num_in: int, num_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)
        same = num_in == num_out and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, num_in, size, size) to (batch, num_out, size / stride, size / stride)."""
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.skip(x) + self.norm2(self.conv2(inner)))


class ResNet(nn.Module):
    """Images of 8 x 8 to the logits of ten digits."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.layers = nn.Sequential(
            Residual(width, width),
            Residual(width, 2 * width, stride=2),
            Residual(2 * width, 2 * width),
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 1, 8, 8) to (batch, 10)."""
        return self.head(self.layers(self.stem(images)).mean(dim=(2, 3)))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images, (1, 8, 8) each, and their digits: those to train on and those held out."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = order[:NUM_TRAIN], order[NUM_TRAIN:]
    train, held_out = (TensorDataset(images[part], labels[part]) for part in parts)
    return train, held_out


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Mean cross-entropy of a batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of the images whose digit is the most likely one."""
    return (model.eval()(images).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    """The essential part."""
    torch.manual_seed(0)
    train, held_out = digits()
    model = ResNet()
    job = {
        "name": "digits",
        "optim": {"lr": 3e-3, "warmup_steps": 20},
        "train": {"steps": 200, "global_batch": 64, "eval_every": 50},
        "checkpoint": {"every": 50},
    }
    paceline.train(job, model=model, loss=loss, data=train, eval_data=held_out)
    print(f"held-out accuracy {accuracy(model, *held_out.tensors):.2%}")


if __name__ == "__main__":
    main()
