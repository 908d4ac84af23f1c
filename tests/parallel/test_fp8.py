"""fp8 products, emulated: which layers, how close, and beside every other technique.

One process first, then gloo ranks. What is compared with fp8 in one process must be the same bit by
bit, unless the ranks scale other parts of a weight.
"""

import copy
import importlib.util
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor

from paceline.config.errors import InputError
from paceline.config.model import Model
from paceline.kernels.loss import cross_entropy
from paceline.models.decoder import Decoder
from paceline.parallel.fp8 import to_fp8
from paceline.parallel.offload import offload_activations
from paceline.parallel.recompute import recompute
from paceline.parallel.tp import finish_gradients, tensor_parallel
from tests.parallel.layers import decoder_loss, decoder_of, gradients
from tests.ranks import run_ranks

has_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao"
)
SEQ, BATCH = 16, 2
MODEL = Model(
    vocab_size=64, hidden_size=64, ffn_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
    max_seq_len=SEQ,
)  # fmt: skip


def _decoder(*, fp8: bool) -> Decoder:
    decoder = decoder_of(MODEL)
    if fp8:
        to_fp8(decoder, emulate=True)
    return decoder


def _loss(module: nn.Module, seed: int = 1) -> torch.Tensor:
    return decoder_loss(module, MODEL, seed)


def _swapped(module: nn.Module) -> set[str]:
    return {name for name, m in module.named_modules() if type(m).__name__ == "Float8Linear"}


@has_torchao
def test_the_linear_layers_of_blocks_are_swapped_and_no_parameter_is_touched():
    decoder = _decoder(fp8=False)
    before = dict(decoder.named_parameters())
    linear = {name for name, m in decoder.named_modules() if isinstance(m, nn.Linear)}
    to_fp8(decoder, emulate=True)
    assert _swapped(decoder) == linear - {"head"}
    after = dict(decoder.named_parameters())
    assert list(before) == list(after)
    assert all(p is after[name] for name, p in before.items())


@has_torchao
def test_layers_that_hardware_could_not_multiply_stay():
    block = nn.ModuleDict({"fits": nn.Linear(32, 48), "gate": nn.Linear(32, 1)})
    module = nn.ModuleList([block])
    to_fp8(module, emulate=True)
    assert _swapped(module) == {"0.fits"}


@has_torchao
def test_a_module_without_a_layer_that_fits_is_refused():
    with pytest.raises(InputError, match=r"no block of Sequential has a linear layer .* of 16"):
        to_fp8(nn.Sequential(nn.Linear(8, 8)), emulate=True)


def test_without_torchao_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(InputError, match=r"needs torchao.*pip install 'paceline\[fp8\]'"):
        to_fp8(nn.Sequential(nn.Linear(16, 16)), emulate=True)


@has_torchao
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_close_to_those_in_full_precision(autocast):
    exact, decoder = _decoder(fp8=False), _decoder(fp8=True)
    for module in (exact, decoder):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = _loss(module)
        loss.backward()
    theirs = gradients(exact)
    for name, mine in gradients(decoder).items():
        alike = torch.cosine_similarity(mine.flatten(), theirs[name].flatten(), dim=0)
        assert alike > 0.97, name
        assert not torch.allclose(mine, theirs[name], rtol=1e-3), name


@has_torchao
@pytest.mark.parametrize("technique", ["selective", "full", "offload", "full and offload"])
def test_recompute_and_offload_change_nothing(technique):
    plain, decoder = _decoder(fp8=True), _decoder(fp8=True)
    if technique != "offload":
        recompute(decoder, technique.split()[0])
    if "offload" in technique:
        offload_activations(decoder, torch.device("cpu"))
    for module in (plain, decoder):
        _loss(module).backward()
    theirs = gradients(plain)
    assert all(torch.equal(mine, theirs[name]) for name, mine in gradients(decoder).items())


@has_torchao
@pytest.mark.parametrize("kind", ["none", "full"])
def test_a_backward_pass_split_in_two_changes_nothing(kind):
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(2)))
    to_fp8(plain, emulate=True)
    split = copy.deepcopy(plain)
    recompute(split, kind)
    x = torch.randn(16, 32, requires_grad=True)
    plain(x).square().sum().backward()
    copy_of_x = x.detach().requires_grad_()
    output = split(copy_of_x)
    (dx,), groups = stage_backward_input(
        [output], [2 * output.detach()], [copy_of_x], split.parameters()
    )
    stage_backward_weight(split.parameters(), groups)
    assert torch.equal(dx, x.grad)
    theirs = gradients(plain)
    assert all(torch.equal(mine, theirs[name]) for name, mine in gradients(split).items())


def _sharded(world_size: int):
    """Gradients summed over the ranks' micro-batches; parameters cast to bf16 when gathered."""
    decoder = _decoder(fp8=True)
    mesh = init_device_mesh("cpu", (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in decoder.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(decoder, mesh=mesh, mp_policy=policy)
    _loss(decoder, seed=mesh.get_local_rank()).backward()
    return {name: grad.full_tensor() for name, grad in gradients(decoder).items()}


def _tensor_parallel(world_size: int, sequence_parallel: bool):
    decoder = _decoder(fp8=True)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    tensor_parallel(decoder, decoder.placements(), mesh, sequence_parallel)
    recompute(decoder, "selective", 1)
    tokens = torch.randint(64, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1))
    logits = decoder(tokens[:, :-1])
    assert isinstance(logits, DTensor)
    cross_entropy(logits.full_tensor(), tokens[:, 1:]).backward()
    finish_gradients(decoder)
    return {name: grad.full_tensor() for name, grad in gradients(decoder).items()}


def _ranks(rank: int, world_size: int):
    """In one launch: importing torchao costs a rank more than the steps."""
    return {
        "shards": _sharded(world_size),
        "tp": _tensor_parallel(world_size, False),
        "tp, sequence parallel": _tensor_parallel(world_size, True),
    }


@has_torchao
def test_ranks():
    """Shards compute as one process does; tensor parallel layers are as close to full precision."""
    whole = _decoder(fp8=True).bfloat16()
    sums = {name: torch.zeros(p.shape) for name, p in whole.named_parameters()}
    for seed in range(2):
        _loss(whole, seed).backward()
        for name, grad in gradients(whole).items():
            sums[name] += grad.float() / 2
        whole.zero_grad()
    exact = _decoder(fp8=False)
    _loss(exact).backward()
    theirs = gradients(exact)
    for found in run_ranks(_ranks, 2):
        for name, grad in found["shards"].items():
            assert torch.allclose(grad, sums[name], rtol=1e-5, atol=1e-7), name
        for way in ("tp", "tp, sequence parallel"):
            for name, mine in found[way].items():
                alike = torch.cosine_similarity(mine.flatten(), theirs[name].flatten(), dim=0)
                assert alike > 0.97, (way, name)
                assert not torch.allclose(mine, theirs[name], rtol=1e-3), (way, name)
