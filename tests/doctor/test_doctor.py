"""Doctor: recorded texts of machines are understood and judged (pure), this machine, the command.

`recorded/` was written by hand after the documented formats: a host of four H100 in good order, of
which each fault is one replaced piece of text, and a host with AMD's devices.
"""

import json
import runpy
from pathlib import Path

import pytest

from paceline.config.errors import InputError
from paceline.doctor import readings, storage
from paceline.doctor.checks import GROUPS, examine
from paceline.doctor.checks.nccl import HURTS
from paceline.doctor.facts import MachineFacts, as_data, facts_of
from paceline.doctor.infiniband import Port, ask
from paceline.doctor.software import version
from tests.command_line import paceline

RECORDED = Path(__file__).parent / "recorded"
DOCS = Path(__file__).parents[2] / "docs"
GOOD = readings.saved(RECORDED / "hgx_h100")
NAMES = {check.name for checks in GROUPS.values() for check in checks}

XML, LOG, TOPO, IB = "nvidia-smi.xml", "nccl.log", "nvidia-smi-topo.txt", "ibstat.txt"
HOST, SOFT = "system.json", "software.json"
NVLINK, DISK = "nvidia-smi-nvlink.txt", "storage.json"
HOT = ("hw_thermal_slowdown>Not Active", "hw_thermal_slowdown>Active")
# check, verdict, text, what stands there, what stands there instead (once, or "all")
FAULTS = [
    ("devices", "problem", XML, GOOD[XML], "NVIDIA-SMI has failed because it couldn't communicate"),
    ("devices", "problem", HOST, '"nvidia": 4', '"nvidia": 8'),
    ("torch-build", "problem", SOFT, '"cuda": "12.8"', '"cuda": null'),
    ("torch-build", "problem", SOFT, '"num_devices": 4', '"num_devices": 3'),
    ("devices-alike", "warning", XML, "H100 80GB HBM3", "H100 PCIe"),
    ("ecc", "problem", XML, "<dram_uncorrectable>0", "<dram_uncorrectable>2"),
    ("ecc", "problem", XML, "failure>No", "failure>Yes"),
    ("ecc", "warning", XML, "row_pending>No", "row_pending>Yes"),
    ("ecc", "warning", XML, "<current_ecc>Enabled", "<current_ecc>Disabled"),
    ("clock-throttling", "problem", XML, *HOT),
    ("clock-throttling", "warning", XML, "sw_power_cap>Not Active", "sw_power_cap>Active"),
    ("clock-throttling", "warning", XML, "hw_power_brake>0 us", "hw_power_brake>91000000 us"),
    ("clocks", "warning", XML, "applications_clocks_setting>Not", "applications_clocks_setting>"),
    ("clocks", "warning", XML, "<sm_clock>1980", "<sm_clock>1410"),
    ("power-limit", "warning", XML, "<current_power_limit>700", "<current_power_limit>500"),
    ("persistence", "warning", XML, "<persistence_mode>Enabled", "<persistence_mode>Disabled"),
    ("slices", "warning", XML, "<current_mig>Disabled", "<current_mig>Enabled"),
    ("devices-free", "warning", XML, "<used>4 MiB", "<used>40960 MiB"),
    ("pcie", "problem", XML, "<current_link_width>16x", "<current_link_width>8x"),
    ("pcie", "warning", XML, "<max_link_gen>5", "<max_link_gen>4"),
    ("nvlink", "problem", NVLINK, "Link 3: 26.562 GB/s", "Link 3: <inactive>"),
    ("nvlink", "problem", XML, "<state>Completed", "<state>In Progress"),
    ("device-links", "problem", TOPO, "NV18", "PHB"),
    ("ports", "problem", IB, "State: Active", "State: Initializing"),
    ("ports", "warning", IB, "State: Active\n\t\tPhysical state: LinkUp",
     "State: Down\n\t\tPhysical state: Polling"),
    ("port-rates", "problem", IB, "Rate: 400", "Rate: 100"),
    ("near-cards", "warning", TOPO, "PXB\tSYS\t0-47", "SYS\tSYS\t0-47"),
    ("iommu", "warning", "cmdline.txt", "iommu=pt", "quiet"),
    ("nccl-network", "problem", LOG, "[send] via NET/IB/0/GDRDMA", "[send] via NET/Socket/0"),
    ("nccl-peers", "problem", LOG, "via P2P/CUMEM", "via SHM/direct/direct"),
    ("nccl-gdr", "problem", LOG, "NET/IB/0/GDRDMA", "NET/IB/0"),
    ("nvls", "warning", LOG, "all:support is available", "support is not available"),
    ("nccl-log", "problem", LOG, "NCCL version", "NCCL version 2.21.5+cuda12.4\nNCCL version"),
    ("nccl-log", "warning", LOG, "NCCL INFO Connected", "NCCL WARN Cuda failure 'peer access'\n"),
    ("nccl-choice", "warning", LOG, "proto SIMPLE", "proto LL"),
    ("settings", "problem", LOG, "NCCL_DEBUG set by environment to INFO",
     "NCCL_IB_DISABLE set by environment to 1"),
    ("settings", "problem", HOST, '"OMP_NUM_THREADS": "6"', '"NCCL_P2P_DISABLE": "1"'),
    ("driver", "problem", XML, "570.86.15</driver_version>\n\t<cuda_version>12.8",
     "470.57.02</driver_version>\n\t<cuda_version>11.4"),
    ("architecture", "problem", SOFT, '"cuda": "12.8"', '"cuda": "11.7"'),
    ("versions", "problem", SOFT, '"fits": true', '"fits": false'),
    ("nccl-version", "warning", SOFT, '"nccl": "2.25.1"', '"nccl": "2.21.5"'),
    ("monitoring", "warning", SOFT, '"dcgmi",\n  "node_exporter"', ""),
    ("cores", "warning", HOST, '"OMP_NUM_THREADS": "6"', '"OMP_NUM_THREADS": "12"'),
    ("cores", "warning", HOST, '"cores": 24', '"cores": 8'),
    ("cpu-quota", "warning", "cpu.max", "max", "850000"),
    ("numa-binding", "warning", HOST, '"cores": 24', '"cores": 96'),
    ("governor", "warning", "governor.txt", "performance", "powersave"),
    ("shared-memory", "problem", HOST, '"shm_bytes": 579820584960', '"shm_bytes": 67108864'),
    ("locked-memory", "problem", "limits.txt", "locked memory         unlimited",
     "locked memory         8388608  "),
    ("open-files", "warning", "limits.txt", "files            65536", "files            1024 "),
    ("processes", "warning", "limits.txt", "sses             96365", "sses             99   "),
    ("memory", "warning", "meminfo.txt", "SwapTotal:       8388604", "SwapTotal:       88388604"),
    ("memory", "warning", "meminfo.txt", "HugePages_Free:        0", "HugePages_Free:   100000"),
    ("huge-pages", "warning", "huge-pages.txt", "[madvise] never", "madvise [never]"),
    ("clock", "warning", "timedatectl.txt", "NTPSynchronized=yes", "NTPSynchronized=no"),
    ("disk-space", "warning", DISK, '"free_bytes": 3000000000000', '"free_bytes": 3000000000'),
    ("storage-speed", "warning", DISK, "2100000000.0", "120000000.0"),
    ("storage-speed", "problem", DISK, "2100000000.0", "20000000.0"),
]  # fmt: skip


def with_fault(text: str, old: str, new: str) -> MachineFacts:
    number = -1 if old.startswith("all:") else 1
    old = old.removeprefix("all:")
    assert old in GOOD[text]
    return facts_of({**GOOD, text: GOOD[text].replace(old, new, number)})


def test_a_machine_in_good_order_is_in_good_order():
    verdicts = examine(facts_of(GOOD))
    assert {name: v.seen for name, v in verdicts.items() if v.status != "ok"} == {}
    assert verdicts.keys() == NAMES


@pytest.mark.parametrize(("check", "status", "text", "old", "new"), FAULTS)
def test_a_fault_is_found_and_has_a_fix(check, status, text, old, new):
    verdict = examine(with_fault(text, old, new))[check]
    assert verdict.status == status, verdict.seen
    assert verdict.seen
    assert verdict.fix.endswith(".")


def test_every_check_was_seen_to_find_something():
    apart = {"gpudirect-rdma", "container"}  # the next test; and one that never judges
    assert NAMES - {check for check, *_ in FAULTS} == apart


def test_gpudirect_needs_a_module_or_a_log_that_shows_it():
    said = {**GOOD, "modules.txt": GOOD["modules.txt"].replace("nvidia_peermem 1", "other 1")}
    assert examine(facts_of(said))["gpudirect-rdma"].status == "ok"
    del said[LOG]
    assert examine(facts_of(said))["gpudirect-rdma"].status == "problem"
    opened = said["nvidia-version.txt"].replace("Kernel Module", "Open Kernel Module")
    assert (
        examine(facts_of({**said, "nvidia-version.txt": opened}))["gpudirect-rdma"].status == "ok"
    )


def test_a_newer_cuda_has_dropped_older_devices():
    said = {**GOOD, SOFT: GOOD[SOFT].replace('"12.8"', '"13.0"')}
    verdicts = examine(facts_of({**said, XML: said[XML].replace("Hopper", "Volta")}))
    assert "older" in verdicts["architecture"].fix
    assert "580.65 or newer" in verdicts["driver"].fix


def test_a_card_that_no_driver_sees_is_a_problem():
    said = {name: text for name, text in GOOD.items() if name != XML}
    assert examine(facts_of(said))["devices"].status == "not checked"
    blind = {**said, SOFT: GOOD[SOFT].replace('"num_devices": 4', '"num_devices": 0')}
    assert examine(facts_of(blind))["devices"].status == "problem"


def test_one_fault_raises_no_other_alarm():
    """A device that throttles is not also a broken cable."""
    verdicts = examine(with_fault(XML, *HOT))
    assert [name for name, v in verdicts.items() if v.status != "ok"] == ["clock-throttling"]


def test_what_is_seen_names_device_and_port():
    seen = {
        name: verdict.seen
        for name, verdict in examine(with_fault(IB, "Rate: 400", "Rate: 100")).items()
    }
    assert seen["port-rates"] == "mlx5_0:1 InfiniBand 100 Gbit/s beside 400 Gbit/s"
    text = GOOD[XML].replace("current_link_width>16x", "current_link_width>4x")
    last = text.rindex("current_link_width>4x</current")
    third = GOOD[XML][: GOOD[XML].rindex("current_link_width>16x")] + text[last:]
    assert "device 3 on 4 lanes" in examine(facts_of({**GOOD, XML: third}))["pcie"].seen


@pytest.mark.parametrize("left_out", sorted(GOOD))
def test_what_is_not_known_is_not_a_finding(left_out):
    said = {name: text for name, text in GOOD.items() if name != left_out}
    statuses = {v.status for v in examine(facts_of(said)).values()}
    assert statuses <= {"ok", "not checked"}


def test_without_anything_nothing_was_checked():
    assert {v.status for v in examine(facts_of({})).values()} == {"not checked"}


def test_amd_devices_are_understood():
    facts = facts_of(readings.saved(RECORDED / "mi300x"))
    assert [gpu.name for gpu in facts.gpus] == ["AMD Instinct MI300X OAM"] * 2
    assert facts.driver is not None
    assert (facts.driver.version, facts.amd_links) == ("6.10.5", {"XGMI"})
    assert facts.gpus[1].memory_bytes == 206141652992
    verdicts = examine(facts)
    assert verdicts["torch-build"].status == "ok"
    assert verdicts["driver"].status == "not checked"
    pcie = (RECORDED / "mi300x/rocm-smi.json").read_text().replace("XGMI", "PCIE")
    assert examine(facts_of({"rocm-smi.json": pcie}))["device-links"].status == "warning"


@pytest.mark.parametrize("name", sorted(HURTS))
def test_settings_that_hurt_are_named(name):
    hurts = HURTS[name][0]
    bad = next(value for value in ("1", "0", "Socket", "lo", "GROUP", "DETAIL") if hurts(value))
    facts = facts_of(
        {**GOOD, LOG: GOOD[LOG] + f"h:1:2 [0] NCCL INFO {name} set by environment to {bad}.\n"}
    )
    verdict = examine(facts)["settings"]
    if name.startswith("NCCL_"):
        assert f"{name}={bad}" in verdict.seen
        assert verdict.status == "problem"
    harmless = "64" if name == "NCCL_MAX_NCHANNELS" else {"1": "0", "0": "1"}.get(bad, "other")
    assert name in ("NCCL_ALGO", "NCCL_PROTO") or not hurts(harmless)


def test_ncclcs_log_in_the_words_of_several_versions():
    lines = """
n:1:2 [0] NCCL INFO Channel 00 : 0[1b000] -> 1[3d000] via P2P/IPC/read
n:1:2 [0] NCCL INFO Channel 01/0 : 1[1] -> 2[2] via P2P/direct pointer
n:1:2 [0] NCCL INFO Channel 02/0 : 7[7] -> 8[0] [send] via NET/IBext_v8/3/GDRDMA
n:1:2 [0] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [receive] via NET/Socket/3 comm 0x7f nRanks 16
n:1:2 [0] NCCL INFO Using network AWS Libfabric
"""
    log = facts_of({"nccl.log": lines}).nccl
    assert log is not None
    assert log.paths == {
        "P2P/IPC/read": 1, "P2P/direct pointer": 1, "NET/IBext_v8/GDRDMA": 1, "NET/Socket": 1,
    }  # fmt: skip
    assert log.networks == ("AWS Libfabric",)
    assert (log.channels("NET"), log.channels("NET/Socket"), log.channels("P2P")) == (2, 1, 2)


def test_ports_from_sysfs_are_those_of_ibstat(tmp_path: Path):
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, text in (
        ("link_layer", "InfiniBand"), ("state", "4: ACTIVE"), ("phys_state", "5: LinkUp"),
        ("rate", "400 Gb/sec (4X NDR)"),
    ):  # fmt: skip
        (port / name).write_text(text + "\n")
    found = facts_of({"infiniband.json": ask(tmp_path)}).ports
    assert found == (Port("mlx5_0:1", "InfiniBand", "Active", "LinkUp", 400.0),)
    assert facts_of(GOOD).ports[0] == found[0]


def test_versions_are_numbers():
    assert version("550.54.15") == (550, 54, 15)
    assert version("12.8+cu") == (12, 8)
    assert version("2.25.1") < version("2.100")


def test_storage_is_measured_and_nothing_stays(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(storage, "_MOST_BYTES", 8 * 2**20)
    found = storage.measure(tmp_path)
    assert found.write_bytes_per_s > 0
    assert found.read_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []
    assert facts_of({"storage.json": storage.text(found)}).storage == found
    with pytest.raises(InputError, match="can't be written to"):
        storage.measure(tmp_path / "none")


def test_this_machine_saved_is_judged_as_here(tmp_path: Path):
    said = readings.here()
    readings.save(said, tmp_path)
    assert readings.saved(tmp_path) == said
    facts = facts_of(said)
    assert examine(facts_of(readings.saved(tmp_path))) == examine(facts)
    assert facts.system.cores >= 1
    assert facts.kernel.limits["open files"] > 0
    assert facts.software.torch
    assert all(each.fits for each in facts.software.required if each.by == "torch")


def test_facts_are_plain_data():
    data = json.loads(json.dumps(as_data(facts_of(GOOD)), allow_nan=False))
    assert data["gpus"][0]["clocks"]["counters_s"]["sw_power_cap"] == pytest.approx(91.403239)
    assert data["matrix"]["links"]["GPU0 GPU1"] == "NV18"
    assert data["nccl"]["paths"] == {"P2P/CUMEM": 4, "NET/IB/GDRDMA": 4}
    assert data["kernel"]["quota_cores"] == "unlimited"


def test_the_command_shows_what_to_do_and_its_code_says_so(tmp_path: Path):
    broken = {**GOOD, LOG: GOOD[LOG].replace("NET/IB/0/GDRDMA", "NET/Socket/0")}
    readings.save(broken, tmp_path / "host")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/job.toml").touch()
    options = ("--from", "host", "--json", "--run", "run")
    done = paceline("doctor", *options, folder=tmp_path)
    assert done.returncode == 1
    assert "unset NCCL_IB_DISABLE" in done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "run/doctor.json").read_text()) == found
    assert (found["problems"], found["warnings"]) == (1, 0)
    assert found["checks"]["nccl-network"]["status"] == "problem"
    good = paceline("doctor", "--from", str(RECORDED / "hgx_h100"), folder=tmp_path)
    assert good.returncode == 0
    assert f"{len(NAMES)} checks: 0 problems, 0 warnings" in good.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--from", "nowhere"], "has none of the texts"),
        (["--from", "odd"], "nvidia-smi.xml is not understood"),
        (["--from", "odd", "--nccl-log", "no.log"], "no.log does not exist"),
        (["--from", "odd", "--run", "odd"], "is no run"),
    ],
)
def test_wrong_input_is_one_sentence(tmp_path: Path, arguments, says):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/nvidia-smi.xml").write_text("<html>")
    done = paceline("doctor", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr


def test_the_page_is_the_codes_own_table():
    made = runpy.run_path(str(DOCS / "make_doctor_page.py"))["page"]()
    assert (DOCS / "doctor.md").read_text() == made
    assert all(f"| `{name}` |" in made for name in NAMES)
    assert all(f"| {name} |" in made for name in (*readings.COMMANDS, *readings.GIVEN))
