"""Rotation with norms: kernels in the interpreter against the reference in fp64, and the reference
against the models' own rotation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from paceline.config.errors import InputError
from paceline.kernels import launch
from paceline.kernels.launch import Launch, MeasuredLaunch
from paceline.kernels.rope import rotate
from tests.kernels.agreement import DEVICE, check, kernels, random, with_kernels
from tests.ranks import run_ranks


def tables(batch: int, seq_len: int, rope_dim: int) -> tuple[Tensor, Tensor]:
    angles = random(batch, seq_len, 1, rope_dim // 2, seed=9, scale=3).detach()
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def weights(*widths: int) -> list[Tensor]:
    return [(random(width, seed=width).detach() / 3 + 1).requires_grad_() for width in widths]


def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 rows, and 5 programs backward, whatever the size."""
    few = (
        MeasuredLaunch(Launch({"ROWS": 4}), 0, 0),
        MeasuredLaunch(Launch({"ROWS": 4, "PROGRAMS": 5}), 0, 0),
    )
    rows = {"rope.forward": few[0], "rope.backward": few[1]}
    monkeypatch.setattr(launch, "measured", lambda device, kernel, dtype, size: rows[kernel])


@with_kernels
@given(
    batch=st.integers(1, 2),
    seq_len=st.integers(0, 5),
    heads=st.sampled_from([(1, 1), (3, 1), (6, 2), (8, 4)]),
    half=st.sampled_from([1, 3, 8]),
    stills=st.sampled_from([(0, 0), (5, 0), (4, 4)]),
    has_norm=st.booleans(),
    shared=st.booleans(),
)
@settings(max_examples=8, deadline=None)
def test_it_is_the_reference(batch, seq_len, heads, half, stills, has_norm, shared):
    widths = [2 * half + still for still in stills]
    q = random(batch, seq_len, heads[0], widths[0], seed=1)
    k = random(batch, seq_len, heads[1], widths[1], seed=2)
    cos, sin = tables(1 if shared else batch, seq_len, 2 * half)
    check(rotate, [q, k, cos, sin, *(weights(*widths) if has_norm else ())])


@with_kernels
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("stills", [(0, 0), (2, 0)])
def test_more_tiles_than_programs(monkeypatch, has_norm, stills):
    few_programs(monkeypatch)
    widths = [8 + still for still in stills]
    q, k = random(2, 5, 6, widths[0], seed=1), random(2, 5, 3, widths[1], seed=2)
    check(rotate, [q, k, *tables(2, 5, 8), *(weights(*widths) if has_norm else ())])


@with_kernels
def test_parts_of_one_product_are_read_where_they_lie():
    cos, sin = tables(1, 3, 8)

    def parts(product: Tensor, *norms: Tensor) -> tuple[Tensor, Tensor]:
        q, k, _ = product.unflatten(-1, (-1, 8)).split((4, 2, 2), dim=2)
        return rotate(q, k, cos.to(q.dtype), sin.to(q.dtype), *norms)

    check(parts, [random(2, 3, 64), *weights(8, 8)])

    def heads_first(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        turned = rotate(q.transpose(1, 2), k.transpose(1, 2), cos.to(q.dtype), sin.to(q.dtype))
        return turned[0].transpose(1, 2), turned[1].mT

    check(heads_first, [random(2, 4, 3, 8, seed=1), random(2, 2, 3, 8, seed=2)])


def test_pairs_are_complex_numbers_that_turn():
    q, k = random(2, 3, 4, 8), random(2, 3, 2, 8, seed=1)
    angles = random(2, 3, 1, 4, seed=9, scale=3).detach()
    cos, sin = angles.cos(), angles.sin()
    turned = rotate(q, k, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    for mine, x in zip(turned, (q, k), strict=True):
        expected = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
        torch.testing.assert_close(mine, torch.cat((expected.real, expected.imag), -1))


@with_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_head(value):
    q, k = random(1, 2, 2, 8).detach(), random(1, 2, 1, 8, seed=1).detach()
    q[0, 1, 1, 3] = value
    inputs = (q, k, *tables(1, 2, 8), torch.ones(8, device=DEVICE), torch.ones(8, device=DEVICE))
    with kernels():
        turned, _ = rotate(*inputs)
    torch.testing.assert_close(turned, rotate(*inputs)[0], equal_nan=True)
    assert turned[0, 1, 1].isnan().any()
    assert turned[0, :, 0].isfinite().all()


@with_kernels
@pytest.mark.parametrize("has_norm", [False, True])
def test_operators_are_what_torch_wants_of_them(has_norm):
    from paceline.kernels.rope.kernel import _forward_operator

    norms = weights(8, 8) if has_norm else (None, None)
    inputs = random(1, 2, 2, 8), random(1, 2, 1, 8, seed=1), *tables(1, 2, 8), *norms, 1e-6
    torch.library.opcheck(_forward_operator.custom, inputs)


@with_kernels
@pytest.mark.parametrize("has_norm", [False, True])
def test_it_compiles_as_one_graph(has_norm):
    q, k, norms = random(1, 2, 2, 8), random(1, 2, 1, 8, seed=1), weights(8, 8) if has_norm else []
    inputs, rope = [q, k, *norms], tables(1, 2, 8)

    def gradients(function):
        turned = function(q, k, *rope, *norms)
        return torch.autograd.grad(turned[0].sum() + turned[1].square().sum(), inputs)

    with kernels():
        compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")
        for mine, right in zip(gradients(compiled), gradients(rotate), strict=True):
            assert torch.equal(mine, right)


def _sharded(rank, world_size):
    """Values and gradients of one process, then of ranks that share heads, or sequences."""
    mesh, results = init_device_mesh("cpu", (world_size,)), []
    values = [random(2, 3, heads, 8, seed=heads).detach().cpu() for heads in (4, 2)]
    grads = [random(2, 3, heads, 8, seed=9 + heads).detach().cpu() for heads in (4, 2)]
    norms = [weight.detach().cpu() for weight in weights(8, 8)]
    for place, batch in ((None, 1), (Shard(2), 1), (Shard(0), 1), (None, 2), (Shard(0), 2)):
        rope = [table.cpu() for table in tables(batch, 3, 8)]
        of_rope = Shard(0) if place == Shard(0) and batch == 2 else Replicate()
        places = [place, place, of_rope, of_rope, Replicate(), Replicate()]
        for used in (norms, []):
            given = _placed([*values, *rope, *used], places, mesh)
            asking = [each.requires_grad_() for each in (*given[:2], *given[4:])]
            with kernels():
                turned = rotate(*given)
                found = torch.autograd.grad(turned, asking, _placed(grads, places, mesh))
            if place is not None:
                assert all(each.placements == (place,) for each in (*turned, *found[:2]))
            found = [each.detach() for each in (*turned, *found)]
            results.append([x if place is None else x.full_tensor() for x in found])
    return results


def _placed(tensors, places, mesh):
    """Copies, sharded where the first is."""
    pairs = zip(tensors, places, strict=False)
    if places[0] is None:
        return [tensor.clone() for tensor, _ in pairs]
    return [distribute_tensor(tensor, mesh, [place]) for tensor, place in pairs]


@with_kernels
@pytest.mark.skipif(DEVICE.type != "cpu", reason="ranks of these tests share one CPU")
def test_ranks_turn_their_own_heads_or_sequences():
    for found in run_ranks(_sharded, 2, timeout_s=120):
        for alone, shared in [(0, 2), (1, 3), (0, 4), (1, 5), (6, 8), (7, 9)]:
            for right, mine in zip(found[alone], found[shared], strict=True):
                torch.testing.assert_close(mine, right)


def test_what_does_not_fit_is_refused():
    q, k, (cos, sin) = random(1, 3, 2, 8), random(1, 3, 1, 8), tables(1, 3, 8)
    with pytest.raises(InputError, match="same batch, seq and type"):
        rotate(q, k[:, :2], cos, sin)
    with pytest.raises(InputError, match="Tables of shapes"):
        rotate(q, k, cos[:, :2], sin[:, :2])
    with pytest.raises(InputError, match="both or none"):
        rotate(q, k, cos, sin, torch.ones(8, device=DEVICE))
