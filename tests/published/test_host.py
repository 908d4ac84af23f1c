"""The host's work: counts against networks that exist, its pace against published traces."""

import gzip
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.config.layers import Experts, LatentAttention
from paceline.config.stack import CONSTANTS, Stack
from paceline.models.decoder import Decoder
from paceline.plan.block_kinds import block_kinds_of
from paceline.plan.points import Points
from paceline.plan.price.parts import part_seconds
from paceline.plan.work import block_work
from paceline.published import read_runs
from paceline.published.validate.validate import mean_regrets, validate
from tests.plan.planned import MODEL, layout, setting

DATA = Path(__file__).parents[3] / "shared" / "data"
SMALL = MODEL.replace(num_layers=1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qkv_bias": True},
        {"qk_norm": True},
        {"experts": Experts(num_experts=4, experts_per_token=2, ffn_size=64)},
        {
            "latent": LatentAttention(q_rank=64, kv_rank=64, nope_dim=32, rope_dim=16, v_dim=32),
            "head_dim": 48,
            "num_kv_heads": MODEL.num_heads,
        },
    ],
    ids=["plain", "biases", "norms", "experts", "latent"],
)
def test_the_gradient_of_every_tensor_of_a_block_is_added_up(changes):
    model = SMALL.replace(**changes)
    with torch.device("meta"):
        (block,) = Decoder(model).blocks
    one = setting(model)
    work = block_work(one, Points.of([layout(fsdp=16)], one), block_kinds_of(model)[0])
    learned = [name for name, value in block.named_parameters() if value.requires_grad]
    assert np.max(work.tensors) == len(learned), learned


def host_s(stack: Stack, **settings) -> float:
    one = setting(SMALL, stack=stack)
    points = Points.of([layout(**settings)], one)
    (part,) = part_seconds(one, points, [block_work(one, points, block_kinds_of(SMALL)[0])])
    passes = (part.forward, part.input_grad, part.weight_grad)
    return sum(float(np.max(one.host_s)) for one in passes)


def test_recomputing_takes_the_host_more_than_a_second_forward_pass():
    """Hooks of PyTorch's checkpoint cost more than an autograd function that repeats the block."""
    plain, hooks = host_s(Stack(), fsdp=16), host_s(Stack(), fsdp=16, recompute="full")
    own = host_s(Stack(recompute_stops_early=False), fsdp=16, recompute="full")
    assert 1.3 * plain < own < 0.9 * hooks


def test_scores_in_memory_are_more_kernels_than_fused_attention():
    more = host_s(Stack(attention="unfused"), fsdp=16) - host_s(Stack(), fsdp=16)
    chain = 2 * 6  # casts, scale, mask and so on, forward and backward
    assert more == pytest.approx((1 + 2 + chain) * CONSTANTS["launch_us"].default * 1e-6)


# Of each busy thread in four traces of training step by step, whose hosts don't wait for a device:
# three of NVIDIA's generations, and an AMD one.
LAUNCH_GAPS_US = {
    "a100_8ranks_rank3": [34.66, 55.40],
    "h800_dualpipe_pair": [45.32, 45.52],
    "h100_qwen": [31.61],
    "mi300_resnet_ddp": [26.82, 17.03],
}


def launch_gaps_us(path: Path) -> list[float]:
    """Mean microseconds from one launch of a kernel to the next, of each busy thread."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    starts = defaultdict(list)
    for event in trace["traceEvents"] if isinstance(trace, dict) else trace:
        if event.get("ph") == "X" and "LaunchKernel" in event.get("name", ""):
            starts[event["tid"]].append(float(event["ts"]))
    gaps = [np.diff(sorted(some)) for some in starts.values() if len(some) > 300]
    return [float(some[some < 2000].mean()) for some in gaps]


def test_a_launch_takes_as_long_as_in_traces_of_training_step_by_step():
    found = np.concatenate([*LAUNCH_GAPS_US.values()])
    assert CONSTANTS["launch_us"].default == pytest.approx(float(np.median(found)), rel=0.2)


@pytest.mark.parametrize("name", ["h100_qwen", "h800_dualpipe_pair"])
def test_the_traces_say_what_stands_above(name):
    path = DATA / "traces" / f"{name}.json.gz"
    if not path.exists():
        pytest.skip("no traces in ../shared/data/traces")
    assert launch_gaps_us(path) == pytest.approx(LAUNCH_GAPS_US[name], abs=0.01)


def test_the_ranking_of_layouts_on_one_node_with_nothing_fitted():
    """vTrain's measurements; half of them were looked at when the host's work was counted."""
    path = DATA / "vtrain_a100_single.csv"
    if not path.exists():
        pytest.skip(f"no {path.name} in ../shared/data")
    report = validate(read_runs([path]))
    assert mean_regrets(report.regrets())["vtrain_a100_single"]["mean"] < 0.04
    overall = report.overall()
    assert overall is not None
    assert overall.mean < 0.1
