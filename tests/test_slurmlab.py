"""The laboratory of Slurm: what it listens on, and what is left where its process is killed (needs
root and Slurm's packages)."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.slurmlab import why_not
from benchmarks.slurmlab.laboratory import sweep
from tests.launch.waiting import until

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
DAEMONS = {"munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd"}
SAYS = 'echo "$SLURM_CONF"; sbatch --output=/dev/null --wrap "srun sleep 35937"; exec sleep 36000'


@pytest.fixture
def maker() -> Iterator[subprocess.Popen]:
    """A process that has a laboratory, and a command that ends with it."""
    command = ["setpriv", "--pdeathsig", "KILL", "sh", "-c", SAYS]
    module = ["-m", "benchmarks.slurmlab", "--nodes", "2", "--", *command]
    started = subprocess.Popen([sys.executable, *module], stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()
        sweep()


def tasks() -> list[psutil.Process]:
    """What the job runs."""
    return [one for one in psutil.process_iter() if _command(one)[-1:] == ["35937"]]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_it_listens_on_loopback_alone_and_a_kill_leaves_nothing(maker):
    assert maker.stdout is not None
    folder = Path(maker.stdout.readline().strip()).parent
    assert folder.parent == Path(tempfile.gettempdir())
    assert "Submitted" in maker.stdout.readline()
    daemons = [
        one for one in psutil.Process(maker.pid).children(recursive=True) if one.name() in DAEMONS
    ]
    assert {one.name() for one in daemons} == DAEMONS
    sockets = [each for one in daemons for each in one.net_connections("inet")]
    listening = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    until(lambda: any("slurmstepd" in str(_command(p.parent())) for p in tasks() if p.parent()))
    maker.kill()
    maker.wait()
    until(lambda: not any(one.is_running() and one.status() != "zombie" for one in daemons))
    sweep()
    assert not folder.exists()
    until(lambda: not tasks())
