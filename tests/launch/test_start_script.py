"""The script of a node, run by a real bash: what it sets, passes on, records and returns."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config.errors import InputError
from paceline.config.site import Site
from paceline.launch.contract import Request
from paceline.launch.node_records import node_records
from paceline.launch.start_script import start_script
from tests.launch.waiting import until

NASTY = 'it\'s "a" $(touch pwned) `touch pwned` $HOME\n; touch pwned; \\ *'


def request(directory: Path, *command: str, **changes: object) -> Request:
    given = {"name": "job", "command": command, "directory": directory, "folder": directory / "job"}
    return Request(**{**given, "num_nodes": 1, "devices_per_node": 1, **changes})


def start(asked: Request, site: Site | None = None, **env: str) -> subprocess.Popen:
    asked.folder.mkdir(parents=True, exist_ok=True)
    file = asked.folder / "start.sh"
    file.write_text(start_script(asked, site or Site(engine="local")))
    return subprocess.Popen(
        ["bash", str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PACELINE_NODE": "n0", "PACELINE_ATTEMPT": "2", **env},
    )


def log(asked: Request) -> str:
    (file,) = (asked.folder / "log").iterdir()
    return file.read_text()


def test_names_paths_and_values_reach_the_command_as_they_are(tmp_path):
    directory = tmp_path / NASTY.replace("/", "_")
    directory.mkdir()
    show = "import os, sys; print([*sys.argv[1:], os.environ['V'], os.getcwd()])"
    asked = request(
        directory,
        *(sys.executable, "-c", show, NASTY, "", "-n"),
        name=NASTY,
        environment={"V": NASTY},
    )
    venv, scratch = tmp_path / f"venv {NASTY[:8]}", tmp_path / f"scratch {NASTY[:8]}"
    site = Site(engine="local", venv=str(venv), scratch=str(scratch), setup=("export A='b c'",))
    process = start(asked, site)
    assert process.communicate(timeout=300)[0] == "exit 0\n"
    assert log(asked) == f"{[NASTY, '', '-n', NASTY, str(directory)]}\n"
    assert not [*tmp_path.rglob("pwned")]
    assert scratch.is_dir()


def test_the_venv_comes_first_and_a_module_that_is_missing_ends_the_job(tmp_path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "hello").write_text("#!/bin/bash\necho from the venv $VIRTUAL_ENV\n")
    (venv / "bin" / "hello").chmod(0o755)
    asked = request(tmp_path, "hello")
    start(asked, Site(engine="local", venv=str(venv))).communicate(timeout=300)
    assert log(asked) == f"from the venv {venv}\n"
    other = request(tmp_path, "true", folder=tmp_path / "other")
    process = start(other, Site(engine="local", modules=("no such",)))
    assert process.communicate(timeout=300)[0] == "exit 2\n"


def test_a_container_runs_the_command_in_the_folder(tmp_path):
    (tmp_path / "bin").mkdir()
    apptainer = tmp_path / "bin" / "apptainer"
    apptainer.write_text('#!/bin/bash\nprintf "<%s>" "$@"\n')
    apptainer.chmod(0o755)
    asked = request(tmp_path, "paceline", "train", "a b.toml")
    site = Site(engine="local", container="image $(1).sif")
    start(asked, site, PATH=f"{apptainer.parent}:{os.environ['PATH']}").communicate(timeout=300)
    assert log(asked).endswith("<image $(1).sif><paceline><train><a b.toml>")
    with pytest.raises(InputError, match="bound into a container"):
        start_script(request(tmp_path / "a:b", "true"), site)


def test_attempts_and_exit_codes_are_recorded(tmp_path):
    asked = request(tmp_path, "bash", "-c", "exit 75")
    process = start(asked)
    process.communicate(timeout=300)
    assert process.returncode == 75
    (record,) = node_records(asked.folder)
    assert (record.attempt, record.node, record.exit_code) == (2, "n0", 75)
    assert record.ended is not None
    assert record.ended >= record.started
    start(asked, PACELINE_ATTEMPT="3", PACELINE_NODE="../n 1").communicate(timeout=300)
    assert [(each.attempt, each.node) for each in node_records(asked.folder)] == [
        (2, "n0"),
        (3, ".._n_1"),
    ]
    with (asked.folder / "nodes" / "n0.jsonl").open("a") as file:
        file.write('nothing\n{"attempt": "4"}\n')
    assert len(node_records(asked.folder)) == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 7), (signal.SIGUSR1, 8)])
def test_signals_are_passed_on_and_the_command_may_take_its_time(tmp_path, number, code):
    script = (
        "trap 'sleep 0.3; exit 7' TERM; trap 'sleep 0.3; exit 8' USR1; touch ready; "
        "while :; do sleep 0.05; done"
    )
    asked = request(tmp_path, "bash", "-c", script)
    process = start(asked)
    until((tmp_path / "ready").exists, 30)
    process.send_signal(number)
    assert process.communicate(timeout=300)[0] == f"exit {code}\n"
    assert process.returncode == code
    assert [each.exit_code for each in node_records(asked.folder)] == [code]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_command_that_did_not_heed_yet_starts_again(tmp_path, number):
    process = start(request(tmp_path, "bash", "-c", "touch ready; exec sleep 120"))
    until((tmp_path / "ready").exists, 30)
    process.send_signal(number)
    assert process.communicate(timeout=300)[0] == "exit 75\n"
    other = request(tmp_path, "bash", "-c", "kill -s TERM $$", folder=tmp_path / "other")
    assert start(other).communicate(timeout=300)[0] == "exit 143\n"  # by itself


def test_a_signal_before_the_command_began_starts_it_again(tmp_path):
    site = Site(engine="local", setup=("touch setup; while :; do sleep 0.05; done",))
    process = start(request(tmp_path, "touch", "ran"), site)
    until((tmp_path / "setup").exists, 30)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 75
    assert not (tmp_path / "ran").exists()


def test_what_a_shell_cannot_take_is_refused(tmp_path):
    with pytest.raises(InputError, match="NUL"):
        start_script(request(tmp_path / "a\0b", "true"), Site(engine="local"))
    with pytest.raises(InputError, match="name a variable"):
        start_script(request(tmp_path, "true", environment={"A;B": "1"}), Site(engine="local"))
