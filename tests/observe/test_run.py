"""Files of a Run are complete or absent, and drafts don't stay."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from paceline.observe.run import write_atomic

_DIES = """
import os, signal, sys
from pathlib import Path
from paceline.observe.run import write_atomic
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
write_atomic(Path(sys.argv[1]), "new")
"""


def test_what_a_killed_process_was_writing_is_not_there_and_its_draft_is_removed(tmp_path):
    file = tmp_path / "facts[1].json"
    write_atomic(file, "old")
    dies = subprocess.run([sys.executable, "-c", _DIES, file], timeout=120, check=False)
    assert dies.returncode == -signal.SIGKILL
    assert file.read_text() == "old"
    assert len([*tmp_path.iterdir()]) == 2
    write_atomic(file, "newer")
    assert file.read_text() == "newer"
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize(
    "draft",
    [
        f"a.json.{socket.gethostname()}.tmp{os.getppid()}",  # somebody is writing it
        "a.json.elsewhere.tmp999999999",
        f"a.json.{socket.gethostname()}.tmpx",
        f"b.json.{socket.gethostname()}.tmp999999999",
    ],
)
def test_drafts_of_others_stay(tmp_path, draft):
    (tmp_path / draft).touch()
    write_atomic(tmp_path / "a.json", "text")
    assert (tmp_path / draft).exists()
