"""Goal: when tune has reached what was wanted, and how far it is: efficiency, MFU or throughput.

Scaling efficiency is the throughput of n devices over n times that of one, with the same work on
each (weak scaling). So it is the step on one device over the step on all.
"""

import math
from dataclasses import dataclass
from typing import Literal

from paceline.config.comm import Comm
from paceline.config.errors import InputError, RunError
from paceline.config.frozen import nearest
from paceline.config.job import Job, JobOnCluster
from paceline.config.layout import LayoutSpec
from paceline.plan.resolve import resolve
from paceline.plan.search.search import memory_limit
from paceline.plan.search.space import SearchConstraints
from paceline.tune.candidates import checked, prediction_of, ranked
from paceline.tune.measurer import Measurer
from paceline.tune.trial import Reference, Trial, TuningState

Kind = Literal["efficiency", "mfu", "tokens_per_s", "samples_per_s"]
KINDS: tuple[Kind, ...] = ("efficiency", "mfu", "tokens_per_s", "samples_per_s")
_SHARES = ("efficiency", "mfu")


@dataclass(frozen=True)
class Goal:
    """What is enough."""

    kind: Kind
    value: float

    @classmethod
    def read(cls, text: str) -> "Goal":
        """From "efficiency=0.85", "mfu=0.5", "tokens_per_s=2e5" or "samples_per_s=4e3".

        Raises:
            InputError: it is none of these.
        """
        name, _, value = (part.strip() for part in text.partition("="))
        kind = next((kind for kind in KINDS if kind == name), None)
        if kind is None:
            raise InputError(f"--until {text} is no goal{nearest(name, KINDS)}")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        most = 1.0 if kind in _SHARES else math.inf
        if not 0 < number <= most:
            given = "a number above 0" if most > 1 else "a share above 0 and up to 1"
            raise InputError(f"--until {text}: give {kind} {given}, such as efficiency=0.85.")
        return cls(kind, number)

    def check_unit(self, unit: str) -> None:
        """Refuse a rate of what the model isn't trained on: known before anything is measured.

        Args:
            unit: of the model.

        Raises:
            InputError: it is one.
        """
        rate = f"{unit}_per_s"
        if self.kind not in (*_SHARES, rate):
            raise InputError(f"--until {self.text}: this model is trained on {unit}; use {rate}.")

    def check(self, job: Job) -> None:
        """Refuse a goal that can't be measured here.

        Raises:
            InputError: MFU of a device whose peak is unknown, or a rate of what the model hasn't.
        """
        self.check_unit(job.model.unit)
        rate = f"{job.model.unit}_per_s"
        if self.kind == "mfu" and _peak(job) is None:
            raise InputError(
                f"--until mfu={self.value:g}: the peak of {job.cluster.device.name} in "
                f"{job.layout.precision} is not known; use efficiency or {rate}."
            )

    @property
    def text(self) -> str:
        """As it was given."""
        return f"{self.kind}={self.value:g}"


@dataclass(frozen=True)
class Figures:
    """What a step's seconds mean."""

    rate: float
    """Units of the model a second, of all devices."""
    mfu: float | None
    efficiency: float | None
    """None: there is no reference."""
    unit: str

    @classmethod
    def of(cls, known: TuningState, trial: Trial) -> "Figures":
        """Of a trial that ran, in seconds as of the first one's trial round."""
        return cls.at(known.given, known.seconds(trial), known.reference)

    @classmethod
    def at(cls, job: Job, step_s: float, reference: Reference | None) -> "Figures":
        """Of a step of so many seconds."""
        train = job.train
        rate = train.global_batch * job.model.units_per_sample(train.seq_len) / step_s
        peak, flops = _peak(job), job.model.train_flops_per_unit(train.seq_len)
        mfu = None
        if peak is not None and flops is not None:
            mfu = rate * flops / (peak * job.cluster.num_devices)
        efficiency = None
        if reference is not None:
            each = train.global_batch / job.cluster.num_devices
            efficiency = (each / step_s) / (reference.samples / reference.step_s)
        return cls(rate, mfu, efficiency, job.model.unit)

    def reaches(self, goal: Goal) -> bool:
        """Whether it is enough."""
        return (self.to_json()[goal.kind] or 0.0) >= goal.value

    def to_json(self) -> dict[str, float | None]:
        """By the names that goals have."""
        return {f"{self.unit}_per_s": self.rate, "mfu": self.mfu, "efficiency": self.efficiency}


def _peak(job: Job) -> float | None:
    peak = job.cluster.device.peak(job.layout.precision)
    return None if peak is None else peak.value


def reference_of(job: Job, measurer: Measurer) -> Reference | None:
    """The work of one device, measured on one where it fits, else predicted; None: neither can be.

    Args:
        job: the one that is tuned.
        measurer: of the ranks.
    """
    single = one_device(job)
    found = prediction_of(single)
    limit = memory_limit(single.cluster.device)
    samples = single.train.global_batch
    if found is not None and limit is not None and found.peak_memory_bytes > limit:
        needed = found.peak_memory_bytes / 1e9
        why = f"predicted: it would take {needed:.3g} GB, which one has not"
        return Reference(found.step_s, samples, why)
    try:
        return Reference(measurer.alone(single), samples, "measured on one device")
    except RunError as error:
        if found is None:
            return None
        last = str(error).strip().splitlines()[-1]
        return Reference(found.step_s, samples, f"predicted, for it didn't run ({last})")


def one_device(job: Job) -> Job:
    """The Job with one device's share of the work, laid out on one as the planner would."""
    cluster = job.cluster.replace(devices_per_node=1, num_nodes=1, tiers=())
    samples = max(1, job.train.global_batch // job.cluster.num_devices)
    comm = job.comm
    single = job.replace(
        cluster=cluster,
        train=job.train.replace(global_batch=samples),
        comm=Comm(timeout_s=comm.timeout_s, priority=comm.priority, embeddings=comm.embeddings),
    )
    axes = ("dp", "fsdp", "tp", "pp", "cp", "ep")
    same = ("precision", "param_dtype", "optimizer_state", "compile", "kernels")
    kept = {name: getattr(job.layout, name) for name in same}
    layout = LayoutSpec.parse({**dict.fromkeys(axes, 1), **kept, "bucket_mib": 25.0})
    asked = JobOnCluster.parse({**vars(single), "layout": layout})
    best = ranked(asked, SearchConstraints(layout), 1, bounded=False)
    if best or single.model.knows_layers:
        return checked(single.replace(layout=best[0].layout))
    # Samples as large at once as the Job's own, for what they take is not known.
    layout = layout.replace(micro_batch=math.gcd(samples, job.micro_batch))
    return resolve(asked.replace(layout=layout), cluster).job
