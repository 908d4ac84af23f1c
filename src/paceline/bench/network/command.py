"""`paceline bench collectives`: measure the links, show them, and complete a Cluster file.

The file gets the measured curves of its tiers, which the planner reads, where the backend is the
one that training uses on these devices. Nothing is written before everything is measured.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from paceline.bench.command import shown, source_text, start_from, to_text
from paceline.bench.network.advice import advice, described, host_order
from paceline.bench.network.bandwidth import by_curve, fit
from paceline.bench.network.measure import NetworkMeasurement, NetworkRequest, measure_network
from paceline.bench.network.page import render
from paceline.bench.network.show import shown_network
from paceline.bench.network.sizes import read_sizes, usual_sizes
from paceline.bench.network.slow import slow_links
from paceline.bench.network.sweep import tiers_from
from paceline.bench.network.tune import SIZES, tune
from paceline.bench.rank_pool import run_on_ranks
from paceline.comm.rendezvous import ranks_from_env
from paceline.config.errors import InputError
from paceline.config.frozen import nearest
from paceline.config.hardware import Cluster
from paceline.machine.discovery import this_host
from paceline.observe.run import write_atomic

_CONSOLE = Console(highlight=False, soft_wrap=True)
_DEVICES = {"gloo": "cpu", "mpi": "cpu", "nccl": "cuda"}


@dataclass(frozen=True)
class CollectivesOptions:
    """The options of the command line."""

    out: Path
    num_ranks: int | None = None
    backend: str | None = None
    sizes: str | None = None
    budget_s: float = 180.0
    with_pairs: bool = True
    quick: bool = False
    html: Path | None = None
    tunes_nccl: bool = False


def collectives_command(asked: CollectivesOptions) -> dict[str, Any] | None:
    """Measure, show and write.

    Returns:
        what was found as plain data, None on a rank that is not the first.

    Raises:
        InputError: wrong input; nothing was written.
        RunError: a rank failed or a result was wrong; nothing was written.
    """
    cluster = start_from(asked.out, asked.num_ranks, ("collectives",))
    backend = _backend(asked.backend, cluster)
    kind = _DEVICES[backend]
    sizes = read_sizes(asked.sizes) if asked.sizes else usual_sizes(kind, quick=asked.quick)
    request = NetworkRequest(sizes, asked.budget_s, backend, asked.with_pairs, asked.quick)
    given = ranks_from_env(kind)
    if asked.tunes_nccl and (backend != "nccl" or given is not None or cluster.num_devices < 2):
        raise InputError(
            "--tune-nccl starts NCCL ranks of its own: it needs two CUDA devices, and no launcher."
        )
    with shown() as hear:
        measured: NetworkMeasurement = run_on_ranks(
            cluster.num_devices, kind, partial(measure_network, request), hear
        )
        tuned = None
        if asked.tunes_nccl:
            tuned = tune(cluster.num_devices, kind, replace(request, sizes=SIZES), hear)
    if given is not None and not given.is_first:
        return None
    _CONSOLE.print(shown_network(measured))
    host = cluster.host or this_host()
    _CONSOLE.print("\n".join([described(host), *advice(measured, host, backend)]), markup=False)
    if tuned is not None:
        _CONSOLE.print(f"NCCL: {tuned.reason}.", markup=False)
    facts = _written(asked, cluster.replace(host=host), backend, measured)
    return {**facts, "nccl": None if tuned is None else asdict(tuned)}


def _backend(wanted: str | None, cluster: Cluster) -> str:
    """The backend that is there.

    Raises:
        InputError: it is not.
    """
    kind = cluster.device.kind
    usual = "nccl" if kind == "cuda" else "gloo"
    if wanted is None or wanted == usual:
        return usual
    if wanted not in _DEVICES:
        raise InputError(f"--backend {wanted} is not known{nearest(wanted, [*_DEVICES])}")
    if wanted == "nccl":
        raise InputError("--backend nccl needs CUDA devices, and here are none: take gloo.")
    if wanted == "mpi" and not dist.is_mpi_available():
        raise InputError("--backend mpi needs a torch that was built with MPI: take gloo.")
    return wanted


def _written(
    asked: CollectivesOptions, cluster: Cluster, backend: str, measured: NetworkMeasurement
) -> dict[str, Any]:
    """Write the file and the page, and say so."""
    source, kind = source_text(), cluster.device.kind
    is_used = _DEVICES[backend] == kind and backend != "mpi"
    file = asked.out if is_used and measured.rows else None
    facts = {"file": None if file is None else str(file), "backend": backend, **figures(measured)}
    if asked.html is not None:
        write_atomic(asked.html, render(measured, source, file, asked.html))
        _CONSOLE.print(f"{asked.html}: the same as a page", markup=False)
    if not is_used:
        _CONSOLE.print(f"{asked.out} is left as it was: training does not use {backend} here.")
    elif measured.rows:
        inside = measured.ranks_per_node
        tiers = tiers_from(measured.rows, kind, inside, len(measured.hosts), source)
        hosts = tuple(host_order(measured)) or cluster.hosts
        write_atomic(asked.out, to_text(cluster.replace(tiers=tiers, hosts=hosts)))
        told = f'{asked.out}: the curves, for the planner: [cluster] file = "{asked.out}"'
        _CONSOLE.print(told, markup=False)
    return facts


def figures(measured: NetworkMeasurement) -> dict[str, Any]:
    """What was measured as plain data: seconds and bytes."""
    pairs = measured.pairs
    slow = [] if pairs is None else slow_links(pairs.best_bytes_per_s, pairs.hosts)
    fits = [
        {
            **dict(zip(("op", "algorithm", "links", "num_ranks"), key, strict=True)),
            **{
                name: None if value == float("inf") else value
                for name, value in asdict(fit(rows)).items()
            },
        }
        for key, rows in by_curve(measured.rows).items()
    ]
    return {
        "rows": [row.figures() for row in measured.rows],
        "fits": fits,
        "left_out": [asdict(each) for each in measured.left],
        "pairs": None if pairs is None else asdict(pairs),
        "slow": [{**asdict(each), "sentence": each.sentence} for each in slow],
    }
