"""The report: its charts as data (pure), the page as text, then in a browser where there is one."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
from PIL import Image

from paceline.observe import summary
from paceline.observe.charts import charts
from paceline.observe.report import render
from paceline.observe.terms import colour
from tests.observe import synthetic

CHARTS = ["loss", "terms", "rate", "memory", "lr", "grad_norm"]
NOT_EVERYWHERE = ["latency", "backlog", "parts", "noise"]


def test_charts_hold_no_number_that_is_not_json():
    lines = synthetic.lines(50)
    lines[10] |= {"loss": math.nan, "grad_norm": math.inf}
    drawn = charts(lines, summary.summarise(lines, synthetic.FACTS))
    assert list(drawn) == [*CHARTS, *NOT_EVERYWHERE]
    assert not any(drawn[name]["data"] for name in NOT_EVERYWHERE)
    assert [trace["name"] for trace in drawn["loss"]["data"]] == [
        *("training", "training, smoothed", "held out", "unigram bound", "not finite")
    ]
    assert drawn["loss"]["data"][-1]["x"] == [11]
    json.dumps(drawn, allow_nan=False)


def test_each_source_of_a_mixture_has_a_curve():
    lines = synthetic.lines(20)
    for line in lines[:15]:
        line["figures"] = {"loss.words": 2.0, "loss.sums": 1.0, "acc": 0.5}
    traces = charts(lines, summary.summarise(lines, {}))["parts"]["data"]
    assert [trace["name"] for trace in traces] == ["words", "sums"]
    assert traces[1]["y"] == [1.0] * 15 + [None] * 5


def test_long_runs_are_averaged_into_few_bars():
    lines = synthetic.lines(1000, profile_every=10)
    bars = charts(lines, summary.summarise(lines, {}))["terms"]["data"]
    assert len(bars[0]["x"]) <= 40
    assert bars[0]["x"][0] == "10"
    assert [bar["name"] for bar in bars] == list(summary.step_time(lines).terms_s)
    assert bars[0]["marker"]["color"] == colour("matmul")


class Page(HTMLParser):
    """References to anything outside the page, and its text without scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.references, self.words, self._tag = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._tag = tag
        self.references += [f"{tag} {k}={v}" for k, v in attrs if k in ("src", "href", "action")]

    def handle_data(self, data):
        if self._tag == "style":
            self.references += re.findall(r"@import|url\([^)]*\)", data)
        elif self._tag != "script":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    run = synthetic.run(tmp_path_factory.mktemp("runs") / "demo", synthetic.lines(240))
    return run.write("report.html", render(run))


def test_the_page_is_complete_and_refers_to_nothing_outside(demo):
    page = Page(demo.read_text())
    assert demo.name == "report.html"
    assert page.references == []
    assert "default-src 'none'" in demo.read_text()
    for part in (
        "from 8.261 to 3.623 in 240 steps. On held-out data it is 3.713, where a model of token "
        "frequencies alone can't get below 6.31.",
        *("perplexity 40.96", "9,893", "810 MB", "peak unknown", "414 ms"),
        *("Mean of 7 profiled steps", "exposed_comm.dp", "100.0%"),
        *("[train] steps = 240", "layout.micro_batch 8 the largest divisor"),
        *("the safest fast arithmetic of <this CPU> & no other", "2025-11-20 09:13 UTC"),
    ):
        assert part in page.text


def page_of(path, lines, facts=None, num_steps=None):
    text = render(synthetic.run(path, lines, facts, num_steps))
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text)
    drawn = json.loads(found[1], parse_constant=pytest.fail) if found else {}
    # Every chart has its place on the page, and no place stays empty.
    assert set(re.findall(r'id="chart-(\w+)"', text)) == drawn.keys()
    return Page(text).text, drawn


def test_a_run_before_its_first_step(tmp_path):
    text, drawn = page_of(tmp_path, [], num_steps=240)
    assert "No step has finished yet." in text
    assert "Xeon" in text
    assert drawn == {}


def test_a_run_of_one_step(tmp_path):
    text, drawn = page_of(tmp_path, synthetic.lines(1), num_steps=240)
    assert "The training loss is 3.591 in 1 of 240 steps." in text
    assert "3.591 in 1 step." in page_of(tmp_path / "whole", synthetic.lines(1))[0]
    assert drawn["loss"]["data"][0]["mode"] == "lines+markers"


def test_a_run_without_a_finite_loss(tmp_path):
    lines = [{**line, "loss": None, "grad_norm": None} for line in synthetic.lines(5)]
    for line in lines:
        line.pop("eval_loss", None)
    text, drawn = page_of(tmp_path, lines, {})
    assert "No loss of the 5 steps is a finite number." in text
    assert [trace["name"] for trace in drawn["loss"]["data"]] == ["not finite"]
    assert "grad_norm" not in drawn


def test_a_custom_model_without_profile_or_data(tmp_path):
    facts = {"unit": "samples", "device": "H100", "num_ranks": 1, "extra": {"key": "<b>"}}
    lines = synthetic.lines(60, 0, "samples")
    for line in lines:
        line["mfu"] = 0.431
    text, _ = page_of(tmp_path, lines, facts)
    for part in ("Samples a second", "43.1%", "1 rank", "none of them profiled", "extra.key <b>"):
        assert part in text
    assert "unigram" not in text.lower()
    assert "perplexity" not in text


def test_a_run_with_nothing_but_steps(tmp_path):
    run = synthetic.run(tmp_path, [{"step": 1}, {"step": 2, "loss": 3.0}], {})
    for name in ("job.toml", "plan.json", "facts.json"):
        (tmp_path / name).unlink()
    assert "The training loss went from 3 to 3 in 2 steps." in Page(render(run)).text


def test_a_browser_draws_every_chart_without_an_error(demo, browser):
    done = browser(demo, "--dump-dom")
    # What a page prints to its console, errors and blocked requests among it.
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    dom = done.stdout[done.stdout.index("<body") :]
    parts = dict(re.findall(r'id="chart-(\w+)"(.*?)(?=id="chart-|</main>)', dom, re.DOTALL))
    assert list(parts) == CHARTS
    traces = {name: len(re.findall('class="trace (?:scatter|bars)', parts[name])) for name in parts}
    assert all('class="main-svg"' in part for part in parts.values())
    assert traces == {"loss": 4, "terms": 8, "rate": 2, "memory": 1, "lr": 1, "grad_norm": 2}
    drawn_lines = re.findall(r'class="js-line"[^>]* d="M[^"]+L', parts["loss"])
    assert len(drawn_lines) == 4


def colours(picture):
    with Image.open(picture) as image:
        counts = image.convert("RGB").getcolors(maxcolors=1 << 24)
    return [colour for _, colour in sorted(counts, reverse=True)]


def test_the_picture_follows_the_dark_colour_scheme(demo, browser, tmp_path):
    dark = "--blink-settings=preferredColorScheme=0"
    browser(demo, f"--screenshot={tmp_path / 'page.png'}", dark)
    found = colours(tmp_path / "page.png")
    assert found[0] == (19, 22, 26)  # (251, 251, 249) where nothing else is preferred
    matmul = tuple(bytes.fromhex(colour("matmul")[1:]))
    assert matmul in found[:20]  # the bars of the charts were painted
    assert len(found) > 100
