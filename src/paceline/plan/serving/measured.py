"""Measured: what `paceline bench serve` found of one network on one machine, and costs from it.

How it works: passes of known work were timed, in rounds over all of them, so that what disturbs the
machine for a while is seen by all alike; each counts by its median. The costs are fitted to them by
least squares of relative errors, none below zero. Products take so much a parameter, by rows: one
curve for all matrices, straight between powers of two.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, model_validator

from paceline.config.errors import InputError
from paceline.config.files import read_json
from paceline.config.frozen import Count, CountOrNone, FrozenConfig, Ways
from paceline.config.layers import require
from paceline.config.model import Model
from paceline.generate.work import Work
from paceline.plan.serving.costs import Curve, StepCosts
from paceline.plan.serving.simulate import MOST_BLOCKS, Limits

Seconds = Annotated[tuple[Annotated[float, Field(gt=0, le=1e6)], ...], Field(strict=False)]
Array = npt.NDArray[np.float64]
_NUM_ROUNDS = 5
_FOLDER = "serving"
_PRECISION = {"float32": "fp32", "bfloat16": "bf16"}


class MeasuredPass(FrozenConfig):
    """A forward pass, and what it took in each round."""

    choices: CountOrNone
    single: CountOrNone
    blocks: Annotated[float, Field(ge=0, le=1e12)]
    parts: CountOrNone
    in_parts: CountOrNone
    keys: CountOrNone
    pairs: CountOrNone
    seconds: Seconds = ()

    @property
    def work(self) -> Work:
        """What it computes."""
        return Work(**self.model_dump(exclude={"seconds"}))

    @model_validator(mode="after")
    def _computes(self) -> Self:
        require(self.work.rows > 0, "a pass has no tokens; measure anew.")
        return self


class MeasuredHost(FrozenConfig):
    """The host's part of steps that choose so many tokens."""

    choices: Count
    seconds: Seconds = ()


class MeasuredServing(FrozenConfig):
    """One network on one machine."""

    model: Model
    form: str
    """Of weights, keys and values, see `form_of`."""
    device: str
    """Its name, as a Cluster has it."""
    source: str
    """Where, when and by which command."""
    block_size: Ways
    num_blocks: Annotated[int, Field(gt=0, le=MOST_BLOCKS)]
    max_tokens: Count
    max_sequences: Count
    start_s: Annotated[float, Field(ge=0, le=1e6)]
    """From the start of a process until it can take requests."""
    resident_bytes: CountOrNone
    """Of the process, when it had done passes of all kinds."""
    passes: Annotated[tuple[MeasuredPass, ...], Field(strict=False, min_length=1)]
    hosts: Annotated[tuple[MeasuredHost, ...], Field(strict=False, min_length=1)]

    @property
    def setup(self) -> "MeasuredServing":
        """What was measured, without when and how long it took."""
        passes = tuple(each.replace(seconds=()) for each in self.passes)
        hosts = tuple(each.replace(seconds=()) for each in self.hosts)
        return self.replace(passes=passes, hosts=hosts, source="", start_s=0.0, resident_bytes=0)

    @property
    def num_rounds(self) -> int:
        """That are complete."""
        times = [one.seconds for one in self.passes] + [one.seconds for one in self.hosts]
        return min(map(len, times))

    @property
    def is_whole(self) -> bool:
        """Whether all rounds are there."""
        return self.num_rounds >= _NUM_ROUNDS

    @property
    def num_rounds_left(self) -> int:
        """Rounds to go."""
        return max(0, _NUM_ROUNDS - self.num_rounds)

    @property
    def limits(self) -> Limits:
        """What the engine had."""
        return Limits(self.num_blocks, self.block_size, self.max_tokens, self.max_sequences)

    def costs(self) -> StepCosts:
        """The costs that explain best what was measured."""
        works = [each.work for each in self.passes]
        seconds = np.array([median(each.seconds) for each in self.passes])
        head = self.model.num_embedding_params
        body = self.model.num_matmul_params - head
        knots = _knots(max(work.rows for work in works))
        per_parameter = np.array(
            [body * _hats(w.rows, knots) + head * _hats(w.choices, knots) for w in works]
        )
        others = np.array([(w.blocks, w.parts, w.keys, w.pairs) for w in works], float)
        found = _not_negative(np.hstack((per_parameter, others)) / seconds[:, None])
        rates = found[: len(knots)]
        block_s, part_s, key_s, pair_s = found[len(knots) :].tolist()
        host_s, text_s = self._host()
        return StepCosts(
            Curve(knots, (body * rates).tolist()),
            Curve(knots, (head * rates).tolist()),
            block_s,
            part_s,
            key_s,
            pair_s,
            host_s,
            text_s,
        )

    def errors(self) -> list[float]:
        """Of each pass, by how much the costs miss what was measured, as a share of it."""
        costs = replace(self.costs(), host_s=0.0, text_s=0.0)
        return [costs.terms(one.work).total / median(one.seconds) - 1 for one in self.passes]

    def _host(self) -> tuple[float, float]:
        """Seconds of the host in a step, and for each token that it chooses."""
        seconds = np.array([median(each.seconds) for each in self.hosts])
        columns = np.array([(1.0, each.choices) for each in self.hosts])
        host_s, text_s = _not_negative(columns / seconds[:, None]).tolist()
        return host_s, text_s


def form_of(dtype: str, weights: str, keys: str) -> str:
    """What a network is served as: "fp32", "bf16-int8", "bf16-int8-kv8".

    Args:
        dtype: of torch, by its name.
        weights: as serve.weights says, "auto" decided; `keys` as serve.kv.
    """
    name = dtype.removeprefix("torch.")
    form = _PRECISION.get(name, name)
    form += "" if weights == "as_trained" else f"-{weights}"
    return form if keys == "as_weights" else f"{form}-kv8"


def measured_file(folder: Path, form: str) -> Path:
    """Where passes of a form of a folder's weights are kept."""
    return folder / _FOLDER / f"{form}.json"


def read_all_measured(folder: Path) -> list[MeasuredServing]:
    """What was measured of a folder's weights, of each form.

    Raises:
        InputError: as `read_measured`.
    """
    return [read_measured(file) for file in sorted((folder / _FOLDER).glob("*.json"))]


def read_measured(file: Path) -> MeasuredServing:
    """What `paceline bench serve` wrote.

    Raises:
        InputError: there is no such file, or it is damaged or not complete.
    """
    folder = file.parent.parent
    cure = f"remove it and measure anew with `paceline bench serve {folder}`"
    found = read_json(file, TypeAdapter(MeasuredServing), cure)
    if not found.is_whole:
        raise InputError(
            f"{file} is not complete ({found.num_rounds} of {_NUM_ROUNDS} rounds): "
            f"go on with `paceline bench serve {folder}`."
        )
    return found


def _knots(most: int) -> list[int]:
    """1, 2, 4 and so on, and the largest."""
    return [*(2**n for n in range(most.bit_length()) if 2**n < most), most]


def _hats(size: int, knots: Sequence[int]) -> Array:
    """What a curve's values at its knots count for its value at a size."""
    return np.array([np.interp(size, (0, *knots), row) for row in np.eye(len(knots) + 1)[1:]])


def _not_negative(columns: Array) -> Array:
    """The factors, none below zero, with which columns add up to about 1 in each row.

    Negative ones are left out until there are none.
    """
    kept = np.arange(columns.shape[1])
    while True:
        found = np.linalg.lstsq(columns[:, kept], np.ones(len(columns)), rcond=None)[0]
        if (found >= 0).all():
            break
        kept = kept[found >= 0]
    whole = np.zeros(columns.shape[1])
    whole[kept] = found
    return whole
