"""Does the size that `paceline launch` chooses end first? Drawn situations on a real Slurm.

How it works: a situation is four nodes of which other jobs hold some for drawn minutes, and a Job
whose length is drawn. `paceline launch` plans it on 1, 2 and 4 nodes, asks Slurm when each would
start, and chooses. Then the Job is submitted at each of these sizes, each onto four nodes of its
own that other jobs hold in the same way. Nodes compute nothing: a job sleeps for the seconds that
were predicted for its size, times a drawn error. So what is tried is the choice, with the real
estimates of Slurm's and real waits; how good the predictions are, `paceline validate` says.

The chosen size is slower than the best fixed one by its end over the first end of the three, from
the submission. Other jobs end when their time limits say, for Slurm knows no better; people's
limits are longer than their jobs, and then every estimate is too late.

    python -m benchmarks.finish_time [--situations 20] [--seed 0] [--at-once 4]
"""

import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.slurmlab import Laboratory, why_not
from benchmarks.tables import markdown
from paceline.config.job import JobSpec
from paceline.config.site import NodeType, Site
from paceline.launch.choose import Size
from paceline.launch.contract import Request, Submitted
from paceline.launch.engines.slurm import engine
from paceline.launch.prepare import Asked, prepare_job
from paceline.machine.discovery import this_machine

NODES = 4
SIZES = (1, 2, 4)
ALLOWED = 1.05
"""The chosen size may end so many times as late as the best one."""
_MODELS = {
    "0.2B": {"hidden_size": 1024, "ffn_size": 4096, "num_layers": 12, "num_heads": 16},
    "1B": {"hidden_size": 2048, "ffn_size": 8192, "num_layers": 16, "num_heads": 32},
}
_ERROR = 0.03
"""The largest error of a prediction, as a share."""
_LOOK_S, _LIMIT_S = 0.5, 900.0
_STARTED_S = 120.0
_APART_S, _TRIES = 3.0, 5
"""Others hold the nodes of all sizes from the same moment on, or they are asked again."""


@dataclass(frozen=True)
class Situation:
    """What is drawn."""

    number: int
    model: str
    global_batch: int
    one_node_s: float
    """How long the Job is to take on one node."""
    others: tuple[tuple[int, int], ...]
    """Jobs that hold nodes already: how many, and for how many minutes."""
    errors: tuple[float, ...]
    """Of the predictions, by size: the run takes so many times as long."""


@dataclass(frozen=True)
class Outcome:
    """What became of one."""

    situation: Situation
    sizes: tuple[Size, ...]
    """As they were planned and estimated."""
    chosen: int
    """Nodes."""
    ended_s: dict[int, float]
    """By nodes: from the submission to the end."""

    @property
    def ratio(self) -> float:
        """How much later than the best fixed size the chosen one ended."""
        return self.ended_s[self.chosen] / min(self.ended_s.values())


def draw(number: int, pick: random.Random) -> Situation:
    """A situation: between one and four nodes are held."""
    held = pick.randint(1, NODES)
    others = []
    while held:
        count = pick.randint(1, held)
        others.append((count, pick.randint(1, 3)))
        held -= count
    return Situation(
        number=number,
        model=pick.choice(list(_MODELS)),
        global_batch=pick.choice([16, 64, 256]),
        one_node_s=pick.uniform(30, 150),
        others=tuple(others),
        errors=tuple(1 + pick.uniform(-_ERROR, _ERROR) for _ in SIZES),
    )


def job_of(situation: Situation, steps: int) -> JobSpec:
    """The Job that is planned."""
    model = {"family": "decoder", "vocab_size": 32000, "max_seq_len": 2048, "num_kv_heads": 8}
    return JobSpec.parse(
        {
            "name": f"situation-{situation.number}-{steps}",
            "model": {**model, **_MODELS[situation.model]},
            "train": {"steps": steps, "global_batch": situation.global_batch, "seq_len": 2048},
            "optim": {"warmup_steps": 0},
        }
    )


def site_of(group: str) -> Site:
    """Four nodes, which nobody but this situation's jobs has."""
    kind = NodeType(
        cluster="2xH100-SXM", num_nodes=NODES, select=("--gres=none", f"--reservation={group}")
    )
    return Site(engine="slurm", partition="main", node_types={"h100": kind}, max_hours=1)


def try_one(lab: Laboratory, situation: Situation, groups: Sequence[str], folder: Path) -> Outcome:
    """Choose, and submit each size: each in its group of nodes."""
    for _ in range(_TRIES):
        for group in groups:
            for count, minutes in situation.others:
                _hold(lab, group, count, minutes)
        if _until_held(lab, groups, sum(count for count, _ in situation.others)) <= _APART_S:
            break
        _let_go(lab, groups)
    else:
        raise RuntimeError("other jobs of a situation never started together: is the machine busy?")
    sizes, chosen = _chosen(situation, groups[0], folder)
    jobs = {}
    for size, error, group in zip(sizes, situation.errors, groups, strict=True):
        assert size.run_s is not None
        name = f"{situation.number}-{size.num_nodes}"
        request = Request(
            name=name,
            command=("sleep", f"{size.run_s * error:.3f}"),
            directory=folder,
            folder=folder / name,
            num_nodes=size.num_nodes,
            devices_per_node=2,
            node_type="h100",
            time_limit_s=600,
            restarts=0,
        )
        rendered = engine().render(request, site_of(group))
        jobs[size.num_nodes] = engine().submit(request, rendered), time.time()
    ended = {count: _ended_s(job, since) for count, (job, since) in jobs.items()}
    for group in groups:
        lab.run("scontrol", "delete", f"reservation={group}")
    return Outcome(situation, sizes, chosen, ended)


def _hold(lab: Laboratory, group: str, count: int, minutes: int) -> None:
    """A job of somebody else's, which takes as long as it says."""
    options = (f"--nodes={count}", f"--time={minutes}", f"--reservation={group}", "--exclusive")
    what = f"--wrap=srun --ntasks={count} --ntasks-per-node=1 sleep {60 * minutes - 2}"
    lab.run("sbatch", "--output=/dev/null", f"--job-name={group}", *options, what)


def _until_held(lab: Laboratory, groups: Sequence[str], num_nodes: int) -> float:
    """Wait until others hold the nodes; seconds between the first and the last start."""
    end = time.monotonic() + _STARTED_S
    wanted = num_nodes * len(groups)
    asked = ("squeue", "-h", f"--name={','.join(groups)}", "--states=running", "--format=%D %S")
    while True:
        held = [line.split() for line in lab.run(*asked).splitlines()]
        if sum(int(count) for count, _ in held) >= wanted:
            starts = [datetime.fromisoformat(start) for _, start in held]
            return (max(starts) - min(starts)).total_seconds()
        if time.monotonic() > end:
            raise RuntimeError("other jobs of a situation did not start")
        time.sleep(_LOOK_S)


def _let_go(lab: Laboratory, groups: Sequence[str]) -> None:
    names = f"--name={','.join(groups)}"
    lab.run("scancel", names)
    end = time.monotonic() + _STARTED_S
    while lab.run("squeue", "-h", names).strip():
        if time.monotonic() > end:
            raise RuntimeError("other jobs of a situation did not end")
        time.sleep(_LOOK_S)


def _chosen(situation: Situation, group: str, folder: Path) -> tuple[tuple[Size, ...], int]:
    """As `paceline launch` chooses; the Job is first planned to know how long a step takes."""
    asked, steps = Asked("lab", site_of(group)), 100
    for _ in range(2):
        job = job_of(situation, steps)
        found = prepare_job(job, asked, folder / "runs", (), this_machine)
        assert found.chosen is not None
        assert found.sizes[0].run_s is not None
        steps = max(1, round(steps * situation.one_node_s / found.sizes[0].run_s))
    return found.sizes, found.chosen.num_nodes


def _ended_s(job: Submitted, since: float) -> float:
    """Seconds from a moment to the job's end, by Slurm's accounts."""
    end = time.monotonic() + _LIMIT_S
    while (state := engine().observe(job).state) in ("queued", "running"):
        if time.monotonic() > end:
            raise RuntimeError(f"job {job.id} did not end")
        time.sleep(_LOOK_S)
    if state != "finished":
        raise RuntimeError(f"job {job.id} ended as {state}")
    while (ended := engine().usage(job)[-1].ended) is None:  # accounting hears of it later
        if time.monotonic() > end:
            raise RuntimeError(f"Slurm has no end of job {job.id}")
        time.sleep(_LOOK_S)
    return ended - since


def _reserve(lab: Laboratory, groups: Sequence[str]) -> None:
    for at, group in enumerate(groups):
        nodes = ",".join(lab.nodes[at * NODES : (at + 1) * NODES])
        when = ("starttime=now", "duration=10-0", "users=root", f"nodes={nodes}")
        lab.run("scontrol", "create", f"reservation={group}", *when)


_TITLES = ("", "model", "batch", "held: nodes x minutes", "chosen", "waits, s", "1 node", "2", "4")


def row(outcome: Outcome) -> tuple[str, ...]:
    """A line of the table."""
    drawn = outcome.situation
    held = ", ".join(f"{count} x {minutes}" for count, minutes in drawn.others)
    waits = ", ".join("?" if one.wait_s is None else f"{one.wait_s:.0f}" for one in outcome.sizes)
    return (
        f"{outcome.ratio:.3f}",
        drawn.model,
        f"{drawn.global_batch}",
        held,
        f"{outcome.chosen}",
        waits,
        *(f"{outcome.ended_s[count]:.0f} s" for count in SIZES),
    )


def main() -> None:
    """Try situations, show and keep them; exit code 1 where a choice ended too late."""
    options = _options()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if problem := why_not():
        console.print(problem)
        sys.exit(2)
    about = taken_with("benchmarks.finish_time")
    pick = random.Random(options.seed)
    drawn = [draw(number, pick) for number in range(1, options.situations + 1)]
    outcomes: list[Outcome] = []
    per_wave = min(options.at_once, len(drawn))
    with (
        tempfile.TemporaryDirectory() as folder,
        Laboratory(per_wave * NODES * len(SIZES)) as lab,
        chdir(folder),
        ThreadPoolExecutor(per_wave) as pool,
    ):
        os.environ.update(lab.environment)
        for first in range(0, len(drawn), per_wave):
            wave = drawn[first : first + per_wave]
            names = [[f"s{one.number}-{count}" for count in SIZES] for one in wave]
            _reserve(lab, [name for several in names for name in several])
            trying = [
                pool.submit(try_one, lab, one, groups, Path(folder))
                for one, groups in zip(wave, names, strict=True)
            ]
            for one in trying:
                outcomes.append(one.result())
                console.print(f"{len(outcomes)}/{len(drawn)} {' | '.join(row(outcomes[-1]))}")
    late = [one for one in outcomes if one.ratio > ALLOWED]
    table = markdown(_TITLES, [row(one) for one in outcomes], _TITLES[:1])
    worst = max(one.ratio for one in outcomes)
    page = (
        f"The chosen size against the best fixed one, by when it ended (seed {options.seed}).\n\n"
        f"{table}\n{len(outcomes) - len(late)} of {len(outcomes)} end within {ALLOWED:g} times; "
        f"the worst is {worst:.3f}. {signature(about)}\n"
    )
    result = {"facts": about, "seed": options.seed, "situations": [asdict(one) for one in outcomes]}
    file = keep(folder_of(options.results, about), "finish_time", result, page)
    console.print(f"{page}results: {file}")
    sys.exit(1 if late else 0)


def _options():
    parser = parser_of(__doc__)
    parser.add_argument("--situations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=4, help="situations, of 12 nodes each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
