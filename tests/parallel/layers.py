"""A network of blocks and nothing else, for what works on blocks."""

from torch import nn


class Layers(nn.Module):
    """A stage in the middle of a pipeline, fp64."""

    def __init__(self, layers=3, width=16):
        super().__init__()
        make = [
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU())
            for _ in range(layers)
        ]
        self.blocks = nn.ModuleList(make).double()

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x
