"""What README and docs say: commands and code are run, the settings page is the code's own."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import environment, losses, metrics, paceline, python, write_tiny_job

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# The demo, cut short: that it learns is the first test's to say.
SHORT = [
    f"--set={each}"
    for each in (
        "train.steps=4", "train.seq_len=64", "train.global_batch=4", "train.eval_every=0",
        "optim.warmup_steps=1", "data.tokenizer=bytes", "data.source=text.txt",
        "model.vocab_size=257", "model.hidden_size=64", "model.ffn_size=128", "model.num_layers=2",
    )
]  # fmt: skip
QUICK = ["--quick", "--only", "input", "--ranks", "1"]
LINKS = ["--quick", "--ranks", "2", "--sizes", "4KiB,64KiB", "--no-pairs", "--out", "links.toml"]
PUBLISHED = ROOT / "benchmarks" / "data" / "published_llm_runs.csv"


def _run(command: list[str], folder: Path, timeout_s: float = 400) -> str:
    env = environment(folder)
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def test_the_demo_command_beats_a_unigram_model_and_says_so(tmp_path):
    """A quarter of the demo is enough to fall below what no model of single tokens can reach."""
    if not (ROOT / ".venv" / ".installed").exists():
        pytest.skip("the environment was not made by make")
    assert "make demo\nmake test" in README
    settings = "--set train.steps=40 --set optim.warmup_steps=10 --set observe.profile_every=8"
    arguments = f"--runs {tmp_path / 'runs'} {settings}"
    output = _run(["make", "-C", str(ROOT), "demo", f"ARGS={arguments}"], tmp_path)
    assert "whole step" in output
    report = re.search(r"report: (\S+)", output)
    assert Path(report[1]).stat().st_size > 1e6
    facts = json.loads((tmp_path / "runs" / "demo" / "facts.json").read_text())
    bound, reached = facts["data"]["unigram_loss"], metrics(tmp_path, "demo")[-1]["eval_loss"]
    assert 5 < bound < 8
    assert reached < bound - 0.1
    assert f"can't get below {bound:.2f}; reached {reached:.2f}" in output
    assert f"alone can&#39;t get below {bound:.2f}" in Path(report[1]).read_text()


@pytest.mark.timeout(1800)  # a dozen commands, on a machine that may be others' for minutes
def test_the_commands_of_the_table_run(tmp_path):
    write_tiny_job(tmp_path).rename(tmp_path / "my.toml")
    some_runs = PUBLISHED.read_text().splitlines(keepends=True)[:4]
    (tmp_path / "runs.csv").write_text("".join(some_runs))
    shutil.copytree(ROOT / "docs" / "techniques", tmp_path / "documents")
    commands = re.findall(r"^\| `((?:paceline|torchrun)[^`]*)` \|", README, flags=re.M)
    assert len(commands) >= 8
    for command in commands:
        words = shlex.split(command.replace("...", "--standalone --nproc-per-node 2"))
        if words[1] == "train" and not {"my.toml", "--show"} & set(words):
            words += SHORT
        if words[1] == "bench":
            words += LINKS if "collectives" in words else QUICK
        if words[1] == "top":
            words.append("--once")
        if words[1] == "serve":
            words.append("--help")  # it would go on until somebody stops it: tests/serve
        if words[1] in ("tune", "search", "ladder"):
            words.append("--help")  # minutes of trials: tests/tune and tests/search have real ones
        if words[1] == "launch":
            # Under its own name it is complete by now, and refused.
            words = [
                *words[: words.index("--on")],
                *("--on", "local", "--name", "again", "--dry-run"),
            ]
        if words[0] == "torchrun":
            _run(words, tmp_path)
        else:
            done = paceline(*words[1:], folder=tmp_path)
            # This machine may have problems for the doctor to find.
            fine = (0, 1) if words[1] == "doctor" else (0,)
            assert done.returncode in fine, f"{command}: {done.stdout}{done.stderr}"
    assert losses(tmp_path, "demo").keys() == {1, 2, 3, 4}
    assert len(losses(tmp_path, "tiny")) == 12
    assert (tmp_path / "cluster.toml").exists()


def test_the_own_model_example_runs_as_it_stands(tmp_path):
    code = re.search(r"```python\n(.*?)```", README, flags=re.S)[1]
    essential = [line for line in code.splitlines() if line.strip()]
    assert len(essential) <= 12
    (tmp_path / "mine.py").write_text(code)
    done = python("mine.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report.html") == 2, "once from the run, once from the script"
    lines = metrics(tmp_path, "mine")
    assert len(lines) == 100
    assert lines[-1]["samples"] == 6400


def test_the_index_of_decisions_lists_every_page_by_its_question():
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    listed = re.findall(r"^- \[(.+)\]\((.+)\) \(\d{4}-\d\d-\d\d\)$", index, flags=re.M)
    pages = {page.name for page in folder.glob("*.md")} - {"README.md", "machines.md"}
    assert sorted(name for _, name in listed) == sorted(pages), "each page once"
    for question, name in listed:
        assert (folder / name).read_text().startswith(f"# {question}\n"), name


def test_the_page_of_settings_is_made_from_the_code():
    spec = importlib.util.spec_from_file_location("page", ROOT / "docs" / "make_jobs_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "jobs.md").read_text() == module.page(), (
        "run: python docs/make_jobs_page.py"
    )


def _made(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plan_that_the_readme_shows_is_what_the_planner_says():
    number = re.compile(r"\d[\d,]*\.?\d*")

    def numbers(text):
        return [float(each.replace(",", "").rstrip(".")) for each in number.findall(text)]

    def words(text):
        return number.sub("#", text).translate(str.maketrans("", "", "█▏▎▍▌▋▊▉")).split()

    made, hint = _made("make_readme_plan").made(README), "run: python docs/make_readme_plan.py"
    assert words(made) == words(README), hint
    # The last digit may differ between numpy's releases.
    assert numbers(made) == pytest.approx(numbers(README), rel=2e-3, abs=0.02), hint


def test_the_table_of_what_rules_need_is_made_from_the_code():
    page = (ROOT / "docs" / "explain.md").read_text()
    assert page == _made("make_rules_table").made(page), "run: python docs/make_rules_table.py"


def test_the_wheel_is_whole_and_runs_outside_the_checkout(tmp_path):
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path)]
    subprocess.run([*wheel, str(ROOT)], check=True, capture_output=True)
    (built,) = tmp_path.glob("paceline-*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", "site"]
    subprocess.run([*install, str(built)], cwd=tmp_path, check=True, capture_output=True)
    code = (
        "import sys; sys.path.insert(0, 'site'); import paceline\n"
        "assert paceline.__file__.startswith(sys.argv[1]), paceline.__file__\n"
        "from importlib import resources\n"
        "names = [('config', 'demo.toml'), ('render', 'page.html'), ('', 'py.typed')]\n"
        "for room, name in names:\n"
        "    assert resources.files('paceline').joinpath(room, name).is_file(), name\n"
        "sys.argv = ['paceline', 'train', '--show']\n"
        "from paceline.cli import main; main()"
    )
    shown = _run([sys.executable, "-P", "-c", code, str(tmp_path)], tmp_path)
    assert 'name = "demo"' in shown
