"""At scale: stragglers, failures and checkpoints, energy and price.

How it works: a step on n devices waits for the slowest of them; every so often one of them fails,
and the job goes back to its last checkpoint. What is left of the time is the goodput, and the bill
is device-hours over goodput times the price. All functions are pure and broadcast over arrays, from
1 to 131,072 devices and beyond.

What it is not: a model of which parts fail (a device's mean time between failures is one number, a
job's is that over its devices: failures are independent and come at any time with equal chance),
nor of queues and spare nodes, which `restart_s` may include.

Papers: checkpoint intervals J. W. Young 1974 (doi 10.1145/361147.361115) and J. T. Daly 2006 (doi
10.1016/j.future.2004.11.016); failures of a large run: Llama 3, section 3.3.4,
https://arxiv.org/abs/2407.21783.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.config.figure import Figure
from paceline.config.hardware import Cluster
from paceline.plan.points import Array

HOUR_S = 3600.0

# The mean of the largest of 2^i standard normal numbers, i from 0 to 20, by numerical integration
# of x n phi(x) Phi(x)^(n-1); the usual sqrt(2 ln n) is an upper bound, 8-35 % above it.
_MEAN_MAXIMUM = (
    *(0.0, 0.5642, 1.0294, 1.4236, 1.7660, 2.0697, 2.3438, 2.5949, 2.8271, 3.0443, 3.2486),
    *(3.4422, 3.6265, 3.8028, 3.9719, 4.1347, 4.2918, 4.4438, 4.5911, 4.7341, 4.8732),
)

# 419 unexpected stops in 54 days of 16,384 H100: one in 3.1 hours, 50,676 device-hours each.
LARGE_RUN_MTBF = Figure(
    value=54 * 24 * 16384 / 419,
    origin="cited",
    source="Llama 3 (arXiv 2407.21783, 3.3.4): 419 unexpected stops, 16,384 H100, 54 days",
)
# Device to host over 16 lanes of PCIe 4, as pinned copies reach it (25 of 32 GB/s on paper).
COPY_BYTES_PER_S = Figure(value=20e9, origin="assumed", source="pinned copies over PCIe 4.0 x16")
# Ranks agree on the step and wait for the slowest copy.
SAVE_OVERHEAD_S = Figure(value=2.0, origin="assumed", source="agreeing and waiting at a save")
# Noticing, replacing a node, starting processes and communicators, loading, warming up.
RESTART_S = Figure(value=600.0, origin="assumed", source="from a failure to the next good step")

# A reboot takes minutes, a new part days.
NODE_RETURN_HOURS = Figure(value=1.0, origin="assumed", source="from a node's loss to its return")


def straggler_wait_s(jitter_s: npt.ArrayLike, num_ranks: npt.ArrayLike) -> Array:
    """Mean wait for the slowest rank, where ranks' times scatter normally and independently.

    Args:
        jitter_s: standard deviation of one rank's step, seconds.
        num_ranks: ranks that wait for each other, at least 1.

    Returns:
        seconds beyond the mean step; 0 for one rank.
    """
    logs = np.log2(np.maximum(np.asarray(num_ranks, float), 1.0))
    return np.asarray(jitter_s, float) * np.interp(
        logs, np.arange(len(_MEAN_MAXIMUM)), _MEAN_MAXIMUM
    )


def device_mtbf_hours(cluster: Cluster) -> Figure | None:
    """Hours of one device between failures that stop the job: the cluster's, or a published one.

    The published figure is of datacentre GPUs; for CPUs nothing is assumed.
    """
    if cluster.device_mtbf_hours is not None:
        return cluster.device_mtbf_hours
    return None if cluster.device.kind == "cpu" else LARGE_RUN_MTBF


def node_return_hours(cluster: Cluster) -> Figure:
    """Hours from a node's loss to its return: the cluster's, or what is assumed."""
    return cluster.node_return_hours or NODE_RETURN_HOURS


def job_mtbf_s(device_hours: npt.ArrayLike, num_devices: npt.ArrayLike) -> Array:
    """Mean seconds between failures of a job, of which any device's failure is one.

    Args:
        device_hours: mean hours between failures of one device.
        num_devices: devices of the job.
    """
    return np.asarray(device_hours, float) * HOUR_S / np.asarray(num_devices, float)


def daly_interval_s(save_s: npt.ArrayLike, mtbf_s: npt.ArrayLike) -> Array:
    """Daly's seconds of work between checkpoints, of higher order; M where D >= M / 2.

    Args:
        save_s: D, seconds that a save blocks training.
        mtbf_s: M, mean seconds between failures of the job.
    """
    save, mtbf = np.asarray(save_s, float), np.asarray(mtbf_s, float)
    ratio = save / (2 * mtbf)
    series = np.sqrt(2 * save * mtbf) * (1 + np.sqrt(ratio) / 3 + ratio / 9) - save
    return np.where(save < mtbf / 2, series, mtbf)


def goodput(
    interval_s: npt.ArrayLike,
    save_s: npt.ArrayLike,
    restart_s: npt.ArrayLike,
    mtbf_s: npt.ArrayLike,
) -> Array:
    """Part of the time that goes into steps which are kept: 0 to 1.

    For failures at random moments (exponential), also while saving and restarting, this is exact:
    Daly's tau / (M e^(R/M) (e^((tau + D)/M) - 1)). Where tau, D and R are far below M it is to
    first order 1 - D/tau - (tau/2 + R)/M, whose terms are easier to read: time spent saving, work
    lost with each failure, and restarts; below 80 % that line is up to some points too low.

    Args:
        interval_s: tau, seconds of work between checkpoints.
        save_s: D, seconds that a save blocks training.
        restart_s: R, seconds from a failure to the next step.
        mtbf_s: M, mean seconds between failures of the job.
    """
    tau, mtbf = np.asarray(interval_s, float), np.asarray(mtbf_s, float)
    with np.errstate(over="ignore"):
        attempt = np.expm1((tau + np.asarray(save_s, float)) / mtbf)
        wall = mtbf * np.exp(np.asarray(restart_s, float) / mtbf) * attempt
    return tau / wall


def checkpoint_bytes(num_params: npt.ArrayLike) -> Array:
    """Bytes of a full checkpoint: fp32 (master) parameters and both moments of Adam, 12 each.

    Moments kept in 8 bits are written decoded, so that any layout may read them.
    """
    return 12.0 * np.asarray(num_params, float)


def blocking_save_s(num_bytes: npt.ArrayLike, num_devices: npt.ArrayLike) -> Array:
    """Seconds that a save stops training: each device copies its share, files follow beside.

    Args:
        num_bytes: of the whole checkpoint.
        num_devices: devices that hold different shares of it (all, where states are sharded).
    """
    share = np.asarray(num_bytes, float) / np.asarray(num_devices, float)
    return share / COPY_BYTES_PER_S.value + SAVE_OVERHEAD_S.value


@dataclass(frozen=True, eq=False)
class Resilience:
    """How a job survives its failures; arrays over the points that were asked about."""

    mtbf_s: Array
    """Mean seconds between failures."""
    save_s: Array
    """What a save blocks."""
    restart_s: Array
    interval_s: Array
    """Seconds of work between checkpoints: Daly's, or longer where storage needs it."""
    goodput: Array
    """Part of the time that is kept, 0 to 1."""


def resilience(
    cluster: Cluster,
    num_devices: npt.ArrayLike,
    num_bytes: npt.ArrayLike,
    *,
    restart_s: npt.ArrayLike | None = None,
    storage_bytes_per_s: npt.ArrayLike = np.inf,
) -> Resilience | None:
    """Checkpoint interval and goodput of jobs on a cluster's devices; None: reliability unknown.

    Args:
        cluster: whose device_mtbf_hours counts (see the function of this name).
        num_devices: devices of the job.
        num_bytes: of a checkpoint, see `checkpoint_bytes`.
        restart_s: seconds from a failure to the next step; ten minutes are assumed by default.
        storage_bytes_per_s: of the whole job into storage: a checkpoint is complete before the
            next one begins.
    """
    figure = device_mtbf_hours(cluster)
    if figure is None:
        return None
    mtbf = job_mtbf_s(figure.value, num_devices)
    restart = np.asarray(RESTART_S.value if restart_s is None else restart_s, float)
    save = blocking_save_s(num_bytes, num_devices)
    writing = np.asarray(num_bytes, float) / np.asarray(storage_bytes_per_s, float)
    interval = np.maximum(daly_interval_s(save, mtbf), writing)
    return Resilience(
        mtbf_s=mtbf,
        save_s=save,
        restart_s=restart,
        interval_s=interval,
        goodput=goodput(interval, save, restart, mtbf),
    )


@dataclass(frozen=True, eq=False)
class Bill:
    """What steps cost; None where a figure that it needs is unknown."""

    device_hours: Array
    """Of all devices, failures and restarts included."""
    energy_kwh: Array | None
    """At the devices' full power, of the whole site where its overhead is known."""
    usd: Array | None
    """Device-hours at the price of an hour."""


def bill(
    cluster: Cluster,
    num_devices: npt.ArrayLike,
    step_s: npt.ArrayLike,
    num_steps: npt.ArrayLike = 1,
    goodput: npt.ArrayLike = 1.0,
) -> Bill:
    """Cost of a step, or of an epoch or a run of many steps.

    Args:
        cluster: prices and the device's power.
        num_devices: rented or running.
        step_s: seconds of a step.
        num_steps: steps that are bought.
        goodput: part of the time that is kept.
    """
    seconds = np.asarray(step_s, float) * np.asarray(num_steps, float)
    hours = seconds * np.asarray(num_devices, float) / np.asarray(goodput, float) / HOUR_S
    price = cluster.prices.usd_per_device_hour
    watts = site_watts_per_device(cluster)
    return Bill(
        device_hours=hours,
        energy_kwh=None if watts is None else hours * watts / 1000,
        usd=None if price is None else hours * price.value,
    )


def site_watts_per_device(cluster: Cluster) -> float | None:
    """Watts of one device at full power, with its share of the site where that is known."""
    watts, overhead = cluster.device.power_watts, cluster.prices.power_overhead
    if watts is None:
        return None
    return watts.value * (1.0 if overhead is None else overhead.value)


def storage_usd_per_month(
    cluster: Cluster, num_bytes: npt.ArrayLike, num_kept: npt.ArrayLike = 1
) -> Array | None:
    """What keeping checkpoints costs a month; None where the price of storage is unknown.

    Args:
        cluster: prices.
        num_bytes: of one checkpoint.
        num_kept: checkpoints that are there at a time.
    """
    price = cluster.prices.usd_per_gb_month
    if price is None:
        return None
    return np.asarray(num_bytes, float) * np.asarray(num_kept, float) / 1e9 * price.value
