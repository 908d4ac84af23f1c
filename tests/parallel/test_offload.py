"""Activation offload: exact, each storage moved once, nothing left behind (one process, ranks).

On a CPU device the copies go from host memory to host memory, through the code that CUDA runs but
for its streams.
"""

import copy
import gc
import shutil

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from paceline.config.errors import InputError
from paceline.config.model import Model
from paceline.models.decoder import Decoder
from paceline.parallel.blocks import blocks_of
from paceline.parallel.offload import host_shards, offload_activations
from paceline.parallel.recompute import recompute
from tests.parallel.layers import Layers, assert_same_gradients, decoder_loss, decoder_of
from tests.ranks import run_ranks

CPU = torch.device("cpu")
LAYERS, SEQ, WIDTH, BATCH = 4, 8, 16, 2
MODEL = Model(
    vocab_size=31, hidden_size=WIDTH, ffn_size=24, num_layers=LAYERS, num_heads=2, num_kv_heads=1,
    max_seq_len=SEQ,
)  # fmt: skip
ACTIVATION_BYTES = BATCH * SEQ * WIDTH * 8


def _decoder() -> Decoder:
    return decoder_of(MODEL).double()


def _loss(module: nn.Module, seed: int = 1) -> torch.Tensor:
    return decoder_loss(module, MODEL, seed)


@pytest.fixture(scope="module")
def exact() -> Decoder:
    decoder = _decoder()
    _loss(decoder).backward()
    return decoder


@pytest.mark.parametrize("kind", ["none", "full"])
def test_gradients_do_not_change_and_everything_is_released(kind, exact):
    decoder = _decoder()
    recompute(decoder, kind)
    traffic = offload_activations(decoder, CPU)
    loss = _loss(decoder)
    assert traffic.num_kept == traffic.num_out >= LAYERS
    loss.backward()
    assert_same_gradients(decoder, exact)
    del loss
    gc.collect()
    assert traffic.num_kept == 0


def test_what_left_the_device_comes_back_once_and_the_newest_blocks_need_not(exact):
    decoder = _decoder()
    traffic = offload_activations(decoder, CPU)
    _loss(decoder).backward()
    # All blocks keep alike, but the first sends what they share (rotations) and stays out longest.
    of_one_block = (traffic.num_out - traffic.num_in) / 2
    assert traffic.num_in == pytest.approx((LAYERS - 2) * of_one_block, abs=2)
    assert 0 < traffic.num_in < traffic.num_out


def _storages_saved(module: nn.Module) -> dict[int, int]:
    """Bytes of each storage that the blocks keep, but for parameters."""
    own = {p.untyped_storage()._cdata for p in module.parameters()}
    sizes: dict[int, int] = {}
    alive = []

    def pack(tensor):
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage.nbytes() >= ACTIVATION_BYTES:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    for placed in blocks_of(module):
        placed.block.register_forward_pre_hook(lambda *_: hooks.__enter__())
        placed.block.register_forward_hook(lambda *_: hooks.__exit__(None, None, None))
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    _loss(module)
    return sizes


def test_a_block_comes_back_before_its_backward_pass_begins():
    decoder = _decoder()
    traffic = offload_activations(decoder, CPU)
    there = {}

    def watch(index, output):
        def note(_grad):
            there[index] = traffic.num_in

        output.register_hook(note)

    for index, placed in enumerate(blocks_of(decoder)):
        placed.block.register_forward_hook(
            lambda _module, _inputs, output, index=index: watch(index, output)
        )
    _loss(decoder).backward()
    assert there[3] == there[2] == 0  # the newest two had not left
    assert 0 < there[1] < there[0]


def test_each_storage_is_sent_once_and_parameters_never():
    """As many as autograd keeps: views, several users and several blocks make no second copy."""
    decoder = _decoder()
    traffic = offload_activations(decoder, CPU, min_bytes=ACTIVATION_BYTES)
    loss = _loss(decoder)
    assert traffic.num_out == len(_storages_saved(_decoder()))
    del loss


def test_small_tensors_stay():
    decoder = _decoder()
    traffic = offload_activations(decoder, CPU, min_bytes=10**9)
    _loss(decoder).backward()
    assert traffic.num_out == 0


def test_an_evaluation_sends_nothing_and_drives_nothing_out():
    counts = []
    for evaluates in (False, True):
        decoder = _decoder()
        traffic = offload_activations(decoder, CPU)
        loss = _loss(decoder)
        with torch.no_grad():
            if evaluates:
                _loss(decoder)
        loss.backward()
        counts.append((traffic.num_out, traffic.num_in))
    assert counts[0] == counts[1]


class _Halves(nn.Module):
    def forward(self, x):
        first, second = x.sigmoid().chunk(2, dim=-1)
        return torch.cat([first.t().sin().t(), first * second], dim=-1)


def test_views_come_back_as_they_were():
    exact = nn.Sequential(*(_Halves() for _ in range(3)))
    module = copy.deepcopy(exact)
    traffic = offload_activations(module, CPU)
    grads = []
    for each in (exact, module):
        x = torch.linspace(-1, 1, 512).view(16, 32).clone().requires_grad_()
        each(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    assert traffic.num_in > 0


class _Changes(nn.Module):
    def forward(self, x):
        y = x.exp()
        return y.add_(1).sin() if self.training else y.clone().add_(1).sin()


def test_a_change_in_place_of_what_is_kept_is_an_error_and_not_a_wrong_gradient():
    module = nn.Sequential(*(_Changes() for _ in range(3)))
    offload_activations(module, CPU)
    x = torch.ones(16, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"changes in place .* shape \(16, 16\)"):
        module[:1](x).sum().backward()
    with pytest.raises(RuntimeError, match=r"changes in place .* shape \(16, 16\)"):
        module(x)  # noticed when the device copy is given up
    module.eval()(x).sum().backward()


def test_several_forward_passes_in_flight():
    """As in a pipeline: the backward passes come later, in the order of the forward passes."""
    exact, decoder = _decoder(), _decoder()
    traffic = offload_activations(decoder, CPU)
    for seed in range(3):
        _loss(exact, seed).backward()
    for loss in [_loss(decoder, seed) for seed in range(3)]:
        loss.backward()
    del loss
    assert_same_gradients(decoder, exact)
    assert traffic.num_kept == 0


@pytest.mark.parametrize("kind", ["none", "full"])
def test_a_backward_pass_split_in_two(kind):
    torch.manual_seed(0)
    exact = Layers()
    split = copy.deepcopy(exact)
    recompute(split, kind)
    traffic = offload_activations(split, CPU)
    x = torch.randn(16, 16, dtype=torch.float64, requires_grad=True)
    exact(x).square().sum().backward()
    copy_of_x = x.detach().requires_grad_()
    output = split(copy_of_x)
    (dx,), groups = stage_backward_input(
        [output], [2 * output.detach()], [copy_of_x], split.parameters()
    )
    assert torch.allclose(dx, x.grad, rtol=0, atol=1e-12)
    stage_backward_weight(split.parameters(), groups)
    assert_same_gradients(split, exact, tolerance=1e-12)
    del output, groups
    gc.collect()
    assert traffic.num_kept == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The .grad attribute")  # the compiler's
@pytest.mark.parametrize("kind", ["none", "full"])
def test_compiled_blocks(kind):
    torch.manual_seed(0)
    exact = Layers()
    compiled = copy.deepcopy(exact)
    recompute(compiled, kind)
    traffic = offload_activations(compiled, CPU)
    for placed in blocks_of(compiled):
        placed.block.compile()
    x = torch.randn(16, 16, dtype=torch.float64)
    for module in (exact, compiled):
        module(x).square().sum().backward()
    assert_same_gradients(compiled, exact, tolerance=1e-12)
    assert traffic.num_out > 0


def test_a_module_without_layers_is_refused():
    with pytest.raises(InputError, match=r"layout.offload has nothing to work on: Linear"):
        offload_activations(nn.Linear(2, 2), CPU)


def _ranks(rank, world_size):
    """Differences of gradients with and without offload, and what was left behind."""
    mesh = init_device_mesh("cpu", (world_size,))
    x = torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}

    def gradients(way, kind="none", offload=False, policy=None):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16), nn.SiLU()).double()
        module = nn.Sequential(block, copy.deepcopy(block), copy.deepcopy(block))
        if way == "tensor":
            for block in module:
                parallelize_module(block, mesh, plan)
        recompute(module, kind)
        traffic = offload_activations(module, CPU) if offload else None
        if way == "shards":
            options = {"offload_policy": policy} if policy else {}
            for block in module:
                fully_shard(block, mesh=mesh, **options)
            fully_shard(module, mesh=mesh, **options)
        module(x).sum().backward()
        if traffic is not None:
            assert traffic.num_out > 0
            assert traffic.num_kept == 0
        return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                for p in module.parameters()]  # fmt: skip

    def off(way, **settings):
        pairs = zip(gradients(way), gradients(way, **settings), strict=True)
        return max((a - b).abs().max().item() for a, b in pairs)

    found = {
        (way, kind): off(way, kind=kind, offload=True)
        for way in ("tensor", "shards")
        for kind in ("none", "full")
    }
    found["parameters on the host"] = off("shards", policy=host_shards(CPU))
    return found


def test_with_distributed_tensors_and_shards():
    for found in run_ranks(_ranks, 2):
        assert found == dict.fromkeys(found, 0.0)
