"""What CI, hooks and changelog say is what pyproject.toml and the Makefile say."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def _matrix(name: str) -> list[str]:
    (versions,) = re.findall(rf"^ +{name}: (\[.*\])$", WORKFLOW, flags=re.M)
    return re.findall(r"\"([\d.]+)\"", versions)


def test_every_python_that_is_supported_is_tested():
    prefix = "Programming Language :: Python :: 3."
    stated = [each.removeprefix(prefix) for each in PROJECT["classifiers"] if prefix in each]
    assert _matrix("python") == [f"3.{minor}" for minor in stated]
    assert PROJECT["requires-python"] == f">={_matrix('python')[0]}"


def test_every_torch_that_is_supported_is_tested():
    (torch,) = [each for each in map(Requirement, PROJECT["dependencies"]) if each.name == "torch"]
    allowed = [f"2.{minor}" for minor in range(100) if f"2.{minor}" in torch.specifier]
    assert _matrix("torch") == allowed


def test_the_hooks_are_the_quick_part_of_make_lint():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    entries = re.findall(r"entry: \.venv/bin/(.+?)(?: --force-exclude)?$", hooks, flags=re.M)
    (lint,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.M)
    assert len(entries) == 3
    assert all(f"$(BIN)/{entry}" in lint for entry in entries)
    assert "repo: local" in hooks
    assert "http" not in hooks


def test_the_changelog_has_this_version():
    versions = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", _changelog(), flags=re.M)
    assert versions[0] == PROJECT["version"]
    assert re.search(r"^## \[Unreleased\]$", _changelog(), flags=re.M)


def _changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text()
