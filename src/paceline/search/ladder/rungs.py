"""Rungs: the networks of a ladder, alike but for their size, and how long each is trained.

A size is a number of heads: width, depth and feed-forward width grow with it in the proportions of
the Job's network, and heads stay as wide. Under muP, for widths and depths, the learning rate of
the smallest is right for all of them.

Every rung is trained to three lengths, each twice the one before; the smallest is besides trained
with several learning rates, to the middle one. The planner prices all of that before anything runs.
The largest rung is the largest that still sees enough tokens a parameter within the ladder's time.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import takewhile
from typing import TypeVar

from pydantic import Field

from paceline.config.errors import InputError
from paceline.config.family import ModelFamily
from paceline.config.frozen import FrozenConfig
from paceline.config.hardware import Cluster
from paceline.config.job import JobSpec
from paceline.config.model import Model
from paceline.plan.answer.outlook import samples_per_step
from paceline.render.figures import count_text, duration_text
from paceline.search.forecast import priced

_Job = TypeVar("_Job", bound=JobSpec)

LENGTHS = (1, 2, 4)
SWEPT = LENGTHS[1]
"""The length of the sweep. With a longer one all runs would be shorter within the same time, and
losses be extrapolated further."""
NUM_RATES = 3
"""Of the sweep, each twice the one before."""
MORE_RATES = 3
"""At most, where the best of the sweep is its first or its last."""
FINER = 2**-0.5, 2**0.5
"""Times the best one: two more, in the end."""
ENOUGH = 20.0
"""Tokens a parameter that are best for a budget (https://arxiv.org/abs/2203.15556)."""
_NUM_RUNGS, _LEAST_RUNGS = 4, 3
# The widest is so many times as wide as the narrowest, and no narrower than muP needs.
_SPAN, _NARROWEST = 6.0, 16
_LEAST_STEPS = 4
_FINER = 1.25
_MOST_HEADS = 4096
# Shortest trainings of the smallest rung that its sweep may take.
_SWEEP = (NUM_RATES + MORE_RATES + len(FINER)) * SWEPT


class Rung(FrozenConfig):
    """A size."""

    heads: int = Field(ge=1)
    params: int = Field(ge=1)
    """Those that multiply."""
    step_s: float = Field(gt=0)
    """Of a step, as the planner says."""
    cost_s: float = Field(gt=0)
    """Device-seconds of a step."""


class Rungs(FrozenConfig):
    """A ladder, as it was planned."""

    rungs: tuple[Rung, ...] = Field(strict=False, min_length=_LEAST_RUNGS, max_length=_NUM_RUNGS)
    """The smallest first."""
    steps: int = Field(ge=_LEAST_STEPS)
    """Of the shortest training."""
    tokens_per_step: int = Field(ge=1)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Steps that each rung is trained for, increasing."""
        return tuple(self.steps * each for each in LENGTHS)

    @property
    def cost_s(self) -> float:
        """Device-seconds of all runs, at most, as the planner says."""
        return self.steps * _per_step(self.rungs)


def _per_step(rungs: Sequence[Rung]) -> float:
    """Device-seconds of all runs of a ladder whose shortest training is one step long."""
    return sum(LENGTHS) * sum(one.cost_s for one in rungs) + _SWEEP * rungs[0].cost_s


def network_of(job: JobSpec) -> Model:
    """The Job's network, which can be made larger and smaller.

    Raises:
        InputError: it can't, or muP doesn't suit it.
    """
    model = job.model
    if not isinstance(model, Model) or model.experts is not None or not model.causal:
        raise InputError(
            "a ladder is of dense decoders that learn the next token, and [model] describes "
            "another network: give such a Job."
        )
    if model.tie_embeddings:
        raise InputError(
            "model.tie_embeddings = true, and learning rates transfer by muP, which needs a head "
            "of its own: add --set model.tie_embeddings=false."
        )
    return model


def sized(job: JobSpec, heads: int, base: int) -> JobSpec:
    """The Job with a network of so many heads, in its proportions.

    Args:
        job: see `network_of`.
        heads: one of `head_counts`.
        base: heads of the smallest rung, at which learning rates are found.

    Raises:
        InputError: there is no such Job.
    """
    model = network_of(job)
    shared = model.num_heads // model.num_kv_heads
    width = width_of(model, heads)
    larger = width / model.hidden_size
    # A norm of what a block adds sets its size, whatever the depth.
    scales_depth = model.residual != "post_norm" and not model.post_norms
    return job.replace(
        model=Model.parse(
            {
                **_stated(model),
                "num_heads": heads,
                "num_kv_heads": max(1, heads // shared),
                "head_dim": model.head_dim,
                "hidden_size": width,
                "ffn_size": max(8, round(model.ffn_size * larger / 8) * 8),
                "num_layers": _layers_of(model, heads),
                "full_layers": (),
                "parametrization": "mup",
                "base_width": width_of(model, base),
                "base_layers": _layers_of(model, base) if scales_depth else None,
                "base_head_dim": None,
            }
        )
    )


def _stated(model: ModelFamily) -> dict[str, object]:
    return {name: getattr(model, name) for name in model.model_fields_set}


def width_of(model: Model, heads: int) -> int:
    """hidden_size with so many heads."""
    return -(-model.hidden_size * heads // model.num_heads)


def _layers_of(model: Model, heads: int) -> int:
    return max(1, round(model.num_layers * width_of(model, heads) / model.hidden_size))


def head_counts(model: Model, least: int = 1, factor: float = 1.0) -> Iterator[int]:
    """Numbers of heads that its sharing of keys allows, increasing without end.

    Args:
        least: where they begin.
        factor: between one and the next, at least.
    """
    shared = model.num_heads // model.num_kv_heads
    heads = least
    while True:
        if heads < shared or heads % shared == 0:
            yield heads
            heads = max(heads + 1, int(heads * factor))
        else:
            heads += 1


def lengthened(job: _Job, steps: int) -> _Job:
    """The Job for so many steps; warm-up and decay keep their parts of them."""
    optim, before = job.optim, job.train.steps
    # Of a single step the decay is all: a schedule that falls has to fall somewhere.
    most = {"warmup_steps": steps // 2, "decay_steps": (steps + 1) // 2}
    parts = {
        name: min(limit, max(1, round(value * steps / before)))
        for name, limit in most.items()
        if (value := getattr(optim, name)) and before
    }
    return job.replace(
        train=job.train.replace(steps=steps, epochs=None, tokens=None),
        optim=optim.replace(**parts),
    )


def plan_rungs(
    job: JobSpec, cluster: Cluster, within_s: float, largest: float | None, enough: float
) -> Rungs:
    """The ladder that a time has room for.

    Args:
        job: whose network and batch count.
        cluster: this machine, its speed known.
        within_s: device-seconds of all runs together, at most.
        largest: parameters of the largest rung, at most; None: as the time allows.
        enough: tokens a parameter that its longest training has, at least, where rungs can be
            smaller.

    Raises:
        InputError: the time is too short for any.
    """
    model, per_step = network_of(job), samples_per_step(job)

    @cache
    def rung(heads: int) -> Rung:
        found = sized(job, heads, heads)
        concrete, best = priced(lengthened(found, job.train.steps), cluster)
        network = concrete.model
        assert isinstance(network, Model)
        cost_s = best.step_s * best.layout.num_ranks
        return Rung(
            heads=heads, params=network.num_matmul_params, step_s=best.step_s, cost_s=cost_s
        )

    chosen: tuple[tuple[Rung, ...], int] | None = None
    shortest_s = float("inf")
    for top in takewhile(lambda one: one <= _MOST_HEADS, head_counts(model, factor=_FINER)):
        heads = _spread(model, top)
        if len(heads) < _LEAST_RUNGS:
            continue
        rungs = tuple(map(rung, heads))
        if largest is not None and rungs[-1].params > largest:
            break
        steps = int(within_s / _per_step(rungs))
        shortest_s = min(shortest_s, _LEAST_STEPS * _per_step(rungs))
        if steps < _LEAST_STEPS:
            break
        tokens = LENGTHS[-1] * steps * per_step
        if chosen is not None and tokens < enough * rungs[-1].params:
            break
        chosen = rungs, steps
    if chosen is None:
        raise InputError(_too_small(within_s, shortest_s, largest))
    return Rungs(rungs=chosen[0], steps=chosen[1], tokens_per_step=per_step)


def _too_small(within_s: float, shortest_s: float, largest: float | None) -> str:
    if shortest_s == float("inf"):
        return (
            f"--largest {largest:g} has no room for {_LEAST_RUNGS} sizes of this network: allow "
            "more parameters, or a Job with narrower heads or fewer tokens in its vocabulary."
        )
    return (
        f"the ladder may take {duration_text(within_s)} of this machine's device time, and the "
        f"shortest takes {duration_text(shortest_s)}: raise --budget or --share, or give a Job "
        "with a smaller batch."
    )


def _spread(model: Model, top: int) -> list[int]:
    """Numbers of heads up to one, evenly apart by their ratios."""
    least = max(1.0, top / _SPAN, top * _NARROWEST / width_of(model, top))
    known = [*takewhile(lambda one: one <= top, head_counts(model))]
    wanted = [least * (top / least) ** (at / (_NUM_RUNGS - 1)) for at in range(_NUM_RUNGS)]
    return sorted({min(known, key=lambda one: abs(one - each)) for each in wanted})


def text_of(rungs: Rungs) -> str:
    """In a sentence."""
    sizes = ", ".join(count_text(one.params) for one in rungs.rungs)
    lengths = ", ".join(f"{each:,}" for each in rungs.lengths)
    return (
        f"{len(rungs.rungs)} sizes ({sizes} parameters) for {lengths} steps, and a sweep of the "
        f"learning rate: {duration_text(rungs.cost_s)} of device time at most, as planned"
    )
