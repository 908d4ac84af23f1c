"""Peak memory by term: formulas against hand-made numbers, and laws.

Pure functions, no tensors. What the formulas count is compared with torch's trackers in
`test_memory_tracked`, and with published runs in `test_memory_published`.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.hardware import Cluster, Device
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.stack import Stack
from paceline.plan.memory import checkpoint_spike_bytes, copy_bytes, memory_bytes
from paceline.plan.memory.activations import between_operators, kept_whole
from paceline.plan.memory.buffers import exchange_bytes
from paceline.plan.memory.holdings import bounding_holdings, holdings_of
from paceline.plan.points import Points, Setting
from paceline.plan.prediction import MEMORY_TERMS, Memory, Prediction, needed_bytes
from paceline.plan.schedules import build_schedule, split_layers

GB = 1e9
NODE = Cluster(device="A100-80", devices_per_node=8, num_nodes=1)
LLAMA2_7B = Model(
    vocab_size=32000, hidden_size=4096, ffn_size=11008, num_layers=32, num_heads=32,
    max_seq_len=4096,
)  # fmt: skip
LLAMA3_8B = Model(
    vocab_size=128256, hidden_size=4096, ffn_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8, max_seq_len=8192,
)  # fmt: skip
LLAMA3_405B = Model(
    vocab_size=128256, hidden_size=16384, ffn_size=53248, num_layers=126, num_heads=128,
    num_kv_heads=8, max_seq_len=8192,
)  # fmt: skip
MIXTRAL = Model.model_validate(
    {
        "vocab_size": 32000, "hidden_size": 4096, "ffn_size": 14336, "num_layers": 32,
        "num_heads": 32, "num_kv_heads": 8, "max_seq_len": 4096,
        "experts": {"num_experts": 8, "experts_per_token": 2, "ffn_size": 14336},
    }
)  # fmt: skip


def layout_of(model: Model, **given: object) -> Layout:
    layout = Layout.model_validate({"precision": "bf16", **given})
    stages = layout.pp * layout.stages_per_rank
    if stages > 1 and not layout.split:
        return layout.replace(split=split_layers([1.0] * model.num_layers, stages))
    return layout


def terms_of(
    model: Model, seq_len: int, batch: int, stack: Stack | None = None, **given: object
) -> dict[str, float]:
    """Terms of the heaviest rank."""
    setting = Setting(model, NODE, seq_len, batch, stack or Stack())
    layout = layout_of(model, **given)
    points = Points.of([layout], setting)
    schedule = None
    if layout.pp != 1:
        number = int(points.num_micro_batches[0])
        schedule = build_schedule(
            str(given["schedule"]), int(str(layout.pp)), number, int(str(layout.stages_per_rank))
        )
    columns = memory_bytes(setting, points, holdings_of(setting, layout, schedule))
    heaviest = int(sum(columns.values())[:, 0].argmax())
    return {name: float(column[heaviest, 0]) for name, column in columns.items()}


def total(*args: object, **given: object) -> float:
    return sum(terms_of(*args, **given).values())  # type: ignore[arg-type]


def test_every_term_is_there_and_none_is_negative() -> None:
    """In the order of the vocabulary."""
    terms = terms_of(LLAMA3_8B, 8192, 8, fsdp=8, zero=3)
    assert tuple(terms) == MEMORY_TERMS
    assert min(terms.values()) >= 0


@pytest.mark.parametrize(
    ("given", "bytes_per_param"),
    [
        ({"precision": "fp32"}, 4 + 8),
        ({"param_dtype": "bf16"}, 2 + 4 + 8),
        ({"precision": "fp32", "optimizer_state": "8bit"}, 4 + 2 * (1 + 4 / 256)),
        ({"fsdp": 8, "zero": 3}, (4 + 8) / 8),
        ({"fsdp": 2, "dp": 4, "zero": 3}, (4 + 8) / 2),
        ({"fsdp": 8, "zero": 1, "param_dtype": "bf16"}, (2 + 4 + 8) / 8),
        ({"precision": "fp32", "offload": ("optimizer",)}, 4),
        ({"fsdp": 8, "zero": 3, "offload": ("params",)}, 0),
    ],
)
def test_states_per_parameter(given: dict[str, object], bytes_per_param: float) -> None:
    """Parameters and optimizer state at the peak; a long sequence, so it isn't in the update."""
    terms = terms_of(LLAMA2_7B, 4096, 8 if "fsdp" in given else 1, **given)
    states = terms["params"] + terms["optimizer"]
    assert states == pytest.approx(LLAMA2_7B.num_params * bytes_per_param, rel=1e-6)


def test_states_of_llama_3_405b_are_known() -> None:
    """Of the guide's 2.4 TB all but the gradients: 14 bytes per parameter, on one rank."""
    terms = terms_of(LLAMA3_405B, 8192, 1, precision="bf16", param_dtype="bf16", recompute="full")
    states = terms["params"] + terms["optimizer"]
    assert states == pytest.approx(14 * 405.85e9, rel=0.001)


def test_experts_are_divided_by_ep_and_tp() -> None:
    """Or by ep alone, where tp ranks hold whole experts."""
    experts = 32 * 8 * 3 * 4096 * 14336
    dense = MIXTRAL.num_params - experts
    one = {"precision": "fp32", "dp": 8, "zero": 1, "micro_batch": 1}
    spread = terms_of(MIXTRAL, 4096, 8, **one, ep=4)
    assert spread["params"] == pytest.approx(4 * (dense + experts / 4), rel=1e-6)
    both = {"precision": "fp32", "dp": 4, "zero": 1, "tp": 2, "ep": 4}
    router = 32 * (8 * 4096 + 2 * 4096) + 4096  # and norms, whole on every rank
    cut = (dense - router) / 2 + router
    shared = terms_of(MIXTRAL, 4096, 8, **both)
    assert shared["params"] == pytest.approx(4 * (cut + experts / 8), rel=1e-6)
    whole = terms_of(MIXTRAL, 4096, 8, Stack(expert_tp="one"), **both)
    assert whole["params"] == pytest.approx(4 * (cut + experts / 4), rel=1e-6)


def test_experts_shard_over_the_ranks_that_hold_the_same_ones() -> None:
    """fsdp 8, ep 4: dense parameters over eight ranks, each rank's experts over two."""
    experts = 32 * 8 * 3 * 4096 * 14336
    terms = terms_of(MIXTRAL, 4096, 8, fsdp=8, zero=3, ep=4)
    dense = MIXTRAL.num_params - experts
    assert terms["params"] == pytest.approx(4 * (dense / 8 + experts / 4 / 2), rel=1e-6)


def test_whole_experts_are_spread_over_tp_too() -> None:
    """Two tp ranks, four data ranks and ep 8: an eighth of the experts on each rank, and each sends
    its half of the tokens."""
    experts = 32 * 8 * 3 * 4096 * 14336
    given = {"fsdp": 4, "zero": 1, "tp": 2, "ep": 8, "sequence_parallel": True}
    stack = Stack(expert_tp="one")
    terms = terms_of(MIXTRAL, 4096, 4, stack, **given, param_dtype="bf16")
    router = 32 * (8 * 4096 + 2 * 4096) + 4096
    dense = (MIXTRAL.num_params - experts - router) / 2 + router
    assert terms["params"] == pytest.approx(2 * (dense / 4 + experts / 8), rel=1e-6)
    one, both = (
        kept_whole(setting, Points.of([layout_of(MIXTRAL, **given)], setting))[0, 0]
        for setting in (Setting(MIXTRAL, NODE, 4096, 4, some) for some in (stack, Stack()))
    )
    # Places of copies: by expert and back, and from there by sender and back.
    router = 4 * 4096 + 4 * 8 + 2 * (5 * 8 + 2 * 4)
    assert both - one == pytest.approx(4096 / 2 * (2 * 2 * 4096 * 2 + router))


# Name: features, data ranks, ZeRO, bytes per parameter of parameters, gradients, optimizer.
BUFFERS: dict[str, tuple[dict[str, object], int, tuple[float, float, float]]] = {
    "fp32 gradients": ({"grad_dtype": "fp32"}, 1, (2, 4, 12 / 8)),
    "16-bit gradients": ({"grad_dtype": "bf16"}, 1, (2, 2, 12 / 8)),
    "beside the buffer": (
        {"grad_dtype": "fp32", "adds_into_buffer": False}, 1, (4, 6, 12 / 8),
    ),
    "no master copy": (
        {"grad_dtype": "bf16", "moments_bytes": 4, "keeps_master": False}, 1, (2, 2, 4 / 8),
    ),
    "16-bit moments": ({"grad_dtype": "bf16", "moments_bytes": 4}, 1, (2, 2, 8 / 8)),
    "zero 3": ({"grad_dtype": "fp32"}, 3, (2 / 8, 0, 12 / 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", BUFFERS)
def test_states_in_lasting_buffers(name: str) -> None:
    """Megatron's 6 + 12/d bytes per parameter and their kin, with the moment of most activations;
    what is sharded altogether isn't there twice. Wider buffers are filled from first parameters,
    whose room is taken by then."""
    features, zero, expected = BUFFERS[name]
    stack = Stack.model_validate({"states": "buffers", **features})
    given = {"fsdp": 8, "zero": zero, "param_dtype": "bf16", "micro_batch": 4}
    terms = terms_of(LLAMA2_7B, 4096, 32, stack, **given)
    found = [terms[name] / LLAMA2_7B.num_params for name in ("params", "grads", "optimizer")]
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1] == pytest.approx(expected[1], abs=0.2 if zero == 3 else 1e-6)
    assert found[2] == pytest.approx(expected[2], rel=1e-6)
    assert (terms["gather_buffers"] > 0) == (zero == 3)


def test_xla_gathers_products_and_leaves_no_holes() -> None:
    """One matrix instead of a block where the last one is at work, the peak; gradients in 16 bits;
    no slack, no context."""
    given = {"fsdp": 8, "zero": 3, "recompute": "full"}
    ours = terms_of(LLAMA2_7B, 4096, 8, **given)
    xla = terms_of(LLAMA2_7B, 4096, 8, Stack(gather_unit="matrix", allocator="planned"), **given)
    matrix, block = 4096 * 11008, 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert ours["gather_buffers"] - xla["gather_buffers"] == pytest.approx(2 * (block - matrix))
    assert xla["comm_buffers"] < ours["comm_buffers"]
    assert (xla["allocator_slack"], xla["context"]) == (0, 0)
    assert xla["params"] == ours["params"]


@pytest.mark.parametrize(
    ("part", "model", "saved"),
    [
        ("mlp", LLAMA2_7B, 4 * 11008),  # gate, up, silu(gate), their product
        ("layernorm", LLAMA2_7B, 2 * 4096),
        ("moe_act", MIXTRAL, 2 * 14336),  # the product, of two experts
        ("mlp", MIXTRAL, 0),  # no block of it has a dense one
        ("mla_up_proj", LLAMA2_7B, 0),
    ],
)
def test_parts_that_are_made_anew_are_not_kept(part: str, model: Model, saved: int) -> None:
    """In numbers of a token, of 16 bits; what one block makes anew is there while it works."""
    plain, anew = Stack(), Stack.model_validate({"remakes": [part]})
    points = Points.of([layout_of(model, param_dtype="bf16")], Setting(model, NODE, 4096, 1, plain))
    whole, less = (
        kept_whole(Setting(model, NODE, 4096, 1, stack), points)[0, 0] for stack in (plain, anew)
    )
    assert whole - less == pytest.approx(2 * 4096 * saved)
    there, again = (
        between_operators(Setting(model, NODE, 4096, 1, stack), points)[0]
        for stack in (plain, anew)
    )
    assert again - there == pytest.approx(2 * 4096 * saved)


def test_activations_on_the_host_by_share() -> None:
    """Half of the blocks: half of their activations, and those of two blocks on their way."""
    given = {"fsdp": 8, "zero": 3}
    all_here = terms_of(LLAMA2_7B, 4096, 8, **given)["activations"]
    half = terms_of(LLAMA2_7B, 4096, 8, Stack(offloaded_share=0.5), **given)["activations"]
    block = all_here / 32
    assert half == pytest.approx(18 * block, abs=1.5 * block)


def test_older_cuda_loads_all_its_kernels() -> None:
    new, old = (
        terms_of(LLAMA2_7B, 4096, 8, Stack.model_validate({"loads_kernels": name}), fsdp=8, zero=3)
        for name in ("used", "all")
    )
    assert old["context"] - new["context"] == pytest.approx(1.2 * 2**30)


def test_what_must_be_there_is_less_than_what_is_reserved() -> None:
    """Everything but holes that can be given back; of activations and the like 7 % stay as holes.
    A device that has it suffices."""
    terms = {"params": 10.0, "activations": 40.0, "logits": 10.0, "allocator_slack": 9.0}
    assert needed_bytes(terms) == pytest.approx(60 + 0.07 * 50)
    assert needed_bytes(terms | {"allocator_slack": 2.0}) == pytest.approx(62)
    assert needed_bytes({"params": 10.0}) == 10.0
    device = NODE.device
    assert device.memory_bytes is not None
    capacity = device.memory_bytes.value
    terms = {"params": 0.5 * capacity, "activations": 0.45 * capacity}
    tight = Memory(0, terms | {"allocator_slack": 0.06 * capacity})
    layout = layout_of(LLAMA2_7B)
    one = Prediction(layout, 1.0, {}, (tight,), 1.0, None, (1.0, 1.0))
    assert one.peak_memory_bytes > capacity
    assert one.fits(device)
    larger = Memory(1, terms | {"logits": 0.06 * capacity})
    both = Prediction(layout, 1.0, {}, (tight, larger), 1.0, None, (1.0, 1.0))
    assert not both.fits(device)
    assert both.fits(device.replace(memory_bytes=None)) is None


def test_shards_over_cp_alone() -> None:
    """Where one sequence takes all data ranks, other systems shard over these."""
    given = {"cp": 8, "zero": 3, "recompute": "full"}
    terms = terms_of(LLAMA3_8B, 8192, 1, **given)
    assert terms["params"] == pytest.approx(4 * LLAMA3_8B.num_params / 8, rel=1e-6)
    whole = terms_of(LLAMA3_8B, 8192, 1, cp=8, zero=0, recompute="full")
    assert whole["params"] == pytest.approx(4 * LLAMA3_8B.num_params, rel=1e-6)


@pytest.mark.parametrize(
    ("features", "saved"),
    [
        # Bytes per token of a block of Llama-3 8B under tp 4: both norms' outputs, h each.
        ({"regathers_tp": True}, 2 * 2 * 4096 * 3 / 4),
        # Two halves of 2h, and of 1/4 of the inner width; attention's output has a copy more.
        ({"keeps_fp8": True}, 2 * 4096 + 14336 / 4 - 4096 / 4),
    ],
)
def test_what_products_read_may_take_less(features: dict[str, object], saved: float) -> None:
    """Gathered again, or in 8 bits: of a block's activations just so much less."""
    given = {"tp": 4, "sequence_parallel": True, "precision": "fp8", "param_dtype": "bf16"}
    setting = Setting(LLAMA3_8B, NODE, 8192, 1, Stack())
    points = Points.of([layout_of(LLAMA3_8B, **given)], setting)
    (plain,) = kept_whole(setting, points)
    other = Setting(LLAMA3_8B, NODE, 8192, 1, Stack.model_validate(features))
    (less,) = kept_whole(other, points)
    assert (plain - less)[0] == pytest.approx(8192 * saved, rel=1e-9)


def test_experts_that_weigh_inside_keep_no_result() -> None:
    """Two copies of each token, 16 bits."""
    setting = Setting(MIXTRAL, NODE, 4096, 1, Stack())
    points = Points.of([layout_of(MIXTRAL, param_dtype="bf16")], setting)
    other = Setting(MIXTRAL, NODE, 4096, 1, Stack(weighs_in_experts=True))
    saved = kept_whole(setting, points) - kept_whole(other, points)
    assert saved[0, 0] == pytest.approx(4096 * 2 * 4096 * 2)


def test_losses_over_a_shared_vocabulary() -> None:
    """14 bytes per logit of a rank, or 16 with DTensor's loss_parallel; 12 of all logits alone."""
    of_tp = {"tp": 8, "fsdp": 1, "recompute": "full", "param_dtype": "bf16", "micro_batch": 4}
    num = 4 * 8192 * 128256
    narrow = terms_of(LLAMA3_8B, 8192, 4, **of_tp)["logits"]
    wide = terms_of(LLAMA3_8B, 8192, 4, Stack(shared_vocab_loss="wide"), **of_tp)["logits"]
    assert (narrow, wide) == (14 * num / 8, 16 * num / 8)
    alone = of_tp | {"tp": 1}
    for stack in (Stack(), Stack(shared_vocab_loss="wide")):
        assert terms_of(LLAMA3_8B, 8192, 4, stack, **alone)["logits"] == 12 * num


def test_room_for_all_that_a_stage_receives() -> None:
    """Sixteen micro-batches instead of the two on their way, one sample of 2h bytes each."""
    given = {"pp": 4, "schedule": "1f1b", "param_dtype": "bf16"}
    few, all_of_them = (
        terms_of(LLAMA2_7B, 4096, 16, Stack(receives_ahead=ahead), **given)["comm_buffers"]
        for ahead in (False, True)
    )
    assert all_of_them - few == 14 * 4096 * 4096 * 2


def test_unfused_attention_is_korthikantis_formula() -> None:
    """A GPT block in 16 bits with dropout keeps sbh(34 + 5as/h), and what is a sequence is divided
    by tp; within the reciprocals of the norms."""
    gpt = Model(
        vocab_size=51200, hidden_size=1024, ffn_size=4096, num_layers=64, num_heads=16,
        max_seq_len=2048, gated=False,
    )  # fmt: skip
    stack = Stack(attention="unfused", dropout=True, elementwise="fused", logits="bf16")
    few = gpt.replace(num_layers=8)
    many, less = (
        terms_of(model, 2048, 1, stack, param_dtype="bf16")["activations"] for model in (gpt, few)
    )
    formula = 2048 * 1024 * (34 + 5 * 16 * 2048 / 1024)
    assert (many - less) / 56 == pytest.approx(formula, rel=0.001)


def test_llama_2_7b_fits_on_eight_a100() -> None:
    """ZeRO-3, two samples of 4096: published to fit in 80 GB."""
    needed = total(LLAMA2_7B, 4096, 16, fsdp=8, zero=3, micro_batch=2)
    assert 60 * GB < needed < 80 * GB


@pytest.mark.parametrize(
    "less",
    [
        {"recompute": "selective"}, {"recompute": "full"}, {"offload": ("activations",)},
        {"optimizer_state": "8bit"}, {"fsdp": 4, "dp": 2, "zero": 1}, {"tp": 2, "fsdp": 4},
        {"recompute": "full", "recompute_layers": 16}, {"compile": True},
    ],
)  # fmt: skip
def test_what_saves_memory_saves_it(less: dict[str, object]) -> None:
    """Against eight replicas with two samples each."""
    base = {"dp": 8, "micro_batch": 2, "zero": 1}
    assert total(LLAMA2_7B, 4096, 16, **base | {"dp": 8 if "fsdp" not in less else 1} | less) < (
        total(LLAMA2_7B, 4096, 16, **base)
    )


def test_sequence_and_context_parallel_divide_activations() -> None:
    """Norms and the stream over tp; everything over cp, but the second copy of the output."""
    base = {"fsdp": 2, "zero": 3}
    plain, sequence = (
        terms_of(LLAMA2_7B, 4096, 2, **base, tp=4, sequence_parallel=given)["activations"]
        for given in (False, True)
    )
    assert sequence < 0.85 * plain
    whole = terms_of(LLAMA2_7B, 4096, 2, **base)["activations"]
    assert terms_of(LLAMA2_7B, 4096, 2, **base, cp=4)["activations"] < 0.3 * whole


def test_gathered_keys_take_more_room_than_a_ring_and_more_with_each_rank() -> None:
    """Each rank has as many tokens whatever cp is; a ring holds as much of them."""

    def room(keys: str, cp: int) -> float:
        setting = Setting(LLAMA2_7B, NODE, 4096 * cp, 8, Stack.parse({"cp_keys": keys}, "stack"))
        points = Points.of([layout_of(LLAMA2_7B, fsdp=8 // cp, cp=cp, zero=3)], setting)
        return float(exchange_bytes(setting, points)[0])

    assert room("ring", 2) == room("ring", 4) < room("gathered", 2)
    # Keys and values of each further rank, in 16 bits: in use, and twice not free yet.
    further = room("gathered", 4) - room("gathered", 2)
    assert further == 3 * 2 * 2 * 4096 * 4096 * 2


def test_pipeline_peak_is_on_the_rank_that_holds_most() -> None:
    """1F1B: the first rank; its activations are p times those of the last."""
    setting = Setting(LLAMA2_7B, NODE, 4096, 16, Stack())
    layout = layout_of(LLAMA2_7B, pp=8, schedule="1f1b", precision="bf16", param_dtype="bf16")
    points = Points.of([layout], setting)
    holdings = holdings_of(setting, layout, build_schedule("1f1b", 8, 16, 1))
    columns = memory_bytes(setting, points, holdings)
    activations = columns["activations"][:, 0]
    assert activations[0] > 6 * activations[-1]
    assert columns["logits"][0, 0] == 0 < columns["logits"][-1, 0]


@given(
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([0, 1, 2, 3]),
    st.sampled_from(["none", "selective", "full"]), st.sampled_from(["bf16", "fp32", "fp8"]),
    st.sampled_from([1, 2, 4]), st.sampled_from([8, 16]),
)  # fmt: skip
@settings(deadline=None)
def test_columns_price_as_one_layout_does(
    tp: int, cp: int, zero: int, recompute: str, precision: str, micro_batch: int, batch: int
) -> None:
    """The formulas broadcast: a layout among others gets what it gets alone."""
    setting = Setting(LLAMA3_8B, NODE, 8192, batch, Stack())
    given = {"tp": tp, "cp": cp, "fsdp": 2, "zero": zero or 1, "recompute": recompute}
    one = layout_of(LLAMA3_8B, **given, precision=precision, micro_batch=micro_batch)
    other = layout_of(LLAMA3_8B, pp=2, schedule="gpipe", param_dtype="bf16")
    together, alone = (Points.of(some, setting) for some in ([other, one], [one]))
    several = memory_bytes(setting, together, bounding_holdings(setting, together))
    single = memory_bytes(setting, alone, bounding_holdings(setting, alone))
    for name in MEMORY_TERMS:
        np.testing.assert_allclose(several[name][:, 1], single[name][:, 0], rtol=1e-12)


def test_saving_a_checkpoint_copies_the_shard() -> None:
    """fp32 parameters and two moments, also where these are 8-bit codes."""
    setting = Setting(LLAMA2_7B, NODE, 4096, 8, Stack())
    points = Points.of([layout_of(LLAMA2_7B, fsdp=8, zero=3, optimizer_state="8bit")], setting)
    spike = checkpoint_spike_bytes(setting, points, bounding_holdings(setting, points))
    assert spike[0, 0] == pytest.approx(12 * LLAMA2_7B.num_params / 8, rel=1e-6)


@pytest.mark.parametrize(
    ("num_nodes", "given", "states"),
    [
        (2, {"fsdp": 16, "zero": 3}, 4 / 16),  # two of its own, two of its buddy's
        (2, {"dp": 2, "fsdp": 8, "zero": 3}, 2 / 8),  # the other node has a replica
        (2, {"dp": 8, "fsdp": 2, "zero": 3}, 2 / 2),
        (4, {"dp": 2, "fsdp": 16, "zero": 3}, 2 / 16),
        (2, {"tp": 8, "dp": 2}, 2 / 8),
        (1, {"fsdp": 8, "zero": 3}, 4 / 8),
        (1, {"dp": 8}, 2),
        (1, {}, 0),
    ],
)
def test_copies_take_two_places_each(
    num_nodes: int, given: dict[str, object], states: float
) -> None:
    """States of a rank's own part and of the one whose buddy it is: 12 bytes per parameter."""
    cluster = Cluster(device="A100-80", devices_per_node=8, num_nodes=num_nodes)
    setting = Setting(LLAMA2_7B, cluster, 4096, 32, Stack())
    layout = layout_of(LLAMA2_7B, **given)
    copies = copy_bytes(setting, Points.of([layout], setting), holdings_of(setting, layout, None))
    expected = 12 * LLAMA2_7B.num_params * states
    assert copies.max() == pytest.approx(expected, rel=0.001)


def test_replicas_on_a_cpu_need_no_copies() -> None:
    cpu = Device(name="CPU", kind="cpu", precisions=("fp32", "bf16"))
    setting = Setting(
        LLAMA2_7B, Cluster(device=cpu, devices_per_node=1, num_nodes=4), 4096, 32, Stack()
    )
    for layout, is_copied in (
        (layout_of(LLAMA2_7B, dp=4), False),
        (layout_of(LLAMA2_7B, fsdp=4, zero=3), True),
    ):
        points = Points.of([layout], setting)
        copies = copy_bytes(setting, points, holdings_of(setting, layout, None))
        assert (copies.max() > 0) == is_copied
