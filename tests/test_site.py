"""The documentation site: it builds without a warning, fetches nothing, and is searched as files.

Needs the extra `docs`: `make docs` brings it.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings_handlers")),
    reason="needs the extra docs (make docs)",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # Material's word to its users on what comes after MkDocs 1.
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def sections(site):
    """What can be searched: the text of each section, by its address."""
    text = (site / "search" / "search_index.json").read_text()
    return {each["location"]: each["text"] for each in json.loads(text)["docs"]}


def test_every_page_of_docs_is_there(site):
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").with_suffix(".html")
        made = site / (path.with_name("index.html") if page.stem == "README" else path)
        assert made.exists(), page


def test_the_first_page_is_the_readme(site):
    text = (site / "index.html").read_text()
    assert "What is not proved yet" in text
    assert 'src="report.png"' in text
    assert 'href="planning.html"' in text


def test_the_reference_has_the_public_names_and_their_docstrings(site, sections):
    text = (site / "api.html").read_text()
    for name, home in paceline._HOMES.items():
        assert f'id="{home}.{name}"' in text, name
    reference = " ".join(text for at, text in sections.items() if at.startswith("api.html"))
    assert "Train a module on every device of this machine" in reference
    assert "Put the weights of a Run's newest good checkpoint into a module" in reference
    assert "ranks that share each layer" in " ".join(sections.values())


def test_recipes_are_shown_whole(site):
    text = (site / "recipes" / "own_model.py.html").read_text()
    assert "load_digits" in re.sub("<[^>]*>", "", text)


def test_no_page_fetches_anything_from_elsewhere(site):
    fetched = re.compile(
        r"<(?:script|link|img|iframe|source)[^>]*?(?:src|href)=\"?((?:https?:)?//[^\" >]+)"
    )
    for page in site.rglob("*.html"):
        found = [each for each in fetched.findall(page.read_text()) if "rel=canonical" not in each]
        assert found == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_links_of_the_built_pages_lead_somewhere(site):
    for page in {*site.rglob("*.html")} - {site / "404.html"}:
        for link in re.findall(r'<a [^>]*?href="(?!\w+:)([^"#?]+)', page.read_text()):
            assert (page.parent / link).exists(), f"{page.relative_to(site)}: {link}"


def test_search_answers_where_pages_are_opened_as_files(site, browser):
    answer = browser(site / "index.html", "--dump-dom", query="?q=rotary")
    assert "ERR_" not in answer.stderr
    found = re.findall(
        r'<a href="[^"]*?([\w./-]+\.html)[^"]*" class="md-search-result__link"', answer.stdout
    )
    assert found, "no result"
