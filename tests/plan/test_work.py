"""The lists of operators. Pure functions: FLOPs and parameters against the Model's own counts, for
drawn networks; what tensor, context and expert parallelism cut and send; kernels by stack.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.comm import Comm
from paceline.config.model import Model
from paceline.config.stack import Stack
from paceline.plan.block_kinds import block_kinds_of
from paceline.plan.points import Points, Setting
from paceline.plan.work import PartWork, block_work, embedding_work, head_work, rows_of_each
from tests.plan.planned import EXPERTS, MODEL, layout, setting


def works(given: Setting, **axes) -> list[tuple[int, PartWork]]:
    """How often each part occurs, and its work."""
    points = Points.of([layout(**axes)], given)
    blocks = [
        (len(kind.layers), block_work(given, points, kind)) for kind in block_kinds_of(given.model)
    ]
    return [*blocks, (1, embedding_work(given, points)), (1, head_work(given, points))]


def flops(parts: list[tuple[int, PartWork]]) -> float:
    """Of the forward pass of a micro-batch on one rank."""
    total = 0.0
    for count, work in parts:
        for product in work.products:
            total += count * 2 * float((product.m * product.n * product.k)[0])
        for core in work.cores:
            square = core.batch * core.heads * core.q_len * core.kv_len * core.visible
            total += count * 4 * float((square * core.head_dim * core.calls)[0])
    return total


@st.composite
def models(draw):
    """A decoder of any sort."""
    heads = draw(st.sampled_from((4, 8)))
    settings = {
        "vocab_size": 512,
        "hidden_size": 64,
        "ffn_size": draw(st.sampled_from((96, 160))),
        "num_layers": draw(st.integers(1, 5)),
        "num_heads": heads,
        "max_seq_len": 1024,
        "gated": draw(st.booleans()),
        "causal": draw(st.booleans()),
        "tie_embeddings": draw(st.booleans()),
        "norm": draw(st.sampled_from(("rms", "layer"))),
        "post_norms": draw(st.booleans()),
        "residual": draw(
            st.sampled_from(("sequential", "parallel", "parallel_shared", "post_norm"))
        ),
        "token_types": draw(st.sampled_from((0, 2))),
        **{name: draw(st.booleans()) for name in ("head_bias", "head_layer")},
    }
    if settings["norm"] == "layer":
        settings["norm_bias"] = draw(st.booleans())
    if settings["residual"] in ("sequential", "post_norm"):
        settings["embedding_norm"] = draw(st.booleans())
    if draw(st.booleans()):
        settings["sliding_window"] = draw(st.sampled_from((16, 100, 256)))
    if draw(st.booleans()):
        ranks = {"q_rank": draw(st.sampled_from((None, 24))), "kv_rank": 16}
        settings["latent"] = ranks | {"nope_dim": 8, "rope_dim": 4, "v_dim": 12}
    else:
        settings["num_kv_heads"] = draw(st.sampled_from((heads, heads // 2, 1)))
        bias = draw(st.sampled_from(("", "bias", "qkv_bias")))
        settings |= {bias: True} if bias else {}
        settings |= {name: draw(st.booleans()) for name in ("qk_norm", "sinks")}
        if draw(st.booleans()):
            settings["positions"] = "learned"
    if draw(st.booleans()):
        shared = {"shared_ffn_size": 48, "shared_gate": draw(st.booleans())}
        settings["experts"] = {
            "num_experts": 8,
            "experts_per_token": 2,
            "ffn_size": 32,
            **draw(st.sampled_from((shared, {"bias": True, "gate_limit": 7.0}, {}))),
        }
    return Model.parse(settings, "model")


@settings(deadline=None, max_examples=80)
@given(models(), st.sampled_from(("eager", "fused")), st.integers(1, 3))
def test_flops_and_parameters_are_those_of_the_model(model, elementwise, micro_batch):
    stack = Stack(elementwise=elementwise)
    one = setting(model, batch=micro_batch, seq_len=200, stack=stack)
    parts = works(one, micro_batch=micro_batch)
    tokens = micro_batch * 200
    assert flops(parts) == pytest.approx(tokens * model.forward_flops_per_token(200), rel=1e-12)
    held = sum(count * float(np.sum(work.params + work.expert_params)) for count, work in parts)
    assert held == model.num_params


@pytest.mark.parametrize(
    "axes", [{"tp": 2}, {"tp": 4}, {"tp": 16}, {"cp": 4}, {"cp": 4, "ulysses": 2}]
)
def test_axes_share_out_the_work(axes):
    one = setting(seq_len=4096)
    shared = flops(works(one, **axes)) * max(axes.get("tp", 1), axes.get("cp", 1))
    assert shared == pytest.approx(flops(works(one)))


def sent(work: PartWork, axis: str) -> dict[tuple[str, bool], float]:
    """Bytes of a block by operation and pass, where more than one rank takes part."""
    total: dict[tuple[str, bool], float] = {}
    for exchange in work.exchanges:
        if exchange.axis == axis and np.max(exchange.num_ranks) > 1:
            key = exchange.op, exchange.backward
            total[key] = total.get(key, 0.0) + float(np.max(exchange.num_bytes * exchange.times))
    return total


def test_a_tensor_parallel_block_is_entered_and_left_twice():
    one = setting()
    stream = 2048 * 2048 * 2.0  # tokens, hidden, bytes
    (_, block), *_ = works(one, tp=4, fsdp=4, sequence_parallel=True)
    assert sent(block, "tp") == {
        (op, backward): 2 * stream
        for op in ("all_gather", "reduce_scatter")
        for backward in (False, True)
    }
    (_, block), *_ = works(one, tp=4, fsdp=4)
    assert sent(block, "tp") == {
        ("all_reduce", False): 2 * stream,
        ("all_reduce", True): 2 * stream,
    }


def test_ranks_that_share_a_key_head_gather_it():
    (_, whole), *_ = works(setting(), tp=8, fsdp=2)
    (_, parts), *_ = works(setting(), tp=16)
    head = 2048 * 2 * 128 * 2.0  # tokens, keys and values, head_dim, bytes
    assert sent(parts, "tp") == {
        **sent(whole, "tp"),
        ("all_gather", False): head,
        ("reduce_scatter", True): head,
    }


def test_a_ring_sends_keys_and_values_and_ulysses_everything():
    one = setting()
    kv = 512 * 2 * 8 * 128.0  # tokens of a rank, keys and values, heads, head_dim
    (_, block), *_ = works(one, cp=4, fsdp=4)
    assert sent(block, "cp") == {
        ("send_recv", False): 3 * kv * 2,
        ("send_recv", True): 3 * kv * 2 + 3 * kv * 4,  # back they travel in fp32, and home
    }
    (_, block), *_ = works(one, cp=4, ulysses=4, fsdp=4)
    heads = 512 * 128 * 2.0 * 2 * (16 + 8)
    assert sent(block, "cp") == {("all_to_all", False): heads, ("all_to_all", True): heads}


def test_gathered_keys_have_a_copy_for_each_query_head():
    """As torch's context_parallel sends them: here two query heads share a key head."""
    (_, ring), *_ = works(setting(), cp=4, fsdp=4)
    (_, gathered), *_ = works(setting(stack=Stack(cp_keys="gathered")), cp=4, fsdp=4)
    hops = sent(ring, "cp")
    assert sent(gathered, "cp") == {key: 2 * num_bytes for key, num_bytes in hops.items()}


def test_one_scale_for_a_tensor_lets_tp_gather_in_eight_bits():
    stack = Stack(tp_gather_dtype="fp8")
    axes = {"tp": 4, "fsdp": 4, "sequence_parallel": True}
    (_, wide), *_ = works(setting(), **axes, precision="fp8")
    (_, narrow), *_ = works(setting(stack=stack), **axes, precision="fp8")
    (_, plain), *_ = works(setting(stack=stack), **axes)
    assert sent(plain, "tp") == sent(wide, "tp")
    for (op, backward), num_bytes in sent(wide, "tp").items():
        share = 0.5 if op == "all_gather" else 1.0
        assert sent(narrow, "tp")[op, backward] == share * num_bytes


def test_products_know_who_else_reads_their_input():
    eager = works(setting())[0][1]
    assert [product.readers for product in eager.products] == [3, 3, 3, 1, 2, 2, 1]
    fused = works(setting(stack=Stack(elementwise="fused")))[0][1]
    assert {product.readers for product in fused.products} == {1}


def test_experts_exchange_copies_and_wait_for_the_busiest():
    model = MODEL.replace(experts=EXPERTS)
    one, uneven = setting(model), setting(model, expert_imbalance=1.5)
    (_, block), *_ = works(one, ep=8, fsdp=8)
    (_, busier), *_ = works(uneven, ep=8, fsdp=8)
    copies = 2048 * 2 * 2048 * 2.0  # tokens, experts of each, hidden, bytes
    assert sent(block, "ep")["all_to_all", True] == 2 * copies
    assert sent(busier, "ep")["all_to_all", True] == 2 * copies * 1.5
    rows = [float(p.m[0]) for p in block.products if np.max(p.groups) > 1]
    assert rows == [4096.0] * 3
    assert [float(p.m[0]) for p in busier.products if np.max(p.groups) > 1] == [6144.0] * 3
    assert float(np.max(block.expert_params)) == 16 / 8 * 3 * 2048 * 1024
    (grouped,) = [p for p in block.products if p.ends_block]
    assert float(rows_of_each(one, grouped)[0][0]) == 4096 + 2 * 64


def test_copies_of_hot_experts_are_sent_instead_of_their_tokens():
    """Two of 16 experts, which have what the busiest of eight ranks has above the mean besides."""
    model = MODEL.replace(experts=EXPERTS)
    comm = Comm.parse({"ep": {"hot_experts": 2}})
    copies = 2048 * 2 * 2048 * 2.0  # tokens, experts of each, hidden, bytes
    weights = 2 * 3 * 2048 * 1024  # copies, matrices, hidden, ffn
    for load in (1.0, 1.5):
        uneven = setting(model, expert_imbalance=load, comm=comm)
        (_, block), *_ = works(uneven, ep=8, fsdp=8)
        travels = 1 - 2 / 16 - (load - 1) / 8
        assert sent(block, "ep")["all_to_all", True] == pytest.approx(2 * copies * travels)
        assert sent(block, "ep")["broadcast", False] == weights * 2
        assert sent(block, "ep")["broadcast", True] == weights * 4
        grouped = [product for product in block.products if np.max(product.groups) > 1]
        assert [(float(p.m[0]), float(np.max(p.groups))) for p in grouped] == [(4096.0, 4.0)] * 3
    (_, alone), *_ = works(uneven)
    assert not any(np.max(e.num_ranks) > 1 for e in alone.exchanges if e.axis == "ep")


def test_whole_experts_see_a_share_of_the_tokens():
    model = MODEL.replace(experts=EXPERTS)
    one = setting(model, stack=Stack(expert_tp="one"))
    (_, block), *_ = works(one, tp=2, ep=4, fsdp=4, sequence_parallel=True)
    grouped = [product for product in block.products if np.max(product.groups) > 1]
    assert (float(grouped[0].m[0]), float(grouped[0].n[0])) == (2048.0, 1024.0)
    assert sent(block, "tp")["all_gather", False] == 2048 * 2048 * 2.0


def test_fusing_merges_products_and_saves_passes():
    eager, fused = (
        works(setting(stack=Stack(elementwise=kind)))[0][1] for kind in ("eager", "fused")
    )
    assert len(eager.products) == 7
    assert len(fused.products) == 4

    def moved(work: PartWork) -> float:
        return sum(float(np.sum(sweep.num_bytes)) for sweep in work.sweeps)

    assert moved(fused) < 0.6 * moved(eager)
    compiled = works(setting(), compile=True)[0][1]
    assert len(compiled.products) == 7
    assert moved(compiled) < 0.6 * moved(eager)


def test_columns_are_the_same_as_single_layouts():
    one = setting()
    layouts = [layout(fsdp=16), layout(tp=4, fsdp=4, micro_batch=2), layout(cp=2, fsdp=8)]
    kind = block_kinds_of(MODEL)[0]
    together = block_work(one, Points.of(layouts, one), kind)
    for number, each in enumerate(layouts):
        alone = block_work(one, Points.of([each], one), kind)
        for product, single in zip(together.products, alone.products, strict=True):
            assert np.broadcast_to(product.m * product.n, 3)[number] == (single.m * single.n)[0]
