"""Rounding: what the noise may do at its extremes, and every level that fp8 has."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.quantize.floats import write_rounded
from paceline.kernels.quantize.schemes import Float8, Integers, Nibbles, Signs, cut_mantissa
from paceline.kernels.quantize.words import Quinary
from tests.kernels import quantize_reference as reference

EXTREMES = torch.tensor([-32768, -32767, -1, 0, 1, 32767], dtype=torch.int16)


@pytest.mark.parametrize("scheme", [Integers(), Nibbles()])
def test_no_noise_moves_an_integer(scheme: Integers | Nibbles):
    most = int(scheme.largest)
    levels = torch.arange(-most - 1, most + 1).clamp(min=-most).float().repeat(6, 1)
    wanted = levels.clone()
    codes = torch.empty(6, scheme.num_bytes(levels.shape[1]), dtype=torch.uint8)
    scheme.write(levels, codes, EXTREMES.view(6, 1).repeat(1, levels.shape[1]))
    assert torch.equal(levels, wanted)
    read = torch.empty_like(wanted)
    scheme.read(codes, read)
    assert torch.equal(read, wanted)


def test_no_noise_leaves_the_levels():
    """A reciprocal that was rounded up lifts the largest value a little above the largest level."""
    levels = torch.full((6, 2), 127 + 3 * 2.0**-17)
    codes = torch.empty(6, 2, dtype=torch.uint8)
    Integers().write(levels, codes, EXTREMES.view(6, 1).repeat(1, 2))
    assert torch.equal(codes.view(torch.int8), torch.full((6, 2), 127, dtype=torch.int8))
    levels = torch.full((6, 2), 448 / 256).nextafter(torch.tensor(2.0))
    Float8().write(levels, codes, EXTREMES.view(6, 1).repeat(1, 2))
    assert torch.equal(levels, torch.full((6, 2), 448 / 256))


@pytest.mark.parametrize("noise", [None, *EXTREMES.tolist()])
def test_every_number_of_fp8_is_read_and_written_as_torch_does(noise: int | None):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(1, -1)  # NaN, which scales carry
    wanted = codes.view(torch.float8_e4m3fn).float()
    levels = torch.empty_like(wanted)
    Float8().read(codes, levels)
    assert torch.equal(levels * 256, wanted)
    drawn = None if noise is None else torch.full_like(codes, noise, dtype=torch.int16)
    again = torch.empty_like(codes)
    Float8().write(levels, again, drawn)
    assert torch.equal(again, codes)
    assert torch.equal(levels * 256, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("noise", EXTREMES.tolist())
def test_no_noise_moves_a_shorter_float(dtype: torch.dtype, noise: int):
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    shorter = bits.view(dtype)
    rounded = torch.empty_like(shorter)
    write_rounded(shorter.float(), rounded, torch.full_like(bits, noise))
    torch.testing.assert_close(rounded, shorter, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shift", [13, 16, 20])
def test_a_mantissa_goes_up_as_often_as_what_is_cut_off_asks_for(shift: int):
    """Over all noise there is, exactly, to a 2^-15."""
    noise = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(1, -1)
    one = torch.tensor(2.0**-120).view(torch.int32)
    for share in (0.0, 0.25, 0.3, 0.5, 0.9):
        value = (one + round(share * 2**shift)).view(torch.float32).expand_as(noise)
        went_up = cut_mantissa(value.contiguous(), shift, noise) - (one >> shift)
        assert went_up.double().mean().item() == pytest.approx(share, abs=2**-12)
        assert set(went_up.unique().tolist()) <= {0, 1}


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_signs_are_packed_and_unpacked(seed: int):
    levels = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
    wanted = torch.where(levels >= 0, 1.0, -1.0)
    codes = torch.empty(3, 8, dtype=torch.uint8)
    Signs().write(levels, codes, None)
    assert torch.equal(levels, wanted)
    levels.zero_()
    Signs().read(codes, levels)
    assert torch.equal(levels, wanted)


def test_every_word_of_five_levels_is_packed_and_unpacked():
    """All 125 words, and each of them in every place of a row."""
    digits = torch.cartesian_prod(*[torch.arange(-2.0, 3.0)] * 3)  # (125, 3)
    for shift in range(88):
        words = digits.roll(shift, dims=0)[:88]
        levels = torch.cat([*words[:, :2].T, words[:80, 2]]).view(1, -1)  # (1, 256)
        assert levels.shape == (1, 256)
        codes = torch.empty(1, Quinary().num_bytes(256), dtype=torch.uint8)
        wanted = levels.clone()
        Quinary().write(levels, codes, None)
        assert torch.equal(levels, wanted)
        levels.zero_()
        Quinary().read(codes, levels)
        assert torch.equal(levels, wanted)


def test_five_levels_are_rounded_and_cut():
    levels = torch.zeros(2, 256)
    levels[:, [0, 88, 176, 255]] = torch.tensor([7.0, -0.6, 1.4, -2.6])
    codes = torch.empty(2, 77, dtype=torch.uint8)
    Quinary().write(levels, codes, None)
    assert levels[0, [0, 88, 176, 255]].tolist() == [2, -1, 1, -2]
    assert codes[0, 0] == 62 + 2 - 5 + 25  # the first digit of each third


def test_the_reference_shows_every_level():
    """The specification itself, against numbers worked out by hand."""
    block = torch.tensor([[127.0, -1.4, 1.6, 0.5, -0.5, 1.5]])
    assert reference.integers(block, 127).tolist() == [[127.0, -1.0, 2.0, 0.0, 0.0, 2.0]]
    assert reference.signs(torch.tensor([[1.0, -3.0, 0.0, 4.0]])).tolist() == [[2, -2, 2, 2]]
    # The step is the root of the mean square over 1.25: 2 of 20 / 4, 4 of 100 / 5.
    assert reference.quinary(torch.tensor([[4.0, -2.0, 0.0, 0.0]])).tolist() == [[4, -2, 0, 0]]
    assert reference.quinary(torch.tensor([[10.0, 0.0, 0.0, 0.0, 0.0]])).tolist()[0][0] == 8
    assert reference.float8(torch.tensor([[448.0, 17.0, -0.3]])).tolist() == [[448, 16, -0.3125]]
    for coded in (reference.float8, reference.signs):
        assert coded(torch.zeros(1, 4)).abs().max() < 1e-37
