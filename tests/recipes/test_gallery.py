"""Every recipe is listed with its command, and the command runs (programs: in the other tests)."""

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from paceline.config.job import read_job
from paceline.config.new import Kind
from tests.command_line import metrics, paceline

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
ROWS = re.findall(r"^\| \[(.+?)\]\(.+?\) \| `(.+?)` \|", (RECIPES / "README.md").read_text(), re.M)
COMMANDS = [shlex.split(command) for _, command in ROWS]
SHORT = ("train.steps=4", "train.eval_every=0", "optim.warmup_steps=1", "train.global_batch=64")


def test_every_recipe_is_listed_and_run():
    files = {path.name for path in RECIPES.iterdir() if path.suffix in (".py", ".toml")}
    assert [name for name, _ in ROWS] == [
        Path(words[1 + (words[0] == "paceline")]).name for words in COMMANDS
    ]
    assert {name for name, _ in ROWS} == files
    programs = {f"test_{name}" for name in files if name.endswith(".py")}
    assert programs <= {path.name for path in Path(__file__).parent.iterdir()}


def test_the_gallery_shows_every_example():
    page = (RECIPES.parent / "docs" / "gallery.md").read_text()
    shown = {Path(link).name for link in re.findall(r"\]\(\.\./recipes/(\S+)\)", page)}
    assert shown == {path.name for path in RECIPES.iterdir() if path.name != "README.md"}
    assert set(re.findall(r"^\| `paceline new (\w+)`", page, re.M)) == set(get_args(Kind))


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.name)
def test_the_settings_that_a_recipe_names_can_be_given(recipe):
    """Those of one line of its comments together."""
    for line in re.findall(r"^# .*", recipe.read_text(), re.M):
        read_job(recipe, re.findall(r"--set (\S+)", line))


@pytest.mark.parametrize("words", [each for each in COMMANDS if each[1] == "plan"], ids=" ".join)
def test_what_is_to_plan_is_planned(words, tmp_path):
    done = paceline("plan", str(ROOT / words[2]), *words[3:], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^step [\d.]+ m?s ", done.stdout, re.M)
    assert re.search(r"^memory [\d.]+ GB", done.stdout, re.M)


@pytest.mark.parametrize("words", [each for each in COMMANDS if each[1] == "train"], ids=" ".join)
def test_what_is_to_train_trains(words, tmp_path):
    settings = [word for setting in SHORT for word in ("--set", setting)]
    done = paceline("train", str(ROOT / words[2]), *words[3:], *settings, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path, Path(words[2]).stem)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert "report: " in done.stdout
