"""What all pages share: the frame, their parts, and links to the pages of other commands."""

import json
import re
from pathlib import Path

import pytest
from markupsafe import escape

import paceline
from paceline.observe import report
from paceline.observe.run import Run
from paceline.render.charts import NOTHING, Chart, curve, plot
from paceline.render.page import Page, pages_near
from paceline.render.parts import (
    Details,
    Legend,
    Pair,
    Section,
    Steps,
    Strips,
    Swatch,
    Whole,
    Wholes,
)
from paceline.render.table import Bullets, Pairs, Table
from tests.observe import synthetic


def write(file: Path, name: str = "A page", *parts: Section) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    page = Page(name, "`paceline train <x>` & look.", ["a test"], "It is so.", (), parts, file)
    file.write_text(page.html())
    return file


def test_what_to_do_next_stands_first_below_the_name(tmp_path):
    page = write(tmp_path / "runs" / "a" / "report.html").read_text()
    body = page[page.index("<h1>") :]
    following = re.search(r"</h1>\s*(<p.*?</p>)", body)[1]
    assert following == (
        '<p class="next"><b>Next:</b> <code>paceline train &lt;x&gt;</code> &amp; look.</p>'
    )


def test_pages_link_to_those_of_other_commands(tmp_path):
    run = write(tmp_path / "runs" / "demo" / "report.html", "demo")
    other = write(tmp_path / "runs" / "a b" / "report.html", "a b")
    plan = write(tmp_path / "plans" / "big" / "plan.html", "Plan of big")
    links = write(tmp_path / "links.html", "The links & more")
    heat = write(tmp_path / "tunes" / "my" / "heats" / "0" / "report.html", "heat")
    tune = write(tmp_path / "tunes" / "my" / "tune.html", "Tuning of my")
    (tmp_path / "runs" / "demo" / "else.html").write_text("<title>No page of ours</title>")
    near = dict(pages_near(run))
    assert set(near) == {"Run a b", "Plan of big", "The links & more", "Tuning of my"}
    for page, place in ((other, "Run a b"), (plan, "Plan of big"), (links, "The links & more")):
        assert (run.parent / near[place].replace("%20", " ")).resolve() == page.resolve()
    # From a page in the folder of the commands, such as bench's, down to those of each run.
    beneath = dict(pages_near(links))
    for page, name in ((run, "Run demo"), (plan, "Plan of big"), (tune, "Tuning of my")):
        assert (links.parent / beneath[name].replace("%20", " ")).resolve() == page.resolve()
    assert dict(pages_near(tune))["Run heat"] == "heats/0/report.html"
    assert dict(pages_near(heat))["Tuning of my"] == "../../tune.html"
    assert 'href="../a%20b/report.html"' in write(run, "demo").read_text()


def test_no_room_but_one_writes_html():
    folder = Path(paceline.__file__).parent
    assert {file.parent.name for file in folder.rglob("*.html")} == {"render"}
    for file in folder.rglob("*.py"):
        assert not re.search(r"</?(div|table|section|li|span)\b", file.read_text()), file


def test_cells_are_text_figures_or_code():
    """Of a table, whose foot is a row like the others, and of pairs."""
    rows, foot = [("<x>", 1, "y")], ("all", 2, "")
    text = escape(Table(("a", "b", "c"), rows, words=(0, 2), codes=(2,), foot=foot))
    assert '<th>a</th><th class="n">b</th><th>c</th>' in text
    assert (
        '<tr><td class="value">&lt;x&gt;</td><td class="n">1</td>'
        '<td class="value"><code>y</code></td></tr>'
    ) in text
    assert '<tfoot><tr><td class="value">all</td><td class="n">2</td>' in text
    assert "<tfoot>" not in escape(Table(("a",), [("x",)]))
    told = escape(Pairs([("k", "v & w")], codes=(0,)))
    assert '<td class="key"><code>k</code></td><td class="value">v &amp; w</td>' in told


def test_what_has_nothing_to_show_is_left_out_with_its_head_line(tmp_path):
    empty = (
        *(
            Table(("a",), []),
            Pairs([]),
            Bullets([]),
            Chart("x", NOTHING),
        ),
        *(Legend([]), Whole([]), Wholes([]), Steps(("ms",), [], ("whole", "0")), Strips([], 1, "")),
    )
    nothing = Section("Nothing here", *empty, Pair(*empty), Details("Nothing there", empty[0]))
    assert not nothing
    some = Section("Something", empty[0], Swatch("matmul", "#2b6cb0"), note="See `this`.")
    page = write(tmp_path / "a.html", "A page", nothing, some).read_text()
    assert "Nothing" not in page
    assert "<h2>Something</h2>" in page
    assert '<p class="note">See <code>this</code>.</p>' in page
    assert "plotly" not in page.partition("</style>")[2]


def test_charts_are_found_wherever_they_stand(tmp_path):
    drawn = plot([curve("line", [1, 2], [0.123456789, None])], "across", {"title": "up"})
    inner = Pair(Chart("a", drawn, "low", "Small"), Chart("none", NOTHING))
    page = write(tmp_path / "a.html", "A page", Section("Two", inner, Chart("b", drawn)))
    text = page.read_text()
    found = json.loads(re.search(r'id="charts">(.*?)</script>', text)[1])
    assert set(found) == set(re.findall(r'id="chart-(\w+)"', text)) == {"a", "b"}
    assert found["a"]["data"][0]["y"] == [0.123457, None]
    assert found["a"]["layout"]["yaxis"]["title"]["text"] == "up"


def test_a_number_that_is_not_finite_never_reaches_a_page(tmp_path):
    drawn = {"data": [{"y": [float("nan")]}], "layout": {}}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(tmp_path / "a.html", "A page", Section("Bad", Chart("a", drawn)))


def test_every_page_says_what_to_do_next(tmp_path):
    """A run's report without an explanation: go on, else explain it."""
    run = synthetic.run(tmp_path / "r", synthetic.lines(3), {}, num_steps=9)
    assert isinstance(run, Run)
    assert f"<code>paceline train {run.path}</code> goes on to step 9." in report.render(run)


def test_a_report_asks_for_no_profile_where_there_is_one(tmp_path):
    run = synthetic.run(tmp_path / "r", synthetic.lines(3, profile_every=0), {}, num_steps=3)
    assert "observe.profile_every" in report.render(run)
    run.trace_folder.mkdir()
    (run.trace_folder / "rank0-step2.json.gz").touch()
    assert "observe.profile_every" not in report.render(run).partition("<h2>The Job")[0]
    assert "Profiled steps are in" in report.render(run)
