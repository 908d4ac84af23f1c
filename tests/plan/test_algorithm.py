"""Prices of our own algorithms, counted from their rounds, and the choice between them. Pure."""

import numpy as np
import pytest

from paceline.config.curves import CollectiveCurve
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster, Device, Figure
from paceline.config.job import read_job
from paceline.config.links import network
from paceline.plan.collectives import choose_algorithm, collective_s
from paceline.plan.points import Setting
from paceline.plan.resolve import resolve

CPU = Device(name="CPU", kind="cpu", precisions=("fp32",))
FAST, SLOW = 72.0, 0.2  # Gbit/s
HOST_S = 110e-6  # of a round, beside its messages
MIB = 2**20


def hosts(num_nodes, per_node, **changes):
    """gloo ranks whose loopback takes 60 us and links 150 us a message."""
    tiers = (network("loopback", per_node, FAST, 60),)
    if num_nodes > 1:
        rate = SLOW / per_node
        tiers += (network("ethernet", num_nodes * per_node, rate, 150),)
    return Cluster(device=CPU, devices_per_node=per_node, num_nodes=num_nodes, tiers=tiers).replace(
        **changes
    )


def seconds(cluster, op, num_bytes, num_ranks, stride=1):
    return float(collective_s(cluster, op, num_bytes, num_ranks, stride))


def test_bandwidth_and_latency_are_those_of_theory():
    where, rate = hosts(1, 8), FAST / 8 * 1e9 * 0.93
    size = 4096 * MIB
    for name in ("ring", "pairwise", "halving_doubling"):
        found = seconds(where, f"all_reduce.{name}", size, 8)
        assert found == pytest.approx(2 * 7 / 8 * size / rate, rel=0.01), name
    small = [seconds(where, f"all_reduce.{name}", 64, 8) for name in ("ring", "halving_doubling")]
    # A message takes its latency twice (announced, then sent). Of eight ranks, some rounds of
    # halving send around the end of the buffer: one more message in four of its six rounds.
    in_theory = [14 * (120e-6 + HOST_S), (6 + 4 / 2) * 120e-6 + 6 * HOST_S]
    assert small == pytest.approx(in_theory, rel=0.01)


def test_across_nodes_only_what_leaves_them_counts():
    where, size = hosts(2, 4), 256 * MIB
    link = SLOW / 8 * 1e9 * 0.93  # of a node, all its ranks together
    found = seconds(where, "all_reduce.hierarchical", size, 8)
    assert found == pytest.approx(size / link, rel=0.05)  # 2 (m - 1) / m S for two nodes
    ring = seconds(where, "all_reduce.ring", size, 8)
    assert ring == pytest.approx(2 * 7 / 8 * size / link, rel=0.05)


def test_arrays_give_what_single_groups_give():
    where = hosts(2, 2)
    sizes, ranks, strides = [64.0, MIB, 8 * MIB], [2, 4, 2], [1, 1, 2]
    for op in ("all_gather.ring", "all_reduce.tree"):
        together = collective_s(where, op, sizes, ranks, strides)
        alone = [seconds(where, op, *each) for each in zip(sizes, ranks, strides, strict=True)]
        np.testing.assert_allclose(together, alone)
    assert seconds(where, "all_reduce.tree", MIB, 1) == 0


def test_a_measured_curve_of_ours_counts_before_the_rounds():
    curve = CollectiveCurve(num_ranks=4, bytes=(1024.0, MIB), seconds=(1e-3, 2e-3), source="here")
    where = hosts(1, 4)
    tier = where.tiers[0].replace(collectives={"all_gather.ring": (curve,)})
    where = where.replace(tiers=(tier,))
    assert seconds(where, "all_gather.ring", MIB, 4) == pytest.approx(2e-3)
    assert seconds(where, "all_gather.pairwise", MIB, 4) < 1e-3


def test_messages_take_what_was_measured_of_them():
    curve = CollectiveCurve(num_ranks=2, bytes=(64.0, MIB), seconds=(1e-3, 5e-3), source="here")
    where = hosts(1, 2)
    where = where.replace(tiers=(where.tiers[0].replace(collectives={"send_recv": (curve,)}),))
    assert seconds(where, "reduce_scatter.pairwise", 2 * MIB, 2) == pytest.approx(5e-3 + HOST_S)
    assert seconds(where, "all_reduce.one_shot", 64, 2) == pytest.approx(1e-3 + HOST_S)


def test_adding_and_copying_take_the_memorys_time():
    fast = CPU.replace(memory_bytes_per_s=Figure(value=3e9, origin="measured", source="here"))
    where = hosts(1, 2)
    more = seconds(where.replace(device=fast), "reduce_scatter.pairwise", 64 * MIB, 2)
    more -= seconds(where, "reduce_scatter.pairwise", 64 * MIB, 2)
    # Two reads and a write to add a half, a read and a write to hand out the sum.
    assert more == pytest.approx(5 * 32 * MIB / 3e9, rel=0.3)


def test_what_the_choice_depends_on():
    def chosen(where, op, num_bytes, num_ranks):
        return choose_algorithm(where, op, num_bytes, num_ranks, 1).algorithm

    assert chosen(hosts(1, 4), "all_reduce", 64 * MIB, 4) == "backend"
    assert chosen(hosts(1, 4), "all_reduce", 64, 4) == "one_shot"
    assert chosen(hosts(1, 4), "reduce_scatter", 64 * MIB, 4) == "halving_doubling"
    assert chosen(hosts(2, 2), "all_reduce", MIB, 4) == "hierarchical"
    assert chosen(hosts(4, 1), "reduce_scatter", 64 * MIB, 4) == "halving_doubling"
    assert chosen(hosts(1, 4), "all_reduce", MIB, 1) == "backend"
    gpus = hosts(2, 8, device=Device(name="GPU", kind="cuda", precisions=("bf16",)))
    assert chosen(gpus, "reduce_scatter", MIB, 16) == "backend"
    why = choose_algorithm(hosts(2, 2), "all_reduce", MIB, 4, 1)
    assert why.reason.startswith("1 MiB among 4 ranks take 46.5 ms by hierarchical, 68.")


def test_groups_too_large_to_count_are_the_backends():
    where = hosts(1, 512)
    with pytest.raises(InputError, match="among 512 ranks is not priced"):
        seconds(where, "all_reduce.ring", MIB, 512)
    assert choose_algorithm(where, "reduce_scatter", MIB, 512, 1).algorithm == "backend"


# ---- in a Job ------------------------------------------------------------------------------------


def planned(*settings, where=None):
    where = where or hosts(2, 2)
    return resolve(read_job(None, ["train.global_batch=32", *settings]), where)


def test_the_plan_says_who_exchanges_shards():
    plan = planned("layout.fsdp=4")
    assert plan.job.comm.fsdp.algorithm == "hierarchical"
    assert "MiB among 4 ranks take" in plan.reasons["comm.fsdp.algorithm"]
    plan = planned("layout.dp=4", "layout.fsdp=1")
    assert plan.job.comm.fsdp.algorithm == "backend"
    assert plan.reasons["comm.fsdp.algorithm"] == "nothing is sharded"


def test_what_a_person_asked_for_stays():
    plan = planned("layout.fsdp=4", "comm.fsdp.algorithm=ring")
    assert plan.job.comm.fsdp.algorithm == "ring"
    assert "comm.fsdp.algorithm" not in plan.reasons
    assert Setting.of(plan.job).shard_algorithm == "ring"
