"""Coding in one pass: the payloads of the codecs in plain torch, bit by bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.compress.blockwise import BLOCKWISE
from paceline.config.comm import BLOCK
from paceline.kernels import quantize, switch
from tests.kernels.agreement import DEVICE, kernels, with_kernels

pytestmark = with_kernels
CODECS = ["int8", "fp8", "int4", "onebit"]
lengths = st.one_of(st.integers(1, 600), st.sampled_from([256, 2048, 2304, 4096 + 12]))


def _values(n: int, seed: int = 0) -> Tensor:
    """Of magnitudes that differ from block to block and within one."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 0, BLOCK).repeat(-(-n // BLOCK))[:n]
    blocks = 10.0 ** (torch.arange(n) // BLOCK % 12 - 6)
    return (torch.randn(n, generator=generator) * sizes * blocks).to(DEVICE)


def _in_torch(codec: str, values: Tensor, error: Tensor | None) -> Tensor:
    payload = _room(codec, len(values))
    with switch.using("reference", DEVICE):
        if error is None:
            BLOCKWISE[codec].encode(values, payload)
        else:
            BLOCKWISE[codec].encode_with_error(values, error, payload)
    return payload


def _with_kernel(codec: str, values: Tensor, error: Tensor | None) -> Tensor:
    payload = _room(codec, len(values))
    with kernels():
        quantize.encode(codec, values, payload, error)
    return payload


def _room(codec: str, n: int) -> Tensor:
    return torch.full((BLOCKWISE[codec].num_bytes(n),), 0xA5, dtype=torch.uint8, device=DEVICE)


def _same(codec: str, mine: Tensor, right: Tensor, n: int) -> None:
    """Bit by bit, but for the mean magnitude, whose sum has another order."""
    scales = 4 * -(-n // BLOCK)
    assert torch.equal(mine[scales:], right[scales:])
    ours, theirs = (payload[:scales].view(torch.float32) for payload in (mine, right))
    within = 1e-6 if codec == "onebit" else 0
    torch.testing.assert_close(ours, theirs, rtol=within, atol=0, equal_nan=True)


@pytest.mark.parametrize("codec", CODECS)
@given(n=lengths, has_error=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=8, deadline=None)
def test_payloads_are_those_of_torch(codec, n, has_error, seed):
    values = _values(n, seed)
    errors = [_values(n, seed + 1) * 0.3 for _ in range(2)] if has_error else [None, None]
    right = _in_torch(codec, values, errors[1])
    mine = _with_kernel(codec, values, errors[0])
    _same(codec, mine, right, n)
    if has_error:
        # A product and a difference, or both in one, which rounds once less.
        size = _values(n, seed).abs() + _values(n, seed + 1).abs()
        largest = torch.cat([part.amax().expand_as(part) for part in size.split(BLOCK)])
        assert ((errors[0] - errors[1]).abs() <= 1e-6 * largest).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_may_have_sixteen_bits(codec, dtype):
    values, errors = _values(600).to(dtype), [_values(600, 1), _values(600, 1)]
    mine, right = _with_kernel(codec, values, errors[0]), _in_torch(codec, values, errors[1])
    _same(codec, mine, right, 600)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_finite_is_coded_alike_and_leaves_no_error(codec):
    values = _values(5 * BLOCK)
    values[[3, 300, 301, 700]] = torch.tensor([math.nan, math.inf, -3e38, -math.inf]).to(values)
    values[701] = math.nan
    values[3 * BLOCK :] = 0.0
    values[4 * BLOCK :] = 1e-40
    errors = [torch.zeros_like(values), torch.zeros_like(values)]
    mine, right = _with_kernel(codec, values, errors[0]), _in_torch(codec, values, errors[1])
    _same(codec, mine, right, len(values))
    assert errors[0].isfinite().all()
    assert (errors[0][:3] == 0).all()
    decoded = torch.empty_like(values)
    with kernels():
        quantize.decode(codec, mine.view(1, -1), decoded)
    expected = torch.empty_like(values)
    BLOCKWISE[codec].decode(right, expected)
    torch.testing.assert_close(decoded, expected, rtol=1e-6, atol=0, equal_nan=True)


def test_ties_go_to_even_and_every_level_is_kept():
    """All levels of e4m3, and all numbers halfway between them, in blocks that reach 448."""
    codes = torch.arange(127, dtype=torch.uint8)
    levels = codes.view(torch.float8_e4m3fn).float()
    halves = (levels[1:] + levels[:-1]) / 2
    values = torch.cat([levels, -halves, levels[-1:], torch.zeros(2)]).to(DEVICE)
    assert len(values) == BLOCK
    _same("fp8", _with_kernel("fp8", values, None), _in_torch("fp8", values, None), BLOCK)
    values = torch.arange(-127, 127.5, 0.5)[: 2 * BLOCK - 1].to(DEVICE)
    _same("int8", _with_kernel("int8", values, None), _in_torch("int8", values, None), len(values))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n", [1, 255, 2304, 2310])
@pytest.mark.parametrize("add", [False, True])
def test_what_ranks_sent_is_added_up(codec, n, add):
    payloads = torch.stack([_in_torch(codec, _values(n, seed), None) for seed in range(3)])
    ours = torch.full((n,), 0.5, device=DEVICE)
    right = ours.double() if add else torch.zeros(n, dtype=torch.float64, device=DEVICE)
    size = right.clone()
    for payload in payloads:
        part = torch.empty(n, dtype=torch.float64, device=DEVICE)
        BLOCKWISE[codec].decode(payload, part)
        right += part
        size += part.abs()
    with kernels():
        quantize.decode(codec, payloads, ours, add=add)
    assert ((ours - right).abs() <= 4e-7 * size).all()


def test_payloads_may_lie_in_wider_rows():
    n = 300
    rows = torch.zeros(2, 1024, dtype=torch.uint8, device=DEVICE)
    used = BLOCKWISE["int8"].num_bytes(n)
    values = _values(n)
    with kernels():
        for row in rows:
            quantize.encode("int8", values, row[:used])
        ours = torch.empty(n, device=DEVICE)
        quantize.decode("int8", rows[:, :used], ours)
    right = torch.empty(n, device=DEVICE)
    BLOCKWISE["int8"].decode(rows[0, :used], right)
    torch.testing.assert_close(ours, 2 * right)
    assert (rows[:, used:] == 0).all()


@pytest.mark.parametrize("codec", CODECS)
def test_codecs_use_it(codec, monkeypatch):
    """The wiring: what a codec does is what the kernels do, where they are chosen."""
    seen = []
    for name in ("encode", "decode"):
        function = getattr(quantize, name)

        def watched(*given, _name=name, _function=function, **named):
            seen.append(_name)
            return _function(*given, **named)

        monkeypatch.setattr(quantize, name, watched)
    values, payload = _values(260), _room(codec, 260)
    error, decoded = torch.zeros(260, device=DEVICE), torch.empty(260, device=DEVICE)
    with kernels():
        BLOCKWISE[codec].encode(values, payload)
        BLOCKWISE[codec].encode_with_error(values, error, payload)
        BLOCKWISE[codec].decode(payload, decoded)
        BLOCKWISE[codec].decode(payload, decoded.double())
    assert seen == ["encode", "encode", "decode"]
    torch.testing.assert_close(decoded + error, values, rtol=1e-5, atol=1e-13)


def test_the_operators_are_what_torch_wants_of_them():
    from paceline.kernels.quantize import kernel

    values, payload = _values(300), _room("int8", 300)
    torch.library.opcheck(kernel.encode.custom, ("int8", values, payload, torch.zeros_like(values)))
    _with_kernel("int8", values, None)
    good = _in_torch("int8", values, None)
    torch.library.opcheck(kernel.decode.custom, ("int8", good.view(1, -1), values, True))
