"""Goal: when tune has reached what was wanted, and how far it is: efficiency, MFU or throughput.

Scaling efficiency is the throughput of n devices over n times that of one, with the same work on
each (weak scaling): where the work of each device stays the same, that is the step on one device
over the step on all.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

from paceline.config.errors import InputError, RunError
from paceline.config.frozen import nearest
from paceline.config.job import Job
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.plan.points import Setting
from paceline.plan.search.search import memory_limit, search
from paceline.plan.search.space import SearchConstraints
from paceline.tune.candidates import checked, predicted
from paceline.tune.measurer import Measurer
from paceline.tune.trial import Reference, Trial, TuningState

Kind = Literal["efficiency", "mfu", "tokens_per_s"]
KINDS: tuple[Kind, ...] = ("efficiency", "mfu", "tokens_per_s")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|seconds?|min|minutes?|h|hours?)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Goal:
    """What is enough."""

    kind: Kind
    value: float

    @classmethod
    def read(cls, text: str) -> "Goal":
        """From "efficiency=0.85", "mfu=0.5" or "tokens_per_s=2e5".

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
        most = math.inf if kind == "tokens_per_s" else 1.0
        if not 0 < number <= most:
            given = "a number above 0" if most > 1 else "a share above 0 and up to 1"
            raise InputError(f"--until {text}: give {kind} {given}, such as efficiency=0.85.")
        return cls(kind, number)

    def check(self, job: Job) -> None:
        """Refuse a goal that can't be measured here.

        Raises:
            InputError: MFU of a device whose peak is unknown.
        """
        if self.kind == "mfu" and _peak(job) is None:
            raise InputError(
                f"--until mfu={self.value:g}: the peak of {job.cluster.known_device.name} in "
                f"{job.layout.precision} is not known; use efficiency or tokens_per_s."
            )

    @property
    def text(self) -> str:
        """As it was given."""
        return f"{self.kind}={self.value:g}"


@dataclass(frozen=True)
class Figures:
    """What a step's seconds mean."""

    tokens_per_s: float
    mfu: float | None
    efficiency: float | None
    """None: there is no reference."""

    @classmethod
    def of(cls, known: TuningState, trial: Trial) -> "Figures":
        """Of a trial that ran, in seconds as of the first one's trial round."""
        return cls.at(known.given, known.seconds(trial), known.reference)

    @classmethod
    def at(cls, job: Job, step_s: float, reference: Reference | None) -> "Figures":
        """Of a step of so many seconds."""
        train = job.train
        rate = train.global_batch * train.seq_len / step_s
        peak = _peak(job)
        assert isinstance(job.model, Model)
        flops = rate * job.model.train_flops_per_token(train.seq_len)
        mfu = None if peak is None else flops / (peak * job.cluster.num_devices)
        efficiency = None
        if reference is not None:
            each = train.global_batch / job.cluster.num_devices
            efficiency = (each / step_s) / (reference.samples / reference.step_s)
        return cls(rate, mfu, efficiency)

    def reaches(self, goal: Goal) -> bool:
        """Whether it is enough."""
        return (getattr(self, goal.kind) or 0.0) >= goal.value


def _peak(job: Job) -> float | None:
    peak = job.cluster.known_device.peak(job.layout.precision)
    return None if peak is None else peak.value


def reference_of(job: Job, measurer: Measurer) -> Reference:
    """The work of one device, measured on one where it fits, else predicted.

    Args:
        job: concrete.
        measurer: of the ranks.
    """
    single = one_device(job)
    found = predicted(single, "one device")
    limit = memory_limit(single.cluster.known_device)
    samples = single.train.global_batch
    if limit is not None and found.peak_bytes > limit:
        why = f"predicted: it would take {found.peak_bytes / 1e9:.3g} GB, which one has not"
        return Reference(found.predicted_s, samples, why)
    try:
        return Reference(measurer.alone(single), samples, "measured on one device")
    except RunError as error:
        last = str(error).strip().splitlines()[-1]
        return Reference(found.predicted_s, samples, f"predicted, for it didn't run ({last})")


def one_device(job: Job) -> Job:
    """The Job with one device's share of the work, laid out on one as the planner would."""
    cluster = job.cluster.replace(devices_per_node=1, num_nodes=1, tiers=())
    samples = max(1, job.train.global_batch // job.cluster.num_devices)
    single = job.replace(
        cluster=cluster,
        train=job.train.replace(global_batch=samples),
        comm=type(job.comm)(timeout_s=job.comm.timeout_s, priority=job.comm.priority),
    )
    axes = ("dp", "fsdp", "tp", "pp", "cp", "ep")
    same = ("precision", "param_dtype", "optimizer_state", "compile", "kernels")
    kept = {name: getattr(job.layout, name) for name in same}
    layout = Layout.parse({**dict.fromkeys(axes, 1), **kept, "bucket_mib": 25.0})
    constraints = SearchConstraints(layout)
    found = search(Setting.of(single), constraints, 1, bounded=False)
    return checked(single.replace(layout=found.ranked[0].layout))


def seconds_of(text: str) -> float:
    """Seconds of "15 min", "90 s" or "1.5 h".

    Raises:
        InputError: it can't be understood.
    """
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise InputError(f'--budget {text!r} is no time: write "15 min", "90 s" or "2 h".')
    return float(found[1]) * _SECONDS[found[2][0]]
