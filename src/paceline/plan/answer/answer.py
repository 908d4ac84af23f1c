"""Answer: all that the planner says about a Job, as data for the terminal, plan.json and the page.

`plan.answer.find` makes it.
"""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Literal

import numpy as np

from paceline.config.comm import Comm
from paceline.config.hardware import Cluster
from paceline.config.job import Job, JobOnCluster, to_raw
from paceline.config.stack import Stack
from paceline.plan.answer.outlook import Outlook
from paceline.plan.goodput import GoodputOutlook
from paceline.plan.prediction import Prediction
from paceline.plan.search import why
from paceline.plan.search.search import SearchCounts


@dataclass(frozen=True, eq=False)
class Answer:
    """The best layout of a Job and what decides."""

    job: JobOnCluster
    """As it was given."""
    unit: Literal["tokens", "images"]
    """What `tokens_per_s` of its predictions counts."""
    counts: SearchCounts
    limit_bytes: float | None
    """What a layout may use of a device's memory; None: unknown."""
    ranked: tuple[Prediction, ...]
    """Layouts that fit, the fastest first; none where nothing fits."""
    front: tuple[Prediction, ...]
    """Of those that were predicted: none is both faster and leaner; the fastest first."""
    margin: why.Margin | None = None
    binding: why.Binding | None = None
    sensitivities: tuple[why.Sensitivity, ...] = ()
    notes: tuple[str, ...] = ()
    """Further sentences about the fastest layout."""
    comm: Comm | None = None
    """What was chosen for the fastest layout where the Job left it open; None: nothing."""
    shortage: why.MemoryShortage | None = None
    """Where nothing fits: what comes nearest, and what would help."""
    outlook: Outlook | None = None
    goodput: GoodputOutlook | None = None
    """Where the cluster says how often its devices fail."""

    @property
    def best(self) -> Prediction | None:
        """The fastest layout that fits."""
        return self.ranked[0] if self.ranked else None

    @property
    def best_job(self) -> Job:
        """With the fastest layout, which must exist, and its exchange."""
        return self.job.with_layout(self.ranked[0].layout, self.comm or self.job.comm)


# ---- as plain data -------------------------------------------------------------------------------


def to_json(found: Answer, num: int = 20) -> dict[str, Any]:
    """The answer as plain data, with the `num` best layouts: what plan.json holds."""
    unit = found.unit
    return {
        "name": found.job.name,
        "model": to_raw(found.job.model),
        "cluster": to_raw(found.job.cluster),
        "runtime": runtime_json(found.job.cluster),
        "train": to_raw(found.job.train),
        "layout": to_raw(found.best.layout) if found.best else None,
        "counts": vars(found.counts),
        "memory_limit_bytes": found.limit_bytes,
        "layouts": [prediction_json(each, unit) for each in found.ranked[:num]],
        "pareto": [prediction_json(each, unit) for each in found.front],
        "margin": found.margin and _margin_json(found.margin),
        "binding": found.binding and vars(found.binding),
        "flips": [{**vars(flip), "best": to_raw(flip.best)} for flip in found.sensitivities],
        "notes": list(found.notes),
        "shortage": found.shortage
        and {**vars(found.shortage), "nearest": prediction_json(found.shortage.nearest, unit)},
        "outlook": found.outlook and vars(found.outlook),
        "assumptions": dict(found.best.assumptions) if found.best else {},
        "versions": versions(),
    } | ({} if found.goodput is None else {"goodput": asdict(found.goodput)})


def runtime_json(cluster: Cluster) -> dict[str, Any]:
    """Whose steps are predicted on a cluster."""
    stack = cluster.stack or Stack()
    return {"whose": stack.whose, "features": stack.features}


def _margin_json(margin: why.Margin) -> dict[str, Any]:
    return {**vars(margin), "runner_up": to_raw(margin.runner_up), "loses_s": dict(margin.loses_s)}


def prediction_json(one: Prediction, unit: str = "tokens") -> Mapping[str, Any]:
    """A prediction as plain data; `unit` is what it counts."""
    return {
        "layout": to_raw(one.layout),
        "step_s": one.step_s,
        "interval_s": list(one.interval_s),
        "time_s": dict(one.time_s),
        f"{unit}_per_s": one.tokens_per_s,
        "mfu": one.mfu,
        "peak_memory_bytes": one.peak_memory_bytes,
        "memory": [
            {
                "pipeline_rank": each.rank,
                "total_bytes": each.total_bytes,
                "terms_bytes": dict(each.terms),
                "checkpoint_spike_bytes": each.checkpoint_spike_bytes,
            }
            for each in one.memory
        ],
    }


def versions() -> dict[str, str]:
    """Of what the figures were made with."""
    return {
        "paceline": version("paceline"),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
