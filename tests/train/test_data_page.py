"""The commands of docs/data.md, on its own Job and a few small files (processes)."""

import json
import re
import shlex

import pytest

from tests.command_line import metrics, paceline
from tests.test_names import ROOT

PAGE = (ROOT / "docs" / "data.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page's Job, and what it reads."""
    folder = tmp_path_factory.mktemp("page")
    (job,) = re.findall(r"^```toml\n(name = .*?)^```", PAGE, flags=re.S | re.M)
    (folder / "mixed.toml").write_text(job)
    (folder / "code").mkdir()
    for n in range(40):
        (folder / "code" / f"{n}.py").write_text(f"def add_{n}(x):\n    return x + {n}\n" * 9)
    letters = (json.dumps({"body": f"Dear reader {n}, all is well here. " * 9}) for n in range(80))
    (folder / "letters.jsonl").write_text("\n".join(letters))
    (folder / "manual.txt").write_text("".join(f"Turn the key {n} times.\n" for n in range(200)))
    return folder


def test_the_command_for_other_trainers(folder):
    (line,) = re.findall(r"^paceline tokens .* --megatron .*", PAGE, flags=re.M)
    done = paceline(*shlex.split(line)[1:], folder=folder)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (folder / "out").glob("*.idx")}
    parts = ("code-train", "code-eval", "letters-train", "letters-eval", "manual-all")
    assert names == {f"corpus-{part}.idx" for part in parts}


def test_the_command_that_publishes(folder):
    (line,) = re.findall(r"^paceline tokens .* --to .*", PAGE, flags=re.M)
    done = paceline(*shlex.split(line)[1:], folder=folder)
    assert done.returncode == 0, done.stderr
    names = {path.parent.name for path in (folder / "out" / "tokens").glob("*/manifest.json")}
    assert names == {"code", "letters", "manual"}


@pytest.mark.parametrize("line", re.findall(r"^paceline train .*", PAGE, flags=re.M))
def test_commands_train(folder, line):
    done = paceline(*shlex.split(line)[1:], folder=folder)
    assert done.returncode == 0, done.stderr
    evaluated = metrics(folder, "mixed")[-1]["eval_figures"]
    assert list(evaluated) == ["loss.code", "loss.letters", "loss.manual"]
