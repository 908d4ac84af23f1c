"""Every refusal of `check_comm`, by its sentence (pure)."""

import pytest

from paceline.config.comm import Comm
from paceline.config.errors import InputError
from paceline.config.feasible_comm import check_comm
from paceline.config.job import read_job
from paceline.config.layout import Layout

INT8 = {"dp": {"compress": "int8"}}
DILOCO = {"local": {"method": "diloco"}}
STREAMING = {"method": "streaming"}
EXPERTS = "model.experts={num_experts=4,experts_per_token=2,ffn_size=16}"


def _check(comm, changes) -> None:
    check_comm(Comm.parse(comm), Layout().replace(**changes))


@pytest.mark.parametrize(
    ("comm", "changes"),
    [
        ({}, {}),
        ({}, {"dp": 2, "fsdp": 2}),
        (INT8, {"dp": 2}),
        ({**INT8, "warmup_steps": 5}, {"dp": 2}),
        ({"dp": {"compress": "powersgd:4", "algorithm": "ring"}}, {"dp": 2}),
        ({"dp": {"algorithm": "backend"}}, {"fsdp": 2}),
        (INT8, {"dp": 2, "fsdp": 2, "tp": 2}),
        ({"fsdp": {"compress": "int8", "compress_weights": "int4"}}, {"fsdp": 2, "cp": 2}),
        (INT8, {"dp": 2, "tp": 2, "pp": 2}),
        ({"fsdp": {"compress": "int8", "compress_weights": "int4"}}, {"fsdp": 2, "pp": 2}),
        ({"fsdp": {"compress_weights": "bf16"}}, {"fsdp": 2, "precision": "fp32"}),
        ({"pp": {"compress": "int8"}, "ep": {"compress": "fp8"}}, {"pp": 2, "dp": 2, "ep": 2}),
        ({"ep": {"compress": "int8", "hot_experts": 2, "hot_every": 5}}, {"dp": 2, "ep": 2}),
        ({"dp": {"compress": "auto"}}, {"dp": 2, "fsdp": 2}),
        ({"local": {"method": "local_sgd"}}, {"dp": 2}),
        (DILOCO, {"dp": 2, "fsdp": 2, "tp": 2, "cp": 2}),
        ({"local": {**STREAMING, "fragments": 50, "overlap_steps": 49}}, {"dp": 2}),
        ({"local": {"method": "diloco", "compress": "int4", "outer_lr": 0.5}}, {"dp": 2}),
        ({"local": {**STREAMING, "every": "auto", "overlap_steps": "auto"}}, {"dp": 2}),
        ({"local": {"method": "diloco", "compress": "auto"}}, {"dp": 2, "param_dtype": "fp64"}),
    ],
)
def test_what_can_run_is_let_through(comm, changes):
    _check(comm, changes)


REFUSED = {
    "nobody to send to": (
        INT8,
        {},
        'comm.dp.compress = "int8" has no effect with layout.dp = 1: raise dp or leave it out.',
    ),
    "an algorithm for nobody": (
        {"dp": {"algorithm": "ring"}},
        {},
        'comm.dp.algorithm = "ring" has no effect with layout.dp = 1: raise dp or leave it out.',
    ),
    "replicas of experts": (
        INT8,
        {"dp": 2, "ep": 2},
        'comm.dp.compress = "int8" needs replicas of all experts, which layout.ep = 2 cuts: '
        "set ep = 1 or leave it out.",
    ),
    "copies of what all have": (
        {"ep": {"hot_experts": 2}},
        {"dp": 2},
        "comm.ep.hot_experts = 2 has no effect with layout.ep = 1, where each rank has all "
        "experts: raise ep or leave it out.",
    ),
    "matrices in parts": (
        {"dp": {"compress": "powersgd:4"}},
        {"dp": 2, "fsdp": 2},
        'comm.dp.compress = "powersgd:4" needs whole networks, which layout.fsdp = 2 cuts: '
        "set fsdp = 1 or leave it out.",
    ),
    "rows in parts": (
        {"dp": {"compress": "quinary"}},
        {"dp": 2, "tp": 2},
        'comm.dp.compress = "quinary" needs whole networks, which layout.tp = 2 cuts: '
        "set tp = 1 or leave it out.",
    ),
    "gradients on the host": (
        INT8,
        {"dp": 2, "fsdp": 2, "offload": ("params",)},
        'comm.dp.compress = "int8" needs gradients on the device, which layout.offload = '
        "['params'] takes to the host: leave one of them out.",
    ),
    "no shards": (
        {"fsdp": {"compress_weights": "int8"}},
        {"dp": 2},
        'comm.fsdp.compress_weights = "int8" has no effect with layout.fsdp = 1: raise fsdp or '
        "leave it out.",
    ),
    "shards of columns": (
        {"fsdp": {"compress": "int8"}},
        {"fsdp": 2, "tp": 2},
        'comm.fsdp.compress = "int8" needs shards of whole layers, which layout.tp = 2 cuts: '
        "set tp = 1 or leave it out.",
    ),
    "exact shards": (
        {"fsdp": {"compress": "int8"}},
        {"fsdp": 2, "param_dtype": "fp64"},
        'comm.fsdp.compress = "int8" would round what layout.param_dtype = "fp64" keeps exact: '
        'set it to "none", or param_dtype = "fp32".',
    ),
    "a choice of weights' form": (
        {"fsdp": {"compress_weights": "auto"}},
        {"fsdp": 2},
        'comm.fsdp.compress_weights = "auto" asks for what nobody has measured: name a form, '
        '"int8" for one.',
    ),
    "weights that are as short": (
        {"fsdp": {"compress_weights": "bf16"}},
        {"fsdp": 2, "precision": "bf16"},
        'comm.fsdp.compress_weights = "bf16" sends as many bytes as layout.precision = "bf16" '
        'does: use "int8", "fp8" or "int4", or leave it out.',
    ),
    "no stages": (
        {"pp": {"compress": "int8"}},
        {"dp": 2},
        'comm.pp.compress = "int8" has no effect with layout.pp = 1: raise pp or leave it out.',
    ),
    "a price for tokens": (
        {"ep": {"compress": "auto"}},
        {"dp": 2, "ep": 2},
        'comm.ep.compress = "auto" is nothing that the planner can price: name a form, "int8" '
        "for one.",
    ),
    "tokens that are as short": (
        {"ep": {"compress": "fp16"}},
        {"dp": 2, "ep": 2, "precision": "bf16"},
        'comm.ep.compress = "fp16" sends as many bytes as layout.precision = "bf16" does: use '
        '"int8", "fp8" or "int4", or leave it out.',
    ),
    "exact activations": (
        {"pp": {"compress": "int8"}},
        {"pp": 2, "param_dtype": "fp64"},
        'comm.pp.compress = "int8" would round the activations that layout.param_dtype = "fp64" '
        'keeps exact: set it to "none", or param_dtype = "fp32".',
    ),
    "fp64": (
        {"dp": {"compress": "fp8"}},
        {"dp": 2, "param_dtype": "fp64"},
        'comm.dp.compress = "fp8" would round the gradients that layout.param_dtype = "fp64" '
        'keeps exact: set it to "none", or param_dtype = "fp32".',
    ),
    "workers without a method": (
        {"local": {"every": 7}},
        {"dp": 2},
        'comm.local.every = 7 has no effect with comm.local.method = "none": leave it out.',
    ),
    "a worker alone": (
        DILOCO,
        {},
        'comm.local.method = "diloco" has nobody to meet with layout.dp = 1: raise dp or leave it '
        "out.",
    ),
    "workers of stages": (
        DILOCO,
        {"dp": 2, "pp": 2},
        'comm.local.method = "diloco" needs workers with all layers and experts on each rank, '
        "which layout.pp = 2 cuts: set pp = 1 or leave it out.",
    ),
    "workers that code gradients": (
        {**DILOCO, "fsdp": {"compress": "int8"}},
        {"dp": 2, "fsdp": 2},
        'comm.fsdp.compress = "int8" keeps errors of its own beside those of comm.local.method = '
        '"diloco": leave one of them out.',
    ),
    "workers that share statistics": (
        DILOCO,
        {"dp": 2, "sync_batch_norm": True},
        "layout.sync_batch_norm = true shares statistics in every step, and comm.local.method = "
        '"diloco" lets each worker step for itself: leave one of them out.',
    ),
    "gradients of workers": (
        {**DILOCO, **INT8},
        {"dp": 2},
        'comm.dp.compress = "int8" has no effect with comm.local.method = "diloco", under which no '
        "gradients travel: leave it out (comm.local.compress is for what travels instead).",
    ),
    "rounded parameters of workers": (
        DILOCO,
        {"dp": 2, "param_dtype": "bf16"},
        'comm.local.method = "diloco" averages what the optimizer steps, of which '
        'layout.param_dtype = "bf16" keeps a rounded copy: set param_dtype = "fp32".',
    ),
    "loss scales of workers": (
        DILOCO,
        {"dp": 2, "precision": "fp16"},
        'comm.local.method = "diloco" has a loss scale per worker with layout.precision = "fp16", '
        'which a checkpoint keeps one of: set precision = "bf16" or "fp32".',
    ),
    "fp64 of workers": (
        {"local": {"method": "diloco", "compress": "int4"}},
        {"dp": 2, "param_dtype": "fp64"},
        'comm.local.compress = "int4" would round the outer gradients that layout.param_dtype = '
        '"fp64" keeps exact: set it to "none", or param_dtype = "fp32".',
    ),
    "fragments without streaming": (
        {"local": {"method": "diloco", "fragments": 2}},
        {"dp": 2},
        'comm.local.fragments = 2 has no effect with comm.local.method = "diloco": leave it out.',
    ),
    "an outer optimizer without one": (
        {"local": {"method": "local_sgd", "outer_lr": 0.5}},
        {"dp": 2},
        'comm.local.outer_lr = 0.5 has no effect with comm.local.method = "local_sgd": leave it '
        "out.",
    ),
    "later than the next": (
        {"local": {**STREAMING, "every": 5, "overlap_steps": 5}},
        {"dp": 2},
        "comm.local.overlap_steps = 5 but a fragment leaves again after comm.local.every = 5 "
        "steps: lower overlap_steps or raise every.",
    ),
    "more fragments than steps": (
        {"local": {**STREAMING, "every": 5, "fragments": 6}},
        {"dp": 2},
        "comm.local.fragments = 6 don't each have a step of their own within comm.local.every = "
        "5: lower fragments or raise every.",
    ),
}


@pytest.mark.parametrize(("comm", "changes", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_is_refused_in_one_sentence(comm, changes, sentence):
    with pytest.raises(InputError) as refused:
        _check(comm, changes)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ("comm.local.method=streaming",),
            "elastic.min_nodes = 1 needs rounds of everything, and comm.local.method = "
            '"streaming" is always between two of some fragment: use "diloco", or set min_nodes '
            "to 0.",
        ),
        (
            ("comm.local.method=diloco", "elastic.exact=true"),
            "elastic.exact = true is of sums over all ranks in each step, and with "
            'comm.local.method = "diloco" there are none: set it to false.',
        ),
        (
            ("comm.local.method=diloco", "elastic.copy_every=4"),
            "elastic.copy_every = 4 has no effect with comm.local.method = "
            '"diloco", whose workers keep a copy of each round: leave it out.',
        ),
        (
            ("comm.local.method=diloco", "comm.local.min_workers=2"),
            "comm.local: min_workers is gone: let elastic.min_nodes say on how many nodes the run "
            "goes on.",
        ),
    ],
)
def test_what_workers_that_may_be_lost_can_not_have_is_refused(settings, sentence):
    with pytest.raises(InputError) as refused:
        read_job(None, ["elastic.min_nodes=1", *settings])
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ("comm.ep.hot_every=5",),
            "comm.ep.hot_every = 5 has no effect with comm.ep.hot_experts = 0: raise hot_experts "
            "or leave it out.",
        ),
        (
            ("comm.ep.hot_experts=1",),
            "comm.ep.hot_experts = 1 needs a model with experts, and this one is dense: leave it "
            "out.",
        ),
        (
            (EXPERTS, "comm.ep.hot_experts=4"),
            "comm.ep.hot_experts = 4 must be less than model.experts.num_experts = 4: lower it.",
        ),
        (
            (EXPERTS, "comm.ep.hot_experts=3", "elastic.min_nodes=1", "elastic.exact=true"),
            "comm.ep.hot_experts = 3 sums gradients of an expert rank by rank, which rounds as "
            "elastic.exact = true must not: set it to 0, or exact to false.",
        ),
    ],
)
def test_copies_that_can_not_be_are_refused(settings, sentence):
    with pytest.raises(InputError) as refused:
        read_job(None, settings)
    assert str(refused.value) == sentence


def test_the_job_of_an_earlier_run_is_read_where_it_set_no_min_workers():
    assert read_job(None, ["comm.local.min_workers=0"]) == read_job(None, [])
