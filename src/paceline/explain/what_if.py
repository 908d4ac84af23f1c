"""What if: the seconds of a step with some settings changed.

The planner predicts the Job as it is and as it would be, term by term; the ratio of both, times
what was measured of the term, is the answer. What the planner knows nothing of (waits for data,
checkpoints) stays as it was measured. Where a rule can measure a loss directly, that counts
instead: it has no model's error in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import Job, read_cluster
from paceline.explain.changes import changed_job
from paceline.explain.subject import Subject
from paceline.explain.waterfall import measured_terms
from paceline.plan.memory import memory_bytes
from paceline.plan.memory.holdings import bounding_holdings
from paceline.plan.points import Points, Setting
from paceline.plan.prediction import Prediction
from paceline.plan.price.step import predict
from paceline.plan.search.search import memory_limit

_UNPLANNED = ("data_wait", "checkpoint_stall")
# A term smaller than this part of the predicted step says nothing by its ratio.
_LEAST_OF_STEP = 0.005


@dataclass(frozen=True)
class WhatIf:
    """A step with other settings."""

    changes: tuple[str, ...]
    step_s: float
    """Predicted, held against what was measured."""
    now_s: float
    """Measured."""
    time_s: Mapping[str, float]
    """Predicted seconds by term, before they are held against the measured step."""

    @property
    def gain_s(self) -> float:
        """Seconds by which the step would be shorter; negative where it would be longer."""
        return self.now_s - self.step_s


def what_if(subject: Subject, changes: Sequence[str]) -> WhatIf | None:
    """The step with settings changed; None where the changed Job can't run or isn't known."""
    now = expected(subject)
    other = None if subject.job is None else changed_job(subject.job, changes)
    if now is None or other is None:
        return None
    then = predicted(other.replace(cluster=_cluster(subject)))
    if then is None:
        return None
    # A pipeline's predicted terms are those of its busiest rank, the measured ones a mean.
    is_pipeline = subject.job is not None and subject.job.layout.pp > 1
    scale = _whole if subject.account is None or is_pipeline else _scaled
    seconds = scale(subject, now, then)
    return WhatIf(tuple(changes), seconds, subject.step_s, then.time_s)


def _whole(subject: Subject, now: Prediction, then: Prediction) -> float:
    """The step by the ratio of both predictions: without profiled steps that is all there is."""
    unplanned_s = sum(subject.mean_s(term) for term in _UNPLANNED)
    return unplanned_s + max(0.0, subject.step_s - unplanned_s) * then.step_s / now.step_s


def _scaled(subject: Subject, now: Prediction, then: Prediction) -> float:
    """The step term by term: each measured one by the ratio of its predictions.

    A term that the present Job is not predicted to have counts as predicted, at the pace of the
    measured step; what is measured of it and can't be explained by the Job stays.
    """
    before, after, measured = now.time_s, then.time_s, measured_terms(subject)
    pace = subject.step_s / now.step_s
    total = 0.0
    for term in {*before, *after, *measured}:
        seen, was, will = (terms.get(term, 0.0) for terms in (measured, before, after))
        if was > _LEAST_OF_STEP * now.step_s:
            total += seen * will / was
        else:
            total += seen + pace * (will - was)
    return total


@lru_cache(maxsize=8)
def expected(subject: Subject) -> Prediction | None:
    """What the planner says about the Run's own Job, with the constants fitted to it."""
    if subject.job is None:
        return None
    return predicted(subject.job.replace(cluster=_cluster(subject)))


def predicted_s(job: Job) -> float | None:
    """Seconds of a step of any Job, None where the planner doesn't know."""
    found = predicted(job)
    return None if found is None else found.step_s


def fits(job: Job) -> bool | None:
    """Whether the planner expects the Job to fit into memory; None where that isn't known."""
    needed, limit = peak_bytes(job), limit_bytes(job)
    return None if needed is None or limit is None else needed <= limit


def limit_bytes(job: Job) -> float | None:
    """What a layout may use of a device's memory."""
    return memory_limit(job.cluster.device) if job.model.knows_layers else None


def peak_bytes(job: Job) -> float | None:
    """Memory of the heaviest device, by the planner's closed form; None for models of one's own."""
    terms = memory_terms(job)
    return None if terms is None else sum(terms.values())


def memory_terms(job: Job) -> dict[str, float] | None:
    """Bytes of the heaviest device by term of the vocabulary; needs no rates of the device."""
    if not job.model.knows_layers:
        return None
    setting = Setting.of(job)
    points = Points.of([job.layout], setting)
    rows = [*memory_bytes(setting, points, bounding_holdings(setting, points)).items()]
    table = np.stack(np.broadcast_arrays(*(bytes_ for _, bytes_ in rows)))  # (terms, ranks, 1)
    heaviest = table.sum(axis=0)[:, 0].argmax()
    return {
        term: float(bytes_) for (term, _), bytes_ in zip(rows, table[:, heaviest, 0], strict=True)
    }


def _cluster(subject: Subject) -> Cluster:
    """The Run's own Cluster, with constants fitted to its steps where it keeps them."""
    assert subject.job is not None
    fitted = None if subject.folder is None else subject.folder / "cluster.toml"
    if fitted is None or not fitted.exists():
        return subject.job.cluster
    return read_cluster(fitted)


def predicted(job: Job) -> Prediction | None:
    """What the planner says about a Job; None where it doesn't know its model, or the
    speed of its devices or links."""
    if not job.model.knows_layers:
        return None
    try:
        return predict(Setting.of(job), job.layout)
    except InputError:
        return None
