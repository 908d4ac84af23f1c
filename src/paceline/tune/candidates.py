"""Candidates: Jobs that might be faster, from the planner, from findings, and next to the best.

The planner ranks all layouts, a few of each mesh, with one size of buckets; its choice of buckets
and compression (`plan.search.gradient_comm`) belongs to each. Neighbours of the best differ in one
setting: they find what the ranking left out, and what the planner prices wrongly. Findings name
the setting that would mend what was seen in a profile.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from paceline.config.errors import InputError
from paceline.config.feasible import check_layout
from paceline.config.feasible_comm import check_comm
from paceline.config.job import Job, JobOnCluster, change_job
from paceline.config.layout import RECOMPUTE, Layout
from paceline.config.schedule import DEMANDS
from paceline.explain.finding import Finding
from paceline.plan.answer.find import answer
from paceline.plan.comm import resolve_comm
from paceline.plan.families import family_of
from paceline.plan.points import Setting, decoder_of
from paceline.plan.prediction import Prediction
from paceline.plan.resolve import divisors, split_of
from paceline.plan.search.gradient_comm import (
    AFTER_WARM_UP,
    BUCKETS_MIB,
    FORMS,
    LEAST_STEPS,
    WARM_UP_STEPS,
    ChosenComm,
    choose_exchange,
)
from paceline.plan.search.search import memory_limit, search
from paceline.plan.search.space import SearchConstraints
from paceline.tune.settings import Freedom, change_texts, differences
from paceline.tune.trial import Candidate, TuningState

# Of a parameter, its gradient and AdamW's two moments.
_STATE_BYTES = 16.0
_RANKED = 24
"""Layouts of the planner's ranking that are candidates."""
# How far a finding's gain is usually off, as a standard deviation of the step's logarithm. Assumed;
# benchmarks/diagnosis measures it.
_DEVIATIONS = {"high": 0.03, "medium": 0.06, "low": 0.12}


@dataclass(frozen=True)
class Question:
    """What is tuned."""

    given: Job
    freedom: Freedom
    typical_s: float = 1.0
    """Seconds of a step that are expected where the planner doesn't know the Job's."""

    @property
    def freed(self) -> JobOnCluster:
        """With "auto" wherever tune may choose."""
        return self.freedom.freed(self.given)

    def allows(self, job: Job) -> bool:
        """Whether the Job differs from the given one in nothing that is kept."""
        return self.freedom.allows(differences(self.given, job))

    def predicted(self, job: Job, why: str) -> "Candidate":
        """See `predicted`."""
        return predicted(job, why, self.typical_s)

    @property
    def limit_bytes(self) -> float:
        """What a layout may use of a device's memory."""
        return memory_limit(self.given.cluster.device) or math.inf


def prediction_of(job: Job) -> Prediction | None:
    """What the planner says about a Job; None where it doesn't know its work."""
    with suppress(InputError):
        return family_of(job.model).predict(job.model, job)
    return None


def predicted(job: Job, why: str, typical_s: float = 1.0) -> Candidate:
    """A Job with what the planner says about it.

    Args:
        job: on a cluster whose speed is known.
        why: who proposes it.
        typical_s: seconds of a step that are expected where the planner doesn't know them. Its
            memory is then that of parameters, gradients and optimizer alone.
    """
    found = prediction_of(job)
    if found is None:
        return Candidate(job, why, typical_s, _STATE_BYTES * (job.model.num_params or 0))
    terms = found.heaviest.terms
    heaviest = max(terms, key=lambda term: terms[term])
    return Candidate(job, why, found.step_s, found.peak_memory_bytes, heaviest)


def typical_s(known: TuningState) -> float:
    """Seconds of a step that are expected of a Job that the planner doesn't know: those of the best
    so far, by the planner if it knows that one; before there is one, those of one device."""
    best = known.best
    found = prediction_of(known.given if best is None else best.job(known.given))
    if found is not None:
        return found.step_s
    if best is not None:
        return known.seconds(best)
    return 1.0 if known.reference is None else known.reference.step_s


def ranked(
    job: JobOnCluster, constraints: SearchConstraints, num: int, *, bounded: bool = True
) -> Sequence[Prediction]:
    """The planner's best layouts of a Job, the fastest first; none where it doesn't know its work.

    Args:
        job: on a cluster whose speed is known.
        constraints: what is free; its layout is the Job's.
        num: how many at most.
        bounded: whether the search may leave out what can't be among them.
    """
    if job.model.knows_layers:
        return search(Setting.of(job), constraints, num, bounded=bounded).ranked[:num]
    with suppress(InputError):  # what is freed besides is tried beside the best
        return answer(job, replace(constraints, free=())).ranked[:num]
    return ()


# ---- the planner's ranking -----------------------------------------------------------------------


def from_planner(question: Question, num: int = _RANKED) -> list[Candidate]:
    """The planner's ranking, each layout with the exchange that it chooses for it.

    That choice takes as long as the search, so it is made for the first layout of replicas; the
    others begin with the same, and neighbours of the best try the rest.
    """
    freed = question.freed
    found = ranked(freed, question.freedom.constraints(freed.layout), num)
    candidates, exchange = [], None
    for place, one in enumerate(found):
        with suppress(InputError):  # what the Job holds can't be used with this layout
            if exchange is None and freed.model.knows_layers and _has_buckets(one.layout):
                exchange = choose_exchange(freed, one.layout)
            job = _with_exchange(question, one.layout, exchange)
            if question.allows(job):
                candidates.append(question.predicted(job, f"number {place + 1} of the planner"))
    return candidates


def _with_exchange(question: Question, layout: Layout, exchange: ChosenComm | None) -> Job:
    """A Job with this layout, and the exchange where it has one."""
    given = question.given
    comm, _ = resolve_comm(question.freed, layout, given.cluster)
    # Without buckets what the Job says of them has no effect and needn't change.
    bucket_mib = given.layout.bucket_mib
    if exchange is not None and _has_buckets(layout):
        bucket_mib = exchange.layout.bucket_mib
        dp = comm.dp.replace(compress=exchange.comm.dp.compress)
        comm = comm.replace(dp=dp, warmup_steps=exchange.comm.warmup_steps)
    return checked(given.replace(layout=layout.replace(bucket_mib=bucket_mib), comm=comm.settled))


def _has_buckets(layout: Layout) -> bool:
    """Whether replicas exchange gradients in buckets, whose codecs the planner can price."""
    return layout.dp != 1 and layout.fsdp == 1 and layout.is_plain


def checked(job: Job) -> Job:
    """The Job.

    Raises:
        InputError: it can't run.
    """
    check_layout(job.layout, job.model, job.cluster, job.train.seq_len, job.train.global_batch)
    check_comm(job.comm, job.layout)
    return job


# ---- next to the best ----------------------------------------------------------------------------


def neighbours(question: Question, best: Job) -> list[Candidate]:
    """Jobs that differ from the best in one setting that is free, or what belongs to it."""
    found = []
    for changes in _moves(best):
        job = _moved(best, changes)
        if job is not None and question.allows(job):
            texts = ", ".join(change_texts(differences(best, job)))
            found.append(question.predicted(job, f"beside the best: {texts}"))
    return found


def _moved(best: Job, changes: Mapping[str, Any]) -> Job | None:
    own = {name: value for name, value in changes.items() if name != "compress"}
    layout, comm = best.layout.replace(**own), best.comm
    if "compress" in changes:
        warm_up = WARM_UP_STEPS if changes["compress"] in AFTER_WARM_UP else 0
        dp = comm.dp.replace(compress=changes["compress"])
        comm = comm.replace(dp=dp, warmup_steps=max(warm_up, comm.warmup_steps))
    with suppress(InputError):
        return checked(best.replace(layout=layout, comm=comm.settled))
    return None


def _moves(best: Job) -> Iterator[dict[str, Any]]:
    """Settings to change together, of all techniques that the best one uses or could use."""
    layout = best.layout
    for name, values in _alternatives(best):
        for value in values:
            if value != getattr(layout, name):
                yield {name: value}
    yield from _recomputes(best)
    yield from _pipelines(best)
    yield from _data_axes(best)
    if _has_buckets(layout):
        few_bits = AFTER_WARM_UP if best.train.steps >= LEAST_STEPS else ()
        forms = [form for form in (*FORMS, *few_bits) if form != best.comm.dp.compress]
        yield from ({"compress": form} for form in forms)


def _alternatives(best: Job) -> Iterator[tuple[str, Sequence[Any]]]:
    layout = best.layout
    share = best.train.global_batch // layout.num_data_ranks
    yield "micro_batch", divisors(share)
    if _has_buckets(layout):
        yield "bucket_mib", BUCKETS_MIB
    if layout.fsdp > 1:
        yield "zero", (1, 2, 3)
    if layout.tp > 1:
        yield "sequence_parallel", (False, True)
    if layout.cp > 1:
        yield "ulysses", divisors(layout.cp)
    if best.cluster.device.kind != "cpu":
        yield "compile", (False, True)
        yield "kernels", ("auto",)
    if not best.model.knows_layers:
        yield "precision", best.cluster.device.precisions


def _recomputes(best: Job) -> Iterator[dict[str, Any]]:
    layout = best.layout
    for name in RECOMPUTE if best.model.knows_layers else ("none",):
        if name != layout.recompute:
            yield {"recompute": name, "recompute_layers": "all"}
    if layout.offload:
        yield {"offload": ()}


def _data_axes(best: Job) -> Iterator[dict[str, Any]]:
    """Replicas in place of shards and the other way round, where the planner ranks no meshes."""
    layout, ranks = best.layout, best.layout.num_data_ranks
    if best.model.knows_layers or ranks == 1:
        return
    if layout.dp != ranks:
        yield {"dp": ranks, "fsdp": 1, "zero": 0}
    if layout.fsdp != ranks:
        yield {"dp": 1, "fsdp": ranks, "zero": 1}


def _pipelines(best: Job) -> Iterator[dict[str, Any]]:
    """Other schedules, and the even split."""
    layout = best.layout
    if layout.pp == 1:
        return
    model = decoder_of(best)
    for name, demand in DEMANDS.items():
        for per_rank in {demand.stages_per_rank or 2, layout.stages_per_rank}:
            stages = layout.pp * (1 if name == "dualpipe" else per_rank)
            if stages > model.num_layers:
                continue
            split = split_of(model, best.train.seq_len, stages)
            yield {"schedule": name, "stages_per_rank": per_rank, "split": split}


# ---- findings ------------------------------------------------------------------------------------


def from_findings(
    question: Question, findings: Iterable[Finding], best: Job, best_s: float
) -> list[Candidate]:
    """The best with what findings change, where tune may change it."""
    found = []
    for finding in findings:
        with suppress(InputError):  # a change that can't run with this Job
            job = checked(change_job(best, finding.changes))
            changes = differences(best, job)
            if changes and question.allows(job):
                found.append(_mended(question, job, finding, best_s))
    return found


def _mended(question: Question, job: Job, finding: Finding, best_s: float) -> Candidate:
    left_s = best_s * max(1 - finding.gain, 0.1)
    known = (math.log(left_s), _DEVIATIONS[finding.confidence])
    return replace(question.predicted(job, f"finding {finding.name}"), known=known)


def untried(
    candidates: Iterable[Candidate], tried: Iterable[Job], is_too_large: Callable[[Candidate], bool]
) -> list[Candidate]:
    """Each Job once, without those that were tried and those that can't fit."""
    seen = {_key(job) for job in tried}
    left = []
    for one in candidates:
        if _key(one.job) not in seen and not is_too_large(one):
            seen.add(_key(one.job))
            left.append(one)
    return left


def _key(job: Job) -> tuple[Any, ...]:
    return job.layout, job.comm
