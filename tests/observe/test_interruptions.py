"""The report of an elastic run: its strip of generations as data, the page, then in a browser."""

import json
import re

import pytest

from paceline.observe.generations import generations, kept_steps
from paceline.observe.interruptions import section, strip
from paceline.observe.report import render
from tests.observe import interrupted, synthetic
from tests.observe.test_report import Page


def summary(made):
    return generations(made.events, kept_steps(made.lines))


def test_the_strip_has_every_generation_at_its_place_and_losses_on_top():
    found = summary(interrupted.started_again(interrupted.simulated()))
    drawn = strip(found)
    json.dumps(drawn, allow_nan=False)
    nodes, spares, losses, slow = drawn["data"]
    assert nodes["y"] == [4, 4, 4, 3, 4, 2]
    assert spares["y"] == [1, 1, 0, 0, 0, 0]
    # Minutes; the hour between the starts takes no room, and a line stands there instead.
    assert sum(nodes["width"]) == pytest.approx(found.run_s / 60)
    ends = [x + width / 2 for x, width in zip(nodes["x"], nodes["width"], strict=True)]
    starts = [x - width / 2 for x, width in zip(nodes["x"], nodes["width"], strict=True)]
    assert starts == pytest.approx([0.0, *ends[:-1]], abs=1e-6)
    (line,) = drawn["layout"]["shapes"]
    assert line["x0"] == pytest.approx(starts[-1])
    assert drawn["layout"]["xaxis"]["title"]["text"] == "minutes of the run"
    assert len(losses["x"]) == 3
    assert starts[0] < losses["x"][0] < ends[0]
    assert "killed (SIGKILL) in the backward pass" in losses["hovertext"][0]
    assert "generation 3" in nodes["hovertext"][2]
    assert "steps 158 to 278" in nodes["hovertext"][2]
    assert len(slow["x"]) == 1


def test_what_an_event_says_is_no_html_in_the_strip():
    made = interrupted.simulated()
    for event in made.events:
        for key in ("sentence", "reason", "layout"):
            if key in event:
                event[key] = '<a href="http://example.org">x</a>'
    text = json.dumps(strip(summary(made)))
    assert "&lt;a" in text
    assert "<a" not in text


def test_a_run_whose_first_generation_was_just_claimed_has_a_page(tmp_path):
    made = interrupted.simulated()
    made.events, made.lines = made.events[:3], []
    text = Page(render(interrupted.write(tmp_path, made))).text
    assert "Interruptions: none." in text


def test_many_recoveries_are_cut_to_the_last_ones(tmp_path):
    made = interrupted.simulated()
    made.events.pop()
    for at in range(60):
        lost = {"node": "n1", "rank": 3, "class": "dead", "sentence": f"rank 3 died, {at}."}
        at_s = made.lose(0.1, 0.02, 0, **lost)
        made.decide("replace")
        made.claim(["n0", "n1"], 2, f"rank 3 died, {at}.")
        made.recover("live", 0, at_s, notice=0.02)
    text = Page(render(interrupted.write(tmp_path, made))).text
    assert "The last 40 of 64 recoveries are listed." in text
    assert "rank 3 died, 20." in text
    assert "rank 3 died, 19." not in text
    assert "63 (62 dead, 1 vanished)" in text


def test_a_run_without_events_has_no_such_section(tmp_path):
    assert not section(None)
    text = Page(render(synthetic.run(tmp_path, synthetic.lines(20)))).text
    assert "Interruptions" not in text
    assert "Goodput" not in text


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    made = interrupted.started_again(interrupted.simulated())
    run = interrupted.write(tmp_path_factory.mktemp("runs") / "demo", made)
    return run.write("report.html", render(run))


def test_the_page_says_what_it_cost_and_lists_each_recovery(page):
    text = Page(page.read_text()).text
    for part in (
        "Interruptions: 3 (2 dead, 1 vanished), goodput 72.7%. With the 1 h 00 min between its "
        "starts, the effective training time ratio is 4.4%.",
        "Goodput 72.7% 3 interruptions",
        "kept 72.7% between steps 2.8% start 3.3% recomputed 0.8% notice and decide 1.0% waiting "
        "for nodes 18.1% connect, build, restore 1.3%",
        "3 n1 has not answered for 2.0 s: it trained ranks 2 and 3. buddy 3 2 s 20 ms – – 50 ms "
        "300 ms 150 ms 930 ms",
    ):
        assert part in text


def test_a_browser_draws_the_strip_without_an_error(page, browser):
    done = browser(page, "--dump-dom")
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    dom = done.stdout[done.stdout.index("<body") :]
    drawn = re.search(r'id="chart-generations"(.*?)(?=id="chart-|</main>)', dom, re.DOTALL)[1]
    bars = drawn.split('class="trace bars"')[1:]
    points = [len(re.findall('class="point"', each)) for each in bars]
    assert points[0] == 6
    assert len(re.findall('<path class="point"', drawn.split("scatterlayer")[1])) == 4
    for layout in ("fsdp=8", "fsdp=4"):
        assert layout in drawn
