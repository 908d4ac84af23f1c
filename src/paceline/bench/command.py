"""`paceline bench`: measure this machine and write what was found as a Cluster file and a page.

Nothing is written before everything is measured, and then the whole file at once: Ctrl-C leaves
what was there.
"""

import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from paceline.bench.measure import PARTS, BenchRequest, BenchResult, Part, calibrated, measure
from paceline.bench.page import page_file, render
from paceline.bench.rank_pool import RankProgress, TellProgress, run_on_ranks
from paceline.bench.table import figures, summary
from paceline.comm.rendezvous import ranks_from_env
from paceline.config.errors import InputError
from paceline.config.frozen import nearest
from paceline.config.hardware import Cluster
from paceline.config.job import read_cluster, to_raw
from paceline.machine.core_clock import StealClock
from paceline.machine.discovery import this_machine
from paceline.observe.run import write_atomic
from paceline.render.figures import date_text

_CONSOLE = Console(highlight=False, soft_wrap=True)
# Of every core. Assumed: less of it is lost in what figures differ by anyway.
_STOLEN = 0.03


def bench_command(
    out: Path, *, num_ranks: int | None, quick: bool, only: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Measure and write; say what was found.

    Args:
        out: the Cluster file; where only some parts are measured, the others are taken from it. The
            page stands beside it.
        num_ranks: ranks to measure with; None: as many as training would start.
        quick: fewer sizes and shorter looks.
        only: parts of PARTS; none: all.

    Returns:
        what was found as plain data, None on a rank that is not the first.

    Raises:
        InputError: wrong input; nothing was written.
        RunError: a rank failed; nothing was written.
    """
    parts, page = _parts(only), page_file(out)
    cluster = start_from(out, num_ranks, parts)
    request = BenchRequest(cluster, parts, source_text(), quick)
    kind = cluster.device.kind
    with shown() as hear:
        outcome: BenchResult = run_on_ranks(
            cluster.num_devices, kind, partial(measure, request), hear
        )
    given = ranks_from_env(kind)
    if given is not None and not given.is_first:
        return None
    found = calibrated(outcome, request.source)
    write_atomic(out, to_text(found))
    write_atomic(page, render(found, outcome, request, out))
    _CONSOLE.print(summary(found, outcome))
    _CONSOLE.print(f'{out}: use it with [cluster] file = "{out}" in a job.toml', markup=False)
    _CONSOLE.print(f"{page}: the same as a page", markup=False)
    return {"file": str(out), "page": str(page), **figures(found, outcome)}


def to_text(cluster: Cluster) -> str:
    """The Cluster as TOML, which `read_cluster` reads to an equal one."""
    return tomli_w.dumps(to_raw(cluster))


def _parts(only: Sequence[str]) -> tuple[Part, ...]:
    unknown = [name for name in only if name not in PARTS]
    if unknown:
        raise InputError(f"--only {unknown[0]} is not measured{nearest(unknown[0], PARTS)}")
    return tuple(part for part in PARTS if part in only or not only)


def start_from(out: Path, num_ranks: int | None, parts: Sequence[Part]) -> Cluster:
    """What is known: this machine, and what an earlier bench found of parts that are not wished.

    Raises:
        InputError: steps can't be calibrated on curves that nobody measured.
    """
    machine = _machine(num_ranks)
    if len(parts) == len(PARTS) or not out.exists():
        if "step" in parts and "device" not in parts:
            raise InputError(
                f"--only step completes an earlier measurement, and {out} does not exist: "
                "measure all parts first."
            )
        return machine
    earlier = read_cluster(out)
    had, has = ((each.num_nodes, each.devices_per_node) for each in (earlier, machine))
    if had != has:
        raise InputError(
            f"{out} is for {had[0]} x {had[1]} ranks, not {has[0]} x {has[1]}: "
            "give another --out, or measure all parts again."
        )
    if "device" not in parts:
        return earlier
    device = machine.device.replace(codecs=earlier.device.codecs)
    return earlier.replace(device=device)


def _machine(num_ranks: int | None) -> Cluster:
    machine = this_machine()
    kind = machine.device.kind
    given = ranks_from_env(kind)
    if given is not None:
        num_nodes = given.world_size // given.local_world_size
        return machine.replace(devices_per_node=given.local_world_size, num_nodes=num_nodes)
    if num_ranks is None:
        return machine
    most = machine.devices_per_node
    if num_ranks < 1 or (kind == "cuda" and num_ranks > most):
        has = f" to {most}, which this machine has" if kind == "cuda" else " or more"
        raise InputError(f"--ranks {num_ranks} can't be started: give 1{has}.")
    return with_ranks(machine, num_ranks)


def with_ranks(machine: Cluster, num_ranks: int) -> Cluster:
    """The machine with another number of ranks: CPU ranks share its memory."""
    device, usual = machine.device, machine.devices_per_node
    if device.kind == "cpu" and device.memory_bytes is not None:
        share = device.memory_bytes.value * usual / num_ranks
        device = device.replace(memory_bytes=device.memory_bytes.replace(value=share))
    return machine.replace(device=device, devices_per_node=num_ranks)


def source_text() -> str:
    """Where, when and by which command something was measured."""
    command = " ".join(["paceline", *sys.argv[1:]])
    return f"{platform.node()}, {date_text(time.time())}, torch {torch.__version__}, {command}"


@contextmanager
def shown() -> Iterator[TellProgress]:
    """A progress bar for each part, and a word where others had this host's cores meanwhile."""
    columns = (
        TextColumn("{task.fields[part]:<11}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    bars: dict[str, TaskID] = {}
    stolen = StealClock()
    with Progress(*columns, console=_CONSOLE) as progress:

        def hear(news: RankProgress) -> None:
            if news.part not in bars:
                bars[news.part] = progress.add_task("", total=news.total, part=news.part)
            progress.update(bars[news.part], completed=news.done, description=news.what)

        yield hear
    share = stolen.lap()
    if bars and share > _STOLEN:
        _CONSOLE.print(
            f"The hypervisor gave {share:.0%} of this host's cores to others meanwhile (st in top):"
            " what was measured is slower by about as much. Measure again at a quieter time."
        )
