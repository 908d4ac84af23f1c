"""Seconds of kernels: known values, limits, and properties over drawn shapes (pure)."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.catalogue.curves import MEASURED, catalogue_curves
from paceline.config.curves import AttentionCurve, DeviceCurves, MatmulCurve, MemoryCurve
from paceline.config.device import Device
from paceline.config.errors import InputError
from paceline.config.figure import Figure
from paceline.config.hardware import CATALOGUE, device
from paceline.plan.grids import WAVE_SHARE
from paceline.plan.rates import (
    KERNEL_S,
    attention_s,
    matmul_s,
    memory_s,
    origins,
    peak_flops,
    wave_quantization,
)

A100, H100, B200 = device("A100-80"), device("H100-SXM"), device("B200")
SIZES = st.integers(1, 100_000)
DEVICES = st.sampled_from(["A100-80", "H100-SXM", "B200", "L40S", "V100", "MI300X", "TPUv5p"])
ADAPTIVE = st.sampled_from(["H100-SXM", "H200", "GB300", "TPUv4", "MI300X"])


def _best(entry):
    return "bf16" if entry.peak("bf16") else "fp16"


def _figure(value):
    return Figure(value=value, origin="measured", source="this test")


def _own(**changes):
    """A CPU that was measured: 100 GFLOP/s, half of which products of 1,000 reach."""
    curves = DeviceCurves(
        matmul={
            "fp32": MatmulCurve(
                m=(10, 1000), n=(10, 1000), k=(10, 1000), source="measured here",
                share=(0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.5),
            )
        },
        attention={
            "flash": AttentionCurve(
                seq_len=(128,), head_dim=(64,), forward=(0.2,), backward=(0.1,),
                source="measured here",
            )
        },
        memory=MemoryCurve(bytes=(1e3, 1e6), seconds=(1e-6, 1e-4), source="measured here"),
    )  # fmt: skip
    given = {
        "name": "CPU", "kind": "cpu", "peak_flops": {"fp32": _figure(100e9)}, "curves": curves,
    }  # fmt: skip
    return Device(**(given | changes))


CPU = _own()


@pytest.mark.parametrize(
    ("entry", "shape", "precision", "share"),
    [
        # Best shapes of the public list of achievable matmul rates: a curve must come near them.
        (A100, (1024, 10240, 5120), "bf16", 0.869),
        (H100, (2048, 2048, 13312), "bf16", 0.803),
        (B200, (1792, 16128, 3072), "bf16", 0.776),
        (device("A100-80-PCIe"), (2048, 5120, 6144), "bf16", 0.811),
        (device("H200"), (1280, 4096, 12032), "fp8", 0.734),
    ],
)
def test_the_best_shapes_that_others_measured_are_met(entry, shape, precision, share):
    m, n, k = shape
    rate = 2 * m * n * k / matmul_s(entry, precision, m, n, k)
    assert rate / peak_flops(entry, precision) == pytest.approx(share, rel=0.25)


def test_a_grid_point_is_returned_as_it_was_measured():
    # The first times of the file: 16 x 64 x 64 takes 2.87 us.
    assert matmul_s(A100, "bf16", 16, 64, 64) == pytest.approx(2.87e-6, rel=1e-6)
    assert matmul_s(CPU, "fp32", 1000, 1000, 1000) == pytest.approx(2e9 / 50e9)
    assert matmul_s(CPU, "fp32", 10, 10, 10) == pytest.approx(2e3 / 10e9)


def test_between_points_the_logarithms_are_interpolated():
    middle = matmul_s(CPU, "fp32", 1000, 1000, 100)
    assert middle == pytest.approx(2e8 / (100e9 * np.sqrt(0.1 * 0.5)))


def test_a_gpu_pads_small_products_and_a_processor_does_not():
    assert matmul_s(H100, "bf16", 1, 1, 1) == matmul_s(H100, "bf16", 16, 64, 64)
    assert matmul_s(CPU, "fp32", 1, 1, 1) == pytest.approx(2 / 10e9)


def test_a_row_that_begins_a_wave_costs_a_wave_where_kernels_keep_to_a_tile():
    # 27 x 16 tiles of 128 x 256 are four full waves on 108 processors.
    full = matmul_s(A100, "bf16", 27 * 128, 4096, 4096)
    more = matmul_s(A100, "bf16", 27 * 128 + 1, 4096, 4096)
    assert more / full == pytest.approx((5 / 4) ** WAVE_SHARE, rel=0.01)
    assert matmul_s(H100, "bf16", 27 * 128 + 1, 4096, 4096) < 1.01 * matmul_s(
        H100, "bf16", 27 * 128, 4096, 4096
    )


@given(DEVICES, SIZES, SIZES, SIZES)
def test_no_product_beats_the_peak_or_the_memory(name, m, n, k):
    entry = device(name)
    seconds = matmul_s(entry, _best(entry), m, n, k)
    assert np.isfinite(seconds)
    seconds *= 1 + 1e-9  # sums in another order
    assert seconds >= 2.0 * m * n * k / peak_flops(entry, _best(entry))
    assert seconds >= 2.0 * (m * k + k * n + m * n) / entry.memory_bytes_per_s.value


@given(ADAPTIVE, SIZES, SIZES, SIZES, st.sampled_from([(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]))
def test_a_larger_product_never_takes_less_time(name, m, n, k, step):
    smaller = matmul_s(device(name), "bf16", m, n, k)
    larger = matmul_s(device(name), "bf16", *np.add((m, n, k), step))
    assert larger >= smaller * (1 - 1e-9)


@given(st.sampled_from(sorted(MEASURED)), SIZES, SIZES, SIZES, st.integers(0, 2))
def test_filling_the_waves_makes_up_for_little_work_at_most(name, m, n, k, axis):
    size = [m, n, k]
    smaller = matmul_s(device(name), "bf16", *size)
    size[axis] *= 2
    least = 0.75 if catalogue_curves(name).curves.matmul["bf16"].tile and axis < 2 else 1 - 1e-9
    assert matmul_s(device(name), "bf16", *size) >= smaller * least


@given(DEVICES, SIZES, SIZES, SIZES, st.floats(1, 100))
def test_a_faster_device_is_never_slower(name, m, n, k, factor):
    slow, best = device(name), _best(device(name))
    peaks = {key: _figure(value.value * factor) for key, value in slow.peak_flops.items()}
    more_flops = slow.model_copy(update={"peak_flops": peaks})
    wider = slow.model_copy(
        update={"memory_bytes_per_s": _figure(slow.memory_bytes_per_s.value * factor)}
    )
    seconds = matmul_s(slow, best, m, n, k)
    seconds *= 1 + 1e-9
    assert matmul_s(more_flops, best, m, n, k) <= seconds
    assert matmul_s(wider, best, m, n, k) <= seconds
    assert memory_s(wider, m) <= memory_s(slow, m)
    shape = (1, 8, m, m, 128, 0.5)
    attended = attention_s(slow, best, "flash", *shape)
    assert attention_s(more_flops, best, "flash", *shape) <= attended * (1 + 1e-9)


@settings(max_examples=30)
@given(DEVICES, st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=1, max_size=20))
def test_columns_give_what_single_products_give(name, shapes):
    entry = device(name)
    together = matmul_s(entry, _best(entry), *np.array(shapes).T)
    apart = [matmul_s(entry, _best(entry), *shape) for shape in shapes]
    np.testing.assert_allclose(together, np.array(apart), rtol=1e-12)


def test_sizes_broadcast_and_keep_their_shape():
    assert matmul_s(H100, "bf16", 128, 256, 512).shape == ()
    assert matmul_s(H100, "bf16", np.array([128]), 256, 512).shape == (1,)
    m, n = np.array([[128], [256], [512]]), np.array([1024, 2048])
    assert matmul_s(H100, "bf16", m, n, 512).shape == (3, 2)
    assert attention_s(H100, "bf16", "flash", m, 8, n, n, 128, 0.5).shape == (3, 2)
    assert attention_s(H100, "bf16", "unfused", m, 8, n, n, 128, 0.5).shape == (3, 2)
    assert memory_s(H100, m * n).shape == (3, 2)


# Arithmetic


def test_a_precision_that_was_not_measured_takes_the_nearest_that_was():
    assert matmul_s(H100, "fp16", 4096, 4096, 4096) == matmul_s(H100, "bf16", 4096, 4096, 4096)
    # On an A100 fp32 has a sixteenth of bf16's peak, and is not tf32 unless one asks for that.
    bf16, tf32, fp32 = (matmul_s(A100, name, 8192, 8192, 8192) for name in ("bf16", "tf32", "fp32"))
    assert 1.7 < tf32 / bf16 < 2.3
    assert 13 < fp32 / bf16 < 18
    # A product that only waits for its start takes no longer in a slower arithmetic.
    assert matmul_s(A100, "fp32", 16, 64, 64) < 1.2 * matmul_s(A100, "bf16", 16, 64, 64)


def test_fp8_is_faster_than_bf16_where_products_are_large():
    ratio = matmul_s(H100, "bf16", 8192, 8192, 8192) / matmul_s(H100, "fp8", 8192, 8192, 8192)
    assert 1.4 < ratio < 2.0
    # A relative's curve serves too, by its own peak.
    pcie = matmul_s(device("H100-PCIe"), "fp8", 8192, 8192, 8192)
    assert pcie / matmul_s(H100, "fp8", 8192, 8192, 8192) == pytest.approx(1978.9 / 1513, rel=1e-6)


def test_a_slower_arithmetic_of_a_borrowed_curve_is_scaled_like_it():
    # Of MI300X's fp32 peak, products reach what they reach of its bf16 peak.
    shares = [
        2 * 8192**3 / matmul_s(device("MI300X"), name, 8192, 8192, 8192)
        / peak_flops(device("MI300X"), name)
        for name in ("fp32", "bf16")
    ]  # fmt: skip
    assert 0.4 < shares[1] <= shares[0] < 0.6


def test_tf32_is_fp32_on_a_device_without_it():
    assert peak_flops(device("V100"), "tf32") == peak_flops(device("V100"), "fp32")


# Attention


@pytest.mark.parametrize(
    ("entry", "backend", "seq_len", "low", "high"),
    [
        (A100, "flash", 1024, 0.28, 0.45),
        (A100, "flash", 8192, 0.55, 0.68),
        (H100, "flash", 8192, 0.30, 0.40),
        (H100, "flash3", 1024, 0.22, 0.42),
        (H100, "flash3", 8192, 0.52, 0.66),
        (B200, "flash3", 8192, 0.42, 0.60),
    ],
)
def test_fused_attention_reaches_the_published_shares(entry, backend, seq_len, low, high):
    seconds = attention_s(entry, "bf16", backend, 4, 32, seq_len, seq_len, 128, 0.5)
    share = 2 * 4 * 32 * seq_len**2 * 128 / seconds / peak_flops(entry, "bf16")
    assert low < share < high


def test_backward_attention_does_more_work_at_a_lower_rate():
    shape = (4, 32, 4096, 4096, 128, 0.5)
    forward = attention_s(A100, "bf16", "flash", *shape)
    assert 2.5 < attention_s(A100, "bf16", "flash", *shape, backward=True) / forward < 4


@pytest.mark.parametrize("entry", [A100, H100, B200])
@pytest.mark.parametrize("backward", [False, True])
def test_scores_in_memory_cost_more_than_fused_ones(entry, backward):
    shape = (2, 16, 4096, 4096, 128, 0.5)
    fused = attention_s(entry, "bf16", "flash3", *shape, backward)
    assert attention_s(entry, "bf16", "unfused", *shape, backward) > 2 * fused


def test_a_mask_saves_fused_attention_its_share_and_unfused_nothing():
    for backend, low, high in (("flash", 0.4, 0.75), ("unfused", 1, 1)):
        causal, whole = (
            attention_s(H100, "bf16", backend, 8, 32, 8192, 8192, 128, visible)
            for visible in (0.5, 1.0)
        )
        assert low <= causal / whole <= high


def test_a_window_is_read_at_the_length_that_it_shows():
    # 16,384 queries that each see 1,024 keys: the rate of causal sequences of 2,048.
    windows = attention_s(H100, "bf16", "flash3", 8, 64, 16384, 16384, 128, 1024 / 16384)
    causal = attention_s(H100, "bf16", "flash3", 64, 64, 2048, 2048, 128, 0.5)
    assert windows == pytest.approx(causal, rel=0.02)


def test_measured_scores_in_memory_gain_nothing_by_a_mask():
    attention = {"unfused": CPU.curves.attention["flash"]}
    entry = _own(curves=CPU.curves.model_copy(update={"attention": attention}))
    causal, whole = (
        attention_s(entry, "fp32", "unfused", 1, 1, 128, 128, 64, visible) for visible in (0.5, 1)
    )
    assert causal == whole == pytest.approx(2 * 128 * 128 * 64 / 20e9)


def test_attention_of_an_arithmetic_measured_by_itself_has_its_own_curve():
    slower = CPU.curves.attention["flash"].model_copy(update={"forward": (0.05,)})
    attention = CPU.curves.attention | {"flash.bf16": slower}
    entry = _own(
        curves=CPU.curves.model_copy(update={"attention": attention}),
        peak_flops={"fp32": _figure(100e9), "bf16": _figure(200e9)},
    )
    shape = (1, 1, 128, 128, 64, 0.5)
    in_fp32, in_bf16 = (attention_s(entry, name, "flash", *shape) for name in ("fp32", "bf16"))
    assert in_fp32 == pytest.approx(2 * 128 * 128 * 64 / 20e9)
    assert in_bf16 == pytest.approx(2 * 128 * 128 * 64 / 10e9)


def test_few_heads_wait_for_the_longest_block():
    assert wave_quantization(np.array(1e9), 132) == pytest.approx(1)
    assert wave_quantization(np.array(1), 132) == pytest.approx(264, rel=1e-3)
    one, many = (
        attention_s(H100, "bf16", "flash3", 1, heads, 2048, 2048, 128, 0.5) for heads in (1, 64)
    )
    assert 1 <= many / one < 8  # of 64 times the work


def test_eight_bit_training_attends_in_sixteen():
    shape = ("flash", 2, 16, 4096, 4096, 128, 0.5)
    assert attention_s(H100, "fp8", *shape) == attention_s(H100, "bf16", *shape)


def test_flash3_is_flash_where_there_is_only_one():
    shape = (2, 16, 4096, 4096, 128, 0.5)
    assert attention_s(A100, "bf16", "flash3", *shape) == attention_s(A100, "bf16", "flash", *shape)


def test_the_first_flash_attention_takes_twice_as_long():
    """As arXiv:2307.08691 has it, which says 25 to 40 % of A100's peak for both passes together."""
    shape = (8, 16, 4096, 4096, 128, 0.5)
    seconds = {
        backend: sum(attention_s(A100, "bf16", backend, *shape, backward) for backward in (0, 1))
        for backend in ("flash1", "flash")
    }
    assert seconds["flash1"] / seconds["flash"] == pytest.approx(2, rel=0.01)
    flops = 3.5 * 2 * 8 * 16 * 4096**2 * 128
    assert 0.2 < flops / seconds["flash1"] / peak_flops(A100, "bf16") < 0.4


def test_a_measured_first_flash_attention_is_taken_as_it_is():
    attention = CPU.curves.attention | {"flash1": CPU.curves.attention["flash"]}
    entry = _own(curves=CPU.curves.model_copy(update={"attention": attention}))
    one, two = (
        attention_s(entry, "fp32", backend, 1, 1, 128, 128, 64, 0.5)
        for backend in ("flash1", "flash")
    )
    assert one == two


@given(
    ADAPTIVE, st.sampled_from(["flash1", "flash", "flash3", "unfused"]), st.booleans(),
    st.integers(1, 64), st.integers(1, 128), st.integers(1, 65536), st.integers(0, 4),
)  # fmt: skip
def test_more_attention_never_takes_less_time(name, backend, backward, batch, heads, length, more):
    shape = [batch, heads, length, length, 128]
    smaller = attention_s(device(name), "bf16", backend, *shape, 0.5, backward)
    larger = [size + 1 if more in (i, 4) else size for i, size in enumerate(shape)]
    assert attention_s(device(name), "bf16", backend, *larger, 0.5, backward) >= smaller * 0.999


def test_measured_attention_counts_what_is_seen():
    seconds = attention_s(CPU, "fp32", "flash", 1, 1, 128, 128, 64, 0.5)
    assert seconds == pytest.approx(2 * 128 * 128 * 64 / 20e9)
    backward = attention_s(CPU, "fp32", "flash", 1, 1, 128, 128, 64, 0.5, backward=True)
    assert backward == pytest.approx(2.5 * 2 * 128 * 128 * 64 / 10e9)


def test_fused_attention_that_was_not_measured_costs_its_visible_products():
    bare = _own(curves=CPU.curves.model_copy(update={"attention": {}}))
    products = 2 * matmul_s(CPU, "fp32", 8 * 1000, 1000, 1000)
    assert attention_s(bare, "fp32", "flash", 2, 4, 1000, 1000, 1000, 0.5) == pytest.approx(
        products / 2
    )


# Memory


def test_a_kernel_of_bytes():
    assert memory_s(A100, 0) == KERNEL_S
    assert memory_s(A100, 2.039e12) == pytest.approx(1 / 0.8, rel=1e-4)
    # Measured: between the points by logarithms, below them their time, above them their rate.
    assert memory_s(CPU, 1e3) == pytest.approx(1e-6)
    assert memory_s(CPU, np.sqrt(1e9)) == pytest.approx(1e-5)
    assert memory_s(CPU, 1) == pytest.approx(1e-6)
    assert memory_s(CPU, 1e8) == pytest.approx(1e-2)


# Origins and what is not known


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_rate_says_where_it_is_from(name):
    for sentence in origins(CATALOGUE[name]).values():
        assert sentence.startswith(("measured", "cited", "assumed", "forward measured"))


def test_a_borrowed_curve_is_named_as_assumed():
    assert origins(A100)["matmul.bf16"].startswith("measured: tables of a100_sxm/gemm/")
    assert origins(device("V100"))["matmul.bf16"].startswith("assumed: 1 x the shares of A100-80")
    assert origins(CPU)["matmul.fp32"] == "measured here"


def test_what_is_not_known_is_one_sentence_that_says_what_to_do():
    with pytest.raises(InputError, match=r"the fp16 peak of TPUv5p is not known: measure it with"):
        matmul_s(device("TPUv5p"), "fp16", 1, 1, 1)
    with pytest.raises(InputError, match=r"give cluster\.device\.peak_flops\.fp64"):
        matmul_s(CPU, "fp64", 1, 1, 1)
    unmeasured = _own(name="Nova", curves=None)
    with pytest.raises(InputError, match="nothing is known of how fast Nova really is"):
        matmul_s(unmeasured, "fp32", 1, 1, 1)
    with pytest.raises(InputError, match="the memory bandwidth of Nova is not known"):
        memory_s(unmeasured, 1)


def test_equal_devices_that_are_not_the_same_have_equal_rates():
    for first, second in itertools.pairwise([A100, A100.model_copy(), A100.replace()]):
        assert matmul_s(first, "bf16", 640, 640, 640) == matmul_s(second, "bf16", 640, 640, 640)
