"""The planner's page: complete, self-contained, and with the answer's own figures (pure)."""

import html
import json
import re
from dataclasses import replace

import pytest

from paceline.config.stack import Stack
from paceline.plan.answer.answer import to_json
from paceline.plan.answer.describe import headline
from paceline.plan.answer.find import answer
from paceline.plan.answer.page import render
from tests.plan.answers import IMAGES, cramped, job, small_answer


@pytest.fixture(scope="module")
def page() -> str:
    return render(small_answer())


def _charts(page: str) -> dict:
    return json.loads(re.search(r'id="charts">(.*?)</script>', page, flags=re.S)[1])


def _text(page: str) -> str:
    """What a reader sees: without scripts."""
    return re.sub(r"<script.*?</script>", "", page, flags=re.S)


def test_the_page_loads_nothing_from_elsewhere(page):
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert not re.search(r"""(?:src|href)\s*=\s*["']?http""", _text(page))
    assert "{{" not in _text(page)


def test_every_chart_has_its_place(page):
    charts = _charts(page)
    assert {"time", "memory", "front"} <= set(charts)
    for name in charts:
        assert f'id="chart-{name}"' in page


def test_bars_add_up_to_the_figures(page):
    found, charts = small_answer(), _charts(page)
    factor = 1.0 if found.best.step_s >= 1 else 1e3
    time = sum(trace["x"][0] for trace in charts["time"]["data"])
    memory = sum(trace["x"][0] for trace in charts["memory"]["data"])
    assert time == pytest.approx(factor * found.best.step_s, rel=1e-4)
    assert memory == pytest.approx(found.best.peak_memory_bytes / 1e9, rel=1e-4)
    (line,) = charts["memory"]["layout"]["shapes"]
    assert line["x0"] == pytest.approx(found.limit_bytes / 1e9)


def test_the_page_says_what_the_terminal_says(page):
    found, text = small_answer(), _text(page)
    assert found.best.layout.summary in text
    for sentence in (found.binding.text, found.margin.text):
        assert sentence in text
    for name in found.best.assumptions:
        assert f"<code>{name}</code>" in text


def test_every_answer_says_whose_runtime_is_priced():
    """Terminal, JSON and page: ours, or one that the cluster describes."""
    own = small_answer()
    described = own.job.cluster.replace(stack=Stack(overlaps_ep=True, constants={"launch_us": 9.0}))
    other = replace(own, job=own.job.replace(cluster=described))
    for found, whose in (
        (own, "Paceline's own runtime"),
        (other, "a runtime with overlaps_ep = true (cluster.stack)"),
    ):
        assert headline(found).endswith(f"run by {whose}")
        assert to_json(found)["runtime"]["whose"] == whose
        assert f"run by {whose}" in html.unescape(_text(render(found)))
    assert to_json(other)["runtime"]["features"] == {"overlaps_ep": True}


def test_nothing_fits_has_a_page_too():
    page = render(answer(job(on=cramped())))
    assert "Nothing fits" in page
    assert set(_charts(page)) == {"memory"}
    assert "What decides" not in page


def test_images_are_told_apart_by_their_micro_batch():
    page = render(answer(job(IMAGES)))
    assert "Images a second" in page
    labels = _charts(page)["time"]["data"][0]["y"]
    assert len(set(labels)) == len(labels)
    assert all("micro-batch" in label for label in labels)


def test_names_are_escaped():
    found = small_answer()
    cluster = found.job.cluster
    hostile = cluster.replace(device=cluster.device.replace(name="<script>alert(1)</script>"))
    page = render(replace(found, job=found.job.replace(cluster=hostile)))
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert(1)" not in page
