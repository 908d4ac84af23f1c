"""How every "auto" becomes concrete, and what is refused (pure)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster, Device, device
from paceline.config.job import Job, JobSpec, decided, read_job, to_raw
from paceline.config.layout import Layout
from paceline.plan.resolve import resolve
from paceline.plan.search.choose import plan_job

CPU = Device(name="some CPU", kind="cpu", precisions=("fp64", "fp32"))


def _machine(num: int, what: Device = CPU) -> Cluster:
    return Cluster(device=what, devices_per_node=num, num_nodes=1)


def _job(*overrides: str) -> JobSpec:
    return read_job(None, overrides)


@pytest.mark.parametrize("num", [1, 2, 4, 8])
def test_everything_becomes_concrete_and_each_choice_has_a_reason(num):
    plan = resolve(_job(), _machine(num))
    assert isinstance(plan.job, Job)
    assert plan.job.layout.num_ranks == num
    asked = {f"layout.{key}" for key in _job().layout.undecided}
    assert asked <= set(plan.reasons)


MODELS = {
    "decoder": to_raw(read_job(None, ["model.max_seq_len=1024"]).model),
    "dlrm": {"tables": [100, 50], "dim": 8, "num_dense": 4, "bottom": [16], "top": [16]},
}
SOURCES = {"dlrm": "clicks", "resnet": "images", "efficientnet": "images"}
"""What families are trained on that don't read text."""


@pytest.mark.parametrize("family", [*MODELS, "resnet", "efficientnet", "custom"])
@pytest.mark.parametrize("make", [resolve, plan_job])
def test_a_plan_makes_a_job_of_what_is_asked_for(family, make):
    train = {"steps": 10, "global_batch": 64}
    model = MODELS.get(family, {}) | {"family": family}
    raw = {"model": model, "train": train, "data": {"source": SOURCES.get(family, "here")}}
    asked = JobSpec.parse(raw)
    job = make(asked, _machine(2)).job
    assert type(asked) is JobSpec
    assert type(job) is Job
    assert (type(job.layout), type(job.cluster)) == (Layout, Cluster)
    assert decided(JobSpec.parse(to_raw(job))) == job


def test_what_a_person_fixed_stays():
    fixed = ("layout.dp=1", "layout.micro_batch=2", "layout.recompute=full", "layout.compile=true")
    layout = resolve(_job(*fixed), _machine(4)).job.layout
    assert (layout.dp, layout.fsdp, layout.micro_batch) == (1, 4, 2)
    assert (layout.recompute, layout.compile) == ("full", True)


def test_a_concrete_job_resolves_to_itself():
    job = resolve(_job(), _machine(2)).job
    assert resolve(job, _machine(8)).job == job


def test_a_model_that_fills_the_device_is_sharded():
    eight_billion = (
        "model.hidden_size=4096", "model.ffn_size=14336", "model.num_layers=32",
        "model.num_heads=32", "model.num_kv_heads=8",
    )  # fmt: skip
    gpus = _machine(8, device("A100-80"))
    assert resolve(_job(*eight_billion), gpus).job.layout.fsdp == 8
    assert resolve(_job(), gpus).job.layout.fsdp == 1


@pytest.mark.parametrize(
    ("what", "chosen"), [(device("A100-80"), "bf16"), (device("V100"), "fp32"), (CPU, "fp32")]
)
def test_precision_follows_the_device(what, chosen):
    assert resolve(_job(), _machine(2, what)).job.layout.precision == chosen


@given(
    num_ranks=st.integers(1, 64),
    share=st.integers(1, 64),
    seq_len=st.sampled_from([16, 64, 256]),
)
def test_micro_batches_always_tile_the_global_batch(num_ranks, share, seq_len):
    job = _job(f"train.global_batch={num_ranks * share}", f"train.seq_len={seq_len}")
    job = resolve(job, _machine(num_ranks)).job
    assert job.accumulation * job.micro_batch * num_ranks == job.train.global_batch


# What is given -> what the sentence must say.
WRONG = {
    ("layout.precision=bf16",): ['layout.precision = "bf16"', "some CPU", "fp32"],
    ("layout.param_dtype=bf16",): ['layout.param_dtype = "bf16"', "some CPU"],
    ("layout.param_dtype=fp64", "layout.precision=fp32"): ["fp64", "change one"],
    ("train.global_batch=9",): ["train.global_batch = 9", "2 ranks", "use 8"],
    ("layout.micro_batch=3",): ["micro-batches of 3", "use 18"],
    ("layout.dp=3",): ["layout.dp = 3", "2 ranks"],
    ("layout.dp=2", "layout.fsdp=2"): ["2 x 2", "the cluster has 2"],
}


@pytest.mark.parametrize("overrides", WRONG)
def test_what_can_not_be_is_refused_in_one_sentence(overrides):
    with pytest.raises(InputError) as refusal:
        resolve(_job(*overrides), _machine(2))
    sentence = str(refusal.value)
    assert "\n" not in sentence
    for words in WRONG[overrides]:
        assert words in sentence


def test_bf16_is_refused_on_a_gpu_without_it():
    with pytest.raises(InputError, match="V100"):
        resolve(_job("layout.precision=bf16"), _machine(2, device("V100")))


def test_a_cpu_has_no_streams_to_put_first():
    with pytest.raises(InputError, match=r'comm.priority = "high" is of the streams of CUDA'):
        resolve(_job("comm.priority=high"), _machine(2))
    gpus = _machine(2, device("A100-80"))
    assert resolve(_job("comm.priority=high"), gpus).job.comm.priority == "high"
