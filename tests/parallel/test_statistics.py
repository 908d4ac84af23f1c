"""Batch norms of a person's own module on several ranks: their statistics, and their types.

A ResNet's are in tests/train/test_resnet.py.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.comm.mesh import build_meshes
from paceline.comm.rendezvous import Ranks
from paceline.config.comm import Comm
from paceline.config.errors import InputError
from paceline.parallel.apply import apply
from paceline.parallel.statistics import RunningStatistics, synchronise
from tests.parallel.training import job_of
from tests.ranks import run_ranks


class _OwnNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over_pixels = nn.BatchNorm1d(3, momentum=None)
        self.plain = nn.BatchNorm1d(5, affine=False)
        self.layers = nn.Sequential(nn.Linear(12, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(self.layers(self.over_pixels(x).flatten(1)))


def _own_norms(rank: int, num_ranks: int) -> tuple[dict, dict]:
    """Gradients of the mean loss of all ranks, and buffers, after two passes."""
    torch.manual_seed(0)
    module = _OwnNorms().double()
    synchronise(module, is_alone=num_ranks == 1)
    drawn = torch.randn(2, 6, 3, 4, dtype=torch.float64).tensor_split(num_ranks, dim=1)[rank]
    for x in drawn:
        (module(x).sigmoid().square().mean() / num_ranks).backward()
    if num_ranks > 1:
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad)
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return gradients, dict(module.named_buffers())


def test_own_norms_of_any_form_are_synchronised():
    alone = _own_norms(0, 1)
    for of_rank in run_ranks(_own_norms, 3):
        for got, wanted in zip(of_rank, alone, strict=True):
            assert got.keys() == wanted.keys()
            for name, value in wanted.items():
                torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=name)


def test_synchronising_a_module_without_batch_norms_is_refused():
    with pytest.raises(InputError, match=r"layout.sync_batch_norm = true has nothing to work on"):
        synchronise(nn.Linear(2, 2), is_alone=True)
    with pytest.raises(InputError, match=r"has no effect on model.family = .decoder."):
        job_of(1, ["layout.sync_batch_norm=true"])


def _narrow(rank: int, num_ranks: int) -> tuple[list[float], list[list[float]]]:
    """Losses of sharded norms in bf16, and their running means once averaged."""
    layout = job_of(num_ranks, ["layout.fsdp=2", "layout.precision=bf16"]).layout
    torch.manual_seed(0)
    meshes = build_meshes(layout, Ranks(rank, num_ranks, rank, num_ranks))
    cpu = torch.device("cpu")
    module = apply(_OwnNorms(), layout, meshes, Comm(), device=cpu)
    losses = []
    for x in torch.randn(2, 6, 3, 4).tensor_split(num_ranks, dim=1)[rank]:
        loss = module(x).float().sigmoid().square().mean()
        loss.backward()
        losses.append(loss.item())
    RunningStatistics(module).average()
    return losses, [module.over_pixels.running_mean.tolist(), module.plain.running_var.tolist()]


def test_sharded_norms_compute_in_16_bits_with_statistics_in_32():
    """Whose averages all ranks have."""
    (losses, kept), (others, same) = run_ranks(_narrow, 2)
    assert all(0.1 < loss < 0.5 for loss in losses + others)
    assert losses != others
    assert kept == same
