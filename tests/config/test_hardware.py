"""The catalogue of devices (pure)."""

import pytest

from paceline.config.hardware import CATALOGUE, Cluster, device, recognise
from paceline.config.job import read_job, to_toml

WANTED = {
    "A100-40", "A100-80", "H100-SXM", "H100-PCIe", "H200", "B200", "GB200", "MI300X", "L40S",
    "RTX-4090", "V100", "T4",
}  # fmt: skip


def test_the_catalogue_has_the_devices_people_train_on():
    assert set(CATALOGUE) >= WANTED


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_figure_has_a_source_and_a_sane_size(name):
    entry = CATALOGUE[name]
    figures = [entry.memory_bytes, entry.memory_bytes_per_s, *entry.peak_flops.values()]
    assert all(figure.origin == "cited" and len(figure.source) > 8 for figure in figures)
    assert 16e9 <= entry.memory_bytes.value <= 300e9
    assert 0.3e12 <= entry.memory_bytes_per_s.value <= 10e12
    # Each halving of the width at least keeps the rate; sparse figures would break the ratio of 2.
    peaks = entry.peak_flops
    assert peaks["fp16"].value >= peaks["fp32"].value
    if "fp8" in peaks:
        assert peaks["fp8"].value / peaks["bf16"].value == pytest.approx(2, rel=0.03)


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
    text = to_toml(job.replace(cluster=Cluster(device=odd)))
    assert "[cluster.device.memory_bytes]" in text
