"""Reading, changing and writing Jobs (pure)."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.comm import Comm, FsdpComm
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster, ClusterSpec, Device
from paceline.config.job import (
    Job,
    JobSpec,
    change_job,
    decided,
    read_cluster,
    read_job,
    to_raw,
    to_toml,
)
from paceline.config.layout import Layout, LayoutSpec
from paceline.observe.run import Run
from paceline.plan.resolve import resolve

CPU = Device(name="some CPU", kind="cpu", precisions=("fp64", "fp32"))


def _demo_with(*overrides: str) -> JobSpec:
    return read_job(None, overrides)


def test_the_demo_job_is_partial_and_valid():
    job = read_job(None)
    assert job.name == "demo"
    assert job.cluster.undecided
    assert job.layout.undecided


def test_toml_reads_back_to_an_equal_job(tmp_path):
    job = _demo_with("optim.schedule=wsd", "optim.decay_steps=10", "checkpoint.keep_every=100")
    file = tmp_path / "job.toml"
    file.write_text(to_toml(job))
    assert read_job(file) == job


@given(
    lr=st.floats(1e-6, 1.0),
    steps=st.integers(20, 10**9),
    dp=st.one_of(st.just("auto"), st.integers(1, 10**5)),
    source=st.one_of(st.text(min_size=1), st.lists(st.text(min_size=1), min_size=1).map(tuple)),
)
def test_any_job_survives_toml(lr, steps, dp, source):
    demo = read_job(None)
    job = demo.replace(
        optim=demo.optim.replace(lr=lr),
        train=demo.train.replace(steps=steps),
        layout=demo.layout.replace(dp=dp),
        data=demo.data.replace(source=source),
    )
    assert JobSpec.parse(tomllib.loads(to_toml(job))) == job


# ---- what is asked for, and what runs ------------------------------------------------------------

ONE = Cluster(device=CPU, devices_per_node=1, num_nodes=1)


def _planned(*overrides: str) -> Job:
    return resolve(_demo_with(*overrides), ONE).job


def test_a_job_reads_back_to_an_equal_one(tmp_path):
    job = _planned("optim.schedule=wsd", "optim.decay_steps=10", "layout.recompute=full")
    file = tmp_path / "job.toml"
    file.write_text(to_toml(job))
    again = decided(read_job(file))
    assert isinstance(again, Job)
    assert again == job
    assert to_toml(again) == to_toml(read_job(file)) == to_toml(job)


@pytest.mark.parametrize("name", [*LayoutSpec().undecided, *ClusterSpec().undecided])
def test_a_job_holds_no_auto(name):
    section = "layout" if name in Layout.model_fields else "cluster"
    raw = to_raw(_planned())
    raw[section][name] = "auto"
    assert JobSpec.parse(raw) is not None
    with pytest.raises(InputError, match=rf"^{section}\.{name} = 'auto' can't be used: [^\n]*\.$"):
        Job.parse(raw)


@pytest.mark.parametrize("wish", ["layout.dp=auto", "cluster.num_nodes=auto"])
def test_the_job_of_a_run_has_nothing_left_to_plan(tmp_path, wish):
    (tmp_path / "job.toml").write_text(
        to_toml(change_job(JobSpec.parse(to_raw(_planned())), [wish]))
    )
    name = wish.partition("=")[0]
    with pytest.raises(InputError, match=rf'^{name} = "auto" is left to the planner, [^\n]*\.$'):
        Run(tmp_path).job()


def test_a_changed_job_is_still_a_job():
    job = _planned()
    assert isinstance(job.replace(name="other"), Job)
    assert isinstance(change_job(job, ["layout.recompute=full"]), Job)
    assert isinstance(job.layout.replace(recompute="full"), Layout)
    with pytest.raises(InputError, match=r"^dp = 'auto' can't be used: it must be an integer\.$"):
        job.layout.replace(dp="auto")


def test_a_layout_has_the_settings_of_its_spec_and_by_default_those_of_one_rank():
    assert [*Layout.model_fields] == [*LayoutSpec.model_fields]
    assert [*Cluster.model_fields] == [*ClusterSpec.model_fields]
    assert [*Job.model_fields] == [*JobSpec.model_fields]
    open_ = LayoutSpec().undecided
    changed = {"micro_batch", "bucket_mib"}  # which follow from the batch and the model
    planned = {name: value for name, value in vars(_planned().layout).items() if name in open_}
    assert {n: v for n, v in planned.items() if n not in changed} == {
        n: v for n, v in vars(Layout()).items() if n in open_ and n not in changed
    }
    assert to_raw(Layout()) == to_raw(LayoutSpec.parse(vars(Layout())))


def test_set_changes_raw_data_before_anything_is_derived():
    # head_dim is derived from num_heads, so it must follow the change.
    assert _demo_with("model.num_heads=16").model.head_dim == 16


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("optim.lr=3e-4", lambda job: job.optim.lr == 3e-4),
        ("layout.compile=true", lambda job: job.layout.compile is True),
        ("data.source=some/file.txt", lambda job: job.data.source == "some/file.txt"),
        ("train.weights=false", lambda job: job.train.weights is None),
        ('data.source=["a", "b"]', lambda job: job.data.source == ("a", "b")),
        ("name = other", lambda job: job.name == "other"),
    ],
)
def test_set_values_are_toml_or_else_text(override, read):
    assert read(_demo_with(override))


# What is given -> what the sentence must say.
WRONG = {
    "optim.lrr=3": ["optim.lrr is not a setting", "did you mean lr?"],
    "trian.steps=3": ["trian is not a setting", "did you mean train?"],
    "optim.lr=fast": ["optim.lr = 'fast'", "a number"],
    "train.steps=2.5": ["train.steps = 2.5", "an integer"],
    "train.steps=0": ["train.steps = 0", "greater than 0"],
    "layout.dp=many": ["layout.dp = 'many'", "'auto'", "an integer"],
    "layout.dp=0": ["layout.dp = 0", "greater than 0"],
    "layout.precision=int8": ["layout.precision = 'int8'", "'bf16'"],
    "cluster.device=H100": ["device 'H100'", "H100-SXM"],
    "model.family=gpt": ["model.family = 'gpt'", "'decoder'"],
    "name=../up": ["name = '../up'"],
    "train.seq_len=512": ["train.seq_len = 512", "model.max_seq_len = 256"],
    "optim.warmup_steps=1000": ["1000 steps", "train.steps = 160"],
    "optim.decay_steps=5": ["optim.decay_steps = 5", "wsd"],
    "optim.schedule=wsd": ["optim.decay_steps", "these are 0"],
    "finetune.targets=[]": ["finetune.targets = []", "must be a list of at least 1 item."],
    "data.filter=''": ["data.filter = ''", "must be a text of at least 1 character"],
    "optim.lr": ["section.key=value"],
    "name.x=1": ["name is a value"],
}


@pytest.mark.parametrize("override", WRONG)
def test_wrong_settings_are_refused_in_one_sentence(override):
    with pytest.raises(InputError) as refusal:
        _demo_with(override)
    sentence = str(refusal.value)
    assert "\n" not in sentence
    for words in WRONG[override]:
        assert words in sentence


def test_a_missing_file_and_broken_toml_are_named(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.toml does not exist"):
        read_job(tmp_path / "nothing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    with pytest.raises(InputError, match=r"broken\.toml is not valid TOML"):
        read_job(broken)


def test_a_required_setting_that_is_missing_is_named(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('[model]\nfamily = "custom"\n[train]\nsteps = 3\n')
    with pytest.raises(InputError, match=r"train\.global_batch is missing"):
        read_job(file)


@pytest.mark.parametrize("command", ["federate", "search"])
def test_the_file_of_another_command_is_named_as_such(tmp_path, command):
    file = tmp_path / "other.toml"
    file.write_text(f'[{command}]\njob = "my.toml"\n')
    with pytest.raises(InputError, match=rf"\[{command}\].*`paceline {command}`.*{command}\.job"):
        read_job(file)


def test_shapes_come_from_a_hugging_face_config(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128,'
        '"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}'
    )
    job = tmp_path / "job.toml"
    job.write_text('[model]\nhf = "."\nnum_layers = 3\n[train]\nsteps = 1\nglobal_batch = 1\n'
                   "seq_len = 8\n")  # fmt: skip
    model = read_job(job).model
    assert (model.hidden_size, model.ffn_size, model.num_layers) == (64, 128, 3)
    with pytest.raises(InputError, match=r"nowhere does not exist: give model\.hf"):
        read_job(job, ["model.hf=nowhere"])


CLUSTER_FILE = """
devices_per_node = 2
num_nodes = 1
[device]
name = "a core"
kind = "cpu"
[[tiers]]
name = "loopback"
num_devices = 2
latency_s = {value = 1e-4, origin = "measured", source = "here"}
bytes_per_s = {value = 1e9, origin = "measured", source = "here"}
[[tiers.collectives.all_reduce]]
num_ranks = 2
bytes = [1024.0, 4096.0]
seconds = [1e-4, 2e-4]
source = "here"
[stack]
constants = {launch_us = 3.0}
"""


def test_a_cluster_comes_from_a_file_and_other_settings_win(tmp_path):
    (tmp_path / "here.toml").write_text(CLUSTER_FILE)
    file = tmp_path / "job.toml"
    shown = to_toml(read_job(None))  # with every "auto"
    file.write_text(shown.replace("[cluster]", '[cluster]\nfile = "here.toml"'))
    job = read_job(file, ["cluster.num_nodes=2"])
    found = read_cluster(tmp_path / "here.toml")
    assert Cluster.parse(vars(job.cluster)) == found.replace(num_nodes=2)
    assert found.tiers[0].collectives["all_reduce"][0].seconds == (1e-4, 2e-4)
    assert found.stack is not None
    assert found.stack.constants == {"launch_us": 3.0}


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ('{"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.1-8B"}', r" \(meta"),
        ('{"peft_type": "LORA"}', ","),
        ("[1, 2]", ","),
        ("not JSON", ","),
    ],
)
@pytest.mark.parametrize("with_config", [False, True])
def test_adapters_are_said_to_be_no_network(tmp_path, text, base, with_config):
    """Whether the shapes of the network stand beside them or not: they aren't planned yet."""
    (tmp_path / "adapter_config.json").write_text(text)
    if with_config:
        (tmp_path / "config.json").write_text("{}")
    sentence = rf"holds adapters .* name .* base model{base}.*finetune.adapters"
    for named in (tmp_path, tmp_path / "adapter_config.json"):
        with pytest.raises(InputError, match=sentence):
            read_job(None, [f"model.hf={named}"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, r"here\.toml does not exist: give the path of a Cluster file"),
        ("[device", r"here\.toml is not valid TOML"),
        ('devices = "auto"', r"here\.toml\.devices is not a setting"),
        ("num_nodes = 0", r"here\.toml\.num_nodes = 0 can't be used"),
    ],
)
def test_a_wrong_cluster_file_is_named(tmp_path, text, sentence):
    if text is not None:
        (tmp_path / "here.toml").write_text(text)
    with pytest.raises(InputError, match=sentence):
        read_job(None, [f"cluster.file={tmp_path / 'here.toml'}"])


def test_a_cluster_file_without_a_setting_is_no_whole_cluster(tmp_path):
    file = tmp_path / "here.toml"
    file.write_text('device = "H200"\nnum_nodes = 2\n')
    with pytest.raises(InputError, match=r"here\.toml doesn't say its devices_per_node: give a"):
        read_cluster(file)
    assert read_job(None, [f"cluster.file={file}"]).cluster.undecided == ["devices_per_node"]


def test_what_was_chosen_for_an_axis_goes_with_it(tmp_path):
    """A plan's algorithm for shards once kept a Run from going on without shards."""
    sharded = _planned().replace(layout=Layout(fsdp=2, zero=3))
    chosen = {"fsdp": {"algorithm": "ring", "compress": "int8"}, "warmup_steps": 30}
    sharded = sharded.replace(comm=Comm.parse(chosen))
    file = tmp_path / "job.toml"
    file.write_text(to_toml(sharded))
    replicas = ("layout.dp=2", "layout.fsdp=1", "layout.zero=0")
    for job in (
        read_job(file, replicas),
        read_job(tmp_path, replicas),
        change_job(sharded, replicas),
    ):
        assert job.comm == Comm(fsdp=FsdpComm(algorithm="backend"))
    assert read_job(file, ("layout.zero=2",)).comm == sharded.comm
    named = read_job(file, (*replicas, "comm.fsdp.algorithm=pairwise"))
    assert named.comm.fsdp.algorithm == "pairwise", (
        "what is asked for is told to have no effect, later"
    )
