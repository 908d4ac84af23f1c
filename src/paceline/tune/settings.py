"""Settings: what tune may change of a Job, and how far apart two Jobs are.

A Job is told from another one by its changes: texts of dotted settings to values. Model,
data, optimizer, batch and everything else that decides what is learnt are never among them.

Free are the settings whose values train the same (in other orders of adding up), and the form in
which replicas exchange gradients, among those forms that "auto" chooses from. They were measured to
keep the loss (docs/techniques/compression.md). What changes numerics more is free where a person
says so.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from paceline.config.comm import Comm
from paceline.config.errors import InputError
from paceline.config.frozen import nearest
from paceline.config.job import Job, JobOnCluster, change_job, to_raw
from paceline.config.layout import Layout, LayoutSpec
from paceline.plan.search.space import FREE, SearchConstraints

Changes = Mapping[str, Any]
"""Dotted settings and their values as TOML has them: {"layout.tp": 2}."""

# What belongs together, as a person thinks of it, and how far apart it takes two Jobs: in lengths
# over which errors of predictions are alike. Assumed.
_GROUPS: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "mesh": (1.5, tuple(f"layout.{axis}" for axis in ("dp", "fsdp", "tp", "pp", "cp", "ep"))),
    "sharing": (0.7, ("layout.zero", "layout.sequence_parallel", "layout.ulysses")),
    "pipeline": (0.7, ("layout.schedule", "layout.stages_per_rank", "layout.split")),
    "micro-batch": (0.4, ("layout.micro_batch",)),
    "recomputing": (0.7, ("layout.recompute", "layout.recompute_layers")),
    "offload": (1.0, ("layout.offload",)),
    "buckets": (0.3, ("layout.bucket_mib",)),
    "exchange": (0.8, ("comm.dp.compress", "comm.warmup_steps")),
    "algorithms": (0.5, ("comm.dp.algorithm", "comm.fsdp.algorithm")),
    "arithmetic": (1.5, ("layout.precision", "layout.param_dtype", "layout.optimizer_state")),
    "kernels": (1.0, ("layout.compile", "layout.async_tp", "layout.kernels")),
}
# Sizes: each doubling is as far as the next.
_SIZES = ("layout.micro_batch", "layout.bucket_mib")
ALL = tuple(name for _, names in _GROUPS.values() for name in names)
"""Every setting that tune may ever change."""
ASKED = ("layout.precision", "layout.param_dtype", "layout.optimizer_state")
"""Those that change what is computed: free only where a person says so."""
# The first steps are exact where a form of few bits is chosen, and for nothing else.
_FOLLOWS = {"comm.warmup_steps": "comm.dp.compress"}
# Settings without "auto" that the search tries besides these values where they are freed.
_NO_WISH = {
    "layout.recompute_layers": "all",
    "layout.offload": (),
    "layout.async_tp": False,
    "layout.param_dtype": "fp32",
    "layout.optimizer_state": "full",
}


@dataclass(frozen=True)
class Freedom:
    """Which settings tune may change."""

    names: frozenset[str]

    @classmethod
    def of(cls, free: Iterable[str] = (), keep: Iterable[str] = ()) -> "Freedom":
        """What is free by default, with what a person frees or keeps: "layout.tp", or "tp".

        Raises:
            InputError: no such setting is tuned, or it is both.
        """
        freed, kept = {_full(name, "--free") for name in free}, {_full(n, "--keep") for n in keep}
        for name in sorted(freed & kept):
            raise InputError(f"--free {name} and --keep {name} were given: leave one of them out.")
        free_by_default = set(ALL) - set(ASKED) - kept
        held = {name for name, other in _FOLLOWS.items() if other in kept}
        return cls(frozenset((free_by_default | freed) - held))

    def freed(self, job: JobOnCluster) -> JobOnCluster:
        """The same Job with "auto", or no wish, wherever tune may choose."""
        constraints = {name: _NO_WISH.get(name, "auto") for name in self.names - _FOLLOWS.keys()}
        layout = {name[7:]: constraints[name] for name in constraints if name.startswith("layout.")}
        comm = job.comm
        for axis in ("dp", "fsdp"):
            section = getattr(comm, axis)
            names = {
                name.rpartition(".")[2]: "auto" for name in constraints if f"comm.{axis}" in name
            }
            comm = comm.replace(**{axis: section.replace(**names)})
        spec = LayoutSpec.parse({**vars(job.layout), **layout})
        return JobOnCluster.parse({**vars(job), "layout": spec, "comm": comm})

    def constraints(self, layout: LayoutSpec) -> SearchConstraints:
        """What the search may try besides "auto"."""
        return SearchConstraints(
            layout, tuple(name for name in FREE if f"layout.{name}" in self.names)
        )

    def allows(self, changes: Iterable[str]) -> bool:
        """Whether all these settings are free."""
        return self.names.issuperset(changes)


def _full(name: str, option: str) -> str:
    known = [each for each in ALL if each not in _FOLLOWS]
    found = [each for each in known if name in (each, each.removeprefix("layout."))]
    if not found:
        raise InputError(f"{option} {name} is no setting that tune changes{nearest(name, known)}")
    return found[0]


def with_changes(job: Job, changes: Changes) -> Job:
    """The Job with some settings changed.

    Raises:
        InputError: a value that can't be used.
    """
    return change_job(job, [f"{name}={_toml(value)}" for name, value in changes.items()])


def values(job: Job) -> dict[str, Any]:
    """Every setting that tune may ever change, as TOML has it."""
    return dict(_values(job.layout, job.comm))


@lru_cache(maxsize=1024)
def _values(layout: Layout, comm: Comm) -> Mapping[str, Any]:
    raw = {"layout": to_raw(layout), "comm": to_raw(comm)}
    return {name: _at(raw, name) for name in ALL}


def _at(raw: Mapping[str, Any], name: str) -> Any:
    for part in name.split("."):
        raw = raw[part]
    return raw


def differences(job: Job, other: Job) -> dict[str, Any]:
    """What to change of `job` to make it the other one."""
    before, after = values(job), values(other)
    return {name: value for name, value in after.items() if before[name] != value}


def grouped(changes: Changes) -> dict[str, dict[str, Any]]:
    """Changes by what belongs together."""
    found = {
        group: {name: changes[name] for name in names if name in changes}
        for group, (_, names) in _GROUPS.items()
    }
    return {group: part for group, part in found.items() if part}


def distance(job: Job, other: Job) -> float:
    """How far apart two Jobs are, in lengths over which errors of predictions are alike."""
    before, after = _values(job.layout, job.comm), _values(other.layout, other.comm)
    return sum(
        weight * max(_apart(name, before[name], after[name]) for name in names)
        for weight, names in _GROUPS.values()
    )


def _apart(name: str, one: Any, other: Any) -> float:
    if one == other:
        return 0.0
    return abs(math.log2(one / other)) if name in _SIZES else 1.0


def change_texts(changes: Changes) -> list[str]:
    """Changes as texts for --set, without those that follow from the others."""
    told = [name for name in changes if not (name == "layout.split" and "layout.pp" in changes)]
    return [f"{name}={_toml(changes[name])}" for name in told]


def _toml(value: Any) -> str:
    """A value as TOML says it, which for these is as JSON does; texts without quotes."""
    return value if isinstance(value, str) else json.dumps(value)
