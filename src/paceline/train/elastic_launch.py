"""Begin or join an elastic run on this node: `paceline train` where elastic.min_nodes > 0.

This process becomes the agent of its node (`elastic.agent`) and starts a rank for each device. The
first agent begins the Run; others find it begun and join. Where a launcher started a process for
each device, those but the first of a node wait for the agent and end as it does.

Not here: what agents agree on (`elastic.leader`), and what a rank does (`train.generations`).
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from paceline.comm.forkserver_start import TRAINING, warm_up_ranks
from paceline.comm.rank_env import ranks_from_env
from paceline.config.errors import EXIT_SAVED, InputError, StoppedInTimeError
from paceline.config.job import Job, JobSpec, differing, to_raw
from paceline.elastic.agent import await_agent, is_live, node_name, run_agent
from paceline.elastic.check_node import Check, no_check, node_check
from paceline.elastic.link import AGENT
from paceline.elastic.local_ranks import Place
from paceline.elastic.planned import PlannedRule
from paceline.elastic.signals import SignalListener, asking
from paceline.observe.locks import BEGIN_LOCK
from paceline.observe.run import Run
from paceline.train.energy_log import energy_logged
from paceline.train.launch import Entry, RankProcess
from paceline.train.stopping import ask_by_file


def train_elastic(
    job: Job,
    asked: JobSpec,
    run: Run,
    entry: Entry,
    begin: Callable[[], bool],
    has_begun: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Be an agent of an elastic run until it is over.

    Args:
        job: concrete, on all nodes.
        asked: as the person wrote it: what was "auto" there may change with the nodes.
        entry: what a rank runs.
        begin: writes the Run, where this agent is the first; False: nothing is left to train.
        has_begun: is called when signals mean a stop with a checkpoint.
        say: takes sentences for a person.

    Raises:
        InputError: the Run can't be begun, or trains something else.
        StoppedInTimeError: it was stopped, and is to be started again.
        SystemExit: it failed, and why was said.
    """
    given = ranks_from_env(job.cluster.device.kind)
    if given is not None and given.local_rank > 0:
        has_begun()
        _leave_with(_await_agent(run, job))
        return
    if callable(entry):
        warm_up_ranks(TRAINING)
    agents = run.path / "agents"
    agents.mkdir(parents=True, exist_ok=True)
    beginning = FileLock(agents / BEGIN_LOCK)
    with beginning, tempfile.TemporaryDirectory() as folder:
        check: Check = no_check
        if is_live(run):
            job = _of_run(run, job, asked)
            check = node_check(job)
        elif not begin():
            return
        has_begun()
        devices = job.cluster.devices_per_node

        def start_rank(place: Place) -> RankProcess:
            beginning.release(force=True)  # this agent has its own lock by now, and others join
            told = {AGENT: place.agent}
            return RankProcess(run, place.local_rank, devices, Path(folder), entry, told)

        rule = PlannedRule(asked, job)
        counted = devices if job.cluster.device.kind == "cuda" else 0
        with energy_logged(run, node_name(), counted):
            code = run_agent(run, job, start_rank, rule, rule.job_on, say, check)
        _leave_with(code)


def _await_agent(run: Run, job: Job) -> int:
    """Wait for the end of this node's agent, and pass on what this process is told: a launcher may
    end all that it started as soon as one of them leaves."""

    def pass_on(name: str) -> None:
        ask_by_file(run, name, job.elastic.save_within_s)

    listener = SignalListener(asking(job.elastic), pass_on)
    try:
        return await_agent(run)
    finally:
        listener.close()


def _leave_with(code: int) -> None:
    """End as an elastic run did."""
    if code == EXIT_SAVED:
        raise StoppedInTimeError
    if code:
        raise SystemExit(code)


def _of_run(run: Run, job: Job, asked: JobSpec) -> Job:
    """The Job that the others train, where this one is the same but for what was left to "auto"."""
    known, wish = run.job(), to_raw(asked)
    for name, old, new in differing(to_raw(known), to_raw(job)):
        if not _is_open(wish, name):
            raise InputError(
                f"{run.path} trains with {name} = {old}, and {name} = {new} was given to the agent "
                f"of {node_name()} (pid {os.getpid()}): start it with the same Job."
            )
    return known


def _is_open(wish: Mapping[str, Any], name: str) -> bool:
    """Whether a person left a setting, or the section that it is in, to "auto"."""
    value: Any = wish
    for part in name.split("."):
        if not isinstance(value, Mapping):
            break
        value = value.get(part, "auto")
    return bool(value == "auto")
