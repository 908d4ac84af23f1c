"""Optimizers by name: each against torch's or its paper's formula, groups of parameters, refusals,
and what a run with one evaluates and keeps (pure, then one process)."""

import copy
import math
from typing import get_args

import pytest
import torch
from torch import nn

from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.config.layout import Layout
from paceline.config.optim import Optim, OptimizerName
from paceline.train.optimizers import RuledOptimizer, build_optimizer, check_groups
from paceline.train.update_rules import orthogonal
from tests.parallel.training import job_of as decoder_job
from tests.parallel.training import micro_batches, trainer_of

STEPS = 4
FULL = Layout()
FP64 = Layout(precision="fp64", param_dtype="fp64")


def _network() -> nn.ParameterDict:
    """A matrix, the same on its side, a vector, experts and a convolution."""
    stream = torch.Generator().manual_seed(0)
    shapes = {"a": (6, 10), "b": (10, 6), "c": (7,), "d": (3, 4, 5), "e": (4, 3, 2, 2)}
    return nn.ParameterDict(
        {
            name: torch.randn(shape, generator=stream, dtype=torch.float64)
            for name, shape in shapes.items()
        }
    )


def _gradients(module: nn.Module, step: int) -> None:
    stream = torch.Generator().manual_seed(100 + step)
    for p in module.parameters():
        p.grad = torch.randn(p.shape, generator=stream, dtype=torch.float64).to(p.dtype)


def _rate(step: int) -> float:
    return 0.01 * (step + 1)


def _ours(optim: Optim, layout: Layout = FP64) -> nn.ParameterDict:
    module = _network()
    optimizer = build_optimizer(module.named_parameters(), optim, layout)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _rate(step) * group["lr_factor"]
        _gradients(module, step)
        optimizer.step()
    return module


def _by_torch(make, decay: float) -> nn.ParameterDict:
    """Steps of torch's optimizer, in which vectors have no weight decay."""
    module = _network()
    matrices = [p for p in module.values() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": [module["c"]]}]
    optimizer = make(groups)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _rate(step)
        _gradients(module, step)
        optimizer.step()
    return module


def _by_formula(step_of, decay: float) -> nn.ParameterDict:
    """Steps of a function of (weight, gradient, state, lr, decay, step from 1)."""
    module = _network()
    states = {name: {} for name in module}
    for step in range(STEPS):
        _gradients(module, step)
        for name, p in module.items():
            own = decay if p.ndim > 1 else 0.0
            p.data = step_of(p.data, p.grad, states[name], _rate(step), own, step + 1)
    return module


def _assert_close(ours, theirs, atol=1e-12):
    start = _network()
    for name, p in ours.items():
        assert not torch.allclose(p, start[name], atol=1e-4), "it must have moved"
        torch.testing.assert_close(p, theirs[name], rtol=0, atol=atol)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_that_of_torch(nesterov):
    ours = _ours(Optim(name="sgd", momentum=0.8, nesterov=nesterov, weight_decay=0.1))
    theirs = _by_torch(
        lambda groups: torch.optim.SGD(groups, lr=1, momentum=0.8, nesterov=nesterov), 0.1
    )
    _assert_close(ours, theirs)


def test_sgd_without_momentum_keeps_nothing():
    module = _network()
    optimizer = build_optimizer(module.named_parameters(), Optim(name="sgd", momentum=0.0), FP64)
    _gradients(module, 0)
    optimizer.step()
    assert not any(optimizer.state.values())


def test_adafactor_is_that_of_torch():
    ours = _ours(Optim(name="adafactor", weight_decay=0.1))
    _assert_close(ours, _by_torch(lambda groups: torch.optim.Adafactor(groups), 0.1))


def test_lion_is_that_of_its_paper():
    def step_of(w, g, state, lr, decay, _step):
        m = state.get("m", torch.zeros_like(w))
        state["m"] = 0.98 * m + 0.02 * g
        return w - lr * ((0.95 * m + 0.05 * g).sign() + decay * w)

    ours = _ours(Optim(name="lion", betas=(0.95, 0.98), weight_decay=0.1))
    _assert_close(ours, _by_formula(step_of, 0.1))


def test_lars_is_that_of_its_paper():
    def step_of(w, g, state, lr, decay, _step):
        local = 1.0 if w.ndim == 1 else 0.02 * w.norm() / (g.norm() + decay * w.norm())
        state["v"] = 0.9 * state.get("v", torch.zeros_like(w)) + lr * local * (g + decay * w)
        return w - state["v"]

    ours = _ours(Optim(name="lars", trust=0.02, weight_decay=0.1))
    _assert_close(ours, _by_formula(step_of, 0.1))


def _adam(g, state, betas, step):
    """Adam's moments without their bias."""
    for key, beta, value in (("m", betas[0], g), ("v", betas[1], g * g)):
        state[key] = beta * state.get(key, torch.zeros_like(g)) + (1 - beta) * value
    return state["m"] / (1 - betas[0] ** step), state["v"] / (1 - betas[1] ** step)


def test_lamb_is_that_of_its_paper():
    def step_of(w, g, state, lr, decay, step):
        m, v = _adam(g, state, (0.9, 0.999), step)
        r = m / (v.sqrt() + 1e-6) + decay * w
        return w - lr * r * (1.0 if w.ndim == 1 else w.norm() / r.norm())

    _assert_close(_ours(Optim(name="lamb")), _by_formula(step_of, 0.1))


def test_schedulefree_is_that_of_its_paper():
    """As algorithm 1 has it: x is the mean, z where it goes, y where gradients are taken."""

    def step_of(y, g, state, lr, decay, step):
        z, x = state.get("z", y), state.get("x", y)
        _, v = _adam(g, state, (0.9, 0.999), step)
        z = z - lr * (g / (v.sqrt() + 1e-8) + decay * y)
        state["sum"] = state.get("sum", 0.0) + lr**2
        share = lr**2 / state["sum"]
        x = (1 - share) * x + share * z
        state.update(z=z, x=x)
        return 0.1 * z + 0.9 * x

    _assert_close(_ours(Optim(name="schedulefree")), _by_formula(step_of, 0.1))


def test_muon_is_that_of_torch():
    """In bf16, as torch's: what two ways to multiply round differently is a part of the step."""
    start, optim = _network(), Optim(name="muon", weight_decay=0.1)
    matrices = {name: p for name, p in start.items() if p.ndim == 2}
    theirs = copy.deepcopy(matrices)
    ours = build_optimizer(matrices.items(), optim, FULL.replace(precision="bf16"))
    reference = torch.optim.Muon(
        list(theirs.values()), weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(STEPS):
        for each, optimizer in ((matrices, ours), (theirs, reference)):
            stream = torch.Generator().manual_seed(step)
            for p in each.values():
                p.grad = torch.randn(p.shape, generator=stream, dtype=torch.float64)
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            optimizer.step()
    moved = STEPS * 0.01 * 0.2 * math.sqrt(10)
    for name, p in matrices.items():
        assert not torch.allclose(p, _network()[name], atol=moved / 100)
        torch.testing.assert_close(p, theirs[name], rtol=0, atol=0.02 * moved)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 8, 5), (1, 4)])
def test_muon_makes_singular_values_about_one(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonal(x, torch.float64))
    assert values.min() > 0.65
    assert values.max() < 1.25


def test_muon_leaves_vectors_and_both_ends_to_adamw():
    trainer = trainer_of(decoder_job(1, ("optim.name=muon", "optim.eps=1e-8")), _alone())
    names = {p: name for name, p in trainer.module.named_parameters()}
    rules = {
        names[p]: group["rule"]
        for group in trainer.update.optimizer.param_groups
        for p in group["params"]
    }
    assert rules.keys() == set(names.values())
    for name, rule in rules.items():
        is_inner = name.endswith("proj.weight")
        assert rule == ("muon" if is_inner else "adamw"), name


def _alone():
    from paceline.comm.rendezvous import Ranks

    return Ranks()


@pytest.mark.parametrize("name", ["sgd", "lion", "adafactor", "lars", "lamb", "muon", "adamw"])
def test_bf16_parameters_follow_their_fp32_masters(name):
    exact, rounded = _network().float(), _network().bfloat16()
    with torch.no_grad():
        for p, other in zip(exact.values(), rounded.values(), strict=True):
            p.copy_(other)
    optimizers = []
    for module in (exact, rounded):
        optimizer = build_optimizer(module.named_parameters(), Optim(name=name, lr=1e-4), FULL)
        optimizers.append(optimizer)
        for step in range(20):
            stream = torch.Generator().manual_seed(step)
            for p in module.values():
                p.grad = torch.randn(p.shape, generator=stream).bfloat16().to(p.dtype)
            optimizer.step()
    for p, other in zip(exact.values(), rounded.values(), strict=True):
        master = optimizers[1].state[other]["master"]
        assert torch.equal(other, master.bfloat16())
        torch.testing.assert_close(master, p.data, rtol=0, atol=1e-6)


# Groups.


def test_groups_have_settings_of_their_own():
    module = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
    optim = Optim.parse(
        {
            "groups": [
                {"pattern": "one.*", "lr_factor": 0.0},
                {"pattern": "*.bias", "weight_decay": 0.5, "betas": [0.5, 0.6]},
            ]
        }
    )
    named = list(module.named_parameters())
    check_groups([name for name, _ in named], optim)
    optimizer = build_optimizer(named, optim, FULL)
    names = {p: name for name, p in named}
    groups = {names[p]: group for group in optimizer.param_groups for p in group["params"]}
    assert groups["one.weight"]["lr_factor"] == groups["one.bias"]["lr_factor"] == 0.0
    assert groups["one.bias"]["weight_decay"] == 0.0
    assert groups["two.bias"]["weight_decay"] == 0.5
    assert groups["two.bias"]["betas"] == (0.5, 0.6)
    assert groups["two.weight"]["betas"] == (0.9, 0.95)
    assert groups["two.weight"]["weight_decay"] == 0.1


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_factor_of_a_group_scales_its_learning_rate(name):
    groups = 'optim.groups=[{pattern="embed.weight",lr_factor=0.0},{pattern="*_norm*",lr_factor=3}]'
    trainer = trainer_of(
        decoder_job(1, (f"optim.name={name}", "optim.eps=1e-8", "optim.warmup_steps=2", groups)),
        _alone(),
    )
    before = trainer.module.embed.weight.detach().clone()
    matrix = trainer.module.blocks[0].ffn.up_proj.weight
    start = matrix.detach().clone()
    result = trainer.step(0, micro_batches(0, trainer.job, 0))()
    assert result.loss > 0
    assert torch.equal(trainer.module.embed.weight, before)
    assert not torch.equal(matrix, start)
    rates = {group["lr_factor"]: group["lr"] for group in trainer.update.optimizer.param_groups}
    assert rates == pytest.approx({0.0: 0.0, 3.0: 0.015, 1.0: 0.005})
    assert trainer.update.lr == 0.005


@pytest.mark.parametrize(
    "patterns", [("blocks.7.*",), ("blocks.*", "blocks.0.*")], ids=["nothing", "all taken"]
)
def test_a_group_without_parameters_is_refused(patterns):
    groups = ",".join(f'{{pattern="{each}"}}' for each in patterns)
    job = decoder_job(1, (f"optim.groups=[{groups}]",))
    with pytest.raises(InputError, match=r"pattern = .* of optim\.groups fits no parameter"):
        trainer_of(job, _alone())


# Refusals.


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("name=lion", "eps=1e-6"), r'optim\.eps = 1e-06 has no effect with optim\.name = "lion"'),
        (("name=sgd", "betas=[0.8,0.9]"), r"optim\.betas = \[0\.8, 0\.9\] has no effect"),
        (("momentum=0.5",), r'momentum = 0\.5 has no effect .* use "sgd" or "lars" or "muon"'),
        (("nesterov=true",), r'nesterov = true has no effect with optim\.name = "adamw"'),
        (("name=sgd", "momentum=0.0", "nesterov=true"), r"no effect with optim\.momentum = 0"),
        (("name=muon", "trust=0.1"), r"optim\.trust = 0\.1 has no effect"),
        (("name=schedulefree", "schedule=cosine"), r"doesn't go with optim\.name = .schedulefree"),
        (('groups=[{pattern="*",momentum=0.5}]',), r'momentum = 0\.5 of group "\*"'),
        (('groups=[{pattern="*",adamw=true}]',), r"adamw = true of group"),
        (("name=adam",), r"optim\.name = 'adam' can't be used"),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused(settings, sentence):
    with pytest.raises(InputError, match=sentence):
        read_job(None, [f"optim.{each}" for each in settings])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("layout.optimizer_state=8bit",), r'optimizer_state = "8bit" is of AdamW'),
        (('layout.offload=["optimizer"]',), r'layout\.offload = "optimizer" is of AdamW'),
        (("elastic.min_nodes=1", "elastic.exact=true"), r"elastic\.exact = true needs an update"),
    ],
)
def test_what_only_adamw_does_is_refused_of_others(settings, sentence):
    with pytest.raises(InputError, match=sentence):
        read_job(None, ["optim.name=lion", *settings])


# What schedule-free evaluates and keeps.


def test_schedulefree_evaluates_its_mean_and_goes_on_from_where_it_was():
    job = decoder_job(1, ("optim.name=schedulefree", "optim.schedule=constant"))
    trainer = trainer_of(job, _alone())
    optimizer = trainer.update.optimizer
    assert isinstance(optimizer, RuledOptimizer)
    for step in range(3):
        trainer.step(step, micro_batches(step, job, 0))()
    weight = trainer.module.embed.weight
    state, before = optimizer.state[weight], weight.detach().clone()
    mean = (before - 0.1 * state["z"]) / 0.9
    kept = trainer.update.ema.state()["embed.weight"]
    torch.testing.assert_close(kept, mean, rtol=0, atol=1e-6)
    loss, _ = trainer.evaluate([micro_batches(9, job, 0)])
    assert torch.equal(weight, before)
    trainer.update.ema.take()
    torch.testing.assert_close(weight.data, mean, rtol=0, atol=1e-6)
    assert trainer.evaluate([micro_batches(9, job, 0)])[0] != loss  # it is no mean of itself


# What the planner counts.


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_bytes_of_state_are_those_that_the_planner_counts(name):
    """Of matrices beside which Adafactor's sums of rows and columns are next to nothing."""
    module = nn.ParameterDict({"up": torch.randn(400, 600), "down": torch.randn(600, 400)})
    optim = Optim(name=name)
    optimizer = build_optimizer(module.named_parameters(), optim, FULL)
    for p in module.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    kept = [
        state
        for p in module.values()
        for state in optimizer.state[p].values()
        if isinstance(state, torch.Tensor)
    ]
    num_bytes = sum(each.numel() * each.element_size() for each in kept)
    num_params = sum(p.numel() for p in module.values())
    assert num_bytes / num_params == pytest.approx(optim.state_bytes(1.0), abs=0.02)
