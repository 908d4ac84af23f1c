"""Options: clusters, bounds and budgets from the words of the command line.

Pure functions, but for reading a Cluster file. Whatever can't be understood, or can't have an
effect, is an InputError that says what to write.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from paceline.config.errors import InputError
from paceline.config.frozen import MOST, whole
from paceline.config.hardware import Cluster, ClusterSpec, device
from paceline.config.job import JobSpec, read_cluster
from paceline.config.layout import LayoutSpec
from paceline.config.links import in_nodes, largest_node
from paceline.config.prices import Prices
from paceline.plan.answer.outlook import samples_per_step
from paceline.plan.resolve import concrete_cluster

_CLUSTER = re.compile(r"(?:([1-9]\d{0,8})x)?([1-9]\d{0,8})x([A-Za-z][\w.-]*)")
_AMOUNT = re.compile(
    r"(?P<usd_sign>\$)?\s*(?P<number>\d[\d,_]*(?:\.\d+)?(?:e\d+)?)\s*(?P<factor>k|M|million)?\s*"
    r"(?P<unit>USD|dollars?|days?|hours?|weeks?|months?)?",
    re.IGNORECASE,
)
_FACTORS = {"k": 1e3, "m": 1e6, "million": 1e6}
_DAYS = {"hour": 1 / 24, "day": 1.0, "week": 7.0, "month": 365.25 / 12}
_BUDGET = 'of the form "30000 USD, 10 days" (either may be left out)'


def clusters_of(
    job: JobSpec, texts: Sequence[str], prices: Sequence[float], machine: Callable[[], Cluster]
) -> list[Cluster]:
    """The concrete clusters to plan for.

    Args:
        job: whose cluster stands where no text is given; its prices and reliability count for
            named clusters that have none of their own.
        texts: see `cluster_of`.
        prices: USD per device-hour, one for all clusters or one for each.
        machine: this machine's Cluster.

    Raises:
        InputError: see `cluster_of`; the number of prices; how fast a device is, is not known.
    """
    found = [_with_terms_of(job.cluster, cluster_of(text)) for text in texts]
    if not found:
        found = [_of_job(job.cluster, machine)]
    if len(prices) not in (0, 1, len(found)):
        raise InputError(
            f"--price was given {len(prices)} times and --cluster {len(texts)} times: give one "
            "price for all clusters, or one for each."
        )
    each: list[float | None] = list(prices)
    if len(prices) < len(found):
        each = [prices[0] if prices else None] * len(found)
    return [_priced(cluster, price) for cluster, price in zip(found, each, strict=True)]


def cluster_of(text: str) -> Cluster:
    """The Cluster that a person named.

    Args:
        text: a file that `paceline bench` wrote, or "8xH100-SXM" (one node), or "16x8xH100-SXM"
            (16 nodes of 8).

    Raises:
        InputError: neither a file nor such a name, an unknown device, or more of it in a node than
            any has.
    """
    if Path(text).suffix == ".toml":
        return read_cluster(Path(text))
    found = _CLUSTER.fullmatch(text)
    if found is None:
        raise InputError(
            f"--cluster {text} is no Cluster file (.toml) and not of the form 8xH100-SXM or "
            "16x8xH100-SXM (nodes x devices x name)."
        )
    name = found[3]
    nodes, devices = int(found[1] or 1), int(found[2])
    better = in_nodes(devices, device(name))
    if better is not None:
        raise InputError(
            f"--cluster {text} puts {devices:,} devices into a node, but no node of {name} has "
            f"more than {largest_node(device(name))}: write {nodes * better[0]}x{better[1]}x{name} "
            "(nodes x devices x name), or give a Cluster file whose tiers describe the links."
        )
    return Cluster(device=device(name), devices_per_node=devices, num_nodes=nodes)


def _with_terms_of(given: ClusterSpec, named: Cluster) -> Cluster:
    """A named cluster with the prices and the reliability that the Job states."""
    prices = given.prices if named.prices == Prices() else named.prices
    lasting = {
        name: getattr(named, name) or getattr(given, name)
        for name in ("device_mtbf_hours", "node_return_hours")
    }
    return named.replace(prices=prices, **lasting)


def _of_job(given: ClusterSpec, machine: Callable[[], Cluster]) -> Cluster:
    if given.device == "auto":
        return _measured(concrete_cluster(given, machine())[0])
    for name in given.undecided:
        raise InputError(
            f"cluster.{name} is missing for {given.device.name}: give it, or plan for "
            "--cluster 16x8xH100-SXM (nodes x devices x name)."
        )
    return _measured(Cluster.parse(vars(given)))


def _measured(cluster: Cluster) -> Cluster:
    """The cluster, where something is known about the speed of its device."""
    machine = cluster.device
    if not machine.peak_flops and machine.curves is None:
        raise InputError(
            f"how fast this machine ({machine.name}) is, is not known: measure it with "
            "`paceline bench` and plan with --cluster cluster.toml, or plan for devices of the "
            "catalogue, for example --cluster 8xH100-SXM."
        )
    return cluster


def _priced(cluster: Cluster, price: float | None) -> Cluster:
    if price is None:
        return cluster
    if not 0 <= price < math.inf:
        raise InputError(f"--price {price:g} was given: give USD per device-hour, 0 or more.")
    stated = {**vars(cluster.prices), "usd_per_device_hour": price}
    return cluster.replace(prices=Prices.parse(stated))


def bounds_of(texts: Iterable[str], layout: LayoutSpec) -> Mapping[str, tuple[int, int]]:
    """Bounds of settings from texts like "tp=8", the most that is allowed.

    Raises:
        InputError: of another form, or the layout fixes more than that.
    """
    bounds = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        most = whole(value)
        if not name or most is None:
            raise InputError(
                f"--most {text[:200]} is not of the form tp=8, a setting and a number above 0."
            )
        fixed = getattr(layout, name, "auto")
        if isinstance(fixed, int) and fixed > most:
            raise InputError(
                f"--most {text} forbids layout.{name} = {fixed}, which the Job fixes: change one "
                "of them."
            )
        bounds[name] = (1, most)
    return bounds


def lengthened(job: JobSpec, tokens: float | None) -> JobSpec:
    """The JobSpec with as many steps as pass so many tokens; as it is where none are given."""
    if tokens is None:
        return job
    if job.model.unit != "tokens":
        raise InputError("--tokens are those of a language model: set train.steps instead.")
    steps = -(-tokens // samples_per_step(job))
    if not 1 <= steps <= MOST:
        raise InputError(f"--tokens {tokens} was given: give a number above 0, such as 2e12.")
    return job.replace(train=job.train.replace(steps=int(steps)))


def budget_of(text: str) -> tuple[float | None, float | None]:
    """The most US dollars and the most days of a text like "30000 USD, 10 days".

    Raises:
        InputError: it can't be understood, or says the same twice, or nothing.
    """
    usd: float | None = None
    days: float | None = None
    end = 0
    for found in _AMOUNT.finditer(text):
        between, end = text[end : found.start()], found.end()
        unit = (found["unit"] or "").lower().rstrip("s")
        value = float(re.sub("[,_]", "", found["number"])) * _FACTORS.get(
            (found["factor"] or "").lower(), 1.0
        )
        is_money = unit in ("usd", "dollar") or (found["usd_sign"] and not unit)
        taken = usd if is_money else days
        known = is_money or (unit in _DAYS and not found["usd_sign"])
        if not known or taken is not None or value <= 0 or not _joins(between):
            raise InputError(f"--budget {text!r} is not {_BUDGET}.")
        if is_money:
            usd = value
        else:
            days = value * _DAYS[unit]
    if (usd is None and days is None) or not _joins(text[end:]):
        raise InputError(f"--budget {text!r} is not {_BUDGET}.")
    return usd, days


def _joins(between: str) -> bool:
    return between.strip(" ,;") in ("", "and")
