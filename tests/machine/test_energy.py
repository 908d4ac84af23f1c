"""Counters of energy: made-up folders of powercap, and NVML where nothing of it is installed."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from paceline.machine.energy import POWERCAP, EnergyMeter


def zone(powercap: Path, name: str, what: str, uj: int, most: int = 1_000_000_000) -> Path:
    """A zone as the kernel shows it; returns its counter."""
    folder = powercap / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{what}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    (folder / "energy_uj").write_text(f"{uj}\n")
    return folder / "energy_uj"


def test_packages_and_memory_count_and_what_is_in_them_does_not(tmp_path):
    counters = [
        zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000),
        zone(tmp_path, "intel-rapl:1", "package-1", 7_000_000),
        zone(tmp_path, "intel-rapl:0:1", "dram", 1_000_000),
        zone(tmp_path, "intel-rapl:0:0", "core", 4_000_000),
        zone(tmp_path, "intel-rapl:2", "psys", 9_000_000),
        zone(tmp_path, "intel-rapl-mmio:0", "package-0", 5_000_000),
    ]
    meter = EnergyMeter(0, tmp_path)
    assert meter.read().host_j == 0
    for counter in counters:
        counter.write_text(f"{int(counter.read_text()) + 2_000_000}\n")
    spent = meter.read()
    assert spent.host_j == pytest.approx(6)
    assert (spent.devices_j, spent.missing) == (None, ())


def test_a_counter_that_begins_at_0_again_goes_on(tmp_path):
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 99_000_000, most=100_000_000)
    meter = EnergyMeter(0, tmp_path)
    counter.write_text("3000000")
    assert meter.read().host_j == pytest.approx(4)
    counter.write_text("5000000")
    assert meter.read().host_j == pytest.approx(6)
    counter.write_text("1000000")
    assert meter.read().host_j == pytest.approx(102)


def test_a_counter_that_goes_away_stays_where_it_was(tmp_path):
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = EnergyMeter(0, tmp_path)
    counter.write_text("3000000")
    assert meter.read().host_j == pytest.approx(3)
    counter.unlink()
    assert meter.read().host_j == pytest.approx(3)
    counter.write_text("rubbish")
    assert meter.read().host_j == pytest.approx(3)
    counter.write_text("4000000")
    assert meter.read().host_j == pytest.approx(4)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read what nobody else may")
def test_what_only_root_may_read_is_a_sentence(tmp_path):
    zone(tmp_path, "intel-rapl:0", "package-0", 0).chmod(0)
    meter = EnergyMeter(0, tmp_path)
    assert not meter.counts
    assert "Permission denied" in meter.read().missing[0]


def test_what_can_not_be_read_is_a_sentence_and_the_others_count(tmp_path):
    zone(tmp_path, "intel-rapl:0", "package-0", 0).unlink()
    (tmp_path / "intel-rapl:0" / "energy_uj").mkdir()
    zone(tmp_path, "intel-rapl:1", "package-1", 0).write_text("many")
    other = zone(tmp_path, "intel-rapl:2", "package-2", 0)
    meter = EnergyMeter(0, tmp_path)
    other.write_text("1000000")
    spent = meter.read()
    assert spent.host_j == pytest.approx(1)
    assert spent.missing == (
        f"intel-rapl:0 of {tmp_path} can't be read (Is a directory)",
        f"intel-rapl:1 of {tmp_path} can't be read (it holds no number)",
    )


def test_where_nothing_is_counted_it_says_so(tmp_path):
    meter = EnergyMeter(0, tmp_path)
    assert not meter.counts
    spent = meter.read()
    assert (spent.devices_j, spent.host_j) == (None, None)
    assert spent.missing == (f"processors count no energy here ({tmp_path} has no intel-rapl)",)


def test_devices_without_nvml_are_a_sentence(tmp_path):
    if importlib.util.find_spec("pynvml") is not None and Path("/dev/nvidiactl").exists():
        pytest.skip("NVML is here")
    meter = EnergyMeter(2, tmp_path)
    spent = meter.read()
    assert spent.devices_j is None
    assert any("paceline[energy]" in one or "2 devices count" in one for one in spent.missing)


class Nvml:
    """Stands for pynvml with four devices, by its documentation: no device is needed for which of
    them are asked."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.mj = [10**6, 2 * 10**6, 3 * 10**6, 4 * 10**6]

    def nvmlInit(self) -> None:  # noqa: N802 - as NVML calls it
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if not uuid.startswith("GPU-"):
            raise self.NVMLError("Not Found")
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetTotalEnergyConsumption(self, device: int) -> int:  # noqa: N802
        return self.mj[device]


@pytest.mark.parametrize(
    ("visible", "num_devices", "joules", "missing"),
    [
        (None, 2, 1 + 2, ""),
        ("3,1", 2, 4 + 2, ""),
        ("3,1", 1, 4, ""),
        ("GPU-2, 0", 2, 3 + 1, ""),
        ("1", 2, 2, "1 devices are hidden"),
        ("0,MIG-7", 2, 1, "1 devices count no energy (NVML: Not Found)"),
    ],
)
def test_the_devices_that_a_node_trains_on_are_asked(
    visible, num_devices, joules, missing, tmp_path, monkeypatch
):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    meter = EnergyMeter(num_devices, tmp_path)
    for at in range(4):
        nvml.mj[at] += (at + 1) * 1000
    spent = meter.read()
    assert spent.devices_j == pytest.approx(joules)
    assert missing in " ".join(spent.missing)
    nvml.mj = [0, 0, 0, 0]  # its driver began anew
    assert meter.read().devices_j == pytest.approx(joules)


def test_devices_of_this_machine_count(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("pynvml", reason="no nvidia-ml-py (paceline[energy])")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA device")
    meter = EnergyMeter(1, tmp_path)
    x = torch.randn(8192, 8192, device="cuda")
    for _ in range(200):
        x = (x @ x).tanh()
    torch.cuda.synchronize()
    spent = meter.read()
    assert spent.devices_j is not None
    assert spent.devices_j > 0


def test_this_host_is_read_or_says_why():
    spent = EnergyMeter(0, POWERCAP).read()
    assert (spent.host_j is not None) or spent.missing
