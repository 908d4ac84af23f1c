"""Pruned networks: nothing pruned is the same network, and others compute what is left of it."""

import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.layers import Experts
from paceline.models.decoder import Decoder
from paceline.models.pruned import Kept, check_prunable, chosen, pruned, ratings, smaller
from tests.generate.networks import MODELS, VOCAB, built

DENSE = [name for name, model in MODELS.items() if not (model.experts or model.latent)]
MODEL = MODELS["grouped"]


def tokens():
    return torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(1))


def network(model):
    """With random values everywhere, in norms and biases too."""
    decoder = built(model, torch.float64)
    stream = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=stream))
    return decoder.eval()


def left_of(decoder, kept):
    model = smaller(decoder.model, kept)
    left = Decoder(model).double().eval()
    left.load_state_dict(pruned(decoder.model, decoder.state_dict(), kept))
    return left


def with_nothing_from(decoder, kept):
    """The whole network, in which what isn't kept adds nothing to the stream."""
    model, width = decoder.model, decoder.model.num_heads // decoder.model.num_kv_heads
    with torch.no_grad():
        for layer, block in enumerate(decoder.blocks):
            if layer not in kept.layers:
                for each in (block.attention.o_proj, block.ffn.down_proj):
                    for parameter in each.parameters():
                        parameter.zero_()
                for norm in (block.attention_out_norm, block.ffn_out_norm):
                    for parameter in norm.parameters():
                        parameter.zero_()
                continue
            at = kept.layers.index(layer)
            for group in set(range(model.num_kv_heads)) - set(kept.groups[at]):
                part = slice(group * width * model.head_dim, (group + 1) * width * model.head_dim)
                block.attention.o_proj.weight[:, part] = 0
            for channel in set(range(model.ffn_size)) - set(kept.channels[at]):
                block.ffn.down_proj.weight[:, channel] = 0
    return decoder


@pytest.mark.parametrize("kind", DENSE)
def test_to_prune_nothing_changes_nothing(kind):
    decoder = network(MODELS[kind])
    rated = ratings(decoder, [(tokens(), None)])
    kept = chosen(decoder.model, rated, {})
    assert smaller(decoder.model, kept) == decoder.model
    found = pruned(decoder.model, decoder.state_dict(), kept)
    assert found.keys() == decoder.state_dict().keys()
    assert all(torch.equal(found[name], each) for name, each in decoder.state_dict().items())


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize(
    "sizes", [{"num_layers": 2}, {"ffn_size": 29}, {"num_layers": 1, "ffn_size": 7, "heads": 1}]
)
def test_what_is_left_computes_what_the_whole_does_without_the_rest(kind, sizes):
    model = MODELS[kind]
    sizes = dict(sizes)
    if sizes.pop("heads", None):
        sizes["num_kv_heads"] = model.num_kv_heads // 2
    decoder = network(model)
    kept = chosen(model, ratings(decoder, [(tokens(), None)]), sizes)
    with torch.no_grad():
        found, wanted = left_of(decoder, kept)(tokens()), with_nothing_from(decoder, kept)(tokens())
    assert (found - wanted).abs().max() < 1e-10 * wanted.abs().max()


def test_what_does_nothing_goes_first():
    decoder = network(MODEL)
    wanted = Kept([0, 2], [[1], [0]], [[*range(40)], [*range(8, 48)]])
    with_nothing_from(decoder, wanted)
    rated = ratings(decoder, [(tokens(), None), (tokens().flip(0), None)])
    sizes = {"num_layers": 2, "num_kv_heads": 1, "ffn_size": 40}
    assert chosen(MODEL, rated, sizes) == wanted
    with torch.no_grad():
        found, whole = left_of(decoder, wanted)(tokens()), decoder(tokens())
    assert (found - whole).abs().max() < 1e-10


def test_ratings_are_what_parts_add():
    """By leaving each part of a layer out: the mean square of what is missing of its output."""
    decoder = network(MODEL)
    rated, seen = ratings(decoder, [(tokens(), None)]), {}
    block = decoder.blocks[1]
    layers = {"attention": block.attention.o_proj, "ffn": block.ffn.down_proj}
    for name, layer in layers.items():
        layer.register_forward_hook(
            lambda _m, given, _out, name=name: seen.update({name: given[0]})
        )
    decoder(tokens())
    weight, width = layers["ffn"].weight, 2 * MODEL.head_dim
    for channel in (0, 31):
        added = seen["ffn"][..., channel, None] * weight[:, channel]
        assert rated.channels[1, channel] == pytest.approx(added.square().sum().item())
    for group in (0, 1):
        part = slice(group * width, (group + 1) * width)
        added = seen["attention"][..., part] @ layers["attention"].weight[:, part].T
        assert rated.groups[1, group] == pytest.approx(added.square().sum().item())


def test_windows_go_with_the_layers_that_have_them():
    model = MODELS["window"]  # the block in the middle sees everything
    every = [0], [[*range(model.num_kv_heads)]], [[*range(model.ffn_size)]]
    assert smaller(model, Kept([1], *every[1:])).sliding_window is None
    assert smaller(model, Kept([2], *every[1:])).full_layers == ()
    two = smaller(model, Kept([1, 2], every[1] * 2, every[2] * 2))
    assert (two.full_layers, two.sliding_window) == ((0,), 7)


@pytest.mark.parametrize("size", [0, 4])
def test_sizes_that_are_not_smaller_are_refused(size):
    with pytest.raises(InputError, match=f"num_layers={size} is not from 1 to the 3"):
        check_prunable(MODEL, {"num_layers": size})


def test_experts_are_refused():
    experts = Experts(num_experts=4, experts_per_token=2, ffn_size=16)
    with pytest.raises(InputError, match="this one has experts"):
        check_prunable(MODEL.replace(experts=experts), {"num_layers": 1})
