"""Search: the cheapest way to serve a load that keeps an SLO, and why the others lose.

How it works: an engine is `tp` devices with a precision, a batch and tokens of a pass. Requests
come at random moments and go to the replicas of an engine at random, so each replica sees such
arrivals at its share of the rate, and one of them is simulated. Of each engine the fewest replicas
that keep the SLO are looked for by halving. One that needs more devices than the best so far, even
if they were always full, is not simulated.

What it is not: a balancer that knows queues does better than chance; nothing fails and nobody
rolls out; a load that changes over the day is planned at its peak.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.model import Model
from paceline.config.serving import KeyForm
from paceline.generate.work import WorkCounter
from paceline.plan.serving.catalogue import catalogue_costs, num_blocks, shares
from paceline.plan.serving.costs import StepCosts
from paceline.plan.serving.load import Range, requests_of
from paceline.plan.serving.measured import MeasuredServing, form_of
from paceline.plan.serving.options import ApiPrice
from paceline.plan.serving.simulate import Limits, Simulated, simulate
from paceline.plan.serving.slo import Slo
from paceline.render.figures import plural

_MAX_SEQUENCES, _MAX_TOKENS = (16, 64, 256), (512, 2048)
_BLOCK_SIZE = 32
_KEYS: tuple[KeyForm, ...] = ("as_weights", "int8")
_BY_CURVES = "by the device's curves; our engine was not measured on it"
_HOUR_S = 3600.0
_HALVINGS = 6


@dataclass(frozen=True)
class Asked:
    """What is to be served, and what is promised."""

    model: Model
    rate: float
    """Requests a second."""
    num_in: Range
    num_out: Range
    slo: Slo
    num_requests: int = 200
    """That are simulated."""
    seed: int = 0

    @property
    def mean_in(self) -> float:
        """Tokens of a prompt."""
        return sum(self.num_in) / 2

    @property
    def mean_out(self) -> float:
        """Tokens of a text."""
        return sum(self.num_out) / 2

    @property
    def blocks_of_longest(self) -> int:
        """Of the longest request, with its text."""
        return -(-(self.num_in[1] + self.num_out[1]) // _BLOCK_SIZE)


@dataclass(frozen=True)
class EnginePlan:
    """One engine, on devices of a cluster."""

    cluster: Cluster
    tp: int
    form: str
    """Of the weights, and of keys and values where they have another: "fp32-int8", "bf16-kv8"."""
    limits: Limits
    costs: StepCosts
    source: str
    """Of the costs."""

    @property
    def device(self) -> str:
        """With how many share the network, and the form of its weights."""
        return f"{self.cluster.device.name}, tp {self.tp}, {self.form}"

    @property
    def batch(self) -> str:
        """Texts at a time and tokens of a pass."""
        return f"{self.limits.max_sequences}/{self.limits.max_tokens}"

    @property
    def most_replicas(self) -> int:
        """That the cluster's devices make."""
        return self.cluster.num_devices // self.tp

    @property
    def usd_per_hour(self) -> float | None:
        """Of one replica; None: the price of a device is not known."""
        price = self.cluster.prices.usd_per_device_hour
        return None if price is None else price.value * self.tp


@dataclass(frozen=True)
class Fleet:
    """So many replicas of an engine, and what a share of the load met at one of them."""

    asked: Asked
    engine: EnginePlan
    replicas: int
    simulated: Simulated

    @property
    def num_devices(self) -> int:
        """Of all replicas."""
        return self.replicas * self.engine.tp

    @property
    def usd_per_hour(self) -> float | None:
        """Of all replicas."""
        one = self.engine.usd_per_hour
        return None if one is None else self.replicas * one

    @property
    def cost(self) -> float:
        """What is made small: USD an hour, or devices where nobody knows a price."""
        usd = self.usd_per_hour
        return self.num_devices if usd is None else usd

    @property
    def usd_per_million(self) -> tuple[float, float] | None:
        """USD per million tokens in and out; the hour's price is shared out as the engine's time
        is between prompts and texts."""
        usd, ran = self.usd_per_hour, self.simulated
        if usd is None:
            return None
        share = ran.prefill_s / ran.terms.total
        an_hour = self.asked.rate * _HOUR_S / 1e6
        return (
            usd * share / (an_hour * self.asked.mean_in),
            usd * (1 - share) / (an_hour * self.asked.mean_out),
        )


@dataclass(frozen=True)
class Lost:
    """Engines that are not the answer, for the same reason."""

    device: str
    """With how many share the network, and the form of its weights."""
    why: str
    batches: tuple[str, ...] = ()
    """Texts at a time and tokens of a pass; none: whatever they are."""


@dataclass(frozen=True)
class Rent:
    """Renting against an API that asks for each token."""

    api_usd_per_hour: float
    """For the rate that was asked."""
    pays_from: float | None
    """Requests a second from which renting costs less; None: never, for a full replica costs more
    than what it serves."""
    most_rate: float
    """That one replica serves within the SLO."""


@dataclass(frozen=True)
class ServingAnswer:
    """The fleets that keep the SLO, the cheapest first, and the engines that don't."""

    fleets: Sequence[Fleet]
    lost: Sequence[Lost]
    rent: Rent | None = None


def find_fleets(
    asked: Asked,
    clusters: Sequence[Cluster],
    measured: Sequence[MeasuredServing] = (),
    api: ApiPrice | None = None,
) -> ServingAnswer:
    """Look for the cheapest fleet.

    Args:
        clusters: to choose from; how many devices there are bounds the replicas.
        measured: of this network, in several forms; they count for clusters of the device that
            they were measured on.
        api: what somebody else asks.

    Raises:
        InputError: how fast a device is, is not known.
    """
    fleets: list[Fleet] = []
    lost: dict[tuple[str, str], list[str]] = {}
    engines = []
    for engine in (one for each in clusters for one in _engines(asked, each, measured)):
        if isinstance(engine, Lost):
            lost.setdefault((engine.device, engine.why), [])
        else:
            engines.append(engine)
    for engine in sorted(engines, key=lambda one: _least_cost(asked, one)):
        found = _fewest_replicas(asked, engine, min((f.cost for f in fleets), default=math.inf))
        if isinstance(found, str):
            lost.setdefault((engine.device, found), []).append(engine.batch)
        else:
            fleets.append(found)
    fleets.sort(key=lambda one: (one.cost, one.simulated.served.percentile("e2e", 0.5)))
    rent = None if api is None or not fleets else _rent(fleets[0], api)
    return ServingAnswer(fleets, [Lost(*key, tuple(each)) for key, each in lost.items()], rent)


def _engines(
    asked: Asked, cluster: Cluster, measured: Sequence[MeasuredServing]
) -> Iterator[EnginePlan | Lost]:
    if here := [one for one in measured if one.device == cluster.device.name]:
        yield from (engine for one in here for engine in _measured_engines(cluster, one))
        return
    device = cluster.device
    for precision in (name for name in ("fp32", "bf16") if name in device.precisions):
        for tp in shares(asked.model, cluster.devices_per_node):
            for max_tokens in _MAX_TOKENS:
                shape = (asked.model, cluster, tp, precision, _BLOCK_SIZE, max_tokens)
                costs = {keys: catalogue_costs(*shape, keys) for keys in _KEYS}
                for max_sequences in _MAX_SEQUENCES:
                    try:
                        rooms = {keys: num_blocks(*shape, max_sequences, keys) for keys in _KEYS}
                    except InputError as error:
                        yield Lost(f"{device.name}, tp {tp}, {precision}", str(error))
                        break
                    if rooms["as_weights"] >= max_sequences * asked.blocks_of_longest:
                        del rooms["int8"]  # which takes longer, and more room has no use
                    for keys, blocks in rooms.items():
                        limits = Limits(blocks, _BLOCK_SIZE, max_tokens, max_sequences)
                        form = form_of(precision, "as_trained", keys)
                        yield EnginePlan(cluster, tp, form, limits, costs[keys], _BY_CURVES)


def _measured_engines(cluster: Cluster, measured: MeasuredServing) -> Iterator[EnginePlan]:
    costs, had = measured.costs(), measured.limits
    for max_sequences in sorted(
        {*(n for n in (4, 16) if n < had.max_sequences), had.max_sequences}
    ):
        for max_tokens in sorted({*(n for n in (64, 256) if n < had.max_tokens), had.max_tokens}):
            limits = Limits(had.num_blocks, had.block_size, max_tokens, max_sequences)
            source = f"measured: {measured.source}"
            yield EnginePlan(cluster, 1, measured.form, limits, costs, source)


def _least_replicas(asked: Asked, engine: EnginePlan) -> int:
    """As many as there must be if they were always full."""
    # Costs that were fitted to noisy figures may say that a request takes no time.
    return max(1, math.ceil(asked.rate * engine.costs.least_s(asked.mean_in, asked.mean_out)))


def _least_cost(asked: Asked, engine: EnginePlan) -> float:
    usd = engine.usd_per_hour
    return _least_replicas(asked, engine) * (engine.tp if usd is None else usd)


def _fewest_replicas(asked: Asked, engine: EnginePlan, best: float) -> Fleet | str:
    """The fleet of fewest replicas that keeps the SLO and costs no more than the best; or why there
    is none."""
    room = engine.limits.num_blocks * engine.limits.block_size
    longest = asked.num_in[1] + asked.num_out[1]
    if longest > room:
        return f"memory has room for {room:,} tokens, and a request has {longest:,}"
    usd = engine.usd_per_hour
    one = engine.tp if usd is None else usd
    least = _least_replicas(asked, engine)
    most = int(min(engine.most_replicas, best / one + 1e-9))
    if least > engine.most_replicas:
        return f"always full it takes {plural(least, 'replica')}, of {engine.most_replicas}"
    if least > most:
        return f"costs more: {_cost_text(usd, least * one)} if always full"
    alone = _simulated(asked, engine, asked.rate, 1)
    if broken := asked.slo.broken(alone.served):
        return f"{_exceeded(asked, alone, broken)} for a request alone"
    ran = _simulated(asked, engine, asked.rate / most)
    if broken := asked.slo.broken(ran.served):
        why = f"{_exceeded(asked, ran, broken)} with {plural(most, 'replica')}"
        return why if most == engine.most_replicas else f"costs more: {why}"
    fewest, enough = least - 1, most
    while enough - fewest > 1:
        middle = (fewest + enough) // 2
        of_middle = _simulated(asked, engine, asked.rate / middle)
        if asked.slo.broken(of_middle.served):
            fewest = middle
        else:
            enough, ran = middle, of_middle
    return Fleet(asked, engine, enough, ran)


def _cost_text(usd: float | None, cost: float) -> str:
    return plural(int(cost), "device") if usd is None else f"{cost:.2f} USD/h"


def _exceeded(asked: Asked, ran: Simulated, broken: Sequence[str]) -> str:
    told = [f"{kind.upper()} is {_at(asked, ran, kind) * 1e3:,.0f} ms" for kind in broken]
    return " and ".join(told)


def _at(asked: Asked, ran: Simulated, kind: str) -> float:
    return ran.served.percentile(kind, asked.slo.share)


def _simulated(
    asked: Asked, engine: EnginePlan, rate: float, num_requests: int | None = None
) -> Simulated:
    """What one replica does at this rate."""
    number = asked.num_requests if num_requests is None else num_requests
    vocab = asked.model.vocab_size
    requests = requests_of(number, rate, asked.seed, asked.num_in, asked.num_out, vocab)
    count = WorkCounter(asked.model, engine.limits.block_size)
    return simulate(requests, engine.limits, count, engine.costs)


def _rent(best: Fleet, api: ApiPrice) -> Rent | None:
    """The best fleet's engine against an API."""
    asked, one = best.asked, best.engine.usd_per_hour
    if one is None:
        return None
    request_usd = (asked.mean_in * api.usd_in + asked.mean_out * api.usd_out) / 1e6
    served = asked.rate / best.replicas
    most = 1 / best.engine.costs.least_s(asked.mean_in, asked.mean_out)
    for _ in range(_HALVINGS):
        middle = (served + most) / 2
        if asked.slo.broken(_simulated(asked, best.engine, middle).served):
            most = middle
        else:
            served = middle
    pays = one / _HOUR_S / request_usd
    return Rent(asked.rate * request_usd * _HOUR_S, pays if pays <= served else None, served)
