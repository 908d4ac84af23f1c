"""Nodes of an elastic run on this machine: real agents, and ranks that add up ones over gloo.

Each agent is a process of its own under another PACELINE_NODE, each rank one that the agent starts.
What they did stands in files: a line for each step that a rank finished.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from paceline.config.job import Job, read_job, to_raw
from paceline.elastic.generation import read_generation
from paceline.observe.run import Run
from tests.ranks import WARM


def job_of(num_nodes: int, steps: int, devices: int, **elastic: Any) -> Job:
    """A Job over so many nodes; its network is never made."""
    raw = to_raw(read_job(None))
    raw["cluster"] |= {"device": "cpu", "num_nodes": num_nodes, "devices_per_node": devices}
    raw["cluster"]["device"] = {
        "name": "cpu",
        "kind": "cpu",
        "memory_bytes": {"value": 1e9, "origin": "assumed", "source": "a test"},
        "precisions": ["fp32"],
    }
    ways = num_nodes * devices
    raw["layout"] = {"dp": ways, "micro_batch": 1, "precision": "fp32"}
    raw["train"] = {"steps": steps, "global_batch": ways, "seq_len": 8}
    raw["optim"] |= {"warmup_steps": 0, "decay_steps": 0, "schedule": "constant"}
    raw["elastic"] = {"min_nodes": 1, "heartbeat_s": 1.0, "wait_s": 20.0} | elastic
    return Job.parse(raw)


ELASTIC_ON_A_LAN = {"heartbeat_s": 0.8, "wait_s": 60.0}


@dataclass(frozen=True)
class Behaviour:
    """What a rank of the test does besides adding up ones."""

    step_s: float = 0.01
    steps: int = 10**6
    num_coming: int | None = None
    """What a scheduler tells its agent: PACELINE_NUM_NODES."""
    fail_at: int = 0
    """The step after which rank 1 raises."""
    hang_at: int = 0
    """The step before whose sum, or at the end after which, rank 1 sleeps, once."""
    first_limit_s: float = 60.0
    input_error: bool = False


@dataclass
class Nodes:
    """A run of several nodes, for as long as the context lasts."""

    folder: Path
    num_nodes: int
    devices: int = 1
    behaviour: Behaviour = field(default_factory=Behaviour)
    elastic: dict[str, Any] = field(default_factory=dict)
    agents: dict[str, Any] = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)

    @property
    def run(self) -> Run:
        return Run(self.folder / "run")

    def __enter__(self) -> "Nodes":
        self.run.path.mkdir(parents=True, exist_ok=True)
        (self.folder / "steps").mkdir(exist_ok=True)
        warm = WARM.Process(target=_import)  # no test waits for torch's import
        warm.start()
        warm.join()
        return self

    def __exit__(self, kind: Any, *_rest: object) -> None:
        self.remember()
        for agent in self.agents.values():
            agent.kill()
            agent.join()
        orphans = self.still_there(5.0)
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if kind is None:
            assert not orphans, "ranks outlived their agents"

    def start(self, *names: str) -> "Nodes":
        for name in names:
            arguments = (name, self.folder, self.num_nodes, self.devices)
            agent = WARM.Process(
                target=_agent_main, args=(*arguments, self.behaviour, self.elastic)
            )
            agent.start()
            self.agents[name] = agent
        return self

    def rank_pids(self, name: str) -> dict[int, int]:
        """Local rank -> pid, of the newest processes."""
        file = self.folder / "steps" / f"{name}.pids"
        lines = file.read_text().splitlines() if file.exists() else []
        return {int(local): int(pid) for local, pid in (line.split() for line in lines)}

    def remember(self) -> None:
        for file in (self.folder / "steps").glob("*.pids"):
            self.pids |= {int(line.split()[1]) for line in file.read_text().splitlines()}

    def still_there(self, limit_s: float) -> list[int]:
        """Processes of ranks that don't end within a time."""
        until = time.monotonic() + limit_s
        while True:
            alive = []
            for pid in self.pids:
                with suppress(psutil.Error):
                    if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                        alive.append(pid)
            if not alive or time.monotonic() > until:
                return alive
            time.sleep(0.02)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [e for e in self.run.events().lines if kind in (None, e["event"])]

    def steps(self) -> list[dict[str, Any]]:
        """Lines of all ranks: generation, rank, world, step, node, pid, time."""
        lines = []
        for file in (self.folder / "steps").glob("*.jsonl"):
            lines += [
                json.loads(line)
                for line in file.read_text().splitlines(keepends=True)
                if line.endswith("\n")
            ]
        return sorted(lines, key=lambda line: line["time"])

    def assert_one_history(self) -> None:
        """Each rank made its steps in the generations that were claimed, and in their order: none
        is missing, none was made twice by one process. Another one makes a step again where only
        the lost rank had its sum."""
        lines = self.steps()
        first_in: dict[int, int] = {}
        claimed = {
            number: read_generation(self.run.path / "generations", number)
            for number in {line["generation"] for line in lines}
        }
        for line in lines:
            first_in.setdefault(line["step"], line["generation"])
            generation = claimed[line["generation"]]
            assert generation.place_of(line["rank"])[0] == line["node"], line
            assert generation.num_ranks == line["world"], line
        assert sorted(first_in) == list(range(1, max(first_in) + 1))
        order = [first_in[step] for step in sorted(first_in)]
        assert order == sorted(order), "a later step in an earlier generation"
        made = [(line["pid"], line["step"]) for line in lines]
        assert len(made) == len(set(made)), "a step made twice"

    def until(self, is_so: Callable[[], Any], limit_s: float = 400.0) -> Any:
        end = time.monotonic() + limit_s
        while not (found := is_so()):
            if time.monotonic() > end:
                said = self.folder / "said.txt"
                raise AssertionError(
                    f"it never came to that; said: {said.read_text() if said.exists() else ''}"
                    f"\nevents: {self.events()}"
                )
            time.sleep(0.01)
        return found

    def until_step(self, generation: int, world: int | None = None, more: int = 0) -> int:
        """Wait for a step of a generation (or a later one); return its number."""

        def found() -> list[dict[str, Any]]:
            lines = [one for one in self.steps() if one["generation"] >= generation]
            return [one for one in lines if world in (None, one["world"])][more:]

        return self.until(found)[0]["generation"]

    def generations(self) -> list[dict[str, Any]]:
        files = (self.run.path / "generations").glob("*.json")
        return [json.loads(file.read_text()) for file in sorted(files, key=lambda f: int(f.stem))]

    def newest(self) -> dict[str, Any]:
        return self.generations()[-1]

    def names(self) -> list[str]:
        generation = self.newest()
        return [node["name"] for node in generation["nodes"][: generation["num_active"]]]

    def codes(self, limit_s: float = 100.0) -> dict[str, int | None]:
        for agent in self.agents.values():
            agent.join(limit_s)
        return {name: agent.exitcode for name, agent in self.agents.items()}

    def said(self) -> str:
        file = self.folder / "said.txt"
        return file.read_text() if file.exists() else ""

    def kill_agent(self, name: str) -> None:
        self.remember()
        self.agents[name].kill()
        self.agents[name].join()


def _import() -> None:
    import paceline.elastic.agent
    import paceline.elastic.link  # noqa: F401


class _Process:
    """A rank's process, as `train.launch.RankProcess` is one."""

    def __init__(self, process: Any) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()


def _agent_main(
    name: str,
    folder: Path,
    num_nodes: int,
    devices: int,
    behaviour: Behaviour,
    elastic: dict[str, Any],
) -> None:
    from paceline.config.errors import InputError
    from paceline.elastic.agent import run_agent
    from paceline.elastic.decision import plain_rule

    os.environ.setdefault("PACELINE_ADDRESS", "127.0.0.1")
    os.environ["PACELINE_NODE"] = name
    if behaviour.num_coming is not None:
        os.environ["PACELINE_NUM_NODES"] = str(behaviour.num_coming)
    steps = folder / "steps"

    def say(sentence: str) -> None:
        with (folder / "said.txt").open("a") as out:
            out.write(f"{time.monotonic():.3f} {name}: {sentence}\n")

    def start(place: Any) -> _Process:
        # Forked: a forkserver of each agent's own would import torch first.
        process = get_context("fork").Process(target=_rank_main, args=(place, folder, behaviour))
        process.start()
        with (steps / f"{name}.pids").open("a") as out:
            out.write(f"{place.local_rank} {process.pid}\n")
        return _Process(process)

    def job_on(count: int) -> Job | None:
        return job_of(count, behaviour.steps, devices, **elastic)

    job = job_on(num_nodes)
    try:
        code = run_agent(Run(folder / "run"), job, start, plain_rule(job_on), job_on, say)
    except InputError as error:
        say(f"InputError: {error}")
        code = 2
    os._exit(code)


def _rank_main(place: Any, folder: Path, behaviour: Behaviour) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(3, 1 << 12)  # the agent's sockets
    import torch
    import torch.distributed as dist

    from paceline.comm.rank_env import Ranks
    from paceline.comm.rendezvous import join_generation, store_of_generation
    from paceline.elastic.cut import GroupSockets
    from paceline.elastic.link import RankLink

    os.environ["LOCAL_RANK"] = str(place.local_rank)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    stop = [False]
    groups: list[GroupSockets] = []

    def cut(_number: int) -> None:
        for group in groups:
            group.cut()

    link = RankLink(
        place.agent,
        on_leave=cut,
        on_stop=lambda _within_s: stop.__setitem__(0, True),
        first_limit_s=behaviour.first_limit_s,
    )
    log = (folder / "steps" / f"{place.node}-{os.getpid()}.jsonl").open("a", buffering=1)
    step = 0

    def hang_once() -> None:
        once = folder / "hung"
        if rank == 1 and step == behaviour.hang_at > 0 and not once.exists():
            once.touch()
            time.sleep(1000)

    while (got := link.next_generation()) is not None:
        generation, rank, _ = got
        world = generation.num_ranks
        try:
            hosts = {generation.store[0], *(node.address for node in generation.active)}
            for group in groups:
                group.close()
            groups[:] = [GroupSockets(hosts)]
            ranks = Ranks(rank, world, place.local_rank, local_world_size=world)
            store = store_of_generation(
                ranks, generation.store, generation.number, 20, lambda: link.must_leave
            )
            join_generation(ranks, store, 60)
            at = torch.tensor([float(step)])
            if world > 1:
                dist.all_reduce(at, op=dist.ReduceOp.MAX)
            groups[0].collect()
            step = int(at.item())
            link.at(step)
            link.tell("joined", source="live" if step else "start", seconds={"connect": 0.01})
            while True:
                link.enter("forward_backward")
                time.sleep(behaviour.step_s)
                if rank == 1 and step == behaviour.fail_at > 0:
                    raise ValueError("the program is wrong")
                hang_once()
                link.enter("agree")
                if link.must_leave:  # a rank that is alone meets nobody
                    raise RuntimeError("its generation is over")
                both = torch.tensor([1.0, float(stop[0])])
                if world > 1:
                    dist.all_reduce(both)
                assert both[0].item() == world
                step += 1
                link.at(step)
                line: dict[str, Any] = {
                    "generation": generation.number,
                    "rank": rank,
                    "world": world,
                }
                line |= {"step": step, "node": place.node, "pid": os.getpid()}
                line |= {"time": time.monotonic()}
                log.write(json.dumps(line) + "\n")
                link.tell("stepped")
                if both[1].item() or step >= behaviour.steps:
                    link.tell("saved")
                    link.enter("checkpoint")
                    hang_once()
                    link.tell("done")
                    break
        except RuntimeError as error:
            link.tell("lost", text=str(error)[:200])
        except ValueError as error:
            text = f"Traceback of a test\nValueError: {error}"
            link.tell("failed", failure={"kind": "program", "text": text, "time": time.time()})
            os._exit(1)
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":  # an agent in a network namespace of its own
    _agent_main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), 1, Behaviour(), ELASTIC_ON_A_LAN)
