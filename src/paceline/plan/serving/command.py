"""`paceline plan --serve`: how to serve a load, what it costs, and why other ways lose."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import JobSpec
from paceline.config.model import Model
from paceline.plan.answer.options import clusters_of
from paceline.plan.serving.measured import MeasuredServing, read_all_measured
from paceline.plan.serving.options import api_price_of, range_of, rate_of
from paceline.plan.serving.search import Asked, find_fleets
from paceline.plan.serving.show import show, to_json
from paceline.plan.serving.slo import Slo, slo_of


@dataclass(frozen=True)
class ServeOptions:
    """What a person asked for, in the words of the command line."""

    rate: str | None = None
    num_in: str | None = None
    num_out: str | None = None
    slo: str | None = None
    api_price: str | None = None
    clusters: Sequence[str] = ()
    prices: Sequence[float] = ()


def plan_serve_command(
    job: JobSpec,
    folder: Path | None,
    machine: Callable[[], Cluster],
    options: ServeOptions,
    *,
    num: int = 10,
    as_json: bool = False,
) -> None:
    """Plan how to serve a network, and print the answer.

    Args:
        job: whose network is served.
        folder: of its weights, where `paceline bench serve` may have measured it.
        machine: this machine's Cluster, asked for where no other is named.
        num: fleets to show.
        as_json: make the last line of output one JSON object.

    Raises:
        InputError: wrong input; or nothing keeps the SLO, after why was printed.
    """
    asked = _asked(job, options)
    api = None if options.api_price is None else api_price_of(options.api_price)
    measured = [] if folder is None else read_all_measured(folder)
    clusters = _clusters(job, options, machine, measured)
    if len(clusters) > 1 and any(one.prices.usd_per_device_hour is None for one in clusters):
        raise InputError(
            "To choose between clusters their prices are needed: give --price for each of them."
        )
    if api is not None and clusters[0].prices.usd_per_device_hour is None:
        raise InputError("--api-price is compared with a rent: give --price, USD per device-hour.")
    if any(one.model != asked.model for one in measured):
        raise InputError(
            f"{folder} was measured with another network: measure anew with `paceline bench serve`."
        )
    with Console(stderr=True).status("searching fleets"):
        found = find_fleets(asked, clusters, measured, api)
    console = Console(highlight=False)
    show(found, asked, console, num)
    if as_json:
        print(json.dumps(to_json(found, asked)))
    if not found.fleets:
        raise InputError(
            f"No engine keeps {asked.slo} at {asked.rate:g} requests/s on what was offered: offer "
            "more or faster devices, or promise less."
        )


def _asked(job: JobSpec, options: ServeOptions) -> Asked:
    if not isinstance(job.model, Model):
        raise InputError(f"--serve plans decoders, and the Job has a {job.model.family}.")
    if options.rate is None or options.num_in is None or options.num_out is None:
        raise InputError("--serve needs a load: for example --rate 5/s --in 1000 --out 300.")
    asked = Asked(
        job.model,
        rate_of(options.rate),
        range_of("--in", options.num_in),
        range_of("--out", options.num_out),
        Slo() if options.slo is None else slo_of(options.slo),
    )
    longest = asked.num_in[1] + asked.num_out[1]
    if longest > asked.model.max_seq_len:
        raise InputError(
            f"--in and --out make requests of {longest:,} tokens, and the network takes "
            f"{asked.model.max_seq_len:,}: shorten them."
        )
    return asked


def _clusters(
    job: JobSpec,
    options: ServeOptions,
    machine: Callable[[], Cluster],
    measured: Sequence[MeasuredServing],
) -> list[Cluster]:
    """Those that are named; or this machine, where the network was measured on it."""
    if not options.clusters and not measured and job.cluster.device == "auto":
        raise InputError(
            "How fast this machine serves the network is not known: measure it with `paceline "
            "bench serve runs/my` and plan runs/my, or name a --cluster, such as 8xH100-SXM."
        )
    if options.clusters or not measured:
        return clusters_of(job, options.clusters, options.prices, machine)
    here = machine()
    if here.device.name not in (devices := {one.device for one in measured}):
        raise InputError(
            f"The network was measured on {' and '.join(sorted(devices))}, and this machine has "
            f"{here.device.name}: measure anew with `paceline bench serve`, or name a --cluster."
        )
    # CPU ranks share one machine, and so an engine has it as a whole.
    here = here.replace(devices_per_node=1) if here.device.is_cpu else here
    if not options.prices:
        return [here]
    prices = here.prices.model_dump() | {"usd_per_device_hour": options.prices[0]}
    return [here.replace(prices=prices)]
