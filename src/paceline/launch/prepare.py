"""From what a person asks for to a job that may be submitted: everything that can be refused early.

Nothing is written and nothing is submitted here. `launch.command` does both.
"""

import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import JobSpec, to_toml
from paceline.config.site import Site
from paceline.launch.choose import Aim, Size, choose
from paceline.launch.code_state import CodeState, code_state
from paceline.launch.contract import Engine, Rendered, Request
from paceline.launch.engines import engine_named
from paceline.launch.records import (
    JOB,
    LIVE,
    LaunchRecord,
    launch_numbers,
    launches_of,
    newest_launch,
)
from paceline.launch.sizes import Planned, planned_sizes
from paceline.observe.run import Run, run_named
from paceline.plan.answer.options import budget_of, cluster_of

# What a prediction may be off by, and what comes before the first step.
_SLACK, _START_S = 1.25, 600.0
_RESTARTS, _SPOT_RESTARTS = 10, 1000


@dataclass(frozen=True)
class Asked:
    """What a person says on the command line besides the Job."""

    site_name: str
    site: Site
    num_nodes: int | None = None
    """None: the size is chosen."""
    min_nodes: int = 0
    """Of which it may start, go on and come back with so few: `elastic.min_nodes` of a Job; 0: as
    the Job has it, and it starts with all."""
    priority: int = 0
    after: Sequence[str] = ()
    """Runs that must have finished before: names, or their directories."""
    is_spot: bool = False
    is_cheapest: bool = False
    """Choose the cheapest size, rather than the fastest."""
    budget: str | None = None
    """For example "3000 USD, 2 days"."""
    with_patch: bool = False
    """Keep what is not committed with the job, rather than refuse it."""
    group: str = ""
    """Of a trial: its sweep's name; `at_most`: so many of the sweep run at once."""
    at_most: int | None = None
    trial: Mapping[str, Any] = field(default_factory=dict)
    """As in `LaunchRecord`."""


@dataclass(frozen=True)
class Prepared:
    """A job that may be submitted."""

    run: Path
    number: int
    record: LaunchRecord
    rendered: Rendered
    job_text: str | None
    """Of a Job; a script has none."""
    patch: bytes
    sizes: tuple[Size, ...] = ()
    """That were compared; none where a script was launched."""
    chosen: Size | None = None


def nodes_of(text: str | None) -> tuple[int, int | None]:
    """How few and how many nodes "4", or "1-4", asks for; how few: 0 where it names one number.

    Raises:
        InputError: it is neither.
    """
    if text is None:
        return 0, None
    found = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,6})", text.strip())
    fewest, most = (int(found[1] or 0), int(found[2])) if found else (0, 0)
    if not most or fewest > most or (found and found[1] and not fewest):
        raise InputError(f"--nodes {text} is no number of nodes: write it as 4, or as 1-4.")
    return fewest, most


def prepare_job(
    job: JobSpec, asked: Asked, runs: Path, sources: Sequence[Path], machine: Callable[[], Cluster]
) -> Prepared:
    """A Job, at the size that was asked for or is best.

    Args:
        job: its length in steps.
        runs: where Run directories are kept.
        sources: the files that the Job was read from.
        machine: this machine's Cluster.

    Raises:
        InputError: it can't be launched, one sentence.
    """
    if asked.min_nodes:
        job = job.replace(elastic=job.elastic.replace(min_nodes=asked.min_nodes))
    run = runs / job.name
    number = _next_number(run)
    engine, aim = engine_named(asked.site.engine), _aim(asked, job)
    planned = planned_sizes(job, asked.site, asked.num_nodes, machine, is_spot=asked.is_spot)
    folder = _folder(run, number)
    bare = _request(asked, job.name, folder, ("paceline",), after=_ids(asked, runs))
    site = _with_venv(asked.site)

    def request_of(one: Planned) -> Request:
        command = ("paceline", "train", str(folder / JOB), "--runs", str(runs))
        elastic = one.job.elastic
        return replace(
            bare,
            command=command,
            num_nodes=one.num_nodes,
            devices_per_node=one.devices_per_node,
            min_nodes=elastic.min_nodes if one.num_nodes > 1 else 0,
            node_type=one.size.node_type,
            time_limit_s=_time_limit(site, one.size, has_all=not asked.min_nodes),
        )

    if len(planned) > 1:
        planned = tuple(_with_wait(one, engine, request_of(one), site) for one in planned)
    sizes = tuple(one.size for one in planned)
    best = planned[sizes.index(choose(sizes, aim))]
    code = code_state(bare.directory, apart=(runs, *sources), with_patch=asked.with_patch)
    request = request_of(best)
    return Prepared(
        run=run,
        number=number,
        record=_record(asked, site, request, code, best.size),
        rendered=engine.render(request, site),
        job_text=to_toml(best.job),
        patch=code.patch,
        sizes=sizes,
        chosen=best.size,
    )


def prepare_script(
    script: Path,
    arguments: Sequence[str],
    name: str | None,
    asked: Asked,
    runs: Path,
    machine: Callable[[], Cluster],
) -> Prepared:
    """A person's own script, which calls `paceline.train`: nothing is known of what it takes.

    Args:
        script: starts once on each node.
        arguments: that it is given.
        name: of the launch; None: the script's.

    Raises:
        InputError: it can't be launched, one sentence.
    """
    if asked.is_cheapest or asked.budget is not None:
        raise InputError(
            "what a script takes can't be predicted, so no size can be chosen by price or time: "
            "give --nodes alone."
        )
    if not script.is_file():
        raise InputError(f"{script} does not exist: give the path of a script.")
    name = name or named_after(script)
    run = runs / name
    number = _next_number(run)
    engine = engine_named(asked.site.engine)
    num_nodes = asked.num_nodes or 1
    kind, devices = _devices_of(asked.site, num_nodes, machine)
    command = ("python", str(script.absolute()), *arguments)
    bare = _request(asked, name, _folder(run, number), command, after=_ids(asked, runs))
    most = asked.site.max_hours
    request = replace(
        bare,
        num_nodes=num_nodes,
        devices_per_node=devices,
        min_nodes=asked.min_nodes,
        node_type=kind,
        time_limit_s=None if most is None else int(most * 3600),
    )
    site = _with_venv(asked.site)
    code = code_state(bare.directory, apart=(runs,), with_patch=asked.with_patch)
    return Prepared(
        run=run,
        number=number,
        record=_record(asked, site, request, code, None),
        rendered=engine.render(request, site),
        job_text=None,
        patch=code.patch,
    )


def named_after(file: Path) -> str:
    """What a run is called that has no name but its file's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("-._") or "run"


def _next_number(run: Path) -> int:
    """Of the launch to come.

    Raises:
        InputError: an earlier one of this run lives.
    """
    earlier = launches_of(run)
    if earlier and (now := earlier[-1].observe()).state in LIVE:
        raise InputError(
            f"{run} is {now.state} already (launch {earlier[-1].number}): wait for it, stop it by "
            f"`paceline stop {run.name}`, or give this one another --name."
        )
    return 1 + max(launch_numbers(run), default=0)


def _folder(run: Path, number: int) -> Path:
    return (Run(run).launch_folder / str(number)).absolute()


def _request(
    asked: Asked, name: str, folder: Path, command: tuple[str, ...], after: tuple[str, ...]
) -> Request:
    return Request(
        name=name,
        command=command,
        directory=Path.cwd(),
        folder=folder,
        num_nodes=1,
        devices_per_node=1,
        grace_s=asked.site.grace_s,
        # Machines that are taken away come and go as often as they like.
        restarts=_SPOT_RESTARTS if asked.is_spot else _RESTARTS,
        grow_after_s=asked.site.grow_after_s,
        priority=asked.priority,
        after=after,
        fewest=asked.min_nodes,
        at_most=asked.at_most,
        group=asked.group,
        spot=asked.is_spot,
    )


def _ids(asked: Asked, runs: Path) -> tuple[str, ...]:
    """The engine's ids of the runs that come before."""
    found = []
    for name in asked.after:
        launch = newest_launch(run_named(name, runs).path)
        if launch.record.site.engine != asked.site.engine:
            raise InputError(
                f"--after {name} was launched with engine {launch.record.site.engine}, which "
                f"{asked.site.engine} knows nothing of: launch both on the same site."
            )
        found.append(launch.job.id)
    return tuple(found)


def _with_venv(site: Site) -> Site:
    """The site whose nodes find paceline where this process does, where it says nothing."""
    return site if site.venv or site.container else site.replace(venv=sys.prefix)


def _time_limit(site: Site, size: Size, *, has_all: bool) -> int | None:
    """The most that the site allows, or less where it is known to take less: schedulers start
    short jobs sooner. With fewer nodes than the size's it takes longer."""
    if site.max_hours is None:
        return None
    most = site.max_hours * 3600
    if size.run_s is None or not has_all:
        return math.ceil(most)
    return math.ceil(min(most, size.run_s * _SLACK + _START_S))


def _with_wait(one: Planned, engine: Engine, request: Request, site: Site) -> Planned:
    """The size with the engine's estimate of its start, where it can run."""
    if one.size.refused:
        return one
    try:
        start = engine.expected_start(request, engine.render(request, site))
    except InputError as error:
        return replace(one, size=replace(one.size, refused=str(error)))
    wait_s = None if start is None else max(0.0, start - time.time())
    return replace(one, size=replace(one.size, wait_s=wait_s))


def _aim(asked: Asked, job: JobSpec) -> Aim:
    usd, days = (None, None) if asked.budget is None else budget_of(asked.budget)
    most = asked.site.max_hours
    most_s = None if most is None else most * 3600
    return Aim(asked.is_cheapest, usd, days, most_s, job.train.steps)


def _devices_of(site: Site, num_nodes: int, machine: Callable[[], Cluster]) -> tuple[str, int]:
    """The first node type with enough nodes, and the devices of one; this machine's on "local"."""
    for name, kind in site.node_types.items():
        if kind.num_nodes >= num_nodes:
            return name, cluster_of(kind.cluster).devices_per_node
    if site.node_types:
        most = max(kind.num_nodes for kind in site.node_types.values())
        raise InputError(
            f"{num_nodes} nodes were asked for and the site has {most}: ask for at most {most}."
        )
    if site.engine != "local":
        raise InputError(
            "how many devices a node of the site has is not known: write its node_types into the "
            'site\'s file, such as node_types.gpu = {cluster = "8xH100-SXM", num_nodes = 4}.'
        )
    return "", machine().devices_per_node


def _record(
    asked: Asked, site: Site, request: Request, code: CodeState, size: Size | None
) -> LaunchRecord:
    return LaunchRecord(
        time=time.time(),
        site_name=asked.site_name,
        site=site,
        request=request,
        commit=code.commit,
        uncommitted=code.changed,
        run_s=None if size is None else size.run_s,
        usd=None if size is None else size.usd,
        trial=asked.trial,
    )
