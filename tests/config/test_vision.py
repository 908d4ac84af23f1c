"""Convolutional networks as data: against published counts, and against torch's own (meta)."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.config.errors import InputError
from paceline.config.job import JobSpec, to_toml
from paceline.config.vision import Conv, EfficientNet, ResNet

# Parameters and 1e9 multiply-adds that torchvision states for its weights (`_metrics`, "GFLOPS").
TORCHVISION = [
    (ResNet(depth=18), 11_689_512, 1.814),
    (ResNet(depth=34), 21_797_672, 3.664),
    (ResNet(depth=50), 25_557_032, 4.089),
    (ResNet(depth=101), 44_549_160, 7.801),
    (ResNet(depth=152), 60_192_808, 11.514),
    (ResNet(depth=50, groups=32, width_per_group=4), 25_028_904, 4.23),
    (ResNet(depth=101, groups=32, width_per_group=8), 88_791_336, 16.414),
    (ResNet(depth=101, groups=64, width_per_group=4), 83_455_272, 15.46),
    (ResNet(depth=50, width_per_group=128), 68_883_240, 11.398),
    (EfficientNet(variant="b0"), 5_288_548, 0.386),
    (EfficientNet(variant="b1", image_size=240), 7_794_184, 0.687),
    (EfficientNet(variant="b2", image_size=288), 9_109_994, 1.088),
    (EfficientNet(variant="b3", image_size=300), 12_233_232, 1.827),
    (EfficientNet(variant="b4", image_size=380), 19_341_616, 4.394),
    (EfficientNet(variant="b5", image_size=456), 30_389_784, 10.266),
    (EfficientNet(variant="b6", image_size=528), 43_040_704, 19.068),
    (EfficientNet(variant="b7", image_size=600), 66_347_960, 37.75),
]


@pytest.mark.parametrize(("network", "params", "giga_macs"), TORCHVISION)
def test_counts_are_those_of_torchvision(network, params, giga_macs):
    assert network.num_params == params
    assert network.forward_flops_per_image / 2e9 == pytest.approx(giga_macs, abs=6e-3)
    assert network.train_flops_per_image == 3 * network.forward_flops_per_image


def test_counts_of_timms_resnext_with_squeeze_and_excitation():
    # timm states 44.18 M and 48.96 M parameters.
    plain = ResNet(depth=101, groups=32, width_per_group=4)
    assert plain.num_params == 44_177_704
    assert plain.replace(squeeze_excite=True).num_params == 48_955_416


class _Block(nn.Sequential):
    """A convolution and its norm, without the residual wiring, which has no parameters."""

    def __init__(self, conv: Conv) -> None:
        super().__init__(
            nn.Conv2d(
                *(conv.in_channels, conv.out_channels, conv.kernel, conv.stride),
                padding=conv.kernel // 2,
                groups=conv.groups,
                bias=False,
            ),
            nn.BatchNorm2d(conv.out_channels),
        )


@pytest.mark.parametrize(
    "network", [ResNet(), ResNet(depth=18, image_size=97), EfficientNet(image_size=240)]
)
def test_each_convolution_is_torchs(network):
    with torch.device("meta"):
        for conv in network.convolutions:
            block = _Block(conv)
            images = torch.empty(1, conv.in_channels, conv.in_side, conv.in_side)
            with FlopCounterMode(display=False) as counter:
                out = block(images)
            assert out.numel() == conv.out_elements
            assert images.numel() == conv.in_elements
            excite = 4 * conv.squeeze * conv.out_channels
            assert counter.get_total_flops() == conv.forward_flops - excite
            weights = sum(parameter.numel() for parameter in block.parameters())
            assert weights == conv.num_weights + 2 * conv.out_channels


@pytest.mark.parametrize("network", [ResNet(depth=152), EfficientNet(variant="b3")])
def test_each_convolution_takes_what_an_earlier_one_gave(network):
    given = {(3, network.image_size)}
    for conv in network.convolutions:
        assert (conv.in_channels, conv.in_side) in given
        side = -(-conv.out_side // 2) if conv.pooled else conv.out_side
        given.add((conv.out_channels, side))


def _job(**model: object) -> JobSpec:
    return JobSpec.parse({"model": model, "train": {"steps": 10, "global_batch": 512}})


def test_a_job_names_the_network_and_survives_toml(tmp_path):
    from paceline.config.job import read_job

    job = _job(family="resnet", depth=101, groups=32, width_per_group=4, image_size=256)
    assert job.model == ResNet(depth=101, groups=32, width_per_group=4, image_size=256)
    assert job.model.convolutions  # what was worked out is no setting
    assert job.model.replace(depth=50).depth == 50
    (tmp_path / "job.toml").write_text(to_toml(job))
    assert read_job(tmp_path / "job.toml") == job


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"family": "resnet", "dpeth": 50}, "model.dpeth is not a setting; did you mean depth"),
        ({"family": "efficientnet", "varant": "b0"}, "did you mean variant"),
        ({"family": "resnet", "depth": 51}, "model.depth = 51"),
        ({"family": "resnet", "depth": 18, "groups": 2}, "depth = 18 has no bottlenecks"),
        ({"family": "resnet", "image_size": 8}, "model.image_size = 8"),
        ({"family": "resnt"}, "'resnt' is not known: use 'decoder', 'dlrm', 'resnet'"),
    ],
)
def test_wrong_networks_are_refused_in_one_sentence(model, words):
    with pytest.raises(InputError) as error:
        _job(**model)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_networks_that_are_only_planned_are_not_trained():
    from paceline.config.job import read_job
    from paceline.train.this_machine import resolve_on_this_machine, why_only_planned

    only_planned = ({"family": "resnet", "squeeze_excite": True}, {"family": "efficientnet"})
    for model in only_planned:
        with pytest.raises(InputError, match="can be planned, not trained yet"):
            resolve_on_this_machine(_job(**model))
    experts = "model.experts={num_experts=4,experts_per_token=2,ffn_size=16}"
    with pytest.raises(InputError, match=r"experts are SwiGLU: .* not trained yet"):
        resolve_on_this_machine(read_job(None, [experts, "model.gated=false"]))
    assert why_only_planned(read_job(None)) is None
