"""How other systems run experts. Pure functions: what they send, reorder and compute by feature of
a Stack, against counts of tokens and bytes by hand; and which features published runs stand for.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.layers import Experts
from paceline.config.stack import Stack
from paceline.plan.block_kinds import block_kinds_of
from paceline.plan.collectives import num_domains
from paceline.plan.points import Points
from paceline.plan.price.parts import part_seconds
from paceline.plan.work import MatmulOp, PartWork, block_work, rows_of_each
from paceline.plan.work.feedforward import _places
from paceline.published.networks import UnpredictableError, model_of
from paceline.published.recompute import recompute_of
from paceline.published.software import software_of
from paceline.published.table import PublishedLine
from tests.plan.planned import EXPERTS, MODEL, cluster, layout, setting

TOKENS, HIDDEN, INNER = 2048, 2048, 1024
NETWORK = MODEL.replace(experts=EXPERTS)
MEGATRON = {"elementwise": "fused", "grouped_products": "loop", "fp8_experts": True}


def block(stack: Stack, **axes) -> tuple[PartWork, float]:
    """The work of a block with experts, and its seconds of products, forward and back."""
    one = setting(NETWORK, stack=stack)
    points = Points.of([layout(**{"ep": 8, "fsdp": 8, **axes})], one)
    work = block_work(one, points, block_kinds_of(NETWORK)[0])
    (part,) = part_seconds(one, points, [work])
    passes = (part.forward, part.input_grad, part.weight_grad)
    return work, float(sum(one.terms["matmul"] for one in passes)[0])


def sent_bytes(work: PartWork) -> float:
    """Of one way to the experts."""
    return max(float(e.num_bytes[0]) for e in work.exchanges if e.axis == "ep")


def moved_bytes(work: PartWork, backward: bool = False) -> float:
    return sum(float(np.sum(s.num_bytes)) for s in work.sweeps if s.backward == backward)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from((2, 4, 6, 8)), st.integers(1, 3), st.sampled_from((1, 2)))
def test_places_of_a_token_are_those_of_all_its_choices(num_experts, chosen, each):
    topk = min(chosen, num_experts - 1)
    experts = Experts(num_experts=num_experts, experts_per_token=topk, ffn_size=8)
    places = num_experts // each
    choices = list(itertools.combinations(range(num_experts), experts.experts_per_token))
    mean = np.mean([len({expert // each for expert in choice}) for choice in choices])
    assert float(_places(experts, np.array([float(places)]))[0]) == pytest.approx(mean)


@pytest.mark.parametrize("num_places", [2, 4, 8])
def test_places_of_a_token_that_chooses_groups_first(num_places):
    """Of eight experts in four groups, three out of two groups: all choices, and where they are."""
    grouped = {"num_groups": 4, "groups_per_token": 2}
    experts = Experts(num_experts=8, experts_per_token=3, ffn_size=8, **grouped)
    each = 8 // num_places
    visited = [
        len({expert // each for expert in choice})
        for groups in itertools.combinations(range(4), 2)
        for choice in itertools.combinations([2 * g + i for g in groups for i in (0, 1)], 3)
    ]
    expected = float(_places(experts, np.array([float(num_places)]))[0])
    assert expected == pytest.approx(np.mean(visited))


def test_a_token_travels_once_to_each_rank_or_node():
    copies, _ = block(Stack())
    tokens, _ = block(Stack(expert_exchange="tokens"))
    assert sent_bytes(copies) == TOKENS * 2 * HIDDEN * 2
    ranks = 8 * (1 - 14 / 16 * 13 / 15)
    assert sent_bytes(tokens) == pytest.approx(1.1 * TOKENS * HIDDEN * 2 * ranks / (7 / 8))
    far, _ = block(Stack(expert_exchange="tokens"), ep=16, fsdp=16)
    nodes = 2 * (1 - 8 / 16 * 7 / 15)
    assert sent_bytes(far) == pytest.approx(1.1 * TOKENS * HIDDEN * 2 * nodes / (1 / 2))


@pytest.mark.parametrize(("ranks", "stride", "domains"), [(8, 1, 1), (16, 1, 2), (4, 8, 4)])
def test_nodes_that_a_group_is_spread_over(ranks, stride, domains):
    assert num_domains(cluster(nodes=4), ranks, stride) == domains


def test_fused_reordering_reads_and_writes_each_copy_once():
    """By hand: two passes with the tokens' share of them, four of sorting by experts between."""
    copies = TOKENS * 2 * HIDDEN * 2
    by_copies, _ = block(Stack(elementwise="fused"))
    by_tokens, _ = block(Stack(elementwise="fused", expert_exchange="tokens"))
    arrived = 8 * (1 - 14 / 16 * 13 / 15)
    spared = (2 * (1 + 1 / 2) + 4) - 2 * (1 + arrived / 2)
    assert moved_bytes(by_copies) - moved_bytes(by_tokens) == pytest.approx(spared * copies)


def test_a_loop_computes_each_expert_by_itself():
    sizes = np.full(1, 4096.0), np.full(1, 512.0), np.full(1, 256.0)
    product = MatmulOp(*sizes, arithmetic=0, groups=np.full(1, 16.0))
    kernel, loop = setting(), setting(stack=Stack(grouped_products="loop"))
    assert [float(x[0]) for x in rows_of_each(kernel, product)] == [4096 + 16 * 64, 1]
    assert [float(x[0]) for x in rows_of_each(loop, product)] == [256, 16]
    _, together = block(Stack(), ep=1)
    _, apart = block(Stack(grouped_products="loop"), ep=1)
    assert apart > 1.1 * together  # 256 rows of each expert fill no H100
    (many, _), (few, _) = block(Stack(**MEGATRON), ep=1), block(Stack(**MEGATRON))
    assert sum(np.max(p.groups) for p in many.products) > sum(
        np.max(p.groups) for p in few.products
    )


def test_loops_pad_rows_for_eight_bits_unless_the_exchange_does():
    copies = TOKENS * 2 * HIDDEN * 2
    plain, _ = block(Stack(**MEGATRON))
    eight, _ = block(Stack(**MEGATRON), precision="fp8")
    assert moved_bytes(eight) - moved_bytes(plain) == 4 * copies
    tokens = Stack(**MEGATRON, expert_exchange="tokens")
    one, other = block(tokens)[0], block(tokens, precision="fp8")[0]
    assert moved_bytes(one) == moved_bytes(other)


def test_biases_of_experts_are_passes_of_their_own():
    """Clamps of both halves, read and written twice; a weighed bias in fp32, its sum, a cast."""
    plain, _ = block(Stack(**MEGATRON))
    biased, _ = block(Stack(**MEGATRON, expert_biases="eager"))
    outer, inner = TOKENS * 2 * HIDDEN, TOKENS * 2 * INNER
    assert moved_bytes(biased) - moved_bytes(plain) == 4 * (2 * inner * 2) + outer * (4 + 24)
    assert moved_bytes(biased, True) - moved_bytes(plain, True) == (
        5 * (2 * inner * 2) + outer * (12 + 28)
    )


def test_fused_experts_have_no_passes_for_activation_and_casts():
    apart = {"elementwise": "fused", "fp8_experts": True}
    (one, one_s), (other, other_s) = (
        block(Stack(**apart, fuses_experts=fuses), precision="fp8") for fuses in (False, True)
    )
    assert moved_bytes(one) - moved_bytes(other) == 3 * TOKENS * 2 * INNER * 2
    assert other_s < one_s
    # Elsewhere casts are what they were.
    dense = [p for p in other.products if np.max(p.groups) == 1]
    assert dense == [p for p in one.products if np.max(p.groups) == 1]


def line(**cells: str) -> PublishedLine:
    runs = {"framework": "Megatron-Bridge", "release": "26.04", "gpu": "B200", "experts": "128"}
    return PublishedLine("here:2", "here", {**runs, **cells})


@pytest.mark.parametrize(
    ("cells", "exchange"),
    [
        ({"compile_flash_flags": "moe dispatcher hybridep"}, "tokens"),
        ({"compile_flash_flags": "moe dispatcher deepep", "release": "25.04"}, "tokens"),
        ({}, "tokens"),
        ({"release": "25.04"}, "copies"),
        ({"compile_flash_flags": "alltoall dispatcher"}, "copies"),
        ({"notes": "flags from preset B200_V1"}, "copies"),  # it would name another one
        ({"notes": "tokendrop MoE routing"}, "copies"),
        ({"framework": "torchtitan"}, "copies"),
    ],
)
def test_what_travels_goes_by_what_is_said_and_by_the_date(cells, exchange):
    assert software_of(line(**cells)).stack.expert_exchange == exchange


def test_graphs_of_whole_steps_need_fixed_room_for_experts():
    partial = "cuda_graph=transformer_engine(attn+moe_router)"
    whole = "cuda_graph=full_iteration(); moe dispatcher hybridep"

    def launch(flags: str, **cells: str) -> str:
        return software_of(line(compile_flash_flags=flags, **cells)).stack.launch

    assert launch(whole) == "graph"
    assert launch(partial) == "eager"
    assert launch(partial, experts="") == "graph"
    assert launch("") == "eager"


def test_presets_since_mid_2026_fuse_experts_on_racks_in_eight_bits():
    new = {"release": "26.06", "gpu": "GB200", "precision": "mxfp8"}
    stack = software_of(line(**new)).stack
    assert stack.fuses_experts
    assert stack.overlaps_ep
    assert (stack.launch, stack.grouped_products) == ("graph", "kernel")
    for change in ({"gpu": "B200"}, {"precision": "bf16"}, {"release": "26.04"}):
        other = software_of(line(**{**new, **change})).stack
        assert not other.fuses_experts
        assert (other.launch, other.grouped_products) == ("eager", "loop")
    said = software_of(line(**new, notes="EP overlap off", compile_flash_flags="HybridEP"))
    assert not said.stack.overlaps_ep


def test_a_dense_mlp_is_recomputed_in_the_dense_layers_only():
    def recompute(modules: str, **cells: str) -> str:
        notes = f"recompute modules (preset): {modules}; more"
        cells = {"activation_ckpt": "selective", "notes": notes, **cells}
        model = MODEL if cells.get("experts") == "" else NETWORK
        return recompute_of(line(**cells), model, [])[0]

    assert recompute("mlp") == "none"
    assert recompute("moe") == "full"
    assert recompute("mlp", experts="") == "full"


def test_networks_with_state_space_layers_are_known_by_name():
    shapes = {"layers": "52", "hidden": "2688", "heads": "32", "seq": "8192"}
    with pytest.raises(UnpredictableError, match="state-space"):
        model_of(line(model="nemotron-3-nano", **shapes))
    assert model_of(line(model="nemotron-4", **{**shapes, "experts": ""}))[0].num_layers == 52
