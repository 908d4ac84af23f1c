"""What joins ranks: parsers of recorded text and trees (pure), this machine, one run by hand."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm import rendezvous
from paceline.comm.rendezvous import Ranks, ranks_from_env, tasks_per_node
from paceline.config.errors import InputError
from paceline.config.host import Card, Host
from paceline.machine import nvidia_smi, sysfs
from paceline.machine.discovery import interface_to, interfaces, this_host
from paceline.machine.host_order import order_hosts, reordered_ranks
from paceline.machine.interfaces import hca_setting, interface_with, socket_settings

# Written by hand after the program's documented output: eight devices would only be longer.
SWITCHED = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\tSYS\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\tSYS\t0-47\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPXB\t48-95\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\tPIX\t48-95\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tSYS\tPXB\tPIX\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_3
"""
OLDER = """\
\tGPU0\tGPU1\tmlx5_0\tCPU Affinity
GPU0\t X \tPHB\tPIX\t0-13
GPU1\tPHB\t X \tPHB\t0-13
mlx5_0\tPIX\tPHB\t X \t
"""
ALONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\tN/A\n"


def test_devices_on_switches_and_the_card_next_to_each():
    found = nvidia_smi.parse(SWITCHED)
    assert found.devices == ("GPU0", "GPU1", "GPU2", "GPU3")
    assert found.cards == ("mlx5_0", "mlx5_3")
    assert found.device_links == "nvswitch"
    assert found.links["GPU2", "mlx5_3"] == "PXB"
    nearest = [found.nearest_card(device) for device in found.devices]
    assert nearest == ["mlx5_0", "mlx5_0", "mlx5_3", "mlx5_3"]


@pytest.mark.parametrize(
    ("link", "kind"),
    [("NV4", "nvlink"), ("NV18", "nvswitch"), ("PIX", "pcie"), ("NODE", "pcie"), ("SYS", "numa")],
)
def test_the_slowest_link_between_two_devices_decides(link, kind):
    """Three pairs of four links are a device's own twelve; of eighteen they lead to switches."""
    assert nvidia_smi.parse(SWITCHED.replace("NV18", link)).device_links == kind
    one = SWITCHED.replace("NV18", "NV4").replace("GPU0\t X \tNV4", f"GPU0\t X \t{link}")
    assert nvidia_smi.parse(one).device_links == kind


def test_other_versions_and_hosts():
    older = nvidia_smi.parse(OLDER)
    assert (older.cards, older.device_links) == (("mlx5_0",), "pcie")
    assert older.nearest_card("GPU1") == "mlx5_0"
    alone = nvidia_smi.parse(ALONE)
    assert (alone.devices, alone.cards, alone.device_links) == (("GPU0",), (), "none")
    assert alone.nearest_card("GPU0") is None
    with pytest.raises(ValueError, match="no matrix"):
        nvidia_smi.parse("NVIDIA-SMI has failed because it couldn't communicate with the driver.")


# ---- sysfs --------------------------------------------------------------------------------------


def tree(root: Path) -> Path:
    """Two NUMA nodes; an InfiniBand port, one that is down, RoCE, Ethernet, and virtual ones."""
    for node in (0, 1):
        (root / f"devices/system/node/node{node}").mkdir(parents=True)
    pci = {
        "0000:17:00.0": ("0", "mlx5_0", "ib0", "InfiniBand", "400 Gb/sec (4X NDR)", "4: ACTIVE"),
        "0000:18:00.0": ("0", "mlx5_1", "ib1", "InfiniBand", "10 Gb/sec (4X SDR)", "1: DOWN"),
        "0000:b1:00.0": ("1", "mlx5_2", "eth2", "Ethernet", "100 Gb/sec (4X EDR)", "4: ACTIVE"),
        "0000:03:00.0": ("-1", None, "eno1", None, None, None),
    }
    for address, (numa, device, interface, layer, rate, state) in pci.items():
        function = root / "devices/pci0000:00" / address
        write(function / "numa_node", numa)
        net = root / "class/net" / interface
        write(net / "operstate", "up" if state != "1: DOWN" else "down")
        write(net / "speed", "25000")
        write(net / "dev_port", "0")
        (net / "device").symlink_to(function)
        if device:
            port = root / "class/infiniband" / device / "ports/1"
            write(port / "state", state)
            write(port / "rate", rate)
            write(port / "link_layer", layer)
            (root / "class/infiniband" / device / "device").symlink_to(function)
    write(root / "class/net/lo/operstate", "unknown")
    write(root / "class/net/docker0/operstate", "up")
    return root


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def test_cards_are_read_in_order_of_their_rails(tmp_path: Path):
    root = tree(tmp_path)
    assert sysfs.numa_nodes(root) == 2
    ethernet, infiniband, roce = sysfs.cards(root)
    assert infiniband == Card(
        name="mlx5_0:1",
        kind="infiniband",
        interface="ib0",
        gbit_per_s=400.0,
        pci="0000:17:00.0",
        numa_node=0,
    )
    assert (roce.name, roce.kind, roce.interface, roce.numa_node) == (
        "mlx5_2:1", "roce", "eth2", 1,
    )  # fmt: skip
    assert (ethernet.name, ethernet.gbit_per_s, ethernet.numa_node) == ("eno1", 25.0, None)


def test_an_empty_tree_is_a_host_of_one_node_without_cards(tmp_path: Path):
    assert (sysfs.numa_nodes(tmp_path), sysfs.cards(tmp_path)) == (1, ())


def test_a_host_is_read_back_as_it_was_written(tmp_path: Path):
    host = Host(numa_nodes=2, device_links="nvswitch", cards=sysfs.cards(tree(tmp_path)))
    assert Host.parse(host.model_dump(mode="json")) == host
    assert this_host().numa_nodes >= 1


# ---- interfaces ---------------------------------------------------------------------------------

HERE = {"lo": ["127.0.0.1", "::1"], "eno1": ["10.0.0.7"], "ib0": ["192.168.5.7", "fe80::1"]}


def test_the_interface_that_reaches_the_others_is_set_for_both_backends():
    assert interface_with("192.168.5.7", HERE) == "ib0"
    assert interface_with("127.0.1.1", HERE) is None
    assert interface_with("10.9.9.9", HERE) is None
    chosen = socket_settings("ib0", {}, HERE, 2)
    assert chosen == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
    assert socket_settings(None, {}, HERE, 2) == {}


def test_what_a_person_set_stays():
    given_ = {"GLOO_SOCKET_IFNAME": "eno1,ib0", "NCCL_SOCKET_IFNAME": "^docker0"}
    assert socket_settings("ib0", given_, HERE, 2) == {}


def test_what_cannot_work_is_refused_in_one_sentence():
    with pytest.raises(InputError, match=r"=lo is the loopback, and the ranks are on 4 hosts"):
        socket_settings("ib0", {"GLOO_SOCKET_IFNAME": "lo"}, HERE, 4)
    with pytest.raises(InputError, match=r"=eht0 names no interface of this host: .*eno1, ib0\."):
        socket_settings("ib0", {"GLOO_SOCKET_IFNAME": "eht0"}, HERE, 2)


def test_this_machines_interfaces():
    assert "127.0.0.1" in interfaces()["lo"]
    assert interface_to("127.0.0.1") is None
    assert interface_to("no-such-host.invalid") is None
    for name, addresses in interfaces().items():
        for address in addresses:
            if "." in address and name != "lo":
                assert interface_to(address) == name


def test_ranks_on_several_hosts_get_an_interface_and_refuse_a_loopback(monkeypatch):
    several = Ranks(rank=0, world_size=4, local_rank=0, local_world_size=2)
    monkeypatch.setattr(rendezvous, "interface_to", lambda _host: "ib0")
    monkeypatch.setattr(rendezvous, "interfaces", lambda: HERE)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eno1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(InputError, match="on 2 hosts"):
        rendezvous._use_interfaces("node0", several)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    rendezvous._use_interfaces("node0", several)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eno1"


def test_ports_that_differ_in_rate_are_named_to_nccl():
    def port(name: str, rate: float | None) -> Card:
        return Card(name=name, kind="infiniband", gbit_per_s=rate)

    even = [port("mlx5_0:1", 400.0), port("mlx5_1:1", 400.0)]
    assert hca_setting(even) == {}
    storage = [*even, port("mlx5_2:1", 100.0), Card(name="eno1", kind="ethernet")]
    assert hca_setting(storage) == {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}
    assert hca_setting([]) == hca_setting([port("mlx5_0:1", None)]) == {}


# ---- order --------------------------------------------------------------------------------------


def test_ranks_of_a_host_stand_together():
    assert reordered_ranks("abab", "") == [0, 2, 1, 3]
    assert reordered_ranks("aabb", "") == [0, 1, 2, 3]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), st.permutations("abcde"))
def test_numbers_are_a_permutation_that_leaves_rank_0_and_keeps_hosts_together(hosts, order):
    given_numbers = reordered_ranks(hosts, order)
    assert sorted(given_numbers) == list(range(len(hosts)))
    assert given_numbers[0] == 0
    stand = [hosts[given_numbers.index(rank)] for rank in range(len(hosts))]
    assert all(stand.index(host) + stand.count(host) > at for at, host in enumerate(stand))
    for host in set(hosts):
        own = [number for number, its in zip(given_numbers, hosts, strict=True) if its == host]
        assert own == sorted(own)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("acbd", [0, 2, 1, 3]),
        ("bdac", [0, 2, 1, 3]),  # the same neighbours, begun elsewhere
        ("ad", [0, 2, 3, 1]),  # hosts that it lacks come last
        ("xyz", [0, 1, 2, 3]),
        ("", [0, 1, 2, 3]),
    ],
)
def test_ranks_are_numbered_from_the_first_host_on(order, expected):
    assert reordered_ranks("abcd", order) == expected


def test_hosts_of_a_rack_stand_together_and_noise_moves_nobody():
    hosts = ["a", "b", "c", "d"]  # racks: a and c, b and d
    rates = [[0, 1, 9, 1], [1, 0, 1, 9], [9, 1, 0, 1], [1, 9, 1, 0]]
    assert order_hosts(hosts, rates) == ["a", "c", "b", "d"]
    noisy = [[0, 8, 9, 10], [8, 0, 9, 10], [9, 9, 0, 11], [10, 10, 11, 0]]
    assert order_hosts(hosts, noisy) == hosts


def test_srun_that_deals_cyclically_gets_ranks_in_order_of_node(monkeypatch):
    """Task 1 runs on the second node: as a rank it follows those of the first."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    slurm = {"STEP_NUM_TASKS": "4", "PROCID": "1", "LOCALID": "0", "NODEID": "1"}
    for name, value in {**slurm, "STEP_TASKS_PER_NODE": "2(x2)"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert ranks_from_env("cpu") == Ranks(2, 4, 0, 2, "cpu")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1,2,1")
    assert ranks_from_env("cpu") == Ranks(1, 4, 0, 2, "cpu")
    assert tasks_per_node("4(x2),3,2(x3)") == [4, 4, 3, 2, 2, 2]
