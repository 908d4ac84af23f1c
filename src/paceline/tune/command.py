"""`paceline tune`: measure, plan, try, explain, keep what helped, until it is enough.

This file is the order of things: what has to be known first (the machine, the data), who leads
where a launcher started many of these, and what is written at the end. The loop is `tune.loop`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.bench.command import shown, source_text, to_text
from paceline.bench.measure import BenchRequest, BenchResult, calibrated, measure
from paceline.comm.rendezvous import ranks_from_env
from paceline.config.duration import seconds_of
from paceline.config.errors import InputError
from paceline.config.job import Job, JobOnCluster, JobSpec, read_cluster
from paceline.explain.changes import changed_job
from paceline.explain.finding import Finding
from paceline.explain.rules import findings
from paceline.explain.subject import Subject
from paceline.machine.discovery import this_machine
from paceline.observe.locks import owned
from paceline.observe.run import write_atomic
from paceline.plan.families import family_of
from paceline.plan.resolve import concrete_cluster
from paceline.plan.search.choose import unsearchable
from paceline.train.start import read_inputs
from paceline.train.stopping import term_as_interrupt
from paceline.train.this_machine import resolve_on_this_machine, why_only_planned
from paceline.tune.candidates import Question
from paceline.tune.goal import Figures, Goal
from paceline.tune.journal import FolderJournal
from paceline.tune.loop import Limits, Loop
from paceline.tune.measurer import RealMeasurer
from paceline.tune.narrative import paragraph, parts
from paceline.tune.page import render
from paceline.tune.propose import Proposer
from paceline.tune.settings import Freedom, change_texts
from paceline.tune.show import Display, table
from paceline.tune.team import GivenTeam, Team, team_of
from paceline.tune.trial import TuningState

_CONSOLE = Console(highlight=False, soft_wrap=True)
# A collective of many ranks and sizes may take long before anything is said.
_BENCH_SILENCE_S = 600.0
# Findings of smaller gains are for paceline explain.
_TOLD_GAIN = 0.03


@dataclass(frozen=True)
class TuneOptions:
    """What a person asked for besides the Job, in the words of the command line."""

    until: str | None = None
    """A goal, such as "efficiency=0.85"."""
    budget: str | None = None
    """A time, such as "15 min"."""
    trials: int | None = None
    free: Sequence[str] = ()
    keep: Sequence[str] = ()


def tune_command(job: JobSpec, asked: TuneOptions, out: Path) -> dict[str, Any] | None:
    """Tune a Job; a tuning that exists in the folder goes on.

    Args:
        job: what a person asks for.
        asked: what the command line says.
        out: folder of the tuning.

    Returns:
        what was found as plain data; None on a rank that a launcher gave and is not the first.

    Raises:
        InputError: wrong input.
        RunError: the machine could not be measured.
    """
    goal = None if asked.until is None else Goal.read(asked.until)
    seconds = float("inf") if asked.budget is None else seconds_of("--budget", asked.budget)
    freedom = Freedom.of(asked.free, asked.keep)
    _check(job)
    if goal is not None:
        goal.check_unit(job.model.unit)
    machine = this_machine()
    kind = machine.device.kind
    given = ranks_from_env(kind)
    if given is not None:
        machine = machine.replace(
            devices_per_node=given.local_world_size,
            num_nodes=given.world_size // given.local_world_size,
        )
    cluster, _ = concrete_cluster(job.cluster, machine)
    team = team_of(given, cluster.num_devices, kind)
    if isinstance(team, GivenTeam) and given is not None and not given.is_first:
        team.follow()
        return None
    journal = FolderJournal(out)
    try:
        with term_as_interrupt(), owned(journal.folder):
            known = on_known_cluster(job.on(cluster), journal, team)
            return _tune(known, freedom, Limits(goal, seconds, asked.trials), journal, team)
    finally:
        team.close()


def _check(job: JobSpec) -> None:
    """Refuse what can't be tuned, before anything is measured."""
    if problem := why_only_planned(job):
        raise InputError(problem)
    if job.model.is_own:
        raise InputError(
            "tune trains a Job by itself, and only a script has the module of model.family = "
            f'"{job.model.family}": give a Job of another family, or look at a run of the script '
            "with paceline explain."
        )
    if job.comm.local.method != "none":
        raise InputError(
            f'comm.local.method = "{job.comm.local.method}" lets workers step by themselves, and '
            'tune compares steps that all take together: set it to "none".'
        )


def on_known_cluster(job: JobOnCluster, journal: FolderJournal, team: Team) -> JobOnCluster:
    """The Job on a cluster whose speed is known: measured first, where nobody did.

    Args:
        job: what a person asks for, on this machine.
        journal: where what is measured is kept.
        team: the cluster's ranks.
    """
    if not family_of(job.model).is_priced:
        return job  # no speed would tell what a step takes
    if journal.cluster_file.exists():
        return job.replace(cluster=read_cluster(journal.cluster_file))
    missing = unsearchable(job)
    if missing is None:
        return job
    _CONSOLE.print("measuring this machine first (paceline bench does so more thoroughly)")
    request = BenchRequest(
        job.cluster, ("device", "codecs", "collectives", "step"), source_text(), quick=True
    )
    with shown() as hear:
        outcome: BenchResult = team.run(partial(measure, request), hear, _BENCH_SILENCE_S)
    cluster = calibrated(outcome, request.source)
    write_atomic(journal.cluster_file, to_text(cluster))
    return job.replace(cluster=cluster)


def _tune(
    job: JobOnCluster, freedom: Freedom, limits: Limits, journal: FolderJournal, team: Team
) -> dict[str, Any]:
    given = _begun(job, freedom)
    if limits.goal is not None:
        limits.goal.check(given)
    with _CONSOLE.status("reading the data"):
        read_inputs(given, lambda _done, _total: None)
    journal.open(given)
    question = Question(given, freedom)
    display = Display(_CONSOLE)
    measurer = RealMeasurer(team, question.limit_bytes, journal.folder / "failures.log")
    loop = Loop(Proposer(question), limits, measurer, journal, display, findings_of)
    try:
        with display.running(journal.known):
            loop.run()
    except KeyboardInterrupt:
        if journal.known.trials:  # else what an earlier start ended for would be told
            loop.end("it was interrupted")
        _CONSOLE.print(f"stopped; what was tried is in {journal.folder}, run it again to go on")
    return _conclude(journal)


def _begun(job: JobOnCluster, freedom: Freedom) -> Job:
    """The Job to begin with: the one that was given, or where that can't run, the
    planner's with the same settings kept."""
    try:
        return resolve_on_this_machine(job).job
    except InputError as error:
        planned = resolve_on_this_machine(freedom.freed(job)).job
        _CONSOLE.print(f"the Job as it was given can't run ({error}): beginning with the planner's")
        return planned


def findings_of(folder: Path) -> Sequence[Finding]:
    """What explain finds in the Run of a trial round."""
    try:
        return findings(Subject.of(folder))
    except InputError as error:
        _CONSOLE.print(f"{folder} could not be explained: {error}")
        return ()


def _still_found(journal: FolderJournal) -> Iterator[str]:
    """What explain finds in the fastest and tune did not mend, one sentence each."""
    folder, known = journal.newest_run(), journal.known
    if folder is None or known.best is None:
        return
    best = known.best.job(known.given)
    tried = [trial.job(known.given) for trial in known.trials]
    for finding in findings_of(folder):
        mended = changed_job(best, finding.changes) if finding.changes else None
        if finding.gain >= _TOLD_GAIN and mended not in tried:
            change = " ".join(f"--set {text}" for text in finding.changes)
            title = finding.title.rstrip(".")
            yield f"{title} ({finding.gain:.0%} of the step). {change or finding.advice}"


def _conclude(journal: FolderJournal) -> dict[str, Any]:
    known = journal.known
    if not known.trials:
        return to_json(known, journal.folder)
    left = list(_still_found(journal))
    page = write_atomic(journal.folder / "tune.html", render(known, journal.folder, left))
    _CONSOLE.print()
    _CONSOLE.print(table(known))
    _CONSOLE.print(f"\n{paragraph(known)}\n")
    for sentence in left:
        _CONSOLE.print(f"still found: {sentence}", markup=False)
    if known.best is not None:
        _CONSOLE.print(f"train it: paceline train {journal.folder / 'job.toml'}")
    _CONSOLE.print(f"page: {page}")
    return to_json(known, journal.folder)


def to_json(known: TuningState, folder: Path) -> dict[str, Any]:
    """What was found, as plain data."""
    best = known.best
    found: dict[str, Any] = {"folder": str(folder), "num_trials": len(known.trials)}
    if best is None:
        return found
    first = known.trials[0]
    return found | {
        "job": str(folder / "job.toml"),
        "best": best.number,
        "is_gain_clear": known.is_gain_clear,
        "changes": change_texts(best.changes),
        "step_s": known.seconds(best),
        "given_step_s": known.seconds(first) if first.ran else None,
        **Figures.of(known, best).to_json(),
        "parts": [vars(part) for part in parts(known)],
        "ended": known.decisions[-1].text,
    }
