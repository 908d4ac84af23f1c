"""A whole decoder with kernels is the decoder without."""

import pytest
import torch

from paceline.config.layers import Experts, LatentAttention
from paceline.config.model import Model
from paceline.kernels import launch
from paceline.kernels.loss import cross_entropy
from paceline.models.decoder import Decoder
from tests.kernels.agreement import DEVICE, kernels, relative_error, with_kernels

pytestmark = with_kernels
DENSE = Model(
    vocab_size=33, hidden_size=24, ffn_size=40, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_seq_len=8,
)  # fmt: skip
MODELS = {
    "dense": DENSE,
    "norms of heads, tied": DENSE.replace(qk_norm=True, tie_embeddings=True),
    "latent attention": DENSE.replace(
        num_kv_heads=4,
        latent=LatentAttention(q_rank=12, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=8),
    ),
    "experts": DENSE.replace(experts=Experts(num_experts=3, experts_per_token=2, ffn_size=16)),
}


def _step(model: Model, *, apart: bool = False) -> dict[str, torch.Tensor]:
    """Loss and gradients of one batch; the loss apart from the network, or as its last layer."""
    decoder = Decoder(model).to(DEVICE)
    decoder.init_weights(torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.vocab_size, (2, 7), generator=generator).to(DEVICE)
    targets = tokens.roll(-1, 1)
    targets[0, 3] = -100
    loss = cross_entropy(decoder(tokens), targets) if apart else decoder(tokens, targets=targets)
    loss.backward()
    grads = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_plain_torch(name):
    expected = _step(MODELS[name])
    with kernels(), launch.record_launches() as seen:
        found = _step(MODELS[name])
    assert found.keys() == expected.keys()
    off = {key: relative_error(found[key], right) for key, right in expected.items()}
    assert max(off.values()) < 2e-5, off
    launched = {kernel.name for kernel, *_ in seen}
    assert {name.partition(".")[0] for name in launched} >= {"norm", "activations", "rope", "loss"}
    of_experts = {
        "experts.spread",
        "experts.collect",
        "experts.collect_backward",
        "experts.grouped",
    }
    assert (of_experts <= launched) == (MODELS[name].experts is not None)


def test_a_loss_apart_from_the_network_runs_its_kernel_too():
    """As the last stage of a pipeline computes it."""
    expected = _step(DENSE)
    with kernels(), launch.record_launches() as seen:
        found = _step(DENSE, apart=True)
    off = {key: relative_error(found[key], right) for key, right in expected.items()}
    assert max(off.values()) < 2e-5, off
    assert "loss.whole_row" in {kernel.name for kernel, *_ in seen}


def test_with_targets_it_returns_their_mean_loss():
    decoder = Decoder(DENSE)
    decoder.init_weights(torch.Generator().manual_seed(0))
    tokens = torch.arange(6).reshape(1, 6)
    loss = decoder(tokens, targets=tokens + 1)
    assert torch.equal(loss, cross_entropy(decoder(tokens), tokens + 1))
