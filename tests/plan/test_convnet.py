"""Convolutional networks priced: properties (pure), memory against torch's saved tensors (CPU)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.config.comm import Comm, DpComm, LocalUpdates, codec
from paceline.config.errors import InputError
from paceline.config.figure import Figure
from paceline.config.hardware import Cluster, Tier
from paceline.config.job import read_job
from paceline.config.layout import Layout
from paceline.config.stack import CONSTANTS, Stack
from paceline.config.vision import Conv, EfficientNet, ResNet
from paceline.observe.terms import TERMS
from paceline.plan.collectives import collective_s, tiers_of
from paceline.plan.convnet import (
    ImageTraining,
    convnet_memory_bytes,
    convnet_times,
    exchange_s,
    predict_convnet,
)
from paceline.plan.convnet.kernels import forward_backward_s
from paceline.plan.convnet.memory import kept_bytes
from paceline.plan.convnet.step import bucket_ends
from paceline.plan.prediction import MEMORY_TERMS, Prediction
from paceline.plan.price.compress import codec_s
from paceline.plan.search.choose import plan_job
from paceline.published.convnets import network_named, predict_images_per_s
from tests.plan.planned import faster


def _cluster(name: str = "A100-80", per_node: int = 8, nodes: int = 1) -> Cluster:
    return Cluster.parse({"device": name, "devices_per_node": per_node, "num_nodes": nodes})


def _layout(dp: int, micro_batch: int, precision: str = "bf16", **changes: object) -> Layout:
    chosen = {"dp": dp, "micro_batch": micro_batch, "precision": precision}
    return Layout.parse({**chosen, **changes})


def _training(**changes: object) -> ImageTraining:
    columns = {
        "batch": np.array([64]),
        "num_ranks": np.array([8]),
        "precision": "bf16",
        "num_micro_batches": np.array([1]),
        "bucket_bytes": np.array([25 * 2**20]),
        "grad_bytes": np.array([4.0]),
    }
    return ImageTraining(**{**columns, **changes})


def _step_s(cluster: Cluster, network=None, stack: Stack | None = None, **changes: object) -> float:
    times = convnet_times(network or ResNet(), cluster, stack or Stack(), _training(**changes))
    return float(times.step_s[0])


@pytest.mark.parametrize("network", [ResNet(), EfficientNet(), ResNet(squeeze_excite=True)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_terms_sum_to_the_step_and_memory_to_its_whole(network, precision):
    layout = _layout(16, 64, precision)
    found = predict_convnet(network, _cluster(nodes=2), layout, 2048)
    assert sum(found.time_s.values()) == pytest.approx(found.step_s)
    assert set(found.time_s) <= set(TERMS)
    assert min(found.time_s.values()) >= 0
    assert set(found.heaviest.terms) <= set(MEMORY_TERMS)
    assert found.tokens_per_s == pytest.approx(2048 / found.step_s)
    assert 0 < found.mfu < 1
    low, high = found.interval_s
    assert low < found.step_s < high
    assert "never late" in found.assumptions["data_wait"]


def test_columns_are_priced_as_each_alone():
    batches, ranks = np.array([8, 64, 256]), np.array([1, 8, 16])
    cluster, buckets = _cluster(nodes=2), np.array([1.0, 4, 25]) * 2**20
    columns = {"batch": batches, "num_ranks": ranks, "bucket_bytes": buckets}
    together = convnet_times(ResNet(), cluster, Stack(), _training(**columns)).step_s
    for index in range(3):
        alone = {name: column[index : index + 1] for name, column in columns.items()}
        assert together[index] == pytest.approx(_step_s(cluster, **alone))


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 256),
    ranks=st.sampled_from([1, 2, 4, 8, 16, 64]),
    factor=st.floats(1.0, 4.0),
)
def test_more_bandwidth_is_never_slower(batch, ranks, factor):
    changes = {"batch": np.array([batch]), "num_ranks": np.array([ranks])}
    cluster = _cluster(nodes=8)
    memory = cluster.device.memory_bytes_per_s
    faster = cluster.device.replace(memory_bytes_per_s=_times(memory, factor))
    before = _step_s(cluster, **changes)
    assert _step_s(cluster.replace(device=faster), **changes) <= before * 1.0001
    slow, fast = (cluster.replace(tiers=_tiers(scale)) for scale in (1.0, factor))
    assert _step_s(fast, **changes) <= _step_s(slow, **changes) * 1.0001


def _times(figure: Figure | None, factor: float) -> Figure:
    assert figure is not None
    return figure.replace(value=figure.value * factor)


def _tiers(factor: float) -> tuple[Tier, ...]:
    def figure(value: float) -> Figure:
        return Figure(value=value, origin="assumed", source="test")

    return (
        Tier(
            name="nvlink",
            num_devices=8,
            latency_s=figure(3e-6),
            bytes_per_s=figure(300e9 * factor),
        ),
        Tier(
            name="infiniband",
            num_devices=64,
            latency_s=figure(5e-6),
            bytes_per_s=figure(25e9 * factor),
        ),
    )


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 256), more=st.integers(1, 64))
def test_more_images_take_no_less_time_and_memory(batch, more):
    cluster, network = _cluster(), ResNet()
    few, many = (_step_s(cluster, batch=np.array([size])) for size in (batch, batch + more))
    assert many >= few * 0.999
    small, large = (
        sum(convnet_memory_bytes(network, size, "bf16").values()) for size in (batch, batch + more)
    )
    assert large > small


@pytest.mark.parametrize("network", [ResNet(), ResNet(depth=101, groups=32, width_per_group=4)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_convolution_is_faster_than_the_peak(network, precision):
    """However fast the memory: on tensor cores narrow groups cost more than their FLOPs."""
    device = _cluster().device
    quick = device.replace(memory_bytes_per_s=_times(device.memory_bytes_per_s, 1e4))
    conv, _ = forward_backward_s(network, quick, Stack(), precision, np.array([64]))
    peak = device.peak_flops[precision].value
    for index, one in enumerate(network.convolutions):
        least = 64 * one.forward_flops / peak
        assert conv[0, index, 0] >= least
        assert conv[1, index, 0] >= least * (2 if index else 1)
    assert conv.sum() < 20 * 64 * network.train_flops_per_image / peak


@pytest.mark.parametrize("constant", ["conv_time", "memory_time", "comm_time_across"])
def test_constants_do_what_they_say(constant):
    limit = CONSTANTS[constant]
    cluster = _cluster(nodes=2)
    slow = Stack(constants={constant: limit.high}, overlaps_data_axes=False)
    fast = Stack(constants={constant: limit.low}, overlaps_data_axes=False)
    changes = {"num_ranks": np.array([16])}
    assert _step_s(cluster, stack=slow, **changes) > _step_s(cluster, stack=fast, **changes)


def test_features_of_the_software_cost_what_they_cost():
    cluster, large = _cluster(), {"batch": np.array([256])}
    base = _step_s(cluster, **large)
    assert _step_s(cluster, stack=Stack(elementwise="fused"), **large) < base
    assert _step_s(cluster, stack=Stack(channels_last=False), **large) > 1.1 * base
    # Few images: the host is late, unless it replays graphs.
    small = {"batch": np.array([1])}
    late = convnet_times(ResNet(), cluster, Stack(), _training(**small)).terms["host_gap"]
    graph = convnet_times(ResNet(), cluster, Stack(launch="graph"), _training(**small))
    assert late > 1.3 * graph.terms["host_gap"]
    # A loader that gives 20 images a second decides alone.
    slow = _training(input_images_per_s=np.array([20.0]), **small)
    assert convnet_times(ResNet(), cluster, Stack(), slow).step_s == pytest.approx(0.05, rel=0.1)
    starved = _step_s(cluster, input_images_per_s=np.array([100.0]), **large)
    assert starved == pytest.approx(2.56)


def test_reducing_hides_behind_the_backward_pass_but_for_its_end():
    cluster = _cluster("A100-80", per_node=4, nodes=2)
    beside = convnet_times(ResNet(), cluster, Stack(), _training())
    after = convnet_times(ResNet(), cluster, Stack(overlaps_data_axes=False), _training())
    assert after.terms["exposed_comm.dp"] == pytest.approx(after.reduce_s)
    # What travels after the last gradient: a third, most of it the last stage's large layers.
    assert 0.28 < beside.terms["exposed_comm.dp"] / after.reduce_s < 0.36
    alone = convnet_times(ResNet(), cluster, Stack(), _training(num_ranks=np.array([1])))
    assert alone.terms["exposed_comm.dp"] == 0
    # A quarter of the bytes takes more than a quarter of the time: latency stays.
    coded = convnet_times(ResNet(), cluster, Stack(), _training(grad_bytes=np.array([1.0])))
    assert 0.35 < coded.reduce_s / beside.reduce_s < 0.42


@given(st.lists(st.floats(0.3, 200), min_size=1, max_size=4))
def test_buckets_hold_every_gradient_once(mebibytes):
    sizes = np.array(mebibytes) * 2**20
    network = ResNet()
    filled = bucket_ends(network, sizes)
    assert sum(params for _, params in filled) == pytest.approx(network.num_params)
    assert all((params >= 0).all() for _, params in filled)


class _Residual(nn.Module):
    """A block of a ResNet as torchvision wires it, from its convolutions as data."""

    def __init__(self, convs: list[Conv]) -> None:
        super().__init__()
        self.main = nn.ModuleList(_normed(conv) for conv in convs if not conv.skips)
        self.skip = nn.ModuleList(_normed(conv) for conv in convs if conv.skips)

    def forward(self, images):
        out = images
        for index, layer in enumerate(self.main):
            out = layer(out)
            if index < len(self.main) - 1:
                out = nn.functional.relu_(out)
        residual = self.skip[0](images) if self.skip else images
        return nn.functional.relu_(out.add_(residual))


def _normed(conv: Conv) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(
            *(conv.in_channels, conv.out_channels, conv.kernel, conv.stride),
            padding=conv.kernel // 2,
            groups=conv.groups,
            bias=False,
        ),
        nn.BatchNorm2d(conv.out_channels),
    )


def _resnet(network: ResNet) -> nn.Module:
    stem, *rest = network.convolutions
    blocks: list[list[Conv]] = [[]]
    for conv in rest:
        blocks[-1].append(conv)
        if conv.adds:
            blocks.append([])
    return nn.Sequential(
        _normed(stem),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        *(_Residual(block) for block in blocks if block),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(network.num_features, network.num_classes),
    )


@pytest.mark.parametrize(
    "network",
    [
        ResNet(depth=18, image_size=64),
        ResNet(depth=50, image_size=64),
        ResNet(depth=50, image_size=64, groups=32, width_per_group=4),
    ],
)
def test_activations_are_those_that_autograd_saves(network):
    module = _resnet(network)
    assert sum(parameter.numel() for parameter in module.parameters()) == network.num_params
    own = {tensor.untyped_storage().data_ptr() for tensor in module.state_dict().values()}
    saved: dict[int, int] = {}
    keep: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
            keep.append(tensor)  # so that no address is used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(torch.randn(2, 3, 64, 64)).sum()
    assert sum(saved.values()) == pytest.approx(2 * kept_bytes(network, 4), rel=0.02)


def test_a_compiled_network_has_fused_kernels():
    eager, compiled = (
        predict_convnet(ResNet(), _cluster(), _layout(8, 64, compile=switch), 512)
        for switch in (False, True)
    )
    assert compiled.time_s["other_kernels"] < 0.8 * eager.time_s["other_kernels"]


def test_names_of_published_networks():
    assert network_named("resnet50-v1.5", 224) == ResNet()
    wide = {"groups": 32, "width_per_group": 4}
    assert network_named("se-resnext101-32x4d", 224) == ResNet(
        depth=101, squeeze_excite=True, **wide
    )
    assert network_named("ResNet-152", 256) == ResNet(depth=152, image_size=256)
    wide_b4 = EfficientNet(variant="b4", wide_squeeze=True, image_size=380)
    assert network_named("efficientnet-widese-b4", 380) == wide_b4
    assert network_named("ssd300-resnet50", 300) is None
    assert network_named("resnet51", 224) is None


def test_what_cant_be_priced_says_why():
    assert predict_images_per_s(_cluster(), "vgg16", 224, "fp16") == "network"
    assert predict_images_per_s(_cluster(), "resnet50", 224, "int8") == "precision"
    assert predict_images_per_s(_cluster("V100"), "resnet50", 224, "tf32") == "precision"
    found = predict_images_per_s(_cluster(), "resnet50", 224, "fp16 AMP")
    assert "256 images" in found.assumptions["batch"]
    assert (
        predict_images_per_s(_cluster(), "resnet50", 224, "bf16", 64).assumptions.get("batch")
        is None
    )
    with pytest.raises(InputError, match="replicas only"):
        predict_convnet(ResNet(), _cluster(), _layout(1, 8, fsdp=8, zero=3), 64)
    with pytest.raises(InputError, match="fp8"):
        predict_convnet(ResNet(), _cluster("H100-SXM"), _layout(8, 8, "fp8"), 64)
    with pytest.raises(InputError, match="global_batch = 65"):
        predict_convnet(ResNet(), _cluster(), _layout(8, 8), 65)


def test_fp32_convolutions_take_tf32_unless_told_not_to():
    layout = _layout(8, 64, "fp32")
    quick = predict_convnet(ResNet(), _cluster(), layout, 512)
    slow = predict_convnet(ResNet(), _cluster(), layout, 512, tf32=False)
    assert slow.time_s["matmul"] > 3 * quick.time_s["matmul"]


def test_published_residual_networks_are_met_without_a_fit():
    """NVIDIA's own rates of one GPU, images/s (DeepLearningExamples, commit 729963dd)."""
    published = [
        ("A100-80", "resnet50", "tf32", 938),
        ("A100-80", "resnet50", "fp16", 2470),
        ("A100-80", "resnext101-32x4d", "tf32", 456),
        ("A100-80", "resnext101-32x4d", "fp16", 1211),
        ("V100-16", "resnet50", "fp32", 367),
        ("V100-16", "resnet50", "fp16", 1200),
        ("V100-16", "resnext101-32x4d", "fp32", 147),
        ("V100-16", "resnext101-32x4d", "fp16", 587),
    ]
    errors = []
    for name, network, precision, rate in published:
        found = predict_images_per_s(_cluster(name, per_node=1), network, 224, precision)
        errors.append(abs(found.tokens_per_s / rate - 1))
    assert np.mean(errors) < 0.15
    assert max(errors) < 0.25


# ---- how gradients travel ------------------------------------------------------------------------


def _with_comm(comm: Comm, cluster: Cluster | None = None, **changes: object) -> Prediction:
    return predict_convnet(
        ResNet(), cluster or _cluster(nodes=2), _layout(16, 64, **changes), 1024, comm=comm
    )


def test_an_algorithm_is_priced_by_its_own_rounds():
    num_bytes = 4.0 * ResNet().num_params
    cluster = _cluster(nodes=2)
    for name in ("hierarchical", "ring"):
        training = _training(num_ranks=np.array([16]), algorithm=name)
        found = float(exchange_s(cluster, Stack(), training, num_bytes / 4)[0])
        assert found == pytest.approx(
            float(collective_s(cluster, f"all_reduce.{name}", num_bytes, 16, 1))
        )
    exact = _with_comm(Comm())
    assert _with_comm(Comm(dp=DpComm(algorithm="backend"))).time_s == exact.time_s
    assert _with_comm(Comm(dp=DpComm(algorithm="ring"))).step_s > exact.step_s


def test_eight_bits_send_a_quarter_and_cost_the_device_its_coding():
    """Both collectives of the form are on the wire; coding is exposed however fast that is."""
    num_params, cluster = float(ResNet().num_params), _cluster(nodes=2)
    training = _training(num_ranks=np.array([16]), codec=codec("int8"))
    coded_bytes = num_params * (8 + 32 / 256) / 8
    parts = [
        float(collective_s(cluster, op, coded_bytes, 16, 1)) for op in ("all_to_all", "all_gather")
    ]
    found = float(exchange_s(cluster, Stack(), training, num_params)[0])
    assert found == pytest.approx(sum(parts))
    coding_s = float(codec_s(cluster.device, codec("int8"), np.array([num_params]), 16)[0])
    instant = cluster.replace(tiers=tuple(faster(tier, 1e3) for tier in tiers_of(cluster)))
    in_bits = Comm(dp=DpComm(compress="int8"))
    added_s = (
        _with_comm(in_bits, instant).time_s["exposed_comm.dp"]
        - _with_comm(Comm(), instant).time_s["exposed_comm.dp"]
    )
    # The device computes a little slower beside what travels.
    assert added_s == pytest.approx(coding_s, rel=0.05)


def test_a_slow_network_is_where_eight_bits_pay():
    """Between single devices; several on a node would send half their codes to another one."""
    in_bits, fast = Comm(dp=DpComm(compress="int8")), _cluster(per_node=1, nodes=16)
    slow = fast.replace(tiers=tuple(faster(tier, 1 / 50) for tier in tiers_of(fast)))
    assert _with_comm(in_bits, fast).step_s > 0.95 * _with_comm(Comm(), fast).step_s
    assert _with_comm(in_bits, slow).step_s < 0.4 * _with_comm(Comm(), slow).step_s


def test_fused_norms_are_priced_as_compiled_ones():
    fused = _with_comm(Comm(), kernels="triton")
    assert fused.time_s == _with_comm(Comm(), compile=True).time_s
    assert fused.time_s["other_kernels"] < 0.8 * _with_comm(Comm()).time_s["other_kernels"]


@pytest.mark.parametrize(
    ("comm", "changes", "words"),
    [
        (Comm(dp=DpComm(compress="powersgd:4")), {}, 'comm.dp.compress = "powersgd" is not priced'),
        (Comm(local=LocalUpdates(method="diloco")), {}, 'comm.local.method = "diloco" is not'),
        (Comm(), {"recompute": "full"}, 'layout.recompute = "full" and'),
    ],
)
def test_what_is_not_priced_is_refused(comm, changes, words):
    with pytest.raises(InputError) as error:
        _with_comm(comm, **changes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_job_that_is_trained_has_its_prediction(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('[model]\nfamily = "resnet"\n[train]\nsteps = 1\nglobal_batch = 512\n')
    job = read_job(file)
    plan = plan_job(job, _cluster())
    assert plan.ranked[0].layout == plan.job.layout
    assert plan.ranked[0].tokens_per_s == pytest.approx(512 / plan.ranked[0].step_s)
