"""What all pages share: what to do next, and links to the pages of other commands that are near."""

import re
from pathlib import Path

import paceline
from paceline.observe.page import _template, pages_near, render_page
from paceline.observe.run import Run


def write(file: Path, name: str = "A page") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = render_page(
        "paceline.explain",
        "trace.html",
        name=name,
        subtitle=["a test"],
        next_="`paceline train <x>` & look.",
        lede="It is so.",
        cards=[],
        charts={},
        at=file,
        why=WHY,
    )
    file.write_text(text)
    return file


class WHY:
    """Nothing to explain."""

    out_of_memory = fall = lanes = ranks = None
    unexplained = findings = notes = flows = kernels = memory = ()


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


def test_tables_lists_and_places_of_charts_are_written_in_one_file():
    """But for the table of terms, which has their colours, and small charts that stand in pairs."""
    folder = Path(paceline.__file__).parent
    texts = {file.name: file.read_text() for file in folder.rglob("*.html")}
    assert len(texts) > 8
    assert {name for name, text in texts.items() if "<table" in text} == {
        *("pieces.html", "report.html")
    }
    for text in (text for name, text in texts.items() if name != "pieces.html"):
        assert text.count("<table") <= 1
        assert "<li>{{ sentence }}" not in text
        assert not re.search(
            r'<section>\s*<h2>[^<]*</h2>\s*(<p[^\n]*</p>\s*)?<div class="chart', text
        )


def test_cells_are_text_figures_or_code():
    """Of a table, whose foot is a row like the others, and of pairs."""
    pieces = _template("paceline.observe", "pieces.html").module
    table, pairs = pieces.table, pieces.pairs
    text = table(["a", "b", "c"], [("<x>", 1, "y")], (1, 3), (3,), ("all", 2, ""))
    assert '<th>a</th><th class="n">b</th><th>c</th>' in text
    assert (
        '<tr><td class="value">&lt;x&gt;</td><td class="n">1</td>'
        '<td class="value"><code>y</code></td></tr>'
    ) in text
    assert '<tfoot><tr><td class="value">all</td><td class="n">2</td>' in text
    assert "<tfoot>" not in table(["a"], [("x",)])
    told = pairs([("k", "v & w")], (1,))
    assert '<td class="key"><code>k</code></td><td class="value">v &amp; w</td>' in told


def test_every_page_says_what_to_do_next(tmp_path):
    """A run's report without an explanation: go on, else explain it."""
    from paceline.observe import report
    from tests.observe import synthetic

    run = synthetic.run(tmp_path / "r", synthetic.lines(3), {}, num_steps=9)
    assert isinstance(run, Run)
    assert f"<code>paceline train {run.path}</code> goes on to step 9." in report.render(run)


def test_a_report_asks_for_no_profile_where_there_is_one(tmp_path):
    from paceline.observe import report
    from tests.observe import synthetic

    run = synthetic.run(tmp_path / "r", synthetic.lines(3, profile_every=0), {}, num_steps=3)
    assert "observe.profile_every" in report.render(run)
    run.trace_folder.mkdir()
    (run.trace_folder / "rank0-step2.json.gz").touch()
    assert "observe.profile_every" not in report.render(run).partition("<h2>The Job")[0]
    assert "Profiled steps are in" in report.render(run)
