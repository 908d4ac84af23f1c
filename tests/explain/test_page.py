"""Pages of an explanation and of a comparison: what they say, then how a browser shows them."""

import gzip
import json
import random
import re
from pathlib import Path

import pytest

from paceline.explain import comparison, lanes
from paceline.explain.explain import explain_subject
from paceline.explain.lanes import CELLS, lanes_of, read_lanes
from paceline.explain.noise import Estimate, MetricChange
from paceline.explain.page import _waterfall_note, waterfall_bars, write_report
from paceline.explain.subject import Subject
from paceline.explain.waterfall import Waterfall, WaterfallRow
from paceline.observe.account import Account, ClockOffset
from paceline.observe.recorded import read_account, trace_files
from paceline.observe.run import Run
from paceline.observe.timeline import Span, Timeline
from tests.command_line import paceline
from tests.explain.accounts import job, line, run_folder
from tests.observe.test_kineto import GLOO, NODE, event, span
from tests.observe.test_report import Page

STEP_US = 100_000


def trace(late_us: int) -> str:
    """Two steps of a CPU rank whose products take longer by so much, with one all-reduce each."""
    events = []
    for at in (0, STEP_US):
        busy = at + 50_000 + late_us
        events += [
            span("paceline.step", at, at + STEP_US),
            span("paceline.data_wait", at, at + 4000),
            event("aten::mm", at + 4000, busy),
            event(f"{NODE}MulBackward0", busy, busy + 10_000, tid=1),
            event("aten::mul", busy, busy + 9000),
            span("paceline.comm.dp", busy + 10_000, at + 88_000),
            event("c10d::allreduce_", busy + 10_000, busy + 10_200),
            span("gloo:all_reduce", busy + 10_100, at + 88_000, tid=GLOO),
            span("paceline.optimizer", at + 88_000, at + 97_000),
        ]
    note = {"paceline": {"first_step": 4, "axis": "dp"}}
    return json.dumps({"traceEvents": events, **note})


def run(folder: Path, step_ms: float, loss: float = 3.0, micro_batch: int = 8) -> Run:
    """A Run of 40 steps with a profiled window of two ranks."""
    lines = [
        line(
            number,
            step_ms * (1 + 0.01 * (number * 7 % 5 - 2)),
            loss=loss + 4 / number,
            tokens_per_s=4096e3 / step_ms,
            memory_bytes=5e8 + 1e5 * number,
            ranks={"memory_bytes": [5e8, 6e8], "busy_s": [0.05, 0.06]},
        )
        for number in range(1, 41)
    ]
    lines[3] |= {"profiled": True, "terms": {"matmul": 0.06, "exposed_comm.dp": 0.02}}
    made = Run(run_folder(folder, job(2, micro_batch=micro_batch), lines))
    made.trace_folder.mkdir()
    for rank, late_us in enumerate((0, 12_000)):
        file = made.trace_folder / f"rank{rank}-step4.json.gz"
        file.write_bytes(gzip.compress(trace(late_us).encode()))
    return made


def compared(now: Subject, before: Subject) -> str:
    return comparison.render(now, explain_subject(now), before, explain_subject(before))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(run(tmp_path_factory.mktemp("runs") / "made", 100.0), pytest.fail)


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    older = Subject.of(run(folder / "older", 125.0, 3.0, 4).path)
    newer = Subject.of(run(folder / "newer", 100.0, 2.9).path)
    file = folder / "beside.html"
    file.write_text(compared(newer, older))
    return file


# ---- what they say -------------------------------------------------------------------------------


def test_the_report_of_a_run_explains_its_step(report):
    page = Page(report.read_text())
    assert page.references == []
    assert report.stat().st_size < 5e6
    for part in (
        *("Why the step takes as long", "What to change", "One step", "Rank by rank"),
        *("The critical path", "Communication", "Operators", "Memory of the heaviest rank"),
        *("dp 2: a step takes 100 ms", "aten::mm", "all_reduce", "Measured: a peak of 600 MB."),
        "Rank 1 is",
    ):
        assert part in page.text


def test_the_waterfall_is_the_step_whole(report):
    """Each bar begins where the one before it ended, the last one ends with the step."""
    text = report.read_text()
    bars = re.findall(r'<i style="left:([\d.]+)%;width:([\d.]+)%', text)
    ends = [float(left) + float(width) for left, width in bars]
    for (left, _), end in zip(bars[1:], ends[:-1], strict=True):
        assert float(left) == pytest.approx(end, abs=0.02)
    assert ends[-1] == pytest.approx(100, abs=0.05)


def test_the_step_at_the_peak_and_the_planned_one_stand_beside_the_measured():
    rows = (WaterfallRow("matmul", 0.06, 0.05), WaterfallRow("host_gap", 0.04, 0.0))
    fall = Waterfall(0.1, 0.03, rows, 0.05, (0.045, 0.06))
    told = waterfall_bars(fall)
    peak, matmul, gap = told.rows
    assert (peak.swatch.name, peak.length, peak.figures) == ("at the peak", 0.3, ("30.0",))
    assert (matmul.length, matmul.below) == (0.6, (0.0, 0.5))
    assert (matmul.figures, matmul.mood) == (("60.0", "50.0", "+10.0"), "over")
    assert (gap.start, gap.below, gap.mood) == (0.6, None, "over")
    assert told.total == ("whole step", "100.0", "50.0", "+50.0")
    note = _waterfall_note(fall)
    assert "30.0% of the step (MFU)" in note
    assert "expected 45 ms to 60 ms" in note


def test_a_damaged_trace_costs_the_explanation_not_the_report(tmp_path):
    made = run(tmp_path / "made", 100.0)
    (made.trace_folder / "rank1-step4.json.gz").write_bytes(b"cut")
    said: list[str] = []
    text = write_report(made, said.append).read_text()
    assert "does without an explanation" in said[0]
    assert "Why the step" not in text
    assert "The training loss went" in text


def test_a_comparison_tells_settings_step_and_result(beside):
    page = Page(beside.read_text())
    assert page.references == []
    assert beside.stat().st_size < 5e6
    for part in (
        "newer against older",
        "A step takes 100 ms instead of 125 ms, 20.0% less: beyond the noise of the two",
        "layout.micro_batch 4 8",
        "100 ms from 125 ms, -20.0% ± ",
        *("from 3.1, both after step 40", "whole step 125.0 100.0 -25.0", "Still there"),
    ):
        assert part in page.text


def test_a_run_against_itself_differs_by_nothing(tmp_path):
    same = Subject.of(run(tmp_path / "made", 100.0).path)
    text = Page(compared(same, same)).text
    assert "within the noise" in text
    assert "Nothing: both ran the same Job." in text


def test_the_command_writes_the_page_of_a_trace(tmp_path):
    (tmp_path / "trace.json").write_text(trace(0))
    done = paceline("explain", "trace.json", "--html", "page.html", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    text = Page((tmp_path / "page.html").read_text()).text
    for part in ("1 rank recorded", "2 steps", "operators of a CPU", "Overlapped"):
        assert part in text
    assert (tmp_path / "page.html").stat().st_size < 1e5  # no chart, no plotly


# ---- lanes ---------------------------------------------------------------------------------------


def test_a_cell_has_the_term_with_most_of_its_time():
    """A thousand short kernels become one strip; a gap wider than a cell stays one."""
    short = [
        Span("k", "matmul" if at % 4 else "other_kernels", 0, "device 7", at * 1.0, 1.0)
        for at in range(3000)
    ]
    late = Span("gemm", "matmul", 0, "device 7", 4000.0, 2000.0)
    reduce = Span("reduce", "exposed_comm.dp", 0, "device 9", 3000.0, 1000.0)
    found = lanes_of(Timeline.of([*short, late, reduce], [(0, 3, 0.0, 6000.0)]), 3, 1)
    assert found.length_s == pytest.approx(6e-3)
    compute, comm = found.lanes
    assert (compute.stream, comm.stream) == ("device 7", "device 9")
    strips = [(strip.start, strip.width, strip.term) for strip in compute.strips]
    assert strips == [(0, 0.5, "matmul"), (pytest.approx(2 / 3), pytest.approx(1 / 3), "matmul")]
    assert [(strip.start, strip.width) for strip in comm.strips] == [(0.5, pytest.approx(1 / 6))]
    assert sum(len(lane.strips) for lane in found.lanes) <= 2 * CELLS
    assert lanes_of(Timeline.of([late], [(0, 3, 0.0, 6000.0)]), 4, 1) is None


def test_each_trace_is_of_the_rank_that_its_name_says(tmp_path):
    """In order of names, rank 10 stands before rank 2."""
    for rank, late_us in ((2, 0), (10, 20_000)):
        (tmp_path / f"rank{rank}-step4.json").write_text(trace(late_us))
    read = read_account(tmp_path)
    found = read_lanes(trace_files(tmp_path), read)
    products = {
        lane.rank: sum(strip.width for strip in lane.strips if strip.term == "matmul")
        for lane in found.lanes
        if lane.stream == "main"
    }
    assert list(products) == [2, 10]
    assert products[10] - products[2] == pytest.approx(0.2, abs=3 / CELLS)


def test_lanes_stand_on_one_clock_and_large_traces_are_left_out(tmp_path, monkeypatch):
    files = []
    for rank in range(2):
        files.append(tmp_path / f"rank{rank}-step4.json")
        files[-1].write_text(trace(0))
    read = read_account(tmp_path)
    shifted = Account(
        **vars(read) | {"clocks": {0: ClockOffset(0, 0), 1: ClockOffset(20_000_000, 0)}}
    )
    found = read_lanes(files, shifted)
    assert found.length_s == pytest.approx(0.12)
    begins = {
        lane.rank: max(strip.start for strip in lane.strips if strip.term == "optimizer")
        for lane in found.lanes
        if lane.stream == "main"
    }
    assert begins[1] - begins[0] == pytest.approx(20 / 120, abs=1 / CELLS)
    monkeypatch.setattr(lanes, "_MOST_BYTES", 100)
    assert read_lanes(files, read) is None


# ---- noise ---------------------------------------------------------------------------------------


def drifting(level: float, seed: int, memory: float) -> list[float]:
    """Forty steps of which each is partly as the one before: an autoregression."""
    rng, drift, values = random.Random(seed), 0.0, []
    for _ in range(80):
        drift = memory * drift + rng.gauss(0, 0.02)
        values.append(level + drift)
    return values[40:]


def clear(levels: tuple[float, float], memory: float) -> float:
    """The part of 200 pairs of runs whose difference passes for a real one."""
    pairs = [
        (drifting(levels[0], seed, memory), drifting(levels[1], 1000 + seed, memory))
        for seed in range(200)
    ]
    found = [MetricChange(Estimate.of(one), Estimate.of(other)).is_clear for one, other in pairs]
    return sum(map(bool, found)) / len(found)


def test_runs_without_a_difference_differ_by_noise_and_others_by_more():
    """Single steps' spread over the root of their number calls six in ten of the last different."""
    assert clear((1.0, 1.0), 0.0) < 0.07
    assert clear((1.0, 1.0), 0.5) < 0.1
    assert clear((1.0, 1.0), 0.9) < 0.25  # a third, with stretches of four steps
    assert clear((1.0, 0.75), 0.5) > 0.97


def test_few_steps_tell_no_noise():
    change = MetricChange(Estimate.of([1.0, 1.1, 0.9]), Estimate.of([2.0] * 50))
    assert (change.difference, change.doubt, change.is_clear) == (1.0, None, None)
    assert "too few steps" in comparison.lede(change)


# ---- in a browser --------------------------------------------------------------------------------

WIDTHS = (420, 1400)
FRAMES = """<body>{frames}<script>
addEventListener("load", () => {{
  for (const frame of document.querySelectorAll("iframe")) {{
    const root = frame.contentDocument.documentElement;
    const charts = frame.contentDocument.querySelectorAll(".main-svg").length;
    const strips = frame.contentDocument.querySelectorAll(".lanes rect").length;
    document.body.append(`[${{frame.width}} ${{root.scrollWidth}} ${{charts}} ${{strips}}]`);
  }}
}});
</script></body>"""


@pytest.mark.parametrize("name", ["report", "beside"])
def test_a_browser_shows_it_without_errors_at_any_width(name, request, browser, tmp_path):
    page = request.getfixturevalue(name)
    frames = "".join(
        f'<iframe src="{page.as_uri()}" width="{width}" height="900"></iframe>' for width in WIDTHS
    )
    (tmp_path / "frames.html").write_text(FRAMES.format(frames=frames))
    done = browser(tmp_path / "frames.html", "--dump-dom", "--allow-file-access-from-files")
    assert [each for each in done.stderr.splitlines() if "CONSOLE" in each] == []
    seen = [
        tuple(map(int, each)) for each in re.findall(r"\[(\d+) (\d+) (\d+) (\d+)\]", done.stdout)
    ]
    assert [width for width, *_ in seen] == list(WIDTHS)
    for width, scrolls, charts, strips in seen:
        assert scrolls <= width  # nothing sticks out
        assert charts >= 3
        assert strips > 10 or name == "beside"
