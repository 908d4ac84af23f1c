"""The layer of experts: pure functions, then one process.

That it computes what the published families compute is tests/models/test_families.py, that it does
so in a network tests/models/test_decoder.py.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from paceline.config.layers import Experts
from paceline.kernels.experts import grouped_linear
from paceline.models.moe import (
    ExpertLayer,
    balance_loss,
    choose,
    expert_layers,
    updated_bias,
)

SHAPE = Experts(num_experts=6, experts_per_token=2, ffn_size=8, shared_ffn_size=12, scaling=1.5)
HIDDEN = 16


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def built(dtype=torch.float64, **changes):
    layer = ExpertLayer(HIDDEN, SHAPE.replace(**changes))
    generator = seeded()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return layer.to(dtype)


def inputs(batch=3, seq=10, dtype=torch.float64, seed=1):
    return torch.randn(batch, seq, HIDDEN, dtype=dtype, generator=seeded(seed))


def gradients(layer, x, **options):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    layer(x, **options).square().sum().backward()
    return {"x": x.grad, **{name: p.grad.clone() for name, p in layer.named_parameters()}}


def assert_all_close(found, expected, tolerance=1e-12):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
def test_choice_within_groups_by_hand(scores, biased):
    shape = Experts(
        num_experts=12,
        experts_per_token=3,
        ffn_size=1,
        scores=scores,
        num_groups=4,
        groups_per_token=2,
    )
    values = torch.rand(50, 12, generator=seeded())
    bias = torch.randn(12, generator=seeded(1)) if biased else None
    chosen = choose(values, bias, shape)
    for row, found in zip(values + (bias if biased else 0), chosen, strict=True):
        numbers = row.tolist()
        groups = [range(first, first + 3) for first in (0, 3, 6, 9)]
        compared = 1 if scores == "softmax" else 2
        groups.sort(key=lambda g: -sum(sorted((numbers[i] for i in g), reverse=True)[:compared]))
        allowed = [i for group in groups[:2] for i in group]
        best = sorted(allowed, key=lambda i: -numbers[i])[:3]
        assert sorted(found.tolist()) == sorted(best)


@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 0, 8], [0, 0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [8, 5])
def test_product_of_groups(counts, dtype, outputs):
    """With the kernel (fp32 and bf16, rows of 16 bytes) and without, also of no rows at all."""
    rows = torch.randn(sum(counts), HIDDEN, generator=seeded()).to(dtype).requires_grad_()
    weights = torch.randn(4, outputs, HIDDEN, generator=seeded(1)).to(dtype).requires_grad_()
    found = grouped_linear(rows, weights, torch.tensor(counts))
    group = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    expected = torch.einsum("ri,roi->ro", rows, weights[group])
    above = torch.randn(found.shape, generator=seeded(2)).to(dtype)
    expected_grads = torch.autograd.grad(expected, (rows, weights), above)
    found_grads = torch.autograd.grad(found, (rows, weights), above)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for one, other in zip((found, *found_grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalise": False, "shared_gate": True},
        {"scores": "sigmoid", "choice_bias": True, "shared_ffn_size": 0},
    ],
)
def test_the_layer_is_a_weighted_sum_of_experts(changes):
    """Against all experts applied to all tokens; outputs and every gradient."""
    layer, x = built(**changes), inputs()
    if layer.choice_bias is not None:
        layer.choice_bias.normal_(generator=seeded(3))

    def dense(x):
        logits = F.linear(x, layer.router.weight)
        scores = logits.softmax(-1) if layer.shape.scores == "softmax" else logits.sigmoid()
        biased = scores if layer.choice_bias is None else scores + layer.choice_bias
        mask = torch.zeros_like(scores).scatter_(-1, biased.topk(2).indices, 1.0)
        weights = scores * mask
        if layer.shape.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        e = layer.experts
        inner = F.silu(torch.einsum("bsh,efh->bsef", x, e.gate_proj))
        inner = inner * torch.einsum("bsh,efh->bsef", x, e.up_proj)
        outputs = torch.einsum("bsef,ehf->bseh", inner, e.down_proj)
        routed = 1.5 * (outputs * weights.unsqueeze(-1)).sum(-2)
        if layer.shared is None:
            return routed
        gate = 1 if layer.shared_gate is None else layer.shared_gate(x).sigmoid()
        return routed + gate * layer.shared(x)

    torch.testing.assert_close(layer(x), dense(x), rtol=1e-12, atol=1e-12)
    found = gradients(layer, x)
    layer.forward = dense
    assert_all_close(found, gradients(layer, x), 1e-10)


def test_moved_experts_compute_the_same():
    layer, moved, x = built(), built(), inputs()
    slots = torch.tensor([4, 2, 0, 5, 1, 3])
    moved.slot_of_expert.copy_(slots)
    with torch.no_grad():
        for stack in moved.experts.parameters():
            stack[slots] = stack.clone()
    expected, found = gradients(layer, x), gradients(moved, x)
    for name in found:
        if name.startswith("experts."):
            found[name] = found[name][slots]
    assert_all_close(found, expected)
    assert torch.equal(moved.expert_load, layer.expert_load)


def test_rows_go_through_the_exchange():
    """What an exchange may rely on: rows sorted by slot, a row per copy, its own calls allowed."""
    layer, x, calls = built(), inputs(), []
    expected = gradients(layer, x)

    def in_two_parts(rows, counts, experts):
        calls.append(experts)
        assert counts.shape == (6,)
        assert rows.shape == (x.shape[0] * x.shape[1] * 2, HIDDEN) == (counts.sum(), HIDDEN)
        nothing = torch.zeros(3, dtype=torch.int64)
        first = int(counts[:3].sum())
        return torch.cat(
            [
                experts(rows[:first], torch.cat((counts[:3], nothing))),
                experts(rows[first:], torch.cat((nothing, counts[3:]))),
            ]
        )

    layer.exchange = in_two_parts
    assert_all_close(gradients(layer, x), expected)
    assert calls == [layer.experts]


def test_load_is_counted_in_training_only():
    layer, x = built(), inputs()
    layer.eval()(x)
    assert not layer.expert_load.any()
    layer.train()(x)
    chosen = layer.router(x.flatten(0, 1), None)[1]
    expected = torch.bincount(chosen.flatten(), minlength=6).float()
    assert torch.equal(layer.expert_load, expected)
    checkpoint(layer, x.requires_grad_(), use_reentrant=False).sum().backward()
    assert torch.equal(layer.expert_load, 3 * expected)
    layer.reset_buffers()
    assert not layer.expert_load.any()
    assert "expert_load" not in layer.state_dict()


def test_balance_loss_by_hand():
    """Shares and scores of a sequence; 1 where both are even, and no mean over sequences before."""
    chosen = torch.tensor([[[0, 1], [0, 2]], [[0, 1], [2, 3]]])
    scores = torch.tensor([[[4, 2, 1, 1], [6, 0, 2, 0]], [[1, 1, 1, 1], [2, 2, 2, 2]]]).double()
    # First sequence: shares 4 · (2, 1, 1, 0) / 4, mean scores (10, 2, 3, 1) / 16.
    assert balance_loss(scores[:1], chosen[:1]).item() == pytest.approx(25 / 16)
    assert balance_loss(scores[1:], chosen[1:]).item() == pytest.approx(1)
    assert balance_loss(scores, chosen).item() == pytest.approx((25 / 16 + 1) / 2)


def test_balance_loss_adds_its_gradient_and_nothing_else():
    plain, balanced, x = built(), built(balance_loss=0.3), inputs()
    assert torch.equal(plain(x), balanced(x))
    balanced.balance_scale.fill_(0.25)
    expected, found = gradients(plain, x), gradients(balanced, x)
    x = x.requires_grad_()
    _, chosen, scores = plain.router(x.flatten(0, 1), None)
    loss = balance_loss(scores.unflatten(0, (3, 10)), chosen.unflatten(0, (3, 10)))
    added = torch.autograd.grad(0.3 * 0.25 * loss, (x, plain.router.weight))
    assert added[1].norm() > 1e-4
    expected["x"] += added[0]
    expected["router.weight"] += added[1]
    assert_all_close(found, expected, 1e-11)


def test_balance_loss_does_not_depend_on_how_sequences_are_batched():
    layer, x = built(balance_loss=0.3), inputs(batch=4)
    together = gradients(layer, x)["router.weight"]
    layer.zero_grad()
    for part in x.split(1):
        layer.balance_scale.fill_(0.25)
        layer(part).square().sum().backward()
    torch.testing.assert_close(layer.router.weight.grad, together, rtol=1e-11, atol=1e-12)


def test_balance_loss_of_a_shared_sequence():
    """Two ranks with half a sequence each: the mean of their gradients is that of the whole."""
    layer, x = built(balance_loss=0.3), inputs(batch=2)
    _, chosen, _ = layer.router(x.flatten(0, 1), None)
    counts = F.one_hot(chosen, 6).sum(1).unflatten(0, (2, 10)).sum(1)
    layer.mean_over_sequence = lambda shares: counts.double() * 6 / (10 * 2)
    layer.balance_scale.fill_(1e4)
    halves = [gradients(layer, half)["router.weight"] for half in x.split(5, dim=1)]
    layer.mean_over_sequence = lambda shares: shares
    whole = gradients(layer, x)["router.weight"]
    layer.balance_scale.fill_(0)
    only_outputs = gradients(layer, x)["router.weight"]
    # The gradient of the outputs' sum of squares is a sum over tokens, that of the loss a mean.
    found = (halves[0] + halves[1] + only_outputs) / 2
    assert (whole - only_outputs).norm() > 0.01 * whole.norm()
    torch.testing.assert_close(found, whole, rtol=1e-11, atol=1e-11)


def test_bias_evens_out_the_load():
    """Skewed scores: steps of the bias bring the busiest expert near the mean."""
    shape = SHAPE.replace(scores="sigmoid", choice_bias=True)
    logits = torch.randn(2000, 6, generator=seeded()) + torch.arange(6) / 2
    bias, scores = torch.zeros(6), logits.sigmoid()
    peaks = []
    for _ in range(200):
        load = torch.bincount(choose(scores, bias, shape).flatten(), minlength=6).float()
        peaks.append((load.max() / load.mean()).item())
        bias = updated_bias(bias, load, 0.01)
    assert peaks[0] > 2
    assert peaks[-1] < 1.2
    even = updated_bias(torch.zeros(3), torch.full((3,), 7.0), 0.1)
    assert not even.any()


def test_conversion_leaves_bias_and_counts_alone():
    layer = built(choice_bias=True, scores="sigmoid")
    layer.choice_bias.fill_(0.123456)
    layer.expert_load.fill_(12345)
    layer.bfloat16()
    assert layer.router.weight.dtype == torch.bfloat16
    assert layer.choice_bias.dtype == layer.expert_load.dtype == torch.float32
    assert (layer.choice_bias == torch.tensor(0.123456)).all()
    with torch.device("meta"):
        empty = ExpertLayer(HIDDEN, layer.shape)
    empty.bfloat16().to_empty(device="cpu").reset_buffers()
    assert empty.choice_bias.dtype == torch.float32
    assert empty.balance_scale == 1


def test_mixed_precision_routes_in_fp32():
    layer, x = built(torch.float32), inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = layer(x)
        assert layer.router(x.flatten(0, 1), None)[0].dtype == torch.float32
    exact = layer(x)
    assert (mixed.float() - exact).norm() < 0.03 * exact.norm()
    found = gradients(layer.bfloat16(), x.bfloat16())
    assert all(grad.dtype == torch.bfloat16 for grad in found.values())


def test_layers_are_found_by_name():
    assert list(expert_layers(torch.nn.ModuleDict({"a": built(), "b": torch.nn.ReLU()}))) == ["a"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_compiles_as_one_graph_in_bf16():
    """Nothing waits for counts on the host: the grouped kernel takes them where they are."""
    layer, x = built(torch.bfloat16, balance_loss=0.1), inputs(dtype=torch.bfloat16)
    expected = gradients(layer, x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = x.clone().requires_grad_()
    layer.zero_grad()
    compiled(found).square().sum().backward()
    torch.testing.assert_close(found.grad, expected["x"])
    torch.testing.assert_close(layer.experts.up_proj.grad, expected["experts.up_proj"])
    torch.testing.assert_close(layer.router.weight.grad, expected["router.weight"])
