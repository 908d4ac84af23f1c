"""What the pages name exists: links, paths, dotted names, settings, make targets and commands.

Source is searched as text and as syntax trees: nothing is imported but the settings and the
command line.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from typer.main import get_command

import paceline
from paceline.cli import app
from paceline.config.job import Job
from paceline.config.serving import EndpointSettings

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "paceline"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "recipes" / "README.md",
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = {".ci", ".github", "benchmarks", "docs", "recipes", "src", "tests", "tools"}
ROOMS = {path.name for path in SOURCE.iterdir() if path.is_dir()}
FILES = {"json", "jsonl", "toml", "html", "md", "csv", "gz", "yml", "yaml", "log", "txt"}
# Options of other programs, and what looks like a setting or a class of ours and is torch's.
NOT_OURS = {
    *("--rdzv-backend", "--standalone", "--distribution"),
    *("model.training", "Optimizer.load_state_dict", "Work.wait"),
}

_PATH = re.compile(r"(?<![\w./~$<>*-])[\w.<>*-]+(?:(?:/[\w.<>*-]+)+/?(?:::\w+)?|/(?!\w))")
_DOTTED = re.compile(r"(?<![\w./-])[a-z_]\w*(?:\.\w+)+(?![\w/])")
_VARIABLE = re.compile(r"\bPACELINE_\w+")


# ---- what a page names --------------------------------------------------------------------------


def unknown(text: str, folder: Path) -> set[str]:
    """The names in a page that stand for nothing.

    Args:
        text: Markdown.
        folder: of the page; paths may be relative to it.
    """
    prose = re.sub(r"\]\([^)]*\)|https?://\S+", " ", text)
    paths = set(_PATH.findall(prose))
    found = {path for path in paths if not _is_path(path, folder)}
    folders = {at.parent if at.is_file() else at for at in _places(paths, folder)}
    for piece in _pieces(prose):
        if re.fullmatch(r"\w+\.py", piece) and not _is_in(piece, {folder, ROOT, SOURCE}, folders):
            found.add(piece)
        found |= {name for name in _VARIABLE.findall(piece) if name not in _variables()}
        found |= {name for name in _DOTTED.findall(piece) if not _is_name(name)}
        if re.fullmatch(r"[A-Z]\w+\.\w+", piece):
            owner, name = piece.split(".")
            found |= {piece} if name not in FILES and not _has_attribute(owner, name) else set()
        found |= {path for path in _PATH.findall(piece) if not _is_path_in_a_room(path)}
        found |= set(_unknown_of_command(piece))
    return found - NOT_OURS


def _pieces(text: str) -> Iterator[str]:
    """Code of a page: spans, lines of blocks, and of Python its imports only."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.S | re.M):
        if language == "python":
            for module, names in re.findall(r"^from (paceline\S*) import (.+)$", block, flags=re.M):
                yield from (f"{module}.{name.strip()}" for name in names.split(","))
        elif language in ("", "sh", "toml"):
            yield from map(str.strip, block.splitlines())
    rest = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    yield from (line.strip() for line in re.findall(r"^ {4}\S.*$", rest, flags=re.M))
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest))


# ---- paths --------------------------------------------------------------------------------------


def _places(paths: set[str], folder: Path) -> Iterator[Path]:
    for path in paths:
        for base in (ROOT, SOURCE, folder):
            yield from _matches(base, path)


def _matches(base: Path, path: str) -> list[Path]:
    """What `path` may stand for: `<device>` is any word, and a module needs no ending."""
    pattern = re.sub(r"<[^>]*>", "*", path.partition("::")[0].strip("/"))
    pattern = pattern.rstrip(".")
    return [at for each in (pattern, f"{pattern}.py") for at in base.glob(each)]


def _is_path(path: str, folder: Path) -> bool:
    first = path.partition("/")[0]
    if first in FOLDERS:
        bases = (ROOT,)
    elif path.partition("::")[0].endswith(".py"):
        bases = (ROOT, SOURCE, folder)
    else:
        return True  # of a person's machine, or no path at all
    found = [at for base in bases for at in _matches(base, path)]
    _, _, test = path.partition("::")
    return any(not test or f"def {test}(" in at.read_text() for at in found)


def _is_in(name: str, folders: set[Path], groups: set[Path]) -> bool:
    """Whether a file is in one of the folders, in a group, or in a folder of a group."""
    places = [*(at / name for at in folders | groups)]
    return any(at.exists() for at in places) or any(any(at.glob(f"*/{name}")) for at in groups)


def _is_path_in_a_room(path: str) -> bool:
    return path.partition("/")[0] not in ROOMS or bool(_matches(SOURCE, path))


# ---- dotted names -------------------------------------------------------------------------------


def _is_name(name: str) -> bool:
    """A module, what it defines, a range of the profiler, or a setting of a Job."""
    first, *rest = name.split(".")
    if first == "paceline":
        return name in _ranges() or rest[0] in paceline.__all__ or _is_defined(SOURCE, rest)
    if rest[-1] in FILES:
        return True
    if first == "benchmarks":
        return _is_defined(ROOT / first, rest)
    sections = {setting.partition(".")[0] for setting in _settings()}
    if first in ROOMS | sections:
        return name in _settings() or (first in ROOMS and _is_defined(SOURCE / first, rest))
    return True


@cache
def _text() -> dict[Path, str]:
    return {path: path.read_text() for path in SOURCE.rglob("*.py")}


@cache
def _ranges() -> set[str]:
    """Names that the source writes as strings; those of an axis up to it."""
    return {
        name.rstrip(".")
        for text in _text().values()
        for name in re.findall(r"\"(paceline\.[\w.]+)", text)
    }


@cache
def _variables() -> set[str]:
    return {name for text in _text().values() for name in _VARIABLE.findall(text)}


@cache
def _settings() -> set[str]:
    """Of a Job and of serving, and what stands in a Job's file in place of a model's shapes."""
    return {*_settings_of(Job, ""), *_settings_of(EndpointSettings, ""), "model.hf"}


def _settings_of(noun: type[BaseModel], prefix: str) -> Iterator[str]:
    for key, field in noun.model_fields.items():
        yield prefix + key
        for part in _parts(field.annotation):
            yield from _settings_of(part, f"{prefix}{key}.")


def _parts(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _parts(each)


def _is_defined(folder: Path, names: list[str]) -> bool:
    at, rest = folder, list(names)
    while rest and (at / rest[0]).is_dir():
        at /= rest.pop(0)
    if rest and (at / f"{rest[0]}.py").is_file():
        at /= f"{rest.pop(0)}.py"
    module = at if at.is_file() else at / "__init__.py"
    body = ast.parse(module.read_text()).body if module.exists() else []
    if not rest:
        return True
    is_there = any(rest[0] in _defines(node) for node in body)
    return is_there and (len(rest) == 1 or _has_attribute(*rest[:2]))


def _has_attribute(owner: str, name: str) -> bool:
    """Whether a class of this name, or one that it is made from, has this attribute."""
    return any(
        any(name in _defines(inner) for inner in node.body)
        or any(isinstance(base, ast.Name) and _has_attribute(base.id, name) for base in node.bases)
        for text in _text().values()
        if re.search(rf"^class {owner}\b", text, flags=re.M)
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == owner
    )


def _defines(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {each.id for target in targets for each in ast.walk(target) if _is_id(each)}
    return set()


def _is_id(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


# ---- commands -----------------------------------------------------------------------------------


def _unknown_of_command(piece: str) -> Iterator[str]:
    words = _words(piece)
    if words[:1] == ["make"]:
        wanted = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        yield from (
            f"make {each}" for each in wanted if not any(fnmatch(each, t) for t in _targets())
        )
    if piece.startswith("--"):
        yield from set(words[0].partition("=")[0].split("/")) - _all_options()
    for before, option in pairwise(words):
        if before == "--set" and option.partition("=")[0] not in _settings():
            yield f"--set {option}"
    if "paceline" in words:
        yield from _unknown_of_paceline(words[words.index("paceline") + 1 :])


def _words(piece: str) -> list[str]:
    """Of a command line, up to what follows it."""
    try:
        words = shlex.split(piece, comments=True)
    except ValueError:  # an apostrophe: prose
        words = piece.split()
    ends = [at for at, word in enumerate(words) if word in ("|", ">", "&&", "||", "\\")]
    return words[: min(ends, default=len(words))]


def _unknown_of_paceline(words: list[str]) -> Iterator[str]:
    command, called = get_command(app), "paceline"
    while words and words[0] in getattr(command, "commands", {}):
        command, called = command.commands[words[0]], f"{called} {words[0]}"
        words = words[1:]
    if words and called == "paceline" and not words[0].startswith("-"):
        yield f"{called} {words[0]}"
        return
    known = _options(command)
    for word in words:
        if word.startswith("--") and word.partition("=")[0] not in known:
            yield f"{called} {word}"


def _options(command: object) -> set[str]:
    return {"--help", *(o for each in command.params for o in each.opts + each.secondary_opts)}


@cache
def _all_options() -> set[str]:
    """Of every command, and as the benchmarks' own parsers write theirs."""
    found: set[str] = set()
    waiting = [get_command(app)]
    while waiting:
        command = waiting.pop()
        found |= _options(command)
        waiting += getattr(command, "commands", {}).values()
    return found | {
        option
        for path in (ROOT / "benchmarks").rglob("*.py")
        for option in re.findall(r"\"(--[a-z-]+)\"", path.read_text())
    }


@cache
def _targets() -> set[str]:
    """As patterns: `%` of a rule stands for anything."""
    text = (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv").replace("%", "*")
    lines = re.findall(r"^([\w./* -]+):(?!=)", text, flags=re.M)
    return {name for line in lines for name in line.split()}


# ---- tests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    assert unknown(page.read_text(), page.parent) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text())
    assert [each for each in targets if not (page.parent / each).exists()] == []


def test_the_glossary_has_each_word_once_and_in_order():
    rows = re.findall(r"^\| (.+?) \| .+ \|$", (ROOT / "docs/glossary.md").read_text(), re.M)
    words = [word.lower() for word in rows if word != "word"]
    assert len(words) > 80
    assert words == sorted(set(words))


@pytest.mark.parametrize("file", [".github/workflows/ci.yml", ".ci/run"])
def test_what_ci_calls_are_targets_of_make(file):
    commands = re.findall(r"^\s*(?:- )?(?:run: )?(make .*)$", (ROOT / file).read_text(), flags=re.M)
    assert commands
    assert {name for command in commands for name in _unknown_of_command(command)} == set()


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`train/nowhere.py`", "train/nowhere.py"),
        ("in prose src/paceline/nowhere.py, too", "src/paceline/nowhere.py"),
        ("`plan/nowhere/`", "plan/nowhere/"),
        ("`config/nowhere`", "config/nowhere"),
        ("`nowhere/anything.py`", "nowhere/anything.py"),
        ("`parallel/pp/` has `nowhere.py`", "nowhere.py"),
        ("`benchmarks/results/*/nowhere.md`", "benchmarks/results/*/nowhere.md"),
        ("`tests/test_names.py::test_nothing`", "tests/test_names.py::test_nothing"),
        ("`paceline.config.job.Nothing`", "paceline.config.job.Nothing"),
        ("`paceline.config.job.Job.nothing`", "paceline.config.job.Job.nothing"),
        ("`paceline.nothing`", "paceline.nothing"),
        ("`train.nothing`", "train.nothing"),
        ("`optim.nothing = 3`", "optim.nothing"),
        ("`[comm.nothing]`", "comm.nothing"),
        ("`Job.nothing`", "Job.nothing"),
        ("`python -m benchmarks.nothing`", "benchmarks.nothing"),
        ("```python\nfrom paceline.config.job import Nothing\n```", "paceline.config.job.Nothing"),
        ("`make nothing`", "make nothing"),
        ("```sh\nmake nothing ARGS=--fresh\n```", "make nothing"),
        ("`paceline nothing`", "paceline nothing"),
        ("    paceline plan my.toml --nothing 3", "paceline plan --nothing"),
        ("`torchrun ... -m paceline train --nothing`", "paceline train --nothing"),
        ("`paceline bench collectives --tune`", "paceline bench collectives --tune"),
        ("`paceline train --set layout.nothing=2`", "--set layout.nothing=2"),
        ("`--nothing 3`", "--nothing"),
        ("`PACELINE_NOTHING=off`", "PACELINE_NOTHING"),
    ],
)
def test_what_does_not_exist_is_told(text, missing):
    assert missing in unknown(text, ROOT / "docs")


@pytest.mark.parametrize(
    "text",
    [
        "`config/job.py`, `config/job`, `config/`, src/paceline/config and docs/jobs.md",
        "`tests/test_names.py::test_what_a_page_names_exists`, `make demo ARGS=--fresh`",
        "`paceline.config.job.Job`, `config.job.Job.parse`, `Job.parse`, `paceline.train`",
        "`paceline.wait`, `paceline.comm.<axis>`: ranges of the profiler",
        '`comm.dp.compress = "auto"`, `--set optim.lr=3e-4`, `layout.tp`, `--pairs/--no-pairs`',
        "`paceline train my.toml --set name=big | tee log`, `python -m benchmarks.tune`",
        "`runs/my/plan.json`, `plan.json`, `https://example.org/src/nowhere.py`, `torch.nothing`",
        "```python\nmodel.nothing = train.nothing()\n```",
    ],
)
def test_what_exists_and_what_is_not_ours_is_not_told(text):
    assert unknown(text, ROOT / "docs") == set()
