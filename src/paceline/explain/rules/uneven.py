"""Rules about ranks that don't take equally long: a slow one, uneven lengths, uneven experts.

Ranks wait for the slowest in every step. A slow rank is the slowest in most of them. Samples of
uneven lengths make now this rank the slowest, now that one. Uneven experts lengthen products but
not the optimizer, whose parameters are as many everywhere. A loader or a collector of garbage has a
term of its own, and is subtracted before a rank is called slow.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.explain.changes import runnable_changes
from paceline.explain.finding import Evidence, Finding
from paceline.explain.profiled_steps import WAITING
from paceline.explain.rules.busy import busy_s, ranks_of
from paceline.explain.rules.pipeline import rank_work
from paceline.explain.subject import Subject
from paceline.observe.rank_spread import mean_figure, slowest_rank
from paceline.observe.terms import TERMS
from paceline.render.figures import time_text

Array = npt.NDArray[Any]

_SAMPLES = ("matmul", "attention", "recompute", "other_kernels")
# What takes equally long on all ranks, however long their samples are.
_FIXED = ("optimizer",)
# Uneven work: the most over the mean, of what depends on samples and of what doesn't.
_LEAST_EXCESS = 0.08
# A slow rank is the slowest in most steps, not by chance in some (the sign test's standard errors),
# and in the first half of the run as in the second: a part of what it usually is behind.
_MOSTLY = 0.7
_SURELY = 3.0
_ALWAYS = 0.6
# A rank's wait for a core that is worth a word, of a step.
_LEAST_WAIT = 0.02
# A rank that is the last in so many steps is the slow one, however its gain is put.
_SURE_SHARE = 0.9
# Ranks with the same work run as many kernels, but for a few.
_SAME_WORK = 0.02
_REBALANCE_EVERY = 20
# How well the work of pipeline stages is known: a rank is slow only if it lags by more.
_STAGES_ARE_KNOWN_TO, _FLOPS_ARE_KNOWN_TO = 0.1, 0.4


def straggler_rank(subject: Subject) -> Finding | None:
    """One rank takes longer than the others for its work, whatever it does."""
    if len(ranks_of(subject)) < 2 or not subject.ranks_belong_together:
        return None
    if uneven_work_s(subject) is not None or (subject.job is None and _is_split(subject, "pp")):
        return None
    lag = _lag(subject)
    if lag is None or _has_other_work(subject, lag.rank):
        return None
    term = _differing_term(subject, lag.rank)
    return Finding.of(
        subject,
        f"Rank {lag.rank} is {time_text(lag.seconds)} behind the others in each step.",
        lag.seconds,
        [
            Evidence(
                "ranks",
                f"It is at work for {time_text(lag.busy_s)} of a step, the others for "
                f"{time_text(lag.others_s)}, and is the last one in {lag.share:.0%} of the "
                "steps.",
            ),
            *_differing(subject, lag.rank, term),
            *_told_by_clock(subject, lag.rank),
            *_without_core(subject, lag.rank),
        ],
        advice=_to_look_at(lag.rank, term),
        basis="measured" if lag.share > _SURE_SHARE else "predicted",
    )


def length_imbalance(subject: Subject) -> Finding | None:
    """Samples of different lengths: some rank has more to compute in a step than the others."""
    seconds = uneven_work_s(subject)
    if seconds is None or _is_split(subject, "ep") or not subject.ranks_belong_together:
        return None
    return Finding.of(
        subject,
        f"In each step the rank with most to compute takes {time_text(seconds)} longer than "
        "the mean.",
        seconds,
        _uneven_evidence(subject),
        advice="Pack samples to equal lengths, or share them out by their tokens: sort a global "
        "batch by length and deal it out to the ranks in turn.",
    )


def expert_imbalance(subject: Subject) -> Finding | None:
    """Tokens prefer some experts: the rank that holds them computes while the others wait."""
    seconds = uneven_work_s(subject)
    if seconds is None or not _is_split(subject, "ep") or not subject.ranks_belong_together:
        return None
    job = subject.job
    rebalances = job is not None and job.layout.rebalance_every > 0
    return Finding.of(
        subject,
        f"The rank with the busiest experts computes {time_text(seconds)} longer than the mean.",
        seconds,
        _uneven_evidence(subject),
        changes=()
        if rebalances
        else runnable_changes(job, f"layout.rebalance_every={_REBALANCE_EVERY}"),
        advice="Raise the balance loss, let biases of the choice follow the load, or move experts "
        "between ranks.",
        with_job="The biases are model.experts.bias_update_speed.",
    )


class _Lag(NamedTuple):
    rank: int
    seconds: float
    busy_s: float
    others_s: float
    share: float
    """Part of the steps in which it was the last."""


def _lag(subject: Subject) -> _Lag | None:
    """The slowest rank, and by how much, beyond what has a name of its own."""
    ranks = ranks_of(subject)
    shares, is_sure = _work_shares(subject, len(ranks))
    own_s = (busy_s(subject) - _explained_s(subject)) / shares
    mean_s = np.median(own_s, axis=0)
    slowest = int(mean_s.argmax())
    others_s = np.delete(own_s, slowest, axis=1)
    behind_s = own_s[:, slowest] - others_s.max(axis=1)
    if not _is_lasting(behind_s):
        return None
    usual_s = float(np.median(np.delete(mean_s, slowest)))
    doubt = _STAGES_ARE_KNOWN_TO if is_sure else _FLOPS_ARE_KNOWN_TO
    if shares.max() > shares.min() and float(mean_s[slowest]) < (1 + doubt) * usual_s:
        return None
    seconds = min(_gain_of_equals_s(own_s, others_s), _held_up_s(subject, ranks[slowest]))
    share = float(np.mean(behind_s > 0))
    return _Lag(ranks[slowest], seconds, float(mean_s[slowest]), usual_s, share)


def _is_lasting(behind_s: Array) -> bool:
    """Whether a rank is always behind, by what it is behind in each step."""
    number, share = len(behind_s), float(np.mean(behind_s > 0))
    if share < _MOSTLY or (share < 1 and (2 * share - 1) * number**0.5 < _SURELY):
        return False
    halves = [np.median(half) for half in np.array_split(behind_s, 2) if len(half)]
    return bool(min(halves) >= _ALWAYS * np.median(behind_s))


def _gain_of_equals_s(own_s: Array, others_s: Array) -> float:
    """What a step would be shorter if its slowest rank were as the others are.

    All ranks vary, and the step waits for the most. In place of the slow one stands what the others
    take in the step before, as far as ranks vary each for itself. What they have in common, by
    their correlation, doesn't make one wait for another.
    """
    usual_s, slow_s = np.median(others_s, axis=1), own_s.max(axis=1)
    varies = usual_s.std() > 0 and slow_s.std() > 0
    alike = max(0.0, float(np.corrcoef(usual_s, slow_s)[0, 1])) if varies else 0.0
    like_others_s = usual_s + (1 - alike) ** 0.5 * (np.roll(usual_s, 1) - usual_s)
    then_s = np.maximum(others_s.max(axis=1), like_others_s)
    return float(np.median(slow_s - then_s))


def _held_up_s(subject: Subject, rank: int) -> float:
    """What the other ranks wait in a step: no more can be gained by mending one."""
    if subject.account is None or rank not in subject.measured.ranks:
        return float("inf")
    waits_s = subject.measured.term_s(*WAITING).mean(axis=0)
    return float(np.delete(waits_s, subject.measured.ranks.index(rank)).max(initial=0.0))


def _explained_s(subject: Subject) -> Array:
    """(ranks,), what of a rank's time has a rule of its own."""
    if subject.account is None or subject.measured.ranks != ranks_of(subject):
        return np.zeros(len(ranks_of(subject)))
    measured, names = subject.measured, subject.account.names
    gaps = subject.account.gaps
    collected = gaps[["paceline.gc" in names[name] for name in gaps["name"]]]
    stalls = measured.term_s("data_wait", "checkpoint_stall") + measured.sum_s(collected)
    return stalls.mean(axis=0)


def _work_shares(subject: Subject, num_ranks: int) -> tuple[Array, bool]:
    """(ranks,), how much there is to do on each rank, 1 on average, for stages of a pipeline
    differ; and whether the planner says so."""
    job = subject.job
    if job is None or job.layout.pp == 1 or job.layout.num_ranks != num_ranks:
        return np.ones(num_ranks), True
    work, is_sure = rank_work(job)
    of_rank = np.array([work[job.layout.place(rank).pp] for rank in range(num_ranks)])
    return of_rank / of_rank.mean(), is_sure


def uneven_work_s(subject: Subject) -> float | None:
    """Seconds by which the rank with most to compute exceeds the mean; None where work is even,
    or it is always the same rank, without experts: then that one is slow."""
    if len(ranks_of(subject)) < 2 or _is_split(subject, "pp"):
        return None
    own_s = busy_s(subject) - _explained_s(subject)
    if _excess(own_s) < _LEAST_EXCESS or not _is_work(subject):
        return None
    if not _is_split(subject, "ep") and _is_always_one(own_s):
        return None
    return float((own_s.max(axis=1) - own_s.mean(axis=1)).mean())


def _is_always_one(own_s: Array) -> bool:
    """Whether the same rank is the slowest in most steps."""
    slowest = own_s.argmax(axis=1)
    return float(np.bincount(slowest).max() / len(slowest)) >= _MOSTLY


def _is_work(subject: Subject) -> bool:
    """Whether ranks differ in what depends on samples, and less in what doesn't."""
    if subject.account is None:
        return False
    if _is_split(subject, "ep") and (exchanged := _expert_bytes(subject)).any():
        return _excess(exchanged) >= _LEAST_EXCESS
    work = _excess(subject.measured.term_s(*_SAMPLES))
    fixed = 0.0 if _is_split(subject, "ep") else _excess(subject.measured.term_s(*_FIXED))
    return work >= _LEAST_EXCESS and work > 2 * fixed


def _expert_bytes(subject: Subject) -> Array:
    """(steps, ranks), the largest exchange of tokens: of what a rank got, or sent back."""
    traffic, measured = subject.traffic, subject.measured
    rows = traffic.rows[traffic.is_axis("ep")]
    table = np.zeros(measured.rows.shape)
    for at in np.ndindex(table.shape):
        step = measured.account.steps[measured.rows[at]]
        mine = (rows["rank"] == step["rank"]) & (rows["step"] == step["step"])
        table[at] = rows["bytes"][mine].max(initial=0)
    return table


def _excess(seconds: Array) -> float:
    """The most of the ranks over their mean, less 1; mean over steps."""
    mean = seconds.mean(axis=1)
    known = mean > 0
    return float((seconds.max(axis=1)[known] / mean[known]).mean() - 1) if known.any() else 0.0


def _uneven_evidence(subject: Subject) -> list[Evidence]:
    work_s = subject.measured.term_s(*_SAMPLES)
    fixed = _excess(subject.measured.term_s(*_FIXED))
    sentence = (
        f"Computing on samples takes up to {_excess(work_s):.0%} longer than on the mean rank, the "
        f"optimizer, which has equally much to do everywhere, {fixed:.0%}."
    )
    return [Evidence("ranks", sentence)]


class _More(NamedTuple):
    """A term of which one rank has more than the others."""

    name: str
    seconds: float


def _differing_term(subject: Subject, rank: int) -> _More | None:
    """In which term a rank exceeds the others most; None where its steps were not recorded."""
    if subject.account is None or rank not in subject.measured.ranks:
        return None
    at = subject.measured.ranks.index(rank)
    own = [term for term in TERMS if not term.startswith(WAITING)]
    more = []
    for term in own:
        seconds = subject.measured.term_s(term).mean(axis=0)
        more.append(_More(term, float(seconds[at] - np.median(np.delete(seconds, at)))))
    worst = max(more, key=lambda each: each.seconds)
    return worst if worst.seconds > 0 else None


def _differing(subject: Subject, rank: int, term: _More | None) -> list[Evidence]:
    """What the rank's own trace says of it: which term is longer, and for as many kernels."""
    if term is None or subject.account is None:
        return []
    sentence = f"Most of it is {term.name}: {time_text(term.seconds)} more than the others."
    counts = _kernels_of_ranks(subject)
    if term.name in _SAMPLES and counts is not None:
        at = subject.measured.ranks.index(rank)
        usual = float(np.median(np.delete(counts, at)))
        sentence += f" It runs {counts[at]:.0f} kernels a step, the others {usual:.0f}."
        return [Evidence(subject.worker, sentence)]
    # Of time that its host lost in some way, nothing but the comparison says that it is a fault.
    return [Evidence("ranks", sentence)]


def _told_by_clock(subject: Subject, rank: int) -> list[Evidence]:
    """That the Run's own clock finds the same rank late in the steps that nobody recorded."""
    figure = mean_figure(subject.steady, "busy_s")
    late = slowest_rank(figure)
    if subject.account is None or late is None or late[0] != rank or late[1] <= 0:
        return []
    sentence = f"By the run's own clock it is {time_text(late[1])} late in the mean step."
    return [Evidence("clock", sentence)]


def _to_look_at(rank: int, term: _More | None) -> str:
    """What to look at, by what the rank takes longer for."""
    if term is None or term.name in (*_SAMPLES, *_FIXED):
        return (
            f"Look at the machine of rank {rank}: other processes, clocks and temperature, a "
            "failing device or link; take it out of the job if it stays slow."
        )
    return (
        f"Look at what rank {rank} does beside the step: its loader and disk, logging, other "
        "processes on its cores."
    )


def _kernels_of_ranks(subject: Subject) -> Array | None:
    """(ranks,), kernels of a step; None where none were recorded."""
    assert subject.account is not None
    kernels = subject.account.kernels
    counts = [
        kernels["count"][kernels["rank"] == rank].sum()
        / np.count_nonzero(subject.account.steps["rank"] == rank)
        for rank in subject.measured.ranks
    ]
    return np.array(counts) if all(counts) else None


def _has_other_work(subject: Subject, rank: int) -> bool:
    """Whether a rank of a foreign trace was given more or less to do than the others: by how many
    kernels it runs. Of a Run it is known."""
    if subject.account is None or subject.job is not None:
        return False
    counts = _kernels_of_ranks(subject)
    if counts is None:
        return False
    at = subject.measured.ranks.index(rank)
    usual = float(np.median(np.delete(counts, at)))
    return abs(float(counts[at]) / usual - 1) > _SAME_WORK


def _without_core(subject: Subject, rank: int) -> list[Evidence]:
    """By how much longer than the others a rank was without a core, where that is told of each."""
    waits = mean_figure(subject.steady, "core_wait_s")
    if not isinstance(waits, list) or rank >= len(waits):
        return []
    more_s = waits[rank] - float(np.median(np.delete(waits, rank)))
    if more_s < _LEAST_WAIT * subject.step_s:
        return []
    sentence = f"It was ready and had no core for {time_text(more_s)} more than the others."
    return [Evidence("machine", sentence)]


def _is_split(subject: Subject, axis: str) -> bool:
    """Whether ranks hold different stages ("pp") or experts ("ep")."""
    if subject.job is not None:
        return getattr(subject.job.layout, axis) > 1
    return bool(subject.traffic.is_axis(axis).any())
