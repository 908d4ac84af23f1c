"""Random layouts over all axes: what `check_layout` accepts of them has to run."""

from collections.abc import Iterator
from random import Random
from typing import Any

from paceline.config.errors import InputError
from tests.parallel.training import job_of

SCHEDULES = (
    "gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb", "zbv", "dualpipev", "dualpipe",
)  # fmt: skip
AXES = ("pp", "dp", "fsdp", "cp", "tp")
_SAVES_NOTHING = {"recompute": "none", "offload": "[]"}
DEEP = "model.num_layers=8"
"""For pipelines of more stages than the test networks have layers."""


def draw(stream: Random, num_ranks: int, kind: str) -> tuple[str, ...]:
    """Settings of a random layout, not always one that can run.

    Args:
        stream: the random numbers.
        num_ranks: the product of the axes.
        kind: which of the test networks it is for.
    """
    layout: dict[str, Any] = dict.fromkeys(AXES, 1)
    left = num_ranks
    while left > 1:
        part = next(size for size in range(2, left + 1) if left % size == 0)
        axis = stream.choice(AXES)
        layout[axis] *= part
        left //= part
    layout["micro_batch"] = stream.choice([2, 3, 4, 6])
    layout["recompute"] = stream.choice(["none", "none", "selective", "full"])
    if layout["recompute"] != "none" and stream.random() < 0.5:
        layout["recompute_layers"] = 1
    layout["offload"] = stream.choice(["[]", "[]", "['activations']", "['optimizer']"])
    if layout["fsdp"] != 1:
        layout["zero"] = stream.choice([1, 2, 3])
    if layout["tp"] != 1:
        layout["sequence_parallel"] = stream.choice(["true", "false"])
    if layout["cp"] != 1:
        layout["ulysses"] = stream.choice([1, 2, layout["cp"]])
    if layout["pp"] != 1:
        layout["schedule"] = stream.choice(SCHEDULES)
        if layout["schedule"] in ("interleaved", "interleaved_zb"):
            layout["stages_per_rank"] = stream.choice([2, 2, 4])
    if kind in ("experts", "gpt-oss"):
        layout["ep"] = stream.choice([1, 2, 2, 4])
    settings = tuple(f"layout.{key}={value}" for key, value in layout.items())
    return settings if layout["pp"] < 3 else (*settings, DEEP)


def accepted(
    seed: int, num_ranks: int, model: tuple[str, ...], kind: str
) -> Iterator[tuple[str, ...]]:
    """Random combinations for so many ranks that the check lets pass: two techniques or more."""
    stream = Random(f"{seed}/{num_ranks}/{kind}")
    for _ in range(1000):
        layout = draw(stream, num_ranks, kind)
        if len(techniques(layout)) < 2:
            continue
        try:
            job_of(num_ranks, (*model, *layout))
        except InputError:
            continue
        yield layout


def techniques(settings: tuple[str, ...]) -> set[str]:
    """The axes, and the ways to save memory, that these settings use."""
    given = dict(each.removeprefix("layout.").split("=") for each in settings)
    axes = {axis for axis in (*AXES, "ep") if given.get(axis, "1") != "1"}
    saving = {key for key, none in _SAVES_NOTHING.items() if given.get(key, none) != none}
    return axes | saving
