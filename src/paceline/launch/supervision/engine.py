"""An engine whose jobs are kept by a supervisor on this machine: what local, ssh and Ray share.

A job's id is its folder. Its records are read from there by whoever sees it; signals reach the
supervisor only from the machine that it runs on.
"""

import select
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from paceline.config.errors import InputError
from paceline.config.outputs import shown_path
from paceline.config.site import EngineName, Site
from paceline.launch.contract import (
    ID_FILE,
    Attempt,
    Observation,
    Rendered,
    Request,
    Submitted,
    Wish,
)
from paceline.launch.job_folder import job_folder
from paceline.launch.start_script import LOG_FOLDER, START_SCRIPT, start_script
from paceline.launch.supervision.relay import RELAY, RELAY_SCRIPT
from paceline.launch.supervision.state import (
    LOG,
    ORDERS,
    ORDERS_TYPE,
    STATE,
    Bundles,
    Hosts,
    Orders,
    Supervised,
    read_state,
)
from paceline.observe.run import write_atomic

_START_S = 60.0
_SIGNALS: Mapping[Wish, signal.Signals] = {"stop": signal.SIGTERM, "save": signal.SIGUSR1}


def check_num_nodes(request: Request, available: int) -> None:
    """Refuse more nodes than there are.

    Raises:
        InputError: it asks for more.
    """
    if request.num_nodes > available:
        raise InputError(
            f"{request.num_nodes} nodes were asked for and the site has {available}: ask for "
            f"at most {available}."
        )


def check_starts_whole(request: Request) -> None:
    """Refuse to start with fewer nodes than are asked for.

    Raises:
        InputError: it asks for that.
    """
    if 0 < request.fewest < request.num_nodes:
        raise InputError(
            f"only Slurm starts a job with fewer nodes than it would like: ask for --nodes "
            f"{request.num_nodes}, and let elastic.min_nodes say with how few it goes on."
        )


class SupervisedEngine(ABC):
    """See the module; `contract.Engine` says what the methods do."""

    name: EngineName

    @abstractmethod
    def places(self, request: Request, site: Site) -> Hosts | Bundles:
        """Where commands can run.

        Raises:
            InputError: the site names no such places.
        """

    @abstractmethod
    def probe(self, site: Site, script: str) -> Mapping[str, str]:
        """See `contract.Engine`."""

    def render(self, request: Request, site: Site) -> Rendered:
        """The start script, the relay's and the supervisor's orders."""
        check_starts_whole(request)
        places = self.places(request, site)
        if isinstance(places, Hosts):
            check_num_nodes(request, len(places.nodes))
        if request.spot:
            raise InputError(f'engine "{self.name}" has no spot machines: leave --spot out.')
        orders = Orders(
            name=request.name,
            places=places,
            num_nodes=request.num_nodes,
            devices_per_node=request.devices_per_node,
            min_nodes=request.min_nodes,
            time_limit_s=request.time_limit_s,
            grace_s=request.grace_s,
            restarts=request.restarts,
            after=request.after,
            at_most=request.at_most,
            group=request.group,
        )
        files = {
            START_SCRIPT: start_script(request, site),
            RELAY: RELAY_SCRIPT,
            ORDERS: f"{ORDERS_TYPE.dump_json(orders, indent=1).decode()}\n",
        }
        return Rendered(files, ORDERS)

    def expected_start(self, request: Request, rendered: Rendered) -> float | None:
        """At once: nobody knows of others."""
        return time.time()

    def submit(self, request: Request, rendered: Rendered) -> Submitted:
        """Start the supervisor, which waits until the id is written."""
        folder = request.folder
        for name in request.after:
            if read_state(Path(name)) is None:
                raise InputError(f"{name} is the id of no job here: give one of `paceline jobs`.")
        with job_folder(request, rendered, STATE, LOG):
            self._start(folder)
        return Submitted(str(folder), folder)

    def _start(self, folder: Path) -> None:
        module = "paceline.launch.supervision.supervisor"
        with (folder / LOG).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        with process:  # it ends at once: the supervisor is its child
            assert process.stdin is not None
            assert process.stdout is not None
            is_heard, _, _ = select.select([process.stdout], [], [], _START_S)
            if not is_heard or process.stdout.readline() != b"ready\n":
                process.stdin.close()
                process.kill()
                said = (folder / LOG).read_text(errors="replace").strip().splitlines()
                raise InputError(
                    f"the job's supervisor did not start ({said[-1] if said else 'no word'}): "
                    f"see whether {shown_path(folder)} can be written."
                )
            write_atomic(folder / ID_FILE, str(folder))
            process.stdin.write(b"go\n")

    def observe(self, job: Submitted) -> Observation:
        """What its supervisor wrote, if it lives."""
        found = read_state(job.folder)
        if found is None:
            return Observation("lost", said="it has no record of a supervisor")
        return found.now

    def signal(self, job: Submitted, wish: Wish) -> None:
        """Tell its supervisor."""
        found = read_state(job.folder)
        if found is None or found.now.state not in ("queued", "running"):
            return
        self._must_be_here(found)
        found.supervisor.send(_SIGNALS[wish])

    def _must_be_here(self, found: Supervised) -> None:
        if not found.supervisor.is_here:
            raise InputError(
                f"the job is kept by a process on {found.supervisor.host}, which only that machine "
                "can signal: give the command there."
            )

    def logs(self, job: Submitted) -> tuple[Path, ...]:
        """One file for each attempt and node."""
        return tuple(sorted((job.folder / LOG_FOLDER).glob("*.log")))

    def usage(self, job: Submitted) -> tuple[Attempt, ...]:
        """As its supervisor counted."""
        found = read_state(job.folder)
        return () if found is None else found.attempts
