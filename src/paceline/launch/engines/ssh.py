"""Engine "ssh": a list of machines without a scheduler, through the person's own ssh client.

A job takes the first hosts of the list that answer and have no other job of hers, all or none.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.config.errors import InputError
from paceline.config.site import Site
from paceline.launch.contract import Rendered, Request, Submitted
from paceline.launch.supervision.engine import SupervisedEngine
from paceline.launch.supervision.state import Hosts, Node

_PROBE_S = 60
# Nobody is there to answer questions; a host that is silent is lost within 15 s; a shared
# connection would outlive the process that is watched.
_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
    *("-o", "ControlMaster=no", "-o", "ControlPath=none"),
)


class SshEngine(SupervisedEngine):
    """See the module."""

    name = "ssh"

    def places(self, request: Request, site: Site) -> Hosts:
        """The hosts of the site; each takes one job at a time."""
        return Hosts(self.nodes_of(site), is_exclusive=True)

    def nodes_of(self, site: Site) -> tuple[Node, ...]:
        """The hosts of the site."""
        if not site.hosts:
            raise InputError('a site with engine = "ssh" needs hosts = ["n1", "n2"].')
        for host in site.hosts:
            if host.startswith("-") or not re.fullmatch(r"[\w.:@%\[\]-]+", host):
                raise InputError(f"hosts: {host!r} is no host that ssh takes: correct its name.")
        config = ("-F", str(Path(site.ssh_config).expanduser())) if site.ssh_config else ()
        names = [re.sub(r"[^A-Za-z0-9._-]", "_", host).lstrip("._-") for host in site.hosts]
        if len(set(names)) < len(names) or not all(names):
            raise InputError("hosts: each must have a name of its own: leave out what is twice.")
        return tuple(
            Node(name, ("ssh", *_OPTIONS, *config, "--", host))
            for name, host in zip(names, site.hosts, strict=True)
        )

    def expected_start(self, request: Request, rendered: Rendered) -> float | None:
        """Nobody knows how long other jobs hold the hosts."""
        return None

    def submit(self, request: Request, rendered: Rendered) -> Submitted:
        """See `contract.Engine`."""
        _must_have_ssh()
        return super().submit(request, rendered)

    def probe(self, site: Site, script: str) -> Mapping[str, str]:
        """See `contract.Engine`."""
        _must_have_ssh()
        nodes = self.nodes_of(site)
        with ThreadPoolExecutor(min(len(nodes), 32)) as pool:
            answers = list(pool.map(lambda node: _ask(node, script), nodes))
        if not any(answered for answered, _ in answers):
            raise InputError(
                f"no host of the site can be reached ({nodes[0].name}: {answers[0][1]}): see that "
                f"`ssh {nodes[0].name} true` works without a password."
            )
        return {
            node.name: said if answered else ""
            for node, (answered, said) in zip(nodes, answers, strict=True)
        }


def _ask(node: Node, script: str) -> tuple[bool, str]:
    """Whether the script ran there, and what it printed; else why it didn't."""
    try:
        done = subprocess.run(
            [*node.prefix, shlex.join(["bash", "-c", script])],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {_PROBE_S} s"
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return False, said[-1] if said else f"exit code {done.returncode}"
    return True, done.stdout.decode(errors="replace")


def _must_have_ssh() -> None:
    if shutil.which("ssh") is None:
        raise InputError("there is no ssh client here: install one (openssh-client).")


def engine() -> SshEngine:
    """See `paceline.launch.engines`."""
    return SshEngine()
