"""What every engine does: a scheduler, a list of hosts, or this machine.

`render` is pure: no clock, no network, no files but those it returns. `submit` makes what was
rendered real, or leaves nothing behind. The others ask and tell. Words are the same for all
engines; what an engine says itself is kept beside them.

An engine is `engine()` of the module `paceline.launch.engines.<name>`. On each node it runs
`bash start.sh` in the job's folder (`launch.start_script`) with ATTEMPT and, where the scheduler
doesn't name nodes itself, PACELINE_NODE set. That script writes the node's records and its log.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from paceline.config.errors import InputError
from paceline.config.site import Site

State = Literal["queued", "running", "finished", "saved", "failed", "cancelled", "lost", "unknown"]
"""queued: waits for machines. finished: exit code 0. saved: exit code 75, nobody starts it again.
failed: any other exit code. cancelled: a person stopped it. lost: the engine knows nothing of it,
or its machines vanished and nobody starts it again. unknown: the engine can't be asked; no engine
says that itself."""

Reason = Literal[
    "resources",
    "priority",
    "quota",
    "limit",
    "dependency",
    "held",
    "begin_time",
    "requeued",
    "node_down",
    "unschedulable",
    "starting",
    "unknown",
]
"""Why a job is queued. resources: not enough is free. priority: others come first. quota: of the
account. limit: of the partition, the QOS or the number of jobs. unschedulable: it can never start
as it is. starting: it was given machines that get ready."""

Wish = Literal["save", "stop"]
"""save: SIGUSR1, write a checkpoint and go away in time to be started again. stop: SIGTERM, and
nobody starts it again."""

ATTEMPT = "PACELINE_ATTEMPT"
"""The variable that tells the start script which attempt this is, from 1."""
NUM_NODES = "PACELINE_NUM_NODES"
"""The variable that tells agents how many nodes an attempt has, where it may have fewer than the
Job: they wait for no more."""
ID_FILE = "id"
"""In a job's folder: the engine's id. A folder without it was never submitted."""


@dataclass(frozen=True)
class Request:
    """What is asked of an engine: one command on each of some nodes, all or none."""

    name: str
    command: tuple[str, ...]
    """Run once on each node, in `directory`: an agent, which starts the ranks of its node."""
    directory: Path
    """The working directory; all nodes see it."""
    folder: Path
    """Where scripts, logs and records of this job stand; all nodes see it."""
    num_nodes: int
    devices_per_node: int
    min_nodes: int = 0
    """Nodes with which the command goes on by itself after a loss; 0: it needs all of them."""
    fewest: int = 0
    """Nodes with which it may start, each time; 0: with all."""
    grow_after_s: int = 0
    """Seconds of an attempt with fewer nodes after which it is saved to come back with more that
    are free; 0: never."""
    node_type: str = ""
    """A name in `Site.node_types`; "": the site has one, or none is named."""
    time_limit_s: int | None = None
    """After which the engine ends it; None: the engine's own."""
    grace_s: int = 60
    """From the notice (SIGTERM) to the end (SIGKILL)."""
    restarts: int = 10
    """How often exit code 75, or a lost node, starts it again."""
    priority: int = 0
    """Above 0: before other jobs of the same person; as far as the engine lets her."""
    after: tuple[str, ...] = ()
    """Ids of jobs that must have finished before."""
    at_most: int | None = None
    """So many jobs of its `group` run at once; None: as many as fit."""
    group: str = ""
    """Of a sweep: its name."""
    spot: bool = False
    """On machines that may be taken away at any time, where the site has them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set for the command. Never secrets: it is written into files."""

    @property
    def goes_on(self) -> bool:
        """Whether those that are left may go on without a node."""
        return 0 < self.min_nodes < self.num_nodes


@dataclass(frozen=True)
class Rendered:
    """What an engine takes, as text."""

    files: Mapping[str, str]
    """By name below `Request.folder`."""
    main: str
    """The name of the one that is submitted."""


@dataclass(frozen=True)
class Submitted:
    """A job that an engine was given."""

    id: str
    """The engine's."""
    folder: Path
    """`Request.folder`."""


@dataclass(frozen=True)
class Attempt:
    """One time that a job had machines, or waited for them. Times are Unix seconds."""

    number: int
    """From 1."""
    submitted: float
    """When it began to wait."""
    started: float | None
    ended: float | None
    nodes: tuple[str, ...]
    num_devices: int
    """Held, over all nodes."""
    exit_code: int | None
    """Of the command; None: it runs, or was killed with its machine."""
    state: str
    """In the engine's own words: COMPLETED, NODE_FAIL, PREEMPTED."""


@dataclass(frozen=True)
class Observation:
    """How a job stands now."""

    state: State
    reason: Reason | None = None
    """Of a job that is queued."""
    said: str = ""
    """The engine's own words for it."""
    nodes: tuple[str, ...] = ()
    """That it holds."""
    attempt: int = 1
    exit_code: int | None = None
    expected_start: float | None = None
    """Unix time, as the engine estimates it."""


class SilentError(InputError):
    """The engine does not answer now: nothing can be known of any job that it has."""


class Engine(Protocol):
    """See the module. Every method may raise InputError: one sentence, and nothing was changed."""

    @property
    def name(self) -> str:
        """A name in `Site.engine`."""

    def render(self, request: Request, site: Site) -> Rendered:
        """The files that start this job."""

    def expected_start(self, request: Request, rendered: Rendered) -> float | None:
        """Unix time at which it would start if it were submitted now; None: nobody can tell."""

    def submit(self, request: Request, rendered: Rendered) -> Submitted:
        """Write the files, hand them over, and write ID_FILE before the job can end; or leave
        nothing behind."""

    def observe(self, job: Submitted) -> Observation:
        """How it stands."""

    def signal(self, job: Submitted, wish: Wish) -> None:
        """Tell it to save, or to stop for good; returns at once. One that has ended stays so."""

    def logs(self, job: Submitted) -> tuple[Path, ...]:
        """Files of what its nodes wrote, the oldest attempt first; they may still grow."""

    def usage(self, job: Submitted) -> tuple[Attempt, ...]:
        """Every attempt so far, the oldest first, without a second counted twice."""

    def probe(self, site: Site, script: str) -> Mapping[str, str]:
        """What a short shell script prints on nodes of the site, by node: on all of them, or on
        one where asking takes machines from others. Of a node that can't be reached: "", and why
        is raised where none can."""


@runtime_checkable
class Explains(Protocol):
    """An engine that knows more about a wait than `Observation.reason`."""

    def why(self, job: Submitted, request: Request, site: Site) -> tuple[str, ...]:
        """Sentences: what it waits for, what is ahead, what would start now."""


@runtime_checkable
class Shrinks(Protocol):
    """An engine that takes back a part of what a job holds."""

    def shrink(self, job: Submitted, request: Request, nodes: tuple[str, ...]) -> None:
        """Give back these nodes; what runs there is killed, and the others go on.

        Raises:
            InputError: the others could not go on.
        """
