"""What `make docs` puts on the site besides docs/: README, linked files, the reference.

Links of the pages are those of a checkout. On the site each leads to the page that was made of the
file it names: of Markdown as it is, of code as a listing. Other files are copied, and a folder
that has no README.md is named without a link.
"""

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "src")]

from make_jobs_page import SECTIONS  # noqa: E402

import paceline  # noqa: E402
from paceline.config.job import JobSpec  # noqa: E402

PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "recipes/README.md")
DECISIONS = "decisions/README.md"
BENCHMARKS = ("benchmarks/README.md", "benchmarks/planner.md")
LANGUAGES = {".py": "python", ".toml": "toml"}
_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> None:
    """Give the index of decisions a place in the navigation, where there is one."""
    if (ROOT / "docs" / DECISIONS).is_file():
        config.nav.append({"Decisions": DECISIONS})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add what lies outside docs/ and is linked, and the reference."""
    docs = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for path in sorted(_reached([*PAGES, *BENCHMARKS, *docs])):
        if not path.startswith("docs/"):
            files.append(_file(path, config))
    files.append(File.generated(config, "api.md", content=reference()))


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let the links lead to the pages of the site."""
    here = page.file.src_uri
    path = f"docs/{here}" if (ROOT / "docs" / here).is_file() else here

    def moved(found: re.Match[str]) -> str:
        text, link, anchor = found[1], found[2], found[3] or ""
        target = _target(path, link)
        if target is None:
            return text if (ROOT / posixpath.dirname(path) / link).is_dir() else found[0]
        return f"[{text}]({posixpath.relpath(_home(target), posixpath.dirname(here))}{anchor})"

    # Beside a table these marks of the generators would be rows of it.
    return _LINK.sub(moved, re.sub(r"^<!-- .* -->\n", "", markdown, flags=re.M))


def reference() -> str:
    """The page of the public Python surface: its identifiers, which mkdocstrings describes."""
    first = sorted(paceline._HOMES, key=lambda name: not name.islower())  # functions before classes
    names = "".join(f"\n::: {paceline._HOMES[name]}.{name}\n" for name in first)
    sections = "".join(
        f"\n::: {noun.__module__}.{noun.__qualname__}\n"
        for noun in dict.fromkeys(SECTIONS.values())
        if noun.__name__ not in paceline.__all__
    )
    base = JobSpec.__mro__[1]  # has what all of them can do
    return (
        "# Python\n\n`import paceline` costs nothing: names are loaded when first used.\n\n"
        f"## What `paceline` has\n{names}\n## The sections of a Job\n\n"
        "A JobSpec is made of a dict, `JobSpec.parse({...})`, or of a job.toml. "
        "[Every setting](jobs.md) has the same as one table.\n"
        f"\n::: {base.__module__}.{base.__qualname__}\n{sections}"
        "\n## Traces\n\n::: paceline.observe.account.Account\n"
    )


def _reached(paths: list[str]) -> set[str]:
    """Files that the pages link to, directly or through pages."""
    found: set[str] = set()
    waiting = list(paths)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _linked(path) if path.endswith(".md") else ()
    return found


def _linked(path: str) -> Iterator[str]:
    for _, link, _ in _LINK.findall((ROOT / path).read_text()):
        target = _target(path, link)
        if target is not None:
            yield target


def _target(path: str, link: str) -> str | None:
    """The file of the repository that a link on a page leads to; None where there is none."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if (ROOT / target).is_dir():
        target = posixpath.join(target, "README.md")
    return target if (ROOT / target).is_file() else None


def _home(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{path}.md" if Path(path).suffix in LANGUAGES else path


def _file(path: str, config: MkDocsConfig) -> File:
    language = LANGUAGES.get(Path(path).suffix)
    if language is None:
        return File.generated(config, _home(path), abs_src_path=str(ROOT / path))
    code = (ROOT / path).read_text()
    listing = f"# {Path(path).name}\n\n`{path}`\n\n````{language}\n{code}````\n"
    return File.generated(config, _home(path), content=listing)
