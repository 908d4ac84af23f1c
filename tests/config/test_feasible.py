"""Every refusal of `check_layout`, by its sentence (pure): given, required, what to change."""

import pytest

from paceline.config.errors import InputError
from paceline.config.feasible import Demand, check_layout, refusal
from paceline.config.hardware import Cluster, Device, device
from paceline.config.job_sections import CustomModel
from paceline.config.layers import Experts
from paceline.config.layout import Layout
from paceline.config.model import Model

GPU = device("H100-SXM")
CPU = Device(name="CPU", kind="cpu", precisions=("fp64", "fp32"))
DENSE = Model(
    vocab_size=64, hidden_size=32, ffn_size=48, num_layers=8, num_heads=8, num_kv_heads=4,
    head_dim=8, max_seq_len=64,
)  # fmt: skip
EXPERTS = DENSE.replace(experts=Experts(num_experts=8, experts_per_token=2, ffn_size=16))
BIASED = DENSE.replace(experts=Experts(num_experts=8, experts_per_token=2, ffn_size=16, bias=True))
PIPELINE = {"pp": 4, "schedule": "1f1b", "split": (2, 2, 2, 2)}


def _refusal(changes, num_ranks=None, model=DENSE, what=CPU, seq_len=16, global_batch=16):
    layout = Layout().replace(**changes)
    ranks = layout.num_ranks if num_ranks is None else num_ranks
    cluster = Cluster(device=what, devices_per_node=ranks, num_nodes=1)
    return refusal(Demand(layout, model, cluster, seq_len, global_batch))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dp": 2, "fsdp": 2, "zero": 3},
        {"tp": 4, "sequence_parallel": True},
        {"tp": 8},
        PIPELINE,
        {"cp": 4, "ulysses": 2},
        {"tp": 2, "cp": 2, "sequence_parallel": True, **PIPELINE, "dp": 2},
    ],
)
def test_what_can_run_is_let_through(changes):
    assert _refusal(changes) is None


REFUSED = {
    "sizes and ranks": (
        {"tp": 2, "dp": 2},
        {"num_ranks": 8},
        "layout.dp x tp = 2 x 2 asks for 4 ranks but the cluster has 8: change one of them or "
        "cluster.devices_per_node.",
    ),
    "heads": (
        {"tp": 4},
        {"model": DENSE.replace(num_heads=12, num_kv_heads=6)},
        "layout.tp = 4 gives ranks neither whole key heads nor equal parts of one, of "
        "model.num_kv_heads = 6 that are 8 wide: use one of 1, 2, 3, or change the model.",
    ),
    "vocabulary": (
        {"tp": 4},
        {"model": DENSE.replace(vocab_size=9)},
        "layout.tp = 4 leaves ranks without a row of model.vocab_size = 9: lower tp or raise "
        "vocab_size.",
    ),
    "feed-forward": (
        {"tp": 4},
        {"model": DENSE.replace(ffn_size=50)},
        "layout.tp = 4 does not divide model.ffn_size = 50: use a divisor (1, 2) or change the "
        "model.",
    ),
    "sequence parallel": (
        {"tp": 4, "sequence_parallel": True},
        {"seq_len": 18},
        "train.seq_len = 18 leaves 18 tokens to a rank's sequence, which layout.tp = 4 with "
        "sequence_parallel does not divide: use a seq_len that is a multiple of 4.",
    ),
    "kernels without a GPU": (
        {"kernels": "triton"},
        {},
        'layout.kernels = "triton" needs CUDA devices and the cluster has CPU: use "auto" or '
        '"reference".',
    ),
    "kernels in double precision": (
        {"kernels": "triton", "precision": "fp64", "param_dtype": "fp64"},
        {"what": GPU},
        'layout.kernels = "triton" can\'t compute in layout.precision = "fp64": set kernels to '
        '"reference" or precision to fp32 or less.',
    ),
    "sequence parallel without tp": (
        {"sequence_parallel": True},
        {},
        "layout.sequence_parallel has no effect with layout.tp = 1: raise tp or unset it.",
    ),
    "async tp without tp": (
        {"async_tp": True},
        {},
        "layout.async_tp has no effect with layout.tp = 1: raise tp or unset it.",
    ),
    "async tp on a CPU": (
        {"async_tp": True, "tp": 2},
        {},
        "layout.async_tp needs CUDA devices, layout.compile = true and layout.sequence_parallel = "
        "true: set those or unset async_tp.",
    ),
    "more stages than layers": (
        {"pp": 8, "schedule": "zbv", "stages_per_rank": 2, "split": (1,) * 16},
        {},
        "layout.pp = 8 with 2 stages per rank makes 16 stages, more than the model's 8 layers: "
        "lower pp or stages_per_rank.",
    ),
    "a split of other layers": (
        {**PIPELINE, "split": (2, 2, 2, 1)},
        {},
        "layout.split = [2, 2, 2, 1] must give the layers of 4 stages, 8 in all: correct it or "
        'leave it to "auto".',
    ),
    "a schedule without a pipeline": (
        {"schedule": "1f1b"},
        {},
        'layout.schedule = "1f1b" has no effect with layout.pp = 1: raise pp or remove it.',
    ),
    "a pipeline without a schedule": (
        {**PIPELINE, "schedule": "none"},
        {},
        'layout.schedule = "none" can\'t run layout.pp = 4: choose a schedule.',
    ),
    "cp and the sequence": (
        {"cp": 4},
        {"seq_len": 20},
        "train.seq_len = 20 can't be cut into the 8 parts that layout.cp = 4 needs: use 16, the "
        "nearest that works.",
    ),
    "ulysses and cp": (
        {"cp": 4, "ulysses": 3},
        {},
        "layout.ulysses = 3 does not divide layout.cp = 4, of whose ranks it is a part: choose a "
        "divisor of cp.",
    ),
    "ulysses and heads": (
        {"cp": 8, "ulysses": 8, "tp": 4},
        {},
        "layout.ulysses = 8 can't share out the 2 heads that a rank has: choose a divisor, or pass "
        "keys in a ring instead (ulysses = 1).",
    ),
    "experts of a dense model": (
        {"dp": 2, "ep": 2},
        {},
        "layout.ep = 2 needs a model with experts, and this one is dense: set ep = 1.",
    ),
    "rebalancing without ep": (
        {"rebalance_every": 10},
        {},
        "layout.rebalance_every = 10 has no effect with layout.ep = 1: raise ep or set it to 0.",
    ),
    "zero without shards": (
        {"dp": 2, "zero": 2},
        {},
        "layout.zero = 2 has nothing to shard over with layout.fsdp = 1: raise fsdp or set "
        "zero = 0.",
    ),
    "shards without zero": (
        {"fsdp": 2},
        {},
        "layout.zero = 0 contradicts layout.fsdp = 2: set zero to 1, 2 or 3.",
    ),
    "recompute no layers": (
        {"recompute_layers": 2},
        {},
        'layout.recompute_layers = 2 has no effect with layout.recompute = "none": set recompute '
        'to "full" or "selective".',
    ),
    "offload what selective recompute keeps": (
        {"recompute": "selective", "offload": ("activations",)},
        {},
        'layout.offload = ["activations"] would move block inputs only, for what layout.recompute '
        '= "selective" keeps stays on the device: set recompute to "full" or "none".',
    ),
    "offload shards that there aren't": (
        {"offload": ("params",)},
        {},
        'layout.offload = ["params"] keeps shards on the host, and layout.fsdp = 1 makes none: '
        "raise fsdp or offload the optimizer only.",
    ),
    "offload the optimizer twice": (
        {"fsdp": 2, "zero": 3, "offload": ("params", "optimizer")},
        {},
        "layout.offload: params takes the optimizer along, so that optimizer has no effect: "
        "remove it.",
    ),
    "offload parameters under tp": (
        {"fsdp": 2, "zero": 3, "tp": 2, "offload": ("params",)},
        {"what": device("A100-80")},
        'layout.offload = ["params"] leaves gradients on the host, where layout.tp = 2 can\'t add '
        "them up: set tp = 1 or offload the optimizer only.",
    ),
    "fp8 and sides": (
        {"precision": "fp8", "tp": 4},
        {"what": device("H100-SXM")},
        'layout.precision = "fp8" needs sides of 16, and model.num_kv_heads x head_dim leaves 8 to '
        'a rank: change the model or layout.tp, or use "bf16".',
    ),
    "fp8 and tokens": (
        {"precision": "fp8"},
        {"what": device("H100-SXM"), "seq_len": 18},
        'layout.precision = "fp8" needs a multiple of 16 tokens in a rank\'s micro-batch, not 18: '
        "change layout.micro_batch or train.seq_len.",
    ),
    "dualpipe's twins and balancing": (
        {
            **PIPELINE,
            "schedule": "dualpipe",
            "stages_per_rank": 2,
            "dp": 2,
            "ep": 2,
            "rebalance_every": 5,
        },
        {"model": EXPERTS},
        'layout.schedule = "dualpipe" gives every stage to two ranks, which would balance their '
        "experts differently: set model.experts.bias_update_speed and layout.rebalance_every to "
        '0, or use "dualpipev".',
    ),
    "experts": (
        {"dp": 3, "ep": 3},
        {"model": EXPERTS, "global_batch": 24},
        "layout.ep = 3 does not divide model.experts.num_experts = 8: use a divisor (1, 2) or "
        "change the model.",
    ),
    "ep and the data ranks": (
        {"fsdp": 3, "zero": 3, "dp": 4, "ep": 2},
        {"model": EXPERTS, "global_batch": 24},
        "layout.ep = 2 can't be folded over the 12 data ranks (dp x fsdp x cp = 4 x 3 x 1): it "
        "must divide fsdp x cp, or be a multiple of it that divides all.",
    ),
    "experts' shards": (
        {"fsdp": 6, "zero": 3, "ep": 2},
        {"model": EXPERTS, "global_batch": 24},
        "model.hidden_size = 32 can't be sharded over the 3 ranks that layout.ep = 2 leaves of "
        "fsdp x cp = 6 x 1: change ep or fsdp.",
    ),
    "biases' shards": (
        {"fsdp": 6, "zero": 3, "ep": 2},
        {"model": BIASED.replace(hidden_size=48), "global_batch": 24},
        "model.experts.ffn_size = 16 can't be sharded over the 3 ranks that layout.ep = 2 leaves "
        "of fsdp x cp = 6 x 1: change ep or fsdp.",
    ),
    "columns of experts with biases": (
        {"tp": 2},
        {"model": BIASED},
        "layout.tp = 2 cuts experts by columns, which those with model.experts.bias can't be: set "
        "it to 1, and share experts out by ep.",
    ),
    "parts of a sequence, and caps": (
        {"cp": 2},
        {"model": DENSE.replace(score_cap=50.0)},
        "layout.cp = 2 attends block by block, which knows no model.score_cap: set it to 1.",
    ),
    "parts of a sequence, and sinks": (
        {"cp": 2},
        {"model": DENSE.replace(sinks=True)},
        "layout.cp = 2 attends block by block, which knows no model.sinks: set it to 1.",
    ),
    "parts of a sequence, and later tokens": (
        {"cp": 2},
        {"model": DENSE.replace(causal=False)},
        "layout.cp = 2 shares sequences whose tokens see earlier ones, and with model.causal = "
        "false they see all: set it to 1.",
    ),
    "the global batch": (
        {"dp": 4, "micro_batch": 3},
        {"global_batch": 16},
        "train.global_batch = 16 is not a multiple of 4 ranks x micro-batches of 3: use 12, the "
        "nearest that works.",
    ),
    "fp8 on a device without it": (
        {"precision": "fp8"},
        {"what": device("A100-80")},
        'layout.precision = "fp8" is not supported by A100-80: use one of fp64, fp32, bf16, fp16.',
    ),
    "precision wider than the parameters": (
        {"precision": "fp64"},
        {},
        'layout.param_dtype = "fp32" needs layout.precision = "fp32", not "fp64": change one of '
        "them.",
    ),
    "one's own model": (
        {"pp": 2},
        {"model": CustomModel()},
        "layout.pp = 2 needs a model that Paceline knows the layers of, not one of your own: set "
        "it to 1 and use dp or fsdp, or tp by a plan.",
    ),
    "sequences of one's own model": (
        {"tp": 2, "sequence_parallel": True},
        {"model": CustomModel()},
        "layout.sequence_parallel = true is of models that Paceline knows the layers of: leave it "
        "out, and let the styles of tp_plan share out the tokens.",
    ),
    "fp8 in one's own model": (
        {"tp": 2, "precision": "fp8"},
        {"model": CustomModel(), "what": GPU},
        'layout.tp = 2 cuts torch\'s own linear layers, which those of layout.precision = "fp8" '
        'are not: use "bf16", or tp = 1.',
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_says_what_was_given_what_is_required_and_what_to_change(what):
    changes, surroundings, sentence = REFUSED[what]
    assert _refusal(changes, **surroundings) == sentence


SCHEDULES = {
    "too few micro-batches": (
        {"schedule": "interleaved", "stages_per_rank": 2, "split": (1,) * 8, "micro_batch": 8},
        'layout.schedule = "interleaved" with layout.pp = 4 needs 4 micro-batches per step or a '
        "multiple of that, not 2: change train.global_batch or layout.micro_batch.",
    ),
    "an odd number of micro-batches": (
        {"schedule": "dualpipe", "stages_per_rank": 2, "micro_batch": 16},
        'layout.schedule = "dualpipe" with layout.pp = 4 needs 2 micro-batches per step or a '
        "multiple of that, not 1: change train.global_batch or layout.micro_batch.",
    ),
    "an odd pipeline": (
        {"pp": 3, "schedule": "dualpipe", "stages_per_rank": 2, "split": (2, 3, 3)},
        'layout.schedule = "dualpipe" needs an even layout.pp, not 3: change it or use '
        '"dualpipev".',
    ),
    "stages a schedule doesn't take": (
        {"stages_per_rank": 2, "split": (1,) * 8},
        'layout.schedule = "1f1b" needs layout.stages_per_rank = 1, not 2: set that.',
    ),
    "nothing to interleave": (
        {"schedule": "interleaved_zb"},
        'layout.schedule = "interleaved_zb" needs layout.stages_per_rank of 2 or more, not 1: '
        'raise it or use "zb_h1".',
    ),
}


@pytest.mark.parametrize("what", SCHEDULES)
def test_what_a_schedule_needs_is_said_with_the_smallest_number_that_works(what):
    changes, sentence = SCHEDULES[what]
    assert _refusal({**PIPELINE, **changes}) == sentence


def test_check_raises_the_sentence():
    cluster = Cluster(device=CPU, devices_per_node=2, num_nodes=1)
    with pytest.raises(InputError, match="asks for 1 ranks but the cluster has 2"):
        check_layout(Layout(), DENSE, cluster, 16, 16)
