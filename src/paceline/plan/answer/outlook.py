"""Outlook: what a whole run takes with one layout: time, failures, energy, price, storage.

Sums of `plan.scale` for all steps of a Job. What rests on something unknown (a price, a device's
power or reliability) is None: nothing is invented.
"""

from dataclasses import dataclass

from paceline.config.job import JobOnCluster, JobSpec
from paceline.plan.prediction import Prediction
from paceline.plan.scale import bill, resilience, storage_usd_per_month


@dataclass(frozen=True)
class Outlook:
    """What all steps of a Job take."""

    steps: int
    amount: float
    """Tokens or images."""
    train_s: float
    """Seconds of all steps, without failures."""
    mtbf_s: float | None
    """Mean seconds between failures that stop the job; None: unknown."""
    checkpoint_every_s: float | None
    """Daly's interval."""
    goodput: float | None
    """Part of the time that is kept, 0 to 1."""
    device_hours: float
    """Failures and restarts included where they are known."""
    energy_kwh: float | None
    """At the devices' full power, hence the most."""
    usd: float | None
    """Of the run."""
    usd_per_step: float | None
    checkpoint_bytes: float
    num_checkpoints: int
    """Kept at the end of the run."""
    storage_usd_per_month: float | None
    """Of all that are kept."""


def outlook(job: JobOnCluster, best: Prediction, saved: float) -> Outlook:
    """What the Job's steps take on its cluster with a layout.

    Args:
        saved: bytes of a checkpoint.
    """
    train, cluster, ranks = job.train, job.cluster, best.layout.num_ranks
    kept = _num_kept(job)
    lasting = resilience(cluster, ranks, saved)
    goodput = None if lasting is None else float(lasting.goodput)
    cost = bill(cluster, ranks, best.step_s, train.steps, goodput or 1.0)
    usd = _number(cost.usd)
    return Outlook(
        steps=train.steps,
        amount=float(train.steps) * samples_per_step(job),
        train_s=best.step_s * train.steps,
        mtbf_s=None if lasting is None else float(lasting.mtbf_s),
        checkpoint_every_s=None if lasting is None else float(lasting.interval_s),
        goodput=goodput,
        device_hours=float(cost.device_hours),
        energy_kwh=_number(cost.energy_kwh),
        usd=usd,
        usd_per_step=None if usd is None else usd / train.steps,
        checkpoint_bytes=saved,
        num_checkpoints=kept,
        storage_usd_per_month=_number(storage_usd_per_month(cluster, saved, kept)),
    )


def samples_per_step(job: JobSpec) -> int:
    """Tokens (of language models) or images that a step passes."""
    return job.train.global_batch * job.model.units_per_sample(job.train.seq_len)


def _num_kept(job: JobSpec) -> int:
    """Checkpoints that are there at the end."""
    kept, steps = job.checkpoint, job.train.steps
    made = 1 if kept.every == 0 else -(-steps // kept.every)
    forever = 0 if kept.keep_every is None else steps // kept.keep_every
    return min(made, kept.keep_last + forever)


def _number(value: object) -> float | None:
    return None if value is None else float(value)  # type: ignore[arg-type]
