"""The catalogue of devices (pure)."""

import pytest

from paceline.config.errors import InputError
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
    figures += [entry.power_watts] if entry.power_watts else []
    assert all(figure.origin == "cited" and len(figure.source) > 8 for figure in figures)
    assert 14e9 <= entry.memory_bytes.value <= 310e9
    assert {"fp32"} <= set(entry.precisions) <= {"fp64", "fp32", "bf16", "fp16", "fp8"}
    # Each halving of the width at least keeps the rate; sparse figures would break the ratio of 2.
    peaks = {key: figure.value for key, figure in entry.peak_flops.items()}
    assert peaks.get("fp16", 1) >= peaks.get("fp32", 1)
    assert peaks.get("tf32", 1) <= peaks.get("bf16", peaks.get("fp16", 1))
    if "fp8" in peaks and name != "Gaudi3":  # whose engines run both at one rate
        assert peaks["fp8"] / peaks["bf16"] == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize("name", [name for name, at in CATALOGUE.items() if at.kind == "cuda"])
def test_a_gpu_draws_and_moves_what_gpus_do(name):
    entry = CATALOGUE[name]
    assert 0.3e12 <= entry.memory_bytes_per_s.value <= 10e12
    assert 70 <= entry.power_watts.value <= 1400
    # A wrong power of ten in any of the three would show.
    best = max(figure.value for figure in entry.peak_flops.values())
    assert 30e9 <= best / entry.power_watts.value <= 15e12
    assert 20 <= best / entry.memory_bytes_per_s.value <= 2000


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
    assert CATALOGUE["CS-3"].peak_flops == {}
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
    text = to_toml(job.replace(cluster=Cluster(device=odd)))
    assert "[cluster.device.memory_bytes]" in text


def test_a_wrong_figure_inside_a_device_is_named_itself():
    raw = {"name": "mine", "kind": "cpux"}
    with pytest.raises(InputError, match=r"^device\.kind = 'cpux' can't be used"):
        Cluster.parse({"device": raw})
    with pytest.raises(InputError) as refused:
        Cluster.parse({"num_nodes": {"a": "b" * 5000}})
    assert str(refused.value).startswith("num_nodes = {'a': 'bbb")
    assert len(str(refused.value)) < 400
