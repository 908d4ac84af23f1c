"""`paceline train` as the agents of nodes that are plain processes of this host: no privileges.

Every process that an agent starts, and what these start, inherits two variables: a mark of this
start and the name of the node. By them a whole node is found, frozen and killed, and whatever
outlives the run.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from benchmarks.elastic.history import Line, read_lines
from benchmarks.elastic.outages import Stamp, read_stamps
from benchmarks.netlab import Laboratory
from benchmarks.netlab.laboratory import DEVICE
from benchmarks.peers.stamps import FOLDER, NODE

ENTRY = Path(__file__).with_name("entry.py")
_MARK = "ELASTIC_MARK"
_TAIL_BYTES = 1 << 16


class Agents:
    """The agents of a run, each in a session of its own, started again where they are lost."""

    def __init__(
        self,
        num_nodes: int,
        num_devices: int,
        job: Path,
        folder: Path,
        settings: Sequence[str],
        variables: Mapping[str, str] | None = None,
        laboratory: Laboratory | None = None,
    ) -> None:
        """Describe them; nothing is started.

        Args:
            num_devices: of each node.
            job: a job.toml.
            folder: where the Run, notes, stamps and logs go.
            settings: SECTION.KEY=VALUE.
            variables: of the environment of all processes.
            laboratory: whose hosts the nodes are; None: all are on this one.
        """
        self.num_nodes = num_nodes
        self._folder = folder
        sets = [f"cluster.num_nodes={num_nodes}", f"cluster.devices_per_node={num_devices}"]
        self._command = [sys.executable, str(ENTRY), "train", str(job)]
        self._command += ["--runs", str(folder / "runs")]
        self._command += [f"--set={each}" for each in (*sets, *settings)]
        self.mark = uuid4().hex
        root = ENTRY.parents[2]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "SLURM"))}
        self._environment = {
            **kept,
            "PYTHONPATH": f"{root}:{root / 'src'}",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "ELASTIC_NOTES": str(self.notes),
            FOLDER: str(folder / "stamps"),
            _MARK: self.mark,
            **(variables or {}),
        }
        self._laboratory = laboratory
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *_failure: object) -> None:
        for pid in self.pids():
            _signal(pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()

    @property
    def run(self) -> Path:
        """The Run directory; there is one."""
        return next((self._folder / "runs").iterdir())

    @property
    def has_run(self) -> bool:
        """Whether there is a Run directory yet."""
        runs = self._folder / "runs"
        return runs.is_dir() and any(runs.iterdir())

    @property
    def notes(self) -> Path:
        """Where ranks note their steps."""
        return self._folder / "notes"

    @property
    def logs(self) -> Path:
        """Where agents' outputs are, one file each, all starts of a node in one."""
        return self._folder / "logs"

    def start(self, node: int, variables: Mapping[str, str] | None = None) -> None:
        """Start a node's agent, where none runs."""
        if node in self._processes:
            self._processes[node].wait()
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.logs / f"n{node}.log").open("ab") as log:
            self._processes[node] = subprocess.Popen(
                [*self._entering(node), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **self._environment,
                    "PACELINE_NODE": f"n{node}",
                    NODE: str(node),
                    **self._address(node),
                    **(variables or {}),
                },
                cwd=self._folder,
                start_new_session=True,
            )

    def _entering(self, node: int) -> Sequence[str]:
        """The words that put a command on a node."""
        return () if self._laboratory is None else self._laboratory.entering(node)

    def _address(self, node: int) -> Mapping[str, str]:
        if self._laboratory is None:
            return {"PACELINE_ADDRESS": "127.0.0.1"}
        return {
            "PACELINE_ADDRESS": self._laboratory.address(node),
            "GLOO_SOCKET_IFNAME": DEVICE,
        }

    @property
    def num_running(self) -> int:
        """Agents that run."""
        return sum(process.poll() is None for process in self._processes.values())

    def exit_code(self, node: int) -> int | None:
        """Of a node's agent; None while it runs."""
        return self._processes[node].poll()

    def agent(self, node: int) -> int:
        """The process of a node's agent."""
        return self._processes[node].pid

    def pids(self, node: int | None = None) -> list[int]:
        """All processes of this start that are there, of one node or all."""
        wanted = {f"{_MARK}={self.mark}".encode()}
        if node is not None:
            wanted.add(f"PACELINE_NODE=n{node}".encode())
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with suppress(OSError):
                    if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                        found.append(int(folder.name))
        return found

    def send(self, node: int, number: signal.Signals) -> None:
        """Send a signal to every process of a node, the agent first."""
        agent = self.agent(node)
        for pid in sorted(self.pids(node), key=lambda pid: pid != agent):
            _signal(pid, number)

    def send_one(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to one process, which may be gone."""
        _signal(pid, number)

    def stamps(self) -> list[Stamp]:
        """Of all ranks so far."""
        return read_stamps(self._folder / "stamps")

    def rank_pids(self) -> dict[int, int]:
        """Rank -> process, of those that have stamped a step and are there."""
        there = set(self.pids())
        return {stamp.rank: stamp.pid for stamp in self.stamps() if stamp.pid in there}

    def node_of(self, rank: int) -> int | None:
        """The node of the process that stamped a step as this rank last."""
        return {stamp.rank: stamp.node for stamp in self.stamps()}.get(rank)

    def leader(self) -> int | None:
        """The node whose agent leads, by the newest generation."""
        newest = self._newest()
        return int(newest["leader"].removeprefix("n")) if newest else None

    def training(self) -> list[int]:
        """The nodes of the newest generation, without its spares."""
        newest = self._newest() or {"nodes": [], "num_active": 0}
        return [int(name.removeprefix("n")) for name in newest["nodes"][: newest["num_active"]]]

    def _newest(self) -> Line | None:
        generations = [event for event in self.events() if event["event"] == "generation"]
        return generations[-1] if generations else None

    def events(self) -> list[Line]:
        """Of events.jsonl so far."""
        return read_lines(self.run / "events.jsonl")[0] if self.has_run else []

    def step(self) -> int:
        """Steps whose lines are written."""
        file = self.run / "metrics.jsonl" if self.has_run else None
        if file is None or not file.exists():
            return 0
        with file.open("rb") as lines:
            lines.seek(max(0, file.stat().st_size - _TAIL_BYTES))
            last = lines.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        return int(last.partition(b'"step": ')[2].partition(b",")[0] or 0)

    def outputs(self) -> str:
        """The ends of what the agents wrote."""
        ends = [
            f"--- {file.name}\n{file.read_text()[-3000:]}" for file in sorted(self.logs.iterdir())
        ]
        return "\n".join(ends)

    def wait(self, limit_s: float) -> dict[int, int | None]:
        """The agents' exit codes, once all have ended or the limit is reached."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and None in map(self.exit_code, self._processes):
            time.sleep(0.05)
        return {node: self.exit_code(node) for node in self._processes}

    def outliving(self, patience_s: float = 10.0) -> list[str]:
        """Sentences about processes that are still there after the agents' end."""
        deadline = time.monotonic() + patience_s
        while (pids := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [f"process {pid} ({_what(pid)}) outlived the run." for pid in pids]


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _what(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    return "gone by now"
