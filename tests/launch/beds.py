"""Beds: each starts an engine's own programs, and knows how to take a node away from it.

A new engine is a line in BEDS; `test_contract.py` then runs against it.
"""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.slurmlab import Laboratory, why_not
from paceline.config.site import NodeType, Site
from paceline.launch.contract import Engine
from paceline.launch.engines import engine_named
from tests.launch.waiting import until


@dataclass(frozen=True)
class Bed:
    """An engine that is there."""

    site: Site
    num_nodes: int
    lose: Callable[[Path, str], None]
    """Take the node of this name away from the job of this folder."""
    slow_s: float = 120
    """How long anything may take."""
    has_order: bool = True
    """Whether a job can wait for another."""
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine", engine_named(self.site.engine))


def start_script_of(folder: Path, node: str) -> psutil.Process:
    """The process that runs start.sh of a job on a node."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        for process in psutil.process_iter(["cmdline"]):
            with suppress(psutil.Error):
                if process.info["cmdline"] != ["bash", "start.sh"]:
                    continue
                relay = process.parent()
                is_of_job = relay is not None and f"{folder}/relay.sh" in relay.cmdline()
                if is_of_job and process.environ().get("PACELINE_NODE") == node:
                    found.append(process)
        return bool(found)

    until(is_there)
    return found[0]


@contextmanager
def local_bed(_folder: Path) -> Iterator[Bed]:
    """This machine."""

    def lose(folder: Path, node: str) -> None:
        start_script_of(folder, node).kill()

    yield Bed(Site(engine="local"), 1, lose)


@contextmanager
def ssh_bed(folder: Path) -> Iterator[Bed]:
    """Three hosts of one sshd on loopback, and one at which nobody listens."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("no sshd and ssh on this machine (openssh-server, openssh-client)")
    for name in ("host", "person"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=300)
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    port, closed = ports
    key = (folder / "host.pub").read_text().split(" ", 2)[:2]
    (folder / "known_hosts").write_text("hosts " + " ".join(key))
    # HOME: what stands in the .bashrc of who runs the tests is no part of them.
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/person.pub\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxStartups 100\n"
        f"PermitRootLogin prohibit-password\nSetEnv HOME={folder}\n"
    )
    (folder / "ssh_config").write_text(
        f"Host n0 n1 n2\n  Port {port}\nHost gone\n  Port {closed}\n"
        f"Host *\n  HostName 127.0.0.1\n  User {getpass.getuser()}\n  HostKeyAlias hosts\n"
        f"  IdentityFile {folder}/person\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n  StrictHostKeyChecking yes\n"
    )
    # What an init script makes, and sshd of root demands.
    private = Path("/run/sshd")
    is_mine = os.geteuid() == 0 and not private.exists()
    if is_mine:
        private.mkdir(mode=0o755)
    config = ["-f", str(folder / "sshd_config")]
    test = subprocess.run([sshd, "-t", *config], capture_output=True, text=True, check=False)
    if test.returncode:
        pytest.skip(f"sshd can't run here: {test.stderr.strip()}")
    with (folder / "sshd.log").open("wb") as log:
        server = subprocess.Popen([sshd, "-D", "-e", *config], stderr=log)
    try:
        until(lambda: _answers(port))
        hosts = ("n0", "n1", "n2")
        site = Site(engine="ssh", hosts=hosts, ssh_config=str(folder / "ssh_config"))
        yield Bed(site, len(hosts), _close_session)
    finally:
        sessions = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        server.wait(60)
        for process in sessions:
            with suppress(psutil.Error):
                process.kill()
        if is_mine:
            with suppress(OSError):
                private.rmdir()


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _close_session(folder: Path, node: str) -> None:
    """End the sshd that holds the node's connection, as where a machine goes away."""
    session = next(
        one for one in start_script_of(folder, node).parents() if one.name().startswith("sshd")
    )
    session.send_signal(signal.SIGKILL)


@contextmanager
def slurm_laboratory() -> Iterator[Laboratory]:
    """Slurm with four nodes, in a folder of its own; its commands are asked by all that follows."""
    if problem := why_not():
        pytest.skip(problem)
    with Laboratory() as lab, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", lab.environment["SLURM_CONF"])
        yield lab


@contextmanager
def slurm_bed(_folder: Path) -> Iterator[Bed]:
    """That one."""
    with slurm_laboratory() as lab:

        def lose(_folder: Path, node: str) -> None:
            lab.kill_node(node)
            lab.set_down(node)
            lab.start_node(node)

        yield Bed(Site(engine="slurm"), len(lab.nodes), lose)


@contextmanager
def ray_bed(_folder: Path) -> Iterator[Bed]:
    """Three machines of a Ray cluster on this one, each with two GPUs that nobody has."""
    pytest.importorskip("ray", reason="no Ray is installed (paceline[ray])")
    from ray.cluster_utils import Cluster

    # Of machines that vanish: Ray notices after 15 s by itself.
    health = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
    head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False, "_system_config": health}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Ray gives a machine no more GPUs than this names; importing a benchmark sets it.
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            machines = [cluster.add_node(num_cpus=1, num_gpus=2) for _ in range(3)]

            def lose(folder: Path, node: str) -> None:
                script = start_script_of(folder, node)
                raylet = next(one for one in script.parents() if one.name() == "raylet")
                lost = next(one for one in machines if _has(one, raylet.pid))
                for process in (*script.children(recursive=True), script):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                machines.remove(lost)
                cluster.remove_node(lost, allow_graceful=False)
                machines.append(cluster.add_node(num_cpus=1, num_gpus=2))

            yield Bed(Site(engine="ray", ray_address=cluster.address), 3, lose)
        finally:
            cluster.shutdown()


def _has(machine: Any, pid: int) -> bool:
    """Whether a process is one of Ray's own of a machine."""
    running = [one for several in machine.all_processes.values() for one in several]
    return pid in [one.process.pid for one in running]


@contextmanager
def kubernetes_bed(folder: Path) -> Iterator[Bed]:
    """Three nodes of a stand-in."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl on this machine (kubernetes-client)")
    pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate (paceline[test])")
    from tests.launch.fake_kubernetes import FakeKubernetes

    nodes = ("n0", "n1", "n2")
    with FakeKubernetes(folder, nodes) as fake, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(fake.kubeconfig()))
        site = Site(
            engine="kubernetes",
            container="registry/image:1",
            claim="shared",
            # The folders of tests are below the system's folder of temporary files.
            shared=str(Path(tempfile.gettempdir()).resolve()),
            partition="queue",
            node_types={"gpu": NodeType(cluster="2xH100-SXM", num_nodes=len(nodes))},
        )
        yield Bed(site, len(nodes), lambda _, node: fake.lose(node), has_order=False)


@contextmanager
def skypilot_bed(folder: Path) -> Iterator[Bed]:
    """Machines of a stand-in for SkyPilot."""
    from tests.launch.fake_skypilot import FakeSkyPilot

    with FakeSkyPilot(folder) as fake, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{fake.programs}:{os.environ['PATH']}")
        kind = NodeType(
            cluster="2xH100-SXM",
            num_nodes=3,
            select=("accelerators=H100:2", "infra=aws/us-east-1", "infra=gcp"),
        )
        site = Site(
            engine="skypilot",
            shared=str(Path(tempfile.gettempdir()).resolve()),
            claim="shared",
            buckets={"/copies": "s3://copies"},
            setup=("true",),
            node_types={"gpu": kind},
        )
        yield Bed(site, 3, fake.lose, has_order=False)


BEDS: dict[str, Callable[[Path], AbstractContextManager[Bed]]] = {
    "local": local_bed,
    "ssh": ssh_bed,
    "slurm": slurm_bed,
    "ray": ray_bed,
    "kubernetes": kubernetes_bed,
    "skypilot": skypilot_bed,
}


@pytest.fixture(scope="module", params=BEDS)
def bed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Each engine in turn; a module's tests share it."""
    with BEDS[request.param](tmp_path_factory.mktemp(request.param)) as made:
        yield made
