"""Slurm in a folder of its own, on loopback: munged, mariadbd, slurmdbd, slurmctld and slurmds.

How it works: every daemon stays in the foreground, is a child of this process, and is killed by its
pid; the kernel ends it with this process (PR_SET_PDEATHSIG), whatever way that ends. Processes of
jobs are known by their environment, which names this laboratory's slurm.conf. Daemons believe that
their host is called localhost (a UTS namespace), so they listen on loopback alone. It needs root.

Devices are copies of /dev/null: Slurm hands them out, and nothing computes on them. All nodes share
this machine's cores and memory, whatever they say they have.
"""

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.slurmlab.settings import ACCOUNTS, CLUSTER, DATABASE, Plan
from paceline.config.errors import InputError

_PROGRAMS = {
    "munged": "munge",
    "mariadbd": "mariadb-server-core",
    "slurmdbd": "slurmdbd",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
_SYSTEM_TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")
# Ends with this process, and takes its host for localhost.
_ALONE = ("setpriv", "--pdeathsig", "KILL", "unshare", "--uts", "sh", "-c")
_NAMED = 'echo localhost > /proc/sys/kernel/hostname && exec "$@"'
# Below the ports that Linux gives out by itself, and below those of paceline.comm.rendezvous.
_PORTS = range(12_000, 20_000)
_PATIENCE_S = 90.0
"""On a machine that does other things as well; usually each is there in a second."""
_LOOK_S = 0.05
_PREFIX = "slurmlab-"
_SHOWN_BYTES = 2000


def why_not() -> str | None:
    """Why there can be no Slurm here, one sentence; None where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "the Slurm laboratory needs root on Linux: start it as root."
    missing = sorted({package for name, package in _PROGRAMS.items() if not shutil.which(name)})
    if missing:
        return f"the Slurm laboratory needs more: apt-get install {' '.join(missing)}."
    with tempfile.TemporaryDirectory() as folder:
        try:
            _make_device(Path(folder) / "device0")
            _run([*_ALONE, _NAMED, "-", "true"], 30)
        except (OSError, RuntimeError) as error:
            return (
                "the Slurm laboratory needs device files and a UTS namespace, which this container "
                f"refuses ({error}): run it on a machine of your own."
            )
    return None


class Laboratory:
    """A Slurm of some nodes, for as long as the context lasts."""

    def __init__(self, num_nodes: int = 4, devices_per_node: int = 2, grace_s: int = 10) -> None:
        """Describe it; nothing exists before the context is entered.

        Args:
            num_nodes: n1, n2, ...; the first half is below one switch.
            devices_per_node: gpu's, as Slurm says.
            grace_s: of preemption, from SIGTERM to SIGKILL.

        Raises:
            InputError: there can be none here.
        """
        if problem := why_not():
            raise InputError(problem)
        self._shape = num_nodes, devices_per_node, grace_s
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Laboratory":
        sweep()
        # Not the test's own folder: the name of a socket may have no more than 107 letters.
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        num_nodes, *others = self._shape
        self.plan = Plan(self.folder, num_nodes, *others, _free_ports(2 + num_nodes))
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        try:
            self._bring_up()
        except BaseException:
            self._bring_down()
            raise
        return self

    def __exit__(self, *_failure: object) -> None:
        self._bring_down()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Their names."""
        return self.plan.nodes

    def run(self, *command: str, timeout_s: float = _PATIENCE_S) -> str:
        """Run one of Slurm's commands and return what it printed.

        Raises:
            RuntimeError: it failed, or hung.
        """
        return _run(command, timeout_s, {**os.environ, **self.environment})

    def kill_node(self, name: str) -> None:
        """Make a node vanish: its slurmd and all that runs on it, at once."""
        self._kill(name)
        _kill_steps(self.folder / f"spool-{name}")

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node that was killed, and wait until Slurm may use it."""
        self._start_node(name)
        self._await(lambda: self._is_up(name), name)

    def set_down(self, name: str) -> None:
        """Tell Slurm that a node is gone, instead of waiting until it finds out."""
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=test")

    # ---- up ----

    def _bring_up(self) -> None:
        plan = self.plan
        for at in range(plan.devices_per_node):
            _make_device(self.folder / f"device{at}")
        for name in ("slurm", "topology", "gres", "slurmdbd"):
            file = self.folder / f"{name}.conf"
            file.write_text(getattr(plan, f"{name}_conf")())
            file.chmod(0o600)
        (self.folder / "cgroup.conf").touch()
        self._start_munge()
        self._start_database()
        self._start("slurmdbd", "slurmdbd", "-D")
        self._await(lambda: _answers(plan.ports[1]), "slurmdbd")
        self._account(f"add cluster {CLUSTER}")
        (self.folder / "state").mkdir()
        self._start("slurmctld", "slurmctld", "-D", "-c")
        self._await(lambda: _answers(plan.ports[0]), "slurmctld")
        for name in self.nodes:
            self._start_node(name)
        for name in self.nodes:
            self._await(lambda name=name: self._is_up(name), name)
        for line in ACCOUNTS:  # the controller has told by now what can be counted
            self._account(line)

    def _account(self, line: str) -> None:
        self.run("sacctmgr", "--immediate", *line.split())

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        places = {
            "key-file": key,
            "socket": self.plan.munge_socket,
            "pid-file": self.folder / "munge.pid",
            "log-file": self.folder / "munge.log",
            "seed-file": self.folder / "munge.seed",
        }
        options = [f"--{name}={file}" for name, file in places.items()]
        self._start("munged", "munged", "--foreground", "--force", "--num-threads=4", *options)
        self._await(lambda: _accepts(self.plan.munge_socket), "munged")

    def _start_database(self) -> None:
        (self.folder / "database").mkdir()
        # Of all that mariadb-install-db makes, these alone are needed, in a fifth of the time.
        tables = _SYSTEM_TABLES.read_text()
        made = f"create database mysql;\nuse mysql;\n{tables}\ncreate database {DATABASE};\n"
        options = self.plan.database_options()
        _run(["mariadbd", *options, "--bootstrap"], _PATIENCE_S, standard_input=made)
        self._start("mariadbd", "mariadbd", *options)
        self._await(lambda: _accepts(self.plan.database_socket), "mariadbd")

    def _start_node(self, name: str) -> None:
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        self._start(name, "slurmd", "-D", "-N", name)

    def _is_up(self, name: str) -> bool:
        said = self.run("sinfo", "--noheader", "--nodes", name, "--format=%T")
        return set(said.split()) <= {"idle", "mixed", "allocated", "completing"}

    def _start(self, name: str, *command: str) -> None:
        environment = {**os.environ, **self.environment}
        environment["MYSQL_UNIX_PORT"] = str(self.plan.database_socket)
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                [*_ALONE, _NAMED, "-", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def _await(self, is_so: Callable[[], bool], name: str) -> None:
        end = time.monotonic() + _PATIENCE_S
        while not is_so():
            code = self._daemons[name].poll()
            if code is not None or time.monotonic() > end:
                said = (self.folder / f"{name}.out").read_bytes()[-_SHOWN_BYTES:]
                how = "does not answer" if code is None else f"ended with {code}"
                raise RuntimeError(f"{name} {how}:\n{said.decode(errors='replace')}")
            time.sleep(_LOOK_S)

    # ---- down ----

    def _bring_down(self) -> None:
        for name in reversed(self._daemons):
            self._kill(name)
        self._daemons = {}
        _forget(self.folder)

    def _kill(self, name: str) -> None:
        daemon = self._daemons[name]
        daemon.kill()
        daemon.wait(_PATIENCE_S)


def sweep() -> None:
    """Remove what laboratories left whose process was killed: steps of jobs, and the folder."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            _forget(folder)


def _forget(folder: Path) -> None:
    _kill_steps(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _kill_steps(folder: Path) -> None:
    """Kill what slurmds whose spool is below a folder have started: the keepers of steps, and all
    below them. All are halted before the first one is killed: else a keeper would tell how its
    tasks ended, or an srun hear of its keeper's end and end the tasks of other nodes. Children go
    before their parents: the kernel lets halted orphans go on."""
    while keepers := _keepers(folder):
        below = [each for keeper in keepers for each in reversed(_below(keeper))]
        for way in (psutil.Process.suspend, psutil.Process.kill):
            for process in (*below, *keepers):
                with suppress(psutil.NoSuchProcess):
                    way(process)


def _keepers(folder: Path) -> set[psutil.Process]:
    """Those of steps. The kernel's list of sockets, read while others come and go, may lack one, so
    it is read until nothing new is found."""
    found: set[psutil.Process] = set()
    while new := _listening_below(folder) - found:
        found |= new
    return found


def _listening_below(folder: Path) -> set[psutil.Process]:
    """The processes `slurmstepd` whose socket is in a folder."""
    found = set()
    for process in psutil.process_iter(["name"]):
        if process.info["name"] != "slurmstepd":
            continue
        with suppress(psutil.Error):
            sockets = process.net_connections("unix")
            if any(str(each.laddr).startswith(f"{folder}/") for each in sockets):
                found.add(process)
    return found


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _make_device(file: Path) -> None:
    null = Path("/dev/null").stat()
    os.mknod(file, null.st_mode, null.st_rdev)


def _free_ports(count: int) -> list[int]:
    free: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(free) == count:
            break
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            free.append(port)
    return free


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _accepts(file: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(file)) == 0


def _run(
    command: Sequence[str],
    timeout_s: float,
    environment: dict[str, str] | None = None,
    standard_input: str = "",
) -> str:
    """What a command printed.

    Raises:
        RuntimeError: it failed, or took longer.
    """
    try:
        done = subprocess.run(
            command,
            input=standard_input,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} did not end within {timeout_s:.0f} s") from None
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return done.stdout
