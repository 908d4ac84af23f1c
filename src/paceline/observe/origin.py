"""Where a trace comes from, and whether several come from one job.

A folder may hold traces of two jobs, whose ranks fit together by their numbers alone. Their waits
for one another would be made up, so a contradiction between two of them refuses the folder.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.config.errors import InputError
from paceline.observe.caveats import TraceDevice

_Array = npt.NDArray[Any]

_EPOCH_NS = 10**18  # in 2001: clocks that show less count from a boot, and say nothing
# Steps of one number are recorded at one time on all ranks, but for the error of hosts' clocks.
_MOST_APART_NS = 120 * 10**9
_MOST_OF_DIFFERENT_STEPS_NS = 3600 * 10**9
_SAME_FOR_ALL = ("world_size", "backend", "nccl_version")
_SAME_BYTES = ("all_reduce", "broadcast")  # ranks of a group give buffers of one size
_MOST_DIFFERENT = 0.02  # of those bytes: traces lose an event now and then
# Ranks that meet in every step take equally long for it, but at both ends of a recording.
_MOST_UNLIKE, _ENOUGH_STEPS = 2.0, 3


@dataclass(frozen=True, eq=False)
class Origin:
    """What a trace says of the job that it is of."""

    path: Path
    rank: int
    where: Mapping[str, Any]
    """The header's distributedInfo."""
    device: TraceDevice | None
    steps: _Array
    """dtype `timeline.STEP`."""
    exchanged: Mapping[tuple[str, str], float]
    """Bytes of a step by collective and members, of those whose ranks give as many each."""


def exchanged(collectives: _Array, names: Sequence[str], num_steps: int) -> dict[Any, float]:
    """Return `Origin.exchanged` of a rank's table of collectives."""
    known = (collectives["bytes"] > 0) & (collectives["members"] >= 0)
    ids = [index for index, name in enumerate(names) if name in _SAME_BYTES]
    rows = collectives[known & np.isin(collectives["name"], ids)]
    pairs, place = np.unique(
        np.stack([rows["name"], rows["members"]], axis=1), axis=0, return_inverse=True
    )
    sums = np.bincount(place.ravel(), rows["bytes"], len(pairs)) / max(1, num_steps)
    return {
        (names[name], names[members]): float(total)
        for (name, members), total in zip(pairs.tolist(), sums, strict=True)
    }


def require_one_job(origins: Sequence[Origin]) -> None:
    """Refuse traces that can't be of one job.

    Raises:
        InputError: two have the same rank, or contradict each other.
    """
    for one, other in combinations(origins, 2):
        if one.rank == other.rank:
            raise InputError(
                f"{one.path} and {other.path} are both of rank {one.rank}; "
                "give one trace of each rank."
            )
    for one, other in combinations(origins, 2):
        why = next(_contradictions(one, other), None)
        if why is not None:
            raise InputError(
                f"{one.path} and {other.path} are of different jobs ({why}); "
                "give the traces of one job."
            )


def _contradictions(one: Origin, other: Origin) -> Iterator[str]:
    for key in _SAME_FOR_ALL:
        ours, theirs = one.where.get(key), other.where.get(key)
        if ours is not None and theirs is not None and ours != theirs:
            yield f"{key} {ours} and {theirs}"
    size = one.where.get("world_size")
    if isinstance(size, int) and max(one.rank, other.rank) >= size:
        yield f"rank {max(one.rank, other.rank)} in a job of {size}"
    ranks = {_default_ranks(one), _default_ranks(other)} - {None}
    if len(ranks) > 1:
        yield "their default process groups have other ranks"
    if one.device and other.device and one.device.is_amd != other.device.is_amd:
        yield "devices of AMD and of NVIDIA"
    if apart := _apart_s(one, other):
        yield f"recorded {apart:,.0f} s apart"
    if unlike := _unlike_steps_s(one, other):
        yield "their steps take {:.3g} and {:.3g} s".format(*unlike)
    for name, members in sorted(one.exchanged.keys() & other.exchanged.keys()):
        sizes = [each.exchanged[name, members] for each in (one, other)]
        if max(sizes) - min(sizes) > _MOST_DIFFERENT * max(sizes):
            told = " and ".join(f"{size:,.0f}" for size in sizes)
            yield f"{name} over ranks {members} has {told} bytes a step"


def _default_ranks(origin: Origin) -> str | None:
    """Return the ranks of the default process group, where both would have to say the same."""
    groups = origin.where.get("pg_config")
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and group.get("pg_desc") == "default_pg":
            return str(group.get("ranks"))
    return None


def _unlike_steps_s(one: Origin, other: Origin) -> tuple[float, float] | None:
    """Return the seconds of both ranks' steps where they are too unlike for ranks that meet."""
    if min(len(one.steps), len(other.steps)) < _ENOUGH_STEPS:
        return None
    ours, theirs = (
        float((each.steps["end_ns"] - each.steps["start_ns"]).mean()) / 1e9 for each in (one, other)
    )
    return (ours, theirs) if max(ours, theirs) > _MOST_UNLIKE * min(ours, theirs) else None


def _apart_s(one: Origin, other: Origin) -> float:
    """Return the seconds between two recordings that can't be of one job's, or 0."""
    starts = [int(each.steps["start_ns"].min()) for each in (one, other)]
    ends = [int(each.steps["end_ns"].max()) for each in (one, other)]
    share = len(np.intersect1d(one.steps["step"], other.steps["step"])) > 0
    limit = _MOST_APART_NS if share else _MOST_OF_DIFFERENT_STEPS_NS
    apart = max(starts) - min(ends)
    return apart / 1e9 if min(starts) > _EPOCH_NS and apart > limit else 0.0
