"""Tensor parallel and sharded data parallel on gloo ranks against one process.

All cases of a number of ranks share one launch. In fp64 to 1e-10, one in fp32 to 1e-5: losses,
gradient norms and gradients of every step, and the parameters after two steps of clipped AdamW,
each over three micro-batches. Then what is sent, and what is never made whole. Pure first, then
one process, then two ranks, then four.
"""

import math
import pickle
from collections import Counter
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from paceline.config.model import Model
from paceline.kernels.loss import cross_entropy
from paceline.models.decoder import Decoder
from paceline.parallel import fsdp, tp, vocabulary
from paceline.parallel.ep import expert_parallel
from tests.ranks import run_ranks

AXES = ("pp", "dp", "fsdp", "tp")
SHAPES = {
    "vocab_size": 72, "hidden_size": 32, "ffn_size": 48, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "max_seq_len": 16, "init_std": 0.2,
}  # fmt: skip
BATCH, SEQ, MICRO_BATCHES, STEPS = 2, 16, 3, 2
PRECISIONS = {torch.float64: 1e-10, torch.float32: 1e-5}
ALSO_IN_FP32 = ("sequence",)
UNEVEN = {"num_kv_heads": 1, "vocab_size": 71, "qk_norm": True, "head_bias": True}
QWEN = {"qk_norm": True, "qkv_bias": True, "tie_embeddings": True}

GPT = {"norm": "layer", "bias": True, "gated": False, "activation": "gelu"}
GPT2 = {**GPT, "positions": "learned", "tie_embeddings": True}
NEOX = {**GPT, "residual": "parallel", "rotary_share": 0.5}
PHI = {**NEOX, "residual": "parallel_shared", "head_bias": True}
GEMMA3 = {
    "norm": "rms_plus_one", "post_norms": True, "qk_norm": True, "scale_embeddings": True,
    "tie_embeddings": True, "activation": "gelu_tanh", "sliding_window": 5, "full_layers": (1,),
    "window_rope_theta": 100.0, "score_width": 12,
}  # fmt: skip
GEMMA2 = {**GEMMA3, "qk_norm": False, "score_cap": 0.5, "logit_cap": 0.5}
GEMMA2.pop("window_rope_theta")
ENCODER = {
    "causal": False, "norm": "layer", "embedding_norm": True, "head_layer": True,
    "head_bias": True, "tie_embeddings": True, "activation": "gelu",
}  # fmt: skip
BERT = {
    **ENCODER, "gated": False, "bias": True, "positions": "learned", "residual": "post_norm",
    "token_types": 2,
}  # fmt: skip
MODERNBERT = {**ENCODER, "norm_bias": False, "sliding_window": 5, "full_layers": (0,)}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "ffn_size": 16}
LATENT = {"kv_rank": 8, "nope_dim": 8, "rope_dim": 4, "v_dim": 8}
SWITCHES = {
    "plain": {},
    "Qwen": QWEN,
    "experts": {"experts": {**EXPERTS, "dense_layers": (0,)}},
    "shared experts": {"experts": {**EXPERTS, "shared_ffn_size": 16, "shared_gate": True}},
    "GPT-2": GPT2,
    "NeoX": NEOX,
    "Phi": PHI,
    "Gemma 2": GEMMA2,
    "Gemma 3": GEMMA3,
    "sinks": {"sinks": True, "bias": True, "sliding_window": 5, "full_layers": (1,)},
    "BERT": BERT,
    "ModernBERT": MODERNBERT,
    "latent": {"num_kv_heads": 4, "latent": LATENT},
    "latent queries": {"num_kv_heads": 4, "latent": {**LATENT, "q_rank": 8}},
}


class Case(NamedTuple):
    """How a Model sits on the ranks."""

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    compile: bool = False
    model: dict = {}  # noqa: RUF012


ON_TWO = {
    "columns": Case(tp=2),
    "sequence": Case(tp=2, sequence_parallel=True),
    "Qwen switches, sequence": Case(tp=2, sequence_parallel=True, model=QWEN),
    "untied, query and key norms": Case(tp=2, sequence_parallel=True, model={"qk_norm": True}),
    "latent": Case(tp=2, sequence_parallel=True, model=SWITCHES["latent queries"]),
    "latent, columns": Case(tp=2, model=SWITCHES["latent"]),
    "experts": Case(tp=2, sequence_parallel=True, model=SWITCHES["experts"]),
    "shared experts": Case(tp=2, model=SWITCHES["shared experts"]),
    "GPT-2, sequence": Case(tp=2, sequence_parallel=True, model=GPT2),
    "Gemma 3, sequence": Case(tp=2, sequence_parallel=True, model=GEMMA3),
    "NeoX, columns": Case(tp=2, model=NEOX),
    "Phi, sequence": Case(tp=2, sequence_parallel=True, recompute="selective", model=PHI),
    "window": Case(tp=2, sequence_parallel=True, model={"sliding_window": 5}),
    "full recompute, sequence": Case(tp=2, sequence_parallel=True, recompute="full", model=QWEN),
    "selective recompute": Case(tp=2, sequence_parallel=True, recompute="selective"),
    "one key head, odd vocabulary": Case(tp=2, sequence_parallel=True, model=UNEVEN),
    "one key head, columns, compiled": Case(tp=2, compile=True, model={"num_kv_heads": 1}),
    "shards of one": Case(tp=2, zero=3, sequence_parallel=True),
    "zero 3": Case(fsdp=2, zero=3, model=QWEN),
    "replicas of shards of one": Case(dp=2, zero=1),
}
ON_FOUR = {
    "sequence": Case(tp=4, sequence_parallel=True, model={"num_kv_heads": 4, **QWEN}),
    "shared key heads": Case(tp=4, recompute="selective", model={"vocab_size": 70}),
    "shared key heads, Qwen": Case(tp=4, sequence_parallel=True, model=QWEN),
    "one key head, odd vocabulary": Case(tp=4, model={**UNEVEN, "tie_embeddings": True}),
    "zero 3, one key head, odd vocabulary": Case(fsdp=2, tp=2, zero=3, model=UNEVEN),
    "zero 2": Case(fsdp=2, tp=2, zero=2, recompute="selective"),
    "zero 3": Case(fsdp=2, tp=2, zero=3, sequence_parallel=True, model=QWEN),
    "zero 3, Phi": Case(fsdp=2, tp=2, zero=3, sequence_parallel=True, model=PHI),
    "zero 3, recompute": Case(fsdp=2, tp=2, zero=3, recompute="full"),
    "replicas, each micro-batch reduced": Case(dp=2, tp=2, zero=2),
    "hsdp, zero 3": Case(dp=2, fsdp=2, zero=3),
}


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_placements_name_every_module_with_parameters(switches):
    model = Model(**SHAPES | switches)
    with torch.device("meta"):
        network = Decoder(model)
    styles = {name: tp.style_of(name, network.placements()) for name, _ in network.named_modules()}
    with_parameters = {
        name for name, module in network.named_modules() if list(module.parameters(recurse=False))
    }
    absent = {name for name, module in network.named_modules() if isinstance(module, nn.Identity)}
    named = {n for n, s in styles.items() if s not in (None, "input", "layer", "key_heads")}
    assert with_parameters == named - absent


def test_a_star_is_any_number_and_a_name_goes_before_it():
    styles = {"blocks.*.ffn": "input", "blocks.3.ffn": "layer"}
    names = ("blocks.11.ffn", "blocks.3.ffn", "blocks.ffn", "blocks.1.ffn.up_proj")
    assert [tp.style_of(name, styles) for name in names] == ["input", "layer", None, None]


def _batch(step, number, data_rank):
    seed = (step * MICRO_BATCHES + number) * 10 + data_rank
    tokens = torch.randint(70, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].clone()
    targets[0, :3] = -100
    return tokens[:, :-1], targets


def _optimizer(net):
    # A large epsilon: Adam divides by the size of a gradient, and would turn the rounding of one
    # that is nearly zero into a visible step.
    return torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4, fused=True)


def _clip(net):
    grads = [p.grad for p in net.parameters()]
    norm = nn.utils.get_total_norm(grads)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    nn.utils.clip_grads_with_norm_(net.parameters(), 0.5, norm)
    return norm.item()


def _whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@cache
def _serial(model, dtype, num_data_ranks):
    """What one process sees: losses, norms, gradients of the first step, parameters."""
    net = Decoder(model).to(dtype)
    net.init_weights(torch.Generator().manual_seed(7))
    optimizer = _optimizer(net)
    losses, norms, grads = [], [], {}
    for step in range(STEPS):
        total = 0.0
        for number in range(MICRO_BATCHES):
            for data_rank in range(num_data_ranks):
                tokens, targets = _batch(step, number, data_rank)
                loss = cross_entropy(net(tokens), targets)
                (loss / MICRO_BATCHES / num_data_ranks).backward()
                total += loss.item() / MICRO_BATCHES / num_data_ranks
        grads = grads or {name: p.grad.clone() for name, p in net.named_parameters()}
        losses.append(total)
        norms.append(_clip(net))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, grads, dict(net.named_parameters())


def _build(case, mesh, dtype):
    model = Model(**SHAPES | case.model)
    with torch.device("meta"):
        net = Decoder(model).to(dtype)
    if case.tp > 1:
        tp.tensor_parallel(net, net.placements(), mesh["tp"], case.sequence_parallel)
        expert_parallel(net, mesh["tp"])
    _recompute(net, case.recompute)
    if case.compile:
        for block in net.blocks.children():
            block.compile(backend="aot_eager", fullgraph=True)
    if case.zero:
        axes = mesh["dp", "fsdp"] if case.dp > 1 else mesh["fsdp"]
        blocks = net.blocks.children()
        fsdp.shard(net, blocks, axes, case.zero, MixedPrecisionPolicy(), OffloadPolicy())
    net.to_empty(device="cpu")
    net.init_weights(torch.Generator().manual_seed(7))
    return net


def _recompute(net, how):
    options = {}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    if how != "none":
        for name, block in list(net.blocks.named_children()):
            net.blocks.register_module(name, checkpoint_wrapper(block, **options))


def _keep_products(_context, operator, *_args, **_kw):
    kept = operator in (torch.ops.aten.mm.default, torch.ops._c10d_functional.all_reduce.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _pass(net, case, step, number, data_rank):
    """Forward and backward of a micro-batch."""
    if isinstance(net, FSDPModule):
        is_last = number == MICRO_BATCHES - 1
        fsdp.prepare_micro_batch(net, case.zero, is_last, reduces=is_last or case.zero > 1)
    tokens, targets = _batch(step, number, data_rank)
    loss_of = vocabulary.cross_entropy if case.tp > 1 else cross_entropy
    loss = loss_of(net(tokens), targets) / MICRO_BATCHES
    loss.backward()
    return loss.detach()


def _parallel(case, mesh, dtype):
    net = _build(case, mesh, dtype)
    optimizer = _optimizer(net)
    data_rank = mesh["dp"].get_local_rank() * case.fsdp + mesh["fsdp"].get_local_rank()
    losses, norms, grads = [], [], {}
    for step in range(STEPS):
        parts = [_pass(net, case, step, number, data_rank) for number in range(MICRO_BATCHES)]
        tp.finish_gradients(net)
        for p in net.parameters():
            assert getattr(p, "placements", 0) == getattr(p.grad, "placements", 0)
        total = torch.stack(parts).sum() / (dist.get_world_size())
        dist.all_reduce(total)
        losses.append(total.item())
        grads = grads or {name: _whole(p.grad) for name, p in net.named_parameters()}
        norms.append(_clip(net))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # an evaluation in between changes nothing
            net(_batch(0, 0, 0)[0])
        fsdp.free_gathered(net)
        assert all(isinstance(p, DTensor) for p in net.parameters()), "left gathered"
    return losses, norms, grads, {name: _whole(p) for name, p in net.named_parameters()}


def _wanted(name, case):
    """By precision: what one process gets."""
    model = Model(**SHAPES | case.model)
    return {dtype: _serial(model, dtype, case.dp * case.fsdp) for dtype in _precisions(name)}


def _precisions(name):
    return tuple(PRECISIONS) if name in ALSO_IN_FP32 else (torch.float64,)


def _differences(case, mesh, serial):
    """By precision: the largest difference from one process, relative to 1 + the value."""
    worst = {}
    for dtype, wanted in serial.items():
        got = _parallel(case, mesh, dtype)
        assert min(wanted[1]) > 0.5, "clipping must have had something to do"
        pairs = [*zip(got[0] + got[1], wanted[0] + wanted[1], strict=True)]
        for mine, theirs in zip(got[2:], wanted[2:], strict=True):
            mine = {n.replace("_checkpoint_wrapped_module.", ""): t for n, t in mine.items()}
            mine = {n.replace("_orig_mod.", ""): t for n, t in mine.items()}
            assert mine.keys() == theirs.keys()
            pairs += [(mine[name], theirs[name]) for name in theirs]
        worst[dtype] = max(_difference(a, b) for a, b in pairs)
    return worst


def _difference(a, b):
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return ((a - b).abs() / (1 + b.abs())).max().item()


def _differences_on(num_ranks, cases):
    """Of each rank, by case. One process's results are made here, once, and sent as bytes."""
    serial = pickle.dumps({name: _wanted(name, case) for name, case in cases.items()})
    return run_ranks(_run_cases, num_ranks, cases, serial)


def _run_cases(rank, world_size, cases, serial):
    results, meshes, wanted = {}, {}, pickle.loads(serial)
    for name, case in cases.items():
        sizes = (1, case.dp, case.fsdp, case.tp)
        if sizes not in meshes:
            meshes[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
        results[name] = _differences(case, meshes[sizes], wanted[name])
    return results


@pytest.fixture(scope="module")
def on_two():
    return _differences_on(2, ON_TWO)


@pytest.fixture(scope="module")
def on_four():
    return _differences_on(4, ON_FOUR)


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_equal_one(name, on_two):
    _assert_small(name, on_two)


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_equal_one(name, on_four):
    _assert_small(name, on_four)


def _assert_small(name, results):
    for result in results:
        assert tuple(result[name]) == _precisions(name)
        assert all(off < PRECISIONS[dtype] for dtype, off in result[name].items()), result[name]


SENT = {
    "columns": ON_TWO["columns"],
    "sequence": ON_TWO["sequence"],
    "replicas": ON_TWO["replicas of shards of one"]._replace(zero=3),
} | {f"zero {zero}": Case(fsdp=2, zero=zero) for zero in (1, 2, 3)}
NUM_UNITS = SHAPES["num_layers"] + 1  # each block, and the rest


def _sent(rank, world_size):
    """For each case, in a step after the first: by collective, the number and their elements."""
    results = {}
    for name, case in SENT.items():
        sizes = (1, case.dp, case.fsdp, case.tp)
        net = _build(case, init_device_mesh("cpu", sizes, mesh_dim_names=AXES), torch.float32)
        for _ in range(2):
            with torch.profiler.profile(record_shapes=True) as recorded:
                for number in range(MICRO_BATCHES):
                    _pass(net, case, 0, number, 0)
                tp.finish_gradients(net)
            net.zero_grad()
        calls = [event for event in recorded.events() if event.name in COLLECTIVES]
        results[name] = (
            Counter(COLLECTIVES[call.name] for call in calls),
            sum((_elements(call) for call in calls), Counter()),
        )
    return results


COLLECTIVES = {
    "c10d::_allgather_base_": "gather",  # FSDP2's; the first two arguments are whole and part
    "c10d::_reduce_scatter_base_": "scatter",  # part and whole
    "_c10d_functional::all_gather_into_tensor": "gather",  # DTensor's; part
    "_c10d_functional::reduce_scatter_tensor": "scatter",  # whole
    "c10d::allreduce_": "reduce",  # everyone's; says no shapes
}


def _elements(call):
    """Of the whole."""
    sizes = [torch.Size(shape).numel() for shape in call.input_shapes[:2] if shape]
    times = 2 if call.name.endswith("into_tensor") else 1
    return Counter({COLLECTIVES[call.name]: times * max(sizes)} if sizes else {})


@pytest.fixture(scope="module")
def sent():
    return run_ranks(_sent, 2)[0]


@pytest.mark.parametrize(("zero", "gathers", "scatters"), [(1, 1, 1), (2, 1, 3), (3, 3, 3)])
def test_zero_sends_what_its_degree_says(zero, gathers, scatters, sent):
    """Three micro-batches; zero 3 gathers blocks again for the backward pass."""
    with torch.device("meta"):
        net = Decoder(Model(**SHAPES))
    num_params, num_block_params = (
        sum(p.numel() for p in part.parameters()) for part in (net, net.blocks)
    )
    number, elements = sent[f"zero {zero}"]
    again = MICRO_BATCHES if zero == 3 else 0
    assert number["gather"] == NUM_UNITS * gathers + (NUM_UNITS - 1) * again
    assert number["scatter"] == NUM_UNITS * scatters
    assert number["reduce"] == 0
    assert elements["gather"] == num_params * gathers + num_block_params * again
    assert elements["scatter"] == num_params * scatters


def test_replicas_add_up_once_a_step(sent):
    number, _ = sent["replicas"]
    assert number == {"reduce": NUM_UNITS}


def test_a_layer_sends_at_its_two_ends_only(sent):
    """Attention and feed-forward: one collective at each end, and as many backward.

    Embedding and head have one each, forward and backward; a loss sends two (maxima and sums).
    """
    ends = MICRO_BATCHES * (SHAPES["num_layers"] * 4 + 2)
    stream = BATCH * SEQ * SHAPES["hidden_size"]
    number, _ = sent["columns"]
    assert number == {"reduce": ends + 2 * MICRO_BATCHES}
    number, elements = sent["sequence"]
    # One more: the gradients of the norms, once a step.
    assert number == {"gather": ends, "scatter": ends, "reduce": 2 * MICRO_BATCHES + 1}
    assert elements == {"gather": ends * stream, "scatter": ends * stream}


class _LocalShapes(TorchDispatchMode):
    """Collects the sizes of all plain tensors that operators make on this rank."""

    def __init__(self):
        super().__init__()
        self.sizes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with plain tensors comes here later
        results = function(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            # DTensor tries each operator on whole tensors without memory to learn shapes.
            if isinstance(result, torch.Tensor) and not isinstance(result, FakeTensor):
                self.sizes.update(result.shape)
        return results


def _local_sizes(rank, world_size, model):
    case = Case(tp=2, sequence_parallel=True, model=model)
    net = _build(case, init_device_mesh("cpu", (1, 1, 1, 2), mesh_dim_names=AXES), torch.float32)
    with _LocalShapes() as seen:
        _pass(net, case, 0, 0, 0)
    return seen.sizes


@pytest.mark.parametrize("model", [{}, QWEN], ids=["untied", "tied"])
def test_the_vocabulary_is_never_whole_on_a_rank(model):
    """Neither logits nor the embedding's table, nor a gradient of them."""
    for sizes in run_ranks(_local_sizes, 2, model):
        assert SHAPES["vocab_size"] not in sizes
        assert SHAPES["vocab_size"] // 2 in sizes


def test_traced_blocks_equal_one_process():
    """Without the code generation of torch.compile, which takes minutes here."""
    case = Case(tp=2, sequence_parallel=True, compile=True, model={"num_layers": 1, **QWEN})
    _assert_small("traced", _differences_on(2, {"traced": case}))


def _loss_of_forbidden_ids(rank: int, world_size: int) -> float:
    """Each rank's first id is impossible: its logit is -inf."""
    logits = torch.zeros(1, 3, 8)
    logits[..., [0, 4]] = -torch.inf
    mesh = init_device_mesh("cpu", (world_size,))
    spread = distribute_tensor(logits, mesh, [Shard(-1)])
    return float(vocabulary.cross_entropy(spread, torch.tensor([[1, 2, 7]])))


def test_an_impossible_id_of_another_rank_leaves_the_loss_finite():
    assert run_ranks(_loss_of_forbidden_ids, 2) == pytest.approx([math.log(6)] * 2)
