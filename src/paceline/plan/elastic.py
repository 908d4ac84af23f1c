"""Elastic: which Job goes on with the nodes that are left, and what a run does about a loss.

Two questions, both pure. `Replanner.job_on`: the best Job on so many nodes whose numbers stay those
of the run (`_kept`). `ways_on`: which way on ends the run soonest, by measured seconds where there
are some; `elastic.planned` makes a decision about nodes with names of it.

How `ways_on` reckons. With n nodes S steps are left, of T(n) seconds each: the measured step, times
the ratio of both layouts' predictions (of ranks, where nothing can be predicted). A node that is
away comes back at a moment that is exponential, with mean r: the seconds that nodes were away so
far, and one stated prior, over returns. If it comes back before n nodes are done, the rest is done
by all. So with L = S T(n) the mean of the time is r p + S T(all) (1 - r p / L) + g p, where p = 1 -
e^(-L/r) and g is what the new generation costs.

What it is not: an election or a protocol (the room `elastic`), nor the cost of failures over a
whole run (`plan.goodput`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock, Thread
from typing import Literal

from paceline.config.comm import DpComm, FsdpComm
from paceline.config.errors import InputError
from paceline.config.feasible import check_layout
from paceline.config.hardware import Cluster
from paceline.config.job import Job, JobOnCluster, JobSpec
from paceline.config.layout import Layout, LayoutSpec
from paceline.plan.comm import resolve_comm
from paceline.plan.families import family_of
from paceline.plan.points import Setting
from paceline.plan.prediction import Prediction
from paceline.plan.resolve import divisors
from paceline.plan.scale import HOUR_S, NODE_RETURN_HOURS, RESTART_S
from paceline.plan.search.choose import unsearchable
from paceline.plan.search.search import search
from paceline.plan.search.simple import AS_GOOD
from paceline.plan.search.space import SearchConstraints
from paceline.render.figures import duration_text, plural

Action = Literal["replace", "spare", "shrink", "wait", "stop", "grow"]

# Axes whose sums are the same in every layout under elastic.exact, and what goes with each.
_DATA_AXES = ("dp", "fsdp", "zero")
# Workers of local updates stay what they are: there are more or fewer of them.
_WORKERS = ("dp",)
_PIPELINE = ("pp", "schedule", "stages_per_rank", "split")
# What saves memory and computes the same.
_RECOMPUTE = ("recompute",)
# Axes that change the order of sums: they stay under elastic.exact.
_INEXACT = ("tp", "sequence_parallel", "cp", "ulysses", "ep")
# Numbers of devices that are tried where layouts are searched, the most first.
_MOST_SEARCHES = 4

GO_ON_S: Mapping[Action, float] = {"replace": 3.0, "spare": 3.0, "shrink": 3.0, "grow": 5.0}
"""Seconds from a decision to the next finished step, as long as none was measured. Assumed."""

STEP_S = 1.0
"""Seconds of a step that was neither measured nor predicted, as under a leader that has just begun.
Assumed."""


# ---- the Job for so many nodes -------------------------------------------------------------------


@dataclass(frozen=True)
class _Answer:
    job: Job
    step_s: float | None
    """Predicted; None: nobody knows."""


class Replanner:
    """The best Job for any number of nodes, each worked out once.

    Args:
        asked: as the person wrote it: what was "auto" there may change.
        job: the run's first one, on all nodes: what could change bits stays as it is there.
        devices_per_node: of those that are left, the least where they differ; None: the Job's.
    """

    def __init__(self, asked: JobSpec, job: Job, devices_per_node: int | None = None) -> None:
        self._asked, self._job = asked, job
        self._is_local = job.comm.local.method != "none"
        self._data_axes = _WORKERS if self._is_local else _DATA_AXES
        self._devices = devices_per_node or job.cluster.devices_per_node
        self._known: dict[int, _Answer | None] = {}
        self._lock = Lock()

    @property
    def most_nodes(self) -> int:
        """That train at a time."""
        return self._job.elastic.max_nodes or self._job.cluster.num_nodes

    @property
    def least_nodes(self) -> int:
        """Below which nothing trains."""
        return max(1, self._job.elastic.min_nodes)

    @property
    def wait_s(self) -> float:
        """How long the run may wait for nodes."""
        return self._job.elastic.wait_s

    def job_on(self, num_nodes: int) -> Job | None:
        """The best Job on so many nodes; its `cluster.num_nodes` says how many of them it uses.

        Args:
            num_nodes: those that are there; more than `most_nodes` are not used. Fewer than
                `least_nodes` have a Job too, which can save what they hold.

        Returns:
            None: the model doesn't fit on them, or no layout of it shares out the batch.
        """
        found = self._answer(num_nodes)
        return None if found is None else found.job

    def slower(self, num_nodes: int, than: int) -> float:
        """Seconds of a step on so many nodes over those on others, where both have a Job.

        Of predictions; of ranks where one can't be made: work is shared out evenly.
        """
        one, other = self._answer(num_nodes), self._answer(than)
        assert one is not None
        assert other is not None
        if one.step_s is not None and other.step_s is not None:
            return one.step_s / other.step_s
        return other.job.layout.num_ranks / one.job.layout.num_ranks

    def predicted_s(self, num_nodes: int) -> float | None:
        """Predicted seconds of a step on so many nodes; None: nobody knows."""
        found = self._answer(num_nodes)
        return None if found is None else found.step_s

    def prepare(self, *num_nodes: int) -> Thread:
        """Work out Jobs on these numbers of nodes beside the caller, who needn't wait."""

        def work() -> None:
            for each in num_nodes:
                self._answer(each)

        thread = Thread(target=work, name="replanner", daemon=True)
        thread.start()
        return thread

    def _answer(self, num_nodes: int) -> _Answer | None:
        nodes = min(num_nodes, self.most_nodes)
        with self._lock:
            if nodes not in self._known:
                self._known[nodes] = self._found(nodes, self._devices)
            return self._known[nodes]

    def _found(self, num_nodes: int, devices: int) -> _Answer | None:
        """Data axes change first; others, where they were left open, if some devices are idle then;
        and what is recomputed, if nothing fits otherwise."""
        first = self._job
        if num_nodes < 1:
            return None
        if (num_nodes, devices) == (first.cluster.num_nodes, first.cluster.devices_per_node):
            return _Answer(first, _step_s_of(first))
        data = self._best(num_nodes, devices, self._data_axes)
        if data is not None and data.job.layout.num_ranks == num_nodes * devices:
            return data
        others = self._others
        other = self._best(num_nodes, devices, (*self._data_axes, *others)) if others else None
        if data is not None and other is not None:
            is_faster = (other.step_s or math.inf) * (1 + AS_GOOD) < (data.step_s or math.inf)
            return other if is_faster else data
        if data or other or not self._is_searched:
            return data or other
        return self._best(num_nodes, devices, (*self._data_axes, *others, *_RECOMPUTE))

    @property
    def _is_searched(self) -> bool:
        return self._job.model.knows_layers and unsearchable(self._job) is None

    @property
    def _others(self) -> tuple[str, ...]:
        """What may change besides data axes where it was left open: by a search only."""
        names = _PIPELINE if self._job.elastic.exact else (*_PIPELINE, *_INEXACT)
        left_open = [name for name in names if getattr(self._asked.layout, name) == "auto"]
        return tuple(left_open) if self._is_searched and not self._is_local else ()

    @cached_property
    def _is_bounded(self) -> bool:
        """Whether memory may be predicted: not where the first Job, which runs, would not fit."""
        found = _predicted(self._job)
        return found is None or found.fits(self._job.cluster.device) is not False

    def _best(self, num_nodes: int, devices: int, free: tuple[str, ...]) -> _Answer | None:
        """The best Job with these settings free, on as many of the devices as it can use."""
        first, num_searches = self._job, 0
        layout_left = LayoutSpec.parse(_kept(self._asked, first, free))
        for cluster in _clusters(first, num_nodes, devices, free):
            here = JobOnCluster.parse({**vars(first), "cluster": cluster, "layout": layout_left})
            try:
                if first.model.knows_layers and unsearchable(here) is None:
                    num_searches += 1
                    layout = _searched(here, self._is_bounded)
                else:
                    layout = _ruled(first, cluster)
                if layout is not None:
                    job = _concrete(self._asked, first, cluster, layout)
                    found = _predicted(job)
                    fits = found is None or found.fits(cluster.device) is not False
                    if fits or not self._is_bounded:
                        return _Answer(job, None if found is None else found.step_s)
            except InputError:  # it can't run, or exchange what it must, on so many
                pass
            if num_searches == _MOST_SEARCHES:
                break
        return None


def job_on(
    asked: JobSpec, job: Job, num_nodes: int, devices_per_node: int | None = None
) -> Job | None:
    """See `Replanner.job_on`, for one answer, and None below `elastic.min_nodes`."""
    replanner = Replanner(asked, job, devices_per_node)
    return replanner.job_on(num_nodes) if num_nodes >= replanner.least_nodes else None


def _clusters(first: Job, num_nodes: int, devices: int, free: tuple[str, ...]) -> Iterator[Cluster]:
    """Clusters of nodes with equally many devices, those with most devices first.

    Each divides the micro-batches of a step over its data ranks, where all other axes are known.
    """
    is_known = set(free) <= set(_DATA_AXES)
    for ranks in range(num_nodes * devices, 0, -1):
        nodes = -(-ranks // devices)
        if ranks % nodes or (is_known and not _shares_out(first, ranks)):
            continue
        tiers = first.cluster.tiers
        if tiers and tiers[-1].num_devices < ranks:
            tiers = (*tiers[:-1], tiers[-1].replace(num_devices=ranks))
        yield first.cluster.replace(num_nodes=nodes, devices_per_node=ranks // nodes, tiers=tiers)


def _shares_out(first: Job, ranks: int) -> bool:
    """Whether replicas of the other axes, or whole workers, take all of these ranks, and each as
    many samples."""
    of_a_replica = first.layout.num_ranks // first.layout.num_data_ranks
    unit = of_a_replica if first.comm.local.method == "none" else first.step_layout.num_ranks
    micro_batches = first.train.global_batch // first.layout.micro_batch
    return ranks % unit == 0 and micro_batches % (ranks // of_a_replica) == 0


def most_replicas(job: JobOnCluster, layout: Layout, num_devices: int) -> int:
    """Data ranks of a layout that so many devices have room for and that share out the batch
    evenly, no more than it has, and of local updates whole workers; 0: not one.
    """
    room = num_devices * layout.num_data_ranks // layout.num_ranks
    most = min(room, layout.num_data_ranks)
    unit = 1 if job.comm.local.method == "none" else layout.fsdp
    shared = divisors(job.train.global_batch // layout.micro_batch)
    return max((n for n in shared if n <= most and n % unit == 0), default=0)


def _kept(asked: JobSpec, first: Job, free: tuple[str, ...]) -> dict[str, object]:
    """Settings of the first layout, "auto" where they may change.

    Data axes may even where a person fixed them, for nodes are gone. Where gradients or weights
    are rounded on one of them, an unused one stays unused: it would round others.
    """
    kept: dict[str, object] = dict(vars(first.layout))
    for name in free:
        if name in ("dp", "fsdp") or getattr(asked.layout, name) == "auto":
            kept[name] = "auto"
    if kept["recompute"] == "auto":
        kept["recompute_layers"] = asked.layout.recompute_layers
    fsdp = first.comm.fsdp
    is_lossy = {first.comm.dp.compress, fsdp.compress, fsdp.compress_weights} != {"none"}
    if is_lossy:
        kept |= {axis: 1 for axis in ("dp", "fsdp") if getattr(first.layout, axis) == 1}
    if kept["fsdp"] == 1:
        kept["zero"] = 0
    return kept


def _searched(here: JobOnCluster, bounded: bool) -> Layout | None:
    found = search(Setting.of(here), SearchConstraints(layout=here.layout), bounded=bounded)
    return found.ranked[0].layout if found.ranked else None


def _ruled(first: Job, cluster: Cluster) -> Layout:
    """Without a search: shards no fewer than they were, for what is on a rank must fit; the rest
    replicas. Workers of local updates stay what they are."""
    before = first.layout
    if first.comm.local.method != "none":
        return before.replace(dp=cluster.num_devices // first.step_layout.num_ranks)
    data_ranks = cluster.num_devices // (before.num_ranks // before.num_data_ranks)
    fsdp = 1
    if before.fsdp > 1:
        enough = [ways for ways in divisors(data_ranks) if ways >= before.fsdp]
        fsdp = enough[0] if enough else data_ranks
    zero = before.zero if fsdp > 1 else 0
    return before.replace(dp=data_ranks // fsdp, fsdp=fsdp, zero=zero)


def _concrete(asked: JobSpec, first: Job, cluster: Cluster, layout: Layout) -> Job:
    """The Job with a layout.

    Raises:
        InputError: it can't run.
    """
    train = first.train
    check_layout(layout, first.model, cluster, train.seq_len, train.global_batch)
    dp, fsdp = DpComm(), FsdpComm()
    if layout.dp > 1:
        dp = first.comm.dp.replace(algorithm=asked.comm.dp.algorithm)
    if layout.fsdp > 1:
        fsdp = first.comm.fsdp.replace(algorithm=asked.comm.fsdp.algorithm)
    wanted = first.replace(comm=first.comm.replace(dp=dp, fsdp=fsdp).settled)
    comm, _ = resolve_comm(wanted, layout, cluster)
    return first.replace(cluster=cluster, layout=layout, comm=comm)


def _predicted(job: Job) -> Prediction | None:
    """What is predicted of a Job; None: nobody knows."""
    try:
        return family_of(job.model).predict(job.model, job)
    except InputError:  # it can run, but isn't priced
        return None


def _step_s_of(job: Job) -> float | None:
    found = _predicted(job)
    return None if found is None else found.step_s


# ---- what to do about a loss or a return ---------------------------------------------------------


@dataclass(frozen=True)
class Remaining:
    """What is left of a run when a generation has ended, or a node asks to come in."""

    active: int
    """Nodes that trained in the last generation."""
    lost: int
    """Of these, those with a lost process."""
    steps_left: int
    step_s: float | None
    """Measured seconds of a step of the last generation; None: nobody did."""
    restartable: int = 0
    """Of the lost, those whose agent lives: their ranks can be started again."""
    spares: int = 0
    """Nodes that wait and could train, newcomers among them."""
    waited_s: float = 0.0
    """Seconds since the loss."""
    go_on_s: Mapping[Action, float] = field(default_factory=dict)
    """By action: measured seconds from a decision to the next finished step."""
    away_s: float = 0.0
    """Seconds that nodes of this run were away, those that still are included."""
    returns: int = 0
    """How many of them came back."""
    assumed_return_s: float = NODE_RETURN_HOURS.value * HOUR_S
    """Mean seconds until one is back, before any was."""

    @property
    def there(self) -> int:
        """Nodes that could train now."""
        return self.active - self.lost + self.restartable + self.spares

    @property
    def return_s(self) -> float:
        """Mean seconds until a lost node is back: what was seen, and one return as assumed."""
        return (self.assumed_return_s + self.away_s) / (1 + self.returns)

    def cost_s(self, action: Action) -> float:
        """Seconds from a decision to the next finished step."""
        return self.go_on_s.get(action, GO_ON_S.get(action, 0.0))


@dataclass(frozen=True)
class WayOn:
    """One thing that a run can do now."""

    action: Action
    """"replace" with nobody lost: the same nodes go on, and newcomers stay spares."""
    nodes: int
    """That train next; with "wait", when the wait is over."""
    job: Job | None
    """What they run; None: nothing is started."""
    expected_s: float
    """Mean seconds to the end of the run."""
    reason: str


def ways_on(now: Remaining, replanner: Replanner) -> tuple[WayOn, ...]:
    """What can be done within the person's bounds, what ends the run soonest first.

    Args:
        now: what is known.
        replanner: of this run.
    """
    return tuple(sorted(_ways(now, replanner), key=lambda each: each.expected_s))


def _ways(now: Remaining, replanner: Replanner) -> Iterator[WayOn]:
    """What can be done, each with its expected time."""
    there = min(now.there, replanner.most_nodes)
    job = replanner.job_on(there) if there >= replanner.least_nodes else None
    if now.lost and there >= now.active:
        yield from _as_before(now, replanner)
    # A node that doesn't speed it up isn't worth a new generation.
    before_s, step_s = (_step_s(now, replanner, nodes) for nodes in (now.active, there))
    grows = there > now.active and step_s < before_s
    if job is not None and (there < now.active or grows):
        action: Action = "grow" if grows else "shrink"
        expected = now.cost_s(action) + _with_returns(now, replanner, there)
        used = plural(job.cluster.num_nodes, "node")
        reason = f"{used} can run {job.layout.summary}"
        yield WayOn(action, job.cluster.num_nodes, job, expected, reason)
    if now.lost:
        yield from _without_training(now, replanner, there, job)
    else:
        expected = _with_returns(now, replanner, now.active)
        yield WayOn("replace", now.active, replanner.job_on(now.active), expected, "nobody is lost")


def _as_before(now: Remaining, replanner: Replanner) -> Iterator[WayOn]:
    """The same layout, with ranks started again where they were or on spares."""
    job = replanner.job_on(now.active)
    if job is None:  # other nodes have fewer devices
        return
    expected, needed = _with_returns(now, replanner, now.active), now.lost - now.restartable
    if needed == 0:
        why = "lost ranks can be started again where they were"
        yield WayOn("replace", now.active, job, now.cost_s("replace") + expected, why)
    if now.spares >= max(1, needed):
        why = f"{plural(max(1, needed), 'spare')} can step in"
        yield WayOn("spare", now.active, job, now.cost_s("spare") + expected, why)


def _without_training(
    now: Remaining, replanner: Replanner, there: int, job: Job | None
) -> Iterator[WayOn]:
    """Wait for a return until the deadline; or end, and be started again when nodes are back."""
    most, mean_s = _most_with_job(now, replanner), now.return_s
    whole_s = now.steps_left * _step_s(now, replanner, most)
    stop_s = mean_s + RESTART_S.value + whole_s
    left_s = replanner.wait_s - now.waited_s
    if left_s > 0:
        # What follows where nobody came back in time.
        then_s = stop_s
        if job is not None:
            then_s = now.cost_s("shrink") + _with_returns(now, replanner, there)
        back = -math.expm1(-left_s / mean_s)
        wait_s = mean_s * back + back * (now.cost_s("grow") + whole_s) + (1 - back) * then_s
        why = f"a lost node is back after {duration_text(mean_s)} on average"
        why += f", and the run may wait {duration_text(left_s)}"
        yield WayOn("wait", there, None, wait_s, why)
    lacks = f"{plural(there, 'node')} can't train"
    least = replanner.least_nodes
    if there < least:
        lacks = f"{plural(there, 'node')} left, and elastic.min_nodes = {least}"
    elif job is not None:
        lacks = "a later start has all nodes"
    yield WayOn("stop", 0, None, stop_s, lacks)


def _most_with_job(now: Remaining, replanner: Replanner) -> int:
    """Nodes that will train when all are back."""
    most = replanner.most_nodes
    return most if replanner.job_on(most) is not None else now.active


def _step_s(now: Remaining, replanner: Replanner, nodes: int) -> float:
    """Seconds of a step on so many nodes, from what was measured on those before."""
    before_s = now.step_s or replanner.predicted_s(now.active) or STEP_S
    if None in (replanner.job_on(now.active), replanner.job_on(nodes)):
        return before_s
    return before_s * replanner.slower(nodes, now.active)


def _with_returns(now: Remaining, replanner: Replanner, nodes: int) -> float:
    """Mean seconds of the steps that are left, which begin on so many nodes (module's text)."""
    alone_s = now.steps_left * _step_s(now, replanner, nodes)
    most, mean_s = _most_with_job(now, replanner), now.return_s
    if nodes >= most or not alone_s:
        return alone_s
    whole_s = now.steps_left * _step_s(now, replanner, most)
    back = -math.expm1(-alone_s / mean_s)
    done = mean_s * back / alone_s  # the share of the steps before a return, in the mean
    grown_s = mean_s * back + whole_s * (1 - done) + now.cost_s("grow") * back
    return min(alone_s, grown_s)
