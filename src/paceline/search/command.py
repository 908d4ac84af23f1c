"""`paceline search`: the order of things."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import JobSpec, read_cluster, to_raw, to_toml
from paceline.config.site import site_named
from paceline.launch.prepare import Asked
from paceline.machine.discovery import this_machine
from paceline.observe.asked import must_be_same
from paceline.observe.locks import owned
from paceline.observe.run import write_atomic
from paceline.render.figures import duration_text
from paceline.search.answer import Found
from paceline.search.forecast import check_known
from paceline.search.halving import Halving
from paceline.search.loop import Loop
from paceline.search.page import render
from paceline.search.proposals import Proposals
from paceline.search.show import Display, table
from paceline.search.space import job_at, read_search, rung_steps
from paceline.search.study import SearchStudy
from paceline.search.trial_launch import OnSite
from paceline.search.trial_run import TrialProcess
from paceline.train.start import read_inputs, with_measured_speed
from paceline.train.stopping import term_as_interrupt
from paceline.train.this_machine import resolve_on_this_machine

_CONSOLE = Console(highlight=False, soft_wrap=True)
# What may change of a search that goes on: how long it looks, and how its answer is chosen.
_FREE = ("within", "rule")


def search_command(
    file: Path,
    overrides: Sequence[str],
    out: Path | None,
    read: Callable[[Path, list[str]], JobSpec],
    site: str | None,
) -> dict[str, Any]:
    """Search a space; a search that its folder has goes on.

    Args:
        file: with a table [search].
        overrides: `--set`s for all trials.
        out: folder of the search; None: searches/<name of the file>.
        read: makes a Job of its file and `--set`s, its length in steps.
        site: that trials are launched on; None: this process trains them.

    Returns:
        what was found as plain data.

    Raises:
        InputError: wrong input, or no point of the space can run.
    """
    search = read_search(file)
    job = read(file.parent / search.job, list(overrides))
    steps = rung_steps(search, job.train.steps)
    folder = out or Path("searches") / file.stem
    on = None if site is None else _on_site(site, file, folder)
    is_here = on is None or on.is_here
    with term_as_interrupt(), owned(folder), TrialProcess() as process:
        wanted = {"search": to_raw(search), "job": to_raw(job), "on": {"site": site or "here"}}
        for name in _FREE:
            wanted["search"].pop(name, None)
        must_be_same(folder, "search", wanted)
        cluster = kept_cluster(folder, job, on)
        check_known(job, cluster, search, is_here=is_here)
        if on is None:
            with _CONSOLE.status("reading the data"):
                plan = resolve_on_this_machine(job.replace(cluster=cluster))
                read_inputs(plan.job, lambda _done, _total: None)
        study = SearchStudy(folder / "study.log", search)
        display = Display(_CONSOLE)
        halving = Halving(steps, search.factor, search.objectives)
        proposals = Proposals(search, job, cluster, halving, is_here=is_here)
        loop = Loop(
            search, job, cluster, halving, proposals, study, folder / "trials",
            lambda known, trains: display.show(Found.of(search, halving, known), trains),
            process.train_to if on is None else on.train_to,
        )  # fmt: skip
        return _search(loop, display, folder)


def _on_site(name: str, file: Path, folder: Path) -> OnSite:
    """Where trials are launched; the search's own files are no code."""
    asked = Asked(site_name=name, site=site_named(name), group=folder.name)
    return OnSite(asked, (file, file.parent / read_search(file).job, folder), this_machine)


def _search(loop: Loop, display: Display, folder: Path) -> dict[str, Any]:
    is_over = False
    try:
        with display.running():
            is_over = loop.run()
    except KeyboardInterrupt:
        is_over = False
    if not is_over:
        _CONSOLE.print(f"stopped; what was found is in {folder}, run it again to go on")
    found = Found.of(loop.search, loop.halving, loop.study.known)
    if is_over and not found.known.trials:
        last = found.known.refused[-1].answer
        if last.kind == "unaffordable":
            raise InputError(f"no trial fits into the budget; of the cheapest, {last.reason}")
        [(reason, count), *_] = found.reasons.most_common(1)
        raise InputError(f"no point of the space can run; for {count} of them: {reason}")
    _conclude(found, loop.job, loop.cluster, folder)
    return found.to_json(str(folder))


def _conclude(found: Found, job: JobSpec, cluster: Cluster, folder: Path) -> None:
    chosen = found.chosen
    if chosen is not None:
        best = job_at(job, chosen.point).replace(name=f"{folder.name}-{chosen.number:04}")
        write_atomic(folder / "job.toml", to_toml(best))
    page = write_atomic(folder / "search.html", render(found, folder))
    _CONSOLE.print(table(found, 20))
    _CONSOLE.print(found.counts_text)
    for reason, count in found.reasons.most_common(5):
        _CONSOLE.print(f"refused {count}: {reason}", markup=False)
    took = f"{duration_text(found.spent_s)} of device time as predicted"
    _CONSOLE.print(f"{took}; trials took {duration_text(found.measured_s)} with their starts")
    _CONSOLE.print(f"\n{found.sentence}\n", markup=False)
    if chosen is not None:
        _CONSOLE.print(f"train it anew: paceline train {folder / 'job.toml'}")
    _CONSOLE.print(f"page: {page}")


# ---- the folder ----------------------------------------------------------------------------------


def kept_cluster(folder: Path, job: JobSpec, on: OnSite | None = None) -> Cluster:
    """That runs are trained on, its speed known; as it was when the folder began."""
    file = folder / "cluster.toml"
    if file.exists():
        return read_cluster(file)
    if on is None or on.is_here:
        plan = with_measured_speed(resolve_on_this_machine(job), _CONSOLE.print)
        cluster = plan.job.cluster
    else:
        cluster = on.cluster(job)
    write_atomic(file, tomli_w.dumps(to_raw(cluster)))
    return cluster
