"""Codecs: what every one promises, on drawn values (one process), and each one's own arithmetic."""

import math
from collections.abc import Callable

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.compress import chunks
from paceline.comm.compress.blockwise import BLOCKWISE
from paceline.comm.compress.codec import ALIGNMENT, BlockCodec
from paceline.comm.compress.codecs import codec_of
from paceline.config.comm import BLOCK, CODECS, Codec, codec
from tests.kernels import quantize_reference as reference

NAMES = ["fp16", "bf16", "int8", "fp8", "int4", "quinary", "onebit", "topk:0.1"]
UNBIASED = [name for name in NAMES if codec_of(codec(name)).is_unbiased]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# The step between levels, as a share of the largest magnitude of a block.
STEPS = {"fp16": 2**-10, "bf16": 2**-7, "int8": 1 / 127, "fp8": 2**-3, "int4": 1 / 7}
REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "int8": lambda blocks: reference.integers(blocks, 127),
    "int4": lambda blocks: reference.integers(blocks, 7),
    "fp8": reference.float8,
    "quinary": reference.quinary,
    "onebit": reference.signs,
    "fp16": lambda blocks: blocks.half().to(blocks.dtype),
    "bf16": lambda blocks: blocks.bfloat16().to(blocks.dtype),
}

names = pytest.mark.parametrize("name", NAMES)
unbiased = pytest.mark.parametrize("name", UNBIASED)
property_test = settings(max_examples=15, deadline=None)


@st.composite
def drawn(draw: st.DrawFn) -> Tensor:
    """(n,) fp32, n around multiples of a block; magnitudes that fp16 holds too."""
    size = draw(st.sampled_from([0, 1, 2, 100, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17]))
    bound = draw(st.sampled_from([1e-6, 1.0, 4e4]))
    values = torch.from_numpy(
        draw(npst.arrays(np.float32, size, elements=st.floats(-1, 1, width=32)))
    )
    return values * bound


def payload_of(coder: BlockCodec, values: Tensor) -> Tensor:
    """Filled with what nobody wrote, so that bytes left out are seen."""
    return torch.full((coder.num_bytes(len(values)),), 0x5A, dtype=torch.uint8)


def sent(coder: BlockCodec, values: Tensor, seed: int | None = None) -> Tensor:
    """What the receiver of values reads, of their type."""
    payload = payload_of(coder, values)
    coder.encode(values, payload, seed=seed)
    received = torch.full_like(values, 7.0)
    coder.decode(payload, received)
    return received


def test_every_name_has_a_codec_of_that_name():
    for name in CODECS:
        if name in ("none", "powersgd"):
            with pytest.raises(ValueError, match=f"{name} codes no values one by one"):
                codec_of(Codec(name))
        else:
            given_name = "topk:0.01" if name == "topk" else name
            assert codec_of(codec(given_name)).name == given_name


@names
@given(values=drawn(), seed=st.integers(0, 5))
@property_test
def test_error_feedback_keeps_the_sum(name: str, values: Tensor, seed: int):
    """What is sent and what is kept are what was given and what was kept before."""
    coder = codec_of(codec(name))
    error = 0.3 * values.flip(0)
    owed = values.double() + error.double()
    given_values, payload = values.clone(), payload_of(coder, values)
    coder.encode_with_error(values, error, payload, seed=seed if coder.is_unbiased else None)
    received = torch.zeros_like(values)
    coder.decode(payload, received, add=True)
    most = owed.abs().max().item() if len(values) else 0.0
    torch.testing.assert_close(received.double() + error, owed, rtol=0, atol=1e-6 * most + 1e-35)
    assert torch.equal(values, given_values)


@names
@given(values=drawn())
@property_test
def test_the_payload_is_that_of_the_values_alone(name: str, values: Tensor):
    """With and without error, over what was in the buffers, in any layout: the same bytes."""
    coder = codec_of(codec(name))
    first, second = payload_of(coder, values), payload_of(coder, values)
    coder.encode(values, first)
    coder.encode_with_error(values.repeat_interleave(2)[::2], torch.zeros_like(values), second)
    received, again = torch.full_like(values, math.nan), torch.zeros_like(values)
    coder.decode(first, received)
    coder.decode(second, again)
    assert torch.equal(received, again)
    coder.decode(first, again, add=True)
    assert torch.equal(again, 2 * received)
    assert len(first) % ALIGNMENT == 0


@names
@pytest.mark.parametrize("dtype", DTYPES)
@given(values=drawn())
@settings(max_examples=8, deadline=None)
def test_any_type_is_coded_like_its_values_in_fp32(name: str, dtype: torch.dtype, values: Tensor):
    coder = codec_of(codec(name))
    values = values.to(dtype)
    received = sent(coder, values)
    assert received.dtype == dtype
    if dtype != torch.float64:
        assert torch.equal(received, sent(coder, values.float()).to(dtype))


@pytest.mark.parametrize("name", list(REFERENCES))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@given(values=drawn())
@settings(max_examples=15, deadline=None)
def test_what_is_read_is_the_references(name: str, dtype: torch.dtype, values: Tensor):
    values = values.to(dtype)
    blocks = [block.view(1, -1) for block in values.split(BLOCK) if len(block)]
    wanted = [REFERENCES[name](block).view(-1) for block in blocks]
    received = sent(codec_of(codec(name)), values)
    # Equal, but for what is smaller than any normal number, which some processes round to 0.
    wanted_values = torch.cat([*wanted, values[:0]])
    torch.testing.assert_close(received, wanted_values, rtol=0, atol=1e-35)


@pytest.mark.parametrize("name", list(STEPS))
@given(values=drawn())
@property_test
def test_rounding_is_to_the_nearest_level(name: str, values: Tensor):
    received = sent(codec_of(codec(name)), values)
    for block, read in zip(values.split(BLOCK), received.split(BLOCK), strict=True):
        most = block.abs().max().item() if len(block) else 0.0
        error = (read - block).abs().max().item() if len(block) else 0.0
        assert error <= 0.501 * STEPS[name] * most + 2**-25


@pytest.mark.parametrize("name", list(BLOCKWISE))
@given(data=st.data())
@property_test
def test_what_a_payload_can_hold_is_sent_exactly(name: str, data: st.DataObject):
    """By a block's levels times a power of two, with every seed."""
    most = {"int8": 127, "int4": 7, "quinary": 2, "onebit": 1, "fp8": 8, "fp16": 1024, "bf16": 128}
    levels, size = most[name], data.draw(st.integers(1, 600))
    whole = npst.arrays(np.int32, size, elements=st.integers(-levels, levels))
    values = torch.from_numpy(data.draw(whole)).float()
    values[::BLOCK] = levels
    if name == "onebit":
        values[values == 0] = -1
    if name == "fp8":
        values[::BLOCK] = 448
    if name == "quinary":
        values = shuffled_blocks(data.draw(st.integers(0, 10**6)))
    values *= 2.0 ** data.draw(st.integers(-14, 4))
    coder = BLOCKWISE[name]
    assert torch.equal(sent(coder, values), values)
    if coder.is_unbiased:
        seed = data.draw(st.integers(0, 10**6))
        assert torch.equal(sent(coder, values, seed), values)


def shuffled_blocks(seed: int) -> Tensor:
    """(3 x BLOCK,) integers from -2 to 2 whose mean square is 1.25 in each block, so that the scale
    is one: 60 x 4 + 80 x 1 = 320."""
    stream = torch.Generator().manual_seed(seed)
    magnitudes = torch.tensor([2.0] * 60 + [1.0] * 80 + [0.0] * (BLOCK - 140))
    signs = torch.randint(2, (3, BLOCK), generator=stream) * 2 - 1
    order = torch.stack([torch.randperm(BLOCK, generator=stream) for _ in range(3)])
    return (magnitudes[order] * signs).view(-1)


@unbiased
def test_the_mean_over_seeds_is_the_value(name: str):
    """Within five standard deviations; nearest rounding is off by far more than that."""
    coder = codec_of(codec(name))
    values = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    num_draws = 500
    mean = torch.zeros(BLOCK, dtype=torch.float64)
    for seed in range(num_draws):
        mean += sent(coder, values, seed).double() / num_draws
    # A level's neighbours are at most this far; a draw between them has at most half as deviation.
    step = STEPS[name] * values.abs().max().item()
    if name in ("fp16", "bf16", "fp8"):
        step = STEPS[name] * (values.abs() + 1e-2 * values.abs().max())
    allowed = 5 * 0.5 * step / math.sqrt(num_draws)
    assert bool(((mean - values).abs() <= allowed).all())
    assert bool(((sent(coder, values) - values).abs() > allowed).any())


@unbiased
def test_a_seed_decides_every_draw(name: str):
    coder = codec_of(codec(name))
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sent(coder, values, seed=3), sent(coder, values, seed=3))
    assert not torch.equal(sent(coder, values, seed=3), sent(coder, values, seed=4))


@names
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 300, 999])
def test_nan_and_infinity_survive_and_leave_no_error(
    name: str, special: float, seed: int | None, place: int
):
    coder = codec_of(codec(name))
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    values[place] = special
    seed = seed if coder.is_unbiased else None
    received = sent(coder, values, seed)
    torch.testing.assert_close(received[place], torch.tensor(special), equal_nan=True)
    others = [slice(0, BLOCK), slice(BLOCK, 2 * BLOCK), slice(3 * BLOCK, 1000)]
    others = [other for other in others if not other.start <= place < other.stop]
    assert all(bool(received[other].isfinite().all()) for other in others)
    error = torch.zeros_like(values)
    coder.encode_with_error(values, error, payload_of(coder, values), seed=seed)
    assert bool(error.isfinite().all())
    assert error[place] == 0


@pytest.mark.parametrize("name", list(BLOCKWISE))
def test_nan_and_infinity_in_one_block_are_both_seen(name: str):
    values = torch.zeros(BLOCK)
    values[[1, 2, 3]] = torch.tensor([math.nan, math.inf, -math.inf])
    assert not sent(BLOCKWISE[name], values)[1:4].isfinite().any()


@names
def test_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch):
    coder = codec_of(codec(name))
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    whole, cut = payload_of(coder, values), payload_of(coder, values)
    errors = torch.zeros_like(values), torch.zeros_like(values)
    seed = 7 if coder.is_unbiased else None
    drawn = payload_of(coder, values), payload_of(coder, values)
    coder.encode_with_error(values, errors[0], whole)
    coder.encode(values, drawn[0], seed=seed)
    monkeypatch.setattr(chunks, "_fastest_on_this_core", lambda: 4 * BLOCK)
    coder.encode_with_error(values, errors[1], cut)
    coder.encode(values, drawn[1], seed=seed)
    assert torch.equal(whole, cut)
    assert torch.equal(*drawn)
    assert torch.equal(*errors)
    received = torch.zeros_like(values)
    coder.decode(cut, received, add=True)
    torch.testing.assert_close(received + errors[0], values)


def test_a_core_tries_chunks_of_whole_blocks_once():
    chunk = chunks.chunk_values(torch.device("cpu"))
    assert chunk in chunks._CPU_CHUNKS
    assert chunk % BLOCK == 0
    before = chunks._fastest_on_this_core.cache_info().misses
    assert chunks.chunk_values(torch.device("cpu")) == chunk
    assert chunks._fastest_on_this_core.cache_info().misses == before


def test_payloads_stand_side_by_side():
    """As the chunks of an all-to-all do, one per rank."""
    values = torch.randn(2, 1001)
    for name in NAMES:
        coder = codec_of(codec(name))
        both = torch.empty(2, coder.num_bytes(1001), dtype=torch.uint8)
        for row, payload in zip(values, both, strict=True):
            coder.encode(row, payload)
            received = torch.empty(1001)
            coder.decode(payload, received)
            assert torch.equal(received, sent(coder, row))


def test_bytes_are_those_of_the_documents():
    bits = {"fp16": 16, "bf16": 16, "int8": 8.125, "fp8": 8.125, "int4": 4.125, "onebit": 1.125}
    bits["quinary"] = 2.53125
    for name, wanted in bits.items():
        assert BLOCKWISE[name].num_bytes(1 << 20) * 8 / (1 << 20) == wanted
    assert codec_of(codec("topk:0.01")).num_bytes(1_000_000) == pytest.approx(31_740, abs=3)
    assert codec_of(codec("topk:0.001")).num_bytes(1_000_000) == pytest.approx(3_616, abs=3)
    assert all(codec_of(codec(name)).num_bytes(0) == 0 for name in NAMES)


def test_quinary_cuts_what_is_large_and_owes_it():
    values = torch.ones(BLOCK)
    values[7] = 100.0
    error, payload = torch.zeros(BLOCK), payload_of(BLOCKWISE["quinary"], values)
    BLOCKWISE["quinary"].encode_with_error(values, error, payload)
    step = values.norm().item() / math.sqrt(1.25 * BLOCK)
    assert error[7].item() == pytest.approx(100 - 2 * step)
    assert error[8] == 1.0  # nearer to nothing than to one step


def test_topk_sends_the_largest():
    coder = codec_of(codec("topk:0.01"))
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    received = sent(coder, values)
    where = values.abs().topk(50).indices
    assert torch.equal(received[where], values[where].bfloat16().float())
    assert received.count_nonzero() == 50


@names
def test_buffers_that_do_not_belong_together_are_refused(name: str):
    coder = codec_of(codec(name))
    values = torch.zeros(300)
    payload = payload_of(coder, values)
    with pytest.raises(ValueError, match=r"codes flat floating point values, not torch.int64"):
        coder.encode(values.long(), payload)
    with pytest.raises(ValueError, match=r"of shape \(3, 100\): flatten them"):
        coder.decode(payload, values.view(3, 100))
    with pytest.raises(ValueError, match=r"bytes, not a tensor of shape \(1,\)"):
        coder.encode(values, payload[:1])
    with pytest.raises(ValueError, match=r"300 values have as many errors, not \(299,\)"):
        coder.encode_with_error(values, values[1:].clone(), payload)
    if not coder.is_unbiased:
        with pytest.raises(ValueError, match=r"rounds nothing at random: give no seed"):
            coder.encode(values, payload, seed=1)
