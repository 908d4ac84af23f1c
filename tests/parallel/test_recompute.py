"""Recompute: what is kept, what runs again, and that nothing changes (one process, gloo ranks).

The gradients of a small decoder must be those of a decoder that keeps everything: in one process,
with the backward pass split in two as zero-bubble pipelines do, compiled, and in layers whose
parameters are DTensors.
"""

import copy
import shutil
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config.errors import InputError
from paceline.config.model import Model
from paceline.models.decoder import Decoder
from paceline.parallel.ep import expert_layers
from paceline.parallel.recompute import recompute
from tests.parallel.layers import Layers, assert_same_gradients, decoder_loss, decoder_of, gradients
from tests.ranks import run_ranks

LAYERS, SEQ = 3, 8
MODEL = Model(
    vocab_size=31, hidden_size=16, ffn_size=24, num_layers=LAYERS, num_heads=2, num_kv_heads=1,
    max_seq_len=SEQ,
)  # fmt: skip


def _decoder() -> Decoder:
    return decoder_of(MODEL).double()


def _loss(module: nn.Module) -> torch.Tensor:
    return decoder_loss(module, MODEL)


class _Count(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self):
        super().__init__()
        self.runs = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.runs[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _backward_runs(kind, num_layers="all") -> tuple[Decoder, Counter]:
    """A decoder after a backward pass, and the operators that the backward pass ran."""
    decoder = _decoder()
    recompute(decoder, kind, num_layers)
    loss = _loss(decoder)
    with _Count() as count:
        loss.backward()
    return decoder, count.runs


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_gradients_do_not_change(kind):
    exact, _ = _backward_runs("none")
    decoder, _ = _backward_runs(kind)
    assert_same_gradients(decoder, exact)


def test_full_repeats_attention_and_selective_repeats_only_what_is_cheap():
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    none, selective, full = (_backward_runs(kind)[1] for kind in ("none", "selective", "full"))
    assert none[attention] == selective[attention] == 0
    assert full[attention] == LAYERS
    assert none["silu"] == 0
    assert selective["silu"] == full["silu"] == LAYERS
    assert none["mm"] == selective["mm"] < full["mm"]


@pytest.mark.parametrize("num_layers", [0, 1, 2, "all"])
def test_only_the_first_layers_recompute(num_layers):
    exact, _ = _backward_runs("none")
    decoder, runs = _backward_runs("full", num_layers)
    assert runs["silu"] == (LAYERS if num_layers == "all" else num_layers)
    assert_same_gradients(decoder, exact)


def test_less_is_kept():
    def kept(kind):
        decoder = _decoder()
        recompute(decoder, kind)
        sizes = {}

        def pack(tensor):
            sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = _loss(decoder)
        assert loss.requires_grad
        return sum(sizes.values())

    assert kept("full") < kept("none") / 2


def test_a_module_without_layers_is_refused():
    with pytest.raises(InputError, match=r"layout.recompute has nothing to work on: Linear"):
        recompute(nn.Linear(2, 2), "full")


def _normed() -> nn.Sequential:
    torch.manual_seed(2)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Sequential(nn.Tanh(), nn.BatchNorm1d(16))]
    return nn.Sequential(*layers, nn.Linear(16, 4)).double()


def _trained_normed(module: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients and buffers after two micro-batches, the second one under way before the first
    one's backward pass."""
    drawn = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for loss in [module(x).square().mean() for x in drawn]:
        loss.backward()
    buffers = {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): buffer
        for name, buffer in module.named_buffers()
    }
    return {**gradients(module), **buffers}


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_running_statistics_count_a_micro_batch_once(kind):
    exact, module = _trained_normed(_normed()), _normed()
    recompute(module, kind)
    got = _trained_normed(module)
    assert got.keys() == exact.keys()
    assert exact["1.num_batches_tracked"] == 2
    assert all(torch.equal(got[name], exact[name]) for name in exact)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_tokens_of_experts_are_counted_once(kind):
    model = MODEL.replace(experts={"num_experts": 4, "experts_per_token": 2, "ffn_size": 8})
    loads = []
    for each in ("none", kind):
        decoder = Decoder(model)
        decoder.init_weights(torch.Generator().manual_seed(0))
        recompute(decoder, each)
        _loss(decoder).backward()
        loads.append([layer.expert_load.tolist() for layer in expert_layers(decoder)])
    assert loads[0] == loads[1]
    assert sum(loads[0][0]) == 2 * SEQ * 2


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_a_backward_pass_split_in_two(kind):
    """The input's gradient first, the weights' later, for two micro-batches in flight."""
    torch.manual_seed(0)
    exact = Layers(width=8, layers=2)
    split = copy.deepcopy(exact)
    recompute(split, kind)
    inputs = [torch.randn(4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    waiting = []
    for x in inputs:
        exact(x).square().sum().backward()
        copy_of_x = x.detach().requires_grad_()
        output = split(copy_of_x)
        (dx,), groups = stage_backward_input(
            [output], [2 * output.detach()], [copy_of_x], split.parameters()
        )
        assert torch.allclose(dx, x.grad, rtol=0, atol=1e-12)
        waiting.append(groups)
    assert all(p.grad is None for p in split.parameters())
    for groups in waiting:
        stage_backward_weight(split.parameters(), groups)
    assert_same_gradients(split, exact, tolerance=1e-12)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit")  # the compiler's own imports
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # and its looks at inputs
@pytest.mark.parametrize("kind", ["selective", "full"])
def test_compiled_blocks_count_a_micro_batch_once(kind):
    exact, module = _trained_normed(_normed()), _normed()
    recompute(module, kind)
    module[2].compile()
    got = _trained_normed(module)
    assert got.keys() == exact.keys()
    for name, value in exact.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit")  # the compiler's own imports
@pytest.mark.parametrize("kind", ["selective", "full"])
def test_compiled_blocks(kind):
    torch.manual_seed(0)
    exact = Layers(width=8, layers=1)
    compiled = copy.deepcopy(exact)
    recompute(compiled, kind)
    compiled.blocks[0].compile()
    x = torch.randn(4, 8, dtype=torch.float64)
    for module in (exact, compiled):
        module(x).square().sum().backward()
    assert_same_gradients(compiled, exact, tolerance=1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(("kind", "products"), [("selective", 2), ("full", 3)])
def test_compiled_code_keeps_and_repeats_what_eager_code_does(kind, products):
    """The partitioner knows: products in the graph of the backward pass."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    torch._dynamo.reset()
    graphs = []

    def keep(graph, _inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    module = Layers(width=8, layers=1)
    recompute(module, kind)
    backend = aot_autograd(
        fw_compiler=lambda graph, _inputs: make_boxed_func(graph),
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
    )
    module.blocks[0].compile(backend=backend)
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    module(x).square().sum().backward()
    (graph,) = graphs
    runs = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("mm" in operator for operator in runs) == products
    assert "aten.native_layer_norm.default" in runs


def _distributed_layers(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    found = {}
    for kind in ("none", "selective", "full"):
        torch.manual_seed(1)
        block = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8), nn.SiLU()).double()
        module = nn.Sequential(parallelize_module(block, mesh, plan))
        recompute(module, kind)
        loss = module(x).square().sum()
        with _Count() as count:
            loss.backward()
        grads = [p.grad.full_tensor() for p in module.parameters()]
        found[kind] = grads, count.runs["all_reduce"]
    return found


def test_distributed_tensors():
    """Full recompute sends the sum over ranks again; selective has kept it."""
    for found in run_ranks(_distributed_layers, 2):
        exact, sums = found["none"]
        for kind in ("selective", "full"):
            grads, sums_again = found[kind]
            assert all(torch.equal(a, b) for a, b in zip(grads, exact, strict=True))
            assert (sums_again == sums) == (kind == "selective")


class _InPlace(nn.Module):
    def forward(self, x):
        return (x @ x).mul_(x).sin()


def test_a_change_in_place_of_what_is_kept_is_an_error_and_not_a_wrong_gradient():
    module = nn.Sequential(_InPlace())
    recompute(module, "selective")
    x = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r'set layout.recompute to "full"'):
        module(x).sum().backward()
