"""The exchange on CUDA: streams, events and futures, in a group of one rank on NCCL."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.config.comm import Comm, DpComm
from paceline.parallel.replicate import compressed_all_reduce_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def _alone(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "kind", ["bf16", "int8", "fp8", "int4", "quinary", "onebit", "topk:0.1", "powersgd:2"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_arrives_and_what_is_owed_is_what_was_given(kind, dtype):
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).to("cuda", dtype)
    names = {parameter: name for name, parameter in network.named_parameters()}
    module = DistributedDataParallel(network, bucket_cap_mb=1, gradient_as_bucket_view=True)
    exchange = compressed_all_reduce_of(module, names, Comm(dp=DpComm(compress=kind)), 1)
    given = dict.fromkeys(names.values(), 0.0)
    got = dict(given)
    for step in range(STEPS):
        values = torch.randn(512, 256, device="cuda", dtype=dtype)
        exact = torch.autograd.grad(network(values).square().mean(), list(names))
        exchange.begin(step)
        module(values).square().mean().backward()
        exchange.finish()
        for (parameter, name), gradient in zip(names.items(), exact, strict=True):
            given[name] += gradient.float()
            got[name] += parameter.grad.float()
        exchange.after_step(torch.tensor(False, device="cuda"), None)
        module.zero_grad()
    owed = exchange.feedback.state()["0"]
    rounding = 1e-4 if dtype == torch.float32 else 2e-2
    for name, total in given.items():
        left = owed[name].view(total.shape) if name in owed else 0.0
        assert (got[name] + left - total).norm() < rounding * total.norm(), name
    assert exchange.feedback.squared_norm() > 0
