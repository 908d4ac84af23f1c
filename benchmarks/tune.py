"""How near `paceline tune` comes to the best of an exhaustive sweep, and in how many trials.

Four cases: the demo, and three Jobs that are set badly (buckets and recompute; a layout for four
ranks; exact gradients over a link of 200 Mbit/s between two namespaces). For each, a small space is
left free, every Job of which the sweep measures. tune may make a third as many trials.

How it works: tune runs first, as the command does. The sweep then measures every Job of the space
in heats, a few at a time, by turns with the Job that tune chose. The fastest of them run once more
against it, for all rounds, and the best of these alone, four times: what it gains over tune's
choice, on average, is the regret, which is below 0 where tune's choice is the faster one. (The
least of forty noisy figures is no fair judge, nor that of three: so the fastest is measured anew.)
Leave the machine alone meanwhile. Cases that are not asked for stay in the table as they were.

    python -m benchmarks.tune [demo buckets layout link] [--out tunes]

A link's case needs root and namespaces (`benchmarks.netlab`); this file is also what runs there.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from benchmarks.netlab import Laboratory, why_not
from benchmarks.provenance import ROOT, folder_of, parser_of, signature, taken_with
from paceline.comm.forkserver_start import MEASURING, warm_up_ranks
from paceline.comm.rendezvous import exit_rank, ranks_from_env
from paceline.config.errors import InputError
from paceline.config.job import Job, change_job, read_job
from paceline.machine.discovery import this_machine
from paceline.plan.points import Setting
from paceline.plan.search.gradient_comm import BUCKETS_MIB
from paceline.plan.search.space import Space
from paceline.train.start import read_inputs
from paceline.train.this_machine import resolve_on_this_machine
from paceline.tune.candidates import Question, checked, predicted
from paceline.tune.command import findings_of, on_known_cluster
from paceline.tune.journal import FolderJournal
from paceline.tune.loop import Limits, Loop
from paceline.tune.measurer import Measurer, RealMeasurer
from paceline.tune.propose import Proposer
from paceline.tune.settings import Freedom, change_texts, differences
from paceline.tune.show import Display
from paceline.tune.team import GivenTeam, LocalTeam, Team, team_of
from paceline.tune.trial import Candidate

WANTED = 0.05
"""How much longer tune's step may be than the sweep's best."""
_AT_ONCE = 6
"""Jobs of the sweep that take turns with tune's choice."""
_FINALISTS = 3
_REPEATS = 4
"""Heats of the fastest of them and tune's choice alone."""

_SMALL = (
    "model.vocab_size=1024", "model.hidden_size=128", "model.ffn_size=384", "model.num_heads=4",
    "model.num_kv_heads=4", "model.max_seq_len=128", "train.seq_len=128", "train.global_batch=16",
    'data.tokenizer="bytes"', "model.tie_embeddings=false", "train.steps=400",
)  # fmt: skip
_DP = (
    "layout.dp=2", "layout.fsdp=1", "layout.tp=1", "layout.pp=1", "layout.cp=1", "layout.ep=1",
)  # fmt: skip
_FORMS = ("none", "bf16", "int8", "int4", "quinary")


@dataclass(frozen=True)
class Case:
    """A Job, and what of it may be changed."""

    name: str
    what: str
    ranks: int
    settings: tuple[str, ...]
    """Over the demo."""
    free: tuple[str, ...]
    rate: str | None = None
    """Of the links between hosts with a rank each; None: one host."""

    @property
    def freedom(self) -> Freedom:
        """Only that."""
        follows = ("comm.warmup_steps",) if "comm.dp.compress" in self.free else ()
        return Freedom(frozenset((*self.free, *follows)))


_AXES = tuple(f"layout.{name}" for name in ("dp", "fsdp", "tp", "cp", "zero", "sequence_parallel"))
CASES = {
    case.name: case
    for case in (
        Case("demo", "the demo as it is", 2, (), (*_AXES, "layout.micro_batch")),
        Case(
            "buckets",
            "buckets of 0.1 MiB, everything computed twice, micro-batches of one",
            2,
            (*_SMALL, *_DP, "layout.bucket_mib=0.1", "layout.recompute=full",
             "layout.micro_batch=1", "train.global_batch=8"),
            ("layout.bucket_mib", "layout.recompute", "layout.micro_batch"),
        ),
        Case(
            "layout",
            "four ranks that share every layer's columns",
            4,
            (*_SMALL, "layout.tp=4", "layout.dp=1", "layout.fsdp=1", "layout.pp=1", "layout.cp=1",
             "layout.ep=1", "layout.micro_batch=2", "layout.recompute=none"),
            (*_AXES, "layout.ulysses"),
        ),
        Case(
            "link",
            "exact gradients in buckets of 25 MiB between two hosts at 200 Mbit/s",
            2,
            (*_SMALL, *_DP, "model.hidden_size=256", "model.ffn_size=768", "layout.micro_batch=8",
             "layout.recompute=none", "layout.bucket_mib=25.0", "comm.dp.compress=none"),
            ("layout.bucket_mib", "comm.dp.compress"),
            "200mbit",
        ),
    )
}  # fmt: skip


# ---- the space -----------------------------------------------------------------------------------


def every_job(question: Question) -> Iterator[Job]:
    """All Jobs of what is free, the given one among them."""
    freed = question.freed
    space = Space.of(Setting.of(freed), question.freedom.constraints(freed.layout))
    points = space.points(space.completed(space.pipelined(space.partial_layouts())))
    layouts = dict.fromkeys(space.layout(points, index) for index in range(len(points)))
    seen = set()
    for layout in (*layouts, question.given.layout):
        for job in _exchanged(question, question.given.replace(layout=layout)):
            if question.allows(job) and (job.layout, job.comm) not in seen:
                seen.add((job.layout, job.comm))
                yield job


def _exchanged(question: Question, job: Job) -> Iterator[Job]:
    """With every size of buckets and every form that is free; those that can't run are left out."""
    names, given = question.freedom.names, question.given
    has_buckets = job.layout.dp != 1 and job.layout.fsdp == 1 and job.layout.is_plain
    buckets = (given.layout.bucket_mib,)
    if has_buckets and "layout.bucket_mib" in names:
        buckets += BUCKETS_MIB
    forms = _FORMS if has_buckets and "comm.dp.compress" in names else (given.comm.dp.compress,)
    for bucket in buckets:
        for form in forms:
            dp = job.comm.dp.replace(compress=form)
            warm_up = 30 if form in ("int4", "quinary") else given.comm.warmup_steps
            comm = job.comm.replace(dp=dp, warmup_steps=warm_up)
            try:
                yield checked(job.replace(layout=job.layout.replace(bucket_mib=bucket), comm=comm))
            except InputError:
                continue


# ---- tune, then the sweep ------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Of a case."""

    name: str
    what: str
    space: int
    """Jobs of the sweep."""
    trials: int
    tune_minutes: float
    sweep_minutes: float
    given_s: float | None
    """The step as the Job was given, beside tune's; None: it didn't run."""
    tuned_s: float
    regret: float
    """What the sweep's best gains over tune's choice, as a share of the best; below 0: it loses."""
    half: float
    """Half of the 90 % interval of its logarithm."""
    best: list[str]
    """What tune changed."""
    sweep_best: list[str]
    ended: str

    @property
    def is_reached(self) -> bool:
        """Whether it is near enough, in a third of the trials."""
        return self.regret <= WANTED and 3 * self.trials <= self.space


def run_case(case: Case, folder: Path, team: Team, console: Console) -> Outcome:
    """Tune, sweep and compare; on the leading rank."""
    job = change_job(read_job(None, [f"name={case.name}"]), case.settings)
    machine = this_machine()
    nodes = case.ranks if case.rate else 1
    cluster = machine.replace(devices_per_node=case.ranks // nodes, num_nodes=nodes)
    journal = FolderJournal(folder)
    with journal.owned():
        job = on_known_cluster(job.replace(cluster=cluster), journal, team)
        given = resolve_on_this_machine(job).job
        read_inputs(given, lambda _done, _total: None)
        journal.open(given)
        question = Question(given, case.freedom)
        jobs = list(every_job(question))
        most = len(jobs) // 3
        console.print(f"{case.name}: {case.what}; {len(jobs)} Jobs, at most {most} trials")
        measurer = RealMeasurer(team, question.limit_bytes, folder / "failures.log")
        display = Display(console)
        limits = Limits(trials=most)
        began = time.monotonic()
        with display.running(journal.known):
            last = Loop(Proposer(question), limits, measurer, journal, display, findings_of).run()
        tuned = time.monotonic()
        assert journal.known.best is not None, "nothing ran"
        choice = journal.known.best.job(given)
        gains, times = _sweep(measurer, choice, jobs, console)
        finals = sorted(gains, key=lambda at: gains[at])[:_FINALISTS]
        regret, half, at = _duel(measurer, choice, [jobs[at] for at in finals])
    best = choice if at is None else jobs[finals[at]]
    first = next((i for i, one in enumerate(jobs) if _same(one, given)), None)
    return Outcome(
        case.name,
        case.what,
        len(jobs),
        len(journal.known.trials),
        (tuned - began) / 60,
        (time.monotonic() - tuned) / 60,
        times.get(first) if first is not None else None,
        times.get(-1, math.nan),
        regret,
        half,
        change_texts(differences(given, choice)),
        change_texts(differences(given, best)),
        last.text,
    )


def _same(one: Job, other: Job) -> bool:
    return (one.layout, one.comm) == (other.layout, other.comm)


def _candidates(choice: Job, jobs: Sequence[Job]) -> list[Candidate]:
    return [predicted(one, "the sweep") for one in (choice, *jobs)]


def _sweep(
    measurer: Measurer, choice: Job, jobs: Sequence[Job], console: Console
) -> tuple[dict[int, float], dict[int, float]]:
    """Of every Job: the logarithm of its step over that of tune's choice, and its seconds.

    The choice's own seconds have the number -1.
    """
    gains: dict[int, float] = {}
    times: dict[int, float] = {}
    numbers = [at for at, one in enumerate(jobs) if not _same(one, choice)]
    for begin in range(0, len(numbers), _AT_ONCE):
        heat = numbers[begin : begin + _AT_ONCE]
        candidates = _candidates(choice, [jobs[at] for at in heat])
        results = measurer.measure(candidates, None, lambda _at, _what: None)
        times.setdefault(-1, results[0].step_s or math.nan)
        for place, at in enumerate(heat, start=1):
            result = results[place]
            if result.versus is not None and result.step_s is not None:
                gains[at] = result.versus[0]
                times[at] = times[-1] * math.exp(result.versus[0])
        console.print(f"  {min(begin + _AT_ONCE, len(numbers))} of {len(numbers)} swept")
    return gains, times


def _duel(
    measurer: Measurer, choice: Job, finalists: Sequence[Job]
) -> tuple[float, float, int | None]:
    """What the best of these gains over the choice, half of its interval, and which it is."""
    results = measurer.measure(_candidates(choice, finalists), None, lambda _at, _what: None)
    versus = {at - 1: one.versus for at, one in results.items() if at and one.versus is not None}
    at = min(versus, key=lambda number: versus[number][0], default=None)
    if at is None or versus[at][0] >= 0:
        return 0.0, 0.0 if at is None else versus[at][1], None
    gain, half = _again(measurer, choice, finalists[at])
    return math.exp(-gain) - 1, half, at if gain < 0 else None


def _again(measurer: Measurer, choice: Job, best: Job) -> tuple[float, float]:
    """The logarithm of one Job's step over another's and half of its 90 % interval, measured anew:
    what was picked for being the least flatters itself by its noise."""
    found = []
    for _ in range(_REPEATS):
        result = measurer.measure(_candidates(choice, [best]), None, lambda _at, _what: None)[1]
        if result.versus is not None:
            found.append(result.versus)
    gains = [gain for gain, _ in found]
    return fmean(gains), math.sqrt(sum(half**2 for _, half in found)) / len(found)


# ---- where the ranks are -------------------------------------------------------------------------


def measured(case: Case, folder: Path, console: Console) -> Outcome:
    """Run a case on this machine, or in a laboratory of its own."""
    if case.rate is None:
        return run_case(case, folder, LocalTeam(case.ranks, "cpu"), console)
    file = folder / "outcome.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.tune", "--as-rank", case.name, "--out", folder]
    with Laboratory(case.ranks, 200e6) as lab:
        ended = lab.run(command, timeout_s=3600, folder=ROOT, show_first=True)
    if not file.exists():
        raise SystemExit("\n".join(rank.output[-2000:] for rank in ended))
    return Outcome(**json.loads(file.read_text()))


def as_rank(case: Case, folder: Path) -> None:
    """One rank of a laboratory."""
    ranks = ranks_from_env("cpu")
    assert ranks is not None, "a laboratory starts this"
    team = team_of(ranks, ranks.world_size, "cpu")
    if ranks.is_first:
        outcome = run_case(case, folder, team, Console())
        (folder / "outcome.json").write_text(json.dumps(asdict(outcome)))
        team.close()
    elif isinstance(team, GivenTeam):
        team.follow()
    exit_rank()


# ---- results -------------------------------------------------------------------------------------


def page(outcomes: Sequence[Outcome], facts: dict[str, Any]) -> str:
    """A table and its sentences."""
    head = "| case | given | tuned | regret | trials | sweep | minutes | of the sweep |\n"
    lines = [head, "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"]
    for one in outcomes:
        given = "did not run" if one.given_s is None else f"{one.given_s * 1e3:.0f} ms"
        lines.append(
            f"| {one.name} | {given} | {one.tuned_s * 1e3:.0f} ms | {one.regret:.1%} ± "
            f"{one.half:.1%} | {one.trials} | {one.space} | {one.tune_minutes:.1f} | "
            f"{one.sweep_minutes:.1f} |\n"
        )
    lines.append("\n")
    lines += [_sentence(one) for one in outcomes]
    return "".join(lines) + f"\n{signature(facts)}\n"


def _sentence(one: Outcome) -> str:
    changed, best = (", ".join(texts) or "no change" for texts in (one.best, one.sweep_best))
    return (
        f"- {one.name}: {one.what}. tune: {changed}; the sweep's best: {best}. It ended because "
        f"{one.ended}.\n"
    )


def _keep(outcomes: Sequence[Outcome], facts: dict[str, Any], folder: Path) -> Path:
    """Write what there is after each case, for all of them take most of an hour, beside cases that
    were measured before."""
    data, text = folder / "tune.json", folder / "tune.md"
    measured = {one.name: {"facts": facts, **asdict(one)} for one in outcomes}
    before = json.loads(data.read_text())["cases"] if data.exists() else []
    cases = {one["name"]: one for one in before} | measured
    figures = {"wanted": WANTED, "cases": list(cases.values())}
    data.write_text(json.dumps(figures, indent=1) + "\n")
    text.write_text("\n".join(_pages(figures["cases"])))
    return text


def _pages(cases: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A page of each measurement: the cases that were taken in one."""
    facts = {json.dumps(one["facts"]): one["facts"] for one in cases}
    for each in facts.values():
        mine = [one for one in cases if one["facts"] == each]
        yield page(
            [Outcome(**{k: v for k, v in one.items() if k != "facts"}) for one in mine], each
        )


def main() -> None:
    options = _options()
    warm_up_ranks(MEASURING)
    if options.as_rank:
        as_rank(CASES[options.as_rank], options.out)
        return
    facts, console = taken_with("benchmarks.tune"), Console()
    outcomes = []
    for name in options.cases or CASES:
        case = CASES[name]
        if case.rate is not None and (problem := why_not()):
            console.print(f"{name} is left out: {problem}")
            continue
        outcomes.append(measured(case, options.out / name, console))
        console.print(page(outcomes, facts))
        file = _keep(outcomes, facts, folder_of(options.results, facts))
    if outcomes:
        console.print(f"wrote {file}")
    sys.exit(0 if all(one.is_reached for one in outcomes) else 1)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--out", type=Path, default=Path("tunes/benchmark"))
    parser.add_argument("--as-rank", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
