"""Devices and networks that are seldom planned for: each can be, with a source for each figure."""

import html
import io
from typing import Any, get_args

import numpy as np
import pytest
from rich.console import Console

from paceline.config.errors import InputError
from paceline.config.figure import Origin
from paceline.config.hardware import Cluster, ClusterSpec, device
from paceline.config.links import NETWORKS
from paceline.plan.answer import show
from paceline.plan.answer.answer import Answer
from paceline.plan.answer.describe import hardware_rows, headline
from paceline.plan.answer.find import answer
from paceline.plan.answer.page import render
from paceline.plan.collectives.groups import tiers_of
from paceline.plan.collectives.seconds import collective_s
from tests.plan.answers import job


def planned(on: Cluster) -> Answer:
    return answer(job(on=on))


def nodes(name: str, num: int, nodes: int = 1, **more: Any) -> Cluster:
    return Cluster(device=device(name), devices_per_node=num, num_nodes=nodes, **more)


def printed(found: Answer) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    show.show(found, console, 5)
    return console.file.getvalue()


@pytest.mark.parametrize("name", ["CS-3", "TPUv5p", "TPUv6e", "TPUv7", "MI355X", "Gaudi3"])
def test_each_device_is_planned_and_each_figure_says_where_it_is_from(name):
    found = planned(nodes(name, 4))
    assert found.best is not None
    assert np.isfinite(found.best.step_s)
    rows = hardware_rows(found.best)
    assert {"cited", "assumed"} <= {mark for _, mark, _ in rows} <= {*get_args(Origin)}
    assert all(figure and len(source) > 8 for figure, _, source in rows)
    page, terminal = html.unescape(render(found)), printed(found)
    for figure, mark, _ in rows:
        assert figure in page
        if mark == "assumed":
            assert figure in terminal


def test_a_wafer_keeps_activations_and_waits_for_weights_that_outlast_its_products():
    best = planned(nodes("CS-3", 1)).best
    memory = best.memory[0].terms
    assert memory["params"] == memory["optimizer"] == 0
    assert memory["activations"] > 0
    stream = device("CS-3").streamed_bytes_per_s
    slow = device("CS-3").replace(streamed_bytes_per_s=stream.replace(value=1e9))
    slower = planned(Cluster(device=slow, devices_per_node=1, num_nodes=1)).best
    assert slower.time_s["exposed_comm.fsdp"] > 10 * best.time_s["exposed_comm.fsdp"]
    assert slower.step_s > best.step_s


def test_a_faster_stream_of_weights_is_among_what_would_change_a_wafers_plan():
    gains = {one.change: one.gain for one in planned(nodes("CS-3", 1)).sensitivities}
    assert gains["the streaming of weights half as fast"] < -0.1
    assert gains["the streaming of weights twice as fast"] > 0.1
    others = planned(nodes("TPUv7", 4)).sensitivities
    assert not any("streaming" in one.change for one in others)


@pytest.mark.parametrize("name", ["CS-3", "TPUv7", "Gaudi3"])
def test_a_device_without_our_runtime_is_no_better_known_than_a_gpu_and_is_said_to_lack_it(name):
    found, on_gpu = (planned(nodes(each, 4)) for each in (name, "H200"))
    widths = [one.best.interval_s[1] / one.best.step_s for one in (found, on_gpu)]
    assert widths[0] >= widths[1]
    assert found.best.assumptions["stack.matmul_time"].startswith("cited")
    assert "trains on CUDA devices and CPUs alone" in headline(found)
    assert "alone" not in headline(on_gpu)


def test_switches_that_add_up_halve_what_a_large_sum_takes_between_nodes():
    def sums(network: str) -> float:
        cluster = nodes("H100-SXM", 1, 16, network=network)
        return float(collective_s(cluster, "all_reduce", 1e9, 16, 1))

    assert 0.45 < sums("ndr-sharp") / sums("ndr") < 0.65
    assert sums("xdr") < sums("ndr") == pytest.approx(sums("bluefield-3"), rel=0.1)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_named_network_is_cited_and_its_latency_assumed(name):
    cluster = nodes("H200", 8, 2, network=name)
    outer = tiers_of(cluster)[-1]
    assert (outer.bytes_per_s.origin, outer.latency_s.origin) == ("cited", "assumed")
    assert outer.reduces_in_network == name.endswith("sharp")
    rows = hardware_rows(planned(cluster).best)
    assert (f"{outer.name}.bytes per s", "cited", NETWORKS[name].source) in rows


def test_a_network_beside_tiers_is_refused():
    tiers = tiers_of(nodes("H200", 8, 2))
    with pytest.raises(InputError, match="network has no effect beside tiers"):
        ClusterSpec.parse({"device": "H200", "tiers": tiers, "network": "ndr"})
