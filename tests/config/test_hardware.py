"""The catalogue of devices (pure)."""

import pytest

from paceline.config.errors import InputError
from paceline.config.hardware import CATALOGUE, ClusterSpec, device, recognise
from paceline.config.job import read_job, to_raw, to_toml
from paceline.config.stack import Stack

# Of the makers' data sheets, typed in a second time: dense 16-bit TFLOP/s, GB/s, W.
DATA_SHEETS = {
    "A100-40": (312, 1555, 400),
    "A100-80": (312, 2039, 400),
    "A30": (165, 933, 165),
    "A40": (149.7, 696, 300),
    "A6000": (154.8, 768, 300),
    "B200": (2250, 8000, 1000),
    "GB200": (2500, 8000, 1200),
    "H100-PCIe": (756, 2000, 350),
    "H100-SXM": (989, 3350, 700),
    "H20": (148, 4000, 400),
    "H200": (989, 4800, 700),
    "L4": (121, 300, 72),
    "L40S": (362, 864, 350),
    "MI250X-GCD": (191.5, 1638, 280),
    "MI300X": (1307, 5300, 750),
    "MI325X": (1307, 6000, 1000),
    "MI355X": (2517, 8000, 1400),
    "P100": (21.2, 732, 300),
    "RTX-3090": (71, 936, 350),
    "RTX-4090": (165, 1008, 450),
    "T4": (65, 320, 70),
    "V100": (125, 900, 300),
}


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_figure_has_a_source_and_a_sane_size(name):
    entry = CATALOGUE[name]
    figures = [entry.memory_bytes, entry.memory_bytes_per_s, *entry.peak_flops.values()]
    figures += [entry.power_watts] if entry.power_watts else []
    if name == "CS-3":  # whose dense peak nobody publishes
        assert {figure.origin for figure in entry.peak_flops.values()} == {"assumed"}
        figures = [entry.memory_bytes, entry.memory_bytes_per_s, entry.streamed_bytes_per_s]
    assert all(figure.origin == "cited" and len(figure.source) > 8 for figure in figures)
    assert 14e9 <= entry.memory_bytes.value <= 310e9
    assert {"fp32"} <= set(entry.precisions) <= {"fp64", "fp32", "bf16", "fp16", "fp8"}
    # Each halving of the width at least keeps the rate; sparse figures would break the ratio of 2.
    peaks = {key: figure.value for key, figure in entry.peak_flops.items()}
    assert peaks.get("fp16", 1) >= peaks.get("fp32", 1)
    assert peaks.get("tf32", 1) <= peaks.get("bf16", peaks.get("fp16", 1))
    if "fp8" in peaks and name != "Gaudi3":  # whose engines run both at one rate
        assert peaks["fp8"] / peaks["bf16"] == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_figures_are_those_of_the_data_sheets(name):
    """A sparse rate, a link counted both ways or a wrong power of ten would show."""
    tflops, gb_per_s, watts = DATA_SHEETS[name]
    entry = CATALOGUE[name]
    peak = entry.peak_flops.get("bf16") or entry.peak_flops["fp16"]
    assert peak.value == pytest.approx(tflops * 1e12, rel=0.01)
    # Some boards run their memory a little slower than the sheet of the chip says.
    assert entry.memory_bytes_per_s.value == pytest.approx(gb_per_s * 1e9, rel=0.04)
    assert entry.power_watts.value == watts


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        # As torch's out-of-memory messages have it: "GPU 0 has a total capacity of 79.11 GiB".
        ("H100-SXM", 79.1),
        ("A100-80", 79.1),
        ("A100-40", 39.4),
        ("H200", 139.8),
        ("B200", 178.4),
        ("V100", 31.7),
        ("L40S", 44.4),
        ("MI300X", 191.7),
    ],
)
def test_memory_is_what_a_program_finds(name, gib):
    assert CATALOGUE[name].memory_bytes.value / 2**30 == pytest.approx(gib, abs=0.1)


def test_nothing_is_invented_where_a_vendor_publishes_nothing():
    assert "no dense peak is published" in CATALOGUE["CS-3"].peak("bf16").source
    assert CATALOGUE["TPUv5p"].power_watts is None
    assert CATALOGUE["TPUv5p"].peak("fp32") is None


@pytest.mark.parametrize(
    ("reported", "short"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H200", "H200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Tesla T4", "T4"),
    ],
)
def test_drivers_names_are_recognised(reported, short):
    assert recognise(reported) == CATALOGUE[short]


@pytest.mark.parametrize(
    "reported", ["NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GeForce RTX 4090 D", "NVIDIA A10"]
)
def test_other_parts_are_unknown_and_never_get_anothers_numbers(reported):
    assert recognise(reported) is None


def test_a_known_device_is_written_by_name_and_an_unknown_one_in_full():
    job = read_job(None, ["cluster.device=H200"])
    assert 'device = "H200"' in to_toml(job)
    odd = device("H200").model_copy(update={"name": "H200-cut"})
    text = to_toml(job.replace(cluster=ClusterSpec(device=odd)))
    assert "[cluster.device.memory_bytes]" in text


def test_a_wrong_figure_inside_a_device_is_named_itself():
    raw = {"name": "mine", "kind": "cpux"}
    with pytest.raises(InputError, match=r"^device\.kind = 'cpux' can't be used"):
        ClusterSpec.parse({"device": raw})
    with pytest.raises(InputError) as refused:
        ClusterSpec.parse({"num_nodes": {"a": "b" * 5000}})
    assert str(refused.value).startswith("num_nodes = {'a': 'bbb")
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("stack", "stated"),
    [
        (Stack(constants={"launch_us": 3.0}, origin="fitted to 6 steps"), {}),
        (Stack(overlaps_ep=True, remakes=("mlp",)), {"overlaps_ep": True, "remakes": ["mlp"]}),
    ],
)
def test_a_cluster_states_of_a_runtime_what_was_measured_and_what_is_not_ours(stack, stated):
    raw = to_raw(ClusterSpec(stack=stack))
    assert raw["stack"] == {**stated, "constants": dict(stack.constants), "origin": stack.origin}
    assert ClusterSpec.parse(raw).stack == stack
    # Files of before state every feature.
    assert ClusterSpec.parse({"stack": {**dict(stack), **stated}}).stack == stack
