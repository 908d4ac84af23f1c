"""Searches at equal CPU-seconds: `paceline search`, random points, and Optuna alone.

How it works: all look for small decoders of Python's own texts, whose held-out loss and whose
memory in training are to be small. They have the same space, the same limits, the same training
code (a trial is an ordinary Run) and the same figures of memory. What a trial takes is counted by
its process (user and system time), what a search thinks by its own: Optuna's proposals, the
planner's predictions, the journal. All begin with the Job's own settings. Optuna stands twice,
since it doesn't prune with two objectives: TPE with Hyperband on their sum, and TPE on both without
pruning.

Each search has a core to itself, and one process that trains its trials one after another. The
peers' trials may be refused their next rung. A point that is no Job fails when it starts; one
beyond a limit ends after its third step, as if somebody had looked at the clock, and is told to
Optuna. `paceline search` asks the planner.

A network counts from its first evaluation on, whoever trained it. The hypervolume is the part of
the rectangle below the reference that the networks so far dominate: the reference is the loss of
counting bytes, and the limit of memory.

What it doesn't say: anything about large trials, where all of them gain by early ends.

    python -m benchmarks.search [--cpu-seconds 200] [--seeds 0 1 2]

Prints a line per search and keeps results/<device>/search.{json,md}. 25 minutes on two cores.
"""

import json
import math
import os
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contest import JudgedTrials, hyperband_study, one_core_each
from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import Spread, markdown
from paceline.comm.forkserver_start import TRAINING, warm_up_ranks
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import JobSpec, read_job, to_toml
from paceline.observe.run import Run
from paceline.search.forecast import Forecast, forecast
from paceline.search.halving import Halving, Trial
from paceline.search.loop import Loop
from paceline.search.proposals import Proposals
from paceline.search.rules import Values, hypervolume
from paceline.search.space import Choices, Point, Search, dimensions_of, job_at, rung_steps
from paceline.search.study import Known, SearchStudy
from paceline.search.trial_run import TrialProcess, as_trial

JOB = """\
name = "contest"
[model]
family = "decoder"
vocab_size = 257
hidden_size = 64
ffn_size = 128
num_layers = 2
num_heads = 4
num_kv_heads = 2
max_seq_len = 64
[data]
source = "text.txt"
tokenizer = "bytes"
eval_fraction = 0.05
[optim]
lr = 3e-3
warmup_steps = 5
schedule = "cosine"
[train]
steps = 90
global_batch = 16
seq_len = 64
eval_batches = 4
[layout]
precision = "fp32"
[observe]
tensorboard = false
"""
SPACE: dict[str, Any] = {
    "optim.lr": {"low": 1e-4, "high": 1e-1, "log": True},
    "model.num_layers": {"low": 1, "high": 8},
    "model.hidden_size": [32, 48, 64, 96, 128, 192, 256],
    "model.num_heads": [2, 4, 6, 8],
    "model.ffn_size": [64, 128, 256, 512],
}
OWN = {
    "optim.lr": 3e-3,
    "model.num_layers": 2,
    "model.hidden_size": "64",
    "model.num_heads": "4",
    "model.ffn_size": "128",
}
"""What JOB says, as Optuna has it: choices by their JSON."""
_MAX_TRAIN_S, _JUDGED_AT = 4.0, 3
OURS, RANDOM = "paceline search", "random"
HYPERBAND, BOTH = "Optuna, TPE and Hyperband on the sum", "Optuna, TPE on both"
CONTESTANTS = (OURS, RANDOM, HYPERBAND, BOTH)


@dataclass(frozen=True)
class Contest:
    """What all contestants are given."""

    job: JobSpec
    search: Search
    cluster: Cluster
    worst: Values
    """Loss of counting bytes, and the limit of memory in bytes."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Of the rungs."""
        return rung_steps(self.search, self.job.train.steps)

    def expected(self, point: Point) -> Forecast:
        """By the planner.

        Raises:
            InputError: the point is infeasible.
        """
        return forecast(job_at(self.job, point), self.cluster, self.search)


@dataclass
class Spent:
    """CPU-seconds of a search so far, its networks, and when it had them."""

    limit_s: float
    trials_s: float = 0.0
    infeasible_s: float = 0.0
    num_trials: int = 0
    num_infeasible: int = 0
    num_ended: int = 0
    found: list[tuple[float, Values]] = field(default_factory=list)
    _began: float = field(default_factory=time.process_time)

    @property
    def cpu_s(self) -> float:
        """Of trials, and of the search's own process."""
        return self.trials_s + time.process_time() - self._began

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left."""
        return self.cpu_s >= self.limit_s

    def see(self, values: Values) -> None:
        """A network was evaluated."""
        self.found.append((self.cpu_s, values))


# ---- ours ----------------------------------------------------------------------------------------


def search_ours(contest: Contest, folder: Path, spent: Spent, seed: int) -> None:
    """`paceline search`; its budget of device time grows until the CPU-seconds are over."""
    within_s, seen = spent.limit_s, Counter[int]()
    halving = Halving(contest.steps, contest.search.factor, contest.search.objectives)

    def hear(known: Known, _trains: Trial | None) -> None:
        for trial in known.trials:
            for rung in range(seen[trial.number], len(trial.results)):
                spent.trials_s += trial.results[rung].cpu_s
                spent.num_trials += rung == 0
                if trial.loss(rung) is None:  # the planner let it run, and it failed
                    spent.num_infeasible += 1
                    spent.infeasible_s += trial.results[rung].cpu_s
                else:
                    spent.see(trial.values(rung, contest.search.objectives))
                    spent.num_ended += rung == len(contest.steps) - 1
            seen[trial.number] = len(trial.results)
        if spent.is_over:
            raise KeyboardInterrupt

    with TrialProcess() as process, suppress(KeyboardInterrupt):
        while True:
            search = contest.search.replace(seed=seed, within=f"{within_s} s")
            study = SearchStudy(folder / "study.log", search)
            proposals = Proposals(search, contest.job, contest.cluster, halving, is_here=True)
            Loop(
                search, contest.job, contest.cluster, halving, proposals, study,
                folder / "trials", hear, process.train_to,
            ).run()  # fmt: skip
            within_s *= 1.25


# ---- the peers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """A search that asks nobody before a trial runs."""

    contest: Contest
    folder: Path
    spent: Spent
    study: Any
    prunes: bool
    """By its study's pruner, on the sum of both objectives."""
    is_scalar: bool

    def run(self) -> None:
        """Until the CPU-seconds are over; the first trial is the Job's own point, as ours is."""
        self.study.enqueue_trial(OWN)
        with JudgedTrials() as trials:
            while not self.spent.is_over:
                self._run_one(trials)

    def _run_one(self, trials: JudgedTrials) -> None:
        import optuna

        asked = self.study.ask()
        point = suggested(asked, self.contest.search)
        try:
            expected = self.contest.expected(point)
        except InputError:
            expected = None
            self.spent.num_infeasible += 1
        values, is_pruned = self._trained(trials, asked, point, expected)
        if is_pruned:
            self.study.tell(asked, state=optuna.trial.TrialState.PRUNED)
        else:  # where there is none, as bad as can be: it learns where not to look
            worst = tuple(2 * one for one in self.contest.worst)
            self.study.tell(asked, self._told(values or worst))

    def _told(self, values: Values) -> list[float]:
        shares = [one / worst for one, worst in zip(values, self.contest.worst, strict=True)]
        return [sum(shares)] if self.is_scalar else shares

    def _trained(
        self, trials: JudgedTrials, asked: Any, point: Point, expected: Forecast | None
    ) -> tuple[Values | None, bool]:
        """Values of a trial at its last rung, and whether it was pruned there."""
        spent, steps = self.spent, self.contest.steps
        spent.num_trials += 1
        number = f"{spent.num_trials:04}"
        try:
            job = as_trial(job_at(self.contest.job, point), number, steps[0])
            text = to_toml(job.replace(cluster=self.contest.cluster))
        except InputError:
            return None, False  # a Job that can't be written costs no process
        values, is_pruned = None, False

        def judge(step: int, loss: float, cpu_s: float) -> bool:
            nonlocal values, is_pruned
            if expected is not None:
                values = (loss, expected.figures["memory"])
                # Those of a trial that still runs are counted where its clock is.
                spent.found.append((spent.cpu_s + cpu_s, values))
                spent.num_ended += step == steps[-1]
                if self.prunes and step < steps[-1]:
                    asked.report(self._told(values)[0], step)
                    is_pruned = asked.should_prune()
            return not is_pruned and spent.cpu_s + cpu_s < spent.limit_s

        run = Run(self.folder / "trials" / number)
        cpu_s = trials.train(run, text, judge, _JUDGED_AT if expected is None else None)
        spent.trials_s += cpu_s
        spent.infeasible_s += cpu_s if expected is None else 0.0
        return values, is_pruned


def suggested(asked: Any, search: Search) -> dict[str, Any]:
    """A point by Optuna's sampler, in the search's space."""
    point: dict[str, Any] = {}
    for name, dimension in dimensions_of(search).items():
        if isinstance(dimension, Choices):
            point[name] = dimension.values[asked.suggest_categorical(name, [*dimension.values])]
        elif dimension.is_whole:
            point[name] = asked.suggest_int(name, dimension.low, dimension.high)
        else:
            point[name] = asked.suggest_float(
                name, dimension.low, dimension.high, log=dimension.log
            )
    return point


def _study_of(name: str, seed: int, steps: Sequence[int], factor: int) -> Any:
    if name == HYPERBAND:
        return hyperband_study(seed, steps[0], steps[-1], factor)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler if name == BOTH else optuna.samplers.RandomSampler
    return optuna.create_study(directions=["minimize"] * 2, sampler=sampler(seed=seed))


# ---- the contest ---------------------------------------------------------------------------------


def prepared(folder: Path) -> Contest:
    """The text, the Job, and limits that part of the space exceeds."""
    from paceline.train.start import read_inputs, with_measured_speed
    from paceline.train.this_machine import resolve_on_this_machine

    library = Path(sysconfig.get_path("stdlib"))
    text = "\n".join((library / f"{name}.py").read_text() for name in ("argparse", "ast", "typing",
        "inspect", "subprocess", "tarfile", "zipfile", "threading"))  # fmt: skip
    (folder / "text.txt").write_text(text)
    (folder / "job.toml").write_text(JOB)
    counts = Counter(text.encode())
    worst_loss = -sum(n / counts.total() * math.log(n / counts.total()) for n in counts.values())
    job = read_job(folder / "job.toml", [f"data.source={folder / 'text.txt'}"])
    cluster = with_measured_speed(resolve_on_this_machine(job), print).job.cluster
    cluster = cluster.replace(devices_per_node=1, tiers=())
    read_inputs(resolve_on_this_machine(job.replace(cluster=cluster)).job, lambda *_: None)
    asked = {"job": "job.toml", "objectives": ["loss", "memory"], "within": "1 h", "space": SPACE}
    search = Search.parse({**asked, "limits": {"time_s": _MAX_TRAIN_S}})
    large = {"model.num_layers": 4, "model.hidden_size": 128, "model.ffn_size": 512}
    free = search.replace(limits=search.limits.replace(time_s=1e6))
    memory_bytes = forecast(job_at(job, large), cluster, free).figures["memory"]
    limits = search.limits.replace(memory_gb=1e-9 * memory_bytes)
    return Contest(job, search.replace(limits=limits), cluster, (worst_loss, memory_bytes))


def contend(contest: Contest, folder: Path, name: str, seed: int, limit_s: float) -> dict[str, Any]:
    """One search."""
    folder = folder / f"{CONTESTANTS.index(name)}-{seed}"
    folder.mkdir()
    warm_up_ranks(TRAINING)
    spent = Spent(limit_s)
    if name == OURS:
        search_ours(contest, folder, spent, seed)
    else:
        study = _study_of(name, seed, contest.steps, contest.search.factor)
        Peer(contest, folder, spent, study, name == HYPERBAND, name == HYPERBAND).run()
    return {
        "name": name,
        "seed": seed,
        "cpu_s": spent.cpu_s,
        "trials_cpu_s": spent.trials_s,
        "infeasible_cpu_s": spent.infeasible_s,
        "trials": spent.num_trials,
        "infeasible": spent.num_infeasible,
        "ended": spent.num_ended,
        "found": spent.found,
    }


def volume(result: dict[str, Any], worst: Values, until_s: float) -> float:
    """Share of the reference's rectangle that the networks until then dominate."""
    values = [tuple(values) for at, values in result["found"] if at <= until_s]
    return hypervolume(values, worst) / math.prod(worst)


_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)


def over_time(results: Sequence[dict[str, Any]], worst: Values, limit_s: float) -> str:
    """Hypervolume in percent after parts of the CPU-seconds: median and range over seeds."""
    lines = []
    for name in CONTESTANTS:
        mine = [one for one in results if one["name"] == name]
        volumes = [[100 * volume(one, worst, limit_s * share) for one in mine] for share in _SHARES]
        lines.append([name, *(Spread.of(each).text(".1f") for each in volumes)])
    return markdown(["search", *(f"{limit_s * s:.0f} s" for s in _SHARES)], lines, ["search"])


def trials(results: Sequence[dict[str, Any]]) -> str:
    """What the CPU-seconds went to: medians over seeds."""
    lines = []
    for name in CONTESTANTS:
        mine = [one for one in results if one["name"] == name]

        def of(value: Callable[[dict[str, Any]], float], mine: Any = mine) -> str:
            return f"{median(map(value, mine)):.0f}"

        lines.append(
            [
                name,
                of(lambda one: one["trials"]),
                of(lambda one: one["ended"]),
                of(lambda one: one["infeasible"]),
                of(lambda one: one["infeasible_cpu_s"]),
                of(lambda one: one["cpu_s"] - one["trials_cpu_s"]),
                of(lambda one: one["cpu_s"]),
            ]
        )
    titles = ["search", "trials", "trained to the end", "infeasible", "CPU-s of infeasible"]
    return markdown([*titles, "CPU-s of thinking", "CPU-s"], lines, ["search"])


def page(results: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    """Both tables, and what they are of."""
    worst, limit_s = about["worst"], about["cpu_seconds"]
    return (
        f"Hypervolume of held-out loss and memory in percent of the rectangle below "
        f"{worst[0]:.3f} and {worst[1] / 1e6:.1f} MB after so many CPU-seconds: median "
        f"(least – most) of {len(about['seeds'])} seeds.\n\n{over_time(results, worst, limit_s)}\n"
        f"{trials(results)}\nMedians of the seeds. {signature(about)}\n"
    )


def main() -> None:
    """All contestants with every seed, two at a time."""
    parser = parser_of(__doc__)
    parser.add_argument("--cpu-seconds", type=float, default=200.0, help="of each search")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS])
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        contest = prepared(folder)
        about = {
            **taken_with("benchmarks.search", "optuna"),
            "cpu_seconds": asked.cpu_seconds, "seeds": asked.seeds, "space": SPACE, "job": JOB,
            "limits": {key: value for key, value in vars(contest.search.limits).items() if value},
            "worst": contest.worst,
        }  # fmt: skip
        pairs = [(name, seed) for seed in asked.seeds for name in CONTESTANTS if name in asked.only]
        begin = partial(contend, contest, folder, limit_s=asked.cpu_seconds)
        results = []
        with one_core_each() as pool:
            for result in pool.map(begin, *zip(*pairs, strict=True)):
                results.append(result)
                told = {key: value for key, value in result.items() if key != "found"}
                told["volume"] = volume(result, contest.worst, asked.cpu_seconds)
                print(json.dumps(told), flush=True)
    if {*asked.only} == {*CONTESTANTS}:
        text = page(results, about)
        kept = {"facts": about, "results": results}
        file = keep(folder_of(asked.results, about), "search", kept, text)
        print(f"{text}\nresults: {file}")


if __name__ == "__main__":
    main()
