"""Tune: NCCL's settings, each tried in ranks of its own, since NCCL reads them once a process.

All-reduces of a few sizes are timed with each of `bench.network.nccl.CANDIDATES`;
`bench.network.nccl.recommend` says what pays. No step is known here, so each size counts for as
much time as the others, as NCCL itself would take it.
"""

from collections.abc import Sequence
from functools import partial

from paceline.bench.collectives import group_of_all
from paceline.bench.network.bandwidth import BandwidthRow
from paceline.bench.network.measure import NetworkRequest
from paceline.bench.network.nccl import CANDIDATES, NcclAdvice, NcclTrial, Settings, recommend
from paceline.bench.network.sizes import Bounds
from paceline.bench.network.sweep import PlannedCurve, sweep
from paceline.bench.rank_pool import RankProgress, TellProgress, run_on_ranks
from paceline.comm.rendezvous import Ranks

SIZES = tuple(2**power for power in (16, 20, 24, 28))
"""64 KiB to 256 MiB: from a norm to a bucket of gradients."""


def tune(
    num_ranks: int, device_type: str, request: NetworkRequest, hear: TellProgress
) -> NcclAdvice:
    """Try all candidates on the ranks of this machine and recommend one, or none.

    Args:
        num_ranks: at least 2, started anew for each candidate.
        device_type: of the ranks.
        wish: sizes, time and backend.
        hear: called after each candidate.

    Raises:
        RunError: a rank failed, or a result was wrong, with one of them.
    """
    trials: list[NcclTrial] = []
    for done, settings in enumerate(CANDIDATES, start=1):
        work = partial(_measured, request)
        rows: list[BandwidthRow] = run_on_ranks(
            num_ranks, device_type, work, lambda _news: None, dict(settings)
        )
        trials += [_trial(settings, row) for row in rows]
        told = " ".join(f"{name}={value}" for name, value in settings) or "its own choice"
        hear(RankProgress("nccl", done, len(CANDIDATES), told))
    return recommend(trials, calls_of(trials))


def calls_of(trials: Sequence[NcclTrial]) -> dict[tuple[str, int], float]:
    """So many calls of each size that all take as long with NCCL's own choice: a second."""
    return {(each.op, each.num_bytes): 1 / each.seconds for each in trials if not each.settings}


def _measured(request: NetworkRequest, ranks: Ranks, _tell: TellProgress) -> list[BandwidthRow]:
    group = group_of_all(ranks, request.backend)
    bounds = Bounds(request.sizes, request.budget_s, float("inf"))
    curves = [PlannedCurve("all_reduce", "backend", group)]
    return sweep(request.clock(ranks), curves, bounds, lambda _what: None)[0]


def _trial(settings: Settings, row: BandwidthRow) -> NcclTrial:
    spread = (row.high_s - row.low_s) / 2 / row.seconds
    return NcclTrial(settings, row.op, row.num_bytes, row.seconds, spread)
