"""`paceline bench collectives`: definitions and rules (pure), one sweep on gloo ranks, its page."""

import dataclasses
import io
import json
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from paceline.bench.clock import RankTimer
from paceline.bench.collectives import OPS, all_groups
from paceline.bench.command import to_text
from paceline.bench.network import command
from paceline.bench.network import sweep as sweeping
from paceline.bench.network import tune as tuning
from paceline.bench.network.advice import host_order
from paceline.bench.network.bandwidth import BandwidthRow, bus_factor, fit
from paceline.bench.network.command import CollectivesOptions, collectives_command, figures
from paceline.bench.network.measure import NetworkMeasurement, NetworkRequest, measure_network
from paceline.bench.network.page import render
from paceline.bench.network.pairs import Pairs, num_alone_rounds, num_rounds, tournament
from paceline.bench.network.show import colour, contention, shown_network
from paceline.bench.network.sizes import Bounds, read_sizes, usual_sizes
from paceline.bench.network.slow import slow_links
from paceline.bench.network.sweep import SkippedSizes, planned, sweep, tiers_from
from paceline.bench.rank_pool import RankProgress, TellProgress, run_on_ranks
from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster, Device, Figure
from paceline.config.job import read_cluster
from paceline.plan.collectives import choose_algorithm, collective_s

CPU = Device(name="here", kind="cpu", precisions=("fp64", "fp32"))
A_SECOND = Figure(value=1.0, origin="assumed", source="this test")


class Hasty(NetworkRequest):
    """Looks for a tenth of a millisecond."""

    def clock(self, ranks: Ranks) -> RankTimer:
        return RankTimer(ranks, block_s=1e-4, num_blocks=2)


TINY = Hasty((4096,), 60, "gloo", quick=True)


def row(op="all_reduce", algorithm="backend", num_bytes=2**20, seconds=1e-3, **more):
    facts = {"links": "inside", "num_ranks": 4, "low_s": seconds, "high_s": seconds, **more}
    return BandwidthRow(op, algorithm, num_bytes=num_bytes, seconds=seconds, **facts)


def test_bandwidths_are_those_of_nccl_tests():
    """Its doc/PERFORMANCE.md: 8 ranks all-reduce at 2 x 7/8, the others at 7/8 or 1."""
    assert bus_factor("all_reduce", 8) == 1.75
    assert {bus_factor(op, 8) for op in ("all_gather", "reduce_scatter", "all_to_all")} == {0.875}
    assert bus_factor("broadcast", 8) == bus_factor("send_recv", 8) == 1
    one = row(num_bytes=2**30, seconds=0.5, alone_s=0.4)
    assert one.algorithm_bytes_per_s == 2**31
    assert one.bus_bytes_per_s == 1.5 * 2**31
    assert one.contention == pytest.approx(1.25)


@settings(deadline=None, max_examples=50)
@given(st.floats(1e-6, 1e-1), st.floats(1e5, 1e12))
def test_a_line_is_found_again(latency_s, bytes_per_s):
    sizes = [2**power for power in range(9, 31, 3)]
    line = fit([row(num_bytes=each, seconds=latency_s + each / bytes_per_s) for each in sizes])
    assert line.errors[1] < 1e-6
    assert line.seconds(2**25) == pytest.approx(latency_s + 2**25 / bytes_per_s, rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=8))
def test_a_line_never_has_negative_parts(seconds):
    line = fit([row(num_bytes=8**at * 512, seconds=each) for at, each in enumerate(seconds)])
    assert line.latency_s >= 0
    assert line.bytes_per_s > 0
    assert line.errors is None if len(seconds) < 3 else line.errors[0] <= line.errors[1]
    assert line.error_texts[0].endswith("-" if len(seconds) < 3 else "%")


def test_sizes_as_people_write_them():
    assert read_sizes("4KiB,1MiB,512") == (512, 4096, 2**20)
    assert read_sizes("512:4k") == (512, 1024, 2048, 4096)
    assert read_sizes("512:1GiB:8") == usual_sizes("cpu", quick=False)
    assert usual_sizes("cuda", quick=False)[-1] == 2**30
    for wrong in ("", "big", "4KiB:1KiB", "1k:2k:1", "1k:2k:3:4", "1k:2k:x"):
        with pytest.raises(InputError, match="names no sizes: give a list"):
            read_sizes(wrong)
    with pytest.raises(InputError, match="give sizes of 512 B to 64 GiB"):
        read_sizes("4B")


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 40))
def test_everybody_meets_everybody_once_and_nobody_two_at_once(num_ranks):
    rounds = tournament(num_ranks)
    assert len(rounds) == num_ranks - 1 + num_ranks % 2
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(num_ranks) for b in range(a + 1, num_ranks)]
    for pairs in rounds:
        seen = [rank for pair in pairs for rank in pair]
        assert len(seen) == len(set(seen))


def test_hosts_stand_as_a_chain_where_there_are_orders_to_choose_from():
    racks = np.full((4, 4), 1e8)
    racks[0, 2] = racks[2, 0] = racks[1, 3] = racks[3, 1] = 1e9
    assert host_order(_measured(racks)) == ["node0", "node2", "node1", "node3"]
    assert host_order(_measured(racks[:2, :2])) == []
    assert host_order(dataclasses.replace(_measured(racks), pairs=None)) == []


def _measured(rates):
    hosts = tuple(own_hosts(len(rates)))
    each = tuple(map(tuple, rates.tolist()))
    return NetworkMeasurement((), (), Pairs(hosts, 1, each, each, None, each), hosts, 1)


# ---- what is slow -------------------------------------------------------------------------------


def matrix(number, slow=(), seed=0):
    """Rates of 1e9 with noise of 15 %, a fifth where `slow` says so."""
    rates = np.random.default_rng(seed).uniform(0.85, 1.15, (number, number)) * 1e9
    for place in slow:
        rates[place] /= 5
    return rates.tolist()


def both_ways(at):
    return [(at, slice(None)), (slice(None), at)]


def own_hosts(number):
    return [f"node{at}" for at in range(number)]


@pytest.mark.parametrize("number", [3, 4, 8, 17])
@pytest.mark.parametrize("seed", range(3))
def test_a_slow_card_is_named_and_no_other(number, seed):
    at = seed % number
    (found,) = slow_links(matrix(number, both_ways(at), seed), own_hosts(number))
    assert found.places == (f"node{at}",)
    assert found.directions == ("sends", "receives")
    assert 3.5 < found.factor < 7
    assert found.sentence.startswith(f"node{at} sends and receives slowly: ")
    assert slow_links(matrix(number, (), seed), own_hosts(number)) == []


def test_a_card_that_is_slow_one_way_is_slow_one_way():
    (found,) = slow_links(matrix(5, [(2, slice(None))]), own_hosts(5))
    assert (found.places, found.directions) == (("node2",), ("sends",))


@pytest.mark.parametrize("number", [3, 4, 8])
def test_a_slow_link_is_named_with_its_direction(number):
    (found,) = slow_links(matrix(number, [(1, 2)]), own_hosts(number))
    assert (found.places, found.directions) == (("node1", "node2"), ())
    assert "from node1 to node2 is slow" in found.sentence
    twice = slow_links(matrix(number, [(1, 2), (2, 1)]), own_hosts(number))
    assert {each.places for each in twice} == {("node1", "node2"), ("node2", "node1")}


def test_ranks_of_a_host_share_its_card():
    """Links inside a host are faster and no measure for those between hosts."""
    rates = np.array(matrix(8, [*both_ways(slice(4, 6))]))
    for first in range(0, 8, 2):
        rates[first : first + 2, first : first + 2] = 5e10
    hosts = [f"node{rank // 2}" for rank in range(8)]
    (found,) = slow_links(rates.tolist(), hosts)
    assert found.places == ("node2",)
    (on_one_host,) = slow_links(matrix(8, both_ways(3)), ["here"] * 8)
    assert on_one_host.places == ("rank 3",)


def test_where_most_are_slow_the_network_is_built_so():
    """Two fast racks and slow links between them; and two hosts, which have one link."""
    rates = np.full((8, 8), 1e9)
    rates[:4, 4:] = rates[4:, :4] = 1e8
    assert not [each for each in slow_links(rates.tolist(), own_hosts(8)) if each.directions]
    assert slow_links([[0, 1e9], [1e6, 0]], own_hosts(2)) == []


def test_two_slow_cards_of_five():
    found = slow_links(matrix(5, both_ways(1) + both_ways(4)), own_hosts(5))
    assert {each.places for each in found} == {("node1",), ("node4",)}


# ---- on ranks -----------------------------------------------------------------------------------


def silence(_news: RankProgress) -> None:
    pass


def _pretended(ranks: Ranks, tell: TellProgress) -> tuple[NetworkMeasurement, int]:
    """Four ranks that take themselves for two on each of two nodes."""
    told: list[RankProgress] = []
    there = Ranks(ranks.rank, 4, ranks.rank % 2, 2)
    sweeping.ALGORITHMS = dict.fromkeys(sweeping.ALGORITHMS, ("ring", "hierarchical"))
    return measure_network(TINY, there, told.append), len(told)


@pytest.fixture(scope="module")
def measured() -> NetworkMeasurement:
    found, num_told = run_on_ranks(4, "cpu", _pretended, silence)
    curves = {(each.op, each.algorithm, each.links) for each in found.rows}
    assert num_told == len(curves) + num_rounds(4)
    return found


def test_a_sweep_measures_every_collective_inside_across_and_over_all(measured):
    backend = {(each.op, each.links, each.num_ranks) for each in measured.rows if not _ours(each)}
    kinds = (("inside", 2), ("across", 2), ("both", 4))
    assert backend == {(op, *kind) for op in OPS for kind in kinds}
    hierarchical = {each.links for each in measured.rows if each.algorithm == "hierarchical"}
    assert hierarchical == {"both"}
    assert {each.num_bytes for each in measured.rows} == {4096}
    for each in measured.rows:
        assert 0 < each.low_s <= each.seconds <= each.high_s < 10
        assert (each.alone_s is None) == (_ours(each) or each.links == "both")


def _ours(each: BandwidthRow) -> bool:
    return each.algorithm != "backend"


def test_pairs_are_measured_together_and_alone(measured):
    pairs = measured.pairs
    assert pairs is not None
    assert num_alone_rounds(4) == 6
    assert (np.array(pairs.best_bytes_per_s) >= np.array(pairs.alone_bytes_per_s)).all()
    for each in (pairs.latency_s, pairs.bytes_per_s, pairs.alone_bytes_per_s):
        values = np.array(each)
        assert (values.diagonal() == 0).all()
        assert (values + np.eye(4) > 0).all()
    assert contention(pairs.bytes_per_s, pairs.alone_bytes_per_s) > 0


def test_the_planner_reads_what_was_measured():
    """Also of our algorithms, between which "auto" then chooses by measured seconds."""
    rows = [
        row(op, algorithm, size, seconds, links=links, num_ranks=2)
        for links in ("inside", "across", "both")
        for op in OPS
        for algorithm, seconds in (("backend", 1e-3), ("ring", 1e-4), ("hierarchical", 1e-6))
        for size in (512, 4096)
        if (algorithm == "hierarchical") <= (links == "both")
    ]
    tiers = tiers_from(rows, "cpu", 2, 4, "a test")
    assert [(tier.name, tier.num_devices) for tier in tiers] == [("loopback", 2), ("network", 4)]
    assert "all_reduce.ring" in tiers[0].collectives
    assert not any("hierarchical" in key for tier in tiers for key in tier.collectives)
    cluster = Cluster(device=CPU, devices_per_node=2, num_nodes=2, tiers=tiers)
    for stride in (1, 2):
        assert collective_s(cluster, "all_reduce", 512, 2, stride) == pytest.approx(1e-3)
        assert collective_s(cluster, "all_reduce.ring", 512, 2, stride) == pytest.approx(1e-4)
    assert choose_algorithm(cluster, "all_reduce", 512, 2, 2).seconds["ring"] < 2e-4


def _swept(
    bounds: Bounds, ranks: Ranks, _tell: TellProgress
) -> tuple[list[BandwidthRow], list[SkippedSizes]]:
    curves = planned([all_groups(ranks)[0]], "cuda")[:2]  # of the backend alone
    return sweep(RankTimer(ranks, block_s=1e-4, num_blocks=2), curves, bounds, lambda _what: None)


def test_sizes_beyond_memory_and_time_are_left_out_and_said():
    rows, left = run_on_ranks(2, "cpu", partial(_swept, Bounds((512, 4096), 60, 5 * 1024)), silence)
    assert {each.num_bytes for each in rows} == {512}
    assert [(each.name, each.above_bytes, each.reason) for each in left] == [
        (op, 512, "memory") for op in OPS[:2][:2]
    ]
    rows, left = run_on_ranks(
        2, "cpu", partial(_swept, Bounds((512, 1024, 2**29), 1e-3, 2**40)), silence
    )
    assert {each.num_bytes for each in rows} == {512, 1024}
    assert {each.reason for each in left} == {"time"}


def _settings(_wish: NetworkRequest, ranks: Ranks, _tell: TellProgress) -> list[BandwidthRow]:
    """As slow as the environment says."""
    seconds = float(os.environ.get("SLOW", "1"))
    return [row(num_bytes=size, seconds=seconds * size, num_ranks=2) for size in (512, 4096)]


def test_settings_are_tried_in_ranks_of_their_own(monkeypatch):
    fast, slow = (("SLOW", "0.5"),), (("SLOW", "2"),)
    monkeypatch.setattr(tuning, "CANDIDATES", ((), slow, fast))
    monkeypatch.setattr(tuning, "_measured", _settings)
    heard: list[RankProgress] = []
    found = tuning.tune(2, "cpu", TINY, heard.append)
    assert found.settings == fast
    assert "(-50%)" in found.reason
    assert [news.what for news in heard] == ["its own choice", "SLOW=2", "SLOW=0.5"]
    assert "SLOW" not in os.environ


def test_a_trial_is_an_all_reduce_of_all_ranks():
    (found,) = run_on_ranks(2, "cpu", partial(tuning._measured, TINY), silence)
    assert (found.op, found.links, found.num_ranks, found.num_bytes) == (
        "all_reduce", "inside", 2, 4096,
    )  # fmt: skip


# ---- what people see ----------------------------------------------------------------------------


def with_slow_host(number=4) -> NetworkMeasurement:
    rates = tuple(map(tuple, matrix(number, both_ways(1))))
    late = tuple(tuple(1e-4 * (a != b) for a in range(number)) for b in range(number))
    rows = tuple(
        row("all_reduce", name, 8**at * 512, 1e-4 + 8**at * 5e-7, alone_s=alone)
        for at in range(4)
        for name, alone in (("backend", 1e-4), ("ring", None))
    )
    pairs = Pairs(tuple(own_hosts(number)), 2**20, late, rates, rates, rates)
    left = (SkippedSizes("all_to_all", 4, 4096, "time"),)
    return NetworkMeasurement(rows, left, pairs, tuple(own_hosts(number)), 1)


def shown(measured: NetworkMeasurement) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(shown_network(measured))
    return console.export_text()


def test_the_terminal_names_the_slow_host_and_what_was_left_out():
    text = shown(with_slow_host())
    assert "node1 sends and receives slowly" in text
    assert "above 4 KiB, which needs a larger --budget: all_to_all of 4 ranks." in text
    assert "busbw" in text
    assert "ring" in text
    many = shown(with_slow_host(40))
    colours = many.split("at a time:")[1].split("A pair")[0]
    assert re.findall(r"\d+", colours) == [str(rank) for rank in range(40)]  # no figures
    assert [colour(share) for share in (1, 0.5, 0.05)] == ["#166534", "#4d7c0f", "#7f1d1d"]


def test_the_page_says_the_same_and_is_complete():
    text = render(with_slow_host(), "a test", None)
    assert "node1 sends and receives slowly" in text
    assert "chart-alone" in text
    charts = json.loads(text.split('id="charts">')[1].split("</script>")[0])
    assert {"alone", "together", "latency", "bus-inside-4"} == set(charts)
    assert charts["alone"]["data"][0]["z"][0][0] is None
    assert "src=" not in text.split("plotly")[0]
    even = tuple(map(tuple, matrix(3)))
    pairs = Pairs(tuple(own_hosts(3)), 2**20, even, even, None, even)
    of_three = NetworkMeasurement((), (), pairs, pairs.hosts, 1)
    assert "3 ranks on 3 hosts, and no link is far below the rest" in render(
        of_three, "a test", None
    )


def test_figures_are_plain_data():
    facts = json.loads(json.dumps(figures(with_slow_host()), allow_nan=False))
    assert facts["rows"][0]["bus_bytes_per_s"] > 0
    assert facts["slow"][0]["places"] == ["node1"]
    assert facts["fits"][0]["op"] == "all_reduce"


# ---- the command --------------------------------------------------------------------------------


def test_the_file_gets_the_curves_and_keeps_the_rest(tmp_path: Path, monkeypatch, capsys):
    def there(_num: int, _kind: str, _work: object, _hear: TellProgress) -> NetworkMeasurement:
        of_each = [row(op, num_bytes=size, num_ranks=2) for op in OPS for size in (512, 4096)]
        return NetworkMeasurement(tuple(of_each), (), None, ("here", "here"), 2)

    monkeypatch.setattr(command, "run_on_ranks", there)
    out, page = tmp_path / "cluster.toml", tmp_path / "links.html"
    facts = collectives_command(CollectivesOptions(out, num_ranks=2, html=page))
    assert facts is not None
    assert facts["file"] == str(out)
    first = read_cluster(out)
    assert set(first.tiers[0].collectives) == set(OPS)
    assert page.read_text().startswith("<!doctype html>")
    assert f"<code>paceline plan my.toml --cluster {out}</code>" in page.read_text()
    out.write_text(to_text(first.replace(device_mtbf_hours=A_SECOND, tiers=())))
    assert collectives_command(CollectivesOptions(out, num_ranks=2)) is not None
    assert read_cluster(out) == first.replace(device_mtbf_hours=A_SECOND)
    assert "for the planner" in capsys.readouterr().out


def test_wrong_wishes_are_refused_in_one_sentence(tmp_path: Path, monkeypatch):
    out = tmp_path / "cluster.toml"
    monkeypatch.setattr(command, "run_on_ranks", None)  # nothing may be started
    for backend, sentence in (
        ("nccl", "--backend nccl needs CUDA devices, and here are none: take gloo"),
        ("mpi", "--backend mpi needs a torch that was built with MPI: take gloo"),
        ("glo", r"--backend glo is not known; did you mean gloo\?"),
    ):
        with pytest.raises(InputError, match=sentence):
            collectives_command(CollectivesOptions(out, backend=backend))
    with pytest.raises(InputError, match="--tune-nccl starts NCCL ranks of its own"):
        collectives_command(CollectivesOptions(out, num_ranks=2, tunes_nccl=True))
    with pytest.raises(InputError, match="names no sizes"):
        collectives_command(CollectivesOptions(out, sizes="small"))
    assert not out.exists()
