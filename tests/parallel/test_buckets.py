"""DDP's buckets as a layout asks for them: on two gloo ranks, by what DDP itself says of them."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.config.layout import Layout
from paceline.parallel.apply import _TAKES_SIZES, _replicate
from tests.ranks import run_ranks

MIB = 1 << 20
LAYER_BYTES = MIB // 4


def _bucket_bytes(rank: int, world_size: int, bucket_mib: float) -> list[int]:
    """After the first backward pass, in the order in which they are reduced."""
    module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
    mesh = SimpleNamespace(get_group=lambda axis: dist.group.WORLD)
    replicas = _replicate(module, Layout(bucket_mib=bucket_mib), mesh, find_unused=False)
    replicas._set_ddp_runtime_logging_sample_rate(1)
    for _ in range(3):
        replicas(torch.ones(2, 256)).sum().backward()
    replicas.logger.set_runtime_stats_and_log()
    told = replicas.logger._get_ddp_logging_data().strs_map["rebuilt_bucket_sizes"]
    return [int(size) for size in told.split(",")]


@pytest.mark.skipif(not _TAKES_SIZES, reason="torch 2.13 brought sizes of single buckets")
def test_the_first_bucket_is_small_and_the_others_are_what_the_layout_says():
    sizes = run_ranks(_bucket_bytes, 2, 2.0)[0]
    assert sizes == [MIB, 2 * MIB, MIB]


def test_buckets_that_are_smaller_anyway_stay_so():
    assert run_ranks(_bucket_bytes, 2, 0.5)[0] == [2 * LAYER_BYTES] * 8
