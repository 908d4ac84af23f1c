"""A command line that can't be used: one sentence on stderr, exit code 2, no box of usage."""

import os
import re
import subprocess
import sys

import pytest
from typer.main import get_command

from paceline import cli

WRONG = {
    "top --every inf": ["'--every'", "less than or equal to 3600", "top --help"],
    "top --every never": ["'--every'", "must be a valid number"],
    "explain run --top 0": ["'--top'", "greater than or equal to 1"],
    "validate runs.csv --seed -1": ["'--seed'"],
    "plan --price cheap": ["'--price'"],
    "train --nope": ["--nope", "train --help"],
    "train --set": ["--set"],
    "bench --ranks x": ["'--ranks'", "bench --help"],
    "bench collectives --nope": ["--nope", "bench collectives --help"],
    "explain": ["Missing argument"],
    "export run": ["Missing argument"],
    "cost --price -1": ["'--price'", "greater than or equal to 0"],
    "runs prune --keep-last 0": ["'--keep-last'"],
    "runs nope": ["nope"],
    "nope": ["nope"],
}


def _end_of(arguments: str, monkeypatch) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_option_is_refused_in_one_sentence(arguments, monkeypatch, capfd):
    assert _end_of(arguments, monkeypatch) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("paceline: ")
    assert err.count("\n") == 1
    for words in WRONG[arguments]:
        assert words in err


def test_without_a_command_the_commands_are_shown(monkeypatch, capfd):
    assert _end_of("", monkeypatch) == 2
    out, err = capfd.readouterr()
    assert "validate" in out
    assert err == ""


def _commands(group, name="paceline"):
    yield name, group
    for sub, command in getattr(group, "commands", {}).items():
        yield from _commands(command, f"{name} {sub}")


@pytest.mark.parametrize(("name", "command"), list(_commands(get_command(cli.app))))
def test_help_fits_a_terminal_of_80_columns(name, command):
    """A longer line would be broken, and its rest stand in a line of its own."""
    assert command.help
    assert [line for line in command.help.splitlines() if len(line) > 78] == []


def test_help_and_a_command_that_fails_end_as_before(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["paceline", "top", "--help"])
    cli.main()
    assert "--every" in capfd.readouterr().out
    assert _end_of("top nowhere --once", monkeypatch) == 2
    assert "nowhere is not the directory of a run" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, 3000), ({"GOMP_SPINCOUNT": "7"}, 7), ({"OMP_WAIT_POLICY": "PASSIVE"}, 0)],
)
def test_threads_that_wait_soon_sleep(given, spins):
    """As libgomp itself says it, where it is what torch came with."""
    program = (
        "import sys; sys.argv = ['paceline', 'top', '--help']; from paceline.cli import main\n"
        "main(); import torch"
    )
    others = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {name: value for name, value in os.environ.items() if name not in others}
    env |= {"OMP_DISPLAY_ENV": "VERBOSE", **given}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    said = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    if said is None:
        pytest.skip("torch came with another OpenMP than GNU's")
    assert int(said[1]) == spins
