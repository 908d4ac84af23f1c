"""`paceline plan`: which layout to run, how fast it will be, what fills the memory, and why.

Also how many of which devices to rent (`--budget`). What a person says in words (clusters, bounds,
budgets) becomes data in `plan.answer.options`; this file is the order of things.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import JobOnCluster, JobSpec, to_raw, to_toml
from paceline.config.stack import Stack
from paceline.plan.answer.answer import Answer, prediction_json, runtime_json, to_json, versions
from paceline.plan.answer.describe import headline
from paceline.plan.answer.find import answer
from paceline.plan.answer.options import bounds_of, budget_of, clusters_of, lengthened
from paceline.plan.answer.show import show, show_purchase
from paceline.plan.families import family_of
from paceline.plan.points import Setting
from paceline.plan.search.budget import Purchase, plan_purchase
from paceline.plan.search.space import SearchConstraints

_FILES = ("job.toml", "plan.json", "plan.html", "predicted.json.gz")


@dataclass(frozen=True)
class PlanOptions:
    """What a person asked for besides the Job, in the words of the command line."""

    clusters: Sequence[str] = ()
    """See `plan.answer.options.cluster_of`; several are offers for a budget."""
    prices: Sequence[float] = ()
    """USD per device-hour: one for all clusters, or one for each."""
    tokens: float | None = None
    """Of the whole run; None: what the Job's steps make."""
    budget: str | None = None
    """For example "30000 USD, 10 days"."""
    most: Sequence[str] = ()
    """Bounds as "tp=8"."""
    free: Sequence[str] = ()
    """Settings without "auto" to search as well, see `plan.search.space.FREE`."""


def plan_command(
    job: JobSpec,
    machine: Callable[[], Cluster],
    asked: PlanOptions | None = None,
    *,
    num: int = 10,
    out: Path | None = None,
    as_json: bool = False,
) -> Answer | Purchase:
    """Plan a Job, print the answer and write it down.

    Args:
        job: what its layout fixes is kept.
        machine: this machine's Cluster, asked for where the Job names none.
        asked: what the command line says.
        num: layouts to show.
        out: folder for job.toml, plan.json, predicted.json.gz and plan.html.
        as_json: make the last line of output one JSON object.

    Raises:
        InputError: wrong input; or nothing fits, after what comes nearest was printed.
    """
    asked = asked or PlanOptions()
    if out is not None:
        _check_folder(out, asked)
    job = lengthened(job, asked.tokens)
    clusters = clusters_of(job, asked.clusters, asked.prices, machine)
    constraints = SearchConstraints(
        job.layout, tuple(asked.free), bounds_of(asked.most, job.layout)
    )
    if asked.budget is not None:
        return _buy(job, clusters, asked.budget, constraints, as_json)
    if len(clusters) > 1:
        raise InputError(
            f"--cluster was given {len(clusters)} times: give one, or compare what they cost with "
            '--budget "30000 USD, 10 days".'
        )
    return _plan(job.on(clusters[0]), constraints, num, out, as_json)


def _plan(
    job: JobOnCluster, constraints: SearchConstraints, num: int, out: Path | None, as_json: bool
) -> Answer:
    with _busy("searching layouts"):
        found = answer(job, constraints)
    console = Console(highlight=False)
    console.print(headline(found))
    show(found, console, num)
    if out is not None:
        with _busy("writing"):
            paths = write(found, out)
        for path in paths:
            console.print(f"wrote {path}", soft_wrap=True)
    if as_json:
        print(json.dumps(to_json(found), allow_nan=False))
    if found.shortage is not None:
        raise InputError(found.shortage.text)
    return found


def _busy(what: str) -> Any:
    """A sign of life on the terminal, never in what is piped on."""
    return Console(stderr=True).status(what)


# ---- budgets -------------------------------------------------------------------------------------


def _buy(
    job: JobSpec,
    offers: Sequence[Cluster],
    text: str,
    constraints: SearchConstraints,
    as_json: bool,
) -> Purchase:
    if not job.model.knows_layers:
        raise InputError(
            f'--budget plans runs of decoders, and model.family is "{job.model.family}": leave it '
            "out, and plan for one cluster at a time."
        )
    usd, days = budget_of(text)
    unpriced = [each for each in offers if each.prices.usd_per_device_hour is None]
    if unpriced:
        raise InputError(
            f"the price of {unpriced[0].device.name} is not known: give --price 2.5 an hour "
            "(USD, once for each --cluster) or cluster.prices.usd_per_device_hour."
        )
    setting = Setting.of(job.on(offers[0]))
    tokens = float(job.train.steps) * job.train.global_batch * job.train.seq_len
    with _busy("searching layouts for each number of nodes"):
        bought = plan_purchase(setting, offers, tokens, usd, days, constraints)
    console = Console(highlight=False)
    runtimes = dict.fromkeys((offer.stack or Stack()).whose for offer in offers)
    said = f"{job.train.steps:,} steps, {tokens:.3g} tokens, for {text}"
    console.print(f"{job.name}: {said}, run by {' or '.join(runtimes)}\n")
    show_purchase(bought, console)
    is_possible = any(_within(run.usd, usd) and _within(run.days, days) for run in bought.runs)
    if is_possible:
        console.print(bought.text)
    if as_json:
        print(json.dumps(purchase_json(bought), allow_nan=False))
    if not is_possible:
        raise InputError(bought.text)
    return bought


def _within(value: float, most: float | None) -> bool:
    return most is None or value <= most


def purchase_json(bought: Purchase) -> dict[str, Any]:
    """What money and time buy, as plain data."""
    runs = [
        {
            "cluster": to_raw(run.cluster),
            "runtime": runtime_json(run.cluster),
            "num_devices": run.num_devices,
            "days": run.days,
            "usd": run.usd,
            "goodput": run.goodput,
            "best": prediction_json(run.best),
        }
        for run in bought.runs
    ]
    place = {id(run): at for at, run in enumerate(bought.runs)}
    return {
        "runs": runs,
        "fastest": bought.fastest and place[id(bought.fastest)],
        "cheapest": bought.cheapest and place[id(bought.cheapest)],
        "text": bought.text,
        "versions": versions(),
    }


# ---- files ---------------------------------------------------------------------------------------


def _check_folder(out: Path, asked: PlanOptions) -> None:
    """Refuse, before anything is searched, a folder that can't or mustn't be written."""
    if asked.budget is not None:
        raise InputError(
            "--out keeps the plan of one cluster, and --budget looks at many: leave --out out, or "
            "plan for the cluster that you choose."
        )
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file: give a folder, which may not exist yet.")
    if (out / "facts.json").exists():
        raise InputError(f"--out {out} is a run, which keeps its own plan: give another folder.")


def write(found: Answer, folder: Path) -> list[Path]:
    """Write what can be kept of an answer: the Job, figures, Timeline and page.

    All of it is made beside the folder and moved into it when it is complete; an older plan in
    there is replaced.

    Raises:
        InputError: the folder can't be written.
    """
    draft = folder.absolute().with_name(f".{folder.name}.tmp{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        _write_into(draft, found, folder)
        folder.mkdir(exist_ok=True)
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)
        return [path.replace(folder / path.name) for path in sorted(draft.iterdir())]
    except OSError as error:
        raise InputError(
            f"--out {folder} can't be written: {error.strerror}; give a folder that can."
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_into(folder: Path, found: Answer, then: Path) -> None:
    """Write the files into a folder that will be another one's."""
    # plotly and the templates are needed for this alone.
    from paceline.plan.answer.page import render

    (folder / "plan.json").write_text(json.dumps(to_json(found), indent=1, allow_nan=False))
    (folder / "plan.html").write_text(render(found, then))
    if found.best is None:
        return
    (folder / "job.toml").write_text(to_toml(found.best_job))
    concrete = found.job.with_layout(found.best.layout, found.job.comm)
    timeline = family_of(concrete.model).timeline(concrete.model, concrete)
    if timeline is not None:
        timeline.write(folder / "predicted.json.gz")
