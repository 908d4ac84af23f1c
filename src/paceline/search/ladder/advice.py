"""Advice: the run that a budget buys on a cluster, and what it is expected to come to.

For each size the planner finds the layout and the seconds of a step; the budget then says how many
tokens it sees, the law what its loss is, and the least loss wins.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.config.errors import InputError
from paceline.config.frozen import MOST, FrozenConfig
from paceline.config.hardware import Cluster
from paceline.config.job import Job, JobSpec
from paceline.config.model import Model
from paceline.plan.answer.outlook import Outlook, outlook, samples_per_step
from paceline.plan.scale import checkpoint_bytes
from paceline.render.figures import count_text, duration_text, plural
from paceline.search.forecast import priced
from paceline.search.ladder.law import Fit, Law, rate_interval
from paceline.search.ladder.rungs import ENOUGH, Rungs, head_counts, lengthened, network_of, sized
from paceline.search.ladder.runs import Climbed, Slowness

_DAY_S = 86400.0
_FINER = 1.25
# Sizes in a row that are no better than the best: then none is.
_WORSE = 3


@dataclass(frozen=True)
class Budget:
    """What the run may take: the whole budget less the ladder's share."""

    usd: float | None
    days: float | None

    def less(self, share: float) -> "Budget":
        """What is left of it."""
        return Budget(
            None if self.usd is None else self.usd * (1 - share),
            None if self.days is None else self.days * (1 - share),
        )

    def seconds(self, cluster: Cluster, devices: int) -> float:
        """That it has room for on so many devices of a cluster.

        Raises:
            InputError: nothing bounds them.
        """
        price = cluster.prices.usd_per_device_hour
        if self.usd is not None and price is None:
            raise InputError(
                f"what an hour of {cluster.device.name} costs isn't known, so dollars buy nothing: "
                "give --price, or a --budget of time alone."
            )
        bounds = [] if self.days is None else [self.days * _DAY_S]
        if self.usd is not None and price is not None and price.value > 0:
            bounds.append(self.usd / price.value * 3600 / devices)
        if not bounds:
            raise InputError("a device costs nothing, so the budget has no end: add days to it.")
        return min(bounds)


class Advice(FrozenConfig):
    """The run, and what is predicted of it; kept, and held against the run when it is made."""

    heads: int
    params: int
    """All of them."""
    multiplied: int
    """Those that multiply, which the law counts."""
    tokens: float
    steps: int
    loss: float
    loss_low: float
    loss_high: float
    """90 % of such runs end between these."""
    lr: float
    lr_low: float
    lr_high: float
    planned_step_s: float
    """As the planner has it."""
    step_s: float
    """The same, as measured steps say, where the run is for this machine."""
    train_s: float
    """All steps, without failures."""
    train_low_s: float
    train_high_s: float
    usd: float | None
    """Failures and restarts included."""
    devices: int
    layout: str
    largest: int
    """Parameters that multiply of the ladder's largest rung."""

    @property
    def reach(self) -> float:
        """How many times as large it is as the largest rung."""
        return self.multiplied / self.largest

    @property
    def slowness(self) -> Slowness:
        """Of its steps."""
        planned_s = self.planned_step_s * self.steps
        return self.train_low_s / planned_s, self.train_high_s / planned_s


@dataclass(frozen=True)
class Option:
    """A size on some of the devices."""

    job: Job
    heads: int
    multiplied: int
    tokens: float
    loss: float
    planned_step_s: float
    step_s: float
    """The same, as measured steps say."""
    interval_s: tuple[float, float]
    run: Outlook


def options(
    job: JobSpec,
    rungs: Rungs,
    cluster: Cluster,
    budget: Budget,
    law: Law,
    slowness: Mapping[int, Slowness],
    params: float | None,
) -> Iterator[Option]:
    """Runs that the budget buys, each number of nodes and size in turn.

    Args:
        budget: of the run alone.
        slowness: by the heads of a network; a size that lacks takes that of the one next to it.
        params: the size, in parameters; None: any, up to where the loss grows again.

    Raises:
        InputError: there is none; it says why the last one that was tried can't be.
    """
    said: InputError | None = None
    found, base = 0, rungs.rungs[0].heads
    for nodes in _node_counts(cluster.num_nodes):
        part = cluster.replace(num_nodes=nodes)
        least, since = float("inf"), 0
        for heads in _sizes(job, rungs, params):
            try:
                near = min(slowness, key=lambda one: abs(math.log(one / heads)))
                one = _option(job, heads, part, budget, law, slowness[near], base)
            except InputError as error:
                said = error
                break
            yield one
            found += 1
            since = 0 if one.loss < least else since + 1
            least = min(least, one.loss)
            if since == _WORSE:
                break
    if not found:
        assert said is not None
        raise said


def _node_counts(most: int) -> list[int]:
    counts = [1 << at for at in range(most.bit_length()) if 1 << at < most]
    return [*counts, most]


def _sizes(job: JobSpec, rungs: Rungs, params: float | None) -> Iterator[int]:
    model = network_of(job)
    if params is None:
        yield from head_counts(model, rungs.rungs[0].heads, _FINER)
        return
    yield size_near(job, params)


def size_near(job: JobSpec, params: float) -> int:
    """Heads of the network whose number of parameters is next to one."""
    before: tuple[float, int] = (float("inf"), 1)
    for heads in head_counts(network_of(job)):
        network = sized(job, heads, heads).model
        assert isinstance(network, Model)
        off = abs(network.num_params / params - 1)
        if off > before[0]:
            return before[1]
        before = off, heads
    raise AssertionError("sizes have no end")


def run_ratio(job: JobSpec, cluster: Cluster, budget: Budget, params: float | None) -> float:
    """Tokens a parameter that the ladder should reach: as many as the run has, if its size is
    given, and no more than are best."""
    if params is None:
        return ENOUGH
    flat = Law(0.0, 1.0, 0.0, 1.0, 0.0)
    heads = size_near(job, params)
    one = _option(job, heads, cluster, budget, flat, (1.0, 1.0), heads)
    return min(ENOUGH, one.tokens / one.multiplied)


def _option(
    job: JobSpec,
    heads: int,
    cluster: Cluster,
    budget: Budget,
    law: Law,
    slowness: Slowness,
    base: int,
) -> Option:
    asked = sized(job, heads, base)
    concrete, best = priced(asked, cluster, is_here=False)
    network = concrete.model
    assert isinstance(network, Model)
    low, high = slowness
    middle = (low * high) ** 0.5
    timed = replace(best, step_s=best.step_s * middle)
    saved = float(checkpoint_bytes(network.num_params))
    one_step = outlook(lengthened(concrete, 1), timed, saved)
    goodput = one_step.goodput or 1.0
    seconds = budget.seconds(cluster, timed.layout.num_ranks)
    steps = min(int(seconds * goodput / timed.step_s), int(MOST))
    if steps < 1:
        raise InputError(
            f"a step of {network.num_params:,} parameters takes {duration_text(timed.step_s)}, "
            "more than the budget has: raise --budget."
        )
    run_job = lengthened(concrete, steps)
    tokens = float(steps) * samples_per_step(run_job)
    return Option(
        job=run_job,
        heads=heads,
        multiplied=network.num_matmul_params,
        tokens=tokens,
        loss=float(law.loss(network.num_matmul_params, tokens)),
        planned_step_s=best.step_s,
        step_s=timed.step_s,
        interval_s=(timed.step_s * low / middle, timed.step_s * high / middle),
        run=outlook(run_job, timed, saved),
    )


def advise(best: Option, climbed: Climbed, fit: Fit, name: str) -> tuple[Advice, Job]:
    """What is predicted of the chosen run, and its Job."""
    rate = climbed.rates.rate(best.tokens)
    job = best.job.replace(name=name, optim=best.job.optim.replace(lr=float(f"{rate:.4g}")))
    network = job.model
    assert isinstance(network, Model)
    low, high = fit.interval(best.multiplied, best.tokens)
    rate_low, rate_high = rate_interval(climbed.sweep, best.tokens, fit.noise)
    steps = job.train.steps
    return Advice(
        heads=best.heads,
        params=network.num_params,
        multiplied=best.multiplied,
        tokens=best.tokens,
        steps=steps,
        loss=best.loss,
        loss_low=low,
        loss_high=high,
        lr=job.optim.lr,
        lr_low=rate_low,
        lr_high=rate_high,
        planned_step_s=best.planned_step_s,
        step_s=best.step_s,
        train_s=best.run.train_s,
        train_low_s=best.interval_s[0] * steps,
        train_high_s=best.interval_s[1] * steps,
        usd=best.run.usd,
        devices=job.layout.num_ranks,
        layout=job.layout.summary,
        largest=climbed.runs[-1].rung.params,
    ), job


def chosen(found: Sequence[Option]) -> Option:
    """The least loss; of those that are as good to a thousandth the fewest devices."""
    least = min(one.loss for one in found)
    near = [one for one in found if one.loss <= least * 1.001]
    return min(near, key=lambda one: (one.job.layout.num_ranks, one.loss))


def network_text(advice: Advice, job: JobSpec) -> str:
    """Its size in words."""
    model = network_of(job)
    return (
        f"{plural(model.num_layers, 'block')}, width {model.hidden_size}, "
        f"{plural(model.num_heads, 'head')} "
        f"({model.num_kv_heads} of keys), {count_text(advice.params)} parameters"
    )
