"""One contestant: it submits the trace's jobs to a laboratory of its own, from which machines are
taken away, until all are done.

A preempted machine goes to a job of a partition that comes first: Slurm tells the job that has it
(SIGTERM, or the signal that it asked for), gives it GRACE_S, and puts it back. A lost one is killed
with all that runs on it, and comes back.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Thread

from benchmarks.cluster.trace import GRACE_S, NODES, Loss, Trace, TracedJob
from benchmarks.cluster.work import Work
from benchmarks.provenance import ROOT
from benchmarks.slurmlab import Laboratory

LOOK_S = 0.25
_MISSED_S = 60.0
"""After which a person sees that a job is gone, or waits for nothing."""
_LIMIT_S = 3 * 3600.0
GIVE_UP = "give-up"
"""A file beside the contestants' folders: seconds after which who is not done is given up."""
_SITE = """
[lab]
engine = "slurm"
partition = "spot"
spot_partition = "spot"
grace_s = {grace}
# Times here are a hundredth of real ones.
grow_after_s = 40
# All nodes are this machine.
setup = ["export PACELINE_ADDRESS=127.0.0.1 GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1"]
[lab.node_types.fake]
cluster = "1xH100-SXM"
num_nodes = {nodes}
select = ["--gpus-per-node=1"]
"""


@dataclass
class Hit:
    """A loss that struck a job."""

    at_s: float
    kind: str
    job: str
    """Its name."""
    node: str


@dataclass
class Outcome:
    """What became of the trace."""

    contestant: str
    ended_s: float
    """From the first submission to the end of the last job, or until it was given up."""
    num_left: int
    """Jobs that were not done then."""
    job_ended_s: dict[str, float]
    """By name, from the first submission."""
    hits: list[Hit]
    steps_again: dict[str, int]
    """By name: steps that were done more than once."""
    held_device_s: int
    """As sacct counts them, of all jobs of the trace. Slurm 22.05 gives one entry to attempts of a
    job that went on without a lost node and was put back later: with these the sum is too large."""
    seen_device_s: float
    """As squeue showed nodes to be held, every LOOK_S."""
    ledger_device_s: int | None = None
    """As Paceline counts them."""
    saved: int | None = None
    """Preemptions after which the job had saved in time."""
    num_preempted: int = 0
    submitted_again: list[str] = field(default_factory=list)
    """Jobs that ended without being done, or waited for nothing: a person starts them again."""


@dataclass
class _Live:
    """A job that was submitted."""

    traced: TracedJob
    slurm_id: str
    struck_at: float = 0.0
    """When it was last struck, seconds since 1970."""
    gone_at: float | None = None
    """Since when Slurm has not had it."""


def _unix_time(text: str) -> int:
    return int(time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")))


class _Seen(Thread):
    """Counts the nodes that the trace's jobs hold, whatever accounts say."""

    def __init__(self, lab: Laboratory) -> None:
        super().__init__(daemon=True)
        self.lab = lab
        self.is_over = Event()
        self.node_s = 0.0

    def run(self) -> None:
        """Until it is over."""
        held, at = 0, time.monotonic()
        asked = ("squeue", "--noheader", "--partition=spot", "--states=RUNNING", "--format=%D")
        while not self.is_over.wait(LOOK_S):
            found = sum(map(int, self.lab.run(*asked).split()))
            now = time.monotonic()
            self.node_s += (now - at) * (held + found) / 2
            held, at = found, now


@dataclass
class Contest:
    """See the module."""

    contestant: str
    trace: Trace
    folder: Path
    lab: Laboratory
    jobs: dict[str, _Live] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)
    """Of all that was submitted."""
    ended_s: dict[str, float] = field(default_factory=dict)
    hits: list[Hit] = field(default_factory=list)
    comes_back: list[tuple[float, str]] = field(default_factory=list)
    submitted_again: list[str] = field(default_factory=list)
    seen: "_Seen" = field(init=False)

    def run(self, say: Callable[[str], None]) -> Outcome:
        """To the end of the last job."""
        to_come, losses = list(self.trace.jobs), list(self.trace.losses)
        began = time.monotonic()
        self.seen = _Seen(self.lab)
        self.seen.start()
        while len(self.ended_s) < len(self.trace.jobs):
            now = time.monotonic() - began
            if now > self._limit_s():
                say(f"{now:.0f} s: is given up")
                break
            while to_come and to_come[0].arrives_s <= now:
                traced = to_come.pop(0)
                self.jobs[traced.name] = self._submitted(traced)
                say(f"{now:.0f} s: {traced.name} wants {traced.num_nodes} nodes")
            if losses and losses[0].at_s <= now and (struck := self._strike(losses[0], now)):
                losses.pop(0)
                say(f"{now:.0f} s: {struck}; {len(self.hits)} have struck a job")
            for at, node in [back for back in self.comes_back if back[0] <= now]:
                self.lab.start_node(node)
                self.comes_back.remove((at, node))
            for name in self.jobs:
                if name not in self.ended_s and (self.folder / f"{name}.done").exists():
                    self.ended_s[name] = now
                    say(f"{now:.0f} s: {name} is done, {len(self.ended_s)} of {len(self.jobs)}")
            for name in self._missed(now):
                say(f"{now:.0f} s: {name} ended without being done, and is submitted again")
            time.sleep(LOOK_S)
        return self._outcome(time.monotonic() - began)

    def _limit_s(self) -> float:
        file = self.folder.parent / GIVE_UP
        return float(file.read_text()) if file.exists() else _LIMIT_S

    def _submitted(self, traced: TracedJob) -> _Live:
        live = _Live(traced, _SUBMIT[self.contestant](self, traced))
        self.ids.append(live.slurm_id)
        return live

    def _missed(self, now: float) -> list[str]:
        """Submit again what Slurm has no more, or keeps waiting though all nodes are free, and is
        not done."""
        lines = self.lab.run("squeue", "--noheader", "--format=%A %T").splitlines()
        states = dict(line.split() for line in lines)
        is_busy = bool(self.comes_back) or any(one != "PENDING" for one in states.values())
        found = []
        for name, live in self.jobs.items():
            if name in self.ended_s or (is_busy and live.slurm_id in states):
                live.gone_at = None
            elif live.gone_at is None:
                live.gone_at = now
            elif now - live.gone_at > _MISSED_S:
                if live.slurm_id in states:
                    self.lab.run("scancel", live.slurm_id)
                self.jobs[name] = self._submitted(live.traced)
                found.append(name)
        self.submitted_again += found
        return found

    def _strike(self, loss: Loss, now: float) -> str | None:
        """Take away a node that trains or is free; None while there is none."""
        nodes = sorted([*self._trained_on(), *((node, "") for node in self._free())])
        if not nodes:
            return None
        node, name = nodes[int(loss.pick * len(nodes))]
        if loss.kind == "preempted":
            what = f"--wrap=sleep {loss.holds_s:.1f}"
            where = ("--partition=prod", f"--nodelist={node}", "--gpus-per-node=1", "--mem=1")
            self.lab.run("sbatch", "--output=/dev/null", *where, what)
        else:
            self.lab.kill_node(node)
            self.lab.set_down(node)
            self.comes_back.append((now + loss.holds_s, node))
        if name:
            self.jobs[name].struck_at = time.time()
            self.hits.append(Hit(now, loss.kind, name, node))
        return f"{node} is {loss.kind}, {f'under {name}' if name else 'and was free'}"

    def _free(self) -> list[str]:
        """Nodes that are up and have no job."""
        asked = ("sinfo", "--noheader", "--Node", "--partition=spot", "--states=idle")
        # A node that does not answer is written with a star.
        lines = self.lab.run(*asked, "--format=%N %t").splitlines()
        return [line.split()[0] for line in lines if line.split()[1:] == ["idle"]]

    def _trained_on(self) -> list[tuple[str, str]]:
        """Nodes that jobs of the trace train on: node, job; none whose job has not done a step
        since it was started, or since it was over the last loss."""
        form = "JobID:|,HetJobID:|,NodeList:|,StartTime:|"
        asked = ("squeue", "--noheader", "--partition=spot", "--states=RUNNING", "-O", form)
        by_id = {live.slurm_id: name for name, live in self.jobs.items()}
        found = []
        for line in self.lab.run(*asked).splitlines():
            own, of_all, nodes, started = (part.strip() for part in line.split("|")[:4])
            name = by_id.get(own, by_id.get(of_all))
            if name is None or name in self.ended_s:
                continue
            since = max(_unix_time(started), self.jobs[name].struck_at + 2 * GRACE_S)
            stamps = self.folder / f"{name}.steps"
            if stamps.exists() and stamps.stat().st_mtime > since:
                found += [(node, name) for node in self._names(nodes)]
        return found

    def _outcome(self, ended_s: float) -> Outcome:
        self._until_gone()
        self.seen.is_over.set()
        self.seen.join()
        lost = {name: self._again(name) for name in self.jobs}
        outcome = Outcome(
            contestant=self.contestant,
            ended_s=ended_s,
            num_left=len(self.trace.jobs) - len(self.ended_s),
            job_ended_s=self.ended_s,
            hits=self.hits,
            steps_again=lost,
            held_device_s=sum(map(self._accounted, self.ids)),
            seen_device_s=round(self.seen.node_s, 1),
            num_preempted=sum(hit.kind == "preempted" for hit in self.hits),
            submitted_again=self.submitted_again,
        )
        if self.contestant == "paceline":
            outcome.saved, outcome.ledger_device_s = self._of_ledger()
        return outcome

    def _until_gone(self) -> None:
        """Until Slurm's accounts have heard of all ends. One that was struck when it was done comes
        back with a peer, and is ended here."""
        self.lab.run("scancel", "--partition=spot")
        end = time.monotonic() + 120
        while self.lab.run("squeue", "--noheader", "--partition=spot").strip():
            if time.monotonic() > end:
                raise RuntimeError("a job that is done does not leave its nodes")
            time.sleep(LOOK_S)
        time.sleep(15)

    def _again(self, name: str) -> int:
        file = self.folder / f"{name}.steps"
        lines = file.read_text().split("\n") if file.exists() else []
        steps = [line.split()[1] for line in lines if line]
        return len(steps) - len(set(steps))

    def _accounted(self, job: str) -> int:
        """Device-seconds by sacct."""
        form = "--format=ElapsedRaw,AllocTRES"
        said = self.lab.run("sacct", "-X", "-D", "-n", "-P", "-j", job, form)
        held = [line.split("|") for line in said.split()]
        return sum(
            int(s) * int(t.split("gres/gpu=")[1].split(",")[0]) for s, t in held if "gpu=" in t
        )

    def _names(self, nodes: str) -> tuple[str, ...]:
        return tuple(self.lab.run("scontrol", "show", "hostnames", nodes).split())

    def _of_ledger(self) -> tuple[int, int]:
        """Preemptions that ended with exit code 75, and device-seconds by `Engine.usage`."""
        from paceline.launch.records import launches_of

        saved, seconds = 0, 0.0
        for name in self.jobs:
            for launch in launches_of(self.folder / "runs" / name):
                usage = launch.engine.usage(launch.job)
                seconds += sum(
                    one.num_devices * (one.ended - one.started)
                    for one in usage
                    if one.started is not None and one.ended is not None
                )
                saved += len({one.number for one in usage if one.exit_code == 75})
        return saved, round(seconds)


def _work(contest: Contest, traced: TracedJob) -> Path:
    file = contest.folder / f"{traced.name}.json"
    work = Work(traced.name, traced.num_nodes, traced.steps, traced.every, str(contest.folder))
    file.write_text(json.dumps(asdict(work)))
    return file


def _by_paceline(contest: Contest, traced: TracedJob) -> str:
    from paceline.launch.records import newest_launch

    (contest.folder / "paceline-sites.toml").write_text(_SITE.format(grace=GRACE_S, nodes=NODES))
    paceline = str(Path(sys.executable).parent / "paceline")
    script = str(ROOT / "benchmarks/cluster/own_script.py")
    asked = ["--on", "lab", "--nodes", f"1-{traced.num_nodes}", "--spot"]
    named = ["--name", traced.name, f"--priority={traced.priority}"]
    work = str(_work(contest, traced))
    subprocess.run(
        [paceline, "launch", script, *asked, *named, "--", work],
        check=True,
        cwd=contest.folder,
        stdout=subprocess.DEVNULL,
        timeout=120,
    )
    return newest_launch(contest.folder / "runs" / traced.name).job.id


def _by_submitit(contest: Contest, traced: TracedJob) -> str:
    import submitit

    from benchmarks.cluster.peer_script import Submission

    executor = submitit.AutoExecutor(
        folder=contest.folder / "log", cluster="slurm", slurm_max_num_timeout=1000
    )
    executor.update_parameters(
        name=traced.name,
        nodes=traced.num_nodes,
        tasks_per_node=1,
        gpus_per_node=1,
        timeout_min=600,
        slurm_partition="spot",
        slurm_mem="1",
        slurm_additional_parameters={"nice": -100 * traced.priority},
    )
    return str(executor.submit(Submission(str(_work(contest, traced)))).job_id)


def _by_torchx(contest: Contest, traced: TracedJob) -> str:
    from torchx.runner import get_runner
    from torchx.specs import AppDef, Resource, Role

    script = str(ROOT / "benchmarks/cluster/peer_script.py")
    role = Role(
        name=traced.name,
        image=str(contest.folder),
        entrypoint=sys.executable,
        args=[script, str(_work(contest, traced))],
        num_replicas=traced.num_nodes,
        max_retries=1000,
        resource=Resource(cpu=1, gpu=1, memMB=1),
    )
    app = AppDef(name=traced.name, roles=[role])
    with get_runner() as runner:
        handle = runner.run(app, scheduler="slurm", cfg={"partition": "spot"})
    job = handle.rpartition("/")[2]
    contest.lab.run("scontrol", "update", f"JobId={job}", f"Nice={-100 * traced.priority}")
    return job


_SUBMIT: dict[str, Callable[[Contest, TracedJob], str]] = {
    "paceline": _by_paceline,
    "submitit": _by_submitit,
    "torchx": _by_torchx,
}
CONTESTANTS = tuple(_SUBMIT)


def _measure_this_machine() -> None:
    """Once, and kept in the cache: each start would, while others measure too."""
    from paceline.config.job import JobSpec
    from paceline.train.this_machine import resolve_on_this_machine

    train = {"steps": 1, "global_batch": 16}
    resolve_on_this_machine(JobSpec.parse({"model": {"family": "custom"}, "train": train}))


def contend(contestant: str, trace: Trace, folder: Path, say: Callable[[str], None]) -> Outcome:
    """Run one contestant in this process."""
    os.chdir(folder)
    with Laboratory(NODES, 1, GRACE_S) as lab:
        os.environ.update(lab.environment)
        # Jobs take it with them: benchmarks aren't installed, and caches are this contest's own.
        os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'src'}"
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        os.environ["OMP_NUM_THREADS"] = "1"
        if contestant == "paceline":
            _measure_this_machine()
        return Contest(contestant, trace, folder, lab).run(say)
