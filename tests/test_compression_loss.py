"""benchmarks/compression_loss.py averages in one process what two ranks send each other."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.compression_loss import NUM_REPLICAS, compressed_mean
from paceline.comm.collectives import wait
from paceline.comm.compress.compressors import compressor_of
from paceline.comm.compress.feedback import BufferPart
from paceline.config.comm import codec
from tests.ranks import run_ranks

SHAPES = {"matrix": (48, 33), "vector": (700,)}
STEPS = 3


def _gradient(step: int, rank: int) -> torch.Tensor:
    """Flat, of rows of very unequal sizes."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    sizes = torch.logspace(-3, 0, 48)[:, None].expand(48, 33).flatten()
    values = torch.randn(48 * 33 + 700, generator=generator)
    return values * torch.cat([sizes, torch.ones(700)])


def _exchanged(rank: int, world_size: int, form: str) -> list[torch.Tensor]:
    """Means of a few steps as ranks really exchange them, with what is owed kept between."""
    parts = [BufferPart(name, torch.Size(shape), True) for name, shape in SHAPES.items()]
    group = dist.group.WORLD
    assert group is not None
    mean = compressor_of(codec(form), group).mean_of(parts, torch.empty(0))
    errors, arrived = torch.zeros(48 * 33 + 700), []
    for step in range(STEPS):
        values = _gradient(step, rank)
        wait(mean.average(values, errors))
        arrived.append(values)
    return arrived


def _simulated(rank: int, world_size: int, form: str) -> list[torch.Tensor]:
    named = {name: nn.Parameter(torch.empty(shape)) for name, shape in SHAPES.items()}
    names, average = compressed_mean(codec(form), named, 1)
    assert names == [*SHAPES]
    return [
        average([_gradient(step, each) for each in range(NUM_REPLICAS)]) for step in range(STEPS)
    ]


@pytest.mark.parametrize("form", ["int8", "int4", "quinary", "onebit"])
def test_one_process_averages_as_two_ranks_do(form):
    first, second = run_ranks(_exchanged, NUM_REPLICAS, form)
    (simulated,) = run_ranks(_simulated, 1, form)
    for mine, other, ours in zip(first, second, simulated, strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(ours, mine, rtol=1e-6, atol=1e-9)
