"""`paceline launch` of a sweep, and `paceline jobs --sweep`: all trials at once, and their state.

Which trials there are is what launches say: each has the sweep's name as its group, and the trial's
settings in its record. So a sweep goes on where it is launched again.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.config.errors import InputError
from paceline.config.frozen import nearest
from paceline.config.hardware import Cluster
from paceline.config.job import JobSpec, differing, read_job, to_raw
from paceline.config.outputs import shown_path
from paceline.launch.command import look, print_files, submit, tell_unknown, waited_and_ran
from paceline.launch.contract import Attempt, Observation, Submitted
from paceline.launch.index import indexed_runs
from paceline.launch.prepare import Asked, Prepared, prepare_job
from paceline.launch.records import (
    JOB,
    LIVE,
    Engines,
    Launch,
    LaunchRecord,
    launched_runs,
    launches_of,
)
from paceline.launch.sweep import Settings, Sweep, Trial, settings_text
from paceline.observe.run import Run
from paceline.render.figures import amount_text, duration_text, loss_text, plural
from paceline.render.table import Table

_CONSOLE = Console(highlight=False, soft_wrap=True)
_LEFT_ALONE = ("finished", *LIVE)
# What a launch itself writes into a Job: where it runs, and how it stops in time.
_PLACED = ("name", "cluster", "elastic")


def sweep_command(
    sweep: Sweep,
    trials: Sequence[Trial],
    asked: Asked,
    runs: Path,
    sources: Sequence[Path],
    machine: Callable[[], Cluster],
    *,
    is_dry: bool,
    as_json: bool,
) -> None:
    """Prepare all trials that have neither finished nor live, and submit them; or none.

    Args:
        runs: where Run directories are kept.
        sources: the files that the sweep and its Job were read from.
        machine: this machine's Cluster.
        is_dry: print the files instead.

    Raises:
        InputError: one of them can't be launched; nothing is left in a queue.
    """
    at_most = sweep.at_most or (1 if asked.site.engine == "local" else None)
    priority = asked.priority or sweep.priority
    asked = replace(asked, group=sweep.name, at_most=at_most, priority=priority)
    machine = cache(machine)
    launches, damaged = _launched(runs, sweep.name)
    if damaged:  # what it is might be trained a second time
        name, error = damaged[0]
        raise InputError(
            f"{name} may be any trial of sweep {sweep.name}, so none is launched: {error}"
        )
    earlier = {_key(one.record.trial): one for one in launches}
    number = max((_number(one.run, sweep.name) for one in earlier.values()), default=0)
    left, new = [], []
    for trial in trials:
        launch = earlier.get(_key(trial.settings))
        if launch is None:
            number += 1
            run = runs / f"{sweep.name}-{number:03}"
            _must_be_free(run, sweep)
        else:
            run = launch.run
            _must_be_same(trial.job, launch)
            if (now := launch.observe()).state in _LEFT_ALONE:
                left.append((launch, now))
                continue
        own = replace(asked, trial=trial.settings)
        job = trial.job.replace(name=run.name)
        try:
            new.append(prepare_job(job, own, runs, sources, machine))
        except InputError as error:
            raise InputError(f"{run.name} ({settings_text(trial.settings)}): {error}") from None
    _CONSOLE.print(_launch_table(left, new))
    if is_dry:
        for one in new:
            print_files(one)
        return
    jobs = _submit_all(new)
    alone = f"; {plural(len(left), 'trial')} of it left alone" if left else ""
    _CONSOLE.print(
        f"sweep {sweep.name}: {plural(len(new), 'trial')} launched on {asked.site_name}{alone}"
    )
    _CONSOLE.print(f"paceline jobs --sweep {sweep.name}")
    if as_json:
        launched = [{"run": str(one.run), "id": job.id} for one, job in jobs]
        alone_in = [str(launch.run) for launch, _ in left]
        print(json.dumps({"sweep": sweep.name, "launched": launched, "left_alone": alone_in}))


def sweep_table_command(runs: Path, name: str, *, as_json: bool) -> None:
    """Show how the trials of a sweep stand, the best in bold.

    Raises:
        InputError: there is no such sweep.
    """
    launches, damaged = _launched(runs, name)
    if not launches and not damaged:
        known = {one.record.request.group for one in _launched(runs, None)[0]}
        cure = nearest(name, sorted(known)) if known else ": launch one by paceline launch."
        raise InputError(f"{shown_path(runs)} has no sweep {name!r}{cure}")
    facts = {one.facts.name: one.facts for one in indexed_runs(runs)}
    engines = Engines()
    looks = [look(launch, engines) for launch in launches]
    found = [_as_trial(launch, *seen, facts) for launch, seen in zip(launches, looks, strict=True)]
    losses = [one["best_eval_loss"] for one in found]
    best = min((loss for loss in losses if loss is not None), default=None)
    rows = [
        (
            Path(one["run"]).name,
            settings_text(one["settings"]),
            one["state"] if one["reason"] is None else f"{one['state']}: {one['reason']}",
            "–" if one["steps"] is None else f"{one['steps']:,}",
            "–" if one["loss"] is None else loss_text(one["loss"]),
            "–" if one["best_eval_loss"] is None else loss_text(one["best_eval_loss"]),
            duration_text(one["ran_s"]),
        )
        for one in found
    ]
    heads = ("trial", "settings", "state", "steps", "loss", "held out", "ran")
    strong = None if best is None else losses.index(best)
    _CONSOLE.print(Table(heads, rows, words=(0, 1, 2), strong=strong))
    states = Counter(one["state"] for one in found)
    told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    _CONSOLE.print(f"{plural(len(found), 'trial')}: {told}")
    tell_unknown(zip(launches, (now for now, _ in looks), strict=True))
    for trial, error in damaged:
        _CONSOLE.print(f"{trial} is left out: {error}", markup=False)
    if as_json:
        print(json.dumps(found))


# ---- which trials --------------------------------------------------------------------------------


def _launched(runs: Path, sweep: str | None) -> tuple[list[Launch], list[tuple[str, InputError]]]:
    """The newest launch of each trial, by the run's name; None: those of any sweep. And what is
    wrong with the record of each run that has the name of a trial: nobody knows of which one."""
    found, damaged = [], []
    for run in launched_runs(runs):
        try:
            found += launches_of(run)[-1:]
        except InputError as error:
            if sweep is not None and _number(run, sweep):
                damaged.append((run.name, error))
    of_sweeps = [one for one in found if one.record.request.group]
    return [one for one in of_sweeps if sweep in (None, one.record.request.group)], damaged


def _key(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


def _number(run: Path, sweep: str) -> int:
    found = re.fullmatch(rf"{re.escape(sweep)}-(\d{{1,9}})", run.name)
    return int(found[1]) if found else 0


def _must_be_free(run: Path, sweep: Sweep) -> None:
    if Run(run).exists or launches_of(run):
        raise InputError(
            f"{shown_path(run)} is there already and is no trial of sweep {sweep.name}: give the "
            "sweep another --name."
        )


def _must_be_same(job: JobSpec, launch: Launch) -> None:
    """A trial goes on with the Job that it began with."""
    before = read_job(launch.job.folder / JOB)
    stated = [
        {name: value for name, value in to_raw(one).items() if name not in _PLACED}
        for one in (before, job)
    ]
    for name, old, new in differing(*stated):
        raise InputError(
            f"{shown_path(launch.run)} was launched with {name} = {old}, which is {new} now: put "
            "it back, or give the sweep another --name."
        )


# ---- submission ----------------------------------------------------------------------------------


def _submit_all(new: Sequence[Prepared]) -> list[tuple[Prepared, Submitted]]:
    """Submit them; where one fails, those before it are cancelled."""
    jobs: list[tuple[Prepared, Submitted]] = []
    try:
        for one in new:
            jobs.append((one, submit(one)))
    except BaseException as error:
        left = _cancel(jobs)
        if not isinstance(error, InputError | OSError):
            raise
        before = f"{plural(len(jobs), 'trial')} submitted before it"
        done = f"the {before} asked to stop" if jobs else "nothing was submitted"
        if left:
            done += f", of which {', '.join(left)} can't be reached"
        raise InputError(f"{one.run.name} can't be submitted ({done}): {error}") from None
    return jobs


def _cancel(jobs: Sequence[tuple[Prepared, Submitted]]) -> list[str]:
    """Stop them; returns those whose engine doesn't."""
    left = []
    for one, job in jobs:
        try:
            Launch(one.run, one.number, one.record, job).engine.signal(job, "stop")
        except InputError:
            left.append(one.run.name)
    return left


# ---- how it looks --------------------------------------------------------------------------------


def _launch_table(left: Sequence[tuple[Launch, Observation]], new: Sequence[Prepared]) -> Table:
    alone = [_launch_row(launch.run, launch.record, now.state) for launch, now in left]
    rows = alone + [_launch_row(one.run, one.record, "to launch") for one in new]
    heads = ("trial", "settings", "state", "devices", "runs", "USD")
    return Table(heads, sorted(rows), words=(0, 1, 2))


def _launch_row(run: Path, record: LaunchRecord, state: str) -> tuple[str, ...]:
    request = record.request
    return (
        run.name,
        settings_text(record.trial),
        state,
        f"{request.num_nodes} x {request.devices_per_node}",
        "–" if record.run_s is None else duration_text(record.run_s),
        "–" if record.usd is None else amount_text(record.usd),
    )


def _as_trial(
    launch: Launch, now: Observation, attempts: tuple[Attempt, ...], facts: Mapping[str, Any]
) -> dict[str, Any]:
    known = facts.get(launch.run.name)
    return {
        "run": str(launch.run),
        "settings": dict(launch.record.trial),
        "state": now.state,
        "reason": now.reason,
        "steps": None if known is None else known.steps,
        "loss": None if known is None else known.loss,
        "best_eval_loss": None if known is None else known.best_eval_loss,
        "ran_s": waited_and_ran(attempts)[1],
    }
