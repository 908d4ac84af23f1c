"""Counted adapters against those of the network itself, on one rank and as tp cuts them."""

import shutil

import numpy as np
import pytest
import torch
import torch._inductor.config
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from paceline.config.finetune import Finetune
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.stack import Stack
from paceline.models.adapters import adapt, is_of_adapter
from paceline.models.decoder import Decoder
from paceline.parallel.tp import style_of
from paceline.plan.adapters import adapters_of_block, expert_adapters_of_block
from paceline.plan.block_kinds import block_kinds_of
from paceline.plan.memory.holdings import holdings_of
from paceline.plan.memory.parameter_counts import counts_of, trained_counts
from paceline.plan.points import Points, Setting
from paceline.plan.price.data_axes import DataAxes, HeldParameters
from paceline.plan.price.step import predict
from paceline.plan.work import block_work, embedding_work, head_work
from tests.generate.networks import MODELS
from tests.parallel.training import job_of
from tests.plan.planned import layout, setting

TARGETS = [("*_proj",), ("attention.*", "ffn.up_proj"), ("blocks.1.*",), ("shared.*", "o_proj")]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("decomposed", [False, True])
def test_adapters_are_as_many_as_the_network_has(kind, targets, decomposed):
    model = MODELS[kind]
    if model.experts is None:
        targets = tuple(each for each in targets if each != "shared.*")
    else:
        model = model.replace(experts=model.experts.replace(shared_ffn_size=16))
    factors = "a" if decomposed else "b"
    finetune = Finetune(
        method="lora", rank=3, targets=targets, decomposed=decomposed, factors=factors
    )
    with torch.device("meta"):
        network = Decoder(model)
        adapt(network, finetune)
    styles = network.placements()
    whole, cut = np.zeros(2), np.zeros(2)  # all parameters, those that are trained
    for name, parameter in network.named_parameters():
        if is_of_adapter(name):
            is_cut = style_of(name.rpartition(".")[0], styles) in ("column", "summand")
            is_cut = is_cut and not name.endswith("magnitude")
            number = parameter.numel() * np.array([1, parameter.requires_grad])
            cut += number * is_cut
            whole += number * (not is_cut)
    cluster = job_of(2, ("layout.dp=2",)).cluster
    setting = Setting(model, cluster, 32, 4, Stack(), finetune=finetune)
    for tp in (1, 2):
        points = Points.of([Layout(tp=tp)], setting)
        layers = [len(kind.layers) for kind in block_kinds_of(model)]
        for at, trained in enumerate((False, True)):
            of_block = adapters_of_block(setting, points, trained=trained)[:, 0]
            assert layers @ of_block == pytest.approx(cut[at] / tp + whole[at])


@pytest.mark.parametrize("kind", ["experts", "gpt_oss"])
@pytest.mark.parametrize("targets", [("experts.*",), ("q_proj", "blocks.1.*experts.down_proj")])
def test_adapters_of_experts_are_as_many_as_the_network_has(kind, targets):
    model = MODELS[kind]
    finetune = Finetune(method="lora", rank=3, targets=targets)
    with torch.device("meta"):
        network = Decoder(model)
        adapt(network, finetune)
    styles, whole, cut = network.placements(), 0, 0
    for name, parameter in network.named_parameters():
        if is_of_adapter(name) and ".experts." in name:
            is_cut = style_of(name.rpartition(".")[0], styles) == "experts"
            cut, whole = cut + parameter.numel() * is_cut, whole + parameter.numel() * (not is_cut)
    assert cut * whole > 0
    cluster = job_of(2, ("layout.dp=2",)).cluster
    setting = Setting(model, cluster, 32, 4, Stack(), finetune=finetune)
    for each in (Layout(), Layout(tp=2), Layout(dp=2, ep=2), Layout(dp=2, ep=2, tp=2)):
        points, holdings = Points.of([each], setting), holdings_of(setting, each, None)
        of_block = expert_adapters_of_block(setting, points)[:, 0]
        kinds = block_kinds_of(model)
        found = sum(len(kind.layers) * float(n) for kind, n in zip(kinds, of_block, strict=True))
        assert found == pytest.approx((cut / each.tp + whole) / each.ep)
        counts = counts_of(setting, points, holdings)
        trained = trained_counts(setting, points, holdings, counts)
        dense = adapters_of_block(setting, points)[:, 0]
        linear = sum(len(kind.layers) * float(n) for kind, n in zip(kinds, dense, strict=True))
        assert float(trained.whole[0, 0]) == pytest.approx(found + linear)


@pytest.mark.parametrize("base", ["nf4", "nf4_double"])
@pytest.mark.parametrize("tp", [1, 2])
def test_matrices_in_4_bits_take_the_bytes_that_the_network_has(base, tp):
    model = MODELS["grouped"].replace(hidden_size=64, head_dim=32, ffn_size=128)
    finetune = Finetune(method="lora", rank=3, targets=("q_proj", "ffn.*"))
    cluster = job_of(2, ("layout.dp=2",)).cluster
    found = {}
    for form in ("dense", base):
        tuned = finetune.replace(base=form)
        with torch.device("meta"):
            network = Decoder(model)
            adapt(network, tuned)
        setting = Setting(model, cluster, 32, 4, Stack(), finetune=tuned)
        layout = Layout(tp=tp)
        points, holdings = Points.of([layout], setting), holdings_of(setting, layout, None)
        counts = counts_of(setting, points, holdings)
        bytes_ = sum(p.nbytes for n, p in network.named_parameters() if "blocks" in n)
        found[form] = 4 * float(counts.whole[0, 0]), bytes_
    counted, there = (dense - narrow for dense, narrow in zip(*found.values(), strict=True))
    assert counted == pytest.approx(there / tp)
    assert there > 0


# ---- time --------------------------------------------------------------------------------------


def listed_flops(one, points):
    """Of the products of all parts, forward and backward."""
    kinds = block_kinds_of(one.model)
    parts = [(len(kind.layers), block_work(one, points, kind)) for kind in kinds]
    ahead = back = 0.0
    for count, work in [*parts, (1, embedding_work(one, points)), (1, head_work(one, points))]:
        for each in work.products:
            one_way = count * 2 * float((each.m * each.n * each.k)[0])
            ahead += one_way
            back += one_way * (each.passed * work.reached + each.trained)
    return ahead, back


@pytest.mark.parametrize("kind", ["grouped", "window", "gpt2", "gemma2"])
@pytest.mark.parametrize(
    "tuned",
    [
        {},
        {"targets": ("q_proj", "v_proj")},
        {"targets": ("blocks.1.*",)},
        {"factors": "b"},
        {"decomposed": True, "targets": ("attention.*",)},
    ],
)
def test_listed_products_are_those_that_run(kind, tuned):
    """What torch counts in a forward and a backward pass of the network itself, but for attention:
    frozen matrices have one backward product, adapters two, and nothing goes below the first."""
    model = MODELS[kind]
    finetune = Finetune(method="lora", rank=3, **tuned)
    network = Decoder(model)
    adapt(network, finetune)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(model.vocab_size, (2, 16))

    def counted(counter):
        by_name = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
        return sum(n for op, n in by_name.items() if op in ("aten.mm", "aten.addmm"))

    with FlopCounterMode(display=False) as forward:
        logits = network(tokens)
    with FlopCounterMode(display=False) as backward:
        logits.float().square().mean().backward()
    cluster = job_of(1, ()).cluster
    one = Setting(model, cluster, 16, 2, Stack(), finetune=finetune)
    ahead, back = listed_flops(one, Points.of([Layout(micro_batch=2)], one))
    assert ahead == counted(forward)
    assert back == pytest.approx(counted(backward), rel=1e-12)


class Moved(TorchDispatchMode):
    """Bytes that products with a factor and sums read and write, kernel by kernel."""

    def __init__(self):
        super().__init__()
        self.num_bytes, self.kernels = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mul", "mul_", "add", "add_"):
            tensors = [t for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor)]
            self.num_bytes += sum(tensor.nbytes for tensor in tensors)
            self.kernels += 1
        return out


def listed_moves(model, finetune, *, compile=False, seq_len=16):
    """Bytes and kernels forward, then backward, of the blocks' kernels that only move data."""
    one = Setting(model, job_of(1, ()).cluster, seq_len, 2, Stack(), finetune=finetune)
    points = Points.of([Layout(micro_batch=2, compile=compile)], one)
    found = np.zeros((2, 2))
    for kind in block_kinds_of(model):
        for each in block_work(one, points, kind).sweeps:
            moved = [float(np.max(each.num_bytes)), float(np.max(each.kernels))]
            found[int(each.backward)] += len(kind.layers) * np.array(moved)
    return found


FIRST = ("blocks.0.*",)


@pytest.mark.parametrize("kind", ["grouped", "gemma2"])
@pytest.mark.parametrize(
    ("before", "more"),
    [
        (FIRST, ("*_proj",)),
        (FIRST, ("q_proj", "v_proj")),
        (FIRST, ("o_proj",)),
        (FIRST, ("ffn.*",)),
        # Nobody asks for the gradient of what the first block reads.
        (("blocks.0.attention.q_proj",), ("blocks.0.attention.v_proj",)),
    ],
)
def test_listed_sums_are_those_that_run(kind, before, more):
    """What adapters add to bytes and kernels is what runs in the network itself, to the byte."""
    model = MODELS[kind]
    runs, listed = [], []
    for targets in (before, (*before, *more)):
        finetune = Finetune(method="lora", rank=3, targets=targets)
        network = Decoder(model)
        adapt(network, finetune)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        with Moved() as forward:
            loss = network(torch.randint(model.vocab_size, (2, 16))).float().square().mean()
        with Moved() as backward:
            loss.backward()
        runs.append([(each.num_bytes, each.kernels) for each in (forward, backward)])
        listed.append(listed_moves(model, finetune))
    assert listed[1] - listed[0] == pytest.approx(np.subtract(runs[1], runs[0]))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The .grad attribute")  # the compiler's
@torch._inductor.config.patch(fx_graph_cache=False)  # monkeypatch would leave these without value
@torch._functorch.config.patch(enable_autograd_cache=False)
def test_listed_sums_of_compiled_blocks_are_those_that_inductor_schedules(monkeypatch):
    """Bytes of the kernels that it writes itself, forward and backward."""
    kernels = []
    schedule = GraphLowering._update_scheduler

    def counted(graph):
        schedule(graph)
        kernels.extend(
            (graph.is_backward, node.get_read_write_buffers_sizes())
            for node in graph.scheduler.nodes
            if not isinstance(node, ExternKernelSchedulerNode)
        )

    monkeypatch.setattr(GraphLowering, "_update_scheduler", counted)
    sizes = {"hidden_size": 64, "ffn_size": 160, "num_heads": 4, "num_kv_heads": 2}
    model = Model(vocab_size=64, num_layers=2, max_seq_len=128, **sizes)
    runs, listed = [], []
    for targets in (FIRST, (*FIRST, "*_proj")):
        torch._dynamo.reset()
        kernels.clear()
        finetune = Finetune(method="lora", rank=2, targets=targets)
        network = Decoder(model)
        adapt(network, finetune)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        for block in network.blocks:
            block.compile()
        network(torch.randint(64, (2, 128))).float().square().mean().backward()
        runs.append([sum(n for back, n in kernels if back == way) for way in (False, True)])
        listed.append(listed_moves(model, finetune, compile=True, seq_len=128)[:, 0])
    assert listed[1] - listed[0] == pytest.approx(np.subtract(runs[1], runs[0]))


LORA = Finetune(method="lora", rank=16)


def test_backward_is_about_one_forward_rather_than_two():
    """Products alone: a third of the FLOPs of training everything are those of weights."""
    full, tuned = (
        predict(setting(finetune=each), layout(micro_batch=8)) for each in (Finetune(), LORA)
    )
    assert 2 / 3 < tuned.time_s["matmul"] / full.time_s["matmul"] < 0.9
    assert tuned.time_s["optimizer"] < 0.05 * full.time_s["optimizer"]


def test_shards_are_gathered_but_only_adapters_reduced():
    found = {}
    for name, tuned in (("full", Finetune()), ("lora", LORA)):
        one = setting(finetune=tuned)
        points = Points.of([layout(fsdp=8)], one)
        works = [block_work(one, points, kind) for kind in block_kinds_of(one.model)]
        works += [embedding_work(one, points), head_work(one, points)]
        held = HeldParameters([np.full(1, 16.0)], np.ones(1), np.ones(1))
        found[name] = DataAxes(one, points, works, held)
    sent = {
        name: {
            op: sum(float(np.max(r.num_bytes)) for r in axes.requests() if r.op == op)
            for op in ("all_gather", "reduce_scatter")
        }
        for name, axes in found.items()
    }
    assert sent["lora"]["all_gather"] > sent["full"]["all_gather"]  # adapters as well
    assert sent["lora"]["reduce_scatter"] < 0.05 * sent["full"]["reduce_scatter"]
    adapters = float(np.max(found["lora"].num_trained))
    assert float(np.max(found["lora"].num_params)) == pytest.approx(
        float(np.max(found["full"].num_params)) + adapters
    )
    assert float(np.max(found["lora"].num_stepped)) == pytest.approx(adapters / 8)


def test_matrices_in_4_bits_cost_time_and_travel_less():
    dense, narrow = (
        predict(setting(finetune=LORA.replace(base=base)), layout(fsdp=8))
        for base in ("dense", "nf4")
    )
    assert narrow.time_s["other_kernels"] > dense.time_s["other_kernels"]
    assert narrow.time_s["exposed_comm.fsdp"] < dense.time_s["exposed_comm.fsdp"]


def test_the_sooner_the_first_adapter_the_longer_the_backward_pass():
    steps = [
        predict(setting(finetune=LORA.replace(targets=(f"blocks.{layer}.*",))), layout()).step_s
        for layer in (0, 8, 15)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[2] < 0.75 * steps[0]
