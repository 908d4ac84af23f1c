"""Convolutional networks priced: properties (pure), memory against torch's saved tensors (CPU)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.config.errors import InputError
from paceline.config.figure import Figure
from paceline.config.hardware import Cluster, Tier
from paceline.config.layout import Layout
from paceline.config.stack import CONSTANTS, Stack
from paceline.config.vision import Conv, EfficientNet, ResNet
from paceline.observe.terms import TERMS
from paceline.plan.convnet import (
    Training,
    convnet_memory_bytes,
    convnet_times,
    network_named,
    predict_convnet,
    predict_images_per_s,
)
from paceline.plan.convnet.kernels import forward_backward_s
from paceline.plan.convnet.memory import kept_bytes
from paceline.plan.convnet.step import bucket_ends
from paceline.plan.prediction import MEMORY_TERMS


def _cluster(name: str = "A100-80", per_node: int = 8, nodes: int = 1) -> Cluster:
    return Cluster.parse({"device": name, "devices_per_node": per_node, "num_nodes": nodes})


def _layout(dp: int, micro_batch: int, precision: str = "bf16", **changes: object) -> Layout:
    ones = dict.fromkeys(("fsdp", "tp", "pp", "cp", "ep", "ulysses", "stages_per_rank"), 1)
    fixed = {"zero": 0, "sequence_parallel": False, "schedule": "none", "split": ()}
    chosen = {"dp": dp, "micro_batch": micro_batch, "precision": precision, "bucket_mib": 25.0}
    rest = {"recompute": "none", "compile": False}
    return Layout.parse({**ones, **fixed, **chosen, **rest, **changes})


def _training(**changes: object) -> Training:
    columns = {
        "batch": np.array([64]),
        "num_ranks": np.array([8]),
        "precision": "bf16",
        "num_micro_batches": np.array([1]),
        "bucket_bytes": np.array([25 * 2**20]),
        "grad_bytes": np.array([4.0]),
    }
    return Training(**{**columns, **changes})


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
    memory = cluster.known_device.memory_bytes_per_s
    faster = cluster.known_device.replace(memory_bytes_per_s=_times(memory, factor))
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
    device = _cluster().known_device
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
    # A loader that gives 100 images a second decides alone.
    slow = _training(input_images_per_s=np.array([100.0]), **small)
    assert convnet_times(ResNet(), cluster, Stack(), slow).step_s == pytest.approx(0.01, rel=0.6)
    starved = _step_s(cluster, input_images_per_s=np.array([100.0]), **large)
    assert starved == pytest.approx(2.56)


def test_reducing_hides_behind_the_backward_pass_but_for_its_end():
    cluster = _cluster("A100-80", per_node=4, nodes=2)
    beside = convnet_times(ResNet(), cluster, Stack(), _training())
    after = convnet_times(ResNet(), cluster, Stack(overlaps_data_axes=False), _training())
    assert after.terms["exposed_comm.dp"] == pytest.approx(after.reduce_s)
    assert 0 < beside.terms["exposed_comm.dp"] < 0.6 * after.reduce_s
    alone = convnet_times(ResNet(), cluster, Stack(), _training(num_ranks=np.array([1])))
    assert alone.terms["exposed_comm.dp"] == 0
    # A quarter of the bytes takes less than half of the time on the wire.
    coded = convnet_times(ResNet(), cluster, Stack(), _training(grad_bytes=np.array([1.0])))
    assert coded.reduce_s < 0.5 * beside.reduce_s


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
