"""Small networks for what works on blocks, and whether their gradients stay the same."""

import torch
from torch import Tensor, nn

from paceline.config.model import Model
from paceline.kernels.loss import cross_entropy
from paceline.models.decoder import Decoder


def decoder_of(model: Model) -> Decoder:
    """The same every time."""
    decoder = Decoder(model)
    decoder.init_weights(torch.Generator().manual_seed(0))
    return decoder


def decoder_loss(module: nn.Module, model: Model, seed: int = 1) -> Tensor:
    """Of two sequences, of other tokens by another seed."""
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.vocab_size, (2, model.max_seq_len + 1), generator=chance)
    return cross_entropy(module(tokens[:, :-1]), tokens[:, 1:])


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """By the names of the bare module."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): p.grad
        for name, p in module.named_parameters()
    }


def assert_same_gradients(got: nn.Module, exact: nn.Module, tolerance: float = 0.0) -> None:
    theirs = gradients(exact)
    for name, grad in gradients(got).items():
        assert torch.allclose(grad, theirs[name], rtol=0, atol=tolerance), name


class Layers(nn.Module):
    """A stage in the middle of a pipeline, fp64."""

    def __init__(self, layers=3, width=16):
        super().__init__()
        make = [
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU())
            for _ in range(layers)
        ]
        self.blocks = nn.ModuleList(make).double()

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x
