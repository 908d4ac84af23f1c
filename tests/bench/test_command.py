"""`paceline bench`: its options (pure), what it writes (one process, tiny sizes), the program."""

import json
import platform
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.bench import command, measure
from paceline.bench.command import bench_command, to_text, with_ranks
from paceline.bench.device import SizeGrid
from paceline.bench.measure import BenchRequest, BenchResult, calibrated
from paceline.bench.page import render
from paceline.bench.rank_pool import RankProgress, TellProgress
from paceline.bench.step import MeasuredStep
from paceline.comm.rendezvous import Ranks
from paceline.config.curves import CollectiveCurve
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster, Figure, Tier
from paceline.config.job import read_cluster, read_job
from paceline.machine import core_clock
from paceline.machine.discovery import this_machine
from tests.bench.test_device import TINY
from tests.command_line import paceline
from tests.observe.test_report import Page
from tests.render.test_page import write as write_page

A_SECOND = Figure(value=1.0, origin="assumed", source="this test")
A_TIER = Tier(name="loopback", num_devices=1, latency_s=A_SECOND, bytes_per_s=A_SECOND)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[RankProgress]:
    """Small grids, measured in this process instead of one of its own."""
    heard: list[RankProgress] = []

    def grid_of(_kind: str, *, quick: bool) -> SizeGrid:
        return TINY

    def here(_num_ranks: int, _kind: str, work: object, hear: TellProgress) -> BenchResult:
        def listen(news: RankProgress) -> None:
            heard.append(news)
            hear(news)

        return work(Ranks(), listen)  # type: ignore[operator]

    monkeypatch.setattr(measure, "grid_of", grid_of)
    monkeypatch.setattr(command, "run_on_ranks", here)
    monkeypatch.setattr(
        BenchRequest, "clock", lambda self, ranks: measure.RankTimer(ranks, 1e-4, 1)
    )
    return heard


def test_what_is_measured_is_written_and_read_back(
    tiny: list[RankProgress], tmp_path: Path, capsys
):
    out = tmp_path / "cluster.toml"
    facts = bench_command(out, num_ranks=1, quick=True, only=["device"])
    assert facts is not None
    cluster = read_cluster(out)
    device = cluster.device
    assert device.curves is not None
    assert Cluster.parse(vars(read_job(None, [f"cluster.file={out}"]).cluster)) == cluster
    assert (cluster.devices_per_node, cluster.tiers) == (1, ())
    assert device.peak_flops["fp32"].origin == "measured"
    assert "torch" in device.curves.matmul["fp32"].source
    assert cluster.stack is not None
    assert cluster.stack.constants["launch_us"] > 0
    assert [news.done for news in tiny] == list(range(1, tiny[0].total + 1))
    assert "products, fp32" in capsys.readouterr().out
    assert json.loads(json.dumps(facts))["peak_flops"]["fp32"] > 0


def charts_of(page: str) -> dict[str, Any]:
    return json.loads(page.split('id="charts">')[1].split("</script>")[0])


def test_the_page_says_what_was_measured_and_what_was_not(
    tiny: list[RankProgress], tmp_path: Path, capsys
):
    out = tmp_path / "here.toml"
    page = out.with_suffix(".html")
    run = write_page(tmp_path / "runs" / "demo" / "report.html", "demo")
    facts = bench_command(out, num_ranks=1, quick=True, only=["device"])
    assert facts is not None
    assert facts["page"] == str(page)
    assert f"{page}: the same as a page" in capsys.readouterr().out
    html, device = page.read_text(), read_cluster(out).device
    text = Page(html).text
    assert text.index("Next: paceline plan my.toml --cluster") < text.index("a rough picture")
    assert f"<code>paceline plan my.toml --cluster {out}</code>" in html
    assert "Not measured: codecs, step, input." in text
    for part in (
        *("products, fp32", "attention, flash", "launching an operator", "optimizer"),
        *(torch.__version__, platform.python_version(), "device products, attention"),
        f"no: paceline bench --only step --out {out} does",
        "nothing to measure: one rank has no links",
    ):
        assert part in text
    assert 'href="runs/demo/report.html">Run demo</a>' in html
    assert 'href="../../here.html"' in write_page(run, "demo").read_text()
    drawn = charts_of(html)
    assert set(drawn) == {"products", "attention", "memory"}
    products = {trace["name"]: trace for trace in drawn["products"]["data"]}["fp32"]
    curve, peak = device.curves.matmul["fp32"], device.peak("fp32").value
    assert products["y"] == pytest.approx([share * peak for share in curve.share], rel=1e-3)
    assert products["x"][0] == 2 * curve.m[0] * curve.n[0] * curve.k[0]


def test_the_page_tells_what_an_earlier_bench_measured(tiny: list[RankProgress], tmp_path: Path):
    out = tmp_path / "cluster.toml"
    bench_command(out, num_ranks=1, quick=True, only=["input"])
    text = Page((tmp_path / "cluster.html").read_text()).text
    assert f"Next: paceline bench --out {out} measures the devices" in text
    assert "Not measured: device, codecs, step." in text
    bench_command(out, num_ranks=1, quick=True, only=["device"])
    bench_command(out, num_ranks=1, quick=True, only=["codecs"])
    text = Page((tmp_path / "cluster.html").read_text()).text
    source = read_cluster(out).device.curves.matmul["fp32"].source
    assert f"before: {source}" in text
    assert "products, fp32" in text
    assert "Not measured: step, input." in text


def test_the_page_of_several_ranks_has_their_links_and_steps(
    tiny: list[RankProgress], tmp_path: Path
):
    out = tmp_path / "cluster.toml"
    bench_command(out, num_ranks=1, quick=True, only=["device"])
    curve = {"bytes": (512.0, 4096.0), "source": "this test"}
    collectives = {
        "all_reduce": tuple(
            CollectiveCurve(num_ranks=number, seconds=(1e-4, number * 2e-4), **curve)
            for number in (2, 4)
        ),
        "broadcast": (),
    }
    tiers = (A_TIER.replace(num_devices=4, collectives=collectives), A_TIER)
    cluster = read_cluster(out).replace(tiers=tiers)
    steps = tuple(MeasuredStep(job, (0.5,)) for job in measure.reference_jobs(cluster)[:2])
    outcome = BenchResult(cluster.replace(devices_per_node=4), steps=steps)
    request = BenchRequest(cluster, ("collectives", "step"), "this test")
    html = render(calibrated(outcome, "this test"), outcome, request, out)
    drawn, text = charts_of(html), Page(html).text
    (line,) = drawn["links-0"]["data"]
    assert (line["x"], line["y"]) == ([512.0, 4096.0], [1e-4, 8e-4])  # of the most ranks
    assert "links-1" not in drawn
    assert 'id="chart-links-1"' not in html
    assert "all_reduce 4 0.1 ms 0.8 ms 4.1 kB 5.12 MB" in text
    assert "fitted to 2 steps of this test" in text
    assert "no: paceline bench collectives does" in text
    assert all(f"{step.job.name} 500 ms" in text for step in steps)


def test_a_page_that_cannot_stand_beside_the_file_is_refused_at_once(tmp_path: Path):
    with pytest.raises(InputError, match=r"x\.html is where the page will stand: .*/x\.toml\."):
        bench_command(tmp_path / "x.html", num_ranks=1, quick=True)
    (tmp_path / "y.html").mkdir()
    with pytest.raises(InputError, match=r"y\.html is a folder"):
        bench_command(tmp_path / "y.toml", num_ranks=1, quick=True)


def test_a_browser_draws_every_chart_of_the_page(tiny: list[RankProgress], tmp_path: Path, browser):
    out = tmp_path / "cluster.toml"
    bench_command(out, num_ranks=1, quick=True, only=["device"])
    done = browser(tmp_path / "cluster.html", "--dump-dom")
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    dom = done.stdout[done.stdout.index("<body") :]
    assert dom.count('class="trace scatter') == sum(
        len(chart["data"]) for chart in charts_of((tmp_path / "cluster.html").read_text()).values()
    )


@pytest.mark.parametrize(("share", "is_told"), [(0.25, True), (0.02, False)])
def test_it_says_how_much_of_the_cores_others_had(
    tiny, tmp_path, monkeypatch, capsys, share, is_told
):
    """A bench that others slow down, unnoticed, makes every later prediction too slow."""
    monkeypatch.setattr(core_clock, "_stolen_s", lambda: share * time.perf_counter())
    bench_command(tmp_path / "cluster.toml", num_ranks=1, quick=True, only=["input"])
    said = capsys.readouterr().out
    assert ("gave 25% of this host's cores to others" in said) == is_told
    assert ("Measure again" in said) == is_told


def test_a_part_measured_later_completes_the_file(tiny: list[RankProgress], tmp_path: Path):
    out = tmp_path / "cluster.toml"
    bench_command(out, num_ranks=1, quick=True, only=["device"])
    before = read_cluster(out)
    bench_command(out, num_ranks=1, quick=True, only=["input", "collectives"])
    assert read_cluster(out).device == before.device
    slow = before.device.replace(peak_flops={"fp32": A_SECOND})
    out.write_text(to_text(before.replace(tiers=(A_TIER,), device=slow)))
    bench_command(out, num_ranks=1, quick=True, only=["device"])
    again = read_cluster(out)
    assert again.tiers == (A_TIER,)
    assert again.device.peak("fp32").value > 1e6  # measured again, not kept
    with pytest.raises(InputError, match=r"is for 1 x 1 ranks, not 1 x 2: give another --out"):
        bench_command(out, num_ranks=2, quick=True, only=["collectives"])


def test_an_interrupted_bench_leaves_the_file_as_it_was(tiny, tmp_path, monkeypatch):
    def interrupted(*_arguments: object) -> BenchResult:
        raise KeyboardInterrupt

    out = tmp_path / "cluster.toml"
    out.write_text("num_nodes = 1\n")
    monkeypatch.setattr(command, "run_on_ranks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench_command(out, num_ranks=1, quick=True)
    assert out.read_text() == "num_nodes = 1\n"
    assert list(tmp_path.iterdir()) == [out]


def test_wrong_wishes_are_refused_in_one_sentence(tmp_path):
    out = tmp_path / "cluster.toml"
    with pytest.raises(InputError, match=r"--only devices is not measured; did you mean device\?"):
        bench_command(out, num_ranks=1, quick=True, only=["devices"])
    with pytest.raises(InputError, match=r"--only step completes an earlier measurement"):
        bench_command(out, num_ranks=1, quick=True, only=["step"])
    with pytest.raises(InputError, match=r"--ranks 0 can't be started"):
        bench_command(out, num_ranks=0, quick=True)
    assert not out.exists()


def test_ranks_share_the_memory_of_a_machine():
    machine = this_machine()
    shared = with_ranks(machine, 8)
    assert shared.devices_per_node == 8

    def total(cluster) -> float:
        return cluster.devices_per_node * cluster.device.memory_bytes.value

    assert total(shared) == pytest.approx(total(machine))


def test_measured_steps_calibrate_the_stack(tiny: list[RankProgress], tmp_path: Path):
    """A machine that is slower than its curves say has other constants than one that is as fast."""
    out = tmp_path / "cluster.toml"
    bench_command(out, num_ranks=1, quick=True, only=["device"])
    cluster = read_cluster(out)
    jobs = measure.reference_jobs(cluster)[:2]
    assert calibrated(BenchResult(cluster), "nothing") == cluster
    fitted = []
    for seconds in (1e-2, 1.0):
        steps = tuple(MeasuredStep(job, (seconds,)) for job in jobs)
        found = calibrated(BenchResult(cluster, steps=steps), "a test").stack
        assert found is not None
        assert "2 steps of a test" in found.origin
        fitted.append(found.constants)
    assert fitted[1]["matmul_time"] >= fitted[0]["matmul_time"]
    assert fitted[1] != fitted[0]
    assert "matmul_time" in to_text(calibrated(BenchResult(cluster, steps=steps), "a test"))


def test_the_program_says_what_is_wrong_and_ends_with_2(tmp_path):
    done = paceline("bench", "--only", "nothing", "--out", "c.toml", folder=tmp_path)
    assert done.returncode == 2
    assert "--only nothing is not measured" in done.stderr
    assert "Traceback" not in done.stderr
