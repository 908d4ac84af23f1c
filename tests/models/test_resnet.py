"""ResNet's module: shapes and parameters as the noun counts them, its operators by hand (CPU)."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.config.vision import ResNet
from paceline.kernels import switch
from paceline.models.resnet import Norm, ResNetwork, torchvision_config, torchvision_state
from tests.models import torchvision_like

SMALL = {"image_size": 32, "num_classes": 10}


def _network(**shape: object) -> ResNetwork:
    module = ResNetwork(ResNet(**{**SMALL, **shape}))
    module.init_weights(torch.Generator().manual_seed(0))
    return module


@pytest.mark.parametrize(
    "shape",
    [{"depth": 18}, {"depth": 50}, {"depth": 50, "groups": 32, "width_per_group": 4}],
)
def test_the_module_has_the_parameters_and_the_shapes_of_the_noun(shape):
    noun, module = ResNet(**SMALL, **shape), _network(**shape)
    assert sum(p.numel() for p in module.parameters()) == noun.num_params
    seen = []
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda _l, x, y: seen.append((x[0].shape, y.shape)))
    assert module(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    by_noun = [
        ((2, c.in_channels, c.in_side, c.in_side), (2, c.out_channels, c.out_side, c.out_side))
        for c in noun.convolutions
    ]
    assert sorted(map(str, seen)) == sorted(str(tuple(map(torch.Size, one))) for one in by_noun)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ({"depth": 18}, "resnet18"),
        ({"depth": 50}, "resnet50"),
        ({"depth": 50, "groups": 32, "width_per_group": 4}, "resnext50_32x4d"),
        ({"depth": 101, "width_per_group": 128}, "wide_resnet101_2"),
        ({"depth": 50, "groups": 2, "width_per_group": 32}, None),
    ],
)
def test_torchvisions_network_computes_the_same_with_our_tensors(shape, name):
    noun, module = ResNet(**SMALL, **shape), _network(**shape)
    images = torch.randn(3, 3, 32, 32)
    for layer in module.modules():
        if isinstance(layer, Norm):  # no two norms alike
            layer.weight.data.uniform_(0.3, 0.7)
            layer.bias.data.uniform_(-0.1, 0.1)
    module(images)  # and statistics of their own
    config = torchvision_config(noun)
    assert config["architecture"] == name
    theirs = torchvision_like.of_config(config)
    theirs.load_state_dict(torchvision_state(noun, module.state_dict()))
    with torch.no_grad():
        ours = module.eval()(images)
        torch.testing.assert_close(theirs.eval()(images), ours, rtol=1e-4, atol=1e-4)


class _ByHand(nn.Module):
    """A basic block as textbooks have it, on the weights of one of ours."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.parts = [block.inner[0], block.last, block.project]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last, project = self.parts
        inner = self._norm(last, last.conv(F.relu(self._norm(first, first.conv(x)))))
        return F.relu(inner + (x if project is None else self._norm(project, project.conv(x))))

    @staticmethod
    def _norm(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), False, keepdim=True)
        shape = (1, -1, 1, 1)
        scale, shift = part.norm.weight.view(shape), part.norm.bias.view(shape)
        return (x - mean) / (variance + 1e-5).sqrt() * scale + shift


@pytest.mark.parametrize("index", [0, 2])
def test_a_block_is_what_the_paper_says_with_and_without_projection(index):
    block = _network(depth=18).double().blocks[index]
    x = torch.randn(4, block.inner[0].conv.in_channels, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(block(x), _ByHand(block)(x), rtol=1e-10, atol=1e-12)


def test_evaluation_uses_running_statistics_which_training_moves():
    module, x = _network(depth=18), torch.randn(8, 3, 32, 32)
    module.eval()
    before = module(x)
    torch.testing.assert_close(module(x[:1]), before[:1])  # no statistics of the batch
    module.train()(x)
    moved = [name for name, buffer in module.named_buffers() if buffer.abs().sum() > 0]
    assert len(moved) == 2 * 20
    assert not torch.allclose(module.eval()(x), before)


def test_the_fused_kernel_takes_the_norms_when_it_is_asked_for(monkeypatch):
    """On the CPU the interpreter would run it for minutes: who is called is what is tested."""
    from paceline.kernels.batch_norm import kernel

    called = []

    def stand_in(x, residual, weight, bias, eps, relu):
        called.append((residual is not None, relu))
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
        out = F.batch_norm(x, None, None, weight, bias, True, 0.1, eps)
        out = out if residual is None else out + residual
        return (F.relu(out) if relu else out), None, mean, variance, None

    monkeypatch.setattr(kernel, "batch_norm", stand_in)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module, x = _network(depth=18), torch.randn(4, 3, 32, 32)
    plain = module(x)
    with switch.using("triton", torch.device("cpu")):
        torch.testing.assert_close(module(x), plain, rtol=1e-5, atol=1e-6)
    assert called.count((True, True)) == 8  # ends of blocks
    assert called.count((False, False)) == 3  # projections
    assert len(called) == 20
