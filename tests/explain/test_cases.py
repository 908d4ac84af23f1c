"""What holds for all rules: each speaks of its case and is silent of its near twins. Pure."""

from pathlib import Path

import pytest

from paceline.explain.rules import RULES
from tests.explain.cases import CASES, TURING, V100, wide

TWINS = [(name, what) for name, case in CASES.items() for what in case.silent]


def test_every_rule_has_a_case_and_twins_of_which_it_is_silent() -> None:
    assert set(CASES) == set(RULES)
    assert all(case.silent for case in CASES.values())


@pytest.mark.parametrize("name", CASES)
def test_a_rule_speaks_of_its_case(name: str, tmp_path: Path) -> None:
    found = RULES[name](CASES[name].speaks(tmp_path))
    assert found is not None
    assert found.name == name
    assert found.evidence


@pytest.mark.parametrize(("name", "what"), TWINS)
def test_a_rule_is_silent_where_its_cause_isn_t(name: str, what: str, tmp_path: Path) -> None:
    assert RULES[name](CASES[name].silent[what](tmp_path)) is None


@pytest.mark.parametrize("device", [V100, TURING])
def test_devices_without_bf16_are_not_told_to_use_it(device: object, tmp_path: Path) -> None:
    found = RULES["fp32"](wide("volta_sgemm_128x64_nn", device)(tmp_path))  # type: ignore[arg-type]
    assert found is not None
    assert "float16" in found.advice
    assert "bfloat16" not in found.advice


@pytest.mark.parametrize(
    "name",
    [
        "volta_sgemm_128x64_nn",
        "maxwell_scudnn_winograd_128x128_ldg1_ldg4_tile148n_nt_v1",
        "volta_scudnn_128x64_relu_interior_nn_v1",
        "void cudnn::detail::dgrad_engine<float, 128, 6, 7, 3, 3, 5, false>(int, int)",
        "void cudnn::detail::wgrad_alg0_engine<float, 512, 6, 5, 3, 3, 3, false, 512>(int)",
        "void cudnn::cnn::conv2d_grouped_direct_kernel<float, float, float, true>()",
        "void gemmSN_NN_kernel<float, 256, 4, 2, 8, 4, 4, false>()",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128>()",
        "Cijk_Ailk_Bljk_SB_MT128x64x8_SE_K1",
        "Cijk_Ailk_Bljk_S_B_Bias_HAS_SAV_UserArgs_MT128x128x16",
        "miopenSp3AsmConv_v30_3_1_gfx94x_fp32_f2x3_stride1",
    ],
)
def test_kernels_of_fp32_are_known_by_their_names(name: str, tmp_path: Path) -> None:
    assert RULES["fp32"](wide(name, V100)(tmp_path)) is not None


@pytest.mark.parametrize(
    "name",
    [
        "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn",
        "void cudnn::detail::dgrad_engine<__half, 512, 6, 5, 3, 3, 3, false>(int)",
        "Cijk_Ailk_Bljk_HHS_BH_Bias_HAS_SAV_UserArgs_MT128x128x16",
        "Cijk_Alik_Bljk_BBS_BH_Bias_UserArgs_MT256x256x64",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT32x32x256_MI16x16x1_SN_LDSB1_AFC1",
        "volta_fp16_scudnn_fp16_128x64_relu_interior_nn_v1",
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
    ],
)
def test_kernels_of_16_bits_are_not(name: str, tmp_path: Path) -> None:
    assert RULES["fp32"](wide(name, V100)(tmp_path)) is None


def test_high_confidence_takes_a_measured_gain_and_two_sources(tmp_path: Path) -> None:
    for name, case in CASES.items():
        found = RULES[name](case.speaks(tmp_path))
        assert found is not None
        if found.confidence == "high":
            assert found.basis == "measured", name
            assert len({each.source for each in found.evidence}) >= 2, name
