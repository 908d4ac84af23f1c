"""AdamW in one launch: torch's arithmetic, rounding and codes, in lists of any shapes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import switch
from paceline.kernels.adamw import Coded, _suit, adamw_
from paceline.kernels.adamw.eight_bit import decode, encode, num_row_dims
from paceline.kernels.adamw.reference import AdamWTensors
from tests.kernels.agreement import DEVICE, kernels, relative_error, with_kernels

pytestmark = with_kernels
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
shapes = st.lists(
    st.sampled_from([(), (1,), (7,), (0,), (3, 5), (2, 300), (4, 16), (16, 80), (1, 2, 3)]),
    min_size=1,
    max_size=4,
)


def _random(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE)


class _State:
    """Parameters of these shapes and what belongs to them."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        self.params = [_random(shape, seed).to(dtype) for seed, shape in enumerate(shapes)]
        wide = torch.promote_types(dtype, torch.float32)
        self.firsts = [torch.zeros_like(p, dtype=wide) for p in self.params]
        self.seconds = [torch.zeros_like(p, dtype=wide) for p in self.params]
        self.steps = [torch.zeros((), device=DEVICE) for _ in self.params]

    def grads(self, step: int) -> list[Tensor]:
        return [
            _random(tuple(p.shape), 100 * step + index, scale=10.0 ** (index - 2)).to(p.dtype)
            for index, p in enumerate(self.params)
        ]

    def step(self, grads: list[Tensor], **others) -> None:
        state = self.params, grads, self.firsts, self.seconds, self.steps
        if switch.takes("adamw", self.params[0]):
            assert _suit(AdamWTensors(*state, others.get("masters"))), "the kernel isn't tested"
        adamw_(*state, **{**SETTINGS, **others})


def _coded(state: _State) -> _State:
    for moments, signed in ((state.firsts, True), (state.seconds, False)):
        coded = [encode(m, num_row_dims(m.shape), signed=signed) for m in moments]
        moments[:] = [Coded(codes.contiguous(), scales) for codes, scales in coded]
    return state


def _close(mine: list[Tensor], right: list[Tensor], within: float = 1e-6) -> None:
    for index, (a, b) in enumerate(zip(mine, right, strict=True)):
        apart = relative_error(a.detach(), b.detach())
        assert apart <= within, f"tensor {index} is {apart:.1e} off"


@given(shapes=shapes)
@settings(max_examples=6, deadline=None)
def test_steps_are_those_of_torch_in_fp64(shapes):
    ours = _State(shapes)
    theirs = [p.double().requires_grad_() for p in ours.params]
    optimizer = torch.optim.AdamW(theirs, **SETTINGS)
    for step in range(4):
        grads = ours.grads(step)
        for p, grad in zip(theirs, grads, strict=True):
            p.grad = grad.double()
        optimizer.step()
        with kernels():
            ours.step(grads)
    _close(ours.params, theirs)
    _close(ours.firsts, [optimizer.state[p]["exp_avg"] for p in theirs])
    _close(ours.seconds, [optimizer.state[p]["exp_avg_sq"] for p in theirs])
    assert all(int(step) == 4 for step in ours.steps)


def test_the_reference_is_torch():
    ours = _State([(3, 5), (7,)], torch.float64)
    theirs = [p.clone().requires_grad_() for p in ours.params]
    optimizer = torch.optim.AdamW(theirs, **SETTINGS)
    for step in range(4):
        grads = ours.grads(step)
        for p, grad in zip(theirs, grads, strict=True):
            p.grad = grad
        optimizer.step()
        ours.step(grads)
    _close(ours.params, theirs, within=1e-12)


def test_nan_stays_nan_whatever_its_bits():
    """A GPU's NaN has all bits set but the sign: anything added would make it minus nothing."""
    ours = _State([(64,)], torch.bfloat16)
    grad = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32, device=DEVICE).view(torch.float32)
    with kernels():
        ours.step([grad])
    assert ours.params[0].isnan().all()


@pytest.mark.parametrize("count", [0, 1, 50, 3_000, 1_000_000])
def test_the_correction_of_early_steps_is_exact(count):
    """1 - 0.999 in fp32 would be right to 1e-5 only."""
    ours, right = _State([(16,)]), _State([(16,)])
    right.params = [p.double() for p in right.params]
    for state in (ours, right):
        state.steps = [torch.full((), float(count), device=DEVICE)]
    grads = ours.grads(1)
    before = right.params[0].clone()
    with kernels():
        ours.step(grads, weight_decay=0.0, lr=1000.0)
    right.step([grad.double() for grad in grads], weight_decay=0.0, lr=1000.0)
    assert relative_error(ours.params[0] - before, right.params[0] - before) < 1e-6


def test_the_rate_may_be_on_the_device():
    ours, right = _State([(2, 32), (5,)]), _State([(2, 32), (5,)])
    grads = ours.grads(1)
    given = [grad.clone() for grad in grads]
    with kernels():
        ours.step(grads, lr=torch.full((), 3e-3, device=DEVICE))
    right.step(grads, lr=3e-3)
    _close(ours.params, right.params)
    assert all(torch.equal(a, b) for a, b in zip(grads, given, strict=True))


@pytest.mark.parametrize("is_coded", [False, True])
def test_a_bad_step_changes_nothing(is_coded):
    shapes = [(4, 272), (3, 5)]
    ours, kept = (_coded(_State(shapes)) if is_coded else _State(shapes) for _ in range(2))
    bad = [torch.full_like(p, math.nan) for p in ours.params]
    with kernels():
        ours.step(bad, found_inf=torch.ones((), device=DEVICE))
    for mine, before in zip(_everything(ours), _everything(kept), strict=True):
        assert torch.equal(mine, before)
    with kernels():
        ours.step(ours.grads(1), found_inf=torch.zeros((), device=DEVICE))
    assert not torch.equal(ours.params[0], kept.params[0])
    assert all(int(step) == 1 for step in ours.steps)


def _everything(state: _State) -> list[Tensor]:
    moments = *state.firsts, *state.seconds
    parts = [part for m in moments for part in (m if isinstance(m, Coded) else [m])]
    return [*state.params, *parts, *state.steps]


def test_views_at_any_address_are_stepped():
    flat = _random((3 * 70 + 1,), 5)
    ours, right = _State([(3, 16), (3, 16)]), _State([(3, 16), (3, 16)])
    for state in (ours, right):
        copy = flat.clone()
        state.params = [copy[1:49].view(3, 16), copy[51:99].view(3, 16)]
    grads = [_random((50,), 6)[2:].view(3, 16), _random((16, 3), 7).t()]
    outside = [0, 49, 50, *range(99, 211)]
    with kernels():
        ours.step(grads)
    right.step(grads)
    _close(ours.params, right.params)
    assert torch.equal(ours.params[0]._base[outside], flat[outside])


def test_values_may_lie_in_another_order_than_rows():
    ours, right = _State([(2, 4, 3, 3)]), _State([(2, 4, 3, 3)])
    for state in (ours, right):
        state.params = [p.to(memory_format=torch.channels_last) for p in state.params]
        state.firsts = [torch.zeros_like(p) for p in state.params]
        state.seconds = [torch.zeros_like(p) for p in state.params]
    grads = ours.grads(1)
    with kernels():
        ours.step(grads)
    right.step(grads)
    assert not ours.params[0].is_contiguous()
    _close(ours.params, right.params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_step_in_place_of_rounded_copies(dtype):
    ours, exact = _State([(2, 32), (9,)], torch.bfloat16), _State([(2, 32), (9,)])
    masters = [p.clone() for p in exact.params]
    for step in range(3):
        grads = [grad.to(dtype) for grad in exact.grads(step)]
        with kernels():
            ours.step(grads, masters=masters)
        exact.step(grads)
    _close(masters, exact.params)
    for p, master in zip(ours.params, masters, strict=True):
        assert torch.equal(p, master.bfloat16())


def test_masters_are_rounded_to_nearest_and_halves_to_even():
    ours = _State([(16,)], torch.bfloat16)
    bits = 0x3F800000 + torch.arange(16, dtype=torch.int32, device=DEVICE) * 0x4000
    masters = [bits.view(torch.float32)]
    with kernels():
        ours.step(ours.grads(1), masters=masters, lr=0.0)
    assert torch.equal(ours.params[0], masters[0].bfloat16())


@pytest.mark.parametrize("shape", [(4, 512), (5, 300), (3, 2, 9), (2, 272)])
def test_codes_are_those_of_the_reference(shape):
    ours, right = _coded(_State([shape])), _coded(_State([shape]))
    # All magnitudes that a block can tell apart, and smaller ones, stand side by side.
    scale = torch.logspace(-8, 0, math.prod(shape), device=DEVICE)
    scale = scale[torch.randperm(len(scale), generator=torch.Generator().manual_seed(0))]
    for step in range(3):
        grads = [grad * scale.view(shape) for grad in ours.grads(step)]
        if step == 2:
            # So that a first moment all but vanishes, and its scale with it.
            grads = [-8.99 * decode(first, torch.float32, signed=True) for first in right.firsts]
        with kernels():
            ours.step(grads)
        right.step(grads)
        _same_codes(ours, right)
    _close(ours.params, right.params, within=1e-5)


def _same_codes(ours: _State, theirs: _State) -> None:
    pairs = zip((*ours.firsts, *ours.seconds), (*theirs.firsts, *theirs.seconds), strict=True)
    for mine, right in pairs:
        _close([mine.scales], [right.scales], within=1e-3)
        apart = (mine.codes.int() - right.codes.int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 0.006


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_kept_when_nothing_changes(signed):
    """All levels, once with each sign, through a step that leaves the moments alone."""
    ours = _State([(1, 256)])
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).clamp(max=254).view(1, 256)
    kept = Coded(codes.clone(), torch.full((1, 1), 3.7, device=DEVICE))
    nothing = encode(torch.zeros(1, 256, device=DEVICE), 1, signed=not signed)
    ours.firsts, ours.seconds = [[kept], [nothing]] if signed else [[nothing], [kept]]
    with kernels():
        ours.step([torch.zeros(1, 256, device=DEVICE)], betas=(1 - 1e-9, 1 - 1e-9))
    assert torch.equal(kept.codes, codes)


def test_codes_keep_what_is_not_finite():
    ours = _coded(_State([(2, 256)]))
    grad = torch.ones(2, 256, device=DEVICE)
    grad[0, 3] = math.nan
    with kernels():
        ours.step([grad])
    first = decode(ours.firsts[0], torch.float32, signed=True)
    assert first[0].isnan().all()
    assert first[1].isfinite().all()
    assert ours.params[0][0, 3].isnan()
    assert ours.params[0].isnan().sum() == 1


def test_it_compiles_as_one_graph():
    ours, right = _State([(2, 16)]), _State([(2, 16)])
    grads = ours.grads(1)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(params, grads, firsts, seconds, steps, found_inf):
        adamw_(params, grads, firsts, seconds, steps, found_inf=found_inf, **SETTINGS)

    found_inf = torch.zeros((), device=DEVICE)
    with kernels():
        step(ours.params, grads, ours.firsts, ours.seconds, ours.steps, found_inf)
        right.step(grads, found_inf=found_inf)
    for mine, theirs in zip(_everything(ours), _everything(right), strict=True):
        assert torch.equal(mine, theirs)


def test_the_operator_is_what_torch_wants_of_it():
    from paceline.kernels.adamw.kernel import _operator

    state = _State([(3, 8)])
    lists = state.params, state.grads(1), state.firsts, [], state.seconds, [], state.steps, []
    numbers = None, None, 1e-2, 0.9, 0.999, 1e-8, 0.1
    torch.library.opcheck(_operator.custom, (*lists, *numbers))


def test_tables_follow_tensors_that_move():
    ours, right = _State([(2, 16)]), _State([(2, 16)])
    for step in range(3):
        grads = ours.grads(step)
        with kernels():
            ours.step(grads)
        ours.params = [p.clone() for p in ours.params]
        right.step(grads)
    _close(ours.params, right.params)


def test_what_does_not_belong_together_is_refused():
    state = _State([(2, 3), (4,)])
    with pytest.raises(InputError, match=r"2 params and 1 grads"):
        state.step(state.grads(1)[:1])
    with pytest.raises(InputError, match=r"grads\[1\] has the shape \(2, 3\)"):
        state.step([state.params[0], state.params[0]])
    with pytest.raises(InputError, match=r"betas"):
        state.step(state.grads(1), betas=(0.9, 1.0))
    state = _coded(_State([(2, 3)]))
    state.firsts = _State([(2, 3)]).firsts
    with pytest.raises(InputError, match="others as codes"):
        state.step(state.grads(1))


def test_nothing_to_step_is_no_error():
    with switch.using("triton", DEVICE):
        adamw_([], [], [], [], [], **SETTINGS)
