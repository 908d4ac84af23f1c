"""How each contestant is started on the nodes of a laboratory: one process that trains on each.

Every contestant gets what its documentation names for a loss that is to be survived, and two
seconds where it has a heartbeat:

- ours: `paceline train` on every node, `elastic.min_nodes = 1`;
- torchft: a lighthouse on node 0, and on every node a torchrun that starts its replica again;
- torchrun: an elastic agent on every node, meeting by c10d on node 0; it needs all but one node;
- NVRx: the same with `ft_launcher`.

The others of a pair are the same work without being ready for a loss: `paceline train` as four
ranks of a launcher, and DistributedDataParallel by torchrun without checkpoints.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.elastic.outages import Stamp, read_stamps
from benchmarks.netlab import Laboratory, StartedRanks
from benchmarks.peers.stamps import FOLDER, NODE

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / "peers"
HEARTBEAT_S = 2
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Else ranks that are started again read the address of a store that is gone (pytorch#135712).
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
_LIGHTHOUSE_PORT, _MEETING_PORT = 29510, 29400
_MANY = 10**6


@dataclass(frozen=True)
class Contest:
    """What all contestants train, and where."""

    num_nodes: int
    folder: Path
    """With job.toml (concrete), samples.npy of the workload and spec.toml, the Job as written."""
    peers: Path | None
    """A folder of packages besides the environment's, for peers alone."""
    settings: Sequence[str] = ()
    """Of ours, SECTION.KEY=VALUE."""


Command = Callable[[Contest, Laboratory, int, Path], list[Any]]


def ours(contest: Contest, lab: Laboratory, node: int, place: Path) -> list[Any]:
    """The agent of a node."""
    elastic = ["elastic.min_nodes=1", f"elastic.heartbeat_s={HEARTBEAT_S}"]
    words = [f"PACELINE_NODE=n{node}", f"PACELINE_ADDRESS={lab.address(node)}"]
    return [*words, *_paceline(contest, place, elastic)]


def ours_off(contest: Contest, lab: Laboratory, node: int, place: Path) -> list[Any]:
    """A rank of the same run that no loss may happen to."""
    launched = {
        "RANK": node,
        "WORLD_SIZE": contest.num_nodes,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": lab.address(0),
        "MASTER_PORT": _MEETING_PORT,
    }
    return [*(f"{name}={value}" for name, value in launched.items()), *_paceline(contest, place)]


def torchft(contest: Contest, lab: Laboratory, node: int, place: Path) -> list[Any]:
    """A replica group of one process, which torchrun starts again."""
    address = f"http://host0:{_LIGHTHOUSE_PORT}"
    script = [PEERS / "torchft_ddp.py", contest.folder, place, contest.num_nodes]
    alone = ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    launcher = [*_TORCHRUN, *alone, "--nproc-per-node=1", f"--max-restarts={_MANY}"]
    return [f"TORCHFT_LIGHTHOUSE={address}", *launcher, *script]


def torchrun(contest: Contest, lab: Laboratory, node: int, place: Path) -> list[Any]:
    """An elastic agent; its worker goes on from its checkpoint."""
    return [_OWN_STORE, *_TORCHRUN, *_meeting(contest, lab, node), *_restarted(contest, place)]


def nvrx(contest: Contest, lab: Laboratory, node: int, place: Path) -> list[Any]:
    """The same by NVRx's launcher."""
    launcher = [sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]
    how = [*_meeting(contest, lab, node), "--ignore-missing-fault-tol-cfg"]
    return [_OWN_STORE, *launcher, *how, *_restarted(contest, place)]


def plain_ddp(contest: Contest, lab: Laboratory, node: int, place: Path) -> list[Any]:
    """DistributedDataParallel that no loss may happen to."""
    return [
        _OWN_STORE,
        *_TORCHRUN,
        *_meeting(contest, lab, node),
        *_restarted(contest, place),
        "plain",
    ]


@dataclass(frozen=True)
class Contestant:
    """One of those who are compared."""

    command: Command
    package: str | None = None
    """That has to be there, by the name it is imported by."""
    service: Sequence[Any] | None = None
    """What runs on node 0 besides."""


_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
CONTESTANTS = {
    "Paceline": Contestant(ours),
    "torchft": Contestant(
        torchft,
        "torchft",
        (
            *(sys.executable, PEERS / "torchft_lighthouse.py", f"--bind=[::]:{_LIGHTHOUSE_PORT}"),
            *("--min_replicas=1", "--join_timeout_ms=1000", "--quorum_tick_ms=50"),
            f"--heartbeat_timeout_ms={HEARTBEAT_S * 1000}",
        ),
    ),
    "torchrun": Contestant(torchrun),
    "NVRx": Contestant(nvrx, "nvidia_resiliency_ext"),
    "Paceline, not elastic": Contestant(ours_off),
    "plain DDP": Contestant(plain_ddp),
}
READY = ("Paceline", "torchft", "torchrun", "NVRx")
"""Those who go on after a loss."""
WITHOUT = {"Paceline": "Paceline, not elastic", "torchft": "plain DDP", "torchrun": "plain DDP"}
"""Contestant -> the same work without being ready for a loss."""


def is_there(name: str, peers: Path | None) -> bool:
    """Whether a contestant's package can be imported."""
    package = CONTESTANTS[name].package
    in_folder = peers is not None and package is not None and (peers / package).is_dir()
    return package is None or in_folder or find_spec(package) is not None


class Started:
    """A contestant under way on all nodes of a laboratory."""

    def __init__(self, name: str, contest: Contest, lab: Laboratory, place: Path) -> None:
        """Start it.

        Args:
            place: a folder of its own; a peer's checkpoint, our Run and the stamps go there.
        """
        self._stamps, self._lab = place / "stamps", lab
        self._contest, self._place, self._contestant = contest, place, CONTESTANTS[name]
        place.mkdir(parents=True)
        self._parts: list[StartedRanks] = []
        if self._contestant.service is not None:
            self._parts.append(self._start(0, self._contestant.service))
        self._nodes = [self._start_node(node) for node in range(contest.num_nodes)]

    def stamps(self) -> list[Stamp]:
        """Of all ranks so far."""
        return read_stamps(self._stamps)

    def outputs(self) -> str:
        """Stop it, and what its processes wrote."""
        self.stop()
        finished = [one for part in self._parts for one in part.wait(0)]
        return "\n".join(f"--- host{one.host}, code {one.code}\n{one.output}" for one in finished)

    @property
    def num_running(self) -> int:
        """Nodes whose program still runs."""
        return sum(part.are_running for part in self._nodes)

    def stop(self) -> None:
        """End everything on the nodes at once."""
        for part in self._parts:
            part.kill()
        self._lab.clear()

    def _start_node(self, node: int) -> StartedRanks:
        command = self._contestant.command(self._contest, self._lab, node, self._place)
        return self._start(node, command)

    def _start(self, node: int, command: Sequence[Any]) -> StartedRanks:
        settings = _settings(self._contest, node, self._stamps)
        unset = [word for name in _PLACE for word in ("-u", name)]
        part = self._lab.start(
            ["env", *unset, *command], settings=settings, folder=self._place, only_on=node
        )
        self._parts.append(part)
        return part


def _settings(contest: Contest, node: int, stamps: Path) -> Mapping[str, str]:
    paths = [HERE.parents[1], HERE.parents[1] / "src", *([contest.peers] if contest.peers else [])]
    return {
        FOLDER: str(stamps),
        NODE: str(node),
        "PYTHONPATH": ":".join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _paceline(contest: Contest, place: Path, settings: Sequence[str] = ()) -> list[Any]:
    cluster = [f"cluster.num_nodes={contest.num_nodes}", "cluster.devices_per_node=1"]
    sets = [f"--set={each}" for each in (*cluster, *contest.settings, *settings)]
    job = contest.folder / "spec.toml"
    return [sys.executable, HERE / "entry.py", "train", job, "--runs", place / "runs", *sets]


def _meeting(contest: Contest, lab: Laboratory, node: int) -> list[Any]:
    """How agents of torchrun meet, and find out within the heartbeat that one is gone."""
    alive = f"keep_alive_interval={HEARTBEAT_S / 2:g},keep_alive_max_attempt=2"
    return [
        f"--nnodes={contest.num_nodes - 1}:{contest.num_nodes}",
        "--nproc-per-node=1",
        f"--max-restarts={_MANY}",
        "--rdzv-backend=c10d",
        "--rdzv-id=elastic",
        f"--rdzv-endpoint={lab.address(0)}:{_MEETING_PORT}",
        f"--rdzv-conf=last_call_timeout={HEARTBEAT_S},{alive}",
        f"--local-addr={lab.address(node)}",
    ]


def _restarted(contest: Contest, place: Path) -> list[Any]:
    return [PEERS / "restarted_ddp.py", contest.folder, place / "checkpoint.pt"]
